"""Passes of an encoder's engine: which texts share one, progress, refusals, presets."""

from __future__ import annotations

import threading
from dataclasses import replace

import encoders
import numpy
import pytest
import torch
import transformers
from encoders import CONTEXT, LENGTHS, V, close, ours, passes_that_are_late, read, texts, told

from eet_lab.engine import tasks
from eet_lab.engine.encode import EncoderEngine
from eet_lab.errors import Cancelled, EngineBusy, ModelError, PromptError, RecipeError
from eet_lab.models import ENCODER_PRESETS, load
from eet_lab.models.families import FAMILIES, settings_of
from eet_lab.models.weights import random_decoder
from eet_lab.parts import Parts, passes
from eet_lab.parts.passes import Batching, Text
from eet_lab.technique import Recipe


def test_who_comes_while_texts_are_read_is_told_so():
    engine, said = EncoderEngine(ours("bert").encoder), []

    def ask(done):
        with pytest.raises(EngineBusy) as caught:
            engine.read(texts(), tasks.MEAN)
        said.append(str(caught.value))

    engine.read(texts(), tasks.MEAN, progress=lambda *told: ask(told))
    assert said and said[0].startswith("read cannot begin: this engine is reading a list of texts, and reads one at")
    assert "another EncoderEngine" in said[0]


@pytest.mark.parametrize("layout", [passes.padded, passes.packed])
def test_passes_keep_to_the_budget_and_the_order(layout):
    for batching in (Batching(16), Batching(45), Batching(45, 2), Batching(1)):
        made = list(layout(texts(), batching))
        numbers = [number for each in made for number in sorted(each.numbers)]
        assert numbers == list(range(len(LENGTHS))), "in order, each once"
        for each in made:
            alone, batch = len(each.numbers) == 1, each.laid_out().batch
            assert alone or len(batch.ids) <= batching.batch_tokens
            assert (len(batch.ids), batch.max_kv) == (each.computed_tokens, each.longest), "told before it is laid out"
            assert len(each.numbers) <= (batching.batch_size or 99)
            lengths = [LENGTHS[number] for number in each.numbers]
            assert lengths == sorted(lengths, reverse=True) == [count for _, count in batch.spans]
            ids = [batch.ids[first : first + count].tolist() for first, count in batch.spans]
            assert ids == [texts()[number].ids for number in each.numbers]
    assert sum(each.computed_tokens for each in passes.packed(texts(), Batching(45))) == sum(LENGTHS)


def test_more_passes_than_are_laid_out_at_once():
    many = [Text([5 + number % 90] * (1 + number % 7)) for number in range(150)]
    one, all_at_once = (read("bert", tasks.MEAN, "all", Batching(1 + big * 999), many) for big in (0, 1))
    assert one.num_passes == 150 and all_at_once.num_passes == 1
    torch.testing.assert_close(one.values, all_at_once.values, rtol=1e-4, atol=1e-5)


def test_progress_is_told_and_a_run_can_be_stopped():
    seen, stop = [], threading.Event()

    def progress(done, total, what):
        seen.append((done, total, what))
        if done > 4:
            stop.set()

    engine = EncoderEngine(ours("bert").encoder)
    with pytest.raises(Cancelled, match="stopped"):
        engine.read(texts(), tasks.MEAN, progress=progress, cancel=stop)
    assert seen == [(done, len(LENGTHS), "texts") for done in range(1, 6)]
    assert len(engine.read(texts(), tasks.MEAN).values) == len(LENGTHS), "the engine goes on"

    def meddle(done, total, what):
        with pytest.raises(EngineBusy):
            engine.close()

    engine.read(texts()[:1], tasks.MEAN, progress=meddle)


def lists_of(lengths):
    return [([Text([5 + length] * length) for length in each], Batching()) for each in lengths]


def test_a_list_is_launched_before_those_in_front_of_it_have_come(monkeypatch):
    """They are told in their order, each once it is there, and are what they are when each is read alone."""
    lists, runs = lists_of([(3, 9), (7,), (), (2, 2, 2), (30,)]), []
    engine = EncoderEngine(ours("bert").encoder, Recipe.parse("pre_padding").parts)
    expected = [engine.read(*each[:1], tasks.MEAN, each[1]) for each in lists]
    seen = passes_that_are_late(monkeypatch)

    def told(run):
        seen.append(("told", len(runs)))
        runs.append(run)

    engine.read_each(iter(lists), tasks.MEAN, told)
    assert seen == [
        ("launched", 0), ("launched", 1), ("launched", 2), ("come", 0), ("told", 0), ("launched", 3), ("come", 1),
        ("told", 1), ("told", 2), ("come", 2), ("told", 3), ("come", 3), ("told", 4),
    ]  # fmt: skip
    for run, alone in zip(runs, expected, strict=True):
        assert (run.num_tokens, run.num_passes) == (alone.num_tokens, alone.num_passes)
        assert all(map(torch.equal, run.values, alone.values)) and len(run.values) == len(alone.values)
        assert not len(run.values) or not run.values.is_inference()


