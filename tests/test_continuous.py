"""Requests that join and leave while others run: each gets what it would get alone, and all memory is given back."""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import replace
from functools import partial

import pytest
import torch
from alone import Alone, num_alike
from families import KINDS, NEW, expected, ours, prompts
from test_captures import emulated
from test_soak import held

from eet_lab.bench import compare, ladder
from eet_lab.bench.held_out import perplexity
from eet_lab.engine import slot_passes, slots
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.engine.stream import StepTokens
from eet_lab.errors import EngineBusy, PromptError, RecipeError, ScheduleError
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.parts.paged_kv import PagedKV
from eet_lab.technique import Recipe

BASE = "pre_padding,mask_removal,packed_prefill"
STORES = ("static", "paged")
GREEDY: tuple[dict, ...] = ({},)
MIXED: tuple[dict, ...] = (
    {},
    {"top_k": 3, "top_p": 0.5},  # greedy all the same
    {"temperature": 0.9},
    {"temperature": 1.3, "top_k": 1000},  # more than there are
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.4, "top_p": 0.6},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
)
POLICIES = ("rows=3:chunk=16:budget=16", "rows=2:chunk=1:budget=16", "rows=16")


def recipe(store: str, policy: str = POLICIES[0]) -> str:
    return f"{BASE},memory_reuse:kv={store},continuous_batching:{policy}"


def engine_of(decoder, store="static", policy=POLICIES[0], columns=96, **changes) -> Engine:
    parts = replace(Recipe.parse(recipe(store, policy)).parts, **changes)
    engine = Engine(decoder, parts)
    engine.reserve(parts.schedule.max_rows, columns - 2, Settings(2))
    return engine


