"""Data that ships or is drawn, files of examples, and small models that learn in seconds what they are for."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from eet_lab.cli import main
from eet_lab.encoding import fill_mask
from eet_lab.errors import EETError, ModelError, SetupError, TrainingError
from eet_lab.models import load
from eet_lab.technique import Recipe
from eet_lab.texts import generate
from eet_lab.training import IGNORED, Example, Examples, Rows, Trainer, demo_data, demos
from eet_lab.training.asked import TrainAsked
from eet_lab.training.data import Masked
from eet_lab.training.demos import Demo, demo_of, share_right, train_demo


def test_numbers_are_spelled_out_once_each() -> None:
    told = {0: "zero", 13: "thirteen", 40: "forty", 101: "one hundred one", 1000: "one thousand"}
    told |= {
        342_007: "three hundred forty two thousand seven",
        999_999: f"{(h := 'nine hundred ninety nine')} thousand {h}",
    }
    assert {number: demo_data.spelled(number) for number in told} == told
    pairs = demo_data.numbers(500)
    assert len({words for words, _ in pairs}) == len({figures for _, figures in pairs}) == 500
    assert {len(figures) for _, figures in pairs} == {1, 2, 3, 4, 5, 6} and pairs == demo_data.numbers(500)
    assert sorted(int(figures) for _, figures in demo_data.numbers(200, most_digits=2)) == [*range(100)]


def test_drawn_digits_show_their_glyph_somewhere() -> None:
    pixels, labels = demo_data.digits(40, size=16, channels=3)
    assert pixels.shape == (40, 3, 16, 16) and set(labels) <= {*range(10)} and abs(float(pixels.mean())) < 1e-5
    glyph = np.array([[mark == "#" for mark in line] for line in demo_data.GLYPHS[labels[0]].split()], float)
    large = torch.from_numpy(glyph.repeat(2, 0).repeat(2, 1)).float()
    places = pixels[0, :1].unfold(1, 14, 1).unfold(2, 10, 1)
    assert float(((places * large).sum((-2, -1)) / large.sum()).max()) > 0.5


def test_which_digits_are_read_is_told(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn ones only where scikit-learn is not there at all: one that is broken is no reason to draw."""
    scans = SimpleNamespace(images=np.zeros((1797, 8, 8)), target=np.arange(1797) % 10)
    found: Any = SimpleNamespace(load_digits=lambda: scans)

    def sklearn(name: str) -> Any:
        if name != "sklearn.datasets":
            return import_module(name)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(demo_data, "importlib", SimpleNamespace(import_module=sklearn))
    monkeypatch.setattr(demos, "MOST_IMAGES", 500)
    command = ["train", "vit-tiny", "--steps", "1", "--device", "cpu"]
    assert main(command) == 0 and "data: the handwritten digits of scikit-learn" in capsys.readouterr().out
    found = ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    assert main(command) == 0 and "data: drawn digits; scikit-learn has" in capsys.readouterr().out
    for found in (
        ModuleNotFoundError("No module named 'scipy'", name="scipy"),
        ImportError("cannot import name '__check_build' from 'sklearn'", name="sklearn"),
    ):
        with pytest.raises(SetupError, match=f"cannot be imported: {found}. Mend it"):
            demo_of("vit-tiny").data(demo_of("vit-tiny").model())
    assert main(command) == 2 and "scikit-learn is installed, but" in capsys.readouterr().err


def test_masked_words_are_others_in_each_epoch_and_the_same_when_asked_again() -> None:
    rows = Masked(Rows(np.arange(4000) % 90 + 5, 40, seed=3), mask_id=4, vocab_size=100)
    epochs = [rows.batch(step, len(rows)) for step in (0, 1)]
    assert epochs[0] == rows.batch(0, len(rows)) and epochs[0] != epochs[1]
    pairs = [(token, label) for row in epochs[0] for token, label in zip(row.ids, row.labels, strict=True)]
    told = [(token, label) for token, label in pairs if label != IGNORED]
    assert 0.12 < len(told) / len(pairs) < 0.18 and 0.7 < sum(token == 4 for token, _ in told) / len(told) < 0.9
    assert all(token != 4 for token, label in pairs if label == IGNORED)
    short = Masked(Rows(range(5, 65), 2), mask_id=4, vocab_size=100)
    assert all(any(label != IGNORED for label in row.labels) for row in short), "each has one at least"
    first, last = rows.split(0.1)
    assert len(first) == 90 and len(last) == 10


