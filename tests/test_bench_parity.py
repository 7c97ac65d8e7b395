"""The check of the output: every recipe passes it, and a wrong one cannot."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.bench.parity import ParityCheck, drawn_margin, noise_at, parity, reference_logits
from eet_lab.codec import encode
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.models import load
from eet_lab.ops import reference
from eet_lab.parts import Parts
from eet_lab.technique import Recipe, everything

ROWS = [[5], [7, 8, 9, 10], [3, 1, 4, 1, 5, 9, 2], []]
SETTINGS = Settings(max_new_tokens=9)
HERE = everything("cpu").techniques
CHOICES = [names for n in range(len(HERE) + 1) for names in combinations(HERE, n)]
RECIPES = [",".join(map(str, c)) for c in CHOICES if all({t.name for t in c}.issuperset(t.requires) for t in c)]


@pytest.fixture(scope="module")
def parity_check(tiny):
    return ParityCheck(tiny.decoder, ROWS, SETTINGS)


@pytest.mark.parametrize("words", [*RECIPES, "pre_padding:read=shortest", "memory_reuse:planner=first_fit"])
def test_every_recipe_says_what_the_baseline_says(parity_check, words):
    found = parity_check.judge(Recipe.parse(words).parts)
    assert found.same_tokens, found.explanation
    assert found.verdict == "identical"
    assert found.max_error <= found.budget


def test_the_reference_is_what_transformers_computes(tiny, hf_model):
    tokens = Engine(tiny.decoder).generate(ROWS[:3], SETTINGS).tokens
    ours = reference_logits(tiny.decoder, ROWS[:3], tokens, 9)
    for row, new, logits in zip(ROWS, tokens, ours, strict=False):
        with torch.inference_mode():
            theirs = hf_model(torch.tensor([[*row, *new]])).logits[0, len(row) - 1 : -1]
        torch.testing.assert_close(logits.float(), theirs, rtol=1e-4, atol=1e-4)
        assert tuple(theirs.argmax(-1).tolist()) == new


def spoiled(change) -> Parts:
    """Parts whose layers' residual is changed: a kernel with a bug."""

    def linear_residual(x, w, residual, *, empty):
        return change(reference.linear_residual(x, w, residual, empty=empty))

    return replace(Parts(), ops=replace(Parts().ops, linear_residual=linear_residual))


def test_a_wrong_kernel_is_caught_even_where_tokens_agree(parity_check):
    slightly = parity_check.judge(spoiled(lambda y: y.mul_(1 + 3e-4)))
    assert slightly.verdict == "different"
    assert slightly.max_error > slightly.budget
    grossly = parity_check.judge(spoiled(lambda y: y.roll(1, -1)))
    assert grossly.verdict == "different"
    assert not grossly.same_tokens
    assert any(place is not None for place in grossly.first_difference)


def test_nan_is_different(parity_check):
    found = parity_check.judge(spoiled(lambda y: y.mul_(float("nan"))))
    assert found.verdict == "different"
    assert found.max_error is None


def test_a_wrong_choice_at_a_wide_margin_is_caught(parity_check):
    def second_best(x, step, norm_w, head, sampling, *, empty):
        return reference.newest_logits(x, step, norm_w, head, empty=empty).topk(2).indices[:, 1]

    found = parity_check.judge(replace(Parts(), ops=replace(Parts().ops, next_token=second_best)))
    assert found.verdict == "different"
    assert found.first_difference == (0, 0, 0, 0)
    assert max(found.margins) > 2 * found.budget
    assert "no near-tie" in found.explanation
    assert found.explanation.startswith("Prompt 1 parts at new token 1, ")


def test_a_near_tie_is_reported_and_not_hidden(hf_model):
    """Two words share one embedding, so that every choice between them is a tie that rounding may break."""
    model = load(hf_model, device="cpu")
    favourite = Engine(model.decoder).generate([[5]], Settings(max_new_tokens=1)).tokens[0][0]
    twin = (favourite + 1) % model.config.vocab_size
    head = model.decoder.head.weight.clone()
    head[twin] = head[favourite]
    decoder = model.decoder._replace(head=model.decoder.head._replace(weight=head))

    def other_one(x, step, norm_w, head, sampling, *, empty):
        token = reference.next_token(x, step, norm_w, head, sampling, empty=empty)
        twins = torch.tensor([favourite, twin])
        return torch.where(torch.isin(token, twins), twins.sum() - token, token)

    parts = replace(Parts(), ops=replace(Parts().ops, next_token=other_one))
    found = parity(decoder, parts, [[5]], SETTINGS)
    assert found.verdict == "within rounding"
    assert found.first_difference == (0,)
    assert found.margins == (0.0,)
    assert found.explanation.startswith("1 of 1 prompt parts, the first at new token 1 of prompt 1, at a near-tie of 0")


