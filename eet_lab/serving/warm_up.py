"""What comes up while a model is served, run before: kernels are loaded, passes placed, and steps captured."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator, Sequence
from math import inf
from typing import Any

import numpy as np

from eet_lab.engine.encode import EncoderEngine
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.engine.tasks import MEAN, TextTask
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_encoders_device
from eet_lab.parts.buckets import longest_mixed
from eet_lab.parts.passes import Batching, Text
from eet_lab.progress import Cancel, Progress, raise_if_cancelled
from eet_lab.scheduling.cost import Costs
from eet_lab.scheduling.policy import BasePolicy
from eet_lab.scheduling.queued import Queued
from eet_lab.scheduling.traffic import FIRST_TOKEN, Traffic

Rows = Sequence[Sequence[int]]

MOST_TOKENS, FEW_NEW_TOKENS = 4096, 4
"""The most tokens of a decoder's pass that is run, and how many decode steps."""
LIMITED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.5}
TELLS: dict[str, Any] = {"logprobs": 0}
"""What a request may ask for beside its temperature, as `Settings`."""
FEW_TEXTS = 4
"""Texts that warm an encoder up."""
SAMPLES, DRAWN = 6, 64
"""Queues of each length that a policy is asked about to warm up passes which are captured; more of short ones, so that
they have so many requests between them.
"""


def warm_up_decoder(engine: Engine, cancel: Cancel | None = None, temperatures: Sequence[float] = (0.0,)) -> None:
    """Run what comes up where requests join, once there is room for all: passes of each size up to `MOST_TOKENS`
    tokens, and a few decode steps of each size.

    A GPU's libraries load kernels for a size when it first comes, and passes of few tokens are traced then; passes that
    are captured are run twice. All of it is done for requests of each of the `temperatures`: what draws a token is
    captured apart, and needs more memory than what does not, so it comes first. Where one of them draws, a few steps
    are run before for a request with a top-p, which needs the most, and for one that asks for log-probabilities: then
    neither needs memory, nor moves what was captured, when it comes. Errors: Cancelled, OutOfMemory.
    """
    if any(temperatures):
        _run(engine, cancel, [1], Settings(1, **LIMITED))  # opens the slots
        for asked in (LIMITED, TELLS):
            _decode(engine, cancel, asked)
    for temperature in sorted(temperatures, reverse=True):
        _warm_up(engine, cancel, temperature)
    engine.reset_prefix_cache()


