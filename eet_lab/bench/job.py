"""What Compare and Ladder are asked to do, checked once; and a single run of it that somebody watches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eet_lab.bench.environment import environment
from eet_lab.bench.measure import OnStep, allocated_afresh, as_measurement, memory_of
from eet_lab.bench.results import Run
from eet_lab.bench.timing import check_repeats
from eet_lab.bench.workloads import default_prompts, describe
from eet_lab.engine.engine import Engine
from eet_lab.engine.generation import StepEvent
from eet_lab.engine.settings import Settings, checked_prompts
from eet_lab.models import Model
from eet_lab.progress import Cancel
from eet_lab.technique import Recipe
from eet_lab.texts import Prompts, as_rows


@dataclass(frozen=True)
class RunInputs:
    """A model, its prompts as token ids, and how to generate."""

    model: Model
    rows: list[list[int]]
    settings: Settings

    @classmethod
    def of(cls, model: Model, prompts: Prompts | None, repeats: int | None, settings: dict[str, Any]) -> RunInputs:
        """The inputs from what the user gave (no prompts: the default ones); PromptError for what cannot run."""
        check_repeats(repeats)
        chosen = Settings.of(**settings)
        encoded = as_rows(model, default_prompts(model) if prompts is None else prompts)
        return cls(model, checked_prompts(encoded, chosen, model.config), chosen)

    @property
    def workload(self) -> str:
        return describe(self.model.name, self.rows, self.settings.max_new_tokens)

    def described(self) -> dict[str, Any]:
        """The fields that every result begins with."""
        settings = asdict(self.settings)
        return {
            "environment": environment(self.model),
            "workload": self.workload,
            "prompts": tuple(map(self.model.decode, self.rows)),
            "prompt_lengths": tuple(map(len, self.rows)),
            "settings": settings | {"stop": list(settings["stop"])},
        }


def watched(
    engine: Engine,
    recipe: Recipe,
    job: RunInputs,
    on_step: OnStep,
    cancel: Cancel | None = None,
    prepare_s: float = 0.0,
) -> Run:
    """Generate once, calling `on_step` for every step. Stopped by `cancel`, it gives what there is until then.

    Errors: those of `Engine.generate`.
    """
    model, counts = job.model, list[int]()

    def note(event: StepEvent) -> None:
        counts.append(len(event.tokens))
        on_step(event)

    before = allocated_afresh(model.device)
    run = engine.generate(job.rows, job.settings, on_step=note, cancel=cancel)
    measurement = as_measurement(
        model, recipe, job.settings, [(run, tuple(counts))], memory_of(engine, model.device, before),
        prepare_s=prepare_s, captures=engine.captures,
    )  # fmt: skip
    return Run(**job.described(), measurement=measurement, stopped=run.cancelled)
