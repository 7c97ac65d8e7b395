"""A model is warm before it is served: passes of each size that a GPU computes have been run, or captured."""

from __future__ import annotations

import itertools

import pytest
import torch
from cost_tables import encoder_cost
from encoders import CONTEXT, ours
from test_captured_encoders import PACKED, RECTANGLES, of_lengths, parts, recorded  # noqa: F401  a fixture
from test_continuous import batches_of, recipe

from eet_lab.engine import slot_passes, tasks
from eet_lab.engine.encode import EncoderEngine
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.engine.stream import AHEAD
from eet_lab.errors import Cancelled
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.ops.cuda import linear
from eet_lab.ops.fits import FEW
from eet_lab.parts.passes import Batching
from eet_lab.scheduling.policies import DynamicProgram, LengthBuckets, NaivePadding, TokenBudget
from eet_lab.scheduling.queued import Queue
from eet_lab.scheduling.traffic import Gamma, Uniform, make_traffic
from eet_lab.serving import reader, warm_up
from eet_lab.serving.generator import SERVED_TEMPERATURES
from eet_lab.serving.profile_passes import DECODE_STEPS
from eet_lab.serving.warm_up import warm_up_decoder
from eet_lab.technique import Recipe

CASES = [("static", "rows=64:budget=4096", 90), ("paged", "rows=4:budget=500:chunk=100", 100), ("paged", "rows=2", 40)]


@pytest.mark.parametrize(("store", "policy", "columns"), CASES)
@pytest.mark.parametrize("more", ["", ",prefix_caching"])
def test_a_pass_of_each_of_few_sizes_is_run_before_others_come(store, policy, columns, more, monkeypatch):
    if more and store == "static":
        pytest.skip("it shares pages")
    parts = Recipe.parse(recipe(store, policy) + more).parts
    decoder = weights.random_decoder(Config(1, 8, 1, 16, 61, 256), 0, torch.device("cpu"), torch.float32)
    engine = Engine(decoder, parts)
    engine.reserve(parts.schedule.max_rows, columns - 2, Settings(2))
    engine.add([1], Settings(1))
    tokens = range(1, min(parts.schedule.most_tokens(columns), parts.schedule.max_rows * (columns - 1)) + 1)
    assert [*map(engine.slots.passes.pass_size, tokens)] == [*tokens], "a CPU has no use for sizes"
    engine.slots.passes.has_sizes = True
    sizes = [*map(engine.slots.passes.pass_size, tokens)]
    assert all(0 <= size - few <= max(min(few, 63), 7, few / 16) for few, size in zip(tokens, sizes, strict=True))
    read = batches_of(monkeypatch)
    warm_up_decoder(engine)
    run = {len(batch.rows) for batch in read}
    assert run <= {*sizes} and len({*sizes}) < 60
    # Where pages are scarce, not all rows have room for prompts that fill their slots.
    assert {*sizes} - run <= ({max(sizes)} if store == "paged" else set())


@pytest.mark.parametrize(
    "asked", [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 2.0, "top_k": 3}, {"logprobs": 2}]
)
def test_a_served_request_needs_no_memory_of_its_own_whatever_it_asks_for(asked):
    parts = Recipe.parse(recipe("static", "rows=4")).parts
    decoder = weights.random_decoder(Config(1, 8, 1, 16, 5000, 256), 0, torch.device("cpu"), torch.float32)
    engine = Engine(decoder, parts)
    engine.reserve(4, 38, Settings(2))
    warm_up_decoder(engine, None, SERVED_TEMPERATURES)
    held, generation, log = engine.memory.num_bytes, engine.memory.generation, engine.slots.passes.logprobs
    request = engine.add([1, 2, 3], Settings(4, **asked))
    while not request.done:
        engine.step()
    assert (engine.memory.num_bytes, engine.memory.generation) == (held, generation)
    assert log is not None and engine.slots.passes.logprobs is log


def test_what_passes_are_told_apart_by():
    assert linear.MOST_TILE_TOKENS <= slot_passes.FEW_TOKENS and FEW <= slot_passes.FEW_TOKENS
    assert DECODE_STEPS <= AHEAD, "a host that waits would be told as one that works"


# --- encoders


@pytest.fixture
def served(recorded, monkeypatch):  # noqa: F811
    """`served(model, ...)` is a server's reader that captures, and is not started."""
    monkeypatch.setattr(reader, "EncoderEngine", lambda encoder, given: EncoderEngine(encoder, parts()))
    monkeypatch.setattr(reader, "BATCHING", Batching(200))  # the default takes a CPU half a minute
    monkeypatch.setattr(reader, "WARM_TEXTS", 40)
    return lambda model, *given: reader.Reader(model, Recipe.parse(PACKED), *given)


