"""What a captured step holds on to stays where it is, and what it knows stays true; without a GPU, by an emulator."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.engine.slot_passes import SlotPasses
from eet_lab.memory import POOLS, RELEASES
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.ops import reference
from eet_lab.ops.types import Choice
from eet_lab.parts import Parts
from eet_lab.parts.kv_cache import StaticKV
from eet_lab.parts.launch import Decode, GraphPool
from eet_lab.technique import Recipe

BUCKET = 4
LAYOUTS = ("", "pre_padding", "pre_padding,mask_removal", "pre_padding,mask_removal,packed_prefill", "mask_removal")
QUICK = [name for name in POOLS if name != "optimal"]


class Captured(NamedTuple):
    """What a graph knows for good: which kernels choose, and addresses."""

    kind: tuple[Choice, bool]
    addresses: list
    kept: list[StorageWeakRef]
    activations: list[tuple[int, StorageWeakRef]]


class Emulated:
    """Captures as `GraphLaunch` does, on the CPU: a replay runs the step again as it was when it was captured."""

    def __init__(self, decode: Decode, longest: int, counts: Counter) -> None:
        self._decode, self._longest, self._counts = decode, longest, counts
        self._passes: SlotPasses = decode.func.__self__  # type: ignore[attr-defined]
        [self._num_decoded] = decode.args  # type: ignore[attr-defined]
        self._steps: dict[int, Captured] = {}
        self._warm = False
        counts["launches"] += 1

    def __call__(self, max_kv: int) -> None:
        max_kv = min(-(-max_kv // BUCKET) * BUCKET, self._longest)
        if max_kv in self._steps:
            self._replay(self._steps[max_kv], max_kv)
        elif self._warm:
            self._steps[max_kv] = self._capture(max_kv)
        else:
            self._decode(max_kv)
            self._warm = True

    def _capture(self, max_kv: int) -> Captured:
        memory, given = self._passes._engine.memory, []

        def empty(*args: Any, **keywords: Any) -> Tensor:
            out = type(memory).empty(memory, *args, **keywords)
            given.append((out.data_ptr(), StorageWeakRef(out.untyped_storage())))
            return out

        memory.empty = empty  # type: ignore[method-assign]
        try:
            self._decode(max_kv)
        finally:
            del memory.empty
        self._counts["captures"] += 1
        kept = [StorageWeakRef(tensor.untyped_storage()) for tensor in self._kept()]
        return Captured(self._kind, self._addresses(), kept, given)

    def _replay(self, step: Captured, max_kv: int) -> None:
        chunks = {chunk.data_ptr(): chunk.numel() for chunk in self._passes._engine.memory._chunks.values()}
        assert self._kind == step.kind, "it chooses in another way, or tells more"
        assert self._addresses() == step.addresses, "something moved"
        assert not any(storage.expired() for storage in step.kept), "what it read is gone"
        assert not any(storage.expired() for _, storage in step.activations), "a chunk is gone"
        assert all(any(at <= a < at + size for at, size in chunks.items()) for a, _ in step.activations)
        self._decode(max_kv)
        self._counts["replays"] += 1

    @property
    def _kind(self) -> tuple[Choice, bool]:
        return self._passes._choice, self._passes._tells_logprobs

    def _addresses(self) -> list:
        return [(tensor.data_ptr(), tensor.stride()) for tensor in self._kept()]

    def _kept(self) -> list[Tensor]:
        passes, cache = self._passes, self._passes._engine.cache
        step = passes._steps[self._num_decoded]
        batch = step.batch._replace(max_kv=4)
        kv = [part for number in range(cache.num_layers) for part in cache.layer(number, batch)]
        tables = [] if (table := cache.block_table) is None else [table]
        read = [part for part in batch if isinstance(part, Tensor)]
        return [*passes.table.buffer, *step.buffer, *step.sampling[1:], passes.table.begin, *read, *kv, *tables]


@dataclass(frozen=True)
class EmulatedLaunch:
    """The part."""

    counts: Counter = field(default_factory=Counter, hash=False)
    is_captured: ClassVar[bool] = True

    def __call__(self, decode: Decode, longest: int, pool: GraphPool) -> Emulated:
        return Emulated(decode, longest, self.counts)


def emulated(parts: Parts) -> tuple[Parts, Counter]:
    """The parts with emulated captures, and how many launches were made, steps captured and replayed."""
    launch = EmulatedLaunch()
    return replace(parts, launch=launch), launch.counts


@pytest.fixture(scope="module")
def decoder():
    return weights.random_decoder(Config(2, 16, 2, 32, 61, 256), 0, torch.device("cpu"), torch.float32)


def drawn(draw: random.Random) -> tuple[list[list[int]], Settings]:
    """A batch of one of few shapes, so that sessions meet again, with other pads."""
    longest = draw.choice((40, 40, 40, 9))
    lengths = [longest, *(draw.randint(1, longest) for _ in range(draw.choice((3, 3, 3, 1))))]
    prompts = [[draw.randrange(1, 60) for _ in range(length)] for length in lengths]
    return prompts, Settings(8, draw.choice((0, 0, 0, 0.9)), draw.choice((0, 0, 9)), seed=draw.randint(0, 9))


class Stopped(Exception):
    """A reader of tokens that has seen enough."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replays_are_sound_whatever_came_between(decoder, layout):
    draw, total = random.Random(LAYOUTS.index(layout)), Counter()
    plain = Engine(decoder, Recipe.parse(layout).parts)
    own = LAYOUTS.index(layout)
    for planner in (QUICK[(own * 3 + each) % len(QUICK)] for each in range(3)):  # each planner under two layouts
        kv = draw.choice(("static", "paged"))
        words = f"{layout},memory_reuse:planner={planner}:kv={kv}:release={draw.choice([*RELEASES])}"
        parts, counts = emulated(Recipe.parse(words.strip(",")).parts)
        engine = Engine(decoder, parts)
        for _ in range(8):
            prompts, settings = drawn(draw)
            fate = draw.random()
            if fate < 0.15:
                engine.reserve(draw.randint(1, 4), draw.randint(1, 24), Settings(draw.randint(1, 15)))
            elif fate < 0.2:
                engine.close()
            elif fate < 0.3:
                with pytest.raises(Stopped):
                    engine.generate(prompts, settings, on_step=_stop)
            assert engine.generate(prompts, settings).tokens == plain.generate(prompts, settings).tokens, words
        total += counts
    assert total["replays"] > total["captures"] > 20


