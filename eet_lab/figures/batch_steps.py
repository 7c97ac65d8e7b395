"""A batch step by step: which columns a recipe reads, and what a dense mask covers. Static figures with a slider.

B rows, Q queries, K columns of the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from eet_lab.figures import theme
from eet_lab.labels import in_titles
from eet_lab.models import Model
from eet_lab.technique import Recipe
from eet_lab.words import counted

CELLS = {
    "not read yet": "rgba(125,133,144,0.12)",
    "pad": "rgba(125,133,144,0.45)",
    "read before": "rgba(59,130,246,0.22)",
    "read in this step": "rgba(59,130,246,0.6)",
    "generated": theme.GAIN,
}
"""Kinds of cells and their colours: the page shows through where words stand, so that they can have its own ink."""
UNUSED, WAITS, PAD, READ, NOW, NEW = range(6)
MARKS = {UNUSED: "", PAD: "·", NEW: ""}
"""What stands on cells that hold no token of a prompt."""


class TokenMatrix(NamedTuple):
    """Who sits in which column [B,K] once all is generated: UNUSED, PAD, READ or NEW. The first step reads columns up
    to `ends` [B].
    """

    kinds: list[list[int]]
    ends: list[int]


def token_matrix(prompts: Sequence[Sequence[int]], recipe: str, num_new: int) -> TokenMatrix:
    """These prompts as the recipe's schedule lays them out. Pads are those that the first pass computes."""
    schedule, lengths = Recipe.parse(recipe).parts.schedule, [len(prompt) for prompt in prompts]
    pads, counts = schedule.pads(lengths), schedule.first_counts(lengths)
    found = [[*[PAD] * pad, *[READ] * length, *[NEW] * num_new] for pad, length in zip(pads, lengths, strict=True)]
    width = max(map(len, found))
    kinds = [row + [UNUSED] * (width - len(row)) for row in found]
    return TokenMatrix(kinds, [pad + count for pad, count in zip(pads, counts, strict=True)])


def token_steps(prompts: Sequence[str], *recipes: str, model: Model, num_new: int = 5) -> go.Figure:
    """The token matrix of each recipe, step by step, all recipes on one slider."""
    rows = [model.encode(prompt) or [model.config.bos_id] for prompt in prompts]
    words = [[model.decode([token]).replace("\n", "⏎") for token in row] for row in rows]
    found = [token_matrix(rows, recipe, num_new) for recipe in recipes]
    height = 210 + (60 + 34 * len(prompts)) * len(recipes)
    titles = [*map(in_titles, recipes)]
    fig = theme.grid(len(recipes), 1, "", height, subplot_titles=titles, vertical_spacing=0.3 / len(recipes))
    for place, matrix in enumerate(found, 1):
        fig.add_heatmap(
            zmin=0, zmax=len(CELLS), colorscale=_flat(("rgba(0,0,0,0)", *CELLS.values())), showscale=False, xgap=2,
            ygap=3, texttemplate="%{text}", textfont={"size": 10, "color": theme.INK}, hoverinfo="skip",
            z=_cells(matrix, 1), text=_words(matrix, words), row=place, col=1,
        )  # fmt: skip
    _legend(fig, CELLS)
    num_steps = [_num_steps(matrix) for matrix in found]
    steps = {}
    for step in range(1, max(num_steps) + 1):
        now = [(matrix, min(step, last)) for matrix, last in zip(found, num_steps, strict=True)]
        told = (f"step {step}: {title} {_told(*each, step > each[1])}" for title, each in zip(titles, now, strict=True))
        steps[step] = "<br>".join(told), [go.Heatmap(z=_cells(matrix, at)) for matrix, at in now]
    fig.update_yaxes(title="row", autorange="reversed", dtick=1, showgrid=False, zeroline=False)
    fig.update_xaxes(showgrid=False, zeroline=False)
    fig.update_xaxes(title="column", row=len(found), col=1)
    return theme.with_slider(fig, steps, range(len(found)), pace_ms=700, legend_y=LEGEND_Y)


def _cells(matrix: TokenMatrix, step: int) -> np.ndarray:
    """Kinds of all cells once step `step` is done, as bytes: of a list, a saved notebook has a line for each number."""
    kinds, column = np.array(matrix.kinds), np.arange(len(matrix.kinds[0]))
    read = np.array(matrix.ends)[:, None] + step - 1
    now_from = 0 if step == 1 else read - 1
    prompts = np.select([column >= read, column >= now_from], [WAITS, NOW], READ)
    return np.select([kinds == READ, (kinds == NEW) & (column > read)], [prompts, UNUSED], kinds).astype(np.int8)


def _num_steps(matrix: TokenMatrix) -> int:
    """Until the last row has its last token."""
    return max(len(row) - row.count(UNUSED) - end for row, end in zip(matrix.kinds, matrix.ends, strict=True))


