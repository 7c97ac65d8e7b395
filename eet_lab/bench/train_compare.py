"""Recipes of training side by side: two that take the same steps in turn, and the ladder of all techniques of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from eet_lab.bench import tables, timing
from eet_lab.bench.compare import PlannedRung, rungs_down, rungs_up
from eet_lab.bench.gradients import largest
from eet_lab.bench.measured import Environment, Spread, environment
from eet_lab.bench.paired import Change
from eet_lab.bench.run_memory import with_peak
from eet_lab.bench.timing import Rounds, Series, Tally, check_budget, check_repeats
from eet_lab.errors import Cancelled, RecipeError
from eet_lab.models import Model
from eet_lab.models.on_device import on_any_device
from eet_lab.ops.oom import memory_for
from eet_lab.progress import Cancel, Progress, raise_if_cancelled
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike, as_recipe
from eet_lab.training import Example, Step, Trainer, TrainSettings
from eet_lab.training.data import Batches, check_batches
from eet_lab.words import plain

BUDGETS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
"""How far apart two losses of a step may be, as a share of the loss, or in nats where that is below one: logits are no
more exact where their loss is near zero.
"""
COMPARED = 20
"""Losses of so many steps are compared: a recipe that is wrong parts in the first, and differences of sums in another
order grow from step to step.
"""
WARM = 2
"""Steps before those that are timed: the optimizer's state is made in the first."""


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

    def record(self) -> tables.Record:
        """Its numbers, for a table; times are those of the steps that did not warm up."""
        timed = self.steps[WARM:]
        return {
            "recipe": self.recipe,
            **tables.spread_record("step_ms", Spread.of([step.ms for step in timed])),
            **tables.spread_record("tokens_per_s", Spread.of([step.num_tokens / step.ms * 1e3 for step in timed])),
            "peak_bytes": self.peak_bytes, "loss": self.losses[-1] if self.steps else None, "repeats": len(timed),
        }  # fmt: skip


@dataclass(frozen=True)
class TrainComparison:
    """Two recipes that took the same steps in turn. `change` is that of the milliseconds a step.

    `max_error` is the largest difference of two losses of one of the first steps, and `budget` what it may be: shares
    of the loss, or nats where that is below one.
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
        return (
            f"Losses of the first {min(COMPARED, len(self.baseline.steps))} steps are at most {plain(self.max_error)} "
            f"apart, as a share, or in nats below a loss of one; the budget is {self.budget}."
        )

    def to_frame(self) -> Any:
        """A pandas DataFrame with numbers: one row per recipe; `loss` is that of the last step."""
        return tables.runs_frame({"baseline": self.baseline.record(), "selection": self.selection.record()})

    @property
    def _remarks(self) -> list[str]:
        step = [] if self.change is None else [f"A step: {self.change.words('ms')}."]
        return [*step, f"Same loss curve? {self.verdict.capitalize()}. {self.explanation}"]

    def _repr_html_(self) -> str:
        columns = ("recipe", "step_ms", "tokens_per_s", "peak_bytes", "loss")
        return tables.framed(self.to_frame(), columns, *self._remarks)


@dataclass(frozen=True)
class TrainRung:
    """One technique more (or less, in `TrainLadder.left_out`): `found` has the rung before (or the full recipe) first.

    `along` names what had to come, or go, with it.
    """

    technique: str
    title: str
    along: tuple[str, ...]
    found: TrainComparison


@dataclass(frozen=True)
class TrainLadder:
    """Techniques added one by one to none, then left out one by one from the full recipe.

    `whole` compares none with the full recipe. `partial`: it was stopped, and holds what was timed until then.
    """

    recipe: str
    whole: TrainComparison
    rungs: tuple[TrainRung, ...]
    left_out: tuple[TrainRung, ...]
    partial: bool = False

    def to_frame(self) -> Any:
        """A pandas DataFrame with numbers: one row per recipe; `loss` is that of the last step."""
        first = _record("baseline", (), self.whole.baseline)
        added, left_out = (
            [_record(rung.technique, rung.along, rung.found.selection, rung.found) for rung in rungs]
            for rungs in (self.rungs, self.left_out)
        )
        return tables.rungs_frame([first, *added], left_out)

    def _repr_html_(self) -> str:
        columns = ("along", "step_ms", "delta_ms", "change", "delta_bytes", "verdict")
        return tables.framed(self.to_frame(), columns, *(f"All beside none. {each}" for each in self.whole._remarks))


def _record(
    technique: str, along: Sequence[str], side: TrainedSide, found: TrainComparison | None = None
) -> tables.Record:
    """A rung's numbers, and what they are less those that `found` compares them with; None: nothing."""
    change = found.change if found else None
    low, delta, high = change.delta if change else (None, None, None)
    peak, before = side.peak_bytes, (found.baseline if found else side).peak_bytes
    return {
        "technique": technique, "along": ", ".join(along),
        "delta_ms": delta, "delta_ms_low": low, "delta_ms_high": high, "change": change.verdict if change else None,
        "delta_bytes": None if peak is None or before is None else peak - before,
        "verdict": found.verdict if found else "identical", **side.record(),
    }  # fmt: skip


