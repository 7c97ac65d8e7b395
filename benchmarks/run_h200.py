"""Take every row of a GPU in one process, beside the peers, and record the results that ship with the package.

    python benchmarks/run_h200.py --out OUT                all of it: under ten minutes on an H200
    python benchmarks/run_h200.py --out OUT --smoke        tiny models on the CPU: does the script run?

Writes OUT/<gpu>.jsonl (rows to append to benchmarks/), OUT/recorded-*.json (for eet_lab/recorded/) and OUT/report.json.
A part that fails is reported, and the others go on. `--minutes` is the budget: the part that runs when it is spent is
stopped, and those after it are left out and said to be.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from check_kernels import HOME, cold_build_s

from eet_lab import bench
from eet_lab.bench import environment as environments
from eet_lab.bench import rows as tables
from eet_lab.bench.cost import streaming_gb_per_s
from eet_lab.bench.peers import PEERS
from eet_lab.bench.race import OURS, race
from eet_lab.bench.workloads import Workload
from eet_lab.engine.engine import Engine
from eet_lab.errors import Cancelled
from eet_lab.models import Model, load
from eet_lab.models.config import PRESETS, Config
from eet_lab.monitor import Sampler, open_source, record
from eet_lab.technique import registry
from eet_lab.texts import as_recipe

HEADLINE = ["pre_padding", "mask_removal", "memory_reuse"]
RECIPES = ["baseline", ",".join(HEADLINE), "all"]
HZ = 20
"""Of the samples beside a recorded result: its watched runs last a second or two."""


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
    single: int = 128
    replayed: tuple[int, int] = (128, 64)  # longest prompt and new tokens of what is recorded to be replayed
    device: str | None = None

    def ragged(self, model: str) -> Workload:
        """The batch of prompts of many lengths."""
        return Workload(model, self.batch, self.low, self.high, self.new_tokens)

    def recorded(self, model: str) -> Workload:
        """A shorter ragged batch, since a replay takes as long as the run did."""
        return Workload(model, self.batch, self.low, *self.replayed)

    def one_row(self, model: str) -> Workload:
        """A single prompt."""
        return Workload(model, 1, self.single, self.single, self.new_tokens)


SMOKE = Sizes(
    "smoke",
    "smoke",
    single=4,
    batch=3,
    low=2,
    high=9,
    new_tokens=6,
    repeats=2,
    large_repeats=2,
    replayed=(6, 4),
    device="cpu",
)


class Deadline:
    """A `Cancel` that sets itself once the time is up."""

    def __init__(self, minutes: float) -> None:
        self.minutes, self._start = minutes, time.perf_counter()

    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._start

    def is_set(self) -> bool:
        return self.seconds() > self.minutes * 60


@dataclass
class Session:
    """One call: parts run in order, each with its time, and what they found."""

    out: Path
    sizes: Sizes
    deadline: Deadline
    report: dict[str, Any] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)

    def part(self, name: str, work: Callable[[Session], Any]) -> None:
        """Run one part; keep what it returns, or why it failed."""
        begin = self.deadline.seconds()
        print(f"== {name} at {begin:.0f} s", flush=True)
        try:
            if self.deadline.is_set():
                raise Cancelled("It did not begin.")
            found = work(self)
        except Cancelled as stop:
            found = {"left out": f"the budget of {self.deadline.minutes:g} minutes was spent: {stop}"}
        except Exception:  # noqa: BLE001  whatever happens in one part, the others are wanted
            found = {"failed": traceback.format_exc()}
            print(found["failed"], flush=True)
        seconds = round(self.deadline.seconds() - begin, 1)
        print(f"   took {seconds} s", flush=True)
        self.report[name] = {"seconds": seconds, "found": found}
        # After every part, so that a call that is cut short leaves what it had.
        (self.out / "report.json").write_text(json.dumps(self.report, indent=1) + "\n")
        gc.collect()  # a part that failed may have left its engines in a cycle
        torch.cuda.empty_cache()

    def those(self, how: str) -> list[str]:
        """The parts that "failed", or were "left out"."""
        found = {name: entry["found"] for name, entry in self.report.items()}
        return [name for name, each in found.items() if isinstance(each, dict) and how in each]

    def model(self, name: str) -> Model:
        """A model, loaded once."""
        if name not in self.models:
            self.models[name] = load(name, device=self.sizes.device)
        return self.models[name]

    def common(self) -> dict[str, Any]:
        """What every measurement is told."""
        return {"progress": progress, "cancel": self.deadline}


def progress(done: int, total: int, message: str = "") -> None:
    """A line for each message."""
    if message:
        print(f"   {done}/{total} {message}", flush=True)


def build(session: Session) -> dict[str, Any]:
    """Import time, and every kernel from an empty cache, in processes of their own."""
    code = "import time; t = time.perf_counter(); import eet_lab; print(time.perf_counter() - t)"
    python = [sys.executable, "-c", code]
    done = subprocess.run(
        python, env=os.environ | {"PYTHONPATH": str(HOME)}, capture_output=True, text=True, check=True
    )
    found = {"import_s": round(float(done.stdout), 3)}
    if session.sizes.device != "cpu":
        found["cold_build_s"] = round(cold_build_s(), 2)
    return found


def machine(session: Session) -> dict[str, Any]:
    """The ceiling, and why a technique cannot run here, if so."""
    device = session.model(session.sizes.small).device
    reasons = {name: technique().unavailable(device) for name, technique in registry().items()}
    return {"streaming_gb_per_s": streaming_gb_per_s(device), "unavailable": reasons}


def raced(
    workload: Workload, recipes: Sequence[str], repeats: int, peers: Sequence[str] = tuple(PEERS)
) -> Callable[[Session], Any]:
    """Recipes beside peers on one workload."""

    def work(session: Session) -> Any:
        model = session.model(workload.model)
        distinct = list(dict.fromkeys(str(as_recipe(each, model.device)) for each in recipes))
        rows, remarks = race(model, workload, distinct, [OURS, *peers], repeats=repeats, **session.common())
        tables.append(rows, session.out)
        print(tables.markdown(rows), *remarks, sep="\n", flush=True)
        return {"rows": len(rows), "remarks": remarks}

    return work


def recorded_compare(name: str) -> Callable[[Session], Any]:
    """One Compare, with the monitor's samples of both watched runs beside it."""

    def work(session: Session) -> Any:
        model = session.model(name)
        with Watch(model.device) as watch:
            result = bench.compare(
                model,
                on_phase=watch.on_phase,
                on_engine=watch.on_engine,
                on_step=lambda event: None,
                **_asked(session, model),
            )
        return _recorded(session, result, f"recorded-compare-{name}", {"monitor": watch.recordings})

    return work


