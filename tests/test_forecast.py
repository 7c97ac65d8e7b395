"""A forecast against what a run really takes, and the largest runs against their neighbours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from counted import Counted
from hypothesis import given
from hypothesis import strategies as st
from test_paged import batch

from eet_lab.engine.engine import Engine
from eet_lab.engine.forecast import MOST_ROWS, Forecast, largest
from eet_lab.engine.settings import Settings
from eet_lab.errors import PromptError
from eet_lab.models import weights
from eet_lab.models.config import PRESETS, Config
from eet_lab.models.decoder import Decoder
from eet_lab.technique import Recipe, registry

WORDS = ["", "pre_padding", "pre_padding,mask_removal", "pre_padding,mask_removal,packed_prefill", "memory_reuse"]
WORDS += [
    "pre_padding,memory_reuse",
    "pre_padding,mask_removal,memory_reuse:kv=paged",
    "pre_padding,mask_removal,memory_reuse",
]
WORDS += ["pre_padding,memory_reuse:planner=no_reuse", "pre_padding,memory_reuse:planner=chunked"]
SMALL = Config(4, 128, 4, 512, 800, 512)


@pytest.fixture(scope="module")
def decoder():
    return weights.random_decoder(SMALL, 0, torch.device("cpu"), torch.float32)


def needed(engine: Engine, prompts: list[list[int]], num_new: int) -> int:
    """The bytes of a run, weights included; nobody looks for larger ones where nothing is free."""
    return engine.forecast(prompts, Settings(num_new), 0).total_bytes


@pytest.mark.parametrize("words", WORDS)
def test_the_peak_is_foreseen_within_a_few_per_cent(decoder, words):
    for lengths, num_new in (([120, 90, 31], 6), ([30], 20), ([64] * 6, 3)):
        engine, counted = Engine(decoder, Recipe.parse(words).parts), Counted()
        told = engine.forecast(batch(0, lengths), Settings(num_new), 0)
        with counted:
            engine.generate(batch(0, lengths), Settings(num_new))
        assert abs(told.run_bytes / counted.peak_bytes - 1) < 0.08, (lengths, told, counted.peak_bytes)
        assert abs(told.total_bytes / (told.weight_bytes + counted.peak_bytes) - 1) < 0.04
        assert told.weight_bytes == decoder.weight_bytes and (told.fits, told.largest_batch) == (False, 0)


@pytest.mark.parametrize("words", ["", "pre_padding,memory_reuse", "all,continuous_batching:rows=4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_take_what_was_foreseen(words, dtype):
    """The log of all slots, and the widened logits of a pass and their exponentials, of which the CPU shows one."""
    decoder = weights.random_decoder(Config(2, 16, 2, 64, 20_000, 64), 0, torch.device("cpu"), dtype)
    prompts, plain, asking = batch(0, [9, 20, 3, 12]), Settings(6), Settings(6, logprobs=0)
    engine, counted = Engine(decoder, Recipe.parse(words).parts), Counted()
    told = engine.forecast(prompts, asking, 2**40)
    with counted:
        engine.generate(prompts, asking)
    unseen = 4 * 20_000 * 4
    assert counted.peak_bytes <= told.run_bytes <= 1.08 * (counted.peak_bytes + unseen)
    without = engine.forecast(prompts, plain, told.total_bytes - 1)
    assert without.fits and without.logprob_bytes == 0 < told.logprob_bytes == told.parts["log-probabilities"]
    tight = engine.forecast(prompts, asking, told.total_bytes - 1)
    assert not tight.fits and tight.largest_batch == 3


@pytest.mark.parametrize("words", WORDS)
def test_the_largest_that_fits_fits_and_one_more_does_not(decoder, words):
    engine, settings = Engine(decoder, Recipe.parse(words).parts), Settings(10)
    told = engine.forecast(batch(0, [70, 9]), settings, decoder.weight_bytes + 6 * 2**20)
    assert 0 < told.largest_batch < 200 and 0 < told.largest_context <= SMALL.context

    def fits(lengths: list[int], num_new: int = 10) -> bool:
        return needed(engine, batch(0, lengths), num_new) <= told.free_bytes

    assert engine.forecast(batch(0, [9, 70]), settings, told.free_bytes) == told, "the order of prompts tells nothing"
    assert fits([[70, 9][i % 2] for i in range(told.largest_batch)])
    assert not fits([[70, 9][i % 2] for i in range(told.largest_batch + 1)])
    for columns, do_fit in ((told.largest_context, True), (told.largest_context + 1, False)):
        longest = min(70, columns - 1)
        assert columns > SMALL.context or fits([longest, 9], columns - longest) == do_fit


def tight(decoder: Decoder, recipe: Recipe, prompts: list[list[int]], settings: Settings) -> tuple[Engine, Forecast]:
    """An engine, and what it is told where all but a third of the run's own bytes are free."""
    engine = Engine(decoder, recipe.parts)
    run = engine.forecast(prompts, settings, 0)
    return engine, engine.forecast(prompts, settings, run.total_bytes - run.run_bytes // 3)


def with_needs(name: str) -> str:
    """A technique and those that it asks for, in the order of a recipe."""
    needed, last = {name}, set()
    while needed != last:
        last = set(needed)
        needed |= {each for other in last for each in registry()[other].requires}
    return ",".join(other for other in registry() if other in needed)


def follow(told: Forecast, prompts: list[list[int]]) -> list[tuple[list[list[int]], int]]:
    """The batches that it says would fit: fewer rows, and fewer columns."""
    columns = told.largest_context
    longest = min(told.prompt_tokens, columns - 1)
    fewer = sorted(prompts, key=len, reverse=True)[: told.largest_batch]
    return [(fewer, told.new_tokens), ([row[:longest] for row in prompts], columns - longest)]


@pytest.mark.parametrize("words", WORDS)
def test_who_follows_the_advice_has_enough(decoder, words):
    """The batches that would fit run, and take no more than there is, but for what plain ops take for themselves."""
    prompts = batch(3, [150, 125, 60, 31, 16, 9])
    engine, told = tight(decoder, Recipe.parse(words), prompts, Settings(20))
    assert not told.fits and 0 < told.largest_batch < 6 and 2 < told.largest_context < 170
    for rows, num_new in follow(told, prompts):
        assert needed(engine, rows, num_new) <= told.free_bytes
        with Counted() as counted:
            Engine(decoder, engine.parts).generate(rows, Settings(num_new))
        assert counted.peak_bytes <= 1.08 * (told.free_bytes - decoder.weight_bytes), (rows, num_new)


@pytest.mark.parametrize("name", [name for name, t in registry().items() if "generate" in t.stages])
def test_the_advice_for_a_gpu_fits_by_its_own_count(name):
    """For each technique with what it needs, and for all of them but it; of GPT-2 XL's layers, a few."""
    xl = weights.random_decoder(replace(PRESETS["gpt2-xl"], num_layers=8), 0, torch.device("meta"), torch.float16)
    prompts = [[0] * length for length in (900, 700, 700, 300, 20)]
    for words in (with_needs(name), f"all,-{name}"):
        engine, told = tight(xl, Recipe.parse(words, "cuda"), prompts, Settings(40))
        assert not told.fits and told.largest_batch and told.largest_context
        for rows, num_new in follow(told, prompts):
            assert needed(engine, rows, num_new) <= told.free_bytes, (words, num_new)


@pytest.mark.parametrize("words", ["pre_padding", "pre_padding,memory_reuse"])
def test_the_largest_context_does_not_depend_on_how_many_tokens_were_asked_for(decoder, words):
    """Who asks for too many is told how many there may be."""
    engine, prompts = Engine(decoder, Recipe.parse(words).parts), batch(0, [20, 9] * 16)
    free = needed(engine, prompts, 40)
    told = [engine.forecast(prompts, Settings(num_new), free) for num_new in (1, 40, 41, 300)]
    assert [each.fits for each in told] == [True, True, False, False]
    assert {each.largest_context for each in told} == {60}
    assert "60 columns for 32 rows" in str(told[-1])


def test_prompts_that_are_too_long_are_cut_short(decoder):
    engine, prompts = Engine(decoder, Recipe.parse("pre_padding,memory_reuse").parts), batch(0, [400] * 16)
    free = needed(engine, batch(0, [90] * 16), 1)
    told = engine.forecast(prompts, Settings(20), free)
    assert not told.fits and told.largest_context == 91
    for length, fits in ((90, True), (91, False)):
        assert (needed(engine, batch(0, [length] * 16), 1) <= free) == fits
    none = engine.forecast(prompts, Settings(20), decoder.weight_bytes)
    assert none.largest_context == 0 and none.largest_batch == 0


def test_what_is_allocated_is_what_was_foreseen(decoder):
    """Of the KV cache and the arena to the byte."""
    for words in ("pre_padding,memory_reuse", "memory_reuse:kv=paged", "pre_padding,memory_reuse:planner=chunked"):
        engine = Engine(decoder, Recipe.parse(words).parts)
        told = engine.forecast(batch(0, [50, 3]), Settings(9), 2**30)
        engine.generate(batch(0, [50, 3]), Settings(9))
        assert (told.kv_bytes, told.activation_bytes) == (engine.kv_bytes, engine.activation_bytes)
    engine = Engine(decoder)
    told = engine.forecast(batch(0, [50, 3]), Settings(9), 2**30)
    engine.generate(batch(0, [50, 3]), Settings(9))
    assert (told.kv_bytes, told.growth_bytes) == (engine.kv_bytes, engine.kv_growth_bytes)


def test_a_gpu_of_any_size_is_asked_about_without_one():
    xl = weights.random_decoder(Config(48, 1600, 25, 6400, 50257, 1024), 0, torch.device("meta"), torch.float16)
    recipe = "pre_padding,mask_removal,memory_reuse,packed_prefill,fused_kernels,fused_sampling"
    engine = Engine(xl, Recipe.parse(recipe).parts)
    told = {gib: engine.forecast([[0] * 960] * 8, Settings(64), gib * 2**30) for gib in (2, 4, 24, 80)}
    assert [told[gib].fits for gib in told] == [False, False, True, True]
    assert told[2].largest_batch == told[2].largest_context == 0  # the weights alone take more
    assert 0 < told[4].largest_batch < 8 < told[24].largest_batch < told[80].largest_batch
    assert told[24].kv_bytes == 8 * 1024 * 48 * 2 * 1600 * 2
    assert told[4].run_bytes == told[24].run_bytes == told[24].total_bytes - xl.weight_bytes
    assert "8 rows of 960 + 64 tokens: does not fit" in str(told[4])
    assert f"{told[4].largest_batch} rows of this shape" in str(told[4])


@given(st.integers(0, 10**6), st.integers(0, 10**4), st.integers(0, 50), st.integers(0, 10**7), st.integers(1, 900))
def test_the_largest_is_found_whatever_the_curve(base, per_row, per_square, free, start):
    def needed(count: int) -> int:
        return base + count * per_row + count * count * per_square

    found = largest(needed, free, 3, 800, start)
    assert found == max((count for count in range(3, 801) if needed(count) <= free), default=0)


def test_the_largest_is_found_in_few_looks():
    looks: list[int] = []

    def needed(count: int) -> int:
        looks.append(count)
        return 2**30 + count * 619 * 2**20 + max(count, 5) * 2**20

    assert largest(needed, 80 * 2**30, 1, 4096, 8) == 130
    assert len(looks) <= 6


def test_a_late_bend_costs_few_looks():
    looks: list[int] = []

    def needed(count: int) -> int:
        looks.append(count)
        return 1000 + count + max(0, count - 900) * 100_000

    for free, found in ((3000, 900), (1500, 500), (10**7, 999)):
        for start in (1, 8, 64, 1000):
            looks.clear()
            assert largest(needed, free, 1, 4096, start) == found
            assert len(looks) < 45, (free, start)


@pytest.mark.parametrize(
    ("prompts", "says"), [([], "no prompts"), ([[1] * 600], "context of 512 tokens"), ([[800]], "token 800")]
)
def test_what_could_not_run_at_all_is_no_forecast(decoder, prompts, says):
    with pytest.raises(PromptError, match=says):
        Engine(decoder).forecast(prompts, Settings(4))


@pytest.mark.parametrize("free", [-1, "x", 2.5, True])
def test_free_bytes_are_checked(decoder, free):
    with pytest.raises(PromptError, match=f"free_bytes is {free!r}, but .*from 0 on, or None"):
        Engine(decoder).forecast([[1]], Settings(4), free)


def test_text_is_told_from_tokens(decoder):
    for call in (Engine(decoder).forecast, Engine(decoder).generate, Engine(decoder).lifetimes):
        with pytest.raises(PromptError, match="Prompt 2 is text, 'abc'; an engine takes tokens: model.encode"):
            call([[1], "abc"], Settings(4))


def test_an_empty_prompt_is_one_token(decoder):
    engine = Engine(decoder)
    assert engine.forecast([[]], Settings(4), 2**30) == engine.forecast([[1]], Settings(4), 2**30)


def test_a_model_of_shapes_alone_has_no_weights_in_this_machine_yet(monkeypatch):
    free_bytes = 10**9
    shapes = weights.random_decoder(Config(2, 64, 4, 256, 128, 64), 0, torch.device("meta"), torch.float16)
    monkeypatch.setattr("eet_lab.engine.forecast.free_bytes_of", lambda device: free_bytes)
    told = Engine(shapes).forecast([[1, 2, 3]], Settings(4))
    assert told.free_bytes == free_bytes and told.workspace_bytes == 0, "of this machine, which has no cuBLAS to feed"
    assert Engine(shapes).forecast([[1, 2, 3]], Settings(4), free_bytes).workspace_bytes > 0, "of some GPU"


@pytest.mark.parametrize(
    ("rows", "columns", "says"),
    [
        (3, 90, "Would fit: 3 rows of this shape, or 90 columns for 5 rows."),
        (1, 0, "Would fit: 1 row of this shape, or not even prompts of one token for 5 rows."),
        (0, 0, "Not even one row of this shape would fit."),
        (MOST_ROWS, 512, "Would fit: 4,096 or more rows of this shape, or 512 columns for 5 rows."),
    ],
)
def test_what_would_fit_in_words(rows, columns, says):
    assert Forecast(5, 10, 20, 1, 1, 1, 1, 1, 1, largest_batch=rows, largest_context=columns).room == says
