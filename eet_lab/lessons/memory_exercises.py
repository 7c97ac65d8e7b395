"""Exercises of lessons 3 and 5: copies, plans, an arena that grows, and a policy to hold memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, combinations, islice
from typing import Any

import torch

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.figures import theme
from eet_lab.figures.plans import packing
from eet_lab.lessons.batch import rows
from eet_lab.lessons.exercise import Exercise, Unanswered, Wrong, ask, formula, named, number, whole
from eet_lab.lessons.memory_reuse import trace
from eet_lab.lessons.show import table
from eet_lab.memory import PLANNERS, ArenaPool, Lifetime, Plan
from eet_lab.memory.lifetimes import ALIGNMENT
from eet_lab.memory.workloads import bert_layer, turbo_artifact
from eet_lab.models import Model
from eet_lab.models.weights import placed
from eet_lab.parts import Parts
from eet_lab.parts.arena import Arena
from eet_lab.words import MiB, sized

ROOMY_PLAN = 1.5
"""A plan may need this many times the bytes that are alive at once."""
ROOMY = 2.2
"""Held on average by a policy, as a multiple of what the requests need on average: at most."""
SPARING = 5
"""Requests for each driver call, at least."""
ALL_THERE_IS = 2**50
"""Bytes: more than any machine has."""


def kv_bytes(layers: int, channels: int, rows: int, columns: int, itemsize: int) -> int:
    """A key and a value of each channel, in each layer, for each column of each row."""
    return 2 * layers * channels * rows * columns * itemsize


size_of_cache = formula(
    kv_bytes,
    {
        "this lesson's model at the end, float32": (2, 128, 12, 383, 4),
        "GPT-2 XL, one row, 1,024 columns, float16": (48, 1600, 1, 1024, 2),
        "GPT-2 XL, 64 rows": (48, 1600, 64, 1024, 2),
    },
    {
        "There are keys and values: twice that.": lambda L, C, B, K, size: L * C * B * K * size,
        "That is the cache of one layer.": lambda L, C, B, K, size: 2 * C * B * K * size,
        "That is the cache of one row.": lambda L, C, B, K, size: 2 * L * C * K * size,
        "That counts numbers; each number has itemsize bytes.": lambda L, C, B, K, size: 2 * L * C * B * K,
    },
    "GPT-2 XL has 3.1 GB of weights. From 10 full rows on, its cache is larger.",
    names=("bytes",),
    otherwise="Each column of each row holds one key and one value of all channels, in each layer.",
)


def copied_columns(prompt_tokens: int, new_tokens: int) -> int:
    """Step i finds prompt_tokens + i columns, i from 0; the first pass gives a token and copies nothing."""
    return sum(range(prompt_tokens, prompt_tokens + new_tokens - 1))


count_copies = formula(
    copied_columns,
    {
        "2 prompt tokens, 4 new": (2, 4),
        "this lesson's run": (32, 352),
        "1 prompt token, 2 new": (1, 2),
        "1,000 prompt tokens, 1,000 new": (1000, 1000),
    },
    {
        "The first pass gives the first new token and copies nothing: one step less.":
            lambda n, new: sum(range(n, n + new)),
        "A step copies what is there before it: the first decode step finds the prompt's columns.":
            lambda n, new: sum(range(n + 1, n + new)),
        "The prompt's columns are copied, too, at each step.": lambda n, new: sum(range(new - 1)),
        "The cache is not as long as that at each step: it grows.": lambda n, new: (new - 1) * (n + new - 1),
        "Each step finds one column more than the one before.": lambda n, new: (new - 1) * n,
    },
    "It grows with the square of what is generated. A cache of full length copies nothing.",
    names=("columns copied",),
    otherwise="Add up what each of the new_tokens - 1 decode steps finds in the cache.",
)  # fmt: skip


def times_grown(needs: Sequence[int]) -> int:
    """A request that needs more than all before it makes the arena grow."""
    return sum(need > most for need, most in zip(needs, accumulate([0, *needs], max), strict=False))


count_growths = formula(
    times_grown,
    {
        "3, 5, 5, 4, 9": ([3, 5, 5, 4, 9],),
        "always more": ([1, 2, 3, 4],),
        "always less": ([4, 3, 2, 1],),
        "fifty random requests": ([request.length for request in turbo_artifact()],),
    },
    {
        "As much as is held already needs no growth: compare with > and not with >=.":
            lambda needs: sum(need >= most for need, most in zip(needs, accumulate([0, *needs], max), strict=False)),
        "Compare with the most of all requests before, not with the last one.":
            lambda needs: sum(need > last for need, last in zip(needs, [0, *needs], strict=False)),
        "The first request makes the arena: count it, too.": lambda needs: times_grown(needs) - 1,
        "An arena that is large enough is kept; only growth asks the driver.": len,
        "An arena that must grow for each new length is sized by the most so far.": lambda needs: len(set(needs)),
    },
    "In an order that does not depend on length, records become rare, and so do driver calls.",
    names=("times that the arena grows",),
    otherwise="Go through the requests, and remember the most that was needed so far, 0 at first.",
)  # fmt: skip


def planning(model: Model) -> Exercise:
    """Write a planner; a right answer places the engine's own activations."""
    return Exercise(lambda answer: _judge_planner(answer, model), plan)


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


