"""How far the host may be ahead of its device, where requests join."""

from __future__ import annotations

LEAD_MS = 4.0
"""The time of the passes that a device is given ahead, in ms; at least one pass is always given.

A request that comes waits for all of them, so less is better for its first token. While the host is away for longer
than that, the device has nothing to do.
"""


class RunAhead:
    """How many passes a device is given before the host has read the first of them: `most` at most.

    As long as a slot is free, as many as take `lead_ms` in all, each as long as the last one that was read; one at
    least, which the device computes while the host plans the next one. Before any was read, a pass counts as one of
    `LEAD_MS`. `most` is 0 where the host itself computes.
    """

    def __init__(self, most: int, lead_ms: float = LEAD_MS) -> None:
        self._most, self._lead_ms = most, lead_ms
        self.read(LEAD_MS)

    def read(self, pass_ms: float) -> None:
        """The host has read a pass, which ended so many ms after the one before it."""
        fitting = (passes for passes in range(1, self._most) if passes * pass_ms >= self._lead_ms)
        self._fitting = next(fitting, self._most)

    def passes(self, is_full: bool) -> int:
        """So many. Where all slots are taken, nobody could be let in sooner."""
        return self._most if is_full else self._fitting