@pytest.fixture(scope="module")
def decoder():
    return weights.random_decoder(Config(2, 16, 2, 32, 61, 256), 0, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def alone(decoder):
    return Alone(decoder)


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_through_slots_equals_transformers(name):
    for store, policy in zip(STORES * 2, (*POLICIES, POLICIES[0]), strict=False):
        told = Engine(ours(name).decoder, Recipe.parse(recipe(store, policy)).parts).generate(prompts(), Settings(NEW))
        assert [tuple(row) for row in told.tokens] == expected(name), (store, policy)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("store", STORES)
def test_requests_that_join_equal_transformers(name, store):
    draw, engine, added = random.Random(name), engine_of(ours(name).decoder, store, columns=32), []
    waiting = list(enumerate(prompts()))
    while waiting or not all(request.done for _, request in added):
        if waiting and draw.random() < 0.4:
            row, prompt = waiting.pop()
            added.append((row, engine.add(prompt, Settings(NEW))))
        engine.step()
    engine.step()
    assert all(tuple(request.generated) == expected(name)[row] for row, request in added)


def test_what_all_get_at_once_is_what_each_gets_alone(alone):
    draw = random.Random(0)
    asked = [
        ([draw.randrange(1, 60) for _ in range(draw.randint(1, 24))], Settings(draw.randint(1, 24))) for _ in "12345"
    ]
    assert alone.each(asked) == tuple(alone(*each) for each in asked)


def random_life(engine, alone, seed, num_requests, hows=GREEDY, most=24):
    """Requests come and go as it happens, each asks for one of `hows`; some are cancelled, some end by a stop token.
    Returns how many were whole.
    """
    draw, asked, added, running = random.Random(seed), [], [], []
    while len(added) < num_requests or running:
        if len(added) < num_requests and draw.random() < 0.5:
            prompt = [draw.randrange(1, 60) for _ in range(draw.randint(1, most))]
            stop = tuple(draw.sample(range(61), 4)) if draw.random() < 0.3 else ()
            how = draw.choice(hows) if hows[1:] else hows[0]
            settings = Settings(draw.randint(1, most), **how, seed=draw.randint(0, 2), stop=stop)
            added.append(engine.add(prompt, settings, number=len(added)))
            asked.append((prompt, settings))
            running.append(added[-1])
        engine.step()
        for request in running:
            if not request.done and draw.random() < 0.003:
                engine.cancel(request)
        running = [request for request in running if not request.done]
    assert engine.step() == []
    return num_alike(added, alone.each(asked))


LIVES = [(store, policy, MIXED) for store in STORES for policy in POLICIES]
LIVES += [(store, policy, GREEDY) for store, policy in zip(STORES, POLICIES, strict=False)]
"""Where nobody draws, a step chooses in another way, whatever the store and the policy."""


@pytest.mark.parametrize(("store", "policy", "hows"), LIVES)
def test_each_gets_what_it_would_get_alone(decoder, alone, store, policy, hows):
    engine = engine_of(decoder, store, policy)
    assert random_life(engine, alone, f"{store}{policy}", 20, hows) > 8


@pytest.mark.parametrize("store", STORES)
def test_tokens_that_fill_a_pass_up_are_no_rows(decoder, alone, store, monkeypatch):
    """As on a GPU, where passes have few sizes."""
    most = Recipe.parse(recipe(store)).parts.schedule.most_tokens(96)
    monkeypatch.setattr(slot_passes.SlotPasses, "pass_size", lambda self, tokens: min(tokens + 5, most))
    read = batches_of(monkeypatch)
    assert random_life(engine_of(decoder, store), alone, f"dummy tokens {store}", 15, MIXED) > 7
    assert 5 in {batch.num_dummy for batch in read}


def batches_of(monkeypatch) -> list:
    """Mixed passes from now on."""
    read, sent = [], slot_passes.SlotPasses._sent
    monkeypatch.setattr(slot_passes.SlotPasses, "_sent", lambda *given: read.append(sent(*given)) or read[-1])
    return read


@pytest.mark.parametrize("store", STORES)
def test_captured_steps_serve_requests_that_come_and_go(decoder, alone, store):
    parts, counts = emulated(Recipe.parse(recipe(store)).parts)
    engine = Engine(decoder, parts)
    engine.reserve(1, 94, Settings(2))
    assert random_life(engine, alone, store, 40, MIXED[2:3]) > 25
    assert counts["launches"] <= 2 and counts["replays"] > 3 * counts["captures"]


@pytest.mark.parametrize("store", STORES)
def test_no_step_is_captured_for_values_that_are_new(decoder, alone, store):
    """What a step is captured for is only how it chooses: greedily, from all tokens, or from some of them."""
    parts, counts = emulated(Recipe.parse(recipe(store)).parts)
    engine = Engine(decoder, parts)
    engine.reserve(1, 47, Settings(2))
    for how in (MIXED[0], MIXED[2], MIXED[4]):
        for _ in range(2):  # the first step of all is launched, not captured
            request = engine.add([1], Settings(47, **how))
            while engine.step() or not request.done:
                pass
    captures = counts["captures"]
    assert random_life(engine, alone, f"mixed {store}", 25, MIXED) > 12
    assert counts["captures"] == captures > 3 and counts["launches"] == 3


@pytest.mark.parametrize("store", STORES)
def test_slots_that_long_requests_left_do_not_disturb_short_ones(decoder, alone, store):
    engine = engine_of(decoder, store, "rows=16")
    for length, count in ((40, 5), (1, 2), (20, 3)):
        settings, rows = Settings(length), [[1 + row, 2] for row in range(count)]
        requests = [engine.add(row, settings) for row in rows]
        while not all(request.done for request in requests):
            engine.step()
        assert [tuple(request.generated) for request in requests] == [alone(row, settings) for row in rows]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("policy", "lengths"), [("rows=3:chunk=2", (20, 1, 20, 20)), ("rows=2", (1, 8, 8))])
def test_rows_whose_tokens_lie_in_another_order_than_their_slots(decoder, alone, store, policy, lengths):
    """One that joins has the lowest slot and the last tokens of the pass."""
    draw, engine = random.Random(3), engine_of(decoder, store, policy)
    asked = [([draw.randrange(1, 60) for _ in range(length)], Settings(1 if length == 1 else 6)) for length in lengths]
    requests = [engine.add(*each) for each in asked]
    while not all(request.done for request in requests):
        engine.step()
    assert [tuple(request.generated) for request in requests] == [alone(*each) for each in asked]


class Lagging:
    """A stream that is up to 8 passes behind, as a GPU's is."""

    def __init__(self, clock, device, num_rows, lead_ms):
        self._clock, self._waiting, self._draw, self._num_passes = clock, deque(), random.Random(0), 0

    def push(self, state, logprobs, is_full):
        arrived = self._collect(self._draw.randint(0, 7))
        ids = state.log[self._num_passes % len(state.log)].tolist()
        rows = None if logprobs is None else logprobs[self._num_passes % len(logprobs)].tolist()
        self._num_passes += 1
        assert int(state.num_passes) == self._num_passes
        self._waiting.append(StepTokens(ids, self._clock.since_ms(), rows))
        return arrived

    def drain(self):
        return self._collect(0)

    def _collect(self, keep):
        return [self._waiting.popleft() for _ in range(max(len(self._waiting) - keep, 0))]


