"""Every encoder beside transformers, under every recipe: hidden states, pooled states, masked words, classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from encoders import (
    BODIES,
    CONFIGS,
    LENGTHS,
    WITH_CLASSES,
    WITH_MLM,
    WITH_TOKEN_CLASSES,
    close,
    ours,
    padded_on_the_right,
    read,
    rows,
    texts,
    theirs,
    told,
)
from test_lifetimes import OPS

import eet_lab
from eet_lab.engine import tasks
from eet_lab.engine.encode import EncoderEngine
from eet_lab.errors import OutOfMemory, PromptError, RecipeError
from eet_lab.memory import live_bytes
from eet_lab.models import load
from eet_lab.parts import Ops
from eet_lab.parts.attend import DenseMask
from eet_lab.parts.passes import Batching, Text
from eet_lab.parts.trace import Trace
from eet_lab.technique import Recipe, Technique, everything, register, registry
from eet_lab.training import Example, Trainer

RECIPES = (
    "baseline",
    "mask_removal",
    "memory_reuse",
    "pre_padding",
    "pre_padding,mask_removal",
    "pre_padding,memory_reuse",
    "pre_padding,mask_removal,memory_reuse",
    "pre_padding,mask_removal,packed_prefill",
    "pre_padding,mask_removal,memory_reuse,packed_prefill",
    "pre_padding,mask_removal,memory_reuse:planner=chunked,packed_prefill",
)
BATCHINGS = (Batching(), Batching(20), Batching(64, 3), Batching(1))


# --- beside transformers


@pytest.mark.parametrize(
    ("name", "recipe"), [(name, recipe) for name in CONFIGS for recipe in (RECIPES if name in BODIES else RECIPES[:1])]
)
def test_hidden_states_are_those_of_transformers(name, recipe):
    """Of models with a head only in plain PyTorch: what their heads say, below, follows from it under each recipe."""
    for batching in BATCHINGS:
        run = read(name, tasks.HIDDEN, recipe, batching)
        assert run.num_tokens == sum(LENGTHS) and len(run.values) == len(LENGTHS)
        for text, states in zip(texts(), run.values, strict=True):
            close(states, told(name, text.ids).hidden_states[-1][0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["bert-classes", "roberta-mlm", "distilbert"])
def test_half_precision_is_near(name, dtype):
    half = load(theirs(name), device="cpu", dtype=dtype).encoder
    exact = torch.cat(read(name, tasks.HIDDEN).values)
    for recipe in RECIPES:
        values = EncoderEngine(half, Recipe.parse(recipe).parts).read(texts(), tasks.HIDDEN, Batching(50)).values
        off = (torch.cat(values) - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        assert values[0].dtype == torch.float32 and off < (0.05 if dtype == "bfloat16" else 0.01), recipe
        mean = EncoderEngine(half, Recipe.parse(recipe).parts).read(texts(), tasks.MEAN).values
        assert mean.isfinite().all()


@pytest.mark.parametrize("name", BODIES)
def test_a_batch_with_pads_on_the_right_says_the_same(name):
    """As tokenizers of encoders pad; ours stand on the left, and positions begin behind them."""
    run = read(name, tasks.HIDDEN, "pre_padding", given=list(map(Text, rows())))
    assert run.num_passes == 1 and run.computed_tokens == len(LENGTHS) * max(LENGTHS)
    for states, exact in zip(run.values, padded_on_the_right(name, rows()), strict=True):
        close(states, exact)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["bert", "bert-classes", "roberta", "distilbert"])
def test_pooled_states_are_those_of_transformers(name, recipe):
    cls, mean = (read(name, task, recipe, Batching(30)).values for task in (tasks.CLS, tasks.MEAN))
    body = theirs(name).base_model
    for text, first, average in zip(texts(), cls, mean, strict=True):
        with torch.no_grad():
            exact = body(torch.tensor([text.ids]))
        close(average, exact.last_hidden_state[0].mean(0))
        pooled = getattr(exact, "pooler_output", None)
        close(first, exact.last_hidden_state[0, 0] if pooled is None else pooled[0])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", WITH_MLM)
def test_logits_of_masked_words_are_those_of_transformers(name, recipe):
    run = read(name, tasks.MLM, recipe, Batching(30))
    for text, logits in zip(texts(), run.values, strict=True):
        exact = told(name, text.ids)
        exact = exact.prediction_logits if name == "bert-pretrained" else exact.logits
        close(logits, exact[0, text.asked])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", WITH_CLASSES)
def test_logits_of_classes_are_those_of_transformers(name, recipe):
    run = read(name, tasks.CLASSES, recipe, Batching(30))
    assert ours(name).config.labels == ("bad", "fair", "good")
    for text, logits in zip(texts(), run.values, strict=True):
        close(logits, told(name, text.ids).logits[0])


@pytest.mark.parametrize("recipe", RECIPES[-1:])
@pytest.mark.parametrize("name", WITH_TOKEN_CLASSES)
def test_logits_of_classes_of_tokens_are_those_of_transformers(name, recipe):
    found = eet_lab.classify_tokens(ours(name), rows(), recipe, batch_tokens=30)
    for row, logits, labels in zip(rows(), found.logits, found.labels, strict=True):
        exact = told(name, row).logits[0]
        close(logits, exact)
        assert labels == tuple(ours(name).config.labels[number] for number in exact.argmax(-1).tolist())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["bert", "bert-classes"])
def test_token_types_tell_sentences_apart(name, recipe):
    types = [[0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2) for row in rows()]
    given = [Text(row, each) for row, each in zip(rows(), types, strict=True)]
    given[2] = Text(rows()[2])  # of type 0, among others
    run = read(name, tasks.HIDDEN, recipe, Batching(50), given)
    for number, (row, each, states) in enumerate(zip(rows(), types, run.values, strict=True)):
        close(states, told(name, row, None if number == 2 else each).hidden_states[-1][0])
    assert not torch.allclose(run.values[1], read(name, tasks.HIDDEN, recipe).values[1], atol=1e-2)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_counted(name):
    theirs_by_name = dict(theirs(name).named_parameters())
    twins = [path for path in theirs_by_name if path.endswith("decoder.bias")]
    twins = [path for path in twins if path.replace("decoder.bias", "bias") in theirs_by_name]
    counted = sum(parameter.numel() for path, parameter in theirs_by_name.items() if path not in twins)
    assert ours(name).config.num_params == counted
    assert len({ours(name).config, ours(name).config}) == 1


# --- techniques


@pytest.mark.parametrize("technique", registry().values(), ids=registry())
@pytest.mark.parametrize("name", ["bert-classes", "roberta-mlm", "distilbert"])
def test_each_technique_equals_the_baseline_or_says_why_it_does_not_fit(name, technique):
    """With what it needs; the equality at any batching is above."""
    config = ours(name).config
    needed = [registry()[each]() for each in technique.requires]
    reason = technique().unfit(config)
    if reason is None and technique().unavailable("cpu") is None:
        recipe = Recipe((technique(), *needed))
        assert recipe.check("cpu", config) == recipe
        for task in (tasks.HIDDEN, tasks.CLS, tasks.MEAN):
            got, exact = read(name, task, str(recipe)), read(name, task)
            assert got.num_passes <= exact.num_passes
            for mine, baseline in zip(got.values, exact.values, strict=True):
                close(mine, baseline)
        return
    if reason is None:  # a GPU's tests run it
        return
    assert len(reason) > 20 and "encode" not in technique.stages
    with pytest.raises(RecipeError, match="cannot run on"):
        Recipe((technique(), *needed)).check("cuda", config)
    with pytest.raises(RecipeError, match="cannot run this model|does not use|do not use"):
        EncoderEngine(ours(name).encoder, Recipe((technique(), *needed)).parts)


def test_all_for_an_encoder_is_what_fits():
    config = ours("bert").config
    assert everything("cpu", config).names == ("pre_padding", "mask_removal", "memory_reuse", "packed_prefill")
    assert Recipe.parse("all", "cpu", config).names == everything("cpu", config).names
    for words, says in (
        ("pre_padding:read=shortest", "needs whole texts; choose read=whole"),
        ("memory_reuse:kv=paged", "an encoder has none; leave kv out"),
        ("int8_weights", "it is for decoders, and this is not one of them"),
    ):
        with pytest.raises(RecipeError, match=says):
            Recipe.parse(words).check("cpu", config)


@pytest.mark.parametrize("wrong", [("decode",), "encode", ()])
def test_a_techniques_stages_are_checked(wrong, forgotten):
    @dataclass(frozen=True)
    class Odd(Technique):
        name: ClassVar[str] = "odd"
        title: ClassVar[str] = "Odd"
        stages: ClassVar = wrong

        def apply(self, parts):
            return parts

    with pytest.raises(RecipeError, match="stages is .* tuple of some of generate, encode, seq2seq, train"):
        register(Odd)


@pytest.mark.parametrize("name", BODIES)
def test_pads_that_are_not_numbers_change_nothing_without_a_mask(name):
    """Every op leaves NaN where a pad stands; only attention could carry it to real tokens."""
    parts = Recipe.parse("pre_padding,mask_removal").parts
    plain = EncoderEngine(ours(name).encoder, parts).read(texts(), tasks.HIDDEN)
    seen = []

    def spoilt(qkv, kv, batch, spec, *args, empty):
        pads = batch.columns < batch.keys.begin[batch.rows]
        seen.append(0 if pads.is_meta else int(pads.sum()))
        return parts.ops.attention(qkv.masked_fill(pads[:, None], torch.nan), kv, batch, spec, *args, empty=empty)

    engine = EncoderEngine(ours(name).encoder, replace(parts, ops=Ops(attention=spoilt)))
    run = engine.read(texts(), tasks.HIDDEN)
    assert max(seen) == run.computed_tokens - run.num_tokens > 100
    assert all(map(torch.equal, run.values, plain.values))


def test_a_mask_that_hides_nothing_is_noticed():
    """The tests above can fail."""

    class Careless(DenseMask):
        def __call__(self, layer, qkv, spec, *extras):
            super().__call__(layer, qkv, spec, *extras)
            self._masks[spec].zero_()
            return super().__call__(layer, qkv, spec, *extras)

    parts = replace(Recipe.parse("pre_padding").parts, attend=Careless)
    run = EncoderEngine(ours("bert").encoder, parts).read(texts(), tasks.HIDDEN)
    assert not torch.allclose(run.values[0], read("bert", tasks.HIDDEN).values[0], atol=1e-2)


# --- memory


@pytest.mark.parametrize("task", [tasks.HIDDEN, tasks.MEAN, tasks.CLS, tasks.CLASSES])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_meta_trace_foresees_a_real_pass(recipe, task):
    engine = EncoderEngine(ours("bert-classes").encoder, Recipe.parse(recipe).parts)
    given = [Text(row, [0] * len(row)) for row in rows()]
    foreseen = engine.lifetimes(given, task, Batching(40))
    real, trace = [], Trace()

    class Recording(type(engine.memory)):
        def plan(self, passes, like):
            return False

        def enter(self, name):
            nonlocal trace
            trace = Trace()
            real.append(trace)

        def empty(self, *args, **keywords):
            return trace.empty(*args, **keywords)

    engine.memory.__class__ = Recording
    engine.read(given, task, Batching(40))
    assert tuple(each.finish() for each in real) == foreseen
    assert {life.op for lifetimes in foreseen for life in lifetimes} <= OPS | {"task"}


def test_an_arena_serves_the_largest_passes_with_one_plan():
    engine = EncoderEngine(ours("bert").encoder, Recipe.parse("pre_padding,memory_reuse").parts)
    run = engine.read(texts(), tasks.HIDDEN, Batching(60))
    each = engine.lifetimes(texts(), tasks.HIDDEN, Batching(60))
    most = max(max(live_bytes(lifetimes)) for lifetimes in each)
    assert run.num_passes > 2 and most <= run.activation_bytes == engine.activation_bytes < 3 * most
    assert engine.plans()["encode"].lifetimes
    engine.close()
    assert engine.activation_bytes == 0
    plain = read("bert", tasks.HIDDEN, "pre_padding", Batching(60))
    assert all(map(torch.equal, run.values, plain.values)) and most <= plain.activation_bytes


def test_no_memory_is_told(monkeypatch):
    def full(*args, **keywords):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    engine = EncoderEngine(ours("bert").encoder)
    monkeypatch.setattr(engine.memory, "empty", full)
    with pytest.raises(OutOfMemory, match="embedded could not be allocated .*smaller batch_tokens, fewer texts"):
        engine.read(texts(), tasks.HIDDEN)
    assert len(engine.read(texts(), tasks.HIDDEN).values) == len(LENGTHS)


# --- batches


# --- errors


def test_pads_within_a_text_are_refused_where_they_have_no_position():
    """RoBERTa counts positions past them; BERT has one for each, as for every token."""
    with pytest.raises(PromptError, match=r"Text 2 has 1 as token 3 of 4, .*pad_token_id.*Take pads out"):
        eet_lab.encode(ours("roberta"), [[7, 8], [7, 8, 1, 9]])
    with pytest.raises(PromptError, match="Example 1 has 1 as token 2 of 2"):
        Trainer(ours("roberta-classes").network).step([Example([7, 1], 0)])
    row = [7, 0, 9]
    found = eet_lab.encode(ours("bert"), [row], pool=None).vectors[0]
    assert torch.allclose(torch.as_tensor(found), told("bert", row).last_hidden_state[0], atol=1e-5)


# --- presets