def _warm_up(engine: Engine, cancel: Cancel | None, temperature: float) -> None:
    def run(lengths: Sequence[int], new_tokens: int = 1) -> None:
        _run(engine, cancel, lengths, Settings(new_tokens, temperature=temperature))

    run([1])  # opens the slots
    slots = engine.slots
    assert slots is not None
    longest = min(slots.schedule.chunk or slots.capacity, slots.capacity - 1)
    most = min(slots.schedule.most_tokens(slots.capacity), slots.num_slots * longest, MOST_TOKENS)
    largest = {slots.passes.pass_size(tokens): tokens for tokens in range(1, most + 1)}  # the most tokens of each size
    for size, tokens in largest.items() if slots.passes.has_sizes else ():
        kinds = dict[int, list[int]]()  # how the tokens are divided among requests
        for rows in range(-(-tokens // longest), min(tokens, slots.num_slots) + 1):
            lengths = [tokens // rows + (row < tokens % rows) for row in range(rows)]
            kinds.setdefault(longest_mixed(lengths[0]), lengths)
            if longest_mixed(1) in kinds:  # the last: more requests have shorter prompts
                break
        is_captured = size <= slots.passes.most_captured
        for lengths in [*kinds.values()] * 2 if is_captured else [*kinds.values()][:1]:
            run(lengths)
    _decode(engine, cancel, {"temperature": temperature})
    run([longest], min(FEW_NEW_TOKENS, slots.capacity - longest))


def _decode(engine: Engine, cancel: Cancel | None, asked: dict[str, Any]) -> None:
    """A few steps of each size, the largest first, which needs the most memory."""
    slots = engine.slots
    assert slots is not None
    settings = Settings(min(FEW_NEW_TOKENS, slots.capacity - 1), **asked)
    sizes = {slots.passes.step_size(num): num for num in range(slots.num_slots, 0, -1)}
    for num in sizes.values() if slots.passes.has_sizes else [1]:
        _run(engine, cancel, [1] * num, settings)


def _run(engine: Engine, cancel: Cancel | None, lengths: Sequence[int], settings: Settings) -> None:
    """Prompts of these lengths, to their last tokens."""
    vocab = engine.model.config.vocab_size
    engine.reset_prefix_cache()  # which has these tokens
    # Rows that begin alike would wait for each other there.
    prompts = [[row % vocab] * length for row, length in enumerate(lengths)]
    requests = [engine.add(prompt, settings) for prompt in prompts]
    while not all(request.done for request in requests):  # a step may tell nothing before the last
        engine.step()
        raise_if_cancelled(cancel, "The warm-up")


@on_its_encoders_device
def warm_up_encoder(
    model: Model,
    engine: EncoderEngine,
    traffic: Traffic,
    policy: BasePolicy,
    costs: Costs,
    cancel: Cancel | None = None,
    *,
    tasks: Sequence[TextTask] = (MEAN,),
    progress: Progress | None = None,
) -> None:
    """Run an encoder's passes before they are served, so that libraries have what they keep.

    Where passes are captured in buckets, it runs groups that the policy makes of such traffic by the `costs`, for each
    of the tasks: first the largest, so that memory grows no more, then those of each bucket, twice: the second time
    they are captured. A graph for texts of the very same lengths alone would not be used again. Errors: Cancelled,
    OutOfMemory.
    """
    texts = random_texts(model, traffic)
    engine.prepare(cancel=cancel)
    runs: list[tuple[TextTask, Rows]] = [(task, texts[:FEW_TEXTS]) for task in tasks]
    if engine.has_buckets and (launch := engine.parts.captures_passes):
        runs = _runs(engine, texts, [*_possible(traffic, policy, costs, cancel)], tasks, launch.graphs)
    for done, (task, rows) in enumerate(runs):
        if progress is not None:
            progress(done, len(runs), "warming up")
        engine.read([*map(Text, rows)], task, Batching(rectangle(rows)), cancel=cancel)
    if progress is not None:
        progress(len(runs), len(runs), "warming up")


def _runs(
    engine: EncoderEngine, texts: Rows, groups: Sequence[Sequence[int]], tasks: Sequence[TextTask], most: int
) -> list[tuple[TextTask, Rows]]:
    """What is run, in this order, so that all that is kept, at `most` so many graphs, is captured."""
    found: dict[tuple[TextTask, Hashable], Rows] = {}
    for task in tasks:
        for group in groups:
            rows = [texts[number] for number in group]
            key = task, engine.bucket([*map(Text, rows)], task)
            if rectangle(rows) > rectangle(found.get(key, [[]])):
                found[key] = rows
    kept = sorted(found, key=lambda key: -rectangle(found[key]))[:most]
    largest = [max(found.values(), key=size) for size in (rectangle, _num_tokens, len, _longest)]
    runs = [(task, rows) for task in tasks for rows in largest]
    for task, bucket in kept:
        times = 1 if bucket is None else engine.parts.num_warm_ups
        runs += [(task, found[task, bucket])] * times
    return runs


def _possible(traffic: Traffic, policy: BasePolicy, costs: Costs, cancel: Cancel | None) -> Iterator[list[int]]:
    """The groups that a policy makes of requests that happen to wait together, and of the longest ones."""
    draw, columns = random.Random(0), (traffic.lengths.tolist(), traffic.new_tokens.tolist())
    requests = [Queued(number, *each, 0.0) for number, each in enumerate(zip(*columns, strict=True))]
    ordered = sorted(requests, key=lambda each: each.length)
    most = min(max(policy.knobs.get(each, 1) for each in ("max_rows", "window")), len(requests))
    sizes = {most, *(size for power in range(16) for size in (2**power, 3 * 2**power) if size < most)}
    for size in sorted(sizes):
        queues = [draw.sample(requests, size) for _ in range(max(SAMPLES, DRAWN // size))]
        for waiting in (ordered[-size:], *queues):
            raise_if_cancelled(cancel, "The warm-up")
            while waiting and (groups := policy.next(waiting, inf, costs).groups):
                yield from ([each.number for each in group] for group in groups)
                taken = {each.number for group in groups for each in group}
                waiting = [each for each in waiting if each.number not in taken]


def random_texts(model: Model, traffic: Traffic) -> list[list[int]]:
    """Random tokens of its lengths."""
    ends = np.cumsum(traffic.lengths)
    ids = np.random.default_rng(0).integers(FIRST_TOKEN, model.config.vocab_size, int(ends[-1])).tolist()
    return [ids[end - length : end] for end, length in zip(ends.tolist(), traffic.lengths.tolist(), strict=True)]


def rectangle(rows: Rows) -> int:
    """Tokens of such texts with pads."""
    return len(rows) * _longest(rows)


def _longest(rows: Rows) -> int:
    return max(map(len, rows))


def _num_tokens(rows: Rows) -> int:
    return sum(map(len, rows))
