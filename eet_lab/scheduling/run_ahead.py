"""How far the host may be ahead of its device, where requests join."""

from __future__ import annotations

LEAD_MS = 4.0
"""How long the passes take that a device is given at a time, if they are more than one.

A request that comes waits for all of them, so less is better for its first token. While the host is away for longer
than that, the device has nothing to do.
"""


class RunAhead:
    """`passes`: how many a device is given before the host has read the first of them. As many as take `lead_ms` in
    all, each as long as the last one that was read; `most` at most, and one at least, which the device computes while
    the host plans the next one. `most` is 0 where the host itself computes.
    """

    def __init__(self, most: int, lead_ms: float = LEAD_MS) -> None:
        self._most, self._lead_ms, self._end_ms = most, lead_ms, 0.0
        self.passes = self._fitting(LEAD_MS)

    def read(self, end_ms: float) -> None:
        """The host has read a pass that ended at this time. A pause before it counts as a part of it."""
        self.passes, self._end_ms = self._fitting(end_ms - self._end_ms), end_ms

    def _fitting(self, pass_ms: float) -> int:
        return next((passes for passes in range(1, self._most) if passes * pass_ms >= self._lead_ms), self._most)
