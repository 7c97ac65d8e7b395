"""The timelines of a decode step, kept beside the recorded results of the same workload."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eet_lab.bench import load_result
from eet_lab.bench.timeline import encode, read_timelines, write_trace
from eet_lab.bench.timeline_steps import timelines
from eet_lab.bench.workloads import Workload
from eet_lab.paths import PACKAGE
from h200.recorded import asked
from h200.session import Session


def recorded_timeline(workload: str, result: str) -> Callable[[Session], Any]:
    """The baseline's step and that of everything, put into a recorded result such as "compare-gpt2-xl".

    That is the file of this session if it has recorded one, else the one that the package ships; it is written to OUT,
    and OUT also gets the timelines alone and a trace for Perfetto.
    """

    def work(session: Session) -> Any:
        sized = session.sized(Workload.parse(workload))
        model = session.model(sized.model)
        found = timelines(model, recipe="all", baseline="baseline", **asked(session, model, sized))
        kept = encode(found)
        _write(session.out / f"timeline-{result}.json", kept)
        write_trace(session.out / f"trace-{result}.json", found)
        told = {name: _told(timeline) for name, timeline in found._asdict().items()}
        print(json.dumps(told, indent=1), flush=True)
        return told | {"file": _put_into(_newest(session, result), session, result, kept)}

    return work


def _told(timeline: Any) -> dict[str, Any]:
    """What to look at before it is shipped."""
    facts = ("recipe", "num_columns", "step_us", "unprofiled_us", "num_launches", "device_busy_us", "remark")
    return {name: getattr(timeline, name) for name in facts} | {
        "busy_share": timeline.busy_share,
        "spans": dict(Counter(span.kind for span in timeline.spans)),
        "names": dict(Counter(span.name for span in timeline.spans if span.lane == "device").most_common(12)),
        "with_bytes": sum(span.num_bytes is not None for span in timeline.spans),
    }


def _newest(session: Session, result: str) -> Path:
    here = session.out / f"recorded-{result}.json"
    return here if here.exists() else PACKAGE / "recorded" / f"h200-{result}.json"


def _put_into(path: Path, session: Session, result: str, kept: dict[str, Any]) -> str:
    content = json.loads(path.read_text(encoding="utf-8")) | {"timeline": kept}
    target = session.out / f"recorded-{result}.json"
    _write(target, content)
    load_result(target)
    read_timelines(target)
    return target.name


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")
