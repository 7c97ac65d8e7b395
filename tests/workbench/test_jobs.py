"""What a job gives to the page while it works."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from eet_lab.engine.generation import StepEvent
from eet_lab.engine.settings import Settings
from eet_lab.technique import Recipe
from eet_lab.workbench import engine_thread, jobs


class Kept:
    """A feed that keeps the memory of the watched runs, and nothing else."""

    def __init__(self) -> None:
        self.runs: dict[int, Any] = {}

    def tell(self, event: Any) -> None:
        if isinstance(event, engine_thread.Kept):
            self.runs[event.series] = event.memory

    def __getattr__(self, name: str) -> Any:
        return lambda *told, **more: None


def test_the_memory_of_a_compared_recipe_is_that_of_a_whole_run(tiny: Any) -> None:
    """On a CPU only two steps have been run when the watched run begins: a KV cache that grows is short then."""
    kept = Kept()
    job = jobs.Job(tiny, ["1 2 3", "4 5"], Recipe.parse("pre_padding"), Settings(max_new_tokens=9), 1)
    found = job.compare(Recipe(), kept, threading.Event())  # type: ignore[arg-type]
    for series, measurement in enumerate((found.baseline, found.selection)):
        assert kept.runs[series].kv.held_bytes == measurement.memory["kv"] > 0


def test_a_run_that_is_stopped_asks_nothing_more_of_git(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a while on a busy machine, and a page waits for the end of what it stopped."""
    cancel, asked, feed = threading.Event(), list[bool](), Kept()
    monkeypatch.setattr("eet_lab.bench.measured.commit", lambda: asked.append(cancel.is_set()))
    feed.tell = lambda event: isinstance(event, StepEvent) and cancel.set()  # type: ignore[assignment]
    run = jobs.Job(tiny, ["1 2 3"], Recipe(), Settings(max_new_tokens=9)).run(feed, cancel)  # type: ignore[arg-type]
    assert run.stopped and asked == [False]
