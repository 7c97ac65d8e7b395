"""Lesson 3's exercise: write a planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from eet_lab.engine.arena import Arena
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.memory import ArenaPool, Lifetime, Plan
from eet_lab.memory.lifetimes import ALIGNMENT
from eet_lab.models import Model
from eet_lab.models.weights import placed
from eet_lab.panels.lessons.batch import rows
from eet_lab.panels.lessons.exercise import Exercise, Unanswered, Wrong, ask, named, whole
from eet_lab.panels.packing import packing
from eet_lab.parts import Parts
from eet_lab.technique import Recipe

MiB = 2**20
BASE = "pre_padding,mask_removal"
ROOMY = 1.5
"""An answer to the exercise may need this many times the bytes that are alive at once."""


def trace(model: Model, recipe: str = BASE) -> Plan:
    """Every buffer that the first pass asks for, placed as the recipe's planner places it."""
    engine = Engine(model.decoder, Recipe.parse(recipe, model.device).parts)
    engine.generate(rows(model), Settings(max_new_tokens=2))
    return engine.plans()["prefill"]


Planner = Callable[[Sequence[Lifetime]], Sequence[int]]


def exercise(model: Model) -> Exercise:
    """Write a planner; a right answer places the engine's own activations."""
    return Exercise(lambda answer: _judge(answer, model), plan)


def plan(lifetimes: Sequence[Lifetime]) -> list[int]:
    """Each buffer at the lowest offset where it touches no buffer that lives at the same time."""
    offsets: list[int] = []
    for life in lifetimes:
        offset, moved = 0, True
        while moved:
            moved = False
            for other, start in zip(lifetimes, offsets, strict=False):
                end = start + other.num_bytes
                if life.overlaps(other) and offset < end and start < offset + life.num_bytes:
                    offset, moved = end, True
        offsets.append(offset)
    return offsets


TOY = (Lifetime("a", 512, 0, 1), Lifetime("b", 256, 1, 2), Lifetime("c", 512, 2, 3), Lifetime("d", 256, 3, 4))


def _judge(answer: Planner, model: Model) -> tuple[str, tuple[Any, ...]]:
    _judge_plan(TOY, ask(answer, TOY), "The toy")
    real = trace(model)
    placed_by_you = _judge_plan(real.lifetimes, ask(answer, real.lifetimes), "The first pass")
    need, limit = placed_by_you.footprint_bytes, ROOMY * real.lower_bound_bytes
    if need > limit:
        raise Wrong(
            f"nothing collides, but the first pass needs {need / MiB:.2f} MiB, and {real.lower_bound_bytes / MiB:.2f} "
            f"are alive at once. Get below {limit / MiB:.2f} MiB: put each buffer at the lowest offset where it fits."
        )
    decoder = placed(model.decoder, torch.device("cpu"), torch.float32)
    batch, settings = rows(model)[:2], Settings(max_new_tokens=8)
    yours = ArenaPool(lambda lifetimes: _judge_plan(lifetimes, ask(answer, lifetimes), "A pass of the engine"))
    if (
        Engine(decoder, Parts(memory=partial(Arena, yours))).generate(batch, settings).tokens
        != Engine(decoder).generate(batch, settings).tokens
    ):
        raise Wrong("the plan looks right, but the engine generated other tokens than the baseline in it.")
    message = (
        f"{need / MiB:.2f} MiB, where {real.lower_bound_bytes / MiB:.2f} are alive at once. The engine just ran in "
        "your arena and generated what the baseline generates."
    )
    return message, (packing(placed_by_you, title="The first pass, placed by your planner"),)


def _judge_plan(lifetimes: Sequence[Lifetime], given: Any, what: str) -> Plan:
    """The plan that these offsets make; Wrong, naming two buffers, if they cannot be used."""
    offsets = _offsets(lifetimes, given, what)
    for i, (life, offset) in enumerate(zip(lifetimes, offsets, strict=True)):
        for other, start in zip(lifetimes[:i], offsets[:i], strict=True):
            if life.overlaps(other) and offset < start + other.num_bytes and start < offset + life.num_bytes:
                raise Wrong(
                    f"{what}: {other.name} (requests {other.first} to {other.last}, bytes {start} to "
                    f"{start + other.num_bytes}) and {life.name} (requests {life.first} to {life.last}, bytes "
                    f"{offset} to {offset + life.num_bytes}) are alive together and share bytes."
                )
    return Plan(tuple(lifetimes), tuple(offsets))


def _offsets(lifetimes: Sequence[Lifetime], given: Any, what: str) -> list[int]:
    """What the learner gave, as whole numbers; a generator, an array or a tensor will do."""
    try:
        found = list(islice(given, len(lifetimes) + 1))
    except Exception as error:
        if not hasattr(given, "__iter__"):
            raise Wrong(f"{what}: return a list of offsets, one for each buffer, not {named(given)}.") from error
        raise Wrong(f"{what}: your offsets end in {type(error).__name__}: {error}.") from error
    if len(found) != len(lifetimes):
        gave = "more" if len(found) > len(lifetimes) else f"{len(found)}"
        raise Wrong(f"{what} has {len(lifetimes)} buffers, but you gave {gave} offsets: one for each, in order.")
    for life, offset in zip(lifetimes, found, strict=True):
        if offset is ...:
            raise Unanswered
        start = whole(offset)
        if start is None or start < 0 or start % ALIGNMENT:
            raise Wrong(f"{what}: {life.name} is at {named(offset)}; an offset is a multiple of {ALIGNMENT} from 0 on.")
    return [whole(offset) or 0 for offset in found]
