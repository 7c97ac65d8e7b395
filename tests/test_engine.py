"""The engine against Hugging Face's left-padded `generate`, under every recipe that runs on a CPU."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch
from conftest import make_gpt2

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.models import load
from eet_lab.models.decoder import mapped
from eet_lab.technique import Recipe

HEADLINE = ("pre_padding", "mask_removal", "memory_reuse")
RECIPES = [",".join(names) for n in range(4) for names in itertools.combinations(HEADLINE, n)]
RECIPES += ["pre_padding:read=shortest", "memory_reuse:planner=first_fit,mask_removal,pre_padding"]
RECIPES += ["pre_padding,mask_removal,packed_prefill", "pre_padding,mask_removal,packed_prefill,memory_reuse"]
BATCHES = {
    "ragged": (5, 1, 23, 20),
    "one row": (1, 7, 7, 9),
    "equal lengths": (4, 6, 6, 8),
    "one-token prompts": (3, 1, 1, 5),
    "one new token": (3, 2, 9, 1),
    "64 rows": (64, 1, 30, 4),
}


def batch(num_rows: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, 499) for _ in range(draw.randint(shortest, longest))] for _ in range(num_rows)]


def hf_greedy(model, prompts, num_new, **kwargs):
    longest = max(map(len, prompts))
    ids, attention = (
        torch.zeros(len(prompts), longest, dtype=torch.long),
        torch.zeros(len(prompts), longest, dtype=torch.long),
    )
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :], attention[row, longest - len(prompt) :] = torch.tensor(prompt), 1
    options = dict(min_new_tokens=num_new, eos_token_id=None) | kwargs
    out = model.generate(
        ids, attention_mask=attention, max_new_tokens=num_new, do_sample=False, pad_token_id=0, **options
    )
    return [tuple(row) for row in out[:, longest:].tolist()]


@pytest.fixture(scope="module")
def expected(hf_model):
    return {name: hf_greedy(hf_model, batch(*shape[:3]), shape[3]) for name, shape in BATCHES.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_greedy_tokens_equal_transformers(tiny, expected, recipe):
    engine = Engine(tiny.decoder, Recipe.parse(recipe).parts)
    for name, (num_rows, shortest, longest, num_new) in BATCHES.items():
        run = engine.generate(batch(num_rows, shortest, longest), Settings(num_new))
        assert list(run.tokens) == expected[name], name
        assert set(run.finish) == {"length"}


def test_expected_tokens_vary(expected):
    """Equality would mean little if the model always said the same."""
    assert len(set(itertools.chain(*expected["ragged"]))) > 20


@pytest.mark.parametrize(
    "changes",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"n_inner": 40},
        {"activation_function": "gelu"},
        {"activation_function": "relu"},
        {"n_embd": 40, "n_head": 5},
    ],
)
def test_variants_of_gpt2_equal_transformers(changes):
    model, prompts = make_gpt2(**changes), batch(4, 1, 12)
    ours = Engine(load(model, device="cpu").decoder).generate(prompts, Settings(12)).tokens
    model.set_attn_implementation("eager")  # before transformers 5, sdpa overlooks how scores are to be scaled
    assert list(ours) == hf_greedy(model, prompts, 12)


@pytest.mark.parametrize("recipe", ["pre_padding", "pre_padding,memory_reuse"])
def test_a_hidden_row_does_not_overflow_in_half_precision(tiny, recipe):
    """Scores far below zero plus the mask must stay finite: a pad's row is hidden altogether."""
    model = mapped(tiny.decoder, lambda tensor: tensor.half())
    C = model.config.hidden_size
    layers = []
    for layer in model.layers:  # the same attention to every key, since a constant in all scores changes no softmax
        bias = layer.qkv.bias.clone()
        bias[:C], bias[C : 2 * C] = 40.0, -40.0
        weight = layer.qkv.weight.clone()
        weight[: 2 * C] = 0
        layers.append(layer._replace(qkv=layer.qkv._replace(weight=weight, bias=bias)))
    model, prompts = model._replace(layers=tuple(layers)), [[3, 1, 4, 1, 5, 9, 2, 6], [5]]
    together = Engine(model, Recipe.parse(recipe).parts).generate(prompts, Settings(8)).tokens
    alone = Engine(model, Recipe.parse(recipe).parts).generate(prompts[1:], Settings(8)).tokens
    assert together[1][:4] == alone[0][:4]  # beyond, rounding may part them
    assert set(together[1]) != {0}


def test_a_batch_with_nan_does_not_poison_the_next(tiny):
    engine = Engine(tiny.decoder, Recipe.parse("pre_padding,memory_reuse").parts)
    want = engine.generate([[1, 2], [3]], Settings(5)).tokens
    with torch.inference_mode():
        engine.cache.keys.fill_(float("nan"))
        engine.cache.values.fill_(float("nan"))
    assert engine.generate([[1, 2], [3]], Settings(5)).tokens == want


