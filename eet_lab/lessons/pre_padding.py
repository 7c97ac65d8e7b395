"""Lesson 1, pre-padding: why read a prompt token by token, if one pass can read them all?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import index
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import torch

from eet_lab.bench import Comparison, Measurement
from eet_lab.bench.measured import p50
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.figures import theme
from eet_lab.figures.batch_steps import token_steps
from eet_lab.labels import in_titles
from eet_lab.lessons import recorded
from eet_lab.lessons.batch import PROMPTS, SHORT, clipped, lengths
from eet_lab.lessons.exercise import Exercise, Wrong, ask, formula, named
from eet_lab.lessons.prediction import Prediction, after, after_prediction
from eet_lab.lessons.show import Shown, here, in_words, table, there
from eet_lab.models import Model
from eet_lab.models.decoder import Decoder, forward, logits, op_by_op
from eet_lab.models.weights import placed
from eet_lab.ops.types import fresh
from eet_lab.parts import Parts
from eet_lab.parts.attend import DenseMask
from eet_lab.parts.batches import left_padded
from eet_lab.texts import Output
from eet_lab.words import brief, ms_words, times


def prompts(model: Model) -> Shown:
    """The lesson's batch: how long each prompt is."""
    rows = [[f"{b}", f"{len(model.encode(p))}", clipped(p)] for b, p in enumerate(PROMPTS)]
    return Shown(table(["row", "tokens", "prompt"], rows))


def predict(model: Model) -> Prediction:
    """How many times sooner will the first token come? Reveals how many steps there are, and no time."""
    longest = max(lengths(model))
    return Prediction(
        "Read in one parallel pass instead of token by token: how many times sooner will the last row of this batch "
        "have its first new token?",
        reveal=f"The number of steps is easy to count: {longest} against 1. Does the time follow it? Measure.",
        number=(1, 1000),
        unit="times sooner",
    )


def picture(model: Model, *recipes: str) -> Shown:
    """Three short prompts, step by step, laid out as each recipe lays them out."""
    return Shown(token_steps(SHORT, *recipes, model=model))


class _Rows(NamedTuple):
    """When each row of a run had its first new token and its last one, ms."""

    recipe: str
    num_steps: int
    first_ms: list[float]
    last_ms: list[float]


def rows_over_time(model: Model, *outputs: Output, guess: Prediction | None = None) -> Shown:
    """When each row read its prompt and when it generated, one figure for each run, on the same time axis.

    With a `guess`, only once the reader has made it: two runs side by side give the answer away.
    """
    if guess is not None:
        return after(guess, lambda: rows_over_time(model, *outputs))
    runs = [
        _Rows(
            in_titles(str(output.recipe)),
            len(output.run.step_ms),
            [ms or output.run.total_ms for ms in output.run.first_ms],
            [ms or output.run.total_ms for ms in output.run.last_ms],
        )
        for output in outputs
    ]
    return Shown(here(model), *_figures(runs))


@after_prediction
def rows_on_the_h200(guess: Prediction) -> Shown:
    """The same picture of GPT-2 XL on an H200."""
    result = recorded.batch()
    measured = [recorded.rung(name).measurement for name in ("", "pre_padding")]
    runs = [_recorded_rows(m, result.prompt_lengths, at == 0) for at, m in enumerate(measured)]
    told = f"First tokens and ends are medians of {measured[0].repeats} runs; the rest is drawn from one of them."
    return Shown(there(result), *_figures(runs), told)


def _recorded_rows(m: Measurement, prompt_lengths: Sequence[int], token_by_token: bool) -> _Rows:
    """One run, stretched so that its first tokens and its end are where the medians of all runs have them."""
    ends, first = [0.0, *accumulate(m.step_ms)], [n if token_by_token else 1 for n in prompt_lengths]
    last = [n + len(tokens) - 1 for n, tokens in zip(first, m.tokens, strict=True)]
    known, medians = [0.0, ends[max(first)], ends[-1]], [0.0, p50(m.ttft_ms), p50(m.total_ms)]
    ends = np.interp(ends, known, [at if ms is None else ms for at, ms in zip(known, medians, strict=True)]).tolist()
    return _Rows(in_titles(m.recipe), len(m.step_ms), [ends[n] for n in first], [ends[n] for n in last])


def _figures(runs: Sequence[_Rows]) -> list[Any]:
    end = max(max(run.last_ms) for run in runs)
    words = " and ".join(f"{ms_words(max(run.first_ms))} ({run.recipe})" for run in runs)
    return [
        *(_rows_figure(run, end) for run in runs),
        f"Look at where green begins: the last row has its first new token after {words}.",
    ]


