"""Lesson 5, on real tensors: the engine's own pools, and torch's caching allocator as the peer."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

from eet_lab.bench import caching_allocator
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.figures.planners import POOL_HEAD, pool_lines
from eet_lab.lessons.memory_reuse import BASE
from eet_lab.lessons.show import Shown, here, noted, table
from eet_lab.memory import POOLS, one_after_the_other
from eet_lab.memory.replays import replay
from eet_lab.memory.workloads import Request
from eet_lab.models import Model
from eet_lab.technique import Recipe
from eet_lab.words import sized

NUM_REQUESTS = 12
NEW_TOKENS = 4
PLANNERS = ("greedy_by_size", "chunked", "eet_repaired", "no_reuse")


class Ran(NamedTuple):
    """A stream that an engine has served."""

    name: str
    calls: int
    held_bytes: int
    same: bool


def requests(model: Model, count: int = NUM_REQUESTS, seed: int = 3) -> list[list[int]]:
    """Prompts of 5 to 250 tokens, drawn from the vocabulary: only their lengths matter here."""
    draw = random.Random(seed)
    vocabulary, longest = model.config.vocab_size, min(250, model.config.context - NEW_TOKENS)
    return [[draw.randrange(1, vocabulary) for _ in range(draw.randint(5, longest))] for _ in range(count)]


def traced(model: Model) -> list[Request]:
    """The same stream as lifetimes: what each request would ask for, told without running it."""
    engine = Engine(model.decoder, Recipe.parse(BASE, model.device).parts)
    settings, found = Settings(max_new_tokens=NEW_TOKENS), []
    for prompt in requests(model):
        passes = engine.lifetimes([prompt], settings).values()
        found.append(Request(len(prompt), one_after_the_other(passes)))
    return found


def on_paper(model: Model) -> Shown:
    """This model's own stream through every pool that the workbench offers."""
    stream = traced(model)
    found = {name: replay(make(), stream) for name, make in POOLS.items() if name in PLANNERS}
    return Shown(
        table(POOL_HEAD, pool_lines(found)),
        f"{len(stream)} prompts of random length on {model.name}, traced without running them. Nothing here was "
        "written by hand, unlike the tensors of the stream above.",
    )


def on_the_engine(model: Model) -> Shown:
    """The same stream for real: one engine for each planner, whose pool lives from request to request."""
    truth = [_tokens(Engine(model.decoder), prompt) for prompt in requests(model)]
    served = [_ran(model, name, truth) for name in PLANNERS]
    rows = [[ran.name, f"{ran.calls:,}", sized(ran.held_bytes), "yes" if ran.same else "no"] for ran in served]
    return Shown(
        here(model),
        table(["memory_reuse:planner=", "driver calls", "held at the end", "same tokens as the baseline"], rows),
        "An engine asks the driver only if its pool has no room for a request. The same tokens show that no tensor "
        "overwrote another one that was still alive.",
    )


def _ran(model: Model, name: str, truth: list[tuple[int, ...]]) -> Ran:
    engine = Engine(model.decoder, Recipe.parse(f"{BASE},memory_reuse:planner={name}", model.device).parts)
    same = all(_tokens(engine, prompt) == tokens for prompt, tokens in zip(requests(model), truth, strict=True))
    calls, held = engine.memory.calls, engine.memory.held_bytes
    engine.close()
    return Ran(name, calls.allocations + calls.frees, held, same)


def _tokens(engine: Engine, prompt: list[int]) -> tuple[int, ...]:
    [tokens] = engine.generate([prompt], Settings(max_new_tokens=NEW_TOKENS)).tokens
    return tokens


def torch_allocator() -> Shown:
    """The peer on the same streams: measured where there is a GPU, else what one told."""
    if torch.cuda.is_available():
        found = caching_allocator.here()
        where = noted(f"Measured now on {found.device}, torch {found.torch}.", "gpu")
    elif (told := caching_allocator.recorded()) is not None:
        found, when = told, told.date[:10]
        where = noted(f"Not this machine: recorded on an {found.device}, torch {found.torch}, {when}.", "recorded")
    else:
        return Shown(noted("This needs a GPU: torch's caching allocator serves nothing else.", "cpu"))
    rows = []
    for stream, settings in found.streams.items():
        for setting, each in settings.items():
            reserved, allocated = sized(max(each.reserved_bytes)), sized(each.most_allocated_bytes)
            rows.append([stream, setting, reserved, allocated, f"{each.allocations} + {each.frees}"])
    return Shown(
        where,
        table(["stream", "allocator", "most reserved", "most allocated", "allocations + frees"], rows),
        "Torch's allocator does not know what comes next. It keeps what is freed, splits blocks and joins them "
        "again. Expandable segments let a block grow in place, for streams of ever longer requests. What is reserved "
        "and not allocated, it keeps for the future.",
    )
