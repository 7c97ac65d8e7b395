"""An encoder's captured passes are those that are not; without a GPU, by a recorder of PyTorch's operations."""

from __future__ import annotations

import itertools
import threading
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import test_vision
import torch
from device_attention import attention
from encoders import BODIES, CONFIGS, CONTEXT, V, close, ours, texts
from test_step_launch import Recorder

from eet_lab.bench import encoding
from eet_lab.engine import captured_passes, tasks
from eet_lab.engine.encode import EncoderEngine
from eet_lab.errors import Cancelled, RecipeError
from eet_lab.ops import cuda, native, reference
from eet_lab.ops.fits import has_rows_on_device
from eet_lab.parts import Parts, buckets, launch
from eet_lab.parts.buckets import PADDING_ROW, Size, by_device, filled
from eet_lab.parts.launch import GraphLaunch
from eet_lab.parts.passes import Batching, Group, Text
from eet_lab.parts.staging import Staging, sent
from eet_lab.technique import Recipe

RECTANGLES = "pre_padding,mask_removal,memory_reuse"
PACKED = f"{RECTANGLES},packed_prefill"
TASKS = {
    None: tasks.HIDDEN,
    "pooler": tasks.CLS,
    "mlm": tasks.MLM,
    "classes": tasks.CLASSES,
    "token_classes": tasks.TOKEN_CLASSES,
}
"""What is read of a model that has such a head."""


def parts(recipe: str = PACKED, on_device: bool = True, **limits) -> Parts:
    found = replace(Recipe.parse(recipe).parts, launch=GraphLaunch(**limits))
    return replace(found, ops=replace(found.ops, attention=attention)) if on_device else found


def of_lengths(*lengths: int, seed: int = 0) -> list[Text]:
    """Texts that ask for their first and their last token."""
    draw = np.random.default_rng(seed)
    return [Text(draw.integers(5, V, length).tolist(), None, sorted({0, length - 1})) for length in lengths]


FULL = (CONTEXT,) * 3 + (PADDING_ROW - 3 * CONTEXT,)
LISTS = {
    "ragged": texts(),
    "one": of_lengths(7),
    "full": of_lengths(*FULL),
    "one over": of_lengths(*FULL, 1),
    "many": of_lengths(*[1 + number % 5 for number in range(70)]),
}


@pytest.fixture
def recorded(monkeypatch):
    """Captures are recordings."""

    def capture(work, pool):
        recorder = Recorder()
        with recorder:
            work()
        return recorder

    monkeypatch.setattr(launch, "capture", capture)
    monkeypatch.setattr(launch, "capturing", nullcontext)


# --- buckets


