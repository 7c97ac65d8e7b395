"""What is trained on: rows of text, files of them, and what is held out."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from types import SimpleNamespace

import encoders
import numpy as np
import pytest
import torch

from eet_lab.errors import ModelError, PromptError, TrainingError
from eet_lab.models import load
from eet_lab.training import Example, Examples, Rows, Trainer


def test_rows_of_text_are_read_once_an_epoch_and_depend_on_the_step_alone(tmp_path):
    rows = Rows(range(1000), 30, seed=4)
    assert len(rows) == 33
    steps = [rows.batch(step, 4) for step in range(17)]
    firsts = [example.ids[0] for batch in steps for example in batch]
    assert sorted(firsts[:33]) == sorted(firsts[33:66]) == [30 * row for row in range(33)]
    assert firsts[:33] != firsts[33:66] and Rows(range(1000), 30, seed=4).batch(9, 4) == steps[9]
    assert Rows(range(1000), 30, seed=5).batch(0, 4) != steps[0]
    with pytest.raises(TrainingError, match="The text has 5 tokens, but a row has 6"):
        Rows(range(5), 6)
    for make, says in (
        (lambda: Rows([[1, 2], [3, 4]], 2), r"tokens is \[\[1, 2\], \[3, 4\]\], but .* Put one behind the other"),
        (lambda: Rows([[1, 2], [3]], 2), "Put one behind the other"),
        (lambda: Rows([1.5, 2.5], 2), "must be the token ids"),
        (lambda: Rows("a text", 2), "give texts to Rows.of_texts"),
        (lambda: Rows(range(5), 2, seed=-1), "seed is -1, but it must be a whole number from 0"),
        (lambda: Examples([Example([1, 2])], seed="a"), "seed is 'a'"),
        (lambda: Rows(range(5), 2).batch(-1, 2), "step is -1"),
        (lambda: Examples(each for each in ()), "examples is <generator .*, but it must be a list, such as"),
        (lambda: Examples(np.array(3)), r"examples is array\(3\), but it must be a list"),
        (lambda: Examples(np.array([])), "There are no examples"),
    ):
        with pytest.raises(TrainingError, match=says):
            make()


def test_rows_of_a_dataset_and_those_that_are_held_out():
    """A Dataset of the package datasets yields mappings, and one of its columns texts."""
    model, texts = load("demo", device="cpu"), ["One.", "Two and three."]
    rows = [Rows.of_texts(model, each, 3) for each in (texts, iter(texts), [{"id": 1, "text": text} for text in texts])]
    assert len({each.ids.tobytes() for each in rows}) == 1
    for given in ("One.", {"train": ["One."]}):
        with pytest.raises(TrainingError, match=r"texts is .*One.*, but it must be a list of texts: give \[text\]"):
            Rows.of_texts(model, given, 3)
    with pytest.raises(ModelError, match=r"model is 'demo', but it must be a loaded model: eet_lab.load\('demo'\)"):
        Rows.of_texts("demo", texts, 3)
    with pytest.raises(TrainingError, match=r'Text 2 is \{.*, but it must be an object with a string as its "text"'):
        Rows.of_texts(model, [{"text": "One."}, {"content": "Two."}], 3)
    learned, held_out = Rows(range(1000), 30).split(0.1)
    assert [learned[0].ids[0], len(learned), held_out[0].ids[0], len(held_out)] == [0, 30, 900, 3]
    assert learned[28:40] == [learned[28], learned[29]] and learned[-1] == learned[29]
    for share, held in ((1e-3, 1), (0.99, 2)):
        assert len(Rows(range(100), 30).split(share)[1]) == held
    with pytest.raises(TrainingError, match="share is 0, but it must be a number above 0"):
        Rows(range(100), 30).split(0)


def test_an_epochs_order_is_drawn_once(monkeypatch):
    drawn, draw = [], np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: drawn.append(seed) or draw(seed))
    rows = Rows(range(1000), 30, seed=4)
    for step in range(16):  # of 4 in 33 rows, twice
        rows.batch(step, 4)
    assert drawn == [(4, 0), (4, 1)]


def test_tokens_take_their_own_memory_while_texts_are_read():
    ids = [*range(1000, 2000)]
    model = SimpleNamespace(config=SimpleNamespace(eos_id=1), encode=lambda text: ids)
    tracemalloc.start()
    rows = Rows.of_texts(model, ("" for _ in range(200)), 10)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 16 * len(rows.ids)


def test_rows_keep_their_tokens_where_the_caller_fills_its_array_anew():
    tokens = np.arange(12)
    rows = Rows(tokens, 4)
    tokens[:] = 0
    assert rows.ids.tolist() == list(range(12))


def test_what_has_a_name_of_its_own_is_called_by_its_place():
    """Such as a row of pandas, which is a Series."""
    trainer = Trainer(encoders.ours("bert-classes").network)
    with pytest.raises(TrainingError, match="^Example 2 is namespace.*, but it must be an Example"):
        trainer.step([Example([5, 6], 1), SimpleNamespace(name="other")])


def test_a_step_names_the_lines_that_it_read(tmp_path):
    """In another order than the file has them."""
    path, model = tmp_path / "rated.jsonl", encoders.ours("bert-classes")
    rows = [{"ids": [5, 6], "labels": label} for label in (0, 9, 2)]
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    examples, trainer = Examples.of_file(model, path), Trainer(model.network)
    assert [*examples] == [Example([5, 6], label) for label in (0, 9, 2)]
    with pytest.raises(TrainingError, match=f"^Line 3 of {path} has the label 9, but labels are from 0 to 2"):
        trainer.step([examples[2], examples[1]])
    with pytest.raises(PromptError, match="^Example 2 holds the token 99999, but the model's vocabulary ends at"):
        trainer.step([examples[2], Example([99_999], 1)])
    with torch.no_grad():
        next(iter(trainer.parameters.values())).fill_(torch.inf)
    for batch, told in (([examples[2], examples[0]], f"Line 4 of {path}"), ([Example([5, 6], 1)] * 2, "1")):
        with pytest.raises(TrainingError, match=f"in a pass over . examples?: {told}"):
            trainer.step(pickle.loads(pickle.dumps(batch)))


def test_files_of_text(tmp_path):
    model = load("demo", device="cpu")
    (tmp_path / "a.txt").write_text("A text.", encoding="utf-8")
    (tmp_path / "mark.txt").write_text("A text.", encoding="utf-8-sig")
    (tmp_path / "a.jsonl").write_text('{"text": "One.\u2028"}\n\n{"text": "Two."}\n', encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text('{"text": "One."}\n["Two."]\n', encoding="utf-8")
    (tmp_path / "cut.jsonl").write_text('{"text": "One')
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.jsonl").touch()
    os.mkfifo(tmp_path / "pipe")  # whoever opens it would wait for ever
    assert Rows.of_file(model, tmp_path / "a.txt", 2)[0].ids[0] == model.config.eos_id
    assert Rows.of_file(model, tmp_path / "mark.txt", 2).ids.tolist() == [model.config.eos_id, *model.encode("A text.")]
    ends = Rows.of_file(model, tmp_path / "a.jsonl", 2).ids.tolist().count(model.config.eos_id)
    assert ends == 2
    for name in ("a.JSONL", "a.json"):  # whose braces would be words
        (tmp_path / name).write_bytes((tmp_path / "a.jsonl").read_bytes())
        assert Rows.of_file(model, tmp_path / name, 2).ids.tolist().count(model.config.eos_id) == 2
    for name, says in (
        ("bad.jsonl", "Line 2 of .* must be an object with a string"),
        ("cut.jsonl", "Line 1 of .* is no JSON"),
        ("latin.txt", "not UTF-8: byte 3, in line 1, is 0xe9"),
        ("no.txt", "no.txt cannot be read: No such file.* Give the path of a file of text that can be read"),
        ("empty.txt", "The text of .*empty.txt has 1 token, but a row has 2. Give more text, or shorter rows"),
        ("empty.jsonl", "The text of .*empty.jsonl has 0 tokens, but a row has 2"),
        ("pipe", "not a regular file"),
    ):
        with pytest.raises(TrainingError, match=says):
            Rows.of_file(model, tmp_path / name, 2)
    with pytest.raises(TrainingError, match=r"empty.jsonl is empty. Give a file with an example a line"):
        Examples.of_file(model, tmp_path / "empty.jsonl")
