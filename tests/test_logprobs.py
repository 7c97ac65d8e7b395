"""Log-probabilities beside the tokens: those of transformers, for whoever asked, whoever shares the pass."""

# ruff: noqa: F401, F811  # fixtures come by their names

from __future__ import annotations

import random

import pytest
import torch
from families import ours, prompts, theirs
from test_captures import emulated
from test_continuous import BASE, MIXED, POLICIES, STORES, decoder, engine_of, lagging, recipe

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import PromptError
from eet_lab.technique import Recipe

HOW = Settings(6, temperature=0.8, seed=3, logprobs=5)


def log_softmax(name: str, row: list[int], tokens: tuple[int, ...]) -> torch.Tensor:
    """What transformers gives each token of the vocabulary in place of each of these, [n,V], in fp32."""
    with torch.inference_mode():
        logits = theirs(name)(torch.tensor([[*row, *tokens]])).logits[0].float()
    return logits.log_softmax(-1)[len(row) - 1 : -1]


def check(told, tokens, want, count: int) -> None:
    assert len(told) == len(tokens) == len(want)
    for each, token, all_of in zip(told, tokens, want, strict=True):
        assert each.logprob == pytest.approx(float(all_of[token]), abs=2e-5)
        best = all_of.topk(min(count, len(all_of)))
        ids, values = [token for token, _ in each.top], [value for _, value in each.top]
        assert values == pytest.approx(best.values.tolist(), abs=2e-5) and len(set(ids)) == len(ids)
        assert [float(all_of[token]) for token in ids] == pytest.approx(values, abs=2e-5)


@pytest.mark.parametrize(
    "words", ["", BASE, f"{BASE},memory_reuse:kv=paged,continuous_batching:rows=2:chunk=3:budget=4"]
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_they_are_transformers_log_softmax_of_raw_logits(name, words):
    engine = Engine(ours(name).decoder, Recipe.parse(words).parts)
    told = engine.generate(prompts(), HOW)
    for row, tokens, found in zip(prompts(), told.tokens, told.logprobs, strict=True):
        check(found, tokens, log_softmax(name, row, tokens), 5)


def test_forced_tokens_have_theirs():
    forced = [[3] * 4 for _ in prompts()]
    told = Engine(ours("gpt2").decoder).generate(prompts(), Settings(4, logprobs=0), forced=forced)
    for row, found in zip(prompts(), told.logprobs, strict=True):
        check(found, (3,) * 4, log_softmax("gpt2", row, (3,) * 4), 0)
        assert all(each.top == () for each in found)


@pytest.mark.usefixtures("lagging")
@pytest.mark.parametrize(("store", "policy"), [*zip((*STORES, "static"), POLICIES, strict=True)])
def test_whoever_asks_gets_them_and_nobody_gets_other_tokens(decoder, store, policy):
    draw, wanted = random.Random(f"{store}{policy}"), {}
    parts, counts = emulated(Recipe.parse(recipe(store, policy)).parts)
    engine, running = Engine(decoder, parts), []
    reference = Engine(decoder)
    engine.reserve(parts.schedule.max_rows, 62, Settings(2))
    for number in range(16):
        prompt = [draw.randrange(1, 60) for _ in range(draw.randint(1, 9))]
        settings = Settings(draw.randint(1, 16), **draw.choice(MIXED), logprobs=(None, 0, 3, 20)[number % 4])
        running.append((engine.add(prompt, settings), prompt, settings))
        for _ in range(draw.randint(0, 6)):
            engine.step()
    while not all(request.done for request, *_ in running):
        engine.step()
    for request, prompt, settings in running:
        alone = reference.generate([prompt], settings)
        assert request.generated == [*alone.tokens[0]]
        if settings.logprobs is None:
            assert request.logprobs == []
            continue
        [want] = alone.logprobs
        assert [len(each.top) for each in request.logprobs] == [settings.logprobs] * len(want)
        assert [each.logprob for each in request.logprobs] == pytest.approx([each.logprob for each in want], abs=1e-5)
        wanted[settings.logprobs] = want
    assert {0, 3, 20} <= {*wanted} and counts["replays"] > 0


def test_a_step_without_them_does_nothing_for_them(decoder, monkeypatch):
    engine = engine_of(decoder)
    asked, other = engine.add([1, 2], Settings(3, logprobs=2)), engine.add([3], Settings(9))
    while not asked.done:
        engine.step()
    slots = engine._slots
    monkeypatch.setattr(slots.passes.logprobs, "write", lambda *given: pytest.fail("nobody wants them"))
    while not other.done:
        engine.step()
    assert len(asked.logprobs) == 3 and other.logprobs == []
    again = engine_of(decoder)
    again.generate([[1]], Settings(3))
    assert again._slots.passes.logprobs is None, "nothing is held for them either"


def test_no_pass_asks_the_memory_for_more(decoder):
    plain, told = engine_of(decoder), engine_of(decoder)
    plain.generate([[1, 2, 3]], Settings(5))
    told.generate([[1, 2, 3]], Settings(5, logprobs=3))
    assert plain.plans() == told.plans() and plain.activation_bytes == told.activation_bytes


@pytest.mark.parametrize("value", [-1, 21, 1.0, True, "3"])
def test_other_numbers_are_refused(value):
    with pytest.raises(PromptError, match="logprobs is .*from 0 to 20"):
        Settings(logprobs=value)