def _rows_figure(run: _Rows, end: float) -> go.Figure:
    rows = list(range(len(run.first_ms)))
    fig = theme.figure(f"Rows over time, {run.recipe}: {run.num_steps} steps", height=110 + 30 * len(rows))
    for name, start, stop, color in (
        ("reads its prompt", [0.0] * len(rows), run.first_ms, theme.BASELINE),
        ("generates", run.first_ms, run.last_ms, theme.GAIN),
    ):
        fig.add_bar(
            y=rows, x=theme.rounded(b - a for a, b in zip(start, stop, strict=True)), base=theme.rounded(start),
            orientation="h", name=name, marker_color=color,
            hovertemplate="row %{y}: " + name + " for %{x:" + theme.DIGITS + "} ms<extra></extra>",
        )  # fmt: skip
    fig.update_layout(barmode="overlay", bargap=0.25)
    fig.update_xaxes(title="ms since the run began", range=[0, end * 1.02])
    fig.update_yaxes(title="row", autorange="reversed", dtick=1)
    return fig


@after_prediction
def verdict(guess: Prediction, result: Comparison) -> Shown:
    """The reader's prediction and two computed ones beside what was measured, here and on an H200."""
    a, b = result.baseline.ttft_ms, result.selection.ttft_ms
    if a is None or b is None:
        return Shown("A row got no token, so there is no time to first token: run the comparison again.")
    longest, num_rows = max(result.prompt_lengths), len(result.prompt_lengths)
    tokens, measured = num_rows * longest, a.p50 / b.p50
    step_ms = result.baseline.tpot_ms.p50 if result.baseline.tpot_ms else a.p50 / longest
    big = recorded.batch()
    far_ms = [m.ttft_ms.p50 for m in (recorded.rung(n).measurement for n in ("", "pre_padding")) if m.ttft_ms]
    far, far_longest = far_ms[0] / far_ms[1], max(big.prompt_lengths)
    counted = table(
        ["until every row has a token", "baseline", "pre-padding", "ratio"],
        [
            ["steps (counted)", f"{longest}", "1", f"{longest}"],
            ["tokens computed, pads included (counted)", f"{tokens:,}", f"{tokens:,}", "1"],
            ["time to first token (measured)", ms_words(a.p50), ms_words(b.p50), brief(measured)],
            ["GPT-2 XL on an H200: steps", f"{far_longest}", "1", f"{far_longest}"],
            ["GPT-2 XL on an H200: time to first token", *map(ms_words, far_ms), brief(far)],
        ],
    )
    bars = {
        "you": float(guess.value),
        "if every step took the same time": float(longest),
        "if only arithmetic took time": 1.0,
        "measured here": measured,
        f"H200, GPT-2 XL, {far_longest} steps": far,
    }
    fig = theme.figure("How many times sooner: predicted and measured", height=270)
    fig.add_bar(
        y=list(bars), x=list(bars.values()), orientation="h", text=[*map(times, bars.values())],
        marker_color=[theme.BASELINE] * 3 + [theme.GAIN] * 2, hoverinfo="skip", textposition="outside",
        cliponaxis=False,
    )  # fmt: skip
    fig.update_xaxes(theme.log_axis(0.9, 1300, "times sooner"))
    fig.update_yaxes(autorange="reversed")
    why = (
        f"Why does it lie between the two? The arithmetic is the same: the baseline computes {longest} steps of "
        f"{num_rows} tokens, pre-padding one pass of {tokens:,}. The one pass reads every weight once and not "
        f"{longest} times, and calls every operation once and not {longest} times. The pass is not free: it took as "
        f"long as {b.p50 / step_ms:.1f} decode steps here. On a CPU the arithmetic soon takes most of the time. A GPU "
        f"has far more arithmetic to spare: on the H200 the first token came {far:.0f} times sooner, and the count of "
        f"steps gives {far_longest}."
    )
    return Shown(counted, fig, why, there(big), in_words(result, "ttft_ms", "The first token here"))


def num_steps(lengths: Sequence[int], new_tokens: int) -> tuple[int, int]:
    """The step that reads a row's last prompt token gives its first new one; both end with the longest row."""
    return max(lengths) + new_tokens - 1, new_tokens


count_steps = formula(
    num_steps,
    {
        "prompts of 3 and 5 tokens, 4 new": ([3, 5], 4),
        "one prompt of 960 tokens, 64 new": ([960], 64),
        "this lesson's batch, 32 new": ([3, 18, 44, 124], 32),
        "one prompt of 1 token, 8 new": ([1], 8),
    },
    {
        "The step that reads the last prompt token gives the first new token already: one step less.":
            lambda lengths, new: (max(lengths) + new, new + 1),
        "Rows run side by side: the longest prompt counts, not the sum.":
            lambda lengths, new: (sum(lengths) + new - 1, None),
        "The batch is done when its longest row is, not its shortest.":
            lambda lengths, new: (min(lengths) + new - 1, None),
        "That is until the first token. Count the steps of the whole run.": lambda lengths, new: (max(lengths), 1),
        "The first pass gives a token, too.": lambda lengths, new: (max(lengths) + new - 2, new - 1),
    },
    "The longer the prompts are relative to what is generated, the more there is to gain. Look at the last line: "
    "a prompt of one token gains nothing.",
    names=("steps token by token", "steps with pre-padding"),
    otherwise="Count the steps until the longest prompt is read, then one for each further token.",
)  # fmt: skip