def test_files_of_examples_name_what_is_wrong(tmp_path: Path) -> None:
    model = demo_of("translator-tiny").model()
    path = tmp_path / "rows.jsonl"

    def read(*rows: Any) -> Examples:
        path.write_text("\n".join(json.dumps(row) for row in rows))
        return Examples.of_file(model, path)

    ids = model.encode("forty two")
    found = read({"text": "forty two", "labels": "42"}, {"ids": ids, "labels": [7, 8]}, {"ids": ids, "labels": 3})
    assert [*found] == [Example(ids, model.encode("42")), Example(ids, [7, 8]), Example(ids, 3)]
    assert [*Examples.of_rows(model, ({"text": "forty two", "labels": 3} for _ in range(2)))] == [found[2]] * 2
    for row, says in [
        ({"label": 3}, r'Line 2 of .*rows.jsonl is .*must be an object with "ids" or a "text"'),
        ({"ids": [1.5]}, 'must be an object with "ids"'),
        (
            {"ids": [1], "labels": {"a": 1}},
            "Line 2 .* has the labels .*whole numbers, the number of a class, or a text",
        ),
        ({"ids": [1], "labels": True}, "has the labels True"),
    ]:
        with pytest.raises(TrainingError, match=says):
            read({"ids": [1]}, row)
    with pytest.raises(TrainingError, match=r"rows.jsonl is empty. Give"):
        read()
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}')
    with pytest.raises(TrainingError, match=r"rows.jsonl is not UTF-8: byte 24, in line 2, is 0xff"):
        Examples.of_file(model, path)
    with pytest.raises(TrainingError, match=r"none.jsonl cannot be read: No such file"):
        Rows.of_file(model, tmp_path / "none.jsonl", 8)
    with pytest.raises(ModelError, match=r"no tokenizer with the word \[MASK\]"):
        demos.masked(load("bert-base", device="meta"), found)
    with pytest.raises(ModelError, match="of the family gpt2, which learns no masked words"):
        demos.masked(load("demo", device="cpu"), found)


def test_a_file_is_checked_before_any_step(tmp_path: Path) -> None:
    """The blank line counts, too."""
    model, path = demo_of("translator-tiny").model(), tmp_path / "rows.jsonl"
    good, longest = {"ids": [5, 6], "labels": [7, 8]}, model.config.context
    for row, says in (
        ({"ids": [5], "labels": 3}, "has labels that sequence to sequence cannot read"),
        ({"ids": [5], "labels": [7, 99_999]}, "has the label 99999, but labels are from 0 to"),
        ({"ids": [], "labels": [7]}, "has no tokens"),
        ({"ids": [99_999], "labels": [7]}, "holds the token 99999, but the model's vocabulary ends at"),
        ({"ids": [5] * (longest + 1), "labels": [7]}, f"has {longest + 1:,} tokens, but the model's context is"),
        ({"ids": [5], "labels": [7] * (longest + 1)}, "has an answer that is longer than the model's context"),
    ):
        path.write_text("\n".join(map(json.dumps, [good, good])) + "\n\n" + json.dumps(row))
        with pytest.raises(EETError, match=rf"^Line 4 of .*rows.jsonl {says}"):
            TrainAsked(data=str(path)).rows(model)


def test_rows_are_as_long_as_the_context_at_most() -> None:
    model = demo_of("bert-tiny").model()
    assert model.config.context == 64 and len(TrainAsked().rows(model)[0][0].ids) == 64
    with pytest.raises(TrainingError, match=r"row_tokens is 65, .* from 2 to 64 \(the model's context\)"):
        TrainAsked(row_tokens=65).check(model)


def small(name: str, steps: int, rows: int = 0) -> Demo:
    demo = demo_of(name).in_steps(steps)
    settings = {**demo.settings, "warmup_steps": 5}
    return replace(demo, settings=settings, batch_rows=rows or demo.batch_rows, held_out=64, is_whole=False)


def test_a_gpt2_begins_its_training_as_gpt2_did() -> None:
    network = demo_of("gpt2-tiny").model().decoder
    layer, narrow = network.layers[1], demos.SPREAD * 0.02
    for norm in (layer.norm_1, layer.norm_2, network.norm):
        assert (norm.weight == 1).all() and not norm.bias.any()
    for linear, spread in ((layer.qkv, 1.0), (layer.fc_1, 1.0), (layer.proj, 0.5), (layer.fc_2, 0.5)):
        assert float(linear.weight.std()) == pytest.approx(spread * narrow, rel=0.05) and not linear.bias.any()
    assert float(network.token_embedding.std()) == pytest.approx(narrow, rel=0.05)


