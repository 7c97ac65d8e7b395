"""What a request's times contain: all that recurs with every request, and nothing that is done once for a shape."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from math import inf

import pytest
import torch

from eet_lab.engine import slot_passes, stream
from eet_lab.engine.clock import RequestClock
from eet_lab.engine.engine import Engine
from eet_lab.engine.meta_trace import MetaTracer
from eet_lab.engine.settings import Settings
from eet_lab.engine.token_buffer import SlotTable
from eet_lab.ops import native
from eet_lab.ops.types import TokenBuffer
from eet_lab.parts import Parts
from eet_lab.parts.arena import Arena
from eet_lab.parts.memory import FreshMemory
from eet_lab.technique import Recipe

LONG_S = 1e4  # longer than anything here can really take, however busy the machine
LONG_MS = LONG_S * 1e3
PROMPTS = [[1, 2, 3], [4]]
RECIPES = ["", "pre_padding,mask_removal,memory_reuse"]


@pytest.fixture
def slow(pass_time):
    """Makes a function of a function: the same, after a long wait."""

    def made(function):
        def waits(*args, **kwargs):
            pass_time(LONG_S)
            return function(*args, **kwargs)

        return waits

    return made


def test_laying_out_the_prompts_counts(tiny, monkeypatch, slow):
    monkeypatch.setattr(slot_passes, "batch_of", slow(slot_passes.batch_of))
    engine = Engine(tiny.decoder)
    for _ in range(2):
        events = []
        run = engine.generate(PROMPTS, Settings(3), on_step=events.append)
        assert min(run.ttft_ms, run.total_ms, run.step_ms[0], events[0].t_ms) > LONG_MS
        assert run.setup_ms < LONG_MS


def test_checking_the_prompts_counts(tiny, monkeypatch, slow):
    monkeypatch.setattr("eet_lab.engine.engine.checked_prompts", slow(lambda prompts, *others: prompts))
    assert Engine(tiny.decoder).generate(PROMPTS, Settings(3)).ttft_ms > LONG_MS


def test_uploading_and_emptying_the_cache_counts(tiny, monkeypatch, slow):
    monkeypatch.setattr(SlotTable, "fill", slow(SlotTable.fill))
    engine = Engine(tiny.decoder)
    runs = [engine.generate(PROMPTS, Settings(3)) for _ in range(2)]
    assert all(run.ttft_ms > LONG_MS and run.setup_ms < LONG_MS for run in runs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_planning_is_setup(tiny, monkeypatch, recipe, slow):
    monkeypatch.setattr(MetaTracer, "_trace", slow(MetaTracer._trace))
    engine = Engine(tiny.decoder, Recipe.parse(recipe).parts)
    first, again = (engine.generate(PROMPTS, Settings(3)) for _ in range(2))
    assert first.setup_ms > LONG_MS > first.total_ms >= first.ttft_ms
    assert again.setup_ms == 0
    assert engine.generate([[1] * 9], Settings(3)).setup_ms > LONG_MS, "another shape is planned anew"


def test_placing_a_known_shape_again_counts(tiny, monkeypatch, slow):
    """It recurs wherever shapes take turns."""
    engine, others = Engine(tiny.decoder, Recipe.parse(RECIPES[1]).parts), [[1] * 9]
    for prompts in (PROMPTS, others):
        assert engine.generate(prompts, Settings(3)).setup_ms > 0
    monkeypatch.setattr(Arena, "_place", slow(Arena._place))
    for prompts in (PROMPTS, others):
        run = engine.generate(prompts, Settings(3))
        assert run.setup_ms == 0
        assert run.ttft_ms > LONG_MS
    assert engine.generate(others, Settings(3)).ttft_ms < LONG_MS, "the same shape again lies where it lay"


def test_looking_a_plan_up_counts(tiny, slow):
    class SlowMemory(FreshMemory):
        plan = slow(FreshMemory.plan)

    engine = Engine(tiny.decoder, replace(Parts(), memory=SlowMemory))
    first, again = (engine.generate(PROMPTS, Settings(3)) for _ in range(2))
    assert first.setup_ms > LONG_MS > first.ttft_ms
    assert again.setup_ms == 0
    assert again.ttft_ms > LONG_MS


def test_building_kernels_is_setup_and_asking_for_them_counts(tiny, monkeypatch, pass_time):
    built = {}

    class Library:
        path = "/built.so"

    def prepare(names, progress=None, cancel=None):
        pass_time(LONG_S)
        built.update(dict.fromkeys(names, Library()))

    monkeypatch.setattr(native, "prepare", prepare)
    monkeypatch.setattr(native, "loaded", built.__getitem__)
    parts = Parts()
    embed = parts.ops.embed

    def kernel(*args, **kwargs):
        return embed(*args, **kwargs)

    kernel.kernels = ("embed",)
    engine = Engine(tiny.decoder, replace(parts, ops=replace(parts.ops, embed=kernel)))
    first, again = (engine.generate(PROMPTS, Settings(3)) for _ in range(2))
    assert first.setup_ms > LONG_MS > first.ttft_ms
    assert again.ttft_ms > LONG_MS > again.setup_ms


def test_a_reservation_leaves_nothing_to_set_up(tiny):
    engine = Engine(tiny.decoder, Recipe.parse(RECIPES[1]).parts)
    engine.reserve(2, 20, Settings(3))
    engine.generate(PROMPTS, Settings(3))
    assert engine.generate(PROMPTS, Settings(3)).setup_ms == 0


@pytest.fixture
def gpu_calls(monkeypatch) -> Counter[str]:
    """A GPU that is done at once, on the host's clock; how often it was asked for what."""
    calls = Counter[str]()

    class Event:
        def __init__(self, enable_timing=False):
            self.at = None
            calls["event"] += 1

        def record(self, stream=None):
            self.at = time.perf_counter()
            calls["record"] += 1

        def elapsed_time(self, other):
            calls["elapsed_time"] += 1
            return (other.at - self.at) * 1e3

        def query(self):
            calls["query"] += 1
            return True

    class Stream:
        def __init__(self, device=None):
            self.cuda_stream = 7
            calls["stream"] += 1

        def wait_event(self, event):
            assert event.at is not None
            calls["wait_event"] += 1

    zeros = torch.zeros(8, 2, dtype=torch.long)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(stream, "_copy_stream", lambda index: Stream())
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: zeros)
    return calls


