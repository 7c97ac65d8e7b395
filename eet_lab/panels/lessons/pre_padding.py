"""Lesson 1, pre-padding: why read a prompt token by token, if one pass can read them all?"""

from __future__ import annotations

import plotly.graph_objects as go

from eet_lab.bench import Comparison
from eet_lab.models import Model
from eet_lab.panels import theme
from eet_lab.panels.lessons.batch import PROMPTS, SHORT, clipped, lengths
from eet_lab.panels.lessons.left_pad import exercise
from eet_lab.panels.lessons.prediction import Prediction
from eet_lab.panels.lessons.show import Shown, after, table
from eet_lab.panels.pictures import token_matrix
from eet_lab.texts import Output


def prompts(model: Model) -> Shown:
    """The lesson's batch: how long each prompt is, and on what it will run."""
    rows = [[f"{b}", f"{len(model.encode(p))}", clipped(p)] for b, p in enumerate(PROMPTS)]
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


def picture(recipe: str, model: Model) -> Shown:
    """Three short prompts as a token matrix, laid out as the recipe lays them out."""
    return Shown(token_matrix(SHORT, recipe, model=model, num_new=5))


def rows_over_time(*outputs: Output, guess: Prediction | None = None) -> Shown:
    """When each row read its prompt and when it generated, one figure for each run, on the same time axis.

    With a `guess`, only once the reader has made it: two runs side by side give the answer away.
    """
    if guess is not None:
        return after(guess, lambda: rows_over_time(*outputs))
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


__all__ = ["PROMPTS", "exercise", "picture", "predict", "prompts", "rows_over_time", "verdict"]