def recorded_ladder(name: str) -> Callable[[Session], Any]:
    """One Ladder; one that the budget stopped is of no use."""

    def work(session: Session) -> Any:
        model = session.model(name)
        result = bench.ladder(model, **_asked(session, model))
        if result.partial:
            raise Cancelled("The ladder was stopped.")
        return _recorded(session, result, f"recorded-ladder-{name}", {})

    return work


class Watch:
    """Samples the device in the watched runs of a Compare, with the probes that the live view has."""

    def __init__(self, device: str) -> None:
        self.recordings: dict[str, Any] = {}
        self._engine: Engine | None = None
        self._names = iter(("baseline", "selection"))
        probes: dict[str, Callable[[], float]] = {"planned_bytes": self._planned_bytes}
        if device == "cuda":
            probes["torch_allocated_bytes"] = torch.cuda.memory_allocated
            probes["torch_reserved_bytes"] = torch.cuda.memory_reserved
        self._sampler = Sampler(open_source(device), HZ, probes)
        self._sampler.pause()
        self._begin: int | None = None

    def on_phase(self, phase: str, recipe: str) -> None:
        """Keep what was sampled in the watched run that ends here; sample in one that begins."""
        self._sampler.pause()
        if self._begin is not None:
            samples, _ = self._sampler.since(self._begin)
            self.recordings[next(self._names)] = record(self._sampler.source, samples)
            self._begin = None
        if phase == "watched":
            self._begin = self._sampler.since()[1]
            self._sampler.resume()

    def on_engine(self, engine: Engine) -> None:
        """The engine of the run that begins."""
        self._engine = engine

    def _planned_bytes(self) -> float:
        engine = self._engine
        return 0.0 if engine is None else float(engine.activation_bytes + engine.kv_bytes)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._engine = None
        self._sampler.close()


def _asked(session: Session, model: Model) -> dict[str, Any]:
    """Random tokens for random weights; the demo model has prompts of its own."""
    s = session.sizes
    workload = s.recorded(model.name)
    prompts = None if model.name == "demo" else workload.prompts(model.config.vocab_size)
    return {"prompts": prompts, "repeats": s.large_repeats, "max_new_tokens": workload.new_tokens, **session.common()}


def _recorded(session: Session, result: Any, stem: str, beside: dict[str, Any]) -> Any:
    result = replace(result, environment=replace(result.environment, recorded=True))
    path = result.save(session.out / f"{stem}.json", **beside)
    print(result.to_text(), flush=True)
    return {"file": path.name, "bytes": path.stat().st_size}


def main() -> int:
    """Run all parts; the exit code is the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", nargs="*", metavar="WORD", help="only parts with one of these words in their name")
    parser.add_argument("--commit", help="what the rows say the commit is, where there is no git to ask")
    args = parser.parse_args()
    deadline = Deadline(args.minutes)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.commit:
        environments.commit = lambda: args.commit
    if args.smoke:
        torch.set_num_threads(1)
        PRESETS["smoke"] = Config(2, 32, 2, 64, 97, 64)
    s = SMOKE if args.smoke else Sizes()
    session = Session(args.out, s, deadline)
    # What is wanted most comes first, since the budget may end before the last.
    parts: dict[str, Callable[[Session], Any]] = {
        "build": build,
        "machine": machine,
        "large, one row": raced(s.one_row(s.large), ["all"], s.repeats),
        "compare large": recorded_compare(s.large),
        "ladder large": recorded_ladder(s.large),
        "compare demo": recorded_compare("demo"),
        "ladder demo": recorded_ladder("demo"),
        "small, one row": raced(s.one_row(s.small), ["all"], s.repeats),
        "small, ragged batch": raced(s.ragged(s.small), [*RECIPES, *HEADLINE], s.repeats),
        "large, toggles alone": raced(s.ragged(s.large), HEADLINE, 2, peers=()),
        "large, ragged batch": raced(s.ragged(s.large), RECIPES, s.large_repeats),
    }
    for name, work in parts.items():
        if not args.only or any(word in name for word in args.only):
            session.part(name, work)
    failed, left_out = session.those("failed"), session.those("left out")
    print(f"{len(session.report)} parts; failed: {failed or 'none'}; left out: {left_out or 'none'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
