"""Lesson 5's exercise: write the policy by which an arena grows and shrinks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from eet_lab.memory import PLANNERS
from eet_lab.memory.workloads import bert_layer, turbo_artifact
from eet_lab.panels import theme
from eet_lab.panels.lessons.exercise import Exercise, Wrong, ask, named, number
from eet_lab.panels.lessons.show import table
from eet_lab.words import sized

MiB = 2**20
ROOMY = 2.2
"""Held on average, as a multiple of what the requests need on average: at most."""
SPARING = 5
"""At most one driver call for so many requests."""

ALL_THERE_IS = 2**50
"""Bytes: more than any machine has."""

Policy = Callable[[int, int, Sequence[int]], int]


def exercise() -> Exercise:
    """Write `hold`; a right answer serves a random stream, and one of a busy day and a quiet night."""
    return Exercise(_judge, hold)


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


def _judge(answer: Policy) -> tuple[str, tuple[Any, ...]]:
    rows, figures = [], []
    for name, needs in streams().items():
        sizes = _sizes(name, answer, needs)
        calls = sum(1 + bool(then) for then, now in zip([0, *sizes], sizes, strict=False) if now != then)
        ratio, most_calls = sum(sizes) / sum(needs), len(needs) // SPARING
        if calls > most_calls:
            raise Wrong(
                f"{name}: {calls} driver calls in {len(needs)} requests, and at most {most_calls} are wanted. Do not "
                "follow every request: leave room when you grow, and wait before you shrink."
            )
        if ratio > ROOMY:
            raise Wrong(
                f"{name}: {ratio:.2f} times what is needed is held on average, and at most {ROOMY} are wanted. When "
                "the last requests (`before` holds what they needed) would have done with much less, give it back."
            )
        rows.append([name, f"{ratio:.2f}", f"{calls}", f"{len(needs)}", sized(max(sizes))])
        figures.append(_curve(name, needs, sizes))
    message = "You guessed the future from the past, and that is all that a policy can do."
    head = ["stream", "held, × what is needed", "driver calls", "requests", "most held"]
    return message, (table(head, rows), *figures)


def _sizes(name: str, answer: Policy, needs: Sequence[int]) -> list[int]:
    """What the learner's policy holds for each request."""
    held, sizes = 0, list[int]()
    for at, needed in enumerate(needs):
        given = ask(answer, needed, held, tuple(needs[:at]))
        size, case = number(given), f"{name}: request {at + 1} needs {needed:,} bytes, and you return {named(given)}"
        if size is None:
            raise Wrong(f"{case}: a number of bytes is wanted.")
        if not needed <= size < ALL_THERE_IS:
            raise Wrong(f"{case}: {'at least that many' if size < needed else 'no machine has so many'}.")
        held = int(size)
        sizes.append(held)
    return sizes


def _curve(name: str, needs: Sequence[int], sizes: Sequence[int]) -> Any:
    fig = theme.figure(f"Your arena: {name}", height=260, legend=theme.LEGEND_BELOW)
    x = list(range(1, len(needs) + 1))
    for label, values, color in (("needed", needs, theme.GAIN), ("held", sizes, theme.SELECTION)):
        y = theme.rounded(value / MiB for value in values)
        fig.add_scatter(
            x=x, y=y, name=label, line={"shape": "hvh", "color": color, "width": 1.8},
            fill="tozeroy" if label == "needed" else None,
        )  # fmt: skip
    return fig.update_xaxes(title="request").update_yaxes(title="MiB", rangemode="tozero")
