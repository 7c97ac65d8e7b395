"""compare_training: two recipes on the same steps in turn, and whether their losses are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from eet_lab.bench import timing
from eet_lab.bench.environment import environment
from eet_lab.bench.measured import Environment
from eet_lab.bench.paired import Change
from eet_lab.bench.timing import PAIR_BUDGET_S, Rounds, Series, Tally, check_budget, check_repeats
from eet_lab.bench.training_peers import largest
from eet_lab.devices import present
from eet_lab.models import Model
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike, as_recipe
from eet_lab.threads import cpu_threads
from eet_lab.training import Example, Step, Trainer, TrainSettings
from eet_lab.training.data import Batches
from eet_lab.words import plain

BUDGETS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
"""How far apart two losses of a step may be, as a share: sums in another order grow apart from step to step."""


@dataclass(frozen=True)
class TrainedSide:
    """The steps of one recipe. `peak_bytes`: the most that were allocated in a step, its own; None on a CPU."""

    recipe: str
    steps: tuple[Step, ...]
    peak_bytes: int | None

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of each step."""
        return tuple(step.loss for step in self.steps)


@dataclass(frozen=True)
class TrainComparison:
    """Two recipes that took the same steps in turn. `change` is that of the milliseconds a step.

    `max_error` is the largest relative difference of two losses of a step, and `budget` what it may be.
    """

    environment: Environment
    baseline: TrainedSide
    selection: TrainedSide
    change: Change | None
    max_error: float
    budget: float

    @property
    def verdict(self) -> Literal["identical", "within rounding", "different"]:
        """Whether the loss curves are the same."""
        if self.baseline.losses == self.selection.losses:
            return "identical"
        return "within rounding" if self.max_error <= self.budget else "different"

    @property
    def explanation(self) -> str:
        """The same in words."""
        if self.verdict == "identical":
            return "The losses of all steps are the same to the bit."
        if self.max_error == math.inf:
            return "The loss of a step is not finite."
        return f"Losses of a step are at most {plain(self.max_error)} apart, as a share; the budget is {self.budget}."


def compare_training(
    model: Model,
    rows: Batches,
    recipe: RecipeLike = "all",
    *,
    baseline: RecipeLike = "",
    batch_rows: int = 8,
    task: str | None = None,
    settings: TrainSettings | None = None,
    repeats: int | None = None,
    budget_s: float = PAIR_BUDGET_S,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    on_partial: Callable[[TrainComparison], None] | None = None,
) -> TrainComparison:
    """Train two copies of a model by `baseline` and by `recipe`, a step of each in turn, on the same rows.

    The first two steps of each warm up, and are not timed; their losses are compared, too. `repeats` steps are timed;
    None: until the interval of the paired difference is narrow, or `budget_s` is spent. Errors: those of `Trainer`.
    """
    check_repeats(repeats)
    check_budget(budget_s)
    recipes = [as_recipe(each, model.device, model.config.in_training) for each in (baseline, recipe)]
    with cpu_threads(model.device), present(model.network.device):
        sides = [_Side(model, each, rows, batch_rows, task, settings, cancel) for each in recipes]

        def change() -> Change | None:
            before, after = ([step.ms for step in side.series.runs] for side in sides)
            return Change.of(before, after)

        def comparison() -> TrainComparison:
            before, after = (side.trained() for side in sides)
            error = largest(abs(b / a - 1) for a, b in zip(before.losses, after.losses, strict=False))
            return TrainComparison(environment(model), before, after, change(), error, BUDGETS[model.network.dtype])

        rounds = Rounds(repeats, budget_s, lambda: [found] if (found := change()) else [])
        tally = Tally(2 * (WARM + rounds.expected), progress)
        timing.in_turn([side.warming for side in sides], Rounds(WARM), tally, cancel, doing="warming up")
        tell = None if on_partial is None else lambda: on_partial(comparison())
        timing.in_turn([side.series for side in sides], rounds, tally, cancel, on_round=tell)
        return comparison()


WARM = 2
"""Steps before those that are timed: the optimizer's state is made in the first."""


class _Side:
    """A recipe, its trainer, and the steps that it has taken."""

    def __init__(
        self, model: Model, recipe: Recipe, rows: Batches, batch_rows: int, task: str | None,
        settings: TrainSettings | None, cancel: Cancel | None,
    ) -> None:  # fmt: skip
        self._on_gpu, self._rows, self._batch_rows, self._cancel = model.device == "cuda", rows, batch_rows, cancel
        before = self._allocated()
        self._trainer = Trainer(model.network, recipe.parts, task=task, settings=settings)
        self._recipe, self._held, self._peak = str(recipe), self._allocated() - before, 0
        self.warming, self.series = Series(self._recipe, self._step), Series(self._recipe, self._step)

    def _step(self) -> Step:
        before, batch = self._allocated(), self._rows.batch(self._trainer.num_steps, self._batch_rows)
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        run = timing.on_host(lambda: self._done(batch))
        step = replace(run.value, ms=run.seconds * 1e3)
        if self._on_gpu:
            # What this side holds stays between its steps, and the other side's is there before and after.
            self._held += self._allocated() - before
            self._peak = max(self._peak, torch.cuda.max_memory_allocated() - self._allocated() + self._held)
        return step

    def _done(self, batch: Sequence[Example]) -> Step:
        """A step, once the GPU has updated the weights: the other side's would wait for it."""
        step = self._trainer.step(batch, self._cancel)
        if self._on_gpu:
            torch.cuda.synchronize()
        return step

    def trained(self) -> TrainedSide:
        """What its steps were by now."""
        return TrainedSide(self._recipe, (*self.warming.runs, *self.series.runs), self._peak if self._on_gpu else None)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._on_gpu else 0
