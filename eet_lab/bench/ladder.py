"""ladder: techniques added one by one, then left out one by one."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

from eet_lab.bench.job import Job
from eet_lab.bench.measure import Run, Subject
from eet_lab.bench.measured import Measurement, Sameness, Spread
from eet_lab.bench.perplexity import held_out_perplexity
from eet_lab.bench.progress import Tally
from eet_lab.bench.results import Ladder, Rung
from eet_lab.bench.sameness import Witness
from eet_lab.errors import Cancelled
from eet_lab.models import Model
from eet_lab.monitor import Source, open_source
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe, Technique, known
from eet_lab.texts import Prompts, RecipeLike, as_recipe
from eet_lab.threads import on_cpu_threads

Climb = list[tuple[str, tuple[str, ...], Recipe]]
"""Rungs to be measured: a technique's name, what goes along with it, and the recipe."""


@on_cpu_threads
def ladder(
    model: Model,
    prompts: Prompts | None = None,
    recipe: RecipeLike = "all",
    *,
    repeats: int = 3,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    **settings: Any,
) -> Ladder:
    """Credit each technique of `recipe` with its own milliseconds and bytes.

    Techniques are added one by one in canonical order, each with what it requires, and then left out of the full
    recipe one by one, each with what needs it. Every recipe is checked against the baseline and timed alone, its
    memory given back before the next. Prompts and `settings` are those of `compare`. Once `cancel` is set, the ladder
    that comes back holds what was measured until then and is marked partial.

    Errors: RecipeError, PromptError, OutOfMemory.
    """
    full = as_recipe(recipe, model.device)
    job = Job.of(model, prompts, repeats, settings)
    up, down = rungs_up(full), rungs_down(full)
    distinct = {str(each) for _, _, each in (*up, *down)}
    tally = Tally(len(distinct) * (2 + repeats), progress)
    partial = False
    climbed: list[Rung] = []
    left_out: list[Rung] = []
    with closing(open_source(model.device)) as source:
        try:
            bench = _Bench(job, repeats, source, cancel, tally, full.lossy)
            for name, along, each in up:
                climbed.append(_rung(name, along, bench(each), climbed[-1].measurement if climbed else None))
            for name, along, each in down:
                left_out.append(_rung(name, along, bench(each), climbed[-1].measurement))
        except Cancelled:
            partial = True
    tally.say("stopped" if partial else "done")
    return Ladder(**job.described(), recipe=str(full), rungs=tuple(climbed), left_out=tuple(left_out), partial=partial)


def rungs_up(full: Recipe) -> Climb:
    """From the baseline to the full recipe; a technique whose requirements come later brings them along."""
    named, chosen = {t.name: t for t in full}, list[Technique]()
    climb: Climb = [("", (), Recipe())]
    for t in full:
        if t not in chosen:
            along = [name for name in _required(t.name, named) if named[name] not in chosen]
            chosen += [*(named[name] for name in along), t]
            climb.append((t.name, tuple(along), Recipe(tuple(chosen))))
    return climb


def rungs_down(full: Recipe) -> Climb:
    """The full recipe less each technique and what needs it; nothing to tell where there is only one."""
    if len(full) < 2:
        return []
    return [(t.name, along, rest) for t in full for rest, along in [full.without(t.name)]]


def _required(name: str, named: dict[str, Technique]) -> list[str]:
    """What a technique requires, and what those require, in the order in which they can be added."""
    found: list[str] = []
    for needed in named[name].requires:
        found += [*(each for each in _required(needed, named) if each not in found), needed]
    return list(dict.fromkeys(found))


class _Bench:
    """Checks and times a recipe, once even if it stands on two rungs.

    `lossy`: perplexities are wanted, of the baseline and of what is lossy; the others have the baseline's.
    """

    def __init__(
        self, job: Job, repeats: int, source: Source, cancel: Cancel | None, tally: Tally, lossy: bool
    ) -> None:
        self._job, self._repeats, self._source, self._cancel, self._tally = job, repeats, source, cancel, tally
        self._lossy = lossy
        self._known: dict[str, tuple[Measurement, Sameness]] = {}
        tally.say("reading what the baseline says")
        self._witness = Witness(job.model.decoder, job.rows, job.settings, cancel=cancel)

    def __call__(self, recipe: Recipe) -> tuple[Measurement, Sameness]:
        if str(recipe) not in self._known:
            self._known[str(recipe)] = self._measured(recipe)
        return self._known[str(recipe)]

    def _measured(self, recipe: Recipe) -> tuple[Measurement, Sameness]:
        job, tally, runs, quality = self._job, self._tally, list[Run](), None
        subject = Subject(job.model, recipe, job.rows, job.settings, self._source, self._cancel)
        try:
            tally.say(f"warming up {recipe}")
            tokens = subject.prepare(tally.building)
            tally.finish()
            tally.say(f"checking {recipe}")
            sameness = self._witness.judge(recipe.parts, tokens, recipe.tolerance)
            if self._lossy and (recipe.lossy or not recipe):
                quality = held_out_perplexity(job.model, recipe, self._cancel)
            tally.finish()
            for repeat in range(self._repeats):
                tally.say(f"timing {recipe}, {repeat + 1} of {self._repeats}")
                runs.append(subject.run())
                tally.finish()
            return replace(subject.measurement(runs), perplexity=quality), sameness
        finally:
            subject.close()


def _rung(name: str, along: tuple[str, ...], found: tuple[Measurement, Sameness], against: Measurement | None) -> Rung:
    measurement, sameness = found
    title = known(name).title if name else "Baseline"
    if against is None:
        return Rung(name, title, along, measurement, sameness)
    return Rung(
        name,
        title,
        along,
        measurement,
        sameness,
        delta_ms=_delta(measurement.total_ms, against.total_ms),
        delta_ttft_ms=_delta(measurement.ttft_ms, against.ttft_ms),
        delta_tpot_ms=_delta(measurement.tpot_ms, against.tpot_ms),
        delta_bytes=measurement.memory["peak"] - against.memory["peak"],
    )


def _delta(after: Spread | None, before: Spread | None) -> Spread | None:
    return None if after is None or before is None else after.minus(before)
