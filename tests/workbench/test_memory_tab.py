"""The tab Memory: where a run's tensors lay, and what other planners would have done."""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from eet_lab.bench.run_memory import KVUse, RunMemory, TorchCalls, TorchCounter
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.figures.outputs import PLOTLY
from eet_lab.figures.theme import TITLE_LINE_PX
from eet_lab.memory import PLANNERS, DriverCalls, Lifetime
from eet_lab.technique import Recipe
from eet_lab.workbench import Workbench, jobs
from eet_lab.workbench.engine_thread import Feed, Kept
from eet_lab.workbench.memory import MemoryTab
from eet_lab.workbench.threads import Answer, Receiver
from workbench.driving import ask, do, errors, shown, turn_until


def picks(bench: Workbench) -> dict[str, dict[str, Any]]:
    return {pick["name"]: pick for pick in shown(bench, "answer")["picks"]}


def titles(bench: Workbench) -> list[str]:
    outputs = bench.controller.page.figure.outputs
    return [str(output["data"][PLOTLY]["layout"]["title"]["text"]) for output in outputs]


def test_after_a_run_the_tab_draws_its_plan_and_asks_the_other_planners(bench: Workbench) -> None:
    do(bench, ask.run(), ask.tab("arena"))
    tab = bench.controller.results.memory
    turn_until(bench, lambda: len(picks(bench)["planner"]["options"]) > 3)
    do(bench, ask.tab("planners"))
    text = str(shown(bench, "answer")["tables"])
    assert (
        "greedy by size" in text
        and "greedy_by_size" not in text
        and "KV cache" in text
        and "calls of the arena" in text
    )
    do(bench, ask.tab("arena"))
    own = titles(bench)[0]
    [layout] = [each["data"][PLOTLY]["layout"] for each in bench.controller.page.figure.outputs]
    foot = layout["title"]["pad"]["t"] + TITLE_LINE_PX * own.count("<br>")
    assert "<br>" in own and foot + 10 <= layout["margin"]["t"] <= foot + 16, "the title stands clear of the plot"
    do(bench, ask.pick("planner", "no_reuse"))
    assert titles(bench)[0] != own and "lower bound" in own
    do(bench, ask.pick("pass", "decode"))
    turn_until(bench, lambda: tab._key in tab._placed)
    assert tab._key == ("all", "decode")
    do(bench, ask.pick("planner", "all, side by side"))
    assert [title.split(":")[0] for title in titles(bench)] == ["Held by each planner; alive at once"], "one at a time"
    do(bench, ask.pick("planner", "as it ran"))
    counts = {name: len(tab.runs["all"].plan(name).lifetimes) for name in picks(bench)["pass"]["options"]}
    assert counts["both"] == counts["prefill"] + counts["decode"] > 0
    do(bench, ask.pick("pass", "both"))
    assert titles(bench)[0].startswith(f"{counts['both']} tensors")
    do(bench, ask.pick("pass", "nonsense"), ask.pick("run", "nonsense"), ask.pick("planner", "nonsense"))
    assert errors(bench) == ""


def test_a_comparison_has_both_runs_and_an_older_one_none(bench: Workbench) -> None:
    do(bench, ask.setting("repeats", 1), ask.compare(), ask.tab("arena"))
    assert picks(bench)["run"]["options"] == ["baseline", "all"]
    do(bench, ask.pick("run", "baseline"))
    assert picks(bench)["planner"]["options"][0]["label"] == "as an arena would"
    assert "fresh tensors" in str(shown(bench, "answer")["words"])
    do(bench, ask.tab("planners"))
    text = str(shown(bench, "answer")["tables"])
    assert "growing" in text and "static" in text
    kept = shown(bench, "runs")["rows"][0]["id"]
    do(bench, ask.open_run(kept), ask.tab("arena"))
    assert shown(bench, "answer")["tab"] == "arena" and titles(bench), "it is what was measured last"
    do(bench, ask.close_run(), ask.run(), ask.open_run(kept))
    assert "arena" not in [tab["name"] for tab in shown(bench, "answer")["tabs"]]
    assert "no memory addresses" in shown(bench, "answer")["note"]["text"]


