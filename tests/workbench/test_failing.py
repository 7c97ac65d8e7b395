"""Models that come and go, and what fails: told with its remedy, and the session goes on."""

from __future__ import annotations

import gc
import weakref
from typing import Any, get_args

import pytest

from eet_lab.models import ENCODER_PRESETS, SEQ2SEQ_PRESETS, load
from eet_lab.models.loading import Kind
from eet_lab.workbench import Workbench
from eet_lab.workbench.choices import LIVE, OTHER
from eet_lab.workbench.views.bar import BADGES
from workbench.driving import ask, do, enabled, errors, shown, status, turn, turn_until


def test_an_error_is_shown_with_its_remedy_and_the_session_goes_on(bench: Workbench) -> None:
    do(bench, ask.pick_dtype("float16"), ask.pick_model("no-such-model"))
    assert "There is no model" in errors(bench)
    assert "Give one of demo" in errors(bench)
    assert "There is no model" in status(bench), "this line stays in view when the card does not"


def test_a_load_that_fails_leaves_the_model_that_was_there(bench: Workbench) -> None:
    before, before_choice = bench.model, bench.controller.state.model
    do(bench, ask.type_model("./mistyped"))
    assert bench.model is before
    assert "mistyped" in errors(bench)
    assert bench.controller.state.model is before_choice
    assert enabled(bench)["run"]
    told = shown(bench, "bar")
    assert told["model"] == LIVE and not told["ask_path"], "the list names the model that a Run takes"
    assert told["load_again"] == "./mistyped"
    do(bench, ask.pick_model(OTHER))
    assert shown(bench, "bar")["path"] == "./mistyped", "where it can be mended"
    assert "mistyped" in errors(bench)
    do(bench, ask.pick_model(LIVE))
    assert not shown(bench, "bar")["load_again"]
    assert (errors(bench), status(bench)) == ("", "ready")
    do(bench, ask.type_model("./mistyped"))
    do(bench, ask.edit_prompt(0, "5 6"))
    assert errors(bench) == "", "a change takes down what failed"
    assert status(bench) == "ready"
    do(bench, ask.run())
    assert bench.result is not None


def test_a_run_names_its_model_where_another_one_was_asked_for(bench: Workbench) -> None:
    for asked in (ask.pick_model(OTHER), ask.type_model("./mistyped")):
        do(bench, asked)
        do(bench, ask.run())
        told = shown(bench, "bar")
        assert bench.result is not None and told["model"] == LIVE
        assert told["facts"] and not told["ask_path"] and not told["load_again"]


def test_a_result_names_its_model_once_another_one_is_chosen(bench: Workbench) -> None:
    do(bench, ask.run())
    about = shown(bench, "bar")["headline"]["about"]
    name = bench.model.name
    do(bench, ask.pick_model("demo"))
    assert shown(bench, "bar")["headline"]["about"] == f"{name} · {about}" and name not in about
    do(bench, ask.pick_model(LIVE))
    assert shown(bench, "bar")["headline"]["about"] == about


def test_a_run_of_a_model_that_cannot_be_loaded_is_no_run_of_another(bench: Workbench) -> None:
    """Who types a name and clicks on Run sends both at once."""
    for message in (ask.type_model("./mistyped"), ask.run()):
        bench.controller.put(message)
    turn_until(bench, lambda: bench.controller.idle)
    assert "mistyped" in errors(bench) and shown(bench, "bar")["load_again"]
    assert bench.result is None
    for message in (ask.type_model("./mistyped"), ask.run()):
        bench.controller.put(message)
    turn(bench)
    do(bench, ask.pick_model("demo"))
    assert bench.result is not None and bench.model.kind == "demo", "what was chosen since is loaded, and run"


def test_stop_while_a_model_is_loaded_begins_nothing_with_it(bench: Workbench) -> None:
    for message in (ask.pick_model("demo"), ask.run()):
        bench.controller.put(message)
    turn(bench)
    do(bench, ask.stop())
    assert bench.result is None


def test_only_models_that_can_run_here_are_offered(bench: Workbench) -> None:
    do(bench, ask.type_model("bert-bas"))
    assert "Give one of demo, gpt2" in errors(bench) and "a folder with config.json" in errors(bench)
    assert not any(name in errors(bench) for name in (*ENCODER_PRESETS, *SEQ2SEQ_PRESETS))


def test_a_load_that_failed_can_be_tried_again(bench: Workbench, hf_model: Any, tmp_path: Any) -> None:
    assert not shown(bench, "bar")["load_again"]
    do(bench, ask.type_model(str(tmp_path / "later")))
    assert errors(bench) != ""
    assert shown(bench, "bar")["load_again"]
    hf_model.save_pretrained(tmp_path / "later")
    do(bench, ask.load_again())
    assert errors(bench) == ""
    assert not shown(bench, "bar")["load_again"]


def test_the_badge_is_the_kind_of_model_and_not_its_path(bench: Workbench, hf_model: Any, tmp_path: Any) -> None:
    assert shown(bench, "bar")["badge"]["text"] == "live model"
    folder = tmp_path / "oliver-random"
    hf_model.save_pretrained(folder)
    do(bench, ask.type_model(str(folder)))
    assert shown(bench, "bar")["badge"]["text"] == "weights from a folder"
    assert {load(name, device="cpu").kind for name in (str(folder), "demo")} == {"folder", "demo"}
    assert set(BADGES) == set(get_args(Kind))


@pytest.mark.parametrize("foresees", [True])
def test_a_model_that_was_left_is_forgotten(bench: Workbench) -> None:
    do(bench, ask.pick_model("demo"), ask.edit_prompt(0, "Return the name"), ask.run())
    weights = weakref.ref(bench.model.decoder.token_embedding)
    do(bench, ask.pick_dtype("bfloat16"))
    assert bench.model.dtype == "bfloat16"
    # A forecast that is under way keeps the model that it is about.
    turn_until(bench, lambda: bench.controller.background.idle)
    gc.collect()
    assert weights() is None, "its weights would stay in memory beside the new ones"


def test_text_for_a_model_without_a_tokenizer_is_a_reason_and_not_the_end(bench: Workbench) -> None:
    do(bench, ask.edit_prompt(0, "Return the name"))
    assert errors(bench) == ""
    assert "came without a tokenizer" in status(bench)
    assert not enabled(bench)["run"]
    do(bench, ask.edit_prompt(0, "5 499"))
    assert "vocabulary ends at 498" in status(bench)
    assert not enabled(bench)["run"]
    do(bench, ask.edit_prompt(0, "5 498"))
    assert enabled(bench)["run"]


def test_an_unexpected_exception_is_shown_with_its_traceback(bench: Workbench) -> None:
    def work(feed: Any, cancel: Any) -> None:
        raise ZeroDivisionError("oops")

    bench.controller._submit("run", work)
    turn_until(bench, lambda: not bench.controller.busy)
    assert "Unexpected: ZeroDivisionError" in errors(bench)
    assert "Traceback" in errors(bench)
    do(bench, ask.run())
    assert errors(bench) == ""
    assert bench.result is not None


def test_a_mistake_of_the_controller_itself_is_shown_too(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.controller.page.techniques, "show", lambda state: 1 / 0)
    bench.controller.put(ask.toggle("mask_removal", False))
    turn_until(bench, lambda: "ZeroDivisionError" in errors(bench))  # not in a turn that errs
