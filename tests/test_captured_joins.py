"""Captured passes that read prompts are those that are not; without a GPU, by recorded operations."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import device_attention
import pytest
import torch
from test_continuous import (  # noqa: F401  fixtures
    GREEDY,
    MIXED,
    POLICIES,
    STORES,
    alone,
    decoder,
    random_life,
    recipe,
)
from test_step_launch import Recorder

from eet_lab.bench.measure import Subject
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.engine.slot_passes import SlotPasses
from eet_lab.errors import RecipeError
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.monitor import open_source
from eet_lab.ops import native
from eet_lab.ops.fits import reads_rows_on_device
from eet_lab.parts import Ops, launch
from eet_lab.parts.batches import make_batch
from eet_lab.parts.buckets import QUERIES, mixed
from eet_lab.parts.launch import GraphLaunch
from eet_lab.serving.warm_up import warm_up_decoder
from eet_lab.technique import Recipe

SIZE = 8


class Captured(Recorder):
    """A recording, which runs what it records: the replay that follows a capture has been."""

    is_new = True

    def replay(self) -> None:
        if not self.is_new:
            super().replay()
        self.is_new = False


class Repeated:
    """The same for plain PyTorch's draws, whose operations depend on the values: all of the work once more."""

    def __init__(self, work) -> None:
        self._work, self._is_new = work, True

    def replay(self) -> None:
        if not self._is_new:
            self._work()
        self._is_new = False


def recorded_work(work, pool=None) -> Captured:
    recording = Captured()
    with recording:
        work()
    return recording


def repeated_work(work, pool=None) -> Repeated:
    work()
    return Repeated(work)


