"""Pictures that explain an idea: the token matrix, the mask.

B rows, Q queries, K columns of the KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eet_lab.models import Model
from eet_lab.panels import theme
from eet_lab.technique import Recipe

Prompts = Sequence[str | Sequence[int]]

KINDS = ("unused", "pad", "read at once", "read token by token", "generated")
KIND_COLORS = ("rgba(0,0,0,0)", "rgba(125,133,144,0.35)", theme.SELECTION, "#93b8f8", theme.GAIN)


def token_matrix(
    prompts: Prompts, recipe: Recipe | str = "", *, num_new: int = 6, model: Model | None = None
) -> go.Figure:
    """Who sits in which column: pads, prompt tokens read at once or one a step, and generated ones.

    The layout is asked of the recipe's own `prompts` part; pads are those that the first pass computes. `prompts` are
    texts or lists of token ids; without a `model` a text's words count as its tokens.
    """
    recipe = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
    rows, names = _tokens(prompts, model)
    state, first = recipe.parts.prompts(rows, num_new)
    kinds, labels, num_columns = [], [], state.tokens.shape[1]
    at_once = set(zip(first.rows.tolist(), first.columns.tolist(), strict=True))
    num_pads = len(first.ids) - sum(span.count for span in first.spans)
    for row, (tokens, words) in enumerate(zip(rows, names, strict=True)):
        pad = first.spans[row].num_pad
        end = pad + len(tokens)
        kinds.append(
            [_kind(column, pad, end, end + num_new, (row, column) in at_once) for column in range(num_columns)]
        )
        shown = ["·" if (row, column) in at_once else "" for column in range(pad)] + words + ["▪"] * num_new
        labels.append(shown + [""] * (num_columns - len(shown)))
    steps = max(map(len, rows)) - first.extent + 1
    fig = theme.figure(
        f"Token matrix, {recipe}: {steps} step{'s' if steps > 1 else ''} until every row generates, {num_pads} pads",
        height=110 + 34 * len(rows),
    )
    fig.add_heatmap(
        z=kinds, zmin=0, zmax=len(KINDS) - 1, colorscale=_steps(KIND_COLORS), showscale=False, xgap=2, ygap=3,
        text=labels, texttemplate="%{text}", textfont={"size": 10},
        customdata=[[KINDS[k] for k in row] for row in kinds],
        hovertemplate="row %{y}, column %{x}: %{customdata}<extra></extra>",
    )  # fmt: skip
    for kind, color in list(zip(KINDS, KIND_COLORS, strict=True))[1:]:
        fig.add_scatter(
            x=[None], y=[None], mode="markers", marker={"symbol": "square", "size": 11, "color": color}, name=kind
        )
    fig.update_layout(legend={"y": -0.18, "yanchor": "top", "x": 0, "xanchor": "left"})
    fig.update_yaxes(title="row", autorange="reversed", dtick=1, showgrid=False, zeroline=False)
    fig.update_xaxes(title="", showgrid=False, zeroline=False, side="bottom")
    return fig


def mask_heatmap(prompts: Prompts, recipe: Recipe | str = "pre_padding", *, model: Model | None = None) -> go.Figure:
    """The dense mask of the first pass, [B,1,Q,K], one panel a row: what a query sees, the future, and pads.

    Everything but "seen" is work that is computed, then masked away.
    """
    recipe = Recipe.parse(recipe) if isinstance(recipe, str) else recipe
    rows, _ = _tokens(prompts, model)
    _, first = recipe.parts.prompts(rows, 1)
    Q = first.extent
    fig = make_subplots(1, len(rows), subplot_titles=[f"row {b}" for b in range(len(rows))], shared_yaxes=True)
    seen = 0
    for b, span in enumerate(first.spans):
        grid = [[_visible(q, k, span.num_pad) for k in range(Q)] for q in range(Q)]
        seen += sum(row.count(2) for row in grid)
        fig.add_heatmap(
            row=1, col=b + 1, z=grid, zmin=0, zmax=2, xgap=1, ygap=1, showscale=False,
            colorscale=_steps(("rgba(125,133,144,0.35)", "rgba(239,68,68,0.28)", theme.SELECTION)),
            customdata=[[("pad", "future", "seen")[v] for v in row] for row in grid],
            hovertemplate="query %{y}, key %{x}: %{customdata}<extra></extra>",
        )  # fmt: skip
    share = seen / (len(rows) * Q * Q)
    style = theme.figure(
        f"Mask [{len(rows)}, 1, {Q}, {Q}]: {share:.0%} of it is seen, the rest is computed and thrown away", height=330
    ).layout
    fig.update_layout(style).update_layout(margin={"t": 70})
    fig.update_xaxes(title="key", showgrid=False, zeroline=False, constrain="domain")
    fig.update_yaxes(autorange="reversed", showgrid=False, zeroline=False)
    fig.update_yaxes(title="query", col=1)
    return fig


def _tokens(prompts: Prompts, model: Model | None) -> tuple[list[list[int]], list[list[str]]]:
    """Token ids of every prompt, and what to write on each token."""
    rows, names = [], []
    for prompt in prompts:
        if not isinstance(prompt, str):
            ids, words = list(prompt), [str(token) for token in prompt]
        elif model is not None:
            ids = model.encode(prompt) or [model.config.bos_id]
            words = [model.decode([token]).replace("\n", "⏎") for token in ids]
        else:
            words = prompt.split() or ["BOS"]
            ids = [1] * len(words)
        rows.append(ids)
        names.append(words)
    return rows, names


def _kind(column: int, pad: int, end: int, last: int, at_once: bool) -> int:
    if column < pad:
        return 1 if at_once else 0
    if column >= end:
        return 4 if column < last else 0
    return 2 if at_once else 3


def _visible(query: int, key: int, num_pad: int) -> int:
    """0: a pad is involved, 1: the future, 2: seen."""
    return 0 if min(query, key) < num_pad else 1 if key > query else 2


def _steps(colors: Sequence[str]) -> list[list[float | str]]:
    """A colour scale with one flat colour for each whole number."""
    n = len(colors)
    return [[(i + side) / n, color] for i, color in enumerate(colors) for side in (0, 1)]