@pytest.fixture
def lagging(monkeypatch):
    monkeypatch.setattr(slots, "open_stream", Lagging)


@pytest.mark.usefixtures("lagging")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pages", [None, 7])
def test_a_host_that_is_behind_hears_the_same(decoder, alone, policy, pages):
    more = {} if pages is None else {"kv_cache": PagedKV(page=16, num_pages=pages)}
    engine = engine_of(decoder, "paged" if pages else "static", policy, columns=64, **more)
    assert random_life(engine, alone, f"{policy}{pages}", 20, MIXED) > 8


@pytest.mark.usefixtures("lagging")
def test_a_request_can_be_cancelled_until_it_is_done_and_none_hangs(decoder, alone):
    engine = engine_of(decoder)
    request = engine.add([1, 2], Settings(2))
    while request.status != "finished":
        engine.step()
    assert not request.done
    engine.cancel(request)
    assert request.done and len(request.generated) < 2
    with pytest.raises(ScheduleError):
        engine.cancel(request)
    assert engine.generate([[1, 2]], Settings(5)).tokens[0] == alone([1, 2], Settings(5)), "nobody is in flight"
    for end in (lambda: engine.add([3], Settings(4, temperature=0.5)), engine.close):
        request = engine.add([1, 2], Settings(3))
        engine.step()
        if end is not engine.close:
            engine.cancel(request)
        last = end()
        if last is not None:
            engine.cancel(last)
        assert request.done


def test_two_thousand_requests_leave_nothing_behind(decoder, alone):
    parts = replace(Recipe.parse(recipe("paged")).parts, kv_cache=PagedKV(page=16, num_pages=8))
    Engine(decoder, parts).generate([[1]], Settings(2))
    before, draw, engine = held(), random.Random(0), Engine(decoder, parts)
    engine.reserve(1, 30, Settings(2))
    running, held_bytes = set(), None
    for _ in range(2000):
        running.add(engine.add([draw.randrange(60)] * draw.randint(1, 12), Settings(draw.randint(1, 3))))
        for request in [*running]:
            if request.done:
                running.discard(request)
            elif draw.random() < 0.1:
                engine.cancel(request)
        engine.step()
        now = engine.kv_bytes, engine.memory.held_bytes
        assert held_bytes in (None, now)
        held_bytes = now
    while any(not request.done for request in running):
        engine.step()
    engine.step()
    assert engine.cache.ledger.free == 7 and engine._slots.idle and not engine._slots._unfinished
    engine.close()
    running.clear()
    del engine, request
    assert held() == before


def test_what_pages_held_before_is_never_read(decoder, alone):
    """The cache is full of NaN but for what requests wrote, as memory of others may be."""
    engine = engine_of(decoder, "static")
    request = engine.add([1, 2, 3], Settings(9))
    with torch.inference_mode():
        engine.cache.keys[:, 1:], engine.cache.values[:, 1:] = torch.nan, torch.nan
    while not request.done:
        engine.step()
    engine.step()
    assert tuple(request.generated) == alone([1, 2, 3], Settings(9))


def test_a_batch_of_more_prompts_than_slots_is_watched_stopped_and_forced(decoder):
    draw = random.Random(5)
    rows = [[draw.randrange(1, 60) for _ in range(draw.randint(1, 30))] for _ in range(7)]
    plain, engine, events = Engine(decoder), Engine(decoder, Recipe.parse(recipe("paged")).parts), []
    stop = plain.generate(rows, Settings(12)).tokens[2][4]
    for settings in (Settings(12), Settings(12, stop=(stop,)), Settings(1)):
        want, events = plain.generate(rows, settings), []
        got = engine.generate(rows, settings, on_step=events.append)
        assert (got.tokens, got.finish) == (want.tokens, want.finish)
        told = [[token for event in events for who, token in event.tokens if who == row] for row in range(7)]
        assert [tuple(row) for row in told] == [*want.tokens]
        assert [event.index for event in events] == list(range(len(got.step_ms)))
        assert events[-1].num_steps >= len(events) and got.ttft_ms <= got.total_ms
    forced = [[draw.randrange(60) for _ in range(4)] for _ in rows]
    assert engine.generate(rows, Settings(4), forced=forced).tokens == tuple(map(tuple, forced))

    enough = threading.Event()
    cut = engine.generate(rows, Settings(12), cancel=enough, on_step=lambda event: event.index == 8 and enough.set())
    whole = plain.generate(rows, Settings(12)).tokens
    assert cut.cancelled and all(a == b[: len(a)] for a, b in zip(cut.tokens, whole, strict=True))
    assert engine.generate(rows, Settings(12)).tokens == whole