def test_where_none_can_be_launched_yet_the_oldest_is_waited_for(monkeypatch):
    lists, runs = lists_of([(3,), (7,), (4,)]), []
    seen = passes_that_are_late(monkeypatch)
    engine = EncoderEngine(ours("bert").encoder, Recipe.parse("pre_padding").parts)
    engine.read_each(iter([*lists[:2], None, lists[2], None, None, None]), tasks.MEAN, runs.append)
    assert seen == [("launched", 0), ("launched", 1), ("come", 0), ("launched", 2), ("come", 1), ("come", 2)]
    assert [run.num_tokens for run in runs] == [3, 7, 4]
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        engine.read_each(iter(lambda: None, 0), tasks.MEAN, runs.append, cancel=stop)


def test_on_a_cpu_a_list_is_told_before_the_next_is_asked_for():
    runs, asked = [], []

    def lists():
        for each in lists_of([(3,), (4,)]):
            asked.append(len(runs))
            yield each

    EncoderEngine(ours("bert").encoder).read_each(lists(), tasks.MEAN, runs.append)
    assert asked == [0, 1] and len(runs) == 2


@pytest.mark.parametrize(
    ("fails", "error", "told", "frees"),
    [
        ("its texts", PromptError, 2, False),
        ("its launch", RuntimeError, 2, True),
        ("the device", RuntimeError, 0, True),
        ("stop", Cancelled, 0, False),
    ],
)
def test_a_list_that_fails_leaves_those_before_it(fails, error, told, frees, monkeypatch):
    """What was launched is told where it still comes; an engine whose memory is fine keeps it, and goes on."""
    engine, runs, stop = EncoderEngine(ours("bert").encoder, Recipe.parse("all").parts), [], threading.Event()
    passes_that_are_late(monkeypatch)
    memory = engine.memory

    def fail(*_):
        raise RuntimeError("no device")

    def lists():
        yield from lists_of([(3,), (4,)])
        assert not runs
        if fails == "its texts":
            yield [Text([V])], Batching()
        if fails == "its launch":
            monkeypatch.setattr(engine, "_launched", fail)
        if fails == "the device":
            monkeypatch.setattr(encoders.Late, "synchronize", fail)
        if fails == "stop":
            stop.set()
        yield from lists_of([(5,)])

    with pytest.raises(error):
        engine.read_each(lists(), tasks.MEAN, runs.append, cancel=stop)
    assert len(runs) == told and (engine.memory is not memory) == frees
    monkeypatch.undo()
    assert len(engine.read(texts(), tasks.MEAN).values) == len(LENGTHS)


def test_nothing_to_read_is_nothing_read():
    run = EncoderEngine(ours("bert").encoder).read([], tasks.MEAN)
    assert run.values == () and run.num_passes == run.num_tokens == run.activation_bytes == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([Text([])], "Text 1 has no tokens"),
        (
            [Text([1]), Text([1] * (CONTEXT + 1))],
            f"Text 2 has {CONTEXT + 1} tokens, .* at most {CONTEXT}.*truncate=True",
        ),
        ([Text([V])], f"Text 1 holds the token {V}, but the model's vocabulary ends at {V - 1}"),
        ([Text([1, 2], [0])], "Text 1 has 2 tokens and 1 token types .*each token needs one, from 0 to 1"),
        ([Text([1, 2], [0, 2])], "from 0 to 1"),
    ],
)
def test_what_cannot_be_read_is_told(given, says):
    with pytest.raises(PromptError, match=says):
        EncoderEngine(ours("bert").encoder).read(given, tasks.MEAN)


def test_a_text_that_is_too_long_is_cut_where_that_is_asked_for():
    long = [Text([2, *[7] * 60, 3], [0] * 30 + [1] * 32)]
    cut = [2, *[7] * (CONTEXT - 2), 3]
    run = read("bert", tasks.HIDDEN, "", Batching(truncate=True), long)
    close(run.values[0], told("bert", cut, [0] * 30 + [1] * (CONTEXT - 30)).hidden_states[-1][0])


