"""compare: a baseline and a selection on the same prompts, weights and seed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

from eet_lab.bench.job import Job
from eet_lab.bench.measure import OnStep, Run, Subject
from eet_lab.bench.measured import Measurement, Perplexity
from eet_lab.bench.perplexity import held_out_perplexity
from eet_lab.bench.progress import Tally
from eet_lab.bench.results import Comparison
from eet_lab.bench.sameness import Witness
from eet_lab.engine.engine import Engine
from eet_lab.models import Model
from eet_lab.monitor import open_source
from eet_lab.progress import Cancel, Progress
from eet_lab.texts import Prompts, RecipeLike, as_recipe
from eet_lab.threads import on_cpu_threads

OnPhase = Callable[[str, str], None]
"""Called with a phase ("warm-up", "check", "watched", "measured") and the recipe that it is about."""


@on_cpu_threads
def compare(
    model: Model,
    prompts: Prompts | None = None,
    recipe: RecipeLike = "all",
    *,
    baseline: RecipeLike = "",
    repeats: int = 3,
    watch: bool = True,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    on_step: OnStep | None = None,
    on_phase: OnPhase | None = None,
    on_engine: Callable[[Engine], None] | None = None,
    **settings: Any,
) -> Comparison:
    """Run `baseline` and `recipe` on the prompts, check that they say the same, and time both.

    Prompts are texts or lists of token ids (default: eight ragged ones); `settings` are those of `Settings`. Every row
    gets its full number of tokens unless `stop` is given. In order: each recipe is warmed up (phase "warm-up"), the
    output is checked ("check"), each runs once with `on_step` called for every step ("watched"), then both are timed in
    turn, A, B, A, B ("measured"); a live view should hold still then. What watching cost is the difference.
    Where one of them is lossy, the check includes both perplexities on held-out text.
    `on_engine` is given the engine of each watched run, to see its arena and KV cache meanwhile.

    Errors: RecipeError, PromptError, OutOfMemory, and Cancelled once `cancel` is set.
    """
    recipes = [as_recipe(each, model.device) for each in (baseline, recipe)]
    job = Job.of(model, prompts, repeats, settings)
    tally = Tally(4 + 2 * watch + 2 * repeats, progress)

    def enter(phase: str, about: str, message: str) -> None:
        tally.say(message)
        if on_phase is not None:
            on_phase(phase, about)

    with closing(open_source(model.device)) as source:
        subjects = [Subject(model, each, job.rows, job.settings, source, cancel) for each in recipes]
        try:
            for subject in subjects:
                enter("warm-up", subject.recipe, f"warming up {subject.recipe}")
                tokens = subject.prepare(tally.building)
                tally.finish()
            enter("check", str(recipes[1]), "checking the output against the baseline")
            witness = Witness(model.decoder, job.rows, job.settings, recipes[0].parts, cancel)
            sameness = witness.judge(recipes[1].parts, tokens, sum(each.tolerance for each in recipes))
            quality: list[Perplexity | None] = [None, None]
            if any(each.lossy for each in recipes):
                tally.say("comparing perplexities on held-out text")
                quality = [held_out_perplexity(model, each, cancel) for each in recipes]
            tally.finish(2)
            watched: list[Run] = []
            for subject in subjects if watch else []:
                enter("watched", subject.recipe, f"watching {subject.recipe}")
                if on_engine is not None:
                    on_engine(subject.engine)
                watched.append(subject.run(on_step))
                tally.finish()
            timed: tuple[list[Run], list[Run]] = ([], [])
            for repeat in range(repeats):
                for subject, runs in zip(subjects, timed, strict=True):
                    enter("measured", subject.recipe, f"timing {subject.recipe}, {repeat + 1} of {repeats}")
                    runs.append(subject.run())
                    tally.finish()
            beside = [[run] for run in watched] or [[], []]
            before, after = (
                subject.measurement(runs, others) for subject, runs, others in zip(subjects, timed, beside, strict=True)
            )
            seen = subjects[1].measurement(watched[1:]) if watch else None
        finally:
            for subject in subjects:
                subject.close()
    tally.say("done")
    return Comparison(
        **job.described(),
        baseline=replace(before, perplexity=quality[0]),
        selection=replace(after, perplexity=quality[1]),
        sameness=sameness,
        watched=seen,
        watching_cost_percent=_cost_percent(seen, after),
    )


def _cost_percent(watched: Measurement | None, measured: Measurement) -> float | None:
    if watched is None or watched.total_ms is None or measured.total_ms is None:
        return None
    return round((watched.total_ms.p50 / measured.total_ms.p50 - 1) * 100, 2)
