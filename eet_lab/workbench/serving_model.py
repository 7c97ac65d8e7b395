"""What a serving page does with a model, on the thread that may run it: measure its cost table, serve traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from eet_lab.errors import CostError
from eet_lab.labels import short_form
from eet_lab.models import Model
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.agreement import Compared, agreement
from eet_lab.scheduling.cost import CostTable
from eet_lab.scheduling.served import Served
from eet_lab.scheduling.simulator import simulate_traffic
from eet_lab.scheduling.sweep import LoadPoint
from eet_lab.serving.live import OnLook, serve_traffic
from eet_lab.serving.profile import profile
from eet_lab.technique import Recipe, registry
from eet_lab.techniques.continuous_batching import ContinuousBatching
from eet_lab.words import visible
from eet_lab.workbench.serving_choices import Asked

ModelWork: TypeAlias = Callable[[Model, Recipe, Progress, Cancel], Any]
"""Work on a model under a recipe."""
RunOnModel: TypeAlias = Callable[[str, int, ModelWork, Cancel], None]
"""Has such work done, until the last is set; its answer comes later, with the number. EETError where it cannot be."""


@dataclass(frozen=True, eq=False)
class Measured:
    """Traffic that was served for real, and what the simulator said of it over the model's own table."""

    policy: str
    served: Served
    simulated: Served

    @property
    def compared(self) -> Sequence[Compared]:
        return agreement(self.simulated, self.served)

    @property
    def point(self) -> LoadPoint:
        """What was measured, for latency against load."""
        return LoadPoint.of(self.served)


def serving_recipe(recipe: Recipe, model: Model) -> Recipe:
    """The recipe, and what requests of a decoder need to join. RecipeError where that cannot run."""
    if model.config.stage != "generate":
        return recipe
    there = {technique.name: technique for technique in recipe}
    for name in (*ContinuousBatching.requires, ContinuousBatching.name):
        there.setdefault(name, registry()[name]())
    return Recipe(tuple(there.values())).check(model.device, model.config)


def measure(model: Model, recipe: Recipe, progress: Progress, cancel: Cancel) -> CostTable:
    """The model's cost table, measured here or on this machine before. Errors as in `profile`."""
    return profile(model, serving_recipe(recipe, model), progress=progress, cancel=cancel)


def serving(asked: Asked, table: CostTable, on_look: OnLook) -> ModelWork:
    """Serve what is asked for, and simulate the same over the `table`, which must be the model's own (CostError)."""

    def work(model: Model, recipe: Recipe, progress: Progress, cancel: Cancel) -> Measured:
        of = table.source
        wanted = model.name, str(serving_recipe(recipe, model)), model.dtype
        if (of.model, of.recipe, of.dtype) != wanted:
            raise CostError(
                f"The cost table is of {visible(of.model)} in {of.dtype} under {short_form(of.recipe, model.device)}, "
                f"but {model.name} in {model.dtype} under {short_form(wanted[1], model.device)} would be served. Press "
                "Measure this model first."
            )
        traffic = asked.traffic(table)
        name, policy = asked.live(table, traffic)
        served = serve_traffic(model, traffic, policy, table, on_look=on_look, progress=progress, cancel=cancel)
        return Measured(name, served, simulate_traffic(traffic, policy, table, cancel=cancel))

    return work