def logged(*ids: int) -> TokenBuffer:
    """A token buffer of two slots, whose log has these ids for each."""
    log = torch.tensor([[each, each] for each in ids])
    return TokenBuffer(*[torch.zeros(0)] * 8)._replace(log=log)


def test_times_of_a_gpu_are_those_of_the_request(gpu_calls, slow, pass_time):
    """The ring's events, on the host's clock: what came before the ring counts, and setup does not, wherever it was."""
    clock = RequestClock()
    pass_time(LONG_S / 4)
    clock.once(slow(lambda: True))
    ring = stream.open_stream(clock, torch.device("cuda", 0), num_rows=2, lead_ms=inf)
    clock.once(slow(lambda: True))
    pass_time(LONG_S / 4)
    [step] = [*ring.push(logged(*[1] * 16), None, False), *ring.drain()]
    assert LONG_MS / 2 < step.t_ms < LONG_MS < 2 * LONG_MS < clock.setup_ms
    assert step.ids == [1, 1]


def test_the_host_asks_a_gpu_little_for_each_step(gpu_calls):
    """A small model's step is over before the host has made a dozen calls; and all that is told comes in its order."""
    ring, told = stream.open_stream(RequestClock(), torch.device("cuda", 0), num_rows=2, lead_ms=inf), []
    gpu_calls.clear()
    for number in range(40):
        told += ring.push(logged(*range(number - number % 16, number - number % 16 + 16)), None, False)
    told += ring.drain()
    assert [step.ids for step in told] == [[number, number] for number in range(40)]
    assert gpu_calls == dict.fromkeys(("query", "elapsed_time", "wait_event"), 40) | {"record": 80}