def _judge_planner(answer: Callable, model: Model) -> tuple[str, tuple[Any, ...]]:
    _judge_plan(TOY, ask(answer, TOY), "The toy")
    real = trace(model)
    placed_by_you = _judge_plan(real.lifetimes, ask(answer, real.lifetimes), "The first pass")
    need, limit = placed_by_you.footprint_bytes, ROOMY_PLAN * real.lower_bound_bytes
    if need > limit:
        raise Wrong(
            f"nothing collides, but the first pass needs {need / MiB:.2f} MiB, and {real.lower_bound_bytes / MiB:.2f} "
            f"are alive at once. Get below {limit / MiB:.2f} MiB: put each buffer at the lowest offset where it fits."
        )
    decoder = placed(model.decoder, torch.device("cpu"), torch.float32)
    batch, settings = rows(model)[:2], Settings(max_new_tokens=8)
    yours = ArenaPool(lambda lifetimes: _judge_plan(lifetimes, ask(answer, lifetimes), "A pass of the engine"))
    engines = Engine(decoder, Parts(memory=partial(Arena, yours))), Engine(decoder)
    in_yours, baseline = (engine.generate(batch, settings).tokens for engine in engines)
    if in_yours != baseline:
        raise Wrong("the plan looks right, but the engine generated other tokens than the baseline in it.")
    message = (
        f"{need / MiB:.2f} MiB, where {real.lower_bound_bytes / MiB:.2f} are alive at once. The engine just ran in "
        "your arena and generated the same tokens as the baseline."
    )
    return message, (packing(placed_by_you, title="The first pass, placed by your planner"),)


def _judge_plan(lifetimes: Sequence[Lifetime], given: Any, what: str) -> Plan:
    """The plan that these offsets make; Wrong, naming two buffers, if they cannot be used."""
    offsets = _offsets(lifetimes, given, what)
    for (other, start), (life, offset) in combinations(zip(lifetimes, offsets, strict=True), 2):
        if life.overlaps(other) and offset < start + other.num_bytes and start < offset + life.num_bytes:
            one, two = (
                f"{each.name} (requests {each.first} to {each.last}, bytes {at} to {at + each.num_bytes})"
                for each, at in ((other, start), (life, offset))
            )
            raise Wrong(f"{what}: {one} and {two} are alive together and share bytes.")
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


Policy = Callable[[int, int, Sequence[int]], int]


def hold(needed: int, held: int, before: Sequence[int]) -> int:
    """A fifth more than was asked for, and back to what was needed lately once half would do."""
    lately = max([needed, *before[-8:]])
    if needed > held:
        return needed + needed // 5
    return lately + lately // 5 if lately < held / 2 else held


def streams() -> dict[str, list[int]]:
    """Bytes that each request needs, by stream."""
    draw = random.Random(7)
    day, night = [draw.randint(120, 250) for _ in range(40)], [draw.randint(5, 60) for _ in range(160)]
    lengths = {
        "random, 5 to 250 tokens": [request.length for request in turbo_artifact()],
        "a busy day, then a quiet night": day + night,
    }
    place = PLANNERS["greedy_by_size"]
    return {name: [place(bert_layer(each).lifetimes).end for each in all_of] for name, all_of in lengths.items()}


def _judge_policy(answer: Policy) -> tuple[str, tuple[Any, ...]]:
    rows, figures = [], []
    for name, needs in streams().items():
        sizes = _sizes(name, answer, needs)
        calls = sum(1 + bool(then) for then, now in zip([0, *sizes], sizes, strict=False) if now != then)
        ratio, most_calls = sum(sizes) / sum(needs), len(needs) // SPARING
        if calls > most_calls:
            raise Wrong(
                f"{name}: {calls} driver calls in {len(needs)} requests, but at most {most_calls} are allowed. Do not "
                "follow every request: leave room when you grow, and wait before you shrink."
            )
        if ratio > ROOMY:
            raise Wrong(
                f"{name}: {ratio:.2f} times what is needed is held on average, but at most {ROOMY} times is allowed. "
                "When the last requests (`before` holds what they needed) needed much less, give memory back."
            )
        rows.append([name, f"{ratio:.2f}", f"{calls}", f"{len(needs)}", sized(max(sizes))])
        curves = ("needed", needs, theme.GAIN, "tozeroy"), ("held", sizes, theme.SELECTION, None)
        lines = [theme.Curve(of, [each / MiB for each in y], color, fill=fill) for of, y, color, fill in curves]
        figures.append(theme.curves(f"Your arena: {name}", lines, "request", "MiB", height=260, shape="hvh"))
    message = "Your policy predicts the future from the past. No policy can do more."
    head = ["stream", "held, × what is needed", "driver calls", "requests", "most held"]
    return message, (table(head, rows), *figures)


def _sizes(name: str, answer: Policy, needs: Sequence[int]) -> list[int]:
    """What the learner's policy holds for each request."""
    held, sizes = 0, list[int]()
    for at, needed in enumerate(needs):
        given = ask(answer, needed, held, tuple(needs[:at]))
        size, case = number(given), f"{name}: request {at + 1} needs {needed:,} bytes, and you return {named(given)}"
        if size is None:
            raise Wrong(f"{case}: return a number of bytes.")
        if not needed <= size < ALL_THERE_IS:
            raise Wrong(f"{case}: {'at least that many' if size < needed else 'no machine has so many'}.")
        held = int(size)
        sizes.append(held)
    return sizes


holding = Exercise(_judge_policy, hold)
"""Write `hold`; a right answer serves a random stream, and one of a busy day and a quiet night."""
