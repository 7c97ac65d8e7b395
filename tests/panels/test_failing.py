"""Models that come and go, and what fails: told with its remedy, and the session goes on."""

from __future__ import annotations

import gc
import weakref
from typing import Any, get_args

import pytest

from eet_lab.models import load
from eet_lab.models.load import Kind
from eet_lab.panels import Workbench
from eet_lab.panels.controls import BADGES
from panels.driving import do, errors, turn_until


def test_an_error_is_shown_with_its_remedy_and_the_session_goes_on(bench: Workbench) -> None:
    do(bench, "choose", "dtype", "float16")
    do(bench, "pick_model", "no-such-model")
    assert "There is no model" in errors(bench)
    assert "Give one of demo" in errors(bench)
    assert "There is no model" in bench.desk.actions.status.value, "this line stays in view when the card does not"
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
    assert bench.desk.status.text == "ready"
    do(bench, "run")
    assert bench.result is not None


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
    # A forecast that is under way keeps the model that it is about.
    turn_until(bench, lambda: bench.desk.beside.forecast.foreseen is not None)
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