@pytest.mark.parametrize("joins", [True, False])
def test_a_cache_that_all_requests_have_left_is_not_called_unused(bench: Workbench, joins: bool) -> None:
    assert bench.model is not None
    for recipe, told in (("all", None), (f"all,continuous_batching:joins={joins}", "all requests have left")):
        engine = Engine(bench.model.decoder, Recipe.parse(recipe, "cpu").parts)
        engine.generate([[5, 6, 7], [8, 9]], Settings(4))
        facts = RunMemory.of(engine, None).facts()
        assert (facts["used"] == told) == (facts["unused"] == "–") == (told is not None)
        assert told or (facts["unused"].more.endswith("%)") and facts["used"].num_bytes > 0)


def test_sizes_of_a_row_are_in_one_unit_and_those_of_the_tab_table(bench: Workbench) -> None:
    do(bench, ask.setting("repeats", 1), ask.compare(), ask.tab("table"))
    [table] = shown(bench, "answer")["tables"]
    sizes = {row[0].strip(): row[1:] for row in table["rows"]}
    do(bench, ask.tab("planners"))
    facts = {row[0]: row[1:] for row in shown(bench, "answer")["tables"][-1]["rows"]}
    for name, same in (("weights", "weights"), ("activations, in the pass with the most", "activations")):
        assert facts[name] == sizes[same][:2]
    for cells in (*facts.values(), *sizes.values()):
        assert len({cell.split()[1] for cell in cells[:2] if cell.split()[1:2] in (["MiB"], ["KiB"], ["bytes"])}) <= 1


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
    monkeypatch.setattr("eet_lab.workbench.jobs.TorchCounter", lambda device: TorchCounter("cuda"))
    model, recipe = bench.model, Recipe.parse("pre_padding,memory_reuse", "cpu")

    job = jobs.Job(model, ["5 6"], recipe, Settings(4), repeats=2)

    def kept(work: Any) -> list[Any]:
        events: SimpleQueue[Any] = SimpleQueue()
        work(Feed(events), threading.Event())
        told = [events.get() for _ in range(events.qsize())]
        return [event.memory for event in told if isinstance(event, Kept)]

    [run] = kept(job.run)
    assert run.torch_calls == TorchCalls(3, 0)
    assert run.facts()["torch's calls of the driver in the first run"] == "3 allocations, 0 frees"
    both = kept(partial(job.compare, Recipe()))
    assert [each.torch_calls for each in both] == [TorchCalls(3, None)] * 2
    assert "Compare empties torch's cache" in both[0].facts()["torch's calls of the driver in the first run"]


def test_planners_of_the_result_before_are_not_shown_for_this_one() -> None:
    """Its runs and passes have the same names, and its question may be answered late."""

    class Questions:
        def __init__(self) -> None:
            self.asked: list[tuple[Receiver, Any, Any]] = []

        def ask(self, to: Receiver, key: Any, work: Any) -> None:
            self.asked.append((to, key, work))

    questions = Questions()
    tab = MemoryTab(questions)
    for num_bytes in (256, 25600):
        tab.put_up({"selection": kept(num_bytes)})
        tab.open = True
        tab.turn(busy=False)
    late, present = (Answer(to, key, work()) for to, key, work in questions.asked)
    tab.answered(late)
    assert not tab._placed
    tab.answered(present)
    assert {each.plan.lower_bound_bytes for each in tab._placed["selection", "prefill"] if each.plan} == {25600}


def test_planners_that_fail_are_told_once_and_not_waited_for() -> None:
    asked: list[Any] = []
    tab = MemoryTab(SimpleNamespace(ask=lambda to, key, work: asked.append(key)))  # type: ignore[arg-type]
    tab.put_up({"selection": kept(256)})
    tab.open = True
    tab.turn(busy=False)
    assert "Asking" in str(tab.tables())
    with pytest.raises(ZeroDivisionError):
        tab.answered(Answer(tab.answered, asked[0], None, ZeroDivisionError()))
    tab.turn(busy=False)
    assert "Asking" not in str(tab.tables()) and len(asked) == 1


def kept(num_bytes: int) -> RunMemory:
    """A run with one tensor in each pass."""
    plan = PLANNERS["greedy_by_size"]([Lifetime("x", num_bytes, 0, 1)])
    kv = KVUse("static", 1, 1, 0, 0)
    return RunMemory({"prefill": plan, "decode": plan}, True, 1, num_bytes, kv, DriverCalls(), None)
