"""Take every row of a GPU in one process, beside the peers, and record the results that ship with the package.

    python benchmarks/run_h200.py --out OUT                all of it: under ten minutes on an H200
    python benchmarks/run_h200.py --out OUT --smoke        tiny models on the CPU: does the script run?

Writes OUT/<gpu>.jsonl (rows to append to benchmarks/), OUT/recorded-*.json (for eet_lab/recorded/) and OUT/report.json.
A part that fails is reported, and the others go on. `--minutes` is the budget: parts that would begin after it are left
out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from eet_lab import bench
from eet_lab.bench import environment as environments
from eet_lab.bench.cost import streaming_gb_per_s
from eet_lab.bench.peers import PEERS
from eet_lab.bench.race import OURS, race
from eet_lab.bench.rows import append
from eet_lab.bench.workloads import Workload
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.models import Model, load
from eet_lab.models.config import PRESETS, Config
from eet_lab.monitor import Sampler, open_source, record
from eet_lab.technique import everything, registry
from eet_lab.texts import as_recipe

HEADLINE = ["pre_padding", "mask_removal", "memory_reuse"]
RECIPES = ["baseline", *HEADLINE, ",".join(HEADLINE), "all"]


@dataclass(frozen=True)
class Sizes:
    """What is run: the real thing, or its smoke test."""

    small: str = "gpt2"
    large: str = "gpt2-xl"
    batch: int = 8
    low: int = 16
    high: int = 512
    new_tokens: int = 128
    repeats: int = 5
    large_repeats: int = 3
    single: tuple[int, int] = (128, 128)
    device: str | None = None


SMOKE = Sizes(
    "smoke", "smoke", batch=3, low=2, high=9, new_tokens=6, repeats=2, large_repeats=2, single=(4, 6), device="cpu"
)


@dataclass
class Session:
    """One call: parts run in order, each with its time, and what they found."""

    out: Path
    sizes: Sizes
    minutes: float
    start: float = field(default_factory=time.perf_counter)
    report: dict[str, Any] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)

    def part(self, name: str, work: Callable[[Session], Any]) -> None:
        """Run one part; keep what it returns, or why it failed."""
        begin = time.perf_counter()
        if begin - self.start > self.minutes * 60:
            self.keep(name, {"left out": f"the budget of {self.minutes:g} minutes was spent"})
            return
        print(f"== {name} at {begin - self.start:.0f} s", flush=True)
        try:
            found = work(self)
        except Exception:  # noqa: BLE001  whatever happens in one part, the others are wanted
            found = {"failed": traceback.format_exc()}
            print(found["failed"], flush=True)
        seconds = round(time.perf_counter() - begin, 1)
        print(f"   took {seconds} s", flush=True)
        self.keep(name, found, seconds)

    def keep(self, name: str, found: Any, seconds: float = 0.0) -> None:
        """Write the report after every part, so that a run that is cut short leaves what it had."""
        self.report[name] = {"seconds": seconds, "found": found}
        (self.out / "report.json").write_text(json.dumps(self.report, indent=1))

    def model(self, name: str) -> Model:
        """A model, loaded once."""
        if name not in self.models:
            self.models[name] = load(name, device=self.sizes.device)
        return self.models[name]


def progress(done: int, total: int, message: str) -> None:
    """A line for each step."""
    print(f"   {done}/{total} {message}", flush=True)


def cold_build(session: Session) -> dict[str, Any]:
    """Import time, and every kernel from an empty cache, in processes of their own."""
    imported = "import time; t = time.perf_counter(); import eet_lab; print(time.perf_counter() - t)"
    built = (
        "import time; from eet_lab.ops import native; from eet_lab.technique import everything; "
        "k = everything('cuda').parts.ops.kernels; t = time.perf_counter(); first = []; "
        "native.build(k, progress=lambda done, total, m: first.append((round(time.perf_counter() - t, 2), done, m))); "
        "print({'kernels': k, 'seconds': time.perf_counter() - t, 'progress': first[:40]})"
    )
    with tempfile.TemporaryDirectory() as cache:
        found = {"import_s": _child(imported)}
        if session.sizes.device != "cpu":
            found["cold_build"] = _child(built, {"XDG_CACHE_HOME": cache})
    return found


def unavailable(session: Session) -> dict[str, str | None]:
    """Why a technique cannot run here, if so."""
    device = session.model(session.sizes.small).device
    return {name: technique().unavailable(device) for name, technique in registry().items()}


def _child(code: str, variables: dict[str, str] | None = None) -> str:
    home = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": home} | (variables or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return (done.stdout or done.stderr).strip()[-2000:]


def batch_race(name: str, repeats: int) -> Callable[[Session], Any]:
    """The toggles alone and together, and all, beside the peers, on the ragged batch."""

    def work(session: Session) -> Any:
        s = session.sizes
        workload = Workload(name, s.batch, s.low, s.high, s.new_tokens)
        recipes = list(dict.fromkeys(str(as_recipe(each, session.model(name).device)) for each in RECIPES))
        return _raced(session, workload, recipes, [OURS, *PEERS], repeats)

    return work


def single_race(name: str) -> Callable[[Session], Any]:
    """All techniques on one row, beside the peers."""

    def work(session: Session) -> Any:
        prompt, new = session.sizes.single
        return _raced(session, Workload(name, 1, prompt, prompt, new), ["all"], [OURS, *PEERS], session.sizes.repeats)

    return work


def _raced(session: Session, workload: Workload, recipes: list[str], providers: list[str], repeats: int) -> Any:
    rows, remarks = race(
        session.model(workload.model), workload, recipes, providers, repeats=repeats, progress=progress
    )
    append(rows, session.out)
    for row in rows:
        tpot, total = (spread.p50 if spread else None for spread in (row.tpot_ms, row.total_ms))
        print(f"   {row.provider:18} {row.recipe:60} TPOT {tpot} total {total} {row.equality}", flush=True)
    for remark in remarks:
        print(f"   {remark}", flush=True)
    return {"rows": len(rows), "remarks": remarks}


def live_view_cost(session: Session) -> dict[str, Any]:
    """Tokens/s with a sampler at 10 Hz and a callback for every step, against nobody watching; interleaved."""
    model, s = session.model(session.sizes.large), session.sizes
    rows = Workload(model.name, s.batch, s.low, s.high, s.new_tokens).prompts(model.config.vocab_size)
    engine, settings = Engine(model.decoder, everything(model.device).parts), Settings(max_new_tokens=s.new_tokens)
    watched: list[float] = []
    alone: list[float] = []
    for _ in range(2):
        engine.generate(rows, settings)
    for _ in range(2 * s.repeats):
        alone.append(engine.generate(rows, settings).tokens_per_s)
        arrived: list[int] = []
        probes = {"allocated": torch.cuda.memory_allocated} if model.device == "cuda" else {}
        with Sampler(open_source(model.device), hz=10, probes=probes):
            run = engine.generate(rows, settings, on_step=lambda event, a=arrived: a.append(len(event.tokens)))
        watched.append(run.tokens_per_s)
    engine.close()
    before, after = sorted(alone)[len(alone) // 2], sorted(watched)[len(watched) // 2]
    return {"tokens_per_s": before, "watched_tokens_per_s": after, "cost_percent": (1 - after / before) * 100}


def recorded_compare(name: str) -> Callable[[Session], Any]:
    """One Compare, with the monitor's samples of both watched runs beside it."""

    def work(session: Session) -> Any:
        model, s, samples = session.model(name), session.sizes, dict[str, Any]()
        source = open_source(model.device)
        sampler = Sampler(source, hz=20)
        seen: list[tuple[str, str, int]] = []

        def on_phase(phase: str, recipe: str) -> None:
            if seen and seen[-1][0] == "watched":
                which = "baseline" if len(samples) == 0 else "selection"
                samples[which] = record(source, sampler.since(seen[-1][2])[0])
            (sampler.resume if phase == "watched" else sampler.pause)()
            seen.append((phase, recipe, sampler.since()[1]))

        with sampler:
            sampler.pause()
            result = bench.compare(
                model,
                _prompts(model, s),
                repeats=s.large_repeats,
                max_new_tokens=s.new_tokens,
                progress=progress,
                on_phase=on_phase,
                on_step=lambda event: None,
            )
        return _recorded(session, result, f"recorded-compare-{name}", {"monitor": samples})

    return work


