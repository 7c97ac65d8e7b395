"""A session: parts run in order under a deadline, each with its time, and a report that survives a cut."""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from eet_lab.bench.workloads import TrainBatch, Workload
from eet_lab.errors import Cancelled
from eet_lab.models import Model, load
from eet_lab.models.config import ENCODER_PRESETS, PRESETS, SEQ2SEQ_PRESETS, Config, EncoderConfig


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
    """One call: what its parts share, and what they found.

    `smoke`: tiny sizes on the CPU, to see that it runs. `peers`: only these of a part's peers; None: all of them.
    """

    out: Path
    deadline: Deadline
    smoke: bool = False
    peers: Sequence[str] | None = None
    report: dict[str, Any] = field(default_factory=dict)
    _models: dict[tuple[str, str | None], Model] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.smoke:
            torch.set_num_threads(1)
            PRESETS["smoke"] = Config(2, 32, 2, 64, 97, 64)
            ENCODER_PRESETS["smoke-encoder"] = EncoderConfig(2, 32, 2, 64, 97, 64, family="bert", heads=("pooler",))
            tiny: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "head_dim": 16, "ffn_size": 64}
            tiny["num_kv_heads"] = 2
            ENCODER_PRESETS["smoke-vit"] = replace(ENCODER_PRESETS["vit-b-32"], **tiny, image_size=64, context=5)
            sizes = {**tiny, "encoder_layers": 2, "vocab_size": 97, "context": 64, "embedding_scale": 32**0.5}
            SEQ2SEQ_PRESETS["smoke-seq2seq"] = replace(SEQ2SEQ_PRESETS["transformer-base"], **sizes)

    def run(self, name: str, work: Callable[[Session], Any]) -> None:
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

    @property
    def device(self) -> str | None:
        """The CPU in a smoke test, else the GPU if there is one."""
        return "cpu" if self.smoke else None

    def sized(self, workload: Workload) -> Workload:
        """The workload, or a tiny one like it."""
        w = workload
        if not self.smoke or w.model == "demo":
            return w
        return replace(
            w,
            model="smoke",
            batch=min(w.batch, 3),
            low=min(w.low, 4),
            high=min(w.high, 9) if w.high > w.low else 4,
            new_tokens=min(w.new_tokens, 6),
        )

    def sized_batch(self, workload: TrainBatch) -> TrainBatch:
        """The batch that is trained with, or a tiny one of the same kind of model."""
        if not self.smoke:
            return workload
        kinds = {"encoder": ("bert",), "vit": ("vit",), "seq2seq": tuple(SEQ2SEQ_PRESETS)}
        kind = next((kind for kind, names in kinds.items() if workload.model.startswith(names)), "")
        model = f"smoke-{kind}" if kind else "smoke"
        low, high = workload.low and min(workload.low, 4), workload.high and min(workload.high, 9)
        return replace(workload, model=model, rows=min(workload.rows, 3), low=low, high=high)

    def model(self, name: str, dtype: str | None = None) -> Model:
        """A model, in a type of a GPU's; the one before it is let go, so that two large ones need not fit."""
        key = name, None if self.smoke else dtype
        if key not in self._models:
            self._models.clear()
            self._models[key] = load(name, device=self.device, dtype=key[1])
        return self._models[key]

    def common(self) -> dict[str, Any]:
        """What every measurement is told."""
        return {"progress": progress, "cancel": self.deadline}


def progress(done: int, total: int, message: str = "") -> None:
    """A line for each message."""
    if message:
        print(f"   {done}/{total} {message}", flush=True)
