"""A batch through slots: all its prompts are added at once, and steps are made until the last is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from eet_lab.engine.generation import Generation, StepEvent
from eet_lab.engine.settings import Settings
from eet_lab.engine.slots import NewToken, RequestSettings, Slots
from eet_lab.progress import Cancel
from eet_lab.scheduling import Request


def joined(
    slots: Slots,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    on_step: Callable[[StepEvent], None],
    cancel: Cancel | None,
    forced: Sequence[Sequence[int]] | None,
) -> Generation:
    """What `Engine.generate` says. A step that told no token is no event; its time is the next one's."""
    requests = [Request(tuple(prompt), settings.max_new_tokens) for prompt in prompts]
    slots.check(requests)
    for row, request in enumerate(requests):
        slots.add(request, RequestSettings.of(settings, row, forced[row] if forced is not None else ()))
    record = Record(requests, slots.num_steps(requests), on_step)
    while not slots.idle and not (cancel is not None and cancel.is_set()):
        record.read(slots.step())
    for request in requests:
        if request.status != "finished":
            slots.cancel(request)
    record.read(slots.drain())
    return record.result(slots.clock.setup_ms)


class Record:
    """What came when, request by request."""

    def __init__(self, requests: Sequence[Request], num_steps: int, on_step: Callable[[StepEvent], None]) -> None:
        self._requests, self._num_steps, self._on_step = requests, num_steps, on_step
        self._rows = {request: row for row, request in enumerate(requests)}
        self._times: list[list[float]] = [[] for _ in requests]
        self._step_ms: list[float] = []
        self._t_ms = 0.0

    def read(self, told: Sequence[NewToken]) -> None:
        """Take in the tokens that have come."""
        for t_ms, of_one_step in groupby(told, lambda each: each.t_ms):
            new = tuple((self._rows[request], token) for request, token, _ in of_one_step)
            for row, _ in new:
                self._times[row].append(t_ms)
            self._step_ms.append(t_ms - self._t_ms)
            self._t_ms = t_ms
            num_steps = max(self._num_steps, len(self._step_ms))
            self._on_step(StepEvent(len(self._step_ms) - 1, num_steps, t_ms, self._step_ms[-1], new))

    def result(self, setup_ms: float) -> Generation:
        """All of it."""
        tokens = tuple(tuple(request.generated) for request in self._requests)
        return Generation(
            tokens=tokens,
            finish=tuple(request.finish_reason or "cancelled" for request in self._requests),
            first_ms=tuple(times[0] if times else None for times in self._times),
            last_ms=tuple(times[-1] if times else None for times in self._times),
            step_ms=tuple(self._step_ms),
            total_ms=self._t_ms,
            setup_ms=setup_ms,
        )
