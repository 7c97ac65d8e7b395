"""Lesson 1, pre-padding: why read a prompt token by token, if one pass can read them all?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from eet_lab.bench import Comparison
from eet_lab.engine.engine import Engine
from eet_lab.engine.prompts import right_aligned
from eet_lab.engine.settings import Settings
from eet_lab.models import Model
from eet_lab.models.weights import placed
from eet_lab.ops.types import State, Step
from eet_lab.panels import theme
from eet_lab.panels.lessons.exercise import Exercise, Wrong, ask
from eet_lab.panels.lessons.prediction import Prediction
from eet_lab.panels.lessons.show import Shown, after, table
from eet_lab.panels.pictures import token_matrix
from eet_lab.parts import Parts
from eet_lab.texts import Output

PROMPTS = (
    "Return a list",
    "Open the file and read it line by line. If the file does not exist,",
    "The function takes two arguments. The first is the name of a module, the second is a dictionary of its "
    "attributes. When the name is not a string, a TypeError is raised; when the module cannot be found,",
    "An iterator is an object that represents a stream of data. Each call of its method returns the next item of the "
    "stream; when no more data is available, an exception is raised instead. A list is not an iterator, but it can "
    "give one: a new iterator each time that it is asked. This is why two loops over the same list do not disturb each "
    "other, and why a loop over a file, which is its own iterator, finds nothing when it runs for the second time. If "
    "you want to go through the lines of a file twice, then",
)
SHORT = ("Return a list", "If the file does not", "When the name is not a string,")


def prompts(model: Model) -> Shown:
    """The lesson's batch: how long each prompt is, and on what it will run."""
    rows = [[f"{b}", f"{len(model.encode(p))}", _clipped(p)] for b, p in enumerate(PROMPTS)]
    return Shown(table(["row", "tokens", "prompt"], rows))


def predict(model: Model) -> Prediction:
    """How many times sooner will the first token come? Reveals how many steps there are, and no time."""
    longest = max(lengths(model))
    return Prediction(
        "Read in one parallel pass instead of token by token: how many times sooner will the last row of this batch "
        "have its first new token?",
        reveal=f"The count is easy: {longest} steps against 1. Is a count of steps a count of milliseconds? Measure.",
        number=(1, 1000),
        unit="times sooner",
    )


def lengths(model: Model) -> list[int]:
    """Tokens of each of the lesson's prompts."""
    return [len(model.encode(prompt)) for prompt in PROMPTS]


def picture(recipe: str, model: Model) -> Shown:
    """Three short prompts as a token matrix, laid out as the recipe lays them out."""
    return Shown(token_matrix(SHORT, recipe, model=model, num_new=5))


def rows_over_time(*outputs: Output) -> Shown:
    """When each row read its prompt and when it generated, one figure for each run, on the same time axis."""
    end = max(output.run.total_ms for output in outputs)
    figures = [_rows_over_time(output, end) for output in outputs]
    slowest = [output.run.ttft_ms or 0.0 for output in outputs]
    words = " and ".join(f"{ms:.3g} ms ({output.recipe})" for ms, output in zip(slowest, outputs, strict=True))
    return Shown(*figures, f"Look at where green begins: the last row has its first token after {words}.")


def _rows_over_time(output: Output, end: float) -> go.Figure:
    run, rows = output.run, list(range(len(output.prompts)))
    first = [ms or run.total_ms for ms in run.first_ms]
    last = [ms or run.total_ms for ms in run.last_ms]
    fig = theme.figure(f"Rows over time, {output.recipe}: {len(run.step_ms)} steps", height=110 + 30 * len(rows))
    for name, start, stop, color in (
        ("reads its prompt", [0.0] * len(rows), first, theme.BASELINE),
        ("generates", first, last, theme.GAIN),
    ):
        fig.add_bar(
            y=rows, x=[b - a for a, b in zip(start, stop, strict=True)], base=start, orientation="h", name=name,
            marker_color=color, hovertemplate="row %{y}: " + name + " for %{x:.3g} ms<extra></extra>",
        )  # fmt: skip
    fig.update_layout(barmode="overlay", bargap=0.25)
    fig.update_xaxes(title="ms since the run began", range=[0, end * 1.02])
    fig.update_yaxes(title="row", autorange="reversed", dtick=1)
    return fig


def verdict(guess: Prediction, result: Comparison) -> Shown:
    """The reader's prediction and two computed ones beside what `compare` measured."""
    return after(guess, lambda: _verdict(float(guess.value), result))


