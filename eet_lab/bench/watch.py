"""Watching steps: some are timed on their own, others by torch's profiler; and a timeline of what it saw of one."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from eet_lab.bench.environment import device_name, environment
from eet_lab.bench.profiler_trace import MARK, PHASE, ProfiledStep, read_steps
from eet_lab.bench.timeline import MOST_SPANS, Span, Timeline
from eet_lab.errors import MonitorError, first_line
from eet_lab.models import Model
from eet_lab.technique import Recipe
from eet_lab.words import counted

SAMPLES = 3
"""Steps without the profiler, and with it: the one of median length is shown."""

Item = TypeVar("Item")


class Watch:
    """Times some steps, and has the profiler watch others; nothing else is on the device when one of them begins."""

    def __init__(self, device: str) -> None:
        self.plain_us = list[float]()
        self._device = device
        self._profile: profile | None = None
        self._trace: dict[str, Any] = {}

    def time(self, run: Callable[[], Any]) -> None:
        """Run a step without the profiler."""
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        self.plain_us.append((time.perf_counter() - start) * 1e6)

    def watch(self, run: Callable[[], Any]) -> None:
        """Run a step under the profiler."""
        if self._profile is None:
            self._profile = _started(self._device)
        self._wait()
        with record_function(MARK):
            run()
        self._wait()

    def finish(self) -> None:
        """The profiler has seen enough."""
        watching = self._profile
        self.close()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            watching.export_chrome_trace(str(path))  # type: ignore[union-attr]
            self._trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)

    def steps(self) -> list[ProfiledStep]:
        """What was watched, once that is finished."""
        return read_steps(self._trace)

    def marked(self, name: str) -> AbstractContextManager:
        """What is done within has this name in the trace. A mark takes microseconds, so there is none while nobody
        watches.
        """
        return NOTHING if self._profile is None else record_function(name)

    def begin(self, phase: str) -> None:
        """A phase of a step begins here."""
        with self.marked(PHASE + phase):
            pass

    def close(self) -> None:
        """End the profiler where a run broke off."""
        watching, self._profile = self._profile, None
        if watching is not None:
            watching.stop()

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


NOTHING = nullcontext()
TAKEN = "torch's profiler cannot watch the step: {}. End the other profile, and take the timeline again."


def _started(device: str) -> profile:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else its library writes lines into the notebook
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    if torch.autograd._profiler_enabled():  # some versions would end the other one without a word
        raise MonitorError(TAKEN.format("a profile is under way in this thread"))
    watching = profile(activities=activities)
    try:
        watching.start()
    except RuntimeError as error:
        raise MonitorError(TAKEN.format(first_line(error))) from error
    return watching


def median_of(found: Iterable[Item], key: Callable[[Item], float]) -> Item:
    """The one in the middle; of an even number the lower one."""
    ordered = sorted(found, key=key)
    return ordered[(len(ordered) - 1) // 2]


def timeline_of(model: Model, recipe: Recipe, step: ProfiledStep, plain_us: Sequence[float], **sizes: Any) -> Timeline:
    """The timeline of a step that was watched, with at most `MOST_SPANS` spans; `sizes` are the rest of its fields."""
    on_gpu = model.device == "cuda"
    spans, num_left_out = earliest(step.spans, MOST_SPANS)
    return Timeline(
        recipe=str(recipe),
        device_kind="cuda" if on_gpu else "cpu",
        source=f"torch.profiler, {device_name('cuda') if on_gpu else 'CPU'}",
        origin=environment(model).origin,
        spans=spans,
        step_us=step.step_us,
        unprofiled_us=median(plain_us),
        num_launches=step.num_launches,
        device_busy_us=step.device_busy_us if on_gpu else None,
        num_left_out=num_left_out,
        remark=_remark(step, model.device, num_left_out),
        **sizes,
    )


def earliest(spans: Sequence[Span], most: int) -> tuple[tuple[Span, ...], int]:
    """The `most` spans that begin first, and how many are left out."""
    kept = sorted(sorted(range(len(spans)), key=lambda place: spans[place].start_us)[:most])
    places = {old: new for new, old in enumerate(kept)}
    found = []
    for span in (spans[old] for old in kept):
        found.append(span if span.launch is None else replace(span, launch=places.get(span.launch)))
    return tuple(found), len(spans) - len(kept)


def _remark(step: ProfiledStep, device: str, num_left_out: int) -> str:
    """What could not be seen."""
    has_kernels = any(span.lane == "device" for span in step.spans)
    remarks = {
        "On a CPU a call of PyTorch computes before it returns: there is a host and no device.": device == "cpu",
        "The driver gave the profiler no kernels, so only the host is seen.": device == "cuda" and not has_kernels,
        f"The launches of {counted(step.num_unlaunched, 'kernel')} were not seen.": step.num_unlaunched > 0,
        f"{counted(num_left_out, 'span')} at the end of the step are left out.": num_left_out > 0,
    }
    return " ".join(text for text, applies in remarks.items() if applies)