def test_a_bucket_has_room_and_little_more():
    before = 0
    for tokens in range(1, 40_000, 7):
        size = Size(tokens, 3, 2, 3).bucket("first")
        assert before <= size.tokens < tokens + max(PADDING_ROW, tokens / 8) and size.tokens >= tokens
        assert size.rows >= 3 + -(-(size.tokens - tokens) // PADDING_ROW) and size.tokens % PADDING_ROW == 0
        assert size.tokens == Size(size.tokens, 1, 1, 1).bucket("all").tokens, "full ones stay"
        before = size.tokens
    assert len({Size(tokens, 1, 1, 1).bucket("all").tokens for tokens in range(1, 16_385)}) == 40
    assert Size(300, 9, 200, 300).bucket("all") == Size(384, 16, 256, 384)
    assert Size(300, 40, 20, 40).bucket("first") == Size(384, 64, 128, 64)
    assert Size(300, 40, 20, 3).bucket("asked").asked == 32 and Size(300, 40, 20, 70).bucket("asked").asked == 128


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", LISTS)
def test_padding_rows_are_behind_a_pass_and_hold_each_token_once(name, packed):
    given = LISTS[name]
    group = Group(tuple(range(len(given))), tuple(given), packed)
    read, size = group.laid_out(), Size.of(group).bucket("asked")
    found = filled(read, size)
    batch, T, B = found.batch, len(read.batch.ids), len(given)
    assert (len(batch.ids), batch.num_rows, batch.max_q, len(found.asked)) == size
    assert batch.ids[:T].equal(read.batch.ids) and not batch.ids[T:].any() and not batch.positions[T:].any()
    assert batch.first[:B].equal(read.batch.first) and found.asked[: len(read.asked)].equal(read.asked)
    owner = torch.full((size.tokens,), -1)
    for row, (first, count) in enumerate(zip(batch.first.tolist(), batch.count.tolist(), strict=True)):
        assert (
            (owner[first : first + count] == -1).all() and count <= size.longest and (first, count) == batch.spans[row]
        )
        owner[first : first + count] = row
    real = batch.columns >= batch.keys.begin[batch.rows]
    assert owner[real].equal(batch.rows[real]) and (owner[~real] == -1).all() and real[T:].all()
    hidden = by_device(found, packed).batch
    assert hidden.spans is None and hidden.keys.spans is None and hidden.keys.padded == (not packed)


def test_a_fused_attention_declares_that_it_reads_rows_on_the_device():
    assert has_rows_on_device(cuda.attention) and not has_rows_on_device(cuda.masked_attention)
    assert not has_rows_on_device(reference.attention)


# --- passes


class Filled:
    """In place of graphs: a pass that is filled up is run as it is."""

    captures = 0

    def __init__(self, work, device, most, *, shown, frees_first):
        self._work, self._staging = work, Staging(device)

    def __call__(self, given):
        return self._work(sent(given, self._staging))

    def void(self):
        pass

    close = void


@pytest.mark.parametrize(
    ("name", "recipe"), [*((name, PACKED) for name in CONFIGS), *((name, RECTANGLES) for name in BODIES)]
)
def test_passes_of_a_bucket_are_those_of_the_texts(name, recipe, monkeypatch):
    """Of every family, with each head: ragged, one text, a bucket that is full, and one token more."""
    monkeypatch.setattr(captured_passes, "Replays", Filled)
    encoder = ours(name).encoder
    engine, plain = (EncoderEngine(encoder, p) for p in (parts(recipe), Recipe.parse(recipe).parts))
    wanted = [TASKS[head] for head in (None, *encoder.config.heads) if head in TASKS]
    for task in (*wanted, tasks.MEAN, tasks.CLS) if name in BODIES else wanted[1:]:
        for given in map(LISTS.__getitem__, ("ragged", "one", "full", "one over")):
            assert_same(engine, plain, given, task)


def assert_same(engine: EncoderEngine, plain: EncoderEngine, given: list, task: tasks.TextTask) -> None:
    """Both read the same."""
    got, exact = (each.read(given, task).values for each in (engine, plain))
    assert len(got) == len(exact)
    for mine, theirs in zip(got, exact, strict=True):
        close(mine, theirs)


def test_token_types_stay_with_their_tokens(monkeypatch):
    monkeypatch.setattr(captured_passes, "Replays", Filled)
    given = [text._replace(types=[number % 2 for number in range(len(text.ids))]) for text in texts()]
    engine, plain = (EncoderEngine(ours("bert").encoder, p) for p in (parts(), Recipe.parse(PACKED).parts))
    for _ in range(2):
        for each in (given, texts()):  # the bucket of those without types is another
            assert_same(engine, plain, each, tasks.HIDDEN)


@pytest.mark.parametrize("recipe", [PACKED, RECTANGLES])
def test_a_graph_serves_all_texts_of_its_bucket(recorded, recipe):
    """One after the other, of other lengths; what a caller has got stays."""
    lists = [of_lengths(9, 3, 20, 5, seed=1), of_lengths(30, 2, seed=2), of_lengths(1, 1, 2, 8, 9, seed=3)]
    for task in (tasks.MEAN, tasks.HIDDEN, tasks.CLS):
        engine, plain = (EncoderEngine(ours("bert").encoder, p) for p in (parts(recipe), Recipe.parse(recipe).parts))
        found = [(engine.read(given, task).values, plain.read(given, task).values) for given in lists * 3]
        assert engine.captures == 1 and len({engine.bucket(given, task) for given in lists}) == 1
        for got, exact in found:
            for mine, theirs in zip(got, exact, strict=True):
                close(mine, theirs)


def test_buckets_join_in_one_run_and_graphs_go_with_their_memory(recorded):
    """A larger pass moves the arena: graphs are captured again, in its place; of too many the oldest go."""
    engine = EncoderEngine(ours("bert").encoder, parts(tokens=300, graphs=2))
    plain = EncoderEngine(ours("bert").encoder, Recipe.parse(PACKED).parts)

    def check(lengths, batching, task=tasks.MEAN):
        given = of_lengths(*lengths, seed=len(lengths))
        close(engine.read(given, task, batching).values, plain.read(given, task, batching).values)

    small, large = Batching(100), Batching(1000)
    for _ in range(3):
        check([7, 40, 9], small)
    assert engine.captures == 1
    held = engine.activation_bytes
    check([20, 9, 8], small)
    assert engine.captures == 1 and engine.activation_bytes == held
    check([40] * 5 + [3] * 9, large)  # 227 tokens: another bucket, and more room
    assert engine.activation_bytes > held and engine.captures == 1
    for _ in range(2):
        check([40] * 5 + [3] * 9, large)
        check([7, 40, 9], small)
    assert engine.captures == 3, "one of the larger bucket, and one again"
    check([40] * 8 + [3] * 9, large)  # 347 tokens are more than are captured
    check([40] * 8 + [3] * 9, Batching(200))  # several passes, some of which are
    for number in range(1, 4):
        for _ in range(3):
            check([3] * 40 * number, large)
    for task in (tasks.MEAN, tasks.CLS, tasks.HIDDEN):
        for _ in range(2):
            engine.read(of_lengths(3, 4), task)
    assert len(engine._captured._replays._kept) == 2, "of all tasks"
    captures = engine.captures
    engine.close()
    assert engine.activation_bytes == engine.held_bytes == 0 and engine.captures == captures
    check([7, 40, 9], small)


@pytest.mark.parametrize("recipe", ["memory_reuse", "pre_padding,memory_reuse", RECTANGLES, PACKED])
def test_other_attention_has_a_graph_for_each_list_of_lengths(recorded, recipe):
    engine = EncoderEngine(ours("roberta").encoder, parts(recipe, on_device=False))
    exact = EncoderEngine(ours("roberta").encoder, Recipe.parse(recipe).parts)
    found = [(of_lengths(14, 4, seed=seed), of_lengths(9, 3, 3, seed=seed)) for seed in range(3)]
    for lists in found:
        for given in lists:
            close(engine.read(given, tasks.MEAN).values, exact.read(given, tasks.MEAN).values)
    buckets = {engine.bucket(given, tasks.MEAN) for lists in found for given in lists}
    if recipe == "memory_reuse":  # a pass for each text
        assert engine.captures == 4 and buckets == {None}
    else:
        assert engine.captures == len(buckets - {None}) == 2


def test_a_captured_run_can_be_stopped(recorded):
    stop, engine = threading.Event(), EncoderEngine(ours("bert").encoder, parts())
    for _ in range(2):
        exact = engine.read(texts(), tasks.MEAN, Batching(20)).values
    captures, held = engine.captures, engine.held_bytes
    with pytest.raises(Cancelled, match="stopped"):
        engine.read(texts(), tasks.MEAN, Batching(20), progress=lambda *told: stop.set(), cancel=stop)
    assert engine.read(texts(), tasks.MEAN, Batching(20)).values.equal(exact)
    assert (engine.captures, engine.held_bytes) == (captures, held), "graphs stay, and their memory"


def test_graphs_of_a_kernel_that_was_edited_go(recorded, monkeypatch):
    engine, path = EncoderEngine(ours("bert").encoder, parts()), "first"
    monkeypatch.setattr(type(engine.parts.ops), "kernels", property(lambda ops: ("linear",)))
    monkeypatch.setattr(native, "prepare", lambda *args, **options: None)
    monkeypatch.setattr(native, "loaded", lambda name: SimpleNamespace(path=path))
    for path, captures in (("first", 0), ("first", 1), ("first", 1), ("second", 1), ("second", 2)):  # noqa: B007
        engine.read(texts(), tasks.MEAN)
        assert engine.captures == captures


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_few_tokens_that_are_not_captured_have_room(recorded, tokens):
    engine, plain = (EncoderEngine(ours("bert").encoder, p) for p in (parts(tokens=tokens), Recipe.parse(PACKED).parts))
    for task in (tasks.MEAN, tasks.CLS, tasks.HIDDEN):
        for given in (of_lengths(7), of_lengths(5, 2), of_lengths(30, 7)):
            assert_same(engine, plain, given, task)


def test_memory_of_graphs_is_told(recorded, monkeypatch):
    """In each capture something of 1,000 bytes is allocated; the result of a smaller graph goes with it."""
    told = itertools.count(0, 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(told))
    engine = EncoderEngine(ours("bert").encoder, parts(graphs=2))
    for lengths in ([40] * 20, [40] * 8, [3]):
        for _ in range(3):
            engine.read(of_lengths(*lengths), tasks.MEAN)
    graphs = engine._captured._replays
    arrived = sum(kept.staging._data.nbytes for kept in graphs._kept.values())
    assert engine.captures == 3 and engine.held_bytes == engine.memory.held_bytes + arrived + 2 * 1000
    graphs.void()
    assert engine.held_bytes == engine.memory.held_bytes + arrived


def test_no_run_that_is_timed_captures(recorded, monkeypatch):
    """A pass runs as it is at first, and is captured the second time: both are before the first run that counts."""
    told, encoded = [], encoding.encoded

    def watched(engine, *given):
        before = engine.captures
        run = encoded(engine, *given)
        told.append(engine.captures - before)
        return run

    recipe = namedtuple("Given", "parts")(parts())
    monkeypatch.setattr(encoding, "encoded", watched)
    monkeypatch.setattr(encoding, "distinct", lambda *given: ([recipe], []))
    encoding.encode_all(ours("bert"), "encode:any/t6/p1-30", repeats=2)
    assert told == [0, 1, 0, 0]


@dataclass(frozen=True)
class NotCaptured(GraphLaunch):
    """It has the limits of an encoder's passes, and says that it captures nothing."""

    is_captured = False


def test_parts_that_would_capture_nothing_are_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RecipeError, match="These parts capture passes of texts, and this encoder reads images"):
        EncoderEngine(test_vision.ours("classes").encoder, parts(on_device=False))
    with pytest.raises(RecipeError, match="change launch, which an encoder does not use"):
        EncoderEngine(ours("bert").encoder, replace(Parts(), launch=lambda decode, *_: decode))
    with pytest.raises(RecipeError, match="change launch, which an encoder does not use"):
        EncoderEngine(ours("bert").encoder, replace(Parts(), launch=NotCaptured()))
    with pytest.raises(RecipeError, match="captures passes of texts, and this model reads images"):
        Recipe.parse("memory_reuse,cuda_graphs").check("cuda", test_vision.ours("classes").config)


def test_a_bucket_is_traced_once(recorded):
    """Planning a pass that has been there takes the host no trace, whatever came between."""
    engine = EncoderEngine(ours("bert").encoder, parts())
    lists = [of_lengths(*[3] * number) for number in (90, 60, 40, 9)]
    for given in lists * 2:
        engine.read(given, tasks.MEAN)
    traced = engine.memory._num_traced
    for given in lists * 2:
        engine.read(given, tasks.MEAN)
    assert engine.memory._num_traced == traced
    assert buckets.blank(Size(256, 8, 128, 32), True).batch.max_kv == 128
