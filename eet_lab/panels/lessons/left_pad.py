"""Lesson 1's exercise: pad a batch on the left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch

from eet_lab.engine.engine import Engine
from eet_lab.engine.prompts import right_aligned
from eet_lab.engine.settings import Settings
from eet_lab.models import Model
from eet_lab.models.weights import placed
from eet_lab.ops.types import State, Step
from eet_lab.panels.lessons.batch import SHORT, clipped
from eet_lab.panels.lessons.exercise import Exercise, Wrong, ask, named
from eet_lab.panels.lessons.show import table
from eet_lab.parts import Parts

Rows = Sequence[Sequence[int]]
LeftPad = Callable[[Rows], tuple[list[list[int]], list[list[int]]]]


def exercise(model: Model) -> Exercise:
    """Write left padding; a right answer is run by the engine in place of ours."""
    return Exercise(lambda answer: _judge(answer, model), left_pad)


def left_pad(prompts: Rows) -> tuple[list[list[int]], list[list[int]]]:
    """Right-aligned rows of tokens, 0 for a pad, and each token's position in its own sequence."""
    longest = max(len(prompt) for prompt in prompts)
    pads = [longest - len(prompt) for prompt in prompts]
    tokens = [[0] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    positions = [[max(column - pad, 0) for column in range(longest)] for pad in pads]
    return tokens, positions


def _judge(answer: LeftPad, model: Model) -> tuple[str, tuple[Any, ...]]:
    for rows in ([[7, 8, 9], [5]], [[4]], [[1, 2], [3, 4]], [[6], [1, 2, 3, 4, 5], [7, 8]]):
        given = ask(answer, [list(row) for row in rows])
        if not (isinstance(given, tuple) and len(given) == 2):
            raise Wrong(f"return two things, tokens and positions, not {named(given)}.")
        _judge_layout(rows, *given)
    decoder = placed(model.decoder, torch.device("cpu"), torch.float32)
    rows = [model.encode(prompt) for prompt in SHORT]
    settings = Settings(max_new_tokens=8)
    yours = Engine(decoder, Parts(prompts=_layout_of(answer))).generate(rows, settings).tokens
    ours = Engine(decoder).generate(rows, settings).tokens
    if yours != ours:
        raise Wrong("the layout looks right, but the engine generated other tokens than the baseline with it.")
    told = [[clipped(p), model.decode(tokens)] for p, tokens in zip(SHORT, yours, strict=True)]
    message = "The engine just ran with your layout, and generated what the baseline generates, token by token:"
    return message, (table(["prompt", "continued through your function"], told),)


def _judge_layout(rows: Rows, tokens: Any, positions: Any) -> None:
    longest, case = max(map(len, rows)), f"For left_pad({[list(row) for row in rows]})"
    right_tokens, right_positions = left_pad(rows)
    for b, row in enumerate(rows):
        try:
            got, at = ([index(each) for each in part[b]] for part in (tokens, positions))
            num_rows = len(tokens), len(positions)
        except Exception as error:
            raise Wrong(f"{case}: tokens and positions each need {len(rows)} rows of whole numbers.") from error
        if num_rows != (len(rows), len(rows)):
            raise Wrong(f"{case}: tokens and positions have {num_rows} rows; both must have {len(rows)}.")
        if len(got) != longest or len(at) != longest:
            raise Wrong(f"{case}: tokens[{b}] has length {len(got)}, positions[{b}] {len(at)}; both must be {longest}.")
        if got != right_tokens[b]:
            right_padded = got[: len(row)] == list(row) and longest > len(row)
            hint = " The pads belong on the left, so that every row ends in the same column." if right_padded else ""
            raise Wrong(f"{case}: tokens[{b}] should be {right_tokens[b]}, but it is {got}.{hint}")
        pad = longest - len(row)
        if at[pad:] != right_positions[b][pad:]:
            shifted = at == list(range(longest))
            hint = " Count from the row's own first token, not from the first column." if shifted else ""
            raise Wrong(
                f"{case}: positions[{b}] should give the real tokens {right_positions[b][pad:]}, not {at[pad:]}.{hint}"
            )
        if min(at) < 0:
            raise Wrong(f"{case}: positions[{b}] has a negative number; the embedding has none. Give pads position 0.")


def _layout_of(answer: LeftPad) -> Callable[[Rows, int], tuple[State, Step]]:
    """The learner's function as the engine's `prompts` part."""

    def lay_out(rows: Rows, room: int) -> tuple[State, Step]:
        state, first = right_aligned(rows, room)
        tokens, positions = (torch.tensor(part) for part in answer(rows))
        state.tokens[:, : tokens.shape[1]] = tokens
        return state, first._replace(ids=tokens.flatten(), positions=positions.flatten())

    return lay_out
