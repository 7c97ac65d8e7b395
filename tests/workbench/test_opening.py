"""Opening and closing a workbench: one at a time, and no thread left behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import ipywidgets as W
import pytest
from cost_tables import TURBO_2060

from eet_lab.errors import ModelError, PromptError, RecipeError, ResultError, ScheduleError
from eet_lab.workbench import Workbench
from eet_lab.workbench.engine_thread import EngineThread
from eet_lab.workbench.rows import SIDECAR
from eet_lab.workbench.serving_view import ServingView
from eet_lab.workbench.train_view import TrainView
from workbench.driving import PROMPTS, ask, threads


def test_a_second_workbench_closes_the_first_with_its_threads(hf_model: Any, tmp_path: Any) -> None:
    first = Workbench(hf_model, PROMPTS, folder=tmp_path, device="cpu")
    first.start()
    first.wait(30)
    assert sorted(threads()) == ["eet-background", "eet-engine", "eet-sampler", "eet-ui"]
    second = Workbench(hf_model, PROMPTS, folder=tmp_path, device="cpu")
    assert not first._ui.is_alive()
    assert sorted(threads()) == ["eet-background", "eet-engine", "eet-sampler"]
    assert first.controller.page.box.comm is None and first._recovery.comm is None, "its widgets are gone"
    second.close()
    second.close()
    assert threads() == []


def models() -> set[str]:
    """All that a saved notebook would keep."""
    return set(W.Widget.get_manager_state()["state"])


def test_a_closed_page_leaves_no_model_behind(hf_model: Any, tmp_path: Any) -> None:
    before = models()
    workbench = Workbench(hf_model, PROMPTS, folder=tmp_path, device="cpu", max_new_tokens=4)
    workbench.wait(30)
    workbench.controller.put(ask.show_serving(True))
    workbench.press("run")
    assert workbench.wait(30) and len(models() - before) > 20
    view = ServingView(TURBO_2060, requests=20)  # without a model, and so without two of its buttons
    for action in ("simulate", "loads"):
        view.press(action)
        view.wait()
    view.controller.page._kept.show()  # a place of a figure that none needs any more
    train = TrainView(workbench.model, steps=2)
    for page in (workbench, view, train):
        page.close()
    assert models() == before


def test_the_cell_run_again_in_mid_run_shows_the_same_workbench(hf_model: Any, tmp_path: Any) -> None:
    """After a reload of a notebook that was not saved, this is how the page finds what runs."""
    asked = {"folder": tmp_path, "device": "cpu", "max_new_tokens": 100}
    first = Workbench(hf_model, PROMPTS, **asked)
    first.wait(30)
    first.press("compare")
    assert Workbench(hf_model, PROMPTS, **asked) is first
    first.press("stop")
    first.wait(30)
    other = Workbench(hf_model, PROMPTS, **asked)
    assert other is not first, "nothing runs any more: a fresh start"
    other.close()


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
    inner, watching = workbench.controller.device.watch, threading.Event()

    def slow(kind: str) -> None:
        watching.set()
        time.sleep(0.3)
        inner(kind)

    monkeypatch.setattr(workbench.controller.device, "watch", slow)
    workbench.controller.put(ask.pick_device("cpu"))
    assert watching.wait(5)
    workbench.close()
    assert threads() == []


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download cannot be stopped."""
    monkeypatch.setattr(EngineThread, "PATIENCE_S", 0.1)
    busy, begun_to_load, downloaded = EngineThread(), threading.Event(), threading.Event()
    busy.submit(
        lambda answer: None, "load", lambda feed, cancel: (begun_to_load.set(), downloaded.wait(20)), threading.Event()
    )
    assert begun_to_load.wait(20)
    begun = time.monotonic()
    busy.close()
    assert time.monotonic() - begun < 5
    downloaded.set()
    busy._thread.join(5)
    assert not busy._thread.is_alive()


@pytest.mark.parametrize("folder", [5, "~nobody-has-this-name/results"])
def test_one_that_cannot_be_opened_leaves_the_one_that_is_open(hf_model: Any, tmp_path: Any, folder: Any) -> None:
    first = Workbench(hf_model, PROMPTS, folder=tmp_path, device="cpu")
    first.wait(30)
    before = sorted(threads())
    with pytest.raises((ResultError, RuntimeError)):
        Workbench(hf_model, PROMPTS, folder=folder, device="cpu")
    assert sorted(threads()) == before and first._ui.is_alive()
    first.close()
    assert threads() == []


def test_a_damaged_list_of_names_keeps_no_workbench_from_opening(hf_model: Any, tmp_path: Any) -> None:
    (tmp_path / SIDECAR).write_text('{"a": {"stamp": [1, 2], "summary": 5}}')
    workbench = Workbench(hf_model, PROMPTS, folder=tmp_path, device="cpu")
    workbench.close()
    assert threads() == []


def test_wrong_types_are_told_with_what_is_accepted() -> None:
    with pytest.raises(ModelError, match="dtype is '5', but it must be one of float32, float16, bfloat16"):
        Workbench(dtype=5)
    with pytest.raises(ResultError, match="folder is 5, but it must be a path"):
        Workbench(folder=5)
    with pytest.raises(ResultError, match="folder is '~nobody-here/x', but no home of '~nobody-here' is known"):
        Workbench(folder="~nobody-here/x")
    for policies in (5, b"x", ["token_budget", 5]):
        with pytest.raises(ScheduleError, match="policies is .*, but it must be the name of a policy or a list"):
            ServingView(policies=policies)
    assert threads() == []


@pytest.mark.parametrize(
    ("choices", "error"),
    [
        ({"recipe": "pre_paddin"}, RecipeError),
        ({"temperature": float("nan")}, PromptError),
        ({"recipe": 5}, RecipeError),
        ({"max_new_tokens": 0}, PromptError),
        ({"max_tokens": 5}, PromptError),
        ({"device": "tpu"}, ModelError),
        ({"dtype": 5}, ModelError),
        ({"dtype": "int4"}, ModelError),
        ({"folder": 5}, ResultError),
        ({"stop": (3,)}, PromptError),  # the page's own setting is the tick box
        ({"prompts": 5}, PromptError),
        ({"prompts": ["a"] * 257}, PromptError),
    ],
)
def test_bad_arguments_are_told_at_once_and_start_nothing(choices: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Workbench(**choices)
    assert threads() == []
