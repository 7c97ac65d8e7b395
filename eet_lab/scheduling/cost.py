"""Cost tables: how long a pass takes, as it was measured, by what it reads.

Whoever plans or simulates asks a table; `eet_lab.serving.profile` measures one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple, Protocol

from msgspec import Meta

from eet_lab.codec import Date, Ms, Name
from eet_lab.errors import CostError
from eet_lab.scheduling.grid import Axis, Grid
from eet_lab.scheduling.request import Row
from eet_lab.scheduling.whole import MOST, check_whole
from eet_lab.words import visible

if TYPE_CHECKING:
    import numpy as np

MOST_AHEAD = 64

Nodes = Annotated[tuple[Annotated[int, Meta(ge=0, le=MOST)], ...], Meta(min_length=1, max_length=10_000)]
Times = Annotated[tuple[Ms, ...], Meta(max_length=10_000)]
Times2 = Annotated[tuple[Times, ...], Meta(max_length=10_000)]
Times3 = Annotated[tuple[Times2, ...], Meta(max_length=10_000)]


class Costs(Protocol):
    """What a batching policy asks of a cost table, before it knows how a pass will be laid out."""

    def padded_up_to(self, length: int, rows: int) -> np.ndarray:
        """Milliseconds [rows] of passes that read 1, 2, ... and so many requests, padded to such a length.

        CostError beyond the table.
        """


@dataclass(frozen=True)
class Provenance:
    """Where a table comes from: what was measured, on what, with which versions, and when."""

    model: Name
    recipe: Name
    device: Name
    dtype: Name
    commit: Name | None
    torch: Name
    eet_lab: Name
    date: Date
    driver: Name | None = None
    note: Name = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return visible(f"{self.model}, {self.recipe or 'baseline'}, {self.dtype} on {self.device}, {self.date}{note}")


@dataclass(frozen=True)
class EncoderCost:
    """`cost[length, batch]`: milliseconds of a pass over so many texts of such a length, none of which has pads.

    `times[i][j]` is the time for `lengths[i]` and `batches[j]`; what holds between and beyond them is told in `Grid`.
    """

    kind: ClassVar[str] = "encoder"

    lengths: Nodes
    batches: Nodes
    times: Times2
    source: Provenance

    def __post_init__(self) -> None:
        _ = self.grid  # which checks that axes rise and times fit

    @cached_property
    def grid(self) -> Grid:
        axes = Axis("tokens a text", self.lengths), Axis("texts", self.batches)
        return Grid(axes, self.times, f"the table of {visible(self.source.model)}")

    @cached_property
    def _of_length(self) -> dict[int, np.ndarray]:
        return {}

    @property
    def most_rows(self) -> int:
        """The most texts of a pass."""
        return self.batches[-1]

    @property
    def most_length(self) -> int:
        """The most tokens of a text."""
        return self.lengths[-1]

    @property
    def most_tokens(self) -> int:
        """The tokens of the largest pass."""
        return self.most_length * self.most_rows

    def at(self, length: float, batch: float) -> float:
        """Milliseconds of a pass over so many texts, padded to such a length; CostError beyond what was measured."""
        return self.grid.at(length, batch)

    def padded_up_to(self, length: int, rows: int) -> np.ndarray:
        found = self._of_length.get(length)
        if found is None or len(found) < rows:  # a queue that grows asks for a few more each time
            found = self._of_length[length] = self.grid.line(length, max(rows, min(2 * rows, self.most_rows)))
        return found[:rows]

    def packed(self, lengths: Sequence[int]) -> float:
        """Milliseconds of a pass that reads such texts end to end.

        It counts as the rectangle with as many tokens, and with as many pairs of them that attend to each other: of
        sum(l^2) / sum(l) tokens a text. That is as much arithmetic, and never more texts, nor longer ones, than these.
        """
        tokens = sum(lengths)
        length = sum(length * length for length in lengths) / tokens
        return self.at(length, tokens / length)


class PassSize(NamedTuple):
    """What a decoder's pass reads: tokens that answers go on from, tokens of prompts, and pads before these.

    `columns` are those of the KV cache that the rows see that decode, all together.
    """

    rows: int
    decoded: int
    prompt_tokens: int
    pads: int
    columns: int

    @classmethod
    def of(cls, rows: Sequence[Row]) -> PassSize:
        """The size of a pass that a scheduler has planned."""
        decoded = prompt_tokens = pads = columns = 0
        for request, _, start, count, _ in rows:
            if start and count == 1:
                decoded += 1
                columns += start + 1
            else:
                prompt_tokens += count
                pads += 0 if start else request.pad
        return cls(len(rows), decoded, prompt_tokens, pads, columns)


@dataclass(frozen=True)
class DecoderCost:
    """`cost[tokens, rows, kv]`: milliseconds of a pass that reads so many tokens, of so many requests.

    `kv` are the columns of the KV cache that a row sees that decodes, on average over these rows. A pass of one token
    for each row is a decode step, which an engine runs in another way than one that reads prompts beside it. So
    `extras`, which the first axis counts, are the tokens beyond one for each row, and begin with 0 and 1: nothing is
    interpolated from a decode step to the others. `times[i][j][k]` is the time for `extras[i]`, `rows[j]` and `kv[k]`.
    It holds for the slots of the engine that was measured: idle ones are computed too. What earlier chunks of a long
    prompt add to the attention of a later one is left out.

    On a GPU these are the times of the device alone, and `host` has those for which the host lays a pass out and
    launches it, in the same places: a pass ends when both are done, and the host goes on to the next one at once.
    `ahead` is how many passes the device is given at most before the host has read the first of them (`RunAhead`): a
    request waits for those, too. Without `host`, as on a CPU, `times` have it all.
    """

    kind: ClassVar[str] = "decoder"

    extras: Nodes
    rows: Nodes
    kv: Nodes
    times: Times3
    source: Provenance
    ahead: int = 0
    host: Times3 = ()

    def __post_init__(self) -> None:
        _ = self.grid, self._host_grid  # which check that axes rise and times fit
        check_whole(CostError, "ahead", self.ahead, 0, MOST_AHEAD)

    @cached_property
    def grid(self) -> Grid:
        return self._grid_of(self.times)

    @cached_property
    def _host_grid(self) -> Grid | None:
        return self._grid_of(self.host) if self.host else None

    def _grid_of(self, times: Times3) -> Grid:
        axes = Axis("prompt tokens beyond one a row", self.extras), Axis("rows", self.rows), Axis("columns", self.kv)
        return Grid(axes, times, f"the table of {visible(self.source.model)}")

    @property
    def most_rows(self) -> int:
        """The most requests of a pass."""
        return self.rows[-1]

    @property
    def most_length(self) -> int:
        """The most tokens that a request may have in the end: its last one is not read."""
        return self.kv[-1] + 1

    @property
    def most_tokens(self) -> int:
        """The tokens of the largest pass of a single row."""
        return self.extras[-1] + 1

    def at(self, tokens: float, rows: float, kv: float) -> float:
        """Milliseconds of a pass; CostError beyond what was measured."""
        return self.grid.at(tokens - rows, rows, kv)

    def padded_up_to(self, length: int, rows: int) -> np.ndarray:
        import numpy as np

        sizes = [PassSize(each, 0, length * each, 0, 0) for each in range(1, rows + 1)]
        return np.array([max(self.pass_ms(size), self.host_ms(size)) for size in sizes])

    def pass_ms(self, size: PassSize) -> float:
        """Milliseconds of a pass that a scheduler has planned."""
        return self.grid.at(*_point(size))

    def host_ms(self, size: PassSize) -> float:
        """Those of the host, beside which the device computes; 0 where they are in `pass_ms`."""
        return self._host_grid.at(*_point(size)) if self._host_grid is not None else 0.0


def _point(size: PassSize) -> tuple[float, float, float]:
    tokens = size.prompt_tokens + size.decoded + size.pads
    return tokens - size.rows, size.rows, size.columns / size.decoded if size.decoded else 0


CostTable = EncoderCost | DecoderCost