def _verdict(guess: float, result: Comparison) -> Shown:
    a, b = result.baseline.ttft_ms, result.selection.ttft_ms
    if a is None or b is None:
        return Shown("Some row got no token, so there is no time to its first one: run the comparison again.")
    longest, num_rows = max(result.prompt_lengths), len(result.prompt_lengths)
    tokens, measured = num_rows * longest, a.p50 / b.p50
    step_ms = result.baseline.tpot_ms.p50 if result.baseline.tpot_ms else a.p50 / longest
    counted = table(
        ["until every row has a token", "baseline", "pre_padding", "ratio"],
        [
            ["steps (counted)", f"{longest}", "1", f"{longest}"],
            ["tokens computed, pads included (counted)", f"{tokens}", f"{tokens}", "1"],
            ["time to first token (measured)", f"{a.p50:.4g} ms", f"{b.p50:.4g} ms", f"{measured:.3g}"],
        ],
    )
    bars = {
        "you": guess,
        "if every step took the same time": float(longest),
        "if only arithmetic took time": 1.0,
        "measured": measured,
    }
    fig = theme.figure("How many times sooner: predicted and measured", height=240)
    fig.add_bar(
        y=list(bars), x=list(bars.values()), orientation="h", text=[f"{v:.3g}×" for v in bars.values()],
        marker_color=[theme.BASELINE] * 3 + [theme.GAIN], hoverinfo="skip", textposition="outside", cliponaxis=False,
    )  # fmt: skip
    fig.update_xaxes(type="log", range=[-0.05, 3.1], title="times sooner (log scale)")
    fig.update_yaxes(autorange="reversed")
    device = (
        "A GPU reads its weights once for the whole pass and has arithmetic to spare, so it comes near the count of "
        "steps until the pass is long enough to fill it."
        if result.environment.device_kind == "cuda"
        else "On a CPU arithmetic soon is what takes the time; a GPU has far more of it to spare, and comes closer "
        "to the count of steps."
    )
    why = (
        f"Why between the two? The arithmetic is the same: token by token the batch computes {longest} steps of "
        f"{num_rows} tokens, padded it computes one pass of {tokens}. What the one pass saves is reading every weight "
        f"{longest} times and calling every operation {longest} times. It is not free: here it took as long as "
        f"{b.p50 / step_ms:.1f} decode steps. {device} Same output? {result.sameness.verdict}."
    )
    return Shown(counted, fig, why)


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
            raise Wrong(f"return two things, tokens and positions, not a {type(given).__name__}.")
        _judge_layout(rows, *given)
    decoder = placed(model.decoder, torch.device("cpu"), torch.float32)
    rows = [model.encode(prompt) for prompt in SHORT]
    settings = Settings(max_new_tokens=8)
    yours = Engine(decoder, Parts(prompts=_layout_of(answer))).generate(rows, settings).tokens
    ours = Engine(decoder).generate(rows, settings).tokens
    if yours != ours:
        raise Wrong("the layout looks right, but the engine generated other tokens than the baseline with it.")
    told = [[_clipped(p), model.decode(tokens)] for p, tokens in zip(SHORT, yours, strict=True)]
    message = "The engine just ran with your layout, and generated what the baseline generates, token by token:"
    return message, (table(["prompt", "continued through your function"], told),)


def _judge_layout(rows: Rows, tokens: Any, positions: Any) -> None:
    longest, case = max(map(len, rows)), f"For left_pad({[list(row) for row in rows]})"
    right_tokens, right_positions = left_pad(rows)
    for b, row in enumerate(rows):
        try:
            got, at = [int(t) for t in tokens[b]], [int(p) for p in positions[b]]
        except (TypeError, ValueError, IndexError):
            raise Wrong(f"{case}: tokens and positions each need {len(rows)} rows of whole numbers.") from None
        if len(got) != longest or len(at) != longest:
            raise Wrong(f"{case}: row {b} has {len(got)} tokens and {len(at)} positions, both must be {longest}.")
        if got != right_tokens[b]:
            right_padded = got[: len(row)] == list(row) and longest > len(row)
            hint = " The pads belong on the left, so that every row ends in the same column." if right_padded else ""
            raise Wrong(f"{case}: row {b} should be {right_tokens[b]}, but it is {got}.{hint}")
        pad = longest - len(row)
        if at[pad:] != right_positions[b][pad:]:
            shifted = at == list(range(longest))
            hint = " Count from the row's own first token, not from the first column." if shifted else ""
            raise Wrong(
                f"{case}: the real tokens of row {b} should be at {right_positions[b][pad:]}, not {at[pad:]}.{hint}"
            )
        if min(at) < 0:
            raise Wrong(f"{case}: row {b} has a negative position; the embedding has none. Give pads position 0.")


def _layout_of(answer: LeftPad) -> Callable[[Rows, int], tuple[State, Step]]:
    """The learner's function as the engine's `prompts` part."""

    def lay_out(rows: Rows, room: int) -> tuple[State, Step]:
        state, first = right_aligned(rows, room)
        tokens, positions = (torch.tensor(part) for part in answer(rows))
        state.tokens[:, : tokens.shape[1]] = tokens
        return state, first._replace(ids=tokens.flatten(), positions=positions.flatten())

    return lay_out


def _clipped(text: str, width: int = 70) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


__all__ = ["PROMPTS", "exercise", "picture", "predict", "prompts", "rows_over_time", "verdict"]
