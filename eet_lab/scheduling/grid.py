"""Numbers measured where axes cross, and a monotone value in between."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from eet_lab.errors import CostError
from eet_lab.scheduling.whole import MOST, check_whole
from eet_lab.words import brief, counted, told

if TYPE_CHECKING:
    import numpy as np

MOST_NODES = 1_000_000


class Axis(NamedTuple):
    """Where one of the sizes was measured: whole numbers that rise. `name` is what an error calls them."""

    name: str
    nodes: tuple[int, ...]


class Grid:
    """A value for every point up to the last node of each axis: never less for more, and no more than measured.

    Times are noisy, so a larger pass may have been measured as the quicker one. A node counts as the longest time of
    all that are no larger in any direction (the running maximum along each axis), which makes it monotone; between
    nodes it is linear in each direction, which keeps it so. Below the first node of an axis the value is that of the
    first node; beyond the last one there is none.
    """

    def __init__(self, axes: Sequence[Axis], values: Any, where: str = "The table") -> None:
        """`values` are sequences in sequences, as deep as there are axes. CostError where they do not fit."""
        import numpy as np

        self.axes, self._where = tuple(axes), where
        for name, nodes in self.axes:
            _check_nodes(name, nodes)
        sizes = [len(nodes) for _, nodes in self.axes]
        if (num := math.prod(sizes)) > MOST_NODES:
            raise CostError(f"{where} has {num:,} nodes, but at most {MOST_NODES:,} are read. Measure fewer.")
        self._steps = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        risen = np.array(_flat(values, self.axes, where)).reshape(sizes)
        for axis in range(len(sizes)):
            risen = np.maximum.accumulate(risen, axis)
        self._values = risen.ravel().tolist()

    def at(self, *point: float) -> float:
        """The value at a point; CostError beyond what was measured."""
        corners, parts = [0], list[float]()
        for axis, step, place in zip(self.axes, self._steps, point, strict=True):
            nodes = axis.nodes
            if place > nodes[-1]:
                self._refuse(axis, place)
            after = bisect_left(nodes, place)
            if nodes[after] == place or not after:
                corners = [at + after * step for at in corners]
                continue
            parts.append((place - nodes[after - 1]) / (nodes[after] - nodes[after - 1]))
            corners = [at + (after - 1) * step for at in corners] + [at + after * step for at in corners]
        values = [self._values[at] for at in corners]
        while parts:  # the last axis first: its upper half lies behind its lower one. Equal values stay what they are.
            part, half = parts.pop(), len(values) // 2
            values = [low + (high - low) * part for low, high in zip(values[:half], values[half:], strict=True)]
        return values[0]

    def line(self, *point: float) -> np.ndarray:
        """The values where the last axis has 1, 2, ... up to the last of these numbers, and the others are as given.

        CostError beyond what was measured.
        """
        import numpy as np

        *others, last = point
        nodes = self.axes[-1].nodes
        after = min(bisect_left(nodes, last), len(nodes) - 1)
        if last > nodes[-1]:
            self._refuse(self.axes[-1], last)
        some = nodes[: after + 1]
        return np.interp(np.arange(1, last + 1), some, [self.at(*others, node) for node in some])

    def _refuse(self, axis: Axis, place: float) -> None:
        raise CostError(
            f"A pass has {brief(place)} {axis.name}, but {self._where} was measured up to {axis.nodes[-1]:,}. Let "
            "passes be smaller (fewer rows, a smaller budget, shorter requests), or measure a larger table."
        )


def _check_nodes(name: str, nodes: Sequence[int]) -> None:
    if not nodes:
        raise CostError(f"There are no {name}, but at least one must have been measured.")
    for node in nodes:
        check_whole(CostError, name, node, 0, MOST)
    for before, after in pairwise(nodes):
        if after <= before:
            raise CostError(f"The axis {name!r} has {after:,} after {before:,}. Sort its numbers, and give each once.")


def _flat(values: Any, axes: Sequence[Axis], where: str) -> list[float]:
    """All values in one row, the last axis fastest; CostError where there are too few, too many, or none of time."""
    rows = [values]
    for name, nodes in axes:
        for row in rows:
            if isinstance(row, str) or not isinstance(row, Sequence) or len(row) != len(nodes):
                found = counted(len(row), "time") if isinstance(row, Sequence) else told(row)
                raise CostError(
                    f"{where} has {found} along the axis {name!r}, but the axis has {counted(len(nodes), 'node')}. "
                    "Give one time for each."
                )
        rows = [inner for row in rows for inner in row]
    for value in rows:
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise CostError(f"{where} has a time of {told(value)} ms, but each must be finite and more than 0.")
    return [float(value) for value in rows]