def test_draws_are_compared_too(tiny):
    drawn = Settings(max_new_tokens=9, temperature=0.9, top_k=20, seed=4)
    found = parity(tiny.decoder, Recipe.parse("all").parts, ROWS, drawn)
    assert found.verdict == "identical"


def choosing(choice) -> Parts:
    """Parts whose logits are right, and whose choice of a token is another."""

    def next_token(x, step, norm_w, head, sampling, *, empty):
        logits = reference.newest_logits(x, step, norm_w, head, empty=empty)
        return choice(logits, step, sampling)

    return replace(Parts(), ops=replace(Parts().ops, next_token=next_token))


def wrong_seed(logits, step, sampling):
    return reference.choose(logits, step.positions[step.last], sampling._replace(noise=sampling.noise + 1))


@pytest.mark.parametrize("limits", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 30, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize(
    "choice",
    [lambda logits, *_: logits.argmin(-1), lambda logits, *_: logits.argmax(-1), wrong_seed],
    ids=["least", "greedy", "another seed"],
)
def test_wrong_draws_are_caught(tiny, choice, limits):
    drawn = Settings(max_new_tokens=9, temperature=0.9, seed=4, **limits)
    found = parity(tiny.decoder, choosing(choice), ROWS, drawn)
    assert found.verdict == "different", found.explanation
    assert max(margin for margin in found.margins if margin is not None) > 2 * found.budget


def test_half_precision_draws_may_part_at_near_ties_only(hf_model):
    """The op reads logits that are off by a little: what rounding does, and then what it does not."""
    model = load(hf_model, device="cpu", dtype="bfloat16")

    def shaken(size):
        def choice(logits, step, sampling):
            V = logits.shape[1]
            shift = torch.linspace(-size, size, V)[torch.randperm(V)].to(logits.device)
            return reference.choose(logits.float() + shift, step.positions[step.last], sampling)

        return choosing(choice)

    for limits in ({}, {"top_k": 20}, {"top_p": 0.8}):
        settings = Settings(max_new_tokens=60, temperature=0.9, seed=4, **limits)
        parity_check = ParityCheck(model.decoder, ROWS, settings)
        torch.manual_seed(0)
        assert parity_check.judge(shaken(0.3 * parity_check.budget)).verdict in ("within rounding", "identical"), limits
        assert parity_check.judge(shaken(30 * parity_check.budget)).verdict == "different", limits


@given(
    seed=st.integers(0, 10_000),
    slack=st.sampled_from([0.0, 1e-3, 0.1, 1.0]),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
)
def test_what_rounding_explains_is_never_called_wrong(seed, slack, temperature, top_k, top_p):
    """Logits that move against each other by no more than the slack lead to choices within the slack."""
    settings, generator = Settings(8, temperature, top_k, top_p, seed), torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 50, generator=generator) * 3
    moved = logits + (torch.rand(logits.shape, generator=generator) - 0.5) * slack
    drawn = reference.choose(moved, torch.full((3,), 17), settings.sampling(3))
    for row, token in enumerate(drawn.tolist()):
        noise = noise_at(seed, row, 17, logits[row])
        assert drawn_margin(logits[row].double(), token, noise, settings, slack) <= slack + 1e-5


def test_what_comes_after_the_checked_logits_is_checked_too(tiny, monkeypatch):
    monkeypatch.setattr(sys.modules[ParityCheck.__module__], "MOST_LOGITS", 2 * len(ROWS))

    def late_mistake(logits, step, sampling):
        return torch.where(step.positions[step.last] >= 10, logits.argmin(-1), logits.argmax(-1))

    found = parity(tiny.decoder, choosing(late_mistake), ROWS, SETTINGS)
    assert found.first_difference == (None, 7, 4, None)
    assert found.explanation.startswith("Prompt 2 parts at new token 8, ")
    assert found.verdict == "different"
    assert min(found.margins[1:3]) > 2 * found.budget


def test_a_baseline_that_overflows_vouches_for_nothing(hf_model):
    model = load(hf_model, device="cpu", dtype="float16")
    fc_2 = model.decoder.layers[0].fc_2
    layer = model.decoder.layers[0]._replace(fc_2=fc_2._replace(weight=fc_2.weight * 60_000))
    decoder = model.decoder._replace(layers=(layer, *model.decoder.layers[1:]))
    for words in ("", "all"):
        found = parity(decoder, Recipe.parse(words).parts, ROWS, SETTINGS)
        assert found.verdict == "different"
        assert "baseline's own logits overflow in float16" in found.explanation
        assert json.loads(json.dumps(encode(found), allow_nan=False))


def test_half_precision_keeps_its_own_budget(hf_model):
    model = load(hf_model, device="cpu", dtype="bfloat16")
    found = parity(model.decoder, Recipe.parse("all").parts, ROWS, SETTINGS)
    assert found.verdict in ("identical", "within rounding"), found.explanation
    assert found.budget > 1e-3
