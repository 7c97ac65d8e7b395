"""The list of kept runs."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Sequence
from typing import Any

from eet_lab.bench.measured import MiB
from eet_lab.words import brief
from eet_lab.workbench.history import History
from eet_lab.workbench.rows import KeptRun
from eet_lab.workbench.views.answer import VERDICTS

SHOWN = 60
"""Own runs on the page at first, and so many more each time that older ones are asked for."""
MOST_UPLOAD_BYTES = 7 * MiB
"""Jupyter's server takes messages of up to 10 MiB, and base64 makes four bytes of three."""
MOST_DOWNLOAD_BYTES = 2 * MiB
"""Packed: Jupyter's server drops messages past 1 MB a second, taken over three seconds."""


def runs_state(
    rows: Sequence[KeptRun],
    ticked: Sequence[str],
    shown: str,
    history: History,
    said: str,
    busy: bool,
    pages: int = 1,
    unfit: str = "",
) -> dict[str, Any]:
    """Rows as words; what can be done with those that are ticked, or why nothing can.

    Of the own runs the newest are listed, `pages` of them; recordings always are, and whatever is in use. `unfit` is
    why two that are ticked cannot be measured again.
    """
    both = [row for row in rows if row.id in ticked]
    in_use = {*ticked, shown, *(row.id for row in rows if row.pinned or not row.writable)}
    older = {row.id for row in [row for row in rows if row.writable][pages * SHOWN :]} - in_use
    listed = [row for row in rows if row.id not in older]
    devices = {row.device for row in rows if row.device and not row.recorded}
    unticked = "" if len(both) == 2 else "Tick two runs to see them side by side."
    return {
        "rows": [
            _row(row, label, row.id in ticked, row.id == shown, tell_device=len(devices) > 1)
            for row, label in zip(listed, _labels(listed), strict=True)
        ],
        "said": said,
        "can_compare": len(both) == 2,
        "can_measure": len(both) == 2 and not (busy or unfit),
        "why_not": unticked or unfit or ("Wait until the present run has ended." if busy else ""),
        "upload_mib": MOST_UPLOAD_BYTES // MiB,
        "folder": str(history.folder),
        "device": devices.pop() if len(devices) == 1 else "",
        "warning": history.warning or None,
        "more": len(older),
    }


def packed(content: bytes) -> bytes | None:
    """A file as it is sent to the page; None where it is too large for that."""
    small = gzip.compress(content, 6)
    return small if len(small) <= MOST_DOWNLOAD_BYTES else None


def _labels(rows: Sequence[KeptRun]) -> list[str]:
    """What each row is called where only words tell them apart; those of one second are numbered."""
    count: Counter[str] = Counter()
    found = []
    for row in rows:
        count[row.label] += 1
        found.append(row.label if count[row.label] == 1 else f"{row.label} ({count[row.label]})")
    return found


AS_IT_IS = ("id", "name", "recipe", "same", "note", "pinned", "when", "short_when", "writable")
"""What the page gets of a row as it is."""


def _row(row: KeptRun, label: str, ticked: bool, shown: bool, tell_device: bool) -> dict[str, Any]:
    return {
        **{name: getattr(row, name) for name in AS_IT_IS},
        "label": label,
        "kind": "recorded" if row.recorded else row.kind,
        "about": _about(row, tell_device),
        "origin": " · ".join(filter(None, [row.when, row.model, row.device])),
        "ttft": _ms(row.ttft_ms),
        "tpot": _ms(row.tpot_ms),
        "mib": "" if row.peak_bytes is None else brief(row.peak_bytes / MiB),
        "same_kind": VERDICTS[row.same][2] if row.same in VERDICTS else "dim",
        "ticked": ticked,
        "shown": shown,
        "problem": row.problem.removeprefix(f"{row.name} "),
    }


def _about(row: KeptRun, tell_device: bool) -> str:
    """What a name does not tell: which kind of run, and of what; a recording's device is in its name."""
    if row.problem or not row.writable:
        return "recorded" if row.recorded else ""
    kind = "recorded" if row.recorded else "" if row.name.casefold().startswith(row.kind) else row.kind
    where = f"on {row.device}" if tell_device and row.device and not row.recorded else ""
    return ", ".join(filter(None, [kind, row.subject, where]))


def _ms(value: float | None) -> str:
    return "" if value is None else f"{brief(value)} ms"
