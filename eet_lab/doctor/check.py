"""One row of the doctor's table, and the table as text and as HTML."""

from __future__ import annotations

import html
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "warn", "fail"]

_SIGNS: dict[Status, str] = {"ok": "ok", "note": "note", "warn": "WARN", "fail": "FAIL"}
_TERMINAL: dict[Status, str] = {"ok": "32", "note": "36", "warn": "33", "fail": "31;1"}
_PAGE: dict[Status, str] = {"ok": "#2e7d32", "note": "#0277bd", "warn": "#b26a00", "fail": "#c62828"}


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found and, unless all is well, what to type.

    `note` is a fact that limits what can be shown ("CPU mode"), `warn` a likely surprise, `fail` a defect.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def to_text(checks: Sequence[Check], color: bool = False, width: int | None = None) -> str:
    """The table for a terminal; the last line sums it up."""
    width = width or max(shutil.get_terminal_size((100, 24)).columns, 60)
    name_width = max((len(check.name) for check in checks), default=0)
    indent = " " * (name_width + 8)
    lines = []
    for check in checks:
        sign = f"{_SIGNS[check.status]:<4}"
        if color:
            sign = f"\x1b[{_TERMINAL[check.status]}m{sign}\x1b[0m"
        [first, *rest] = textwrap.wrap(check.found, width - len(indent)) or [""]
        lines.append(f"{sign}  {check.name:<{name_width}}  {first}")
        lines += [indent + line for line in rest]
        # Not wrapped: a command that is broken over lines cannot be copied.
        lines += [f"{indent}-> {line}" for line in check.remedy.splitlines()]
    return "\n".join([*lines, "", summary(checks)])


def to_html(checks: Sequence[Check]) -> str:
    """The table for a notebook; needs no style sheet."""
    cell = "style='text-align:left;vertical-align:top;padding:2px 10px'"
    rows = []
    for check in checks:
        sign = f"<b style='color:{_PAGE[check.status]}'>{_SIGNS[check.status]}</b>"
        remedy = f"<br><code>{html.escape(check.remedy)}</code>".replace("\n", "<br>") if check.remedy else ""
        rows.append(
            f"<tr><td {cell}>{sign}</td><td {cell}>{html.escape(check.name)}</td>"
            f"<td {cell}>{html.escape(check.found)}{remedy}</td></tr>"
        )
    return (
        f"<table class='eet-doctor'><caption {cell}>{html.escape(summary(checks))}</caption>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def summary(checks: Sequence[Check]) -> str:
    """One line for the whole table."""
    num_failed = sum(check.status == "fail" for check in checks)
    if num_failed:
        return f"{num_failed} of {len(checks)} checks failed: do what stands behind ->"
    if any(check.name == "GPU" and check.status == "note" for check in checks):
        return "Nothing is broken. CPU mode: everything runs except the CUDA kernels and what needs them."
    return "Nothing is broken."