@on_any_device
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
    budget_s: float | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    on_partial: Callable[[TrainComparison], None] | None = None,
) -> TrainComparison:
    """Train two copies of a model by `baseline` and by `recipe`, a step of each in turn, on the same rows.

    The first two steps of each warm up, and are not timed; their losses are compared, too. `repeats` steps are timed;
    None: until the interval of the paired difference is narrow, or `budget_s` is spent (default: two seconds a
    recipe). Errors: those of `Trainer`.
    """
    check_repeats(repeats)
    check_batches(rows)
    check_budget(budget_s)
    recipes = [as_recipe(each, model.device, model.config.in_training) for each in (baseline, recipe)]
    sides = [_Side(model, each, rows, batch_rows, task, settings, cancel) for each in recipes]
    pair, where = (sides[0], sides[1]), environment(model)
    rounds = Rounds(repeats, budget_s, lambda: _changes([pair]))
    tell = None if on_partial is None else lambda: on_partial(_compared(where, *pair))
    _take_steps(sides, rounds, progress, cancel, tell)
    return _compared(where, *pair)


@on_any_device
def ladder_training(
    model: Model,
    rows: Batches,
    recipe: RecipeLike = "all",
    *,
    batch_rows: int = 8,
    task: str | None = None,
    settings: TrainSettings | None = None,
    repeats: int | None = None,
    budget_s: float | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    on_partial: Callable[[TrainLadder], None] | None = None,
) -> TrainLadder:
    """Credit each technique of `recipe` with its own milliseconds a step and its own bytes.

    Techniques are added one by one, and left out of the full recipe one by one, as `eet_lab.ladder` does. Each recipe
    trains a copy of the model, all on the same rows, a step of each in turn; the copies stay side by side in memory.
    `budget_s` and the rest are as in `compare_training`. Once `cancel` is set, the ladder that
    comes back holds what was timed until then and is marked partial; Cancelled where that is nothing.
    Errors: RecipeError for a recipe without techniques, and those of `Trainer`.
    """
    check_repeats(repeats)
    check_batches(rows)
    check_budget(budget_s)
    full = as_recipe(recipe, model.device, model.config.in_training)
    if not full:
        raise RecipeError('A ladder needs a technique at least, and the recipe has none. Name one, or say "all".')
    up, down = rungs_up(full), rungs_down(full)
    recipes = {str(each.recipe): each.recipe for each in (*up, *down)}
    sides = {name: _Side(model, each, rows, batch_rows, task, settings, cancel) for name, each in recipes.items()}
    where = environment(model)

    def pair(planned: PlannedRung) -> Pair:
        return sides[str(planned.against)], sides[str(planned.recipe)]

    def found(partial: bool = False) -> TrainLadder:
        climbed, left_out = (
            tuple(TrainRung(each.name, each.title, each.along, _compared(where, *pair(each))) for each in planned)
            for planned in (up[1:], down)
        )
        whole = _compared(where, sides[str(Recipe())], sides[str(full)])
        return TrainLadder(str(full), whole, climbed, left_out, partial)

    tell = None if on_partial is None else lambda: on_partial(found())
    rounds = Rounds(repeats, budget_s, lambda: _changes([*map(pair, (*up[1:], *down))]), len(sides))
    try:
        _take_steps([*sides.values()], rounds, progress, cancel, tell)
    except Cancelled:
        if not all(each.series.runs for each in sides.values()):
            raise
        return found(partial=True)
    return found()