def test_compare_ladder_and_perplexity_take_it():
    words = recipe("static", "rows=4:chunk=8:budget=8")
    model = ours("qwen3")
    result = compare(model, prompts(), words, repeats=2, max_new_tokens=9, watch=False)
    assert result.parity.verdict == "identical", result.parity
    assert len(prompts()) > 4, "some wait for a slot"
    steps = ladder(model, prompts(), words, repeats=2, max_new_tokens=4).rungs
    assert steps[-1].technique == "continuous_batching"
    assert {rung.parity.verdict for rung in steps} <= {"identical", "within rounding"}
    ids = [token for row in prompts() for token in row]
    assert perplexity(model, words, ids).value == pytest.approx(perplexity(model, "", ids).value, rel=1e-5)


def test_one_that_steps_in_another_thread_is_refused(decoder):
    engine = engine_of(decoder)
    request = engine.add([1, 2], Settings(4))
    refused = []

    def other(call):
        with pytest.raises(EngineBusy, match="belong to 'MainThread'"):
            call()
        refused.append(call)

    calls = (partial(engine.add, [3]), engine.step, partial(engine.cancel, request))
    for call in calls:
        thread = threading.Thread(target=other, args=(call,))
        thread.start()
        thread.join()
    assert len(refused) == len(calls)
    for call in (lambda: engine.generate([[1]]), lambda: engine.reserve(1, 1)):
        with pytest.raises(EngineBusy, match="in flight"):
            call()
    while engine.step() or not request.done:
        pass
    assert len(request.generated) == 4
    assert len(engine.add([3], Settings(4, temperature=0.5)).prompt) == 1, "nobody is in flight any more"


@pytest.mark.parametrize("store", STORES)
def test_bad_requests_are_told_and_nothing_is_lost(decoder, alone, store):
    engine = engine_of(decoder, store, columns=40)
    request = engine.add([1, 2], Settings(5))
    for prompt, settings, says in (
        ([1] * 300, Settings(5), "context of 256 tokens"),
        ([1] * 38, Settings(9), "room is 40 tokens. Ask for at most 2 new tokens, .* by Engine.reserve"),
        ([99], Settings(5), "the model's vocabulary ends at 60"),
        ("text", Settings(5), "is text"),
    ):
        with pytest.raises(PromptError, match=says):
            engine.add(prompt, settings)
    with pytest.raises(PromptError, match="number is -1"):
        engine.add([1], number=-1)
    gone = engine.add([5, 6], Settings(5))
    engine.cancel(gone)
    with pytest.raises(ScheduleError, match="cannot be cancelled"):
        engine.cancel(gone)
    with pytest.raises(ScheduleError, match="unknown .* Cancel it where it was added"):
        engine.cancel([gone])
    while not request.done:
        engine.step()
    engine.step()
    assert tuple(request.generated) == alone([1, 2], Settings(5)) and gone.generated == []


def test_without_the_technique_nobody_joins(decoder):
    engine = Engine(decoder, Recipe.parse(f"{BASE},memory_reuse").parts)
    with pytest.raises(RecipeError, match="continuous_batching: add it"):
        engine.add([1, 2])
    assert engine.step() == []
    with pytest.raises(ScheduleError, match="no request is in flight"):
        engine.cancel("that one")
    with pytest.raises(RecipeError, match="needs pre_padding and mask_removal and packed_prefill"):
        Recipe.parse("memory_reuse,continuous_batching")
    assert "continuous_batching" not in Recipe.parse("all").names


@pytest.mark.parametrize("words", ["chunk=0", "budget=-5", "budget=3:rows=4", "rows=600"])
def test_absurd_knobs_are_told(words):
    says = "chunk is 0, but|budget is -5, but|budget is 3, .* which is 4|Give budget=600 or more, or rows=512 or less"
    with pytest.raises(RecipeError, match=says):
        Recipe.parse(f"{BASE},memory_reuse,continuous_batching:{words}")