def padded_share(lengths: Sequence[int]) -> float:
    """Pads of the rectangle, over all its cells."""
    return 1 - sum(lengths) / (len(lengths) * max(lengths))


share_of_pads = formula(
    padded_share,
    {
        "prompts of 3 and 5 tokens": ([3, 5],),
        "this lesson's batch": ([3, 18, 44, 124],),
        "eight prompts of 64 tokens": ([64] * 8,),
        "the H200's batch": ([16, 32, 48, 64, 80, 96, 112, 128],),
    },
    {
        "That is the share of real tokens.": lambda lengths: sum(lengths) / (len(lengths) * max(lengths)),
        "Divide by all cells of the rectangle, not by the real tokens.":
            lambda lengths: len(lengths) * max(lengths) / sum(lengths) - 1,
        "That is the number of pads; divide it by the cells of the rectangle.":
            lambda lengths: len(lengths) * max(lengths) - sum(lengths),
        "That is a percentage; return a share between 0 and 1.": lambda lengths: 100 * padded_share(lengths),
    },
    "These cells are computed by every linear layer and thrown away. Sort requests by length, or pack their tokens "
    "without pads, and the share falls.",
    names=("share of pads",),
    otherwise="The rectangle has a row for each prompt, and as many columns as the longest one has tokens.",
)  # fmt: skip


Rows = Sequence[Sequence[int]]
LeftPad = Callable[[Rows], tuple[list[list[int]], list[list[int]]]]


def padding(model: Model) -> Exercise:
    """Write left padding; a right answer is run by the engine in place of ours."""
    return Exercise(lambda answer: _judge_padding(answer, model), left_pad)


def left_pad(prompts: Rows) -> tuple[list[list[int]], list[list[int]]]:
    """Right-aligned rows of tokens, 0 for a pad, and each token's position in its own sequence."""
    longest = max(len(prompt) for prompt in prompts)
    pads = [longest - len(prompt) for prompt in prompts]
    tokens = [[0] * pad + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)]
    positions = [[max(column - pad, 0) for column in range(longest)] for pad in pads]
    return tokens, positions


def _judge_padding(answer: LeftPad, model: Model) -> tuple[str, tuple[Any, ...]]:
    for rows in ([[7, 8, 9], [5]], [[4]], [[1, 2], [3, 4]], [[6], [1, 2, 3, 4, 5], [7, 8]]):
        given = ask(answer, [list(row) for row in rows])
        if not (isinstance(given, tuple) and len(given) == 2):
            raise Wrong(f"return two things, tokens and positions, not {named(given)}.")
        _judge_layout(rows, *given)
    decoder = placed(model.decoder, torch.device("cpu"), torch.float32)
    rows = [model.encode(prompt) for prompt in SHORT]
    settings = Settings(max_new_tokens=8)
    yours = _continued(answer, decoder, rows, settings.max_new_tokens)
    ours = Engine(decoder).generate(rows, settings).tokens
    if yours != ours:
        raise Wrong("the layout looks right, but the model generated other tokens than the baseline with it.")
    told = [[clipped(p), model.decode(tokens)] for p, tokens in zip(SHORT, yours, strict=True)]
    message = "The model just read your layout, and generated the same tokens as the baseline:"
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


@torch.inference_mode()
def _continued(answer: LeftPad, decoder: Decoder, rows: Rows, num_new: int) -> tuple[tuple[int, ...], ...]:
    """Greedy tokens of passes that the learner's function lays out: each reads its rows whole, without a KV cache."""
    ops, read = Parts().ops.bind(fresh), [list(row) for row in rows]
    for _ in range(num_new):
        tokens, positions = (torch.tensor(part).flatten() for part in answer([list(row) for row in read]))
        batch = left_padded(read)._replace(ids=tokens, positions=positions)
        hidden = forward(decoder, ops, DenseMask(ops, batch, None, empty=fresh), batch, op_by_op)
        newest = logits(decoder, ops, hidden[batch.last]).argmax(-1)
        for row, token in zip(read, newest.tolist(), strict=True):
            row.append(token)
    return tuple(tuple(row[len(prompt) :]) for row, prompt in zip(read, rows, strict=True))
