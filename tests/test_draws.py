"""Drawn tokens: the same whatever the recipe, within top-k and top-p, and as likely as they should be."""

from __future__ import annotations

import pytest
import torch
from test_engine import RECIPES, batch

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.ops import reference
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


def test_draws_stay_within_top_k_and_top_p(tiny, monkeypatch):
    """The noise is finite even for the hash's last value, so a hidden word can never win."""
    monkeypatch.setattr(reference, "_mix", lambda x: torch.full_like(x, 0x7FFFFFFF))
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
