"""Drawn tokens: the same whatever the recipe, within top-k and top-p, and as likely as they should be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_engine import RECIPES, batch

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import PromptError
from eet_lab.ops import noise, reference
from eet_lab.ops.types import Choice, Sampling
from eet_lab.technique import Recipe


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=0.8),
        dict(temperature=1.3, top_k=7),
        dict(temperature=0.7, top_p=0.6),
        dict(temperature=1.0, top_k=40, top_p=0.9, seed=2**40),
    ],
)
def test_draws_do_not_depend_on_the_recipe(tiny, settings):
    prompts = batch(5, 1, 17)
    runs = {
        Engine(tiny.decoder, Recipe.parse(r).parts).generate(prompts, Settings(12, **settings)).tokens for r in RECIPES
    }
    assert len(runs) == 1
    other = Engine(tiny.decoder).generate(prompts, Settings(12, **(settings | {"seed": 5}))).tokens
    assert other not in runs


EACH = [
    Settings(12),
    Settings(3, 0.9, seed=5),
    Settings(20, 1.2, top_k=7, seed=2**40),
    Settings(9, 0.7, top_p=0.6),
    Settings(1, 1.0, top_k=10**6),
    Settings(7, 0.0, top_k=2, top_p=0.1),
]


PACKED = "pre_padding,mask_removal,packed_prefill,memory_reuse"


@pytest.fixture(scope="module")
def each_alone(tiny):
    """Prompts, and what each gets where all have its settings.

    The longest has one new token and short ones have many, so that pads and rows' ends part.
    """
    prompts, plain = batch(len(EACH), 1, 17), Engine(tiny.decoder)
    prompts[4] += [5] * 40
    return prompts, [plain.generate(prompts, settings).tokens[row] for row, settings in enumerate(EACH)]


@pytest.mark.parametrize(
    "recipe",
    ["", "pre_padding:read=shortest", "pre_padding,memory_reuse", PACKED, f"{PACKED},continuous_batching:rows=4"],
)
def test_each_prompt_of_a_batch_has_settings_of_its_own(tiny, each_alone, recipe):
    (prompts, alone), engine = each_alone, Engine(tiny.decoder, Recipe.parse(recipe).parts)
    assert engine.generate(prompts, EACH).tokens == tuple(alone)
    stops = tuple(replace(settings, stop=row[-1:]) for settings, row in zip(EACH, alone, strict=True))
    found = engine.generate(prompts, stops)
    assert found.tokens == tuple(row[: row.index(row[-1]) + 1] for row in alone)
    forced = [[7] * settings.max_new_tokens for settings in EACH]
    assert engine.generate(prompts, EACH, forced=forced).tokens == tuple(map(tuple, forced))


def test_settings_that_are_not_one_for_each_prompt_are_refused(tiny):
    engine = Engine(tiny.decoder)
    for settings, says in (
        (EACH[:2], "settings has 2 Settings for 3 prompts; give each prompt its own"),
        ([], "settings has 0 Settings for 3 prompts"),
        ([Settings(), 5, Settings()], "settings is 5, but it must be Settings"),
        ("abc", "settings is 'abc', but it must be Settings"),
        ([Settings(), Settings(10**6), Settings()], "Prompt 2 has 1 token; with 1,000,000 new ones"),
    ):
        with pytest.raises(PromptError, match=says):
            engine.generate([[1], [2], [3]], settings)
    with pytest.raises(PromptError, match="Row 2 of forced has 12 tokens, but max_new_tokens is 3"):
        engine.generate([[1], [2]], EACH[:2], forced=[[1] * 12] * 2)


ASKED = st.tuples(
    st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 5, 11, 12, 40]),
    st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
)


@given(st.lists(ASKED, min_size=1, max_size=8), st.integers(0, 2**62 - 1), st.sampled_from([0.5, 8.0]), st.booleans())
def test_a_row_gets_what_it_would_get_alone_to_the_bit(asked, seed, spread, ties):
    source = torch.Generator().manual_seed(seed % 2**31)
    logits = torch.randn(len(asked), 12, generator=source) * spread
    logits = logits.round() if ties else logits
    keys, positions = reference.noise_keys(seed, len(asked)), torch.arange(len(asked)) * 3
    assert [noise.noise_key(seed, row) for row in range(len(asked))] == keys.tolist()
    together = reference.choose(logits, positions, Sampling.of(keys, asked, 12))
    for row, how in enumerate(asked):
        at = slice(row, row + 1)
        sampling = Sampling.of(keys[at], [how], 12)
        alone = reference.choose(logits[at], positions[at], sampling)
        assert together[at] == alone, how
        if sampling.choice == Choice.GREEDY:
            assert alone == logits[at].argmax(-1)
        for more in Choice:
            if more > sampling.choice:
                assert reference.choose(logits[at], positions[at], sampling._replace(choice=more)) == alone, (how, more)


def test_draws_stay_within_top_k_and_top_p(tiny, monkeypatch):
    """The noise is finite even for the hash's last value, so a hidden word can never win."""
    monkeypatch.setattr(noise, "mix", lambda x: torch.full_like(x, 0x7FFFFFFF))
    assert reference.gumbel(torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long), 7).isfinite().all()
    monkeypatch.undo()
    torch.manual_seed(0)
    logits, seen = torch.randn(1, 50257).mul(0.1).expand(100, -1), set()
    allowed = set(logits[0].topk(5).indices.tolist())
    for seed in range(3):
        sampling = Settings(temperature=1.0, top_k=5, seed=seed).sampling(100)
        seen |= set(reference.choose(logits, torch.zeros(100, dtype=torch.long), sampling).tolist())
    assert seen == allowed


def test_draws_follow_the_chances():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20_000, 4)
    sampling = Settings(temperature=1.0, seed=11).sampling(20_000)
    drawn = reference.choose(logits, torch.arange(20_000) % 7, sampling)
    assert torch.allclose(drawn.bincount(minlength=4) / 20_000, logits[0].exp(), atol=0.015)


def test_seeds_far_apart_draw_apart(tiny):
    engine, found = Engine(tiny.decoder), set()
    for seed in (5, 5 + 2**31, 5 + 2**40, 5 + 2**61):
        found.add(engine.generate([[1, 2]], Settings(16, temperature=1.0, seed=seed)).tokens)
    assert len(found) == 4


def test_low_temperature_is_greedy_and_top_k_1_too(tiny):
    prompts, engine = batch(3, 2, 9), Engine(tiny.decoder)
    greedy = engine.generate(prompts, Settings(8)).tokens
    assert engine.generate(prompts, Settings(8, temperature=1e-4)).tokens == greedy
    assert engine.generate(prompts, Settings(8, temperature=5.0, top_k=1)).tokens == greedy
    assert engine.generate(prompts, Settings(8, temperature=5.0, top_p=1e-9)).tokens == greedy