REMEDY = "Each recipe trains a copy of the model beside the others: ladder fewer techniques, or compare two recipes."


class _Side:
    """A recipe, its trainer, and the steps that it has taken."""

    def __init__(
        self, model: Model, recipe: Recipe, rows: Batches, batch_rows: int, task: str | None,
        settings: TrainSettings | None, cancel: Cancel | None,
    ) -> None:  # fmt: skip
        raise_if_cancelled(cancel, "The benchmark")
        self._device, self._rows, self._batch_rows, self._cancel = model.device, rows, batch_rows, cancel
        before = self._allocated()
        with memory_for("what a recipe trains", remedy=REMEDY):
            self._trainer = Trainer(model.network, recipe.parts, task=task, settings=settings)
        self._recipe, self._held, self._peaks = str(recipe), self._allocated() - before, list[int]()
        self.dtype = model.network.dtype
        self.warming, self.series = Series(self._recipe, self._step), Series(self._recipe, self._step)

    def _step(self) -> Step:
        before, batch = self._allocated(), self._rows.batch(self._trainer.num_steps, self._batch_rows)
        run, peak = with_peak(lambda: timing.on_host(lambda: self._done(batch)), self._device)
        if peak is not None:  # beyond what both sides held before; of that this one's own counts too
            self._peaks.append(peak + self._held)
        self._held += self._allocated() - before
        return replace(run.value, ms=run.seconds * 1e3)

    def _done(self, batch: Sequence[Example]) -> Step:
        """A step, once the GPU has updated the weights: the other side's would wait for it."""
        step = self._trainer.step(batch, self._cancel)
        if self._device == "cuda":
            torch.cuda.synchronize()
        return step

    @property
    def num_steps(self) -> int:
        """How many it has taken, with those that warmed up."""
        return len(self.warming.runs) + len(self.series.runs)

    def trained(self, num: int) -> TrainedSide:
        """What the first `num` of its steps were."""
        steps = (*self.warming.runs, *self.series.runs)[:num]
        return TrainedSide(self._recipe, steps, max(self._peaks, default=None))

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._device == "cuda" else 0


Pair = tuple[_Side, _Side]


def _change(before: _Side, after: _Side) -> Change | None:
    """That of the steps of those rounds in which both took one; None before the first."""
    num = min(len(each.series.runs) for each in (before, after))
    befores, afters = ([step.ms for step in each.series.runs[:num]] for each in (before, after))
    return Change.of(befores, afters)


def _changes(pairs: Sequence[Pair]) -> list[Change]:
    return [found for pair in pairs if (found := _change(*pair))]


def _compared(where: Environment, before: _Side, after: _Side) -> TrainComparison:
    """What is known of two by now, over the steps that both took."""
    num = min(each.num_steps for each in (before, after))
    one, other = (each.trained(num) for each in (before, after))
    error = largest_difference(one.losses, other.losses)
    return TrainComparison(where, one, other, _change(before, after), error, BUDGETS[before.dtype])


def largest_difference(before: Sequence[float], after: Sequence[float]) -> float:
    """`TrainComparison.max_error` of losses; infinite where one of any step is not finite."""
    errors = [abs(b - a) / max(abs(a), 1.0) for a, b in zip(before, after, strict=True)]
    return largest(errors[:COMPARED]) if largest(errors) < math.inf else math.inf


def _take_steps(
    sides: Sequence[_Side], rounds: Rounds, progress: Progress | None, cancel: Cancel | None,
    on_round: Callable[[], None] | None,
) -> None:  # fmt: skip
    """Steps that warm up, and then those that are timed, of all in turn. Errors: Cancelled between two of them."""
    tally = Tally(len(sides) * (WARM + rounds.expected), progress)
    timing.in_turn([side.warming for side in sides], Rounds(WARM), tally, cancel, doing="warming up")
    timing.in_turn([side.series for side in sides], rounds, tally, cancel, on_round=on_round)