def _words(matrix: TokenMatrix, prompts: Sequence[Sequence[str]]) -> list[list[str]]:
    """What stands on all cells, in every step."""
    lefts = map(iter, prompts)
    return [
        [MARKS[kind] if kind in MARKS else next(left) for kind in row]
        for row, left in zip(matrix.kinds, lefts, strict=True)
    ]


def _told(matrix: TokenMatrix, step: int, is_done: bool) -> str:
    if is_done:
        return "is done"
    each = [end + step - 1 for end in matrix.ends]
    read = max(each)
    generate = sum(row[end] == NEW for row, end in zip(matrix.kinds, each, strict=True) if end < len(row))
    columns = f"columns 0 to {read - 1}" if step == 1 and read > 1 else f"column {read - 1}"
    return f"reads {columns}, {generate} of {counted(len(matrix.kinds), 'row')} get a new token"


SEEN_WORDS = ("hidden: a pad", "hidden: the future", "seen")
MASK_COLORS = ("rgba(125,133,144,0.5)", "rgba(239,68,68,0.45)", theme.SELECTION)
OLD_COLORS = ("rgba(125,133,144,0.15)", "rgba(239,68,68,0.12)", "rgba(59,130,246,0.25)")


def mask_steps(prompts: Sequence[str], *, model: Model, num_new: int = 4) -> go.Figure:
    """The dense mask of each step [B,1,Q,K], one panel a row; cells of earlier steps are faded."""
    lengths = [len(model.encode(prompt)) for prompt in prompts]
    Q, pads = max(lengths), [max(lengths) - length for length in lengths]
    fig = theme.grid(1, len(pads), "", 480, subplot_titles=[f"row {b}" for b in range(len(pads))], shared_yaxes=True)
    for b, pad in enumerate(pads):
        fig.add_heatmap(
            z=_mask(Q, pad, 1, num_new), zmin=0, zmax=6,
            colorscale=_flat(("rgba(0,0,0,0)", *OLD_COLORS, *MASK_COLORS)), showscale=False, xgap=1, ygap=1,
            hoverinfo="skip", row=1, col=b + 1,
        )  # fmt: skip
    _legend(fig, dict(zip(SEEN_WORDS, MASK_COLORS, strict=True)))
    steps = {
        step: (_mask_told(Q, pads, step), [go.Heatmap(z=_mask(Q, pad, step, num_new)) for pad in pads])
        for step in range(1, num_new + 1)
    }
    fig.update_xaxes(title="key", showgrid=False, zeroline=False, constrain="domain")
    fig.update_yaxes(autorange="reversed", showgrid=False, zeroline=False)
    fig.update_yaxes(title="query", col=1)
    return theme.with_slider(fig, steps, range(len(pads)), pace_ms=900, legend_y=LEGEND_Y)


def _mask(Q: int, pad: int, step: int, num_new: int) -> np.ndarray:
    """Cells [queries, keys] up to this step, as bytes: 0 none yet, 1 to 3 of an earlier step, 4 to 6 of this one."""
    begin, end = (0, Q) if step == 1 else (Q + step - 2, Q + step - 1)
    query, key = np.indices((Q + num_new - 1,) * 2)
    look = np.select([np.minimum(query, key) < pad, key > query], [1, 2], 3)  # as in SEEN_WORDS
    drawn = (query < end) & (key < np.maximum(Q, query + 1))  # the first pass has a square
    return np.where(drawn, look + 3 * (query >= begin), 0).astype(np.int8)


def _mask_told(Q: int, pads: Sequence[int], step: int) -> str:
    """The mask's shape, how much of it is seen, and the range of keys that says the same."""
    queries = range(Q) if step == 1 else range(Q + step - 2, Q + step - 1)
    K = queries[-1] + 1
    seen = sum(int((_mask(Q, pad, step, step) == 6).sum()) for pad in pads)
    shape, whole = f"step {step}: a new mask [{len(pads)}, 1, {len(queries)}, {K}]", len(pads) * len(queries) * K
    ranges = ", ".join(f"{pad} to {K - 1}" for pad in pads)
    last = "the last query" if step == 1 else "the query"
    return f"{shape}, {seen} of {counted(whole, 'score')} used; {last} sees keys {ranges}"


LEGEND_Y = 1.1
"""The legend's place, above the panels' own titles."""


def _legend(fig: go.Figure, colors: dict[str, str]) -> None:
    for name, color in colors.items():
        marker = {"symbol": "square", "size": 11, "color": color}
        fig.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=name, row=1, col=1)


def _flat(colors: Sequence[str]) -> list[list[float | str]]:
    """A colour scale with one flat colour for each whole number."""
    n = len(colors)
    return [[(i + side) / n, color] for i, color in enumerate(colors) for side in (0, 1)]