@pytest.mark.parametrize("recipe", ["", "all"])
def test_rows_stop_on_their_own(tiny, expected, recipe):
    prompts = batch(*BATCHES["ragged"][:3])
    stop = expected["ragged"][1][4]
    run = Engine(tiny.decoder, Recipe.parse(recipe).parts).generate(prompts, Settings(20, stop=(stop,)))
    for got, full, why in zip(run.tokens, expected["ragged"], run.finish, strict=True):
        cut = full.index(stop) + 1 if stop in full else len(full)
        assert got == full[:cut]
        assert why == ("stop" if stop in full else "length")
    assert "stop" in run.finish


def test_slots_are_used_again_for_the_same_shape(tiny):
    engine = Engine(tiny.decoder, Recipe.parse("pre_padding,memory_reuse").parts)
    one, two = batch(4, 9, 9, seed=1), batch(4, 9, 9, seed=2)
    first = engine.generate(one, Settings(6))
    slots = engine._slots
    assert engine.generate(two, Settings(6)).tokens == Engine(tiny.decoder).generate(two, Settings(6)).tokens
    assert engine._slots is slots
    assert engine.generate(one, Settings(6)).tokens == first.tokens


def test_events_tell_every_token_once(tiny):
    events, prompts = [], batch(4, 1, 9)
    run = Engine(tiny.decoder).generate(prompts, Settings(7), on_step=events.append)
    rows = [tuple(token for event in events for row, token in event.tokens if row == r) for r in range(4)]
    assert tuple(rows) == run.tokens
    assert [event.index for event in events] == list(range(events[0].num_steps))
    assert run.ttft_ms == max(t for t in run.first_ms) and run.tpot_ms > 0
    assert run.total_ms == pytest.approx(sum(run.step_ms))


def test_times_per_token_follow_their_definition(tiny):
    assert Engine(tiny.decoder).generate([[1, 2]], Settings(1)).tpot_ms is None


@pytest.mark.parametrize("recipe", RECIPES[:8])
def test_teacher_forcing_reads_what_it_is_told(tiny, recipe):
    prompts, forced = batch(3, 1, 6), [[7] * 5, [8] * 5, [9] * 5]
    run = Engine(tiny.decoder, Recipe.parse(recipe).parts).generate(prompts, Settings(5), forced=forced)
    assert [list(row) for row in run.tokens] == forced


@pytest.mark.parametrize("recipe", ["", "all"])
def test_stop_in_the_prefill_and_between_steps(tiny, recipe):
    engine, cancel, prompts = (
        Engine(tiny.decoder, Recipe.parse(recipe).parts),
        threading.Event(),
        batch(3, 4, 9),
    )
    cancel.set()
    run = engine.generate(prompts, Settings(30), cancel=cancel)
    assert run.cancelled and run.num_tokens == 0 and run.ttft_ms is None
    cancel.clear()
    run = engine.generate(
        prompts, Settings(30), cancel=cancel, on_step=lambda e: cancel.set() if e.index == 12 else None
    )
    assert run.cancelled and 0 < run.num_tokens < 90
    assert engine.generate(prompts, Settings(30)).tokens == Engine(tiny.decoder).generate(prompts, Settings(30)).tokens


def test_an_empty_prompt_is_bos(tiny):
    engine = Engine(tiny.decoder)
    assert engine.generate([[]], Settings(5)).tokens == engine.generate([[0]], Settings(5)).tokens


def test_a_full_context_runs(tiny, hf_model):
    prompt = batch(1, 100, 100)
    assert list(Engine(tiny.decoder).generate(prompt, Settings(28)).tokens) == hf_greedy(hf_model, prompt, 28)


def test_nan_in_the_pads_changes_nothing(tiny):
    """Mask removal never reads what stands in a pad's columns."""
    from dataclasses import replace

    from eet_lab.parts.kv_cache import StaticKV

    class Poisoned(StaticKV):
        def layer(self, number, batch):
            keys, values = super().layer(number, batch)
            for row, begin in enumerate(batch.keys.begin.tolist() if not keys.is_meta else []):
                poisoned.add(begin)
                keys[row, :, :begin] = values[row, :, :begin] = float("nan")
            return keys, values

    poisoned: set[int] = set()
    parts, prompts = Recipe.parse("pre_padding,mask_removal,memory_reuse").parts, batch(5, 1, 14)
    clean = Engine(tiny.decoder, parts).generate(prompts, Settings(9)).tokens
    assert Engine(tiny.decoder, replace(parts, kv_cache=Poisoned)).generate(prompts, Settings(9)).tokens == clean
    assert len(poisoned) > 2


def test_an_engine_is_cheap_to_build(tiny):
    import time

    parts = Recipe.parse("all").parts
    best = min(_timed(lambda: Engine(tiny.decoder, parts), time) for _ in range(20))
    assert best < 1e-3


def _timed(work, time) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
