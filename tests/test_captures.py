"""What a captured step holds on to stays where it is, and what it knows stays true; without a GPU, by an emulator."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from eet_lab.engine.engine import Engine
from eet_lab.engine.session import Session
from eet_lab.engine.settings import Settings
from eet_lab.memory import POOLS, RELEASES
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.ops import reference
from eet_lab.ops.cuda.launching import with_options
from eet_lab.ops.pads import declared, serves_any_pads
from eet_lab.parts import Parts
from eet_lab.parts.launch import Decode
from eet_lab.parts.mask import dense_mask
from eet_lab.technique import Recipe

BUCKET = 4
LAYOUTS = ("", "pre_padding", "pre_padding,mask_removal", "pre_padding,mask_removal,packed_prefill", "mask_removal")
QUICK = [name for name in POOLS if name != "optimal"]


class Captured(NamedTuple):
    """What a graph knows for good: the host's numbers, and addresses."""

    spans: tuple
    addresses: list
    kept: list[StorageWeakRef]
    activations: list[tuple[int, StorageWeakRef]]


class Emulated:
    """Captures as `GraphLaunch` does, on the CPU: a replay runs the step again as it was when it was captured."""

    def __init__(self, decode: Decode, longest: int, counts: Counter) -> None:
        self._decode, self._longest, self._counts = decode, longest, counts
        self._session: Session = decode.__self__  # type: ignore[attr-defined]
        self._steps: dict[int, Captured] = {}
        self._warm = False
        counts["launches"] += 1

    def __call__(self, extent: int) -> None:
        extent = min(-(-extent // BUCKET) * BUCKET, self._longest)
        if extent in self._steps:
            self._replay(self._steps[extent], extent)
        elif self._warm:
            self._steps[extent] = self._capture(extent)
        else:
            self._decode(extent, exact=False)
            self._warm = True

    def _capture(self, extent: int) -> Captured:
        memory, given = self._session._engine.memory, []

        def empty(*args: Any, **keywords: Any) -> Tensor:
            out = type(memory).empty(memory, *args, **keywords)
            given.append((out.data_ptr(), StorageWeakRef(out.untyped_storage())))
            return out

        memory.empty = empty  # type: ignore[method-assign]
        try:
            self._decode(extent, exact=False)
        finally:
            del memory.empty
        self._counts["captures"] += 1
        kept = [StorageWeakRef(tensor.untyped_storage()) for tensor in self._kept()]
        return Captured(self._session._next.spans, self._addresses(), kept, given)

    def _replay(self, step: Captured, extent: int) -> None:
        session, now = self._session, self._session._next
        chunks = {chunk.data_ptr(): chunk.numel() for chunk in session._engine.memory._chunks.values()}
        assert self._addresses() == step.addresses, "something moved"
        assert not any(storage.expired() for storage in step.kept), "what it read is gone"
        assert not any(storage.expired() for _, storage in step.activations), "a chunk is gone"
        assert all(any(at <= a < at + size for at, size in chunks.items()) for a, _ in step.activations)
        session._next = now._replace(spans=step.spans)
        self._decode(extent, exact=False)
        session._next = now
        self._counts["replays"] += 1

    def _addresses(self) -> list:
        return [(tensor.data_ptr(), tensor.stride()) for tensor in self._kept()]

    def _kept(self) -> list[Tensor]:
        session, engine = self._session, self._session._engine
        rooms = [room for layer in session.layers for room in layer.room(session._next._replace(extent=4))]
        tables = [] if (table := engine.cache.block_table) is None else [table]
        return [*session.state, session._sampling.noise, session._next.num_pad, *rooms, *tables]


def emulated(parts: Parts) -> tuple[Parts, Counter]:
    """The parts with emulated captures, and how many launches were made, steps captured and replayed."""
    counts: Counter = Counter()
    return replace(parts, launch=functools.partial(Emulated, counts=counts)), counts


@pytest.fixture(scope="module")
def decoder():
    return weights.random_decoder(Config(2, 16, 2, 32, 61, 256), 0, torch.device("cpu"), torch.float32)


def drawn(draw: random.Random) -> tuple[list[list[int]], Settings]:
    """A batch of one of few shapes, so that sessions meet again, with other pads."""
    longest = draw.choice((40, 40, 40, 9))
    lengths = [longest, *(draw.randint(1, longest) for _ in range(draw.choice((3, 3, 3, 1))))]
    prompts = [[draw.randrange(1, 60) for _ in range(length)] for length in lengths]
    return prompts, Settings(8, draw.choice((0, 0, 0, 0.9)), seed=draw.randint(0, 9))


class Stopped(Exception):
    """A reader of tokens that has seen enough."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replays_are_sound_whatever_came_between(decoder, layout):
    draw, total = random.Random(LAYOUTS.index(layout)), Counter()
    plain = Engine(decoder, Recipe.parse(layout).parts)
    for planner in draw.sample(QUICK, 5):
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


ATTENTIONS = {
    "reference": reference.attention,
    "a learner's": wrapped,
    "partial": functools.partial(reference.attention),
    "dressed up": functools.wraps(reference.masked_attention)(functools.partial(wrapped)),
}


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_other_pads_void_what_read_them_on_the_host(decoder, attention):
    """Twice the same shape and other pads: a replay would leave out what the first batch had as pads."""
    parts = Recipe.parse("pre_padding,mask_removal,memory_reuse").parts
    plain = Engine(decoder, parts)
    parts, counts = emulated(replace(parts, ops=replace(parts.ops, attention=attention)))
    assert not parts.serve_any_pads
    engine = Engine(decoder, parts)
    for short in ([4], [4, 5], [4, 5, 6, 7], [4]):
        prompts = [[1, 2, 3, 9, 8], short]
        assert engine.generate(prompts, Settings(8)).tokens == plain.generate(prompts, Settings(8)).tokens
    assert counts["launches"] == 4 and counts["replays"] > 0


def test_what_is_declared_to_serve_any_pads_is_captured_once(decoder):
    parts = Recipe.parse("pre_padding,memory_reuse").parts
    parts, counts = emulated(replace(parts, ops=replace(parts.ops, attention=reference.masked_attention)))
    assert parts.serve_any_pads
    engine, plain = Engine(decoder, parts), Engine(decoder)
    for short in ([4], [4, 5], [4, 5, 6, 7]):
        prompts = [[1, 2, 3, 9, 8], short]
        assert engine.generate(prompts, Settings(8)).tokens == plain.generate(prompts, Settings(8)).tokens
    assert counts["launches"] == 1 and counts["replays"] > counts["captures"]


def test_the_kernels_serve_any_pads_and_what_wraps_anything_does_not():
    words = "pre_padding,mask_removal,memory_reuse,fused_kernels,fused_sampling,dependent_launch"
    for recipe in (words, words.replace(",fused_sampling,dependent_launch", ""), words.replace("mask_removal,", "")):
        assert Recipe.parse(recipe).parts.serve_any_pads

    def mask(*args: Any, **keywords: Any) -> Any:
        return dense_mask(*args, **keywords)

    parts = Recipe.parse("pre_padding,memory_reuse,fused_kernels").parts
    assert not replace(parts, mask=mask).serve_any_pads and not replace(parts, forward=mask).serve_any_pads
    assert serves_any_pads(mask) is mask and replace(parts, mask=mask).serve_any_pads
    for copy in (functools.wraps(mask)(lambda *args: None), functools.partial(mask)):
        assert not declared(copy)
    assert declared(with_options(mask, like=1)) and not declared(with_options(wrapped, empty=1))