@pytest.mark.parametrize(
    "ids",
    [True, 1.0, "7", None, [7], [[]], -1, V, 2**31, 2**40, 2**70, torch.tensor(7), numpy.int64(7)],
    ids=repr,
)
def test_a_token_of_another_kind_is_told_wherever_it_stands(ids):
    for row in ([ids], [7, ids], [ids, 7, 7, 7, 7]):
        with pytest.raises(PromptError, match="Text 2 "):
            EncoderEngine(ours("bert").encoder).read([Text([7]), Text(row), Text([7] * 5)], tasks.MEAN)


def test_a_text_in_place_of_its_tokens_is_told():
    for row in (7, [[7]], "7", None):
        with pytest.raises(PromptError, match="Text 1 "):
            EncoderEngine(ours("bert").encoder).read([Text(row), Text([7])], tasks.MEAN)


def test_what_was_checked_is_what_is_read():
    """Whatever the caller does to its lists meanwhile."""
    mine = [Text([7] * length) for length in (5, 3, 4)]

    def meddle(done, total, what):
        for text in mine:
            text.ids[:] = [10**6]

    engine, batching = EncoderEngine(ours("bert").encoder), Batching(1)
    exact = engine.read(mine, tasks.MEAN, batching).values
    assert torch.equal(engine.read(mine, tasks.MEAN, batching, progress=meddle).values, exact)


@pytest.mark.parametrize(
    ("name", "value"), [("batch_tokens", 0), ("batch_size", 0), ("batch_size", "8"), ("truncate", 1)]
)
def test_batching_is_checked(name, value):
    with pytest.raises(PromptError, match=f"{name} is {value!r}, but it must be"):
        Batching(**{name: value})


def test_a_missing_head_is_told():
    for name, task, says in (
        ("bert", tasks.MLM, "lacks a masked language modeling head: it has a pooler"),
        ("bert", tasks.CLASSES, "lacks a classification head"),
        ("distilbert", tasks.MLM, "it has nothing on top of its layers"),
    ):
        with pytest.raises(ModelError, match=says):
            read(name, task)


def test_an_engine_takes_an_encoder_and_parts():
    with pytest.raises(ModelError, match=r"takes an Encoder, not a Model: give it model\.encoder"):
        EncoderEngine(ours("bert"))
    with pytest.raises(ModelError, match=r"not 'bert-base': give it eet_lab\.load\('bert-base'\)\.encoder"):
        EncoderEngine("bert-base")
    with pytest.raises(RecipeError, match=r"takes Parts, not 'all'"):
        EncoderEngine(ours("bert").encoder, "all")
    with pytest.raises(RecipeError, match="change weights, which an encoder does not use"):
        EncoderEngine(ours("bert").encoder, Parts(weights=(lambda model: model,)))
    with pytest.raises(ModelError, match="shapes and no data"):
        EncoderEngine(load("bert-base", device="meta").encoder).read([Text([1])], tasks.CLS)


@pytest.mark.parametrize("name", ["bert-base", "bert-large"])
def test_presets_have_the_shapes_of_transformers(name):
    settings = settings_of(ENCODER_PRESETS[name])
    assert settings["architectures"] == ["BertModel"]
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(
            transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
        )
    assert ENCODER_PRESETS[name].num_params == sum(p.numel() for p in model.parameters())
    again = FAMILIES["bert"].config(settings_of(ENCODER_PRESETS[name]))
    assert replace(again, heads=("pooler",), labels=()) == ENCODER_PRESETS[name]
    shapes = load(name, device="meta")
    assert shapes.label == f"{name} shape, random weights: for timing only"
    assert 2 * shapes.config.num_params <= shapes.encoder.weight_bytes + 512


def test_a_preset_reads_texts(monkeypatch):
    small = replace(ENCODER_PRESETS["bert-base"], num_layers=2, hidden_size=48, num_heads=4, ffn_size=64, head_dim=12)
    monkeypatch.setitem(ENCODER_PRESETS, "bert-base", replace(small, num_kv_heads=4))
    made = load("bert-base", device="cpu", seed=5)
    assert made.config.hidden_size == 48 and "random weights" in made.label
    again = random_decoder(made.config, 5, torch.device("cpu"), torch.float32)
    assert made.encoder.token_embedding.equal(again.token_embedding)
    run = EncoderEngine(made.encoder).read([Text(made.encode("a text"))], tasks.CLS)
    assert run.values[0].shape == (48,)
