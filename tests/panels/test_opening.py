"""Opening and closing a workbench: one at a time, and no thread left behind."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from eet_lab.errors import ModelError, PromptError, RecipeError
from eet_lab.panels import Workbench, worker
from panels.driving import PROMPTS, threads


def test_a_second_workbench_closes_the_first_with_its_threads(hf_model: Any, tmp_path: Any) -> None:
    first = Workbench(hf_model, PROMPTS, folder=tmp_path, device="cpu")
    first.start()
    first.wait(30)
    assert sorted(threads()) == ["eet-aside", "eet-engine", "eet-sampler", "eet-ui"]
    second = Workbench(hf_model, PROMPTS, folder=tmp_path, device="cpu")
    assert not first._ui.is_alive()
    assert sorted(threads()) == ["eet-aside", "eet-engine", "eet-sampler"]
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
