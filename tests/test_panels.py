"""The workbench without a browser: real widgets, driven by their traits, turned by hand."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, ClassVar, get_args

import numpy as np
import pytest

from eet_lab import technique as techniques
from eet_lab.bench import Comparison, Ladder, load_result
from eet_lab.bench.metrics import MEMORY_PARTS, PEAK, TIMES
from eet_lab.bench.progress import Clock, Tally
from eet_lab.errors import EETError, ModelError, PromptError, RecipeError, ResultError
from eet_lab.models import load
from eet_lab.models.load import Kind
from eet_lab.models.transcript import Transcript
from eet_lab.panels import Workbench, export, figures, jobs, recordings, summary, theme, worker
from eet_lab.panels.controls import BADGES
from eet_lab.panels.outputs import PLOTLY, rendered
from eet_lab.panels.prompts_editor import PromptsEditor
from eet_lab.panels.refresh import Refresh
from eet_lab.panels.state import State, problem
from eet_lab.panels.strip_chart import StripChart
from eet_lab.panels.token_stream import TokenStream
from eet_lab.parts import Parts
from eet_lab.technique import Recipe, Technique, knob

PROMPTS = ["5 6 7", "8 9 10 11 12 13"]


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("eet-")]


@pytest.fixture
def bench(hf_model: Any, tmp_path: Any) -> Iterator[Workbench]:
    """A workbench on a tiny live model, whose desk the test turns itself."""
    workbench = Workbench(hf_model, PROMPTS, max_new_tokens=8, folder=tmp_path / "results", device="cpu")
    turn_until(workbench, lambda: workbench.model is not None)
    yield workbench
    workbench.close()
    assert threads() == []


def turn_until(workbench: Workbench, done: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        workbench.desk.tick()
        if done():
            workbench.desk.tick()
            return
        time.sleep(0.005)
    raise AssertionError(f"nothing after {seconds} s; status: {workbench.desk.status}")


def do(workbench: Workbench, action: str, *values: Any) -> None:
    """Give a command and turn the desk until it is done."""
    workbench.desk.put(action, *values)
    turn_until(workbench, lambda: workbench.desk.idle)


def errors(workbench: Workbench) -> str:
    return workbench.desk.actions.error.value


# Toggles and prompts


def test_switching_a_technique_goes_through_the_inbox_and_back(bench: Workbench) -> None:
    card = bench.desk.toggles["mask_removal"]
    assert card.switch.value
    card.switch.value = False
    assert bench.desk.state.is_on("mask_removal"), "the callback itself must not change anything"
    bench.desk.tick()
    assert bench.desk.state.recipe().names == ("pre_padding", "memory_reuse")
    assert "eet-on" not in card.box._dom_classes


def test_what_cannot_run_here_is_greyed_with_its_reason(bench: Workbench) -> None:
    card = bench.desk.toggles["cuda_graphs"]
    assert card.switch.disabled
    assert "NVIDIA GPU" in card._why.value
    assert bench.desk.mode.value.count("CPU mode: no NVIDIA GPU") == 1


def test_headline_techniques_come_first_and_cards_tell_their_docstring(bench: Workbench) -> None:
    titles = [box.children[0].description for box in bench.desk.toggles.headline.children]
    assert titles == ["Pre-padding", "Mask removal", "Memory reuse"]
    assert "EET" in bench.desk.toggles["pre_padding"].box.children[-1].value
    folds = [card.box.children[-1].value for card in bench.desk.toggles._cards.values()]
    assert any("<code>" in fold for fold in folds)
    assert not any("`" in fold for fold in folds)


def test_a_knob_turns_the_recipe(bench: Workbench) -> None:
    bench.desk.toggles["memory_reuse"].knobs["planner"].value = "first_fit"
    bench.desk.tick()
    assert "memory_reuse:planner=first_fit" in str(bench.desk.state.recipe())


def test_a_technique_registered_in_a_cell_appears_and_what_it_requires_is_told(bench: Workbench) -> None:
    @dataclass(frozen=True)
    class Mine(Technique):
        """Do it my way <b>boldly</b>.

        And more of it.
        """

        name: ClassVar[str] = "mine"
        title: ClassVar[str] = "Mine"
        requires: ClassVar[tuple[str, ...]] = ("memory_reuse",)
        strength: int = knob(3, "How much.", low=1, high=9)

        def apply(self, parts: Parts) -> Parts:
            return replace(parts, weights=(*parts.weights, lambda model: model))

    techniques.register(Mine)
    try:
        for _ in range(11):
            bench.desk.tick()
        card = bench.desk.toggles["mine"]
        assert not card.switch.disabled
        assert "&lt;b&gt;" in card.box.children[1].value, "the card is text, not markup"
        card.switch.value = True
        bench.desk.toggles["memory_reuse"].switch.value = False
        bench.desk.tick()
        assert not bench.desk.state.is_on("mine"), "it goes off with what it requires"
        assert card.switch.disabled
        assert "Memory reuse" in card._why.value
    finally:
        del techniques._REGISTRY["mine"]
    for _ in range(11):
        bench.desk.tick()
    assert "mine" not in bench.desk.toggles._cards


def test_prompts_are_added_pasted_and_removed(bench: Workbench) -> None:
    editor = bench.desk.prompts
    editor.add.click()
    bench.desk.tick()
    assert bench.desk.state.prompts == [*PROMPTS, ""]
    editor.pasted.value = "1 2\n\n  \n3 4 5\n"
    editor.take.click()
    bench.desk.tick()
    assert bench.desk.state.prompts == [*PROMPTS, "", "1 2", "3 4 5"]
    assert editor.pasted.value == ""
    editor.rows[0].remove.click()
    bench.desk.tick()
    assert bench.desk.state.prompts == [PROMPTS[1], "", "1 2", "3 4 5"]
    assert [row.text.value for row in editor.rows] == bench.desk.state.prompts
    assert ">1<" in editor.rows[1].count.value, "an empty prompt counts as BOS"


def test_the_sum_is_checked_against_the_context_while_typing(bench: Workbench) -> None:
    row = bench.desk.prompts.rows[0]
    row.text.value = " ".join(["7"] * 121)
    bench.desk.tick()
    assert "eet-over" in row.count.value
    assert "past the context of 128" in bench.desk.actions.status.value
    assert bench.desk.actions.run.disabled
    row.text.value = " ".join(["7"] * 120)
    bench.desk.tick()
    assert not bench.desk.actions.run.disabled


@pytest.mark.parametrize(
    ("index", "value", "words"),
    [
        (0, 0, "max_new_tokens is 0"),
        (0, 2.5, "max_new_tokens is 2.5"),
        (1, -1, "temperature is -1"),
        (3, 2, "top_p is 2"),
        (5, 0, "repeats is 0"),
        (5, 1.5, "repeats is 1.5"),
    ],
)
def test_a_number_that_cannot_be_is_told_with_its_limit(bench: Workbench, index: int, value: float, words: str) -> None:
    field = bench.desk.generating.box.children[1].children[index].children[1]
    before, field.value = field.value, value
    bench.desk.tick()
    assert words in bench.desk.actions.status.value
    assert "must be" in bench.desk.actions.status.value
    assert bench.desk.actions.run.disabled
    field.value = before
    bench.desk.tick()
    assert not bench.desk.actions.run.disabled


def test_no_prompts_means_nothing_to_run(bench: Workbench) -> None:
    do(bench, "remove_prompt", 0)
    do(bench, "remove_prompt", 0)
    assert bench.desk.actions.compare.disabled
    assert "add one" in bench.desk.actions.status.value


# Running


def test_run_streams_text_and_latency(bench: Workbench) -> None:
    bench.desk.actions.run.click()
    turn_until(bench, lambda: bench.result is not None)
    assert bench.desk.live.stream.counts == [8, 8]
    assert len(bench.desk.live.latency.points) == 8
    assert bench.result.texts == tuple(text.strip() for text in bench.desk.live.stream.texts)
    assert bench.desk.status.startswith("run done")


def test_compare_measures_with_the_view_at_rest(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[bool] = []
    inner = bench.desk.device.rest
    monkeypatch.setattr(bench.desk.device, "rest", lambda resting: (rests.append(resting), inner(resting)))
    do(bench, "compare")
    assert errors(bench) == ""
    assert isinstance(bench.result, Comparison)
    assert rests[0] is True
    assert rests[-1] is False
    assert False in rests[1:-1], "the watched runs are not at rest"
    assert {series for series, _, _ in bench.desk.live.latency.points} == {0, 1}
    assert set(bench.desk.shelf._monitor) == {"baseline", "selection"}
    assert "what watching cost" in bench.desk.shelf.view._words.value


def test_ladder_opens_on_its_waterfall(bench: Workbench) -> None:
    do(bench, "choose", "repeats", 1)
    do(bench, "ladder")
    assert errors(bench) == ""
    assert isinstance(bench.result, Ladder)
    [output] = bench.desk.shelf.view.figure.outputs
    assert {trace["type"] for trace in output["data"][PLOTLY]["data"]} == {"waterfall"}


def test_a_ladder_after_a_comparison_leaves_its_tabs_alone(bench: Workbench) -> None:
    """The new result has other tabs, and opens on another than the one that was chosen."""
    do(bench, "choose", "repeats", 1)
    do(bench, "compare")
    view = bench.desk.shelf.view
    view.tabs.value = "latency"
    bench.desk.actions.ladder.click()
    turn_until(bench, lambda: isinstance(bench.result, Ladder) and not bench.desk.busy)
    turn_until(bench, lambda: bench.desk.idle, 5)
    assert view.tabs.value == "waterfall"
    view.tabs.value = "memory"
    turn_until(bench, lambda: bench.desk.idle, 5)
    assert view.tabs.value == "memory"
    assert view.figure.outputs
    do(bench, "run")
    view.tabs.index = 0
    do(bench, "tab", "left_out")
    assert errors(bench) == "", "a tab that was clicked before it went away"
    assert view.tabs.value == "overview"


def test_a_turn_ends_even_if_each_command_asks_for_another(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def do_again() -> None:
        asked.append(len(asked))
        if len(asked) < 100:
            bench.desk.put("again")

    monkeypatch.setattr(bench.desk, "do_again", do_again, raising=False)
    bench.desk.put("again")
    bench.desk.tick()
    assert asked == [0]


def test_the_bar_starts_again_when_kernels_have_been_built(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(self: Any, progress: Any = None, cancel: Any = None) -> None:
        for done in range(4) if progress else ():
            progress(done, 3, "building 3 CUDA sources")

    shares: list[float] = []
    step = bench.desk._on_step
    monkeypatch.setattr("eet_lab.panels.jobs.Engine.prepare", prepare)
    monkeypatch.setattr(bench.desk, "_on_step", lambda event: (step(event), shares.append(bench.desk._clock.share)))
    do(bench, "run")
    assert shares == [pytest.approx((i + 1) / 8) for i in range(8)]


def test_a_replay_takes_long_enough_to_be_seen_and_samples_go_forward(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SHORTEST_REPLAY_S", 0.25)
    samples = [{"t": t, "values": {"power_w": 1.0}} for t in (0.0, 0.0005)]
    recording = {"label": "GPU", "metrics": {"power_w": "W"}, "missing": {}, "samples": samples}
    events: SimpleQueue[Any] = SimpleQueue()
    begun = time.monotonic()
    jobs.replay(comparison, {"baseline": recording, "selection": recording})(worker.Feed(events), threading.Event())
    assert time.monotonic() - begun > 0.45
    told = [events.get() for _ in range(events.qsize())]
    assert [(e.done, e.total) for e in told if isinstance(e, worker.Progress)] == [(0, 2), (1, 2)]
    assert all("slow motion" in e.text for e in told if isinstance(e, worker.Phase))
    times = [e.t for e in told if isinstance(e, worker.Sampled)]
    assert len(times) == 4
    assert times == sorted(times), "the second run is drawn after the first"


def test_stop_ends_a_run_in_half_a_second_and_the_session_goes_on(bench: Workbench) -> None:
    do(bench, "setting", "max_new_tokens", 120)
    do(bench, "choose", "repeats", 50)
    bench.desk.put("compare")
    turn_until(bench, lambda: bench.desk.busy and bench.desk._clock.share > 0)
    begun = time.monotonic()
    bench.desk.actions.stop.click()
    bench.desk.tick()
    assert "stopping…" in bench.desk.actions.status.value
    turn_until(bench, lambda: not bench.desk.busy)
    assert time.monotonic() - begun < 0.5
    assert "compare stopped" in bench.desk.actions.status.value
    assert errors(bench) == ""
    do(bench, "setting", "max_new_tokens", 4)
    do(bench, "run")
    assert bench.result.generation.num_tokens == 8


def test_an_error_is_shown_with_its_remedy_and_the_session_goes_on(bench: Workbench) -> None:
    do(bench, "choose", "dtype", "float16")
    do(bench, "pick_model", "no-such-model")
    assert "There is no model" in errors(bench)
    assert "Give one of demo" in errors(bench)
    assert bench.desk.box.children.index(bench.desk.actions.error) == 4, "right under the actions"


def test_a_load_that_fails_leaves_the_model_that_was_there(bench: Workbench) -> None:
    before, before_choice = bench.model, bench.desk.state.model
    do(bench, "type_model", "./mistyped")
    assert bench.model is before
    assert "mistyped" in errors(bench)
    assert bench.desk.state.model is before_choice
    assert not bench.desk.actions.run.disabled
    assert bench.desk.header.path.layout.display != "none", "the name stays where it can be mended"
    do(bench, "pick_model", before_choice)
    assert bench.desk.header.again.layout.display == "none"
    do(bench, "prompt", 0, "5 6")
    assert errors(bench) == "", "a change takes down what failed"
    assert bench.desk.status == "ready"
    do(bench, "run")
    assert bench.result is not None


def test_with_nothing_switched_on_there_is_nothing_to_compare(bench: Workbench) -> None:
    for name in ("pre_padding", "mask_removal", "memory_reuse"):
        do(bench, "toggle", name, False)
    actions = bench.desk.actions
    assert (actions.run.disabled, actions.compare.disabled, actions.ladder.disabled) == (False, True, True)
    assert "No technique is switched on" in actions.status.value
    do(bench, "toggle", "memory_reuse", True)
    assert not actions.compare.disabled


def test_a_load_that_failed_can_be_tried_again(bench: Workbench, hf_model: Any, tmp_path: Any) -> None:
    again = bench.desk.header.again
    assert again.layout.display == "none"
    do(bench, "pick_model", str(tmp_path / "later"))
    assert errors(bench) != ""
    assert again.layout.display == ""
    hf_model.save_pretrained(tmp_path / "later")
    again.click()
    turn_until(bench, lambda: bench.model is not None, 20)
    turn_until(bench, lambda: bench.desk.idle)
    assert errors(bench) == ""
    assert again.layout.display == "none"


def test_the_badge_is_the_kind_of_model_and_not_its_path(bench: Workbench, hf_model: Any, tmp_path: Any) -> None:
    assert "live model" in bench.desk.header._facts.value
    folder = tmp_path / "oliver-random"
    hf_model.save_pretrained(folder)
    do(bench, "pick_model", str(folder))
    assert "weights from a folder" in bench.desk.header._facts.value
    assert "live model" not in bench.desk.header._facts.value
    assert {load(name, device="cpu").kind for name in (str(folder), "demo")} == {"folder", "demo"}
    assert set(BADGES) == set(get_args(Kind))


def test_a_model_that_was_left_is_forgotten(bench: Workbench) -> None:
    do(bench, "pick_model", "demo")
    do(bench, "prompt", 0, "Return the name")
    do(bench, "run")
    words = weakref.ref(bench.model.decoder.words)
    do(bench, "choose", "dtype", "bfloat16")
    assert bench.model.dtype == "bfloat16"
    gc.collect()
    assert words() is None, "its weights would stay in memory beside the new ones"


def test_text_for_a_model_without_a_tokenizer_is_a_reason_and_not_the_end(bench: Workbench) -> None:
    do(bench, "prompt", 0, "Return the name")
    assert errors(bench) == ""
    assert "came without a tokenizer" in bench.desk.actions.status.value
    assert bench.desk.actions.run.disabled
    do(bench, "prompt", 0, "5 499")
    assert "vocabulary ends at 498" in bench.desk.actions.status.value
    assert bench.desk.actions.run.disabled
    do(bench, "prompt", 0, "5 498")
    assert not bench.desk.actions.run.disabled


def test_an_action_that_does_not_exist_is_told(bench: Workbench) -> None:
    with pytest.raises(EETError, match="Did you mean 'compare'"):
        bench.press("comapre")


def test_an_unexpected_exception_is_shown_with_its_traceback(bench: Workbench) -> None:
    def work(feed: Any, cancel: Any) -> None:
        raise ZeroDivisionError("<i>oops</i>")

    bench.desk._submit("break", work)
    turn_until(bench, lambda: not bench.desk.busy)
    assert "ZeroDivisionError" in errors(bench)
    assert "Traceback" in errors(bench)
    assert "<i>" not in errors(bench)
    do(bench, "run")
    assert errors(bench) == ""
    assert bench.result is not None


def test_a_mistake_of_the_desk_itself_is_shown_too(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.desk.toggles, "update", lambda: 1 / 0)
    bench.desk.put("toggle", "mask_removal", False)
    bench.desk.tick()
    assert "ZeroDivisionError" in errors(bench)


def test_a_metric_that_dies_in_mid_run_is_explained(bench: Workbench) -> None:
    bench.desk.device._sampler.source.missing = {"process_rss_bytes": "the driver <went> away"}
    for _ in range(5):
        bench.desk.tick()
    assert bench.desk.live.memory.note == "process RSS: the driver <went> away"


class FakeGpu:
    """What NVML would say, until it goes away."""

    name, label = "nvml", "Imaginary GPU (NVML)"

    def __init__(self) -> None:
        self.metrics: dict[str, str] = {}
        self.missing: dict[str, str] = {}

    def read(self) -> dict[str, float]:
        return {} if self.missing else {"memory_used_bytes": 2.0**31, "utilization_percent": 40.0, "power_w": 300.0}

    def condition(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


def test_on_a_gpu_memory_is_three_kinds_of_lines_that_may_stop(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr("eet_lab.panels.device.open_source", lambda kind: gpu)
    bench.desk.device.watch("cuda")
    live = bench.desk.live
    assert [s["name"] for s in live.memory.series] == [
        "arena plan + KV",
        "torch allocated",
        "torch reserved",
        "NVML used",
    ]
    turn_until(bench, lambda: live.memory.points)
    assert {(series, y) for series, _, y in live.load.points} == {(0, 40.0), (1, 300.0)}
    assert {series for series, _, _ in live.memory.points} == {0, 1, 2, 3}
    gpu.missing = {"memory_used_bytes": "NVML: GPU is lost", "power_w": "NVML: GPU is lost"}
    turn_until(bench, lambda: live.memory.note)
    assert live.memory.note == "NVML used: NVML: GPU is lost"
    assert live.load.note == "power: NVML: GPU is lost"


# Opening and closing


def test_a_second_workbench_closes_the_first_with_its_threads(hf_model: Any, tmp_path: Any) -> None:
    first = Workbench(hf_model, PROMPTS, folder=tmp_path, device="cpu")
    first.start()
    first.wait(30)
    assert sorted(threads()) == ["eet-engine", "eet-sampler", "eet-ui"]
    second = Workbench(hf_model, PROMPTS, folder=tmp_path, device="cpu")
    assert not first._ui.is_alive()
    assert sorted(threads()) == ["eet-engine", "eet-sampler"]
    assert first.desk.box.comm is None, "its widgets are gone"
    second.close()
    second.close()
    assert threads() == []


def test_closing_in_mid_run_leaves_no_thread(hf_model: Any, tmp_path: Any) -> None:
    workbench = Workbench(hf_model, PROMPTS, folder=tmp_path, device="cpu", max_new_tokens=100)
    workbench.start()
    workbench.wait(30)
    workbench.press("compare")
    time.sleep(0.25)
    workbench.close()
    assert threads() == []


def test_closing_waits_for_a_turn_that_starts_a_sampler(
    hf_model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workbench = Workbench(hf_model, PROMPTS, folder=tmp_path, device="cpu")
    workbench.start()
    workbench.wait(30)
    inner, watching = workbench.desk.device.watch, threading.Event()

    def slow(kind: str) -> None:
        watching.set()
        time.sleep(0.3)
        inner(kind)

    monkeypatch.setattr(workbench.desk.device, "watch", slow)
    workbench.desk.put("choose", "device", "cpu")
    assert watching.wait(5)
    workbench.close()
    assert threads() == []


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download cannot be stopped."""
    monkeypatch.setattr(worker, "PATIENCE_S", 0.1)
    busy, downloaded = worker.Worker(1), threading.Event()
    busy.submit("load", lambda feed, cancel: downloaded.wait(20))
    begun = time.monotonic()
    busy.close()
    assert time.monotonic() - begun < 5
    downloaded.set()
    busy._thread.join(5)
    assert not busy._thread.is_alive()


