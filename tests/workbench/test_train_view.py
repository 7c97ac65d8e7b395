"""The training panel: what is chosen is trained, stopped, resumed and compared; what goes wrong is told."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import encoders
import families
import pytest
import torch

import eet_lab
from eet_lab.bench.train_compare import TrainLadder
from eet_lab.errors import EETError, ModelError, TrainingError
from eet_lab.figures.script import all_widgets
from eet_lab.models import Model
from eet_lab.models.config import EncoderConfig
from eet_lab.models.loading import demo_tokenizer
from eet_lab.models.table import flat
from eet_lab.models.tokenizer import Tokenizer
from eet_lab.models.weights import random_decoder
from eet_lab.training import demos
from eet_lab.training.asked import TrainAsked
from eet_lab.training.demos import demo_of
from eet_lab.workbench import train_jobs, train_page
from eet_lab.workbench.train_jobs import train_model
from eet_lab.workbench.train_view import TrainView

ROWS = {"row_tokens": 12, "batch_rows": 2, "warmup_steps": 2, "lr": 1e-2}


@pytest.fixture(scope="module")
def model() -> Model:
    words = Tokenizer(lambda text: [5 + ord(each) % 40 for each in text], lambda ids, **_: str(ids), families.V)
    return replace(families.ours("gpt2"), tokenizer=words)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and again " * 6)
    return path


@pytest.fixture
def view(model: Model, data: Path, tmp_path: Path) -> Iterator[TrainView]:
    view = eet_lab.TrainView(model, data, folder=tmp_path / "run", steps=5, **ROWS)
    yield view
    view.close()
    assert [each.name for each in threading.enumerate() if each.name.startswith("eet-")] == []


def click(view: TrainView, action: str) -> None:
    assert not view.controller.page.buttons[action].disabled
    view.controller.page.buttons[action].click()
    view.wait()


def points(view: TrainView, chart: str) -> list[tuple[int, float, float]]:
    return view.controller.page.live.charts[chart].points


def closed(page: train_page.TrainPage) -> None:
    for widget in all_widgets(page.box):
        widget.close()


def told(view: TrainView) -> str:
    return view.controller.page.error.value or view.controller.page.headline.value


def test_what_is_chosen_is_trained_and_resumed_to_the_bit(view: TrainView, model: Model, tmp_path: Path) -> None:
    page = view.controller.page
    assert page.buttons["resume"].disabled and "on a CPU" in page.box.children[1].value
    click(view, "train")
    run = view.run
    assert page.live.box.layout.display is None
    assert run is not None and [step.number for step in run.steps] == [*range(5)] and (tmp_path / "run").is_dir()
    first, last = run.evaluations[0].loss, run.evaluations[-1].loss
    assert f"Loss {first:.2f} to {last:.2f} on held-out data in 5 steps" in told(view) and "tokens/s" in told(view)
    losses = [y for line, _, y in points(view, "loss") if line == 0]
    assert losses == list(run.losses) and len(points(view, "loss")) == 5 + 6
    assert len(points(view, "norm")) == len(points(view, "speed")) == 5
    assert points(view, "memory") == [] and "Not measured" in page.live.charts["memory"].note

    click(view, "train")  # a checkpoint is not written over
    assert "which a new run would write over" in told(view) and view.run is run
    click(view, "resume")
    assert "already has 5 steps, and steps (5) counts those too. Ask for more than 5" in told(view)
    page.fields["steps"].value = 7
    before = [page.fields[name].value for name in ("steps", "lr", "batch_rows")]
    click(view, "resume")
    assert view.run is not None and [step.number for step in view.run.steps] == [5, 6]
    resumed = view.trained
    assert "Not as in" not in page.status.value
    page.fields["steps"].value, page.fields["lr"].value, page.fields["batch_rows"].value = 8, 2e-3, 3
    click(view, "resume")
    assert re.search(
        r"goes on from: learning rate 0\.002 \(was [\d.]+\), rows a batch 3 \(was \d\)\.", page.status.value
    )
    page.fields["steps"].value, page.fields["lr"].value, page.fields["batch_rows"].value = before
    page.fields["folder"].value = ""
    view.wait()
    click(view, "train")
    assert view.run is not None and view.run.losses[:5] == run.losses and page.buttons["resume"].disabled
    assert view.trained is not None and resumed is not None and view.trained.network is not model.network
    for (_, one), (_, other) in zip(flat(view.trained.network), flat(resumed.network), strict=True):
        assert torch.equal(one, other)


def test_stop_takes_effect_within_a_pass_and_keeps_the_checkpoint(view: TrainView) -> None:
    page, began = view.controller.page, threading.Event()
    page.fields["steps"].value = 1_000_000
    view.controller.page.live.push = lambda looks: began.set() if list(looks) else None
    view.start()
    view.press("train")
    assert began.wait(20) and view.busy and page.buttons["train"].disabled and not page.buttons["stop"].disabled
    view.press("stop")
    run = view.wait()
    assert page.buttons["stop"].disabled
    assert run is not None and run.was_stopped and 0 < len(run.steps) < 1_000_000
    assert "Stopped after" in told(view) and "of 1,000,000 steps" in told(view)
    assert "Resume goes on from it" in page.status.value and not page.buttons["resume"].disabled


def test_a_run_that_is_stopped_and_kept_nowhere_is_not_called_done(view: TrainView) -> None:
    page, began = view.controller.page, threading.Event()
    page.fields["steps"].value, page.fields["folder"].value = 1_000_000, ""
    page.live.push = lambda looks: began.set() if list(looks) else None
    view.start()
    view.press("train")
    assert began.wait(20)
    view.press("stop")
    assert view.wait().was_stopped and "Stopped." in page.status.value and "Done" not in page.status.value


def test_the_checkpoint_that_is_told_is_that_of_the_run(view: TrainView) -> None:
    folder = view.controller.page.fields["folder"]
    begun_with = folder.value
    view.press("train")
    view.controller.turn()
    folder.value = "typed-since"
    view.wait()
    assert f"The last checkpoint is in {begun_with}" in view.controller.page.status.value


def test_ticked_techniques_are_compared_with_none(
    view: TrainView, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("compare_training", "ladder_training"):
        monkeypatch.setattr(train_jobs, name, partial(getattr(train_jobs, name), repeats=6))
    page = view.controller.page
    assert all(box.value != box.disabled for box in page.techniques.values())
    click(view, "compare")
    assert page.live.box.layout.display == "none", "charts of no run would push what is told out of view"
    found = view.compared
    assert found is not None and found.change is not None and found.change.num_pairs == 6
    assert found.selection.recipe == ",".join(name for name, box in page.techniques.items() if box.value)
    assert found.change.words("ms") in page.comparison.value and "Same loss curve?" in page.comparison.value
    assert found.verdict in page.comparison.value and "on a CPU" in page.comparison.value

    for name, box in page.techniques.items():
        box.value = name in ("pre_padding", "chunked_cross_entropy")
    click(view, "ladder")
    rungs = view.compared
    assert isinstance(rungs, TrainLadder) and not rungs.partial
    assert [rung.technique for rung in rungs.rungs] == ["pre_padding", "chunked_cross_entropy"]
    for words in ("+ Pre-padding", "all of them but", "same loss curve?", "on a CPU"):
        assert words in page.comparison.value, words
    [figure] = page.figure.outputs
    assert "Who saves what" in str(figure)

    for box in page.techniques.values():
        box.value = False
    click(view, "compare")
    assert "No technique is ticked" in told(view) and view.compared is rungs
    page.techniques["packed_prefill"].value = True
    click(view, "train")
    assert "packed_prefill needs pre_padding and mask_removal" in told(view)


def test_a_wrong_field_is_told(view: TrainView) -> None:
    for field, value, said in [
        ("lr", -1.0, ">learning rate is -1"),
        ("lr", float("nan"), ">learning rate is nan"),
        ("steps", 0, ">steps is 0"),
        ("steps", 2.5, ">steps is 2.5, but it must be a whole number"),
        ("steps", float("inf"), ">steps is inf"),
        ("warmup_steps", 9, ">warm-up steps is 9, but it must be a whole number from 0 to 5 (steps)."),
        ("batch_rows", 0, ">rows a batch is 0"),
        ("batch_rows", 10**9, "A batch would have 12,000,000,000 tokens"),
        ("row_tokens", 1, ">tokens a row is 1"),
        (
            "row_tokens",
            65,
            ">tokens a row is 65, but it must be a whole number from 2 to 64 (the model&#x27;s context)",
        ),
        ("dropout", 1.0, "dropout is 1"),
        ("folder", "/dev/null/" + "x" * 300, "cannot be saved in /dev/null"),
        ("data", "no-such <b>file", "no-such &lt;b&gt;file"),
    ]:
        widget = view.controller.page.fields[field]
        before, widget.value = widget.value, value
        click(view, "train")
        assert "eet-error" in told(view) and said in told(view), told(view)
        widget.value = before
    assert view.run is None and not view.controller.page.buttons["train"].disabled


def test_a_warm_up_that_nobody_typed_follows_the_steps(model: Model, data: Path) -> None:
    view = TrainView(model, data, **ROWS | {"warmup_steps": None})
    fields = view.controller.page.fields
    fields["steps"].value = 4  # and Train pressed before the page shows what follows
    assert view.controller.page.asked().warmup == 4
    click(view, "train")
    assert view.run is not None and len(view.run.steps) == 4 and fields["warmup_steps"].value == 4
    for steps, shown in [(0, 4), (2.5, 4), (float("nan"), 4), (40, 5), (3, 3)]:
        fields["steps"].value = steps
        view.controller.turn()
        assert fields["warmup_steps"].value == shown
    fields["warmup_steps"].value, fields["steps"].value = 1, 40
    view.controller.turn()
    assert fields["warmup_steps"].value == 1
    view.close()


def test_a_resume_tells_the_warm_up_that_it_keeps(model: Model, data: Path, tmp_path: Path) -> None:
    """Its field shows what a new run of so many steps would have."""
    view = TrainView(model, data, folder=tmp_path / "run", **ROWS | {"warmup_steps": None})
    fields, page = view.controller.page.fields, view.controller.page
    fields["steps"].value = 3
    click(view, "train")
    assert "warm-up" not in page.status.value
    fields["steps"].value = 6
    click(view, "resume")
    assert (
        "The warm-up stayed that of the run before: 3 steps." in page.status.value and fields["warmup_steps"].value == 5
    )
    view.close()


def test_a_page_without_a_prompt_does_not_speak_of_prompts(view: TrainView) -> None:
    told = [box.tooltip for box in view.controller.page.techniques.values()]
    assert any(each.startswith("Pad ragged texts on the left") for each in told) and "prompt" not in " ".join(told)


def test_a_technique_that_does_not_fit_is_greyed_and_says_why(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        train_page, "obstacle", lambda t, device, config: "it needs more" * (t.name == "flat_optimizer") or None
    )
    page = train_page.TrainPage(model, TrainAsked(techniques=("pre_padding", "flat_optimizer")), print)
    assert page.asked().techniques == ("pre_padding",)
    assert [name for name, box in page.techniques.items() if box.disabled] == ["flat_optimizer"]
    assert page.techniques["flat_optimizer"].tooltip == "Not here: it needs more."
    closed(page)


def test_a_step_that_fails_is_told_and_keeps_the_last_checkpoint(view: TrainView, tmp_path: Path) -> None:
    click(view, "train")
    [path] = (tmp_path / "run").iterdir()
    before = path.read_bytes()
    view.controller.page.fields["lr"].value = 1e30
    view.controller.page.fields["steps"].value = 50
    click(view, "resume")
    assert "eet-error" in told(view) and "not finite" in told(view) and path.read_bytes() == before
    assert "The last checkpoint is in" in view.controller.page.status.value
    assert not view.controller.page.buttons["resume"].disabled


def test_a_new_view_closes_the_old_one_unless_it_is_asked_for_wrongly(
    view: TrainView, model: Model, data: Path
) -> None:
    with pytest.raises(TrainingError, match="task is 'masked', and the model is a decoder"):
        TrainView(model, task="masked")
    with pytest.raises(ModelError, match="lacks a token classification head"):
        TrainView(encoders.ours("bert-classes"), task="token-classes")
    with pytest.raises(TrainingError, match="lr is -1"):
        TrainView(model, data, lr=-1.0)
    with pytest.raises(TrainingError, match="^steps is 'few'"):
        TrainView(model, data, steps="few")  # type: ignore[arg-type]
    for wrong in ({"batch_rows": 0}, {"batch_rows": 2.5}, {"row_tokens": "few"}):  # a field would make 2 of 2.5
        with pytest.raises(TrainingError, match=f"{next(iter(wrong))} is .*must be a whole number"):
            TrainView(model, data, **wrong)  # type: ignore[arg-type]
    with pytest.raises(EETError, match="no action 'trian'. Did you mean 'train'"):
        view.press("trian")
    view.controller.page.fields["steps"].value = 1_000_000
    view.press("train")
    view.start()
    second = TrainView(model, data, steps=2, **ROWS | {"warmup_steps": None})
    assert second.controller.page.asked().warmup == second.controller.page.fields["warmup_steps"].value == 2
    with pytest.raises(EETError, match="closed"):
        view.press("train")
    second.close()


HEADS = {"act": "gelu", "eps": 1e-12, "family": "bert", "labels": ("a", "b", "c")}


def of_task(task: str) -> Model:
    """A tiny model for it, untrained."""
    if task in ("classes", "token-classes"):
        config = EncoderConfig(1, 32, 2, 64, 4096, 64, **HEADS, heads=(task.replace("-", "_"),))
        return Model("tiny", "tiny", random_decoder(config, 0, torch.device("cpu"), torch.float32), WORDS, "random")
    return demo_of({"seq2seq": "translator-tiny", "masked": "bert-tiny", "images": "vit-tiny"}[task]).model()


WORDS = demo_tokenizer()
LABELLED = {"classes": 2, "token-classes": [0, 1, 2], "seq2seq": "4 2"}


@pytest.mark.parametrize("task", ["masked", "classes", "token-classes", "seq2seq", "images"])
def test_each_task_has_data_of_its_own_and_reads_files(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demos, "MOST_NUMBERS", 300)
    monkeypatch.setattr(demos, "MOST_IMAGES", 300)
    model = of_task(task)
    asked = TrainAsked(steps=3, row_tokens=16, batch_rows=4, warmup_steps=1)
    told: list[Any] = []
    done = train_model(model, asked, False, told.append, lambda *_: None, threading.Event())
    assert len(done.run.steps) == 3 and done.mfu is None and all(map(math.isfinite, done.run.losses))
    assert done.run.evaluations[-1].loss < done.run.evaluations[0].loss + 0.5
    page = train_page.TrainPage(model, asked, print)
    assert page.fields["row_tokens"].disabled == (task in ("seq2seq", "images"))
    told = page.form["data"].children[-1].value  # where it is read whole: a field cuts its placeholder
    assert f"None: {asked.told(model)}." in told and ("A file: " in told) == (task != "images")
    closed(page)
    if task == "images":
        with pytest.raises(TrainingError, match=r"data is digits.png, but images are not read from files"):
            replace(asked, data="digits.png").rows(model)
        return
    path = tmp_path / "rows.jsonl"
    row = {"ids": [5, 6, 7], "labels": LABELLED[task]} if task != "masked" else {"text": "five six seven"}
    path.write_text("\n".join(json.dumps(row) for _ in range(20)))
    rows, held_out = replace(asked, data=str(path), row_tokens=3).rows(model)
    assert len(held_out) == 2 and len(rows) == 18
    if task == "seq2seq":
        assert rows[0].labels == model.encode("4 2")