@pytest.mark.parametrize(
    ("name", "steps", "rows", "bound"),
    [
        ("gpt2-tiny", 25, 4, 7.2),
        ("bert-tiny", 60, 32, 2.6),
        ("translator-tiny", 60, 32, 2.2),
        ("vit-tiny", 80, 32, 1.9),
    ],
)
def test_each_demo_learns(name: str, steps: int, rows: int, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than it is meant for, of which untrained ones lose 8.6, 3.8, 3.9 and 2.4."""
    monkeypatch.setattr(demos, "MOST_NUMBERS", 3000)
    monkeypatch.setattr(demos, "MOST_IMAGES", 1500)
    demo = small(name, steps, rows)
    if name == "gpt2-tiny":
        demo = replace(demo, read=partial(demos._documentation, 60_000, 64), held_out=16)
    parts = Recipe.parse("all", "cpu", demo.config.in_training).parts
    found = train_demo(demo, parts, device="cpu", evaluate_every=steps)
    first, last = (each.loss for each in found.run.evaluations)
    assert last < bound < first - 0.4 and 0 <= found.right <= 1
    model, (_, held_out) = found.model, demo.data(found.model)
    assert share_right(model, held_out) == pytest.approx(found.right, abs=1e-6)
    if name == "translator-tiny":
        assert len(generate(model, ["forty two"], max_new_tokens=4).texts[0]) > 0
    if name == "bert-tiny":
        assert fill_mask(model, ["forty [MASK]</s>42"]).words[0]


def test_an_answer_counts_where_all_of_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of whole answers is that of greedy generation."""
    monkeypatch.setattr(demos, "MOST_NUMBERS", 600)
    demo = demo_of("translator-tiny")
    model = demo.model()
    rows = Examples([*demo.read(model)][:40])
    parts = Recipe.parse("all", "cpu", demo.config.in_training).parts
    trainer = Trainer(model.network, parts, lr=3e-3)
    for _ in range(50):
        trainer.step([*rows])
    model = replace(model, network=trainer.trained())
    answers = generate(model, [list(row.ids) for row in rows], max_new_tokens=8).texts
    hit = sum(text == model.decode(row.labels[:-1]) for text, row in zip(answers, rows, strict=True))
    assert share_right(model, rows, is_whole=True) == pytest.approx(hit / len(rows)) and 0 < hit < len(rows), answers


def test_the_command_trains_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(demos, "MOST_NUMBERS", 300)
    monkeypatch.setitem(demos.DEMOS, "translator-tiny", replace(demo_of("translator-tiny"), held_out=20))
    words = ["train", "translator-tiny", "--steps", "2", "--device", "cpu", "--save", str(tmp_path / "kept")]
    assert main(words) == 0
    told, line = capsys.readouterr()
    assert "2 steps in" in told and "right: 0 % of all answers" in told and "saved in" in told
    assert line.startswith("[0/2] reading what was held out\n") and "overwrite" not in line
    model = load(tmp_path / "kept", device="cpu")
    ids = demo_of("translator-tiny").model().encode("forty two 42")
    assert model.encode("forty two 42") == ids
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "kept")("forty two 42").input_ids == ids
    capsys.readouterr()
    assert main(["generate", "forty two", "--model", str(tmp_path / "kept"), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("forty two >> ")
    assert main(["train", "translater-tiny"]) == 2 and "Did you mean 'translator-tiny'" in capsys.readouterr().err
    assert main(["train", "vit-tiny", "--steps", "0"]) == 2 and "eet-lab: --steps is 0, but" in capsys.readouterr().err
    stop = threading.Event()
    monkeypatch.setattr("eet_lab.commands.terminal.stoppable", lambda *_: nullcontext(stop))
    monkeypatch.setattr("eet_lab.commands.terminal.ProgressLine.__call__", lambda _, done, *__: done and stop.set())
    words[3] = "20"
    assert main(words) == 130
    told, line = capsys.readouterr()
    assert "at first; stopped before it was measured again" in told
    assert "kept holds a model already, which this one will overwrite." in line
    assert main(words) == 130 and "0 steps in" in (told := capsys.readouterr().out) and "out was measured\n" in told
    monkeypatch.setattr(demos, "train_demo", lambda *_, **__: pytest.fail("it trained"))
    assert main(["train", "vit-tiny", "--device", "cpu", "--save", __file__]) == 2
    assert "The model cannot be saved in" in capsys.readouterr().err
    assert main(["train", "vit-tiny", "--device", "cpu", "--recipe", "memory_reuse"]) == 2
    says = "eet-lab: memory_reuse cannot run on this model: it is for inference alone, and this is training. Leave "
    assert says in capsys.readouterr().err
