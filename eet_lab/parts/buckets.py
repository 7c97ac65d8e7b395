"""Buckets of passes: few sizes, so that one that was captured serves all texts, or requests, that fit into it.

T tokens, B rows, N of the tokens asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eet_lab.memory.lifetimes import aligned
from eet_lab.ops.types import Batch, Keys
from eet_lab.parts.batches import pairs_of
from eet_lab.parts.passes import Group, Pass

PADDING_ROW = 128
"""Tokens of a padding row at most, the least that a bucket has, and what lengths are rounded up to: a block of
attention serves as many queries.
"""
QUERIES = 256
"""The least that a bucket of the most tokens of a request has."""
FEWEST_ROWS = 8
FEWEST_ASKED = 32
"""More than what kernels for few tokens take, which ask for other memory."""


class Size(NamedTuple):
    """How large a pass is: what the shapes of all that it reads follow from."""

    tokens: int
    rows: int
    longest: int
    asked: int

    @classmethod
    def of(cls, group: Group) -> Size:
        """That of a group as it is."""
        return cls(group.computed_tokens, len(group.texts), group.longest, group.num_asked)

    def bucket(self, wanted: str) -> Size:
        """The bucket that such a pass falls into, where a task wants the "first", "all" or "asked" tokens of a text.

        Tokens are rounded up to an eighth of a power of two, so at most an eighth of more than 1,024 is padding; other
        numbers to powers of two, which cost next to nothing.
        """
        tokens = rounded_up(self.tokens, PADDING_ROW, 8)
        rows = _power(self.rows + -(-(tokens - self.tokens) // PADDING_ROW), FEWEST_ROWS)
        asked = {"all": tokens, "first": max(rows, FEWEST_ASKED)}.get(wanted) or _power(self.asked, FEWEST_ASKED)
        return Size(tokens, rows, _power(self.longest, PADDING_ROW), asked)

    def joined(self, other: Size) -> Size:
        """What has room for either."""
        return Size(*map(max, self, other))


def filled(read: Pass, to: Size) -> Pass:
    """A pass, on the CPU, of this size: padding rows of tokens 0 are behind its own rows, and empty ones behind these.

    Their tokens see each other, so that they are numbers in every layer, and no other row sees them. What is asked for
    beyond the pass's own is its first token.
    """
    batch, (T, B) = read.batch, (len(read.batch.ids), read.batch.num_rows)
    padding = to.tokens - T
    count = np.clip(padding - PADDING_ROW * np.arange(to.rows - B), 0, PADDING_ROW)
    first = np.where(count > 0, T + PADDING_ROW * np.arange(to.rows - B), 0)
    place = np.arange(padding)
    spans, seen = pairs_of(first, count), pairs_of(np.zeros_like(count), count)
    assert batch.spans is not None and batch.keys.spans is not None, "it is laid out on the host"
    return Pass(
        sizes=(0,) * to.rows,
        batch=Batch(
            ids=_longer(batch.ids, to.tokens),
            positions=_longer(batch.positions, to.tokens),
            rows=_followed(batch.rows, B + place // PADDING_ROW),
            columns=_followed(batch.columns, place % PADDING_ROW),
            last=_followed(batch.last, np.maximum(first + count - 1, 0)),
            first=_followed(batch.first, first),
            count=_followed(batch.count, count),
            keys=Keys(_longer(batch.keys.begin, to.rows), None, batch.keys.spans + seen, batch.keys.padded),
            max_q=to.longest,
            max_kv=to.longest,
            spans=batch.spans + spans,
        ),
        asked=_longer(read.asked, to.asked),
        types=None if read.types is None else _longer(read.types, to.tokens),
    )


def by_device(read: Pass, packed: bool) -> Pass:
    """The same, where the host knows no row: a rectangle may have pads, whichever texts it is replayed for."""
    batch = read.batch
    return read._replace(batch=batch._replace(keys=batch.keys._replace(spans=None, padded=not packed), spans=None))


def mixed(batch: Batch, capacity: int) -> Batch:
    """A pass of requests that join slots of `capacity` columns, on the CPU, as a graph has it: the host knows no row.

    Dummy tokens are pads of the first slot, in its last column, which no query ever sees. Ids and keys are left out:
    the device has them.
    """
    none = batch.ids[:0]
    columns = batch.columns.clone()
    columns[batch.num_read :] = capacity - 1
    longest = longest_mixed(batch.max_q)
    return batch._replace(
        ids=none, columns=columns, keys=Keys(none), max_q=longest, max_kv=capacity, spans=None, num_dummy=0
    )


def longest_mixed(tokens: int) -> int:
    """The bucket of the most tokens that a request has in such a pass: one graph serves all of it."""
    return _power(tokens, QUERIES)


def blank(size: Size, is_typed: bool) -> Pass:
    """A pass of such a size, of which a meta trace needs shapes alone."""
    numbers = size.tokens, size.rows, size.asked
    tokens, rows, asked = (torch.empty(number, dtype=torch.long, device="meta") for number in numbers)
    batch = Batch(tokens, tokens, tokens, tokens, rows, rows, rows, Keys(rows), size.longest, size.longest)
    return Pass((0,) * size.rows, batch, asked, tokens if is_typed else None)


def rounded_up(number: int, least: int, parts: int) -> int:
    """Up to a multiple of `least`, and of so many parts, a power of two, of the power of two below it."""
    step = max(least, (1 << (number - 1).bit_length() - 1) // parts if number > 1 else 1)
    return aligned(number, step)


def _power(number: int, least: int) -> int:
    """Up to a power of two."""
    return max(least, 1 << (number - 1).bit_length())


def _longer(part: Tensor, size: int) -> Tensor:
    """With zeros behind it."""
    out = np.zeros(size, np.int64)
    out[: len(part)] = part.numpy()
    return torch.from_numpy(out)


def _followed(part: Tensor, more: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate((part.numpy(), more)))
