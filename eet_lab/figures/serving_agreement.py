"""A simulation beside what was measured on the same traffic: the numbers of both, and how far apart they are."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from eet_lab.figures import theme
from eet_lab.scheduling.agreement import Compared
from eet_lab.words import brief

SIMULATED, MEASURED = "simulated", "measured"
COLORS = {SIMULATED: theme.BASELINE, MEASURED: theme.SELECTION}


def simulated_beside_measured(compared: Sequence[Compared], title: str = "") -> go.Figure:
    """Two bars for each number: times on the left, throughput on the right; above them, the simulation's error."""
    times = [each for each in compared if each.unit == "ms"]
    others = [each for each in compared if each.unit != "ms"]
    layout = {"barmode": "group", "bargap": 0.35, "legend": theme.LEGEND_BELOW | {"orientation": "h"}}
    margin = {"t": 56 if title else 30, "b": 70}
    fig = theme.subplots(
        1, 2, title, height=360, layout=layout | {"margin": margin}, column_widths=[0.8, 0.2], horizontal_spacing=0.09
    )
    for column, panel in enumerate((times, others), 1):
        for name in (SIMULATED, MEASURED):
            values = [each.simulated if name == SIMULATED else each.measured for each in panel]
            fig.add_bar(
                x=[each.name for each in panel], y=theme.rounded(values), name=name, legendgroup=name,
                showlegend=column == 1, marker={"color": COLORS[name]},
                text=[in_percent(each) if name == SIMULATED else "" for each in panel], textposition="outside",
                cliponaxis=False, hovertemplate=f"%{{x}}: %{{y}} {panel[0].unit}<extra>{name}</extra>",
                row=1, col=column,
            )  # fmt: skip
        highest = max(max(each.simulated, each.measured) for each in panel)
        fig.update_yaxes(title=panel[0].unit, range=[0, 1.15 * highest], row=1, col=column)
    return fig


def agreement_table(compared: Sequence[Compared]) -> str:
    """The same as an HTML table."""
    head = "".join(f"<th>{each}</th>" for each in ("", SIMULATED, MEASURED, "error of the simulation"))
    rows = "".join(
        f"<tr><th>{escape(each.name)}, {escape(each.unit)}</th><td>{brief(each.simulated)}</td>"
        f"<td>{brief(each.measured)}</td><td>{in_percent(each)}</td></tr>"
        for each in compared
    )
    return f'<div class="eet-result"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def in_percent(compared: Compared) -> str:
    """The error with its sign."""
    return f"{100 * compared.error:+.0f} %".replace("-", "−")