@pytest.mark.parametrize(
    ("choices", "error"),
    [
        ({"recipe": "pre_paddin"}, RecipeError),
        ({"temperature": float("nan")}, PromptError),
        ({"recipe": 5}, RecipeError),
        ({"max_new_tokens": 0}, PromptError),
        ({"max_tokens": 5}, PromptError),
        ({"device": "tpu"}, ModelError),
    ],
)
def test_bad_arguments_are_told_at_once_and_start_nothing(choices: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Workbench(**choices)
    assert threads() == []


# Results


def test_results_are_saved_opened_replayed_and_exported(bench: Workbench) -> None:
    do(bench, "compare")
    measured = bench.result
    shelf = bench.desk.shelf
    for button in (shelf.view.save, shelf.view.csv, shelf.view.page):
        button.click()
        turn_until(bench, lambda: bench.desk.idle)
    assert errors(bench) == ""
    written = {path.suffix: path for path in shelf.files.folder.iterdir()}
    assert sorted(written) == [".csv", ".html", ".json"]
    assert load_result(written[".json"]) == measured, "the file is what `load_result` reads"

    page = written[".html"].read_text(encoding="utf-8")
    assert "Plotly.newPlot" in page
    assert 'src="http' not in page

    shelf.view.files.value = str(written[".json"])
    do(bench, "replay")
    assert bench.result.environment.recorded
    assert bench.result.selection == measured.selection
    assert "Recorded on" in shelf.view._words.value
    assert "recorded on" in bench.desk.live.memory.title
    assert bench.desk.live.stream.counts == [8, 8]
    assert {series for series, _, _ in bench.desk.live.latency.points} == {0, 1}
    bench.desk.put("replay")
    bench.desk.put("replay")
    bench.desk.tick()
    assert bench.desk.worker._jobs.qsize() <= 1
    turn_until(bench, lambda: bench.desk.idle)
    shelf.view.save.click()
    turn_until(bench, lambda: bench.desk.idle)
    assert json.loads(max(shelf.files.folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns).read_text())[
        "monitor"
    ], "samples are kept on"


def test_a_foreign_file_is_refused_and_not_kept(bench: Workbench) -> None:
    for content in (b"{}", b"\xff\xfe", b'{"eet_lab_result": 1, "kind": "comparison", "result": {}}'):
        do(bench, "upload", [{"name": "mine.json", "content": content}])
        assert "mine.json cannot be used" in errors(bench)
        assert "loaded-" not in errors(bench).split("<details>")[0]
    assert list(bench.desk.shelf.files.folder.glob("*.json")) == []


def test_a_folder_that_cannot_be_written_is_told(
    bench: Workbench, comparison: Comparison, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def full(path: Any, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    kept = recordings.save(tmp_path / "kept.json", comparison, {"baseline": {}})
    before = kept.read_bytes()
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(ResultError, match="No space left"):
        recordings.save(kept, comparison, {})
    assert kept.read_bytes() == before, "whole or not at all"
    do(bench, "upload", [{"name": "mine.json", "content": before}])
    assert "No space left" in errors(bench)
    assert "Unexpected" not in errors(bench)
    monkeypatch.undo()
    assert list(tmp_path.glob("**/*.json")) == [kept]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_result_is_written_once(comparison: Comparison, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    written: list[str] = []
    monkeypatch.setattr("eet_lab.bench.results.write_whole", lambda path, content: written.append(content))
    recordings.save(tmp_path / "a.json", comparison, {"baseline": {"label": "x"}})
    [content] = written
    assert json.loads(content)["monitor"] == {"baseline": {"label": "x"}}


def test_samples_that_are_no_numbers_are_told(comparison: Comparison, tmp_path: Any) -> None:
    with pytest.raises(ResultError, match="not finite"):
        recordings.save(tmp_path / "a.json", comparison, {"baseline": {"power_w": [float("nan")]}})
    assert list(tmp_path.iterdir()) == []


def test_damaged_samples_are_refused(comparison: Comparison, tmp_path: Any) -> None:
    path = recordings.save(tmp_path / "a.json", comparison, {"baseline": {"label": "x"}})
    with pytest.raises(ResultError, match="damaged"):
        recordings.open_file(path)


@pytest.fixture(scope="module")
def comparison(tiny: Any) -> Comparison:
    from eet_lab.bench import compare

    rows = [[5, 6, 7], [8, 9, 10, 11, 12, 13]]
    return compare(tiny, rows, "pre_padding,mask_removal,memory_reuse", repeats=2, max_new_tokens=6)


@pytest.fixture(scope="module")
def climbed(tiny: Any) -> Ladder:
    from eet_lab.bench import ladder

    return ladder(tiny, [[5, 6, 7], [8, 9]], "pre_padding,mask_removal,memory_reuse", repeats=2, max_new_tokens=6)


def test_every_figure_can_be_drawn_and_is_small(comparison: Comparison, climbed: Ladder) -> None:
    for result in (comparison, climbed):
        drawn = figures.plot(result, "all")
        assert list(drawn) == list(figures.kinds(result))
        assert len(json.dumps([rendered(fig) for fig in drawn.values()])) < 60_000


def test_a_metric_has_one_name_in_tables_and_tiles(comparison: Comparison) -> None:
    table, tiles = comparison.to_text(), summary.overview(comparison)
    for metric in (*TIMES, PEAK):
        assert metric.name in table
        assert f"<span>{metric.name}</span>" in tiles
    drawn = {trace.name for trace in figures.plot(comparison, "memory").data}
    assert {"weights", "KV cache"} <= drawn <= {*MEMORY_PARTS.values(), "peak"}


def test_a_higher_peak_is_explained_where_activations_grew(comparison: Comparison) -> None:
    memory = comparison.baseline.memory
    wider = {**memory, "peak": 2 * memory["peak"], "activations": memory["activations"] + memory["peak"]}
    grown = replace(comparison, selection=replace(comparison.selection, memory=wider))
    assert "Ladder tells which technique" in summary.overview(grown)
    same = replace(comparison, selection=replace(comparison.selection, memory=memory))
    assert "Ladder tells which technique" not in summary.overview(same)


def test_a_ladder_that_was_stopped_at_once_can_be_shown_kept_and_replayed(
    bench: Workbench, climbed: Ladder, tmp_path: Any
) -> None:
    empty = replace(climbed, rungs=(), left_out=(), partial=True)
    assert "Stopped early" in export.page(empty)
    assert figures.plot(empty, "all") == {}
    for kind in (None, "waterfall"):
        with pytest.raises(ResultError, match="before anything was measured"):
            figures.plot(empty, kind)
    do(bench, "upload", [{"name": "mine.json", "content": empty.save(tmp_path / "empty.json").read_bytes()}])
    assert errors(bench) == ""
    assert bench.result == replace(empty, environment=replace(empty.environment, recorded=True))
    for button in (bench.desk.shelf.view.csv, bench.desk.shelf.view.page, bench.desk.shelf.view.replay):
        button.click()
        turn_until(bench, lambda: bench.desk.idle)
        assert errors(bench) == ""


def test_a_ladder_of_one_rung_can_be_drawn(climbed: Ladder) -> None:
    assert "waterfall" in figures.plot(replace(climbed, rungs=climbed.rungs[:1], left_out=()), "all")


def test_an_unknown_figure_is_told_with_the_known_ones(comparison: Comparison) -> None:
    with pytest.raises(ResultError, match="latency"):
        figures.plot(comparison, "latencies")


def test_the_waterfall_adds_up(climbed: Ladder) -> None:
    ms = figures.plot(climbed, "waterfall").data[0]
    assert sum(ms.y[:-1]) == pytest.approx(climbed.rungs[-1].measurement.total_ms.p50, rel=2e-3)


def test_the_latency_trace_ends_when_the_run_does(comparison: Comparison) -> None:
    for trace, m in zip(
        figures.plot(comparison, "latency").data, (comparison.baseline, comparison.selection), strict=True
    ):
        assert trace.x[-1] == pytest.approx(sum(m.step_ms), rel=1e-3)


def test_a_replay_gives_every_row_its_tokens_in_order(comparison: Comparison) -> None:
    for m in (comparison.baseline, comparison.selection):
        rows: list[list[int]] = [[] for _ in m.tokens]
        steps = list(jobs.tokens_by_step(m, comparison.prompt_lengths))
        assert [len(step) for step in steps] == list(m.step_tokens)
        for step in steps:
            for row, token in step:
                rows[row].append(token)
        assert tuple(map(tuple, rows)) == m.tokens


def test_the_page_needs_no_network(climbed: Ladder, tmp_path: Any) -> None:
    page = export.write_page(climbed, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "cdn.plot.ly" not in page.split("<script>", 1)[0]
    assert page.count("Plotly.newPlot(") >= len(figures.kinds(climbed))


# The small parts


def of_bytes(ids: Any) -> str:
    return bytes(ids).decode(errors="replace")


def test_text_waits_for_the_whole_character() -> None:
    transcript = Transcript(of_bytes)
    assert [transcript.add([each]) for each in "aé<".encode()] == ["a", "", "é", "<"]


def test_a_long_batch_that_ends_inside_a_character_breaks_nothing() -> None:
    text = "12345678 é €uro 😀"
    for size in range(1, 12):
        transcript, ids = Transcript(of_bytes), list(text.encode())
        pieces = [transcript.add(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert "".join(pieces) == text
    assert Transcript(of_bytes).add("12345678é".encode()[:-1]) == "12345678", "only the character waits"


def test_bytes_that_never_become_a_character_are_shown_in_the_end() -> None:
    transcript = Transcript(of_bytes)
    shown = [transcript.add([0xC3]) for _ in range(9)]
    assert "".join(shown) == "\ufffd" * 6
    assert transcript.finish() == "\ufffd" * 3
    assert transcript.finish() == ""


def test_the_stream_sends_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, sent = TokenStream(), []
    monkeypatch.setattr(stream, "send", lambda content, buffers=None: sent.append(content))
    stream.begin(["p", "q"], lambda ids: "".join(f"[{i}]" for i in ids))
    stream.push([(0, 1), (1, 2), (0, 3)])
    stream.push([])
    assert sent[1:] == [{"kind": "append", "news": [[0, "[1][3]", 2], [1, "[2]", 1]]}]
    stream.snapshot_now()
    assert json.loads(stream.snapshot)["texts"] == ["[1][3]", "[2]"]


def test_a_chart_sends_only_new_points_and_keeps_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    chart, sent = StripChart(series=[{"name": "a", "color": "red"}]), []
    monkeypatch.setattr(chart, "send", lambda content, buffers=None: sent.append(len(buffers[0]) if buffers else 0))
    chart.push([(0, 0.0, 1.0), (0, 1.0, 2.0)])
    chart.push([])
    chart.push([(0, 2.0, 3.0)])
    assert sent == [24, 12]
    assert chart.snapshot == b""
    chart.snapshot_now()
    assert np.frombuffer(chart.snapshot, "<f4").reshape(-1, 3)[:, 2].tolist() == [1, 2, 3]


def test_a_chart_keeps_a_whole_window_of_every_series() -> None:
    chart = StripChart(window=60.0)
    chart.series = [{"name": name, "color": "red"} for name in "abcd"]
    chart.push([(index, tick / 10, 1.0) for tick in range(700) for index in range(4)])
    for index in range(4):
        ticks = [x for series, x, _ in chart.points if series == index]
        assert (ticks[0], ticks[-1]) == (pytest.approx(10.0), pytest.approx(69.9))
        assert ticks == sorted(ticks)


def test_a_long_prompt_gets_more_lines() -> None:
    editor = PromptsEditor(lambda *command: None)
    prompts = ["", "short", "w " * 70, "one\ntwo\nthree\nfour"]
    editor.update(prompts, None, 8, None)
    assert [row.text.rows for row in editor.rows] == [1, 1, 2, 3]
    editor.update([*prompts[:1], "w " * 200, *prompts[2:]], None, 8, None)
    assert editor.rows[1].text.rows == 3


def test_the_clock_counts_phases_and_steps_and_says_what_is_left() -> None:
    now = [0.0]
    clock = Clock(lambda: now[0])
    clock.progress(0, 4)
    assert clock.left() == ""
    now[0] = 10.0
    clock.progress(1, 4)
    assert clock.share == 0.25
    assert clock.left() == "about 30 s left"
    now[0] = 14.0
    assert clock.left() == "about 26 s left", "it falls while nothing is told"
    now[0] = 35.0
    assert clock.left() == "about 20 s left", "a unit that is overdue does not eat into the others"
    clock.step(32, 64)
    assert clock.share == 0.375


def test_building_kernels_is_a_count_of_its_own() -> None:
    now = [0.0]
    clock = Clock(lambda: now[0])
    tally = Tally(12, lambda done, total, text: clock.progress(done, total))
    tally.say("warming up")
    tally.building(0, 9, "one.cu")
    now[0] = 90.0
    tally.building(9, 9, "nine.cu")
    tally.finish(2)
    tally.say("timing")
    assert clock.share == pytest.approx(2 / 12)
    assert clock.left() == ""
    now[0] = 91.0
    tally.finish()
    tally.say("timing")
    assert clock.left() == "about 9 s left", "what the build took is no unit's pace"


def test_a_tally_leaves_the_time_left_to_whoever_shows_it() -> None:
    said: list[str] = []
    tally = Tally(3, lambda done, total, text: said.append(text))
    for _ in range(3):
        tally.say("timing")
        tally.finish()
    assert said == ["timing"] * 3


def test_state_explains_conflicts_and_requirements() -> None:
    state = State(device="cpu")
    state.choose(Recipe.parse("memory_reuse"))
    assert state.blocked("mask_removal") is None
    state.turn("memory_reuse", "planner", "first_fit")
    with pytest.raises(RecipeError):
        state.turn("memory_reuse", "planner", "wurst")
    assert str(state.recipe()) == "memory_reuse:planner=first_fit"
    assert "No model" in problem(state, None, None)


def test_errors_made_for_users_are_shown_without_a_traceback() -> None:
    card = theme.error_card(PromptError("temperature is <nan>, but it must be 0."))
    assert "Prompt error" in card
    assert "&lt;nan&gt;" in card
    assert "Traceback" not in card


def test_a_page_that_was_opening_is_told_once_more(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    now, sent = [0.0], []
    refresh = Refresh(bench.desk.box, lambda: now[0])
    monkeypatch.setattr("ipywidgets.Widget.send_state", lambda self, key=None: sent.append((self, key)))
    refresh.turn(changed=True, busy=False)
    assert sent == []
    now[0] = 10.0
    refresh.turn(changed=False, busy=True)
    assert sent == [], "runs are left alone"
    refresh.turn(changed=False, busy=False)
    assert (bench.desk.actions.status, {"value"}) in sent
    assert any(widget is bench.desk.actions.compare and "disabled" in names for widget, names in sent)
    assert not any(widget is bench.desk.prompts.rows[0].text and "value" in names for widget, names in sent)
    sent.clear()
    refresh.turn(changed=False, busy=False)
    assert sent == [], "once"


def test_callbacks_only_fill_the_inbox(bench: Workbench) -> None:
    """They run on whatever thread there is: with nobody turning the desk, nothing moves."""
    before, prompts = bench.desk.actions.status.value, bench.desk.state.prompts
    for button in (bench.desk.actions.run, bench.desk.prompts.add, bench.desk.prompts.rows[0].remove):
        button.click()
    bench.desk.toggles["pre_padding"].switch.value = False
    bench.desk.generating.stop.value = True
    assert not bench.desk.busy
    assert bench.desk.actions.status.value == before
    assert bench.desk.state.prompts == prompts
    assert bench.desk.state.is_on("pre_padding")
    assert not bench.desk.state.stop_at_eos
    assert bench.desk._inbox.qsize() == 5