@pytest.fixture
def recorded(monkeypatch):
    """Captures are recordings, and passes have few sizes as on a GPU."""
    for name, value in (("capture", recorded_work), ("capturing", nullcontext)):
        monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(SlotPasses, "pass_size", lambda self, tokens: -(-tokens // SIZE) * SIZE)


@pytest.fixture
def repeated(recorded, monkeypatch):
    monkeypatch.setattr(launch, "capture", repeated_work)


@pytest.fixture
def kernels(monkeypatch):
    """Ops that are kernels to an engine: what they ask for may depend on how few rows there are. By name."""
    loaded = {"linear": SimpleNamespace(path="first")}
    monkeypatch.setattr(Ops, "kernels", property(lambda ops: (*loaded,)))
    monkeypatch.setattr(native, "prepare", lambda *args, **options: None)
    monkeypatch.setattr(native, "loaded", loaded.get)
    return loaded


def engine_of(decoder, store="static", columns=96, most=1024, graphs=256, policy=POLICIES[0]):  # noqa: F811
    parts = Recipe.parse(recipe(store, policy)).parts
    ops = replace(parts.ops, attention=device_attention.attention)
    engine = Engine(decoder, replace(parts, ops=ops, launch=GraphLaunch(tokens=most, graphs=graphs)))
    engine.reserve(parts.schedule.max_rows, columns - 2, Settings(2))
    return engine


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("how", "hows"), [("recorded", GREEDY), ("repeated", MIXED)])
def test_one_graph_serves_all_passes_of_its_size(how, hows, store, decoder, alone, request):  # noqa: F811
    """Whoever joins and leaves: each gets what it would get alone, from few graphs."""
    request.getfixturevalue(how)
    engine, replayed = engine_of(decoder, store), list[int]()
    replay = SlotPasses._replay

    def noted(self, batch):
        replayed.append(len(batch.rows))
        return replay(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotPasses, "_replay", noted)
        assert random_life(engine, alone, f"captured {store}", 25, hows) > 12
    replays = engine.slots.passes._replays
    assert len(replayed) > 3 * replays.captures > 0 and {*replayed} <= {SIZE, 2 * SIZE}
    assert len(replays._kept) <= 2 * (len({how.get("temperature", 0) > 0 for how in hows}) + 1)


def test_a_larger_pass_runs_as_it_is(recorded, decoder, alone):  # noqa: F811
    engine = engine_of(decoder, most=SIZE)
    assert engine.slots.passes.most_captured == SIZE
    assert random_life(engine, alone, "small ones are captured", 15) > 7
    assert len(engine.slots.passes._replays._kept) == 1


def test_no_more_graphs_are_kept_than_asked_for(repeated, decoder, alone):  # noqa: F811
    """Whatever chooses tokens: graphs of all choices are counted together."""
    engine = engine_of(decoder, graphs=1)
    assert random_life(engine, alone, "one graph", 10, MIXED) > 4
    assert len(engine.slots.passes._replays._kept) == 1


def test_what_was_captured_goes_with_its_memory(repeated, decoder, alone):  # noqa: F811
    """A request that draws needs more room, and a larger reservation another cache."""
    engine = engine_of(decoder, columns=40)
    for columns in (40, 96):
        for hows in (GREEDY, MIXED[2:3], MIXED):
            assert random_life(engine, alone, f"{columns} {hows}", 8, hows, columns // 4) > 3
        engine.reserve(3, 94, Settings(2))
    first = engine.slots
    engine.close()
    assert first.passes._replays is None and engine.slots is None


def test_graphs_go_with_a_chunk_that_no_decode_step_uses(recorded, monkeypatch):
    """A pass of few tokens has other kernels on a GPU, and so a plan of its own, which leaves a chunk unused."""
    wide = weights.random_decoder(Config(1, 1024, 16, 1024, 61, 256), 0, torch.device("cpu"), torch.float32)
    engine = engine_of(wide, "static:planner=chunked", 66, policy="rows=4:chunk=64:budget=256")
    held, memory, mixed_passes = engine.slots, engine.memory, engine.tracer.mixed
    for _ in range(2):
        for row in range(4):
            engine.add([1 + row] * 60, Settings(1))
        engine.step()
    assert engine.slots is held and held.passes._replays.captures == 1
    chunks, memory._largest = {*memory._chunks}, {}
    monkeypatch.setattr(engine.tracer, "mixed", lambda *sizes: mixed_passes(*sizes[:3], SIZE, *sizes[4:]))
    held.passes._plan(make_batch([1], num_rows=4, size=SIZE))
    assert chunks - {*memory._chunks} and held.passes._replays is None


def test_a_run_that_is_timed_captures_nothing(recorded, decoder):  # noqa: F811
    words, source = Recipe.parse(recipe("static")), open_source("cpu")
    subject = Subject(SimpleNamespace(decoder=decoder, device="cpu"), words, [[1] * 9, [2] * 5], Settings(4), source)
    subject.engine = engine_of(decoder)
    subject.prepare()
    before = subject.engine.slots.passes._replays.captures
    subject.run()
    assert subject.engine.slots.passes._replays.captures == before > 0


@pytest.mark.parametrize("temperatures", [(0.0,), (0.0, 1.0)])
def test_a_warm_up_captures_passes_of_all_sizes(repeated, decoder, temperatures):  # noqa: F811
    """Of those that draw first, which need more memory: what is captured stays."""
    engine = engine_of(decoder)
    engine.slots.passes.has_sizes = True
    warm_up_decoder(engine, None, temperatures)
    kept = engine.slots.passes._replays._kept.values()
    assert len(kept) == 2 * len(temperatures) and all(each.graph is not None for each in kept)
    captures = engine.slots.passes._replays.captures
    for temperature in temperatures:
        request = engine.add([1] * 9, Settings(3, temperature=temperature))
        while not request.done:
            engine.step()
    assert engine.slots.passes._replays.captures == captures


def batches(decoder, layout, attention=device_attention.attention, **limits):  # noqa: F811
    """An engine that captures, and a plain one."""
    parts = Recipe.parse(f"pre_padding,mask_removal,memory_reuse{layout}").parts
    ops = replace(parts.ops, attention=attention)
    return Engine(decoder, replace(parts, ops=ops, launch=GraphLaunch(**limits))), Engine(decoder, parts)


@pytest.mark.parametrize("layout", ["", ",packed_prefill"])
@pytest.mark.parametrize(("how", "hows"), [("recorded", {}), ("repeated", {"temperature": 0.9, "top_k": 9})])
def test_a_batch_of_the_same_lengths_is_replayed(how, hows, layout, decoder, request):  # noqa: F811
    """Its tokens are others each time, and batches of other lengths, longer ones among them, come between."""
    request.getfixturevalue(how)
    engine, plain = batches(decoder, layout)
    engine.reserve(3, 40, Settings(5, **hows))  # which reads three prompts of 40
    draw, captures = torch.Generator().manual_seed(0), []
    for lengths in ((9, 3, 17), (9, 3, 17), (9, 3, 17), (12, 2, 3), (40, 40, 40), (9, 3, 17), (12, 2, 3), (17, 3, 9)):
        rows = [torch.randint(61, (length,), generator=draw).tolist() for length in lengths]
        settings = Settings(5, **hows, seed=len(captures))
        assert engine.generate(rows, settings).tokens == plain.generate(rows, settings).tokens
        captures.append(engine.slots.passes._replays.captures)
    assert captures == [0, 1, 1, 1, 2, 2, 3, 3]


def test_graphs_that_read_where_nothing_is_any_more_are_captured_again(recorded, decoder):  # noqa: F811
    engine, plain = batches(decoder, ",packed_prefill")
    engine.reserve(1, 4, Settings(5))
    for expected in (0, 1, 2, 2):
        if expected == 2:
            engine.staging.hold(100_000)  # as a larger pass does
        assert engine.generate([[1, 2, 3, expected]]).tokens == plain.generate([[1, 2, 3, expected]]).tokens
        assert engine.slots.passes._replays.captures == expected


@pytest.mark.parametrize("before", [0, 1])
def test_a_pass_that_is_no_replay_is_stopped_between_two_ops(recorded, decoder, before):  # noqa: F811
    """The first one, which runs as it is, and the second one, in mid-capture."""
    cancel, rows, stops = Event(), [[1, 2, 3], [4, 5]], False

    @reads_rows_on_device
    def attention(*given, **how):
        if stops:
            cancel.set()
        return device_attention.attention(*given, **how)

    engine, plain = batches(decoder, ",packed_prefill", attention)
    for _ in range(before):
        engine.generate(rows, Settings(4))
    stops = True
    run = engine.generate(rows, Settings(4), cancel=cancel)
    assert run.cancelled and run.tokens == ((), ())
    stops = False
    for _ in range(3):
        assert engine.generate(rows, Settings(4)).tokens == plain.generate(rows, Settings(4)).tokens


def test_a_large_batch_runs_as_it_is(recorded, decoder):  # noqa: F811
    engine, plain = batches(decoder, "", tokens=8)
    for rows in ([[1] * 5, [2] * 4], [[1] * 4, [2] * 4]):
        for _ in range(2):
            assert engine.generate(rows, Settings(4)).tokens == plain.generate(rows, Settings(4)).tokens
        replays = engine.slots.passes._replays
        assert (replays is None) == (len(rows[0]) == 5)
    assert replays.captures == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_a_capture_is_refused(decoder):  # noqa: F811
    engine, plain = batches(decoder, "")
    for _ in range(2):
        with pytest.raises(RecipeError, match="CUDA graphs need an NVIDIA GPU. Leave them out"):
            engine.generate([[1, 2]], Settings(4))
    assert plain.generate([[1, 2]], Settings(4)).num_tokens == 4


def test_attention_that_asks_the_host_is_not_captured(decoder):  # noqa: F811
    parts = replace(Recipe.parse(recipe("static")).parts, launch=GraphLaunch())
    engine = Engine(decoder, parts)
    engine.reserve(3, 40, Settings(2))
    passes = engine.slots.passes
    passes.has_sizes = True
    assert passes.most_captured == 0 and engine.parts.captures_prompts is None
    assert passes.step_size(1) == 1, "its steps are"


def test_dummy_tokens_are_pads_where_nobody_looks():
    batch = make_batch([3, 1], rows=[1, 2], starts=[0, 9], num_rows=4, size=SIZE)
    found = mixed(batch, 40)
    assert found.columns.tolist() == [0, 1, 2, 9, *[39] * 4] and not found.rows[4:].any() and not found.num_dummy
    assert found.max_q == QUERIES and found.max_kv == 40 and found.spans is None and found.keys.spans is None
    assert mixed(make_batch([QUERIES + 1]), 999).max_q == 2 * QUERIES
    assert batch.columns.tolist() == [0, 1, 2, 9, *[0] * 4], "what it is made of stays"
    assert not torch.equal(found.first, found.count)


def test_steps_of_a_kernel_that_was_edited_go(recorded, decoder, kernels):  # noqa: F811
    engine, seen = engine_of(decoder), []
    for path in ("first", "first", "second", "second"):
        kernels["linear"] = SimpleNamespace(path=path)
        request = engine.add([1, 2, 3], Settings(4))
        while not request.done:
            engine.step()
        seen.append(engine.slots)
    assert seen[0] is seen[1] is not seen[2] is seen[3]