BUDGET = "token_budget:max_rows=8:budget=100"


@pytest.mark.parametrize(
    ("words", "asked"), [(None, (tasks.MEAN,)), (BUDGET, (tasks.MEAN, tasks.CLASSES)), (BUDGET, (tasks.CLS,))]
)
def test_a_server_captures_its_passes_before_it_answers(served, words, asked):
    """What comes then is a replay: texts that come alone, and for a policy's knobs whatever waits together."""
    served = served(ours("bert-classes"), words, asked)
    served._build()
    engine, policy = served.engine, served._policy
    captures = engine.captures
    assert captures > 1
    for length, task in itertools.product((3, 17, CONTEXT), asked):
        engine.read(of_lengths(length), task, served._batching(of_lengths(length)))
    if policy is not None:
        queue = Queue(make_traffic(60, Gamma(50.0), Uniform(2, CONTEXT), Uniform(1, 1), seed=5))
        queue.now_ms = 1e9
        for group in queue.groups(policy, None):
            rows = of_lengths(*[each.length for each in group])
            for task in asked:
                engine.read(rows, task, served._batching(rows))
    assert engine.captures == captures


def test_a_server_that_is_closed_ends_its_warm_up(served):
    served, told = served(ours("bert"), BUDGET), []

    def progress(done, total, words):
        told.append((done, total, words))
        if done == 2:
            served.close()

    served.progress = progress
    with pytest.raises(Cancelled):
        served._build()
    [total] = {total for _, total, _ in told}
    assert told == [(done, total, "warming up") for done in range(3)] and total > 3 and served.engine is None


def test_an_engine_that_is_built_anew_is_not_waited_for(served):
    """It captures as requests come. The memory of the one that failed is free before."""
    served = served(ours("bert"), BUDGET)
    served._build()
    served.ready.set_result(None)
    failed = served.engine
    assert failed.held_bytes > 0
    served._fail(RuntimeError("no device"))
    assert served.engine is not failed and served.engine.captures == failed.held_bytes == 0


@pytest.mark.parametrize(
    "policy",
    [
        NaivePadding(max_rows=8),
        TokenBudget(max_rows=8, budget=100),
        LengthBuckets(max_rows=8, width=8),
        DynamicProgram(max_rows=8, trigger="lazy"),
    ],
    ids=lambda policy: policy.name,
)
def test_what_a_policy_may_run_is_captured_before_it_is_served(recorded, policy, monkeypatch):  # noqa: F811
    """No graph loses its memory to another, and nothing runs that the policy would not: no pass beyond its budget."""
    costs = encoder_cost(lambda length, rows: 1.0 + 0.01 * length * rows, batches=(1, 64))
    traffic = make_traffic(40, Gamma(50.0), Uniform(2, 39), Uniform(1, 1), seed=1)
    engine = EncoderEngine(ours("bert").encoder, parts(PACKED if policy.is_packed else RECTANGLES))
    run_texts, read = [], engine.read
    with monkeypatch.context() as patch:
        patch.setattr(engine, "read", lambda given, *rest, **how: run_texts.append(given) or read(given, *rest, **how))
        warm_up.warm_up_encoder(ours("bert"), engine, traffic, policy, costs)
    lengths = [[text.length for text in each] for each in run_texts]
    if isinstance(policy, TokenBudget):
        assert 80 < max(map(sum, lengths)) <= policy.budget
    if isinstance(policy, LengthBuckets):
        assert all(-(-min(each) // policy.width) == -(-max(each) // policy.width) for each in lengths)
    captures, held = engine.captures, engine.activation_bytes
    buckets = {engine.bucket(each, tasks.MEAN) for each in run_texts}
    assert captures == len(engine._captured._replays._kept) == len(buckets)
    queue = Queue(traffic)
    queue.now_ms = 1e9  # all of them wait
    for group in queue.groups(policy, costs):
        engine.read(of_lengths(*[each.length for each in group]), tasks.MEAN, Batching(10_000))
    assert (engine.captures, engine.activation_bytes) == (captures, held)
    # Nothing is captured, or for texts of the very same lengths alone, which would not come again.
    for launched in (Recipe.parse(PACKED).parts, parts(on_device=False)):
        plain = EncoderEngine(ours("bert").encoder, launched)
        warm_up.warm_up_encoder(ours("bert"), plain, traffic, policy, costs)
        assert plain.captures == 0
