"""compare: a baseline and a selection on the same prompts; ladder: techniques added, then left out, one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

from eet_lab.bench.encoding import compare_texts
from eet_lab.bench.held_out import held_out_perplexity
from eet_lab.bench.measure import OnStep, Subject, TimedRun
from eet_lab.bench.measured import Measurement, Parity, Perplexity, Spread
from eet_lab.bench.paired import DETAILS, Change
from eet_lab.bench.parity import ParityCheck
from eet_lab.bench.results import Comparison, Ladder, Rung, changes
from eet_lab.bench.timing import Rounds, Series, Tally, check_budget, in_turn
from eet_lab.bench.workloads import RunInputs
from eet_lab.engine.engine import Engine
from eet_lab.errors import Cancelled
from eet_lab.models import Model
from eet_lab.models.encoder import Encoder
from eet_lab.models.on_device import on_its_device
from eet_lab.monitor import Source, free_bytes_of, open_source
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe, Technique
from eet_lab.texts import Prompts, RecipeLike, as_recipe

Work = TypeVar("Work", bound=Callable[..., Any])

OnPhase = Callable[[str, str], None]
"""Called with a phase ("warm-up", "check", "watched", "measured") and the recipe that it is about."""


def or_texts(work: Work) -> Work:
    """A decorator: where the model is an encoder, texts are compared, with what was given and no defaults."""

    @wraps(work)
    def chosen(model: Any, *args: Any, **keywords: Any) -> Any:
        is_encoder = isinstance(getattr(model, "network", None), Encoder)
        return (compare_texts if is_encoder else work)(model, *args, **keywords)

    return cast(Work, chosen)


@or_texts
@on_its_device
def compare(
    model: Model,
    prompts: Prompts | None = None,
    recipe: RecipeLike = "all",
    *,
    baseline: RecipeLike = "",
    repeats: int | None = None,
    budget_s: float | None = None,
    watch: bool = True,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    on_step: OnStep | None = None,
    on_phase: OnPhase | None = None,
    on_engine: Callable[[Engine], None] | None = None,
    on_partial: Callable[[Comparison], None] | None = None,
    **settings: Any,
) -> Comparison:
    """Run `baseline` and `recipe` on the prompts, check that they say the same, and time both.

    Prompts are texts or lists of token ids (default: eight ragged ones); `settings` are those of `Settings`. Every row
    gets its full number of tokens unless `stop` is given. In order: each recipe is warmed up (phase "warm-up"), each
    runs once with `on_step` called for every step ("watched"), the output is checked ("check"), then both are timed in
    turn, A B, B A, A B, ... ("measured"); a live view should hold still then. What watching cost is the difference.
    They are timed until every change is known to one or two percent, or for `budget_s` seconds (default: two a
    recipe), but six times at least; or exactly `repeats` times. `on_partial` is given what is known after each round
    but the last: it narrows. Where one of them is lossy, the check includes both perplexities on held-out text.
    `on_engine` is given the engine of each watched run, to see its arena and KV cache meanwhile.
    An encoder reads texts instead, and generates none: see `compare_texts`.

    Errors: RecipeError, PromptError, OutOfMemory, and Cancelled once `cancel` is set.
    """
    check_budget(budget_s)
    recipes = [as_recipe(each, model.device, model.config) for each in (baseline, recipe)]
    job = RunInputs.of(model, prompts, repeats, settings)
    with closing(open_source(model.device)) as source, ExitStack() as engines:
        before, after = (_Side(job, each, source, cancel) for each in recipes)
        rounds = Rounds(repeats, budget_s, lambda: after.changes_from(before).values())
        tally = Tally(4 + 2 * watch + 2 * rounds.expected, progress)
        pair = _Pair(job, before, after, tally, on_phase)
        for side in pair.sides:
            engines.enter_context(closing(side.subject))
        pair.check(cancel, watch, on_step, on_engine)
        tell = None if on_partial is None else lambda: on_partial(pair.comparison(costed=False))
        in_turn([side.timed for side in pair.sides], rounds, tally, cancel, on_round=tell)
        found = pair.comparison()
    tally.say("done")
    return found


class _Side:
    """A recipe that is compared: its subject, its runs, and what else is known of it by now."""

    def __init__(self, job: RunInputs, recipe: Recipe, source: Source, cancel: Cancel | None) -> None:
        self.recipe, self.subject = recipe, Subject(job.model, recipe, job.rows, job.settings, source, cancel)
        self.timed = Series(str(recipe), self._run)
        self.on_phase: OnPhase = lambda phase, about: None
        self.stays = True
        self.watched: list[TimedRun] = []
        self.quality: Perplexity | None = None
        self.parity: Parity | None = None

    def measurement(self, costed: bool) -> Measurement:
        """What its runs say; `costed` once nothing is timed any more."""
        found = self.subject.measurement(self.timed.runs, self.watched, costed)
        return replace(found, perplexity=self.quality)

    def changes_from(self, before: _Side, details: Collection[str] = ()) -> dict[str, Change]:
        """What those rounds say in which both ran: each begins with the first, and leaves none out."""
        num = min(len(before.timed.runs), len(self.timed.runs))
        runs = ([run.generation for run in each.timed.runs[:num]] for each in (before, self))
        return changes(*runs, details=details)

    def _run(self) -> TimedRun:
        self.on_phase("measured", str(self.recipe))
        if self.stays:
            return self.subject.run()
        self.subject.prepare()
        run = self.subject.run()
        self.subject.close()
        return run


class _Pair:
    """Both recipes of a comparison, from warming up to the result."""

    def __init__(self, job: RunInputs, before: _Side, after: _Side, tally: Tally, on_phase: OnPhase | None) -> None:
        self._job, self._tally, self._described = job, tally, job.described()
        self.before, self.after = self.sides = before, after
        for side in self.sides:
            side.on_phase = on_phase or side.on_phase

    def check(
        self, cancel: Cancel | None, watch: bool, on_step: OnStep | None, on_engine: Callable[[Engine], None] | None
    ) -> None:
        """Warm up, run both once for those who watch, and check the output."""
        for side in self.sides:
            self._enter("warm-up", side, f"warming up {side.recipe}")
            if watch:
                side.subject.begin(self._tally.building)
            else:
                tokens = side.subject.prepare(self._tally.building)
            self._tally.finish()
        for side in self.sides if watch else ():
            self._enter("watched", side, f"watching {side.recipe}")
            if on_engine is not None:
                on_engine(side.subject.engine)
            side.watched.append(side.subject.run(on_step))
            tokens = side.watched[0].generation.tokens
            self._tally.finish()
        self._judge(tokens, cancel)
        self._tally.finish(2)

    def _judge(self, tokens: Sequence[Sequence[int]], cancel: Cancel | None) -> None:
        """Hold what the second recipe said against the first; where one is lossy, compare perplexities too."""
        job, before, after = self._job, self.before.recipe, self.after.recipe
        self._enter("check", self.after, "checking the output against the baseline")
        check = ParityCheck(job.model.decoder, job.rows, job.settings, before.parts, cancel)
        self.after.parity = check.judge(after.parts, tokens, before.tolerance + after.tolerance)
        if before.lossy or after.lossy:
            self._tally.say("comparing perplexities on held-out text")
            for side in self.sides:
                side.quality = held_out_perplexity(job.model, side.recipe, cancel)

    def comparison(self, costed: bool = True) -> Comparison:
        """The result of the pairs that there are."""
        before, after = (side.measurement(costed) for side in self.sides)
        watched, seen, parity, cost = self.after.watched, None, self.after.parity, None
        assert parity is not None, "what is timed has been checked"
        if watched:
            seen = self.after.subject.measurement(watched, costed=costed)
            if seen.total_ms is not None and after.total_ms is not None:
                cost = round((seen.total_ms.p50 / after.total_ms.p50 - 1) * 100, 2)
        return Comparison(
            **self._described,
            baseline=before,
            selection=after,
            parity=parity,
            watched=seen,
            watching_cost_percent=cost,
            changes=self.after.changes_from(self.before),
        )

    def _enter(self, phase: str, side: _Side, message: str) -> None:
        self._tally.say(message)
        side.on_phase(phase, str(side.recipe))


ROOM = 2
"""Engines are kept side by side while so many times what the largest run and its check take is still free."""


@on_its_device
def ladder(
    model: Model,
    prompts: Prompts | None = None,
    recipe: RecipeLike = "all",
    *,
    repeats: int | None = None,
    budget_s: float | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    on_partial: Callable[[Ladder], None] | None = None,
    **settings: Any,
) -> Ladder:
    """Credit each technique of `recipe` with its own milliseconds and bytes.

    Techniques are added one by one in canonical order, each with what it requires, and then left out of the full
    recipe one by one, each with what needs it. Every recipe is checked against the baseline; then all are timed in
    turn, a round from first to last and the next one back, until every rung's own times are known to one or two
    percent, or for `budget_s` seconds (default: two a recipe), but six rounds at least; or exactly `repeats`
    rounds. Their memory stays side by side; where that does not fit, each is prepared and warmed up anew in every
    round. Prompts and `settings` are those of `compare`. `on_partial` is given what is known after each round but the
    last. Once `cancel` is set, the ladder that comes back holds what was measured until then and is marked partial.

    Errors: RecipeError, PromptError, OutOfMemory.
    """
    check_budget(budget_s)
    full = as_recipe(recipe, model.device, model.config)
    job = RunInputs.of(model, prompts, repeats, settings)
    with closing(open_source(model.device)) as source:
        climb = _Climb(job, full, source, cancel)
        rounds = Rounds(repeats, budget_s, climb.own_times, len(climb.entries))
        stopped = False
        try:
            climb.measure(rounds, progress, on_partial)
        except Cancelled:
            stopped = True
        finally:
            climb.close()
        return climb.result(partial=stopped)


class PlannedRung(NamedTuple):
    """A rung to be measured: the technique that it has more, or less, and what goes along with it; its recipe, and the
    one that it is compared with. The baseline has no name, and is compared with none.
    """

    name: str
    title: str
    along: tuple[str, ...]
    recipe: Recipe
    against: Recipe | None


def rungs_up(full: Recipe) -> list[PlannedRung]:
    """The rungs from the baseline to the full recipe. A technique whose requirements come later brings them along."""
    named, chosen = {t.name: t for t in full}, list[Technique]()
    climb = [PlannedRung("", "Baseline", (), Recipe(), None)]
    for t in full:
        if t not in chosen:
            along = [name for name in _required(t.name, named) if named[name] not in chosen]
            chosen += [*(named[name] for name in along), t]
            climb.append(PlannedRung(t.name, t.title, tuple(along), Recipe(tuple(chosen)), climb[-1].recipe))
    return climb


def rungs_down(full: Recipe) -> list[PlannedRung]:
    """The full recipe less each technique and what needs it; nothing to tell where there is only one."""
    if len(full) < 2:
        return []
    return [PlannedRung(t.name, t.title, along, rest, full) for t in full for rest, along in [full.without(t.name)]]


def _required(name: str, named: dict[str, Technique]) -> list[str]:
    """What a technique requires, and what those require, in the order in which they can be added."""
    found: list[str] = []
    for needed in named[name].requires:
        found += [*(each for each in _required(needed, named) if each not in found), needed]
    return list(dict.fromkeys(found))


class _Climb:
    """Every distinct recipe of a ladder, from the first to the last, and the rungs that they make."""

    def __init__(self, job: RunInputs, full: Recipe, source: Source, cancel: Cancel | None) -> None:
        self._job, self._full, self._cancel = job, full, cancel
        self._up, self._down = rungs_up(full), rungs_down(full)
        self._described = job.described()
        recipes = {str(each.recipe): each.recipe for each in (*self._up, *self._down)}
        self.entries = {name: _Side(job, recipe, source, cancel) for name, recipe in recipes.items()}
        self._most_bytes = 0

    def measure(self, rounds: Rounds, progress: Progress | None, on_partial: Callable[[Ladder], None] | None) -> None:
        """Check all, then time all in turn. Cancelled once it is stopped."""
        job, num, entries = self._job, len(self.entries), list(self.entries.values())
        tally = Tally(num * (2 + rounds.expected), progress)
        tally.say("reading what the baseline says")
        parity_check = ParityCheck(job.model.decoder, job.rows, job.settings, cancel=self._cancel)
        for each in entries:
            self._check(each, parity_check, tally)
        tell = None if on_partial is None else lambda: on_partial(self.result(partial=False, costed=False))
        in_turn([each.timed for each in entries], rounds, tally, self._cancel, on_round=tell)
        tally.say("done")

    def _check(self, entry: _Side, parity_check: ParityCheck, tally: Tally) -> None:
        recipe = entry.recipe
        tally.say(f"warming up {recipe}")
        tokens = entry.subject.prepare(tally.building)
        tally.finish()
        tally.say(f"checking {recipe}")
        self._most_bytes = max(self._most_bytes, entry.subject.run_bytes + parity_check.recorded_bytes)
        if entry.stays and free_bytes_of(self._job.model.decoder.device) < ROOM * self._most_bytes:
            for each in self.entries.values():
                each.stays = False
            self.close()
        if not entry.stays:
            entry.subject.close()
        entry.parity = parity_check.judge(recipe.parts, tokens, recipe.tolerance)
        if self._full.lossy and (recipe.lossy or not recipe):
            entry.quality = held_out_perplexity(self._job.model, recipe, self._cancel)
        tally.finish()

    def own_times(self) -> list[Change]:
        """Every time of each rung, as `compare` asks for pairs by every time of its two recipes."""
        planned = (*self._up[1:], *self._down)
        sides = [(self.entries[str(each.against)], self.entries[str(each.recipe)]) for each in planned]
        return [change for before, after in sides for change in after.changes_from(before).values()]

    def result(self, partial: bool, costed: bool = True) -> Ladder:
        """The rungs whose recipes have been timed."""
        timed = {name: each.measurement(costed) for name, each in self.entries.items() if each.timed.runs}

        def known(planned: PlannedRung) -> bool:
            return {str(planned.recipe), str(planned.against or Recipe())} <= timed.keys()

        climbed, left_out = (
            tuple(self._rung(each, timed) for each in filter(known, planned)) for planned in (self._up, self._down)
        )
        first, last = self.entries[str(Recipe())], self.entries[str(self._full)]
        whole = last.changes_from(first) if len(climbed) > 1 else {}
        return Ladder(
            **self._described,
            recipe=str(self._full),
            rungs=climbed,
            left_out=left_out,
            partial=partial,
            changes=whole,
        )

    def close(self) -> None:
        """Give the memory back to the device."""
        for each in self.entries.values():
            each.subject.close()

    def _rung(self, planned: PlannedRung, timed: dict[str, Measurement]) -> Rung:
        own, after = self.entries[str(planned.recipe)], timed[str(planned.recipe)]
        assert own.parity is not None, "what is timed has been checked"
        rung = Rung(planned.name, planned.title, planned.along, after, own.parity)
        if planned.against is None:
            return rung
        against = str(planned.against)
        before, found = timed[against], own.changes_from(self.entries[against], DETAILS)
        return replace(
            rung,
            delta_ms=_delta(found.get("total_ms"), before.total_ms, after.total_ms),
            delta_ttft_ms=_delta(found.get("ttft_ms"), before.ttft_ms, after.ttft_ms),
            delta_tpot_ms=_delta(found.get("tpot_ms"), before.tpot_ms, after.tpot_ms),
            delta_bytes=after.memory["peak"] - before.memory["peak"],
            changes=found,
        )


def _delta(change: Change | None, before: Spread | None, after: Spread | None) -> Spread | None:
    """The difference of the medians, so that a row of them adds up, in the interval of the pairs."""
    if change is None or before is None or after is None:
        return None
    low, _, high = change.delta
    middle = after.p50 - before.p50
    return Spread(*(round(end, 4) for end in (min(low, middle), middle, max(high, middle))))
