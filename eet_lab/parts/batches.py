"""What one pass reads, laid out on the host. One function makes it for every layout.

T tokens, B rows, S columns of the token buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch

from eet_lab.ops.types import Batch, Keys, TokenBuffer
from eet_lab.scheduling import Row

_tensor = torch.from_numpy

LOGGED = 16
"""Passes whose tokens stay on the device until the host has read them: twice as many as it may be behind."""


def make_batch(
    counts: Sequence[int],
    ids: Iterable[Sequence[int]] | None = None,
    *,
    rows: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    reads_pads: bool = False,
    num_rows: int | None = None,
    size: int | None = None,
) -> Batch:
    """Rows end to end: of each `counts` tokens, the first of which is token `starts` of its row. On the CPU.

    `rows` are their numbers among `num_rows`, in rising order; None: all. Before a row's first token lie `pads`
    columns; where the pass `reads_pads`, they are tokens of it too, and make it a rectangle. `ids` are the tokens of
    each; None: they are not known here. Dummy tokens, which are no row's, fill it up to `size`. It is made by numpy,
    whose few numbers no thread has to be woken for.
    """
    count = np.array(counts, np.int64)
    row = np.arange(len(count)) if rows is None else np.array(rows, np.int64)
    start = np.zeros_like(count) if starts is None else np.array(starts, np.int64)
    pad = np.zeros_like(count) if pads is None else np.array(pads, np.int64)
    lead = pad if reads_pads else np.zeros_like(count)
    width = count + lead
    first, T = width.cumsum() - count, int(width.sum())
    owner = np.repeat(np.arange(len(count)), width)
    place = np.arange(T) - (first - start)[owner]
    columns, token = place + pad[owner], np.zeros(T, np.int64)
    if ids is not None:
        token[place >= start[owner]] = np.concatenate([np.asarray(part, np.int64) for part in ids])
    end, B = pad + start + count, len(count) if num_rows is None else num_rows
    dummy = max((size or 0) - T, 0)

    def of_tokens(values: np.ndarray) -> torch.Tensor:
        return _tensor(np.concatenate([values, np.zeros(dummy, np.int64)]) if dummy else values)

    def of_all(values: np.ndarray) -> np.ndarray:
        """By the row's number; rows that read nothing have 0."""
        if len(values) == B:
            return values
        found = np.zeros(B, np.int64)
        found[row] = values
        return found

    firsts, every, begin = of_all(first), of_all(count), of_all(pad)
    return Batch(
        ids=of_tokens(token),
        positions=of_tokens(np.maximum(place, 0) if reads_pads else place),
        rows=of_tokens(row[owner]),
        columns=of_tokens(columns),
        last=_tensor(of_all(first + count - 1)),
        first=_tensor(firsts),
        count=_tensor(every),
        keys=Keys(_tensor(begin), None, pairs_of(begin, of_all(end)), bool(pad.any())),
        max_q=int(count.max()),
        max_kv=int(end.max()),
        spans=pairs_of(firsts, every),
        num_dummy=dummy,
    )


def pairs_of(a: np.ndarray, b: np.ndarray) -> tuple[tuple[int, int], ...]:
    """A number of each, side by side."""
    return tuple(zip(a.tolist(), b.tolist(), strict=True))


def end_to_end(texts: Sequence[Sequence[int]]) -> Batch:
    """Whole texts, one behind the other. With one more number at its end, `first` is what variable-length attention
    calls cu_seqlens.
    """
    return make_batch([len(text) for text in texts], texts)


def left_padded(texts: Sequence[Sequence[int]]) -> Batch:
    """Whole texts as a rectangle, with pads on the left."""
    counts = [len(text) for text in texts]
    longest = max(counts)
    pads = [longest - count for count in counts]
    return make_batch(counts, texts, pads=pads, reads_pads=True)


def batch_of(rows: Sequence[Row], num_rows: int, reads_pads: bool, size: int | None = None) -> Batch:
    """What a scheduler has planned, of `size` tokens. Tokens whose values are on the device alone have id 0."""
    rows = sorted(rows, key=lambda row: row.slot)
    return make_batch(
        [row.count for row in rows],
        (row.request.known_tokens(row.start, row.count) for row in rows),
        rows=[row.slot for row in rows],
        starts=[row.start for row in rows],
        pads=[row.request.pad for row in rows],
        reads_pads=reads_pads,
        num_rows=num_rows,
        size=size,
    )


def empty_buffer(B: int, S: int, device: torch.device) -> TokenBuffer:
    """B slots of S columns that no request has."""
    zeros = partial(torch.zeros, dtype=torch.long, device=device)
    return TokenBuffer(zeros(S, B).t(), *(zeros(B) for _ in range(5)), zeros(LOGGED, B), zeros(1))  # type: ignore[call-arg]


def decode_batch(buffer: TokenBuffer, keys: Keys, max_kv: int) -> Batch:
    """The pass that reads one token a row. Its tensors are the token buffer's own: they move with it."""
    each = torch.arange(len(buffer.ids), device=buffer.ids.device)
    return Batch(
        ids=buffer.ids,
        positions=buffer.positions,
        rows=each,
        columns=buffer.columns,
        last=each,
        first=each,
        count=torch.ones_like(each),
        keys=keys,
        max_q=1,
        max_kv=max_kv,
    )
