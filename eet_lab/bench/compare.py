"""compare: a baseline and a selection on the same prompts, weights and seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from eet_lab.bench.job import Job
from eet_lab.bench.measure import OnStep, Run, Subject
from eet_lab.bench.measured import TIMES, Measurement, Parity, Perplexity
from eet_lab.bench.paired import Change
from eet_lab.bench.parity import ParityCheck
from eet_lab.bench.perplexity import held_out_perplexity
from eet_lab.bench.results import Comparison
from eet_lab.bench.timing import PAIR_BUDGET_S, Rounds, Tally, check_budget, counterbalanced
from eet_lab.engine.engine import Engine
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_device
from eet_lab.monitor import open_source
from eet_lab.progress import Cancel, Progress
from eet_lab.texts import Prompts, RecipeLike, as_recipe

OnPhase = Callable[[str, str], None]
"""Called with a phase ("warm-up", "check", "watched", "measured") and the recipe that it is about."""


@on_its_device
def compare(
    model: Model,
    prompts: Prompts | None = None,
    recipe: RecipeLike = "all",
    *,
    baseline: RecipeLike = "",
    repeats: int | None = None,
    budget_s: float = PAIR_BUDGET_S,
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
    They are timed until every change is known to one or two percent, or for `budget_s` seconds, but six times at
    least; or exactly `repeats` times. `on_partial` is given what is known after each round but the last: it narrows.
    Where one of them is lossy, the check includes both perplexities on held-out text.
    `on_engine` is given the engine of each watched run, to see its arena and KV cache meanwhile.

    Errors: RecipeError, PromptError, OutOfMemory, and Cancelled once `cancel` is set.
    """
    check_budget(budget_s)
    recipes = [as_recipe(each, model.device, model.config) for each in (baseline, recipe)]
    job = Job.of(model, prompts, repeats, settings)
    timed: tuple[list[Run], list[Run]] = ([], [])
    rounds = Rounds(repeats, budget_s, lambda: changes(*timed).values())
    before_timing = 4 + 2 * watch
    tally = Tally(before_timing + 2 * rounds.expected, progress)

    def enter(phase: str, about: str, message: str) -> None:
        tally.say(message)
        if on_phase is not None:
            on_phase(phase, about)

    with closing(open_source(model.device)) as source:
        subjects = [Subject(model, each, job.rows, job.settings, source, cancel) for each in recipes]
        try:
            for subject in subjects:
                enter("warm-up", subject.recipe, f"warming up {subject.recipe}")
                if watch:
                    subject.begin(tally.building)
                else:
                    tokens = subject.prepare(tally.building)
                tally.finish()
            watched: list[Run] = []
            for subject in subjects if watch else []:
                enter("watched", subject.recipe, f"watching {subject.recipe}")
                if on_engine is not None:
                    on_engine(subject.engine)
                watched.append(subject.run(on_step))
                tokens = watched[-1].generation.tokens
                tally.finish()
            enter("check", str(recipes[1]), "checking the output against the baseline")
            parity_check = ParityCheck(model.decoder, job.rows, job.settings, recipes[0].parts, cancel)
            sameness = parity_check.judge(recipes[1].parts, tokens, sum(each.tolerance for each in recipes))
            quality: list[Perplexity | None] = [None, None]
            if any(each.lossy for each in recipes):
                tally.say("comparing perplexities on held-out text")
                quality = [held_out_perplexity(model, each, cancel) for each in recipes]
            tally.finish(2)
            findings = _Findings(job, subjects, timed, watched, quality, sameness)
            for number in rounds:
                tally.expect(before_timing + 2 * rounds.expected)
                if number and on_partial is not None:
                    on_partial(findings.comparison(costed=False))
                for subject, runs in counterbalanced(list(zip(subjects, timed, strict=True)), number):
                    enter("measured", subject.recipe, f"timing {subject.recipe}, pair {number + 1}")
                    runs.append(subject.run())
                    tally.finish()
            tally.expect(before_timing + 2 * len(timed[0]))
            found = findings.comparison()
        finally:
            for subject in subjects:
                subject.close()
    tally.say("done")
    return found


class _Findings:
    """What a comparison says of the pairs that there are."""

    def __init__(
        self,
        job: Job,
        subjects: Sequence[Subject],
        timed: tuple[list[Run], list[Run]],
        watched: Sequence[Run],
        quality: Sequence[Perplexity | None],
        sameness: Parity,
    ) -> None:
        self._job, self._subjects, self._timed, self._watched = job, subjects, timed, watched
        self._quality, self._sameness, self._described = quality, sameness, job.described()

    def comparison(self, costed: bool = True) -> Comparison:
        """The result; `costed` once nothing is timed any more."""
        beside = [[run] for run in self._watched] or [[], []]
        before, after = (
            replace(subject.measurement(runs, others, costed), perplexity=quality)
            for subject, runs, others, quality in zip(self._subjects, self._timed, beside, self._quality, strict=True)
        )
        seen = self._subjects[1].measurement(self._watched[1:], costed=costed) if self._watched else None
        return Comparison(
            **self._described,
            baseline=before,
            selection=after,
            sameness=self._sameness,
            watched=seen,
            watching_cost_percent=_cost_percent(seen, after),
            changes=changes(*self._timed),
        )


def changes(befores: Sequence[Run], afters: Sequence[Run]) -> dict[str, Change]:
    """What the runs of each round say of every time, by its name in a `Measurement`."""
    found = {}
    for metric in TIMES:
        before, after = ([metric.read(run.generation) for run in runs] for runs in (befores, afters))
        found[metric.key] = Change.of(before, after, metric.more_is_better)
    return {key: change for key, change in found.items() if change is not None}


def _cost_percent(watched: Measurement | None, measured: Measurement) -> float | None:
    if watched is None or watched.total_ms is None or measured.total_ms is None:
        return None
    return round((watched.total_ms.p50 / measured.total_ms.p50 - 1) * 100, 2)
