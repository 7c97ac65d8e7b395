"""Results that ship with the package: a Compare with the monitor's samples beside it, and a Ladder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from eet_lab import bench
from eet_lab.bench.paired import SURE_PAIRS
from eet_lab.bench.workloads import Workload
from eet_lab.engine.engine import Engine
from eet_lab.errors import Cancelled
from eet_lab.models import Model
from eet_lab.monitor import Sampler, open_source, record
from h200.session import Session

HZ = 20
"""Of the samples beside a recorded result: its watched runs last a second or two."""


def recorded_compare(
    workload: str, recipe: str = "all", baseline: str = "baseline", name: str = "", repeats: int = SURE_PAIRS
) -> Callable[[Session], Any]:
    """One Compare, with the monitor's samples of both watched runs beside it. Its file is called after the model, and
    `name`, if there are several.
    """

    def work(session: Session) -> Any:
        sized = session.sized(Workload.parse(workload))
        model = session.model(sized.model)
        with Watch(model.device) as watch:
            result = bench.compare(
                model,
                recipe=recipe,
                baseline=baseline,
                on_phase=watch.on_phase,
                on_engine=watch.on_engine,
                on_step=lambda event: None,
                repeats=repeats,
                **asked(session, model, sized),
            )
        return _saved(session, result, f"recorded-compare-{model.name}{name}", {"monitor": watch.recordings})

    return work


def recorded_ladder(workload: str, repeats: int = SURE_PAIRS) -> Callable[[Session], Any]:
    """One Ladder; one that the budget stopped is of no use."""

    def work(session: Session) -> Any:
        sized = session.sized(Workload.parse(workload))
        model = session.model(sized.model)
        result = bench.ladder(model, repeats=repeats, **asked(session, model, sized))
        if result.partial:
            raise Cancelled("The ladder was stopped.")
        return _saved(session, result, f"recorded-ladder-{model.name}{'-one-row' if sized.batch == 1 else ''}", {})

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


def asked(session: Session, model: Model, workload: Workload) -> dict[str, Any]:
    """Random tokens for random weights; the demo model has prompts of its own."""
    prompts = None if model.name == "demo" else workload.prompts(model.config.vocab_size)
    return {"prompts": prompts, "max_new_tokens": workload.new_tokens, **session.common()}


def _saved(session: Session, result: Any, stem: str, beside: dict[str, Any]) -> Any:
    result = replace(result, environment=replace(result.environment, recorded=True))
    path = result.save(session.out / f"{stem}.json", **beside)
    print(result.to_text(), flush=True)
    return {"file": path.name, "bytes": path.stat().st_size}