def _stop(event: Any) -> None:
    if event.index >= event.num_steps // 2:
        raise Stopped


def wrapped(qkv: Tensor, *others: Any, empty: Any) -> Tensor:
    return reference.attention(qkv, *others, empty=empty)


@pytest.mark.parametrize("attention", [reference.attention, wrapped], ids=["reference", "a learner's"])
@pytest.mark.parametrize("layout", ["pre_padding", "pre_padding,mask_removal", "mask_removal"])
def test_one_capture_serves_every_batch_of_its_shape(decoder, layout, attention):
    """Other pads, and rows that end elsewhere: what a step knows of them stands on the device."""
    parts = Recipe.parse(f"{layout},memory_reuse").parts
    plain = Engine(decoder, parts)
    parts, counts = emulated(replace(parts, ops=replace(parts.ops, attention=attention)))
    engine = Engine(decoder, parts)
    for short in ([4], [4, 5], [4, 5, 6, 7], [4]):
        prompts = [[1, 2, 3, 9, 8], short]
        assert engine.generate(prompts, Settings(8)).tokens == plain.generate(prompts, Settings(8)).tokens
    assert counts["launches"] == 1 and counts["replays"] > counts["captures"]


def test_no_host_number_of_a_row_reaches_a_captured_step(decoder):
    """So nothing can be baked in, whatever an op is wrapped in; a pass that is sent has them."""
    seen = []

    def nosy(qkv: Tensor, kv: Any, batch: Any, *others: Any, empty: Any) -> Tensor:
        if not qkv.is_meta:
            seen.append((batch.spans is None, batch.keys.spans is None, batch.one_each))
        return reference.attention(qkv, kv, batch, *others, empty=empty)

    parts = Recipe.parse("pre_padding,mask_removal,memory_reuse").parts
    parts, _ = emulated(replace(parts, ops=replace(parts.ops, attention=nosy)))
    Engine(decoder, parts).generate([[1, 2, 3], [4]], Settings(4))
    assert set(seen) == {(False, False, False), (True, True, True)}


def test_nan_in_the_pads_changes_nothing_in_a_captured_step(decoder):
    class Poisoned(StaticKV):
        def layer(self, number: int, batch: Any) -> Any:
            keys, values = super().layer(number, batch)
            for row, begin in enumerate(batch.keys.begin.tolist() if batch.one_each and not keys.is_meta else []):
                keys[row, :, :begin] = values[row, :, :begin] = torch.nan
            return keys, values

    parts, prompts = Recipe.parse("pre_padding,mask_removal,memory_reuse").parts, [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
    want = Engine(decoder, parts).generate(prompts, Settings(9)).tokens
    poisoned, counts = emulated(replace(parts, kv_cache=Poisoned))
    assert Engine(decoder, poisoned).generate(prompts, Settings(9)).tokens == want
    assert counts["replays"] > 0


STORES = ("", "memory_reuse", "memory_reuse:kv=paged")


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_goes_on_where_its_longest_row_stops_first(decoder, layout, store, is_captured):
    """Its slot is idle from then on: nothing is read or written beyond the columns of those that remain."""
    if is_captured and not store:
        pytest.skip("a captured step needs memory that stays")
    prompts = [[1 + place % 50 for place in range(30)], [4, 5, 6], [7] * 9]
    whole = Engine(decoder).generate(prompts, Settings(12)).tokens
    stop = (whole[0][1],)
    want = Engine(decoder).generate(prompts, Settings(12, stop=stop))
    assert len(want.tokens[0]) == 2 < max(map(len, want.tokens))
    parts = Recipe.parse(f"{layout},{store}".strip(",")).parts
    parts = emulated(parts)[0] if is_captured else parts
    engine = Engine(decoder, parts)
    for _ in range(2):
        run = engine.generate(prompts, Settings(12, stop=stop))
        assert (run.tokens, run.finish) == (want.tokens, want.finish)
