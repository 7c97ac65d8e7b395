"""The tab Memory: where a run's tensors lay, and what other planners would have done."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import pytest

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.memory import PLANNERS, DriverCalls, Lifetime
from eet_lab.panels import Workbench, jobs, worker
from eet_lab.panels.aside import Answer
from eet_lab.panels.memory_tab import MemoryTab
from eet_lab.panels.outputs import PLOTLY
from eet_lab.panels.run_memory import KVUse, RunMemory, TorchCalls, TorchCounter
from eet_lab.technique import Recipe
from panels.driving import do, turn_until


def test_after_a_run_the_tab_draws_its_plan_and_asks_the_other_planners(bench: Workbench) -> None:
    do(bench, "run")
    tab = bench.desk.shelf.view.memory
    assert tab.picture.outputs == () and tab.box.layout.display == "none"
    do(bench, "tab", "memory")
    assert tab.box.layout.display == ""
    turn_until(bench, lambda: len(tab.planner.options) > 3)
    assert "greedy_by_size" in tab._facts.value and "KV cache" in tab._facts.value
    own = figure(tab)
    do(bench, "memory_planner", "no_reuse")
    assert figure(tab) != own and "lower bound" in own
    do(bench, "memory_pass", "decode")
    turn_until(bench, lambda: tab._key in tab._placed)
    assert tab.run.value == "selection" and tab._key == ("selection", "decode")
    assert len(tab.picture.outputs) == 2, "the strip, and every planner's footprint"
    counts = {name: len(tab._runs["selection"].plan(name).lifetimes) for name in tab.phase.options}
    assert counts["both"] == counts["prefill"] + counts["decode"] > 0
    do(bench, "memory_pass", "both")
    assert figure(tab).startswith(f"{counts['both']} tensors")
    assert "calls of the arena" in tab._facts.value
    do(bench, "tab", "overview")
    assert tab.picture.outputs == (), "a saved notebook need not carry it"


def test_who_looks_at_memory_goes_on_to_from_run_to_run(bench: Workbench) -> None:
    view = bench.desk.shelf.view
    do(bench, "run")
    assert view.tabs.value == "overview"
    do(bench, "tab", "memory")
    do(bench, "run")
    assert view.tabs.value == "memory" and view.memory.picture.outputs
    do(bench, "tab", "overview")
    do(bench, "run")
    assert view.tabs.value == "overview"


def test_a_comparison_has_both_runs_and_a_recording_none(bench: Workbench) -> None:
    do(bench, "compare")
    do(bench, "tab", "memory")
    tab, view = bench.desk.shelf.view.memory, bench.desk.shelf.view
    assert list(tab.run.options) == ["baseline", "selection"]
    do(bench, "memory_run", "baseline")
    assert "fresh tensors" in tab._words.value
    assert tab.planner.options[0] == "as an arena would"
    assert "growing" in tab._facts.value and "static" in tab._facts.value
    assert len(view.figure.outputs) == 1
    do(bench, "save")
    view.files.value = str(next(bench.desk.shelf.files.folder.glob("*.json")))
    do(bench, "open")
    do(bench, "tab", "memory")
    assert tab.box.layout.display == "none" and len(view.figure.outputs) == 1


def test_torchs_calls_of_the_driver_are_those_of_each_first_run(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"num_device_alloc": 100, "num_device_free": 100}

    def generate(self: Engine, *args: Any, **kwargs: Any) -> Any:
        calls["num_device_alloc"] += 3 if self.memory.generation == 0 else 1
        return inner(self, *args, **kwargs)

    inner = Engine.generate
    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr("torch.cuda.memory_stats", lambda: calls)
    monkeypatch.setattr("eet_lab.panels.jobs.TorchCounter", lambda device: TorchCounter("cuda"))
    model, recipe = bench.model, Recipe.parse("pre_padding,memory_reuse", "cpu")

    def kept(job: Any, *more: Any) -> list[TorchCalls]:
        events: SimpleQueue[Any] = SimpleQueue()
        job(model, ["5 6"], recipe, Settings(4), *more)(worker.Feed(events), threading.Event())
        told = [events.get() for _ in range(events.qsize())]
        return [event.memory for event in told if isinstance(event, worker.Kept)]

    [run] = kept(jobs.run)
    assert run.torch_calls == TorchCalls(3, 0)
    assert run.facts()["torch's calls of the driver in the first run"] == "3 allocations, 0 frees"
    both = kept(jobs.compare, 2)
    assert [each.torch_calls for each in both] == [TorchCalls(3, None)] * 2
    assert "Compare empties torch's cache" in both[0].facts()["torch's calls of the driver in the first run"]


def test_planners_of_the_result_before_are_not_shown_for_this_one() -> None:
    """Its runs and passes have the same names, and its question may be answered late."""

    class Questions:
        def __init__(self) -> None:
            self.asked: list[tuple[str, Any, Any]] = []

        def ask(self, name: str, key: Any, work: Any) -> None:
            self.asked.append((name, key, work))

    questions = Questions()
    tab = MemoryTab(lambda *command: None, questions)
    for num_bytes in (256, 25600):
        tab.put_up({"selection": kept(num_bytes)})
        tab.open()
        tab.turn(busy=False)
    late, present = (Answer(name, key, work()) for name, key, work in questions.asked)
    tab.answered(late)
    assert not tab._placed
    tab.answered(present)
    assert {each.plan.lower_bound_bytes for each in tab._placed["selection", "prefill"] if each.plan} == {25600}


def kept(num_bytes: int) -> RunMemory:
    """A run with one tensor in each pass."""
    plan = PLANNERS["greedy_by_size"]([Lifetime("x", num_bytes, 0, 1)])
    kv = KVUse("static", 1, 1, 0, 0)
    return RunMemory("memory_reuse", {"prefill": plan, "decode": plan}, True, 1, num_bytes, kv, DriverCalls(), None)


def figure(tab: Any) -> str:
    return str(tab.picture.outputs[0]["data"][PLOTLY]["layout"]["title"]["text"])
