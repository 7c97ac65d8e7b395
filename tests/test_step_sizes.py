"""Decode steps of the slots that are taken alone: captured in few sizes, as on a GPU; without one, by stand-ins."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import device_attention
import pytest
import torch
from test_captured_joins import Repeated, kernels, recorded, recorded_work  # noqa: F401  fixtures
from test_continuous import MIXED, Lagging, alone, decoder, random_life, recipe  # noqa: F401  fixtures

from eet_lab.engine import slots
from eet_lab.engine.engine import Engine
from eet_lab.engine.logprobs import LogprobLog
from eet_lab.engine.settings import Settings
from eet_lab.engine.slot_passes import FEW_SLOTS, SlotPasses
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.ops import reference
from eet_lab.parts import launch
from eet_lab.parts.launch import GraphLaunch
from eet_lab.serving.warm_up import warm_up_decoder
from eet_lab.technique import Recipe

pytestmark = pytest.mark.usefixtures("recorded", "kernels")
PACKED = "pre_padding,mask_removal,packed_prefill"


def asking_more_for_few(x, w, residual, *, empty, **options):
    """As on a GPU, where the kernels of few rows are others than those of many."""
    if len(x) <= FEW_SLOTS:
        empty("partial_sums", (16, *residual.shape), x)
    return reference.linear_residual(x, w, residual, empty=empty, **options)


class InPlace(Repeated):
    """All of the work once more in the places that it had when it was captured, which must still be held."""

    engine: Engine

    def __init__(self, work) -> None:
        work()
        super().__init__(work)
        self._places = self.engine.memory._current

    def replay(self) -> None:
        memory = self.engine.memory
        assert {place.chunk_id for place in self._places} <= {*memory._chunks}, "a chunk is gone"
        memory.enter = self._enter  # type: ignore[method-assign]
        try:
            super().replay()
        finally:
            del memory.enter

    def _enter(self, name: str) -> None:
        self.engine.memory._current, self.engine.memory._cursor = self._places, 0


@pytest.fixture
def in_place(monkeypatch):
    """How often something was captured, by the pool of its graph."""
    captures = Counter()
    monkeypatch.setattr(launch, "capture", lambda work, pool=None: (captures.update([pool]), InPlace(work))[1])
    return captures


def engine_of(decoder, store, policy, columns=96):  # noqa: F811
    """An engine that captures, in small buckets, with steps of few sizes."""
    parts = Recipe.parse(recipe(store, policy)).parts
    ops = replace(parts.ops, attention=device_attention.attention, linear_residual=asking_more_for_few)
    engine = Engine(decoder, replace(parts, ops=ops, launch=GraphLaunch(bucket=16)))
    InPlace.engine = engine
    engine.reserve(parts.schedule.max_rows, columns - 2, Settings(2))
    return engine


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    """Slots have the sizes that they have on a GPU; how often each was launched, of slots that requests join."""
    made, step_size, seen = SlotPasses.__init__, SlotPasses.step_size, Counter()

    def sized(self, *given):
        made(self, *given)
        self.has_sizes = True

    def noted(self, num_taken):
        size = step_size(self, num_taken)
        seen.update([] if self.is_batch else [size])
        return size

    monkeypatch.setattr(SlotPasses, "__init__", sized)
    monkeypatch.setattr(SlotPasses, "step_size", noted)
    return seen


def served(engine, requests):
    while not all(request.done for request in requests):
        engine.step()


@pytest.mark.parametrize("words", ["static", "paged:pages=24", "static:planner=chunked"])
def test_a_step_has_the_fewest_rows_that_are_captured(words, decoder, alone, sizes, in_place, monkeypatch):  # noqa: F811
    """Behind a host that is late, with batches between that have the same arena."""
    engine = engine_of(decoder, words, "rows=20:chunk=16:budget=32")
    monkeypatch.setattr(slots, "open_stream", Lagging)
    step_size = engine.slots.passes.step_size
    assert [*map(step_size, (1, 2, 8, 9, 16, 17, 20))] == [1, 8, 8, 16, 16, 20, 20]
    sizes.clear()
    draw, plain = random.Random(words), Engine(decoder)
    for count in (20, 3):
        rows = [[draw.randrange(1, 60) for _ in range(draw.randint(1, 12))] for _ in range(count)]
        each = [
            Settings(draw.randint(2, 20), **draw.choice(MIXED), seed=n, logprobs=n % 3 or None) for n in range(count)
        ]
        requests = [engine.add(*asked) for asked in zip(rows, each, strict=True)]
        served(engine, requests)
        engine.step()
        for row, asked, request in zip(rows, each, requests, strict=True):
            want = plain.generate([row], asked)
            assert tuple(request.generated) == want.tokens[0]
            if asked.logprobs is not None:
                got = [told.logprob for told in request.logprobs]
                assert got == pytest.approx([told.logprob for told in want.logprobs[0]], abs=1e-4)
        assert random_life(engine, alone, f"{words}{count}", 12, MIXED) > 5
        assert engine.generate(rows[:3], Settings(7)).tokens == plain.generate(rows[:3], Settings(7)).tokens
    served(engine, [engine.add([1], Settings(4))])
    assert {1, 8} < {*sizes} <= {1, 3, 8, 16, 20}, "with the batches' own"
    assert sizes.total() > in_place.total()


def test_a_step_after_a_batch_has_its_place(decoder):  # noqa: F811
    """A batch of the same slots is planned between, and the next step is of a bucket that was not captured."""
    engine, plain = engine_of(decoder, "static", "rows=20:chunk=16:budget=32"), Engine(decoder)
    for turn in range(3):
        settings = Settings(3 + 16 * turn)
        request = engine.add([5], settings)
        served(engine, [request])
        assert tuple(request.generated) == plain.generate([[5]], settings).tokens[0]
        rows = [[number + 1] * 5 for number in range(12)]
        assert engine.generate(rows, Settings(3)).tokens == plain.generate(rows, Settings(3)).tokens


@pytest.mark.parametrize("planner", ["greedy_by_size", "chunked"])
def test_no_plan_ends_the_graphs_of_another_for_good(planner, monkeypatch):
    """Prompts of few tokens, and steps of few rows, take turns: both have plans of their own."""
    captures = Counter()
    monkeypatch.setattr(launch, "capture", lambda *given: (captures.update("1"), recorded_work(*given))[1])
    wide = weights.random_decoder(Config(2, 512, 8, 1024, 61, 256), 0, torch.device("cpu"), torch.float32)
    engine, found = engine_of(wide, f"static:planner={planner}", "rows=16:chunk=128:budget=512", 130), []
    for number in range(5):
        before = engine.memory.generation, captures.total()
        served(engine, [engine.add([1 + number] * 3, Settings(4)) for _ in range(1 + number % 2)])
        found.append((engine.memory.generation - before[0], captures.total() - before[1]))
    assert found[-1] == (0, 0), found


def test_a_warm_up_captures_steps_of_all_sizes(decoder, in_place, monkeypatch):  # noqa: F811
    """For requests that ask for log-probabilities, too, whose memory is in no plan: all graphs share it."""
    told, write = set[int](), LogprobLog.write
    monkeypatch.setattr(LogprobLog, "write", lambda *given: (told.add(len(given[-1].ids)), write(*given))[1])
    engine = engine_of(decoder, "static", "rows=20:chunk=16:budget=32")
    warm_up_decoder(engine, None, (0.0, 1.0))
    assert told == {1, 8, 16, 20}
    captures = engine.captures
    for count in (1, 2, 9, 20):
        served(engine, [engine.add([1], Settings(4, temperature=row % 2)) for row in range(count)])
    assert engine.captures == captures >= 3 * 4 and len(in_place) == 1