def recorded_ladder(name: str) -> Callable[[Session], Any]:
    """One Ladder."""

    def work(session: Session) -> Any:
        model, s = session.model(name), session.sizes
        result = bench.ladder(
            model,
            _prompts(model, s),
            repeats=s.large_repeats,
            max_new_tokens=s.new_tokens,
            progress=progress,
        )
        return _recorded(session, result, f"recorded-ladder-{name}", {})

    return work


def _prompts(model: Model, s: Sizes) -> list[list[int]] | None:
    """Random tokens for random weights; the demo model has prompts of its own."""
    if model.name == "demo":
        return None
    return Workload(model.name, s.batch, s.low, s.high, s.new_tokens).prompts(model.config.vocab_size)


def _recorded(session: Session, result: Any, stem: str, beside: dict[str, Any]) -> Any:
    result = replace(result, environment=replace(result.environment, recorded=True))
    path = result.save(session.out / f"{stem}.json")
    content = json.loads(path.read_text()) | beside
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    print(result.to_text(), flush=True)
    return {"file": path.name, "bytes": path.stat().st_size}


def main() -> int:
    """Run all parts; the exit code is the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--only", nargs="*", metavar="WORD", help="only parts with one of these words in their name")
    parser.add_argument("--commit", help="what the rows say the commit is, where there is no git to ask")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.commit:
        environments.commit = lambda: args.commit
    if args.smoke:
        torch.set_num_threads(1)
        PRESETS["smoke"] = Config(2, 32, 2, 64, 97, 64)
    s = SMOKE if args.smoke else Sizes()
    session = Session(args.out, s, args.minutes)
    parts: dict[str, Callable[[Session], Any]] = {
        "build": cold_build,
        "ceiling": lambda session: streaming_gb_per_s(session.model(s.small).device),
        "techniques": unavailable,
        "large, one row": single_race(s.large),
        "large, ragged batch": batch_race(s.large, s.large_repeats),
        "small, ragged batch": batch_race(s.small, s.repeats),
        "small, one row": single_race(s.small),
        "live view": live_view_cost,
        "compare large": recorded_compare(s.large),
        "ladder large": recorded_ladder(s.large),
        "compare demo": recorded_compare("demo"),
        "ladder demo": recorded_ladder("demo"),
    }
    for name, work in parts.items():
        if not args.only or any(word in name for word in args.only):
            session.part(name, work)
    failed = [
        name
        for name, entry in session.report.items()
        if isinstance(entry["found"], dict) and "failed" in entry["found"]
    ]
    print(f"{len(session.report) - len(failed)} parts done, failed: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
