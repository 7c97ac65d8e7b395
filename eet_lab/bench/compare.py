"""compare: a baseline and a selection on the same prompts, weights and seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar, cast

from eet_lab.bench.encoding import compare_texts
from eet_lab.bench.held_out import held_out_perplexity
from eet_lab.bench.measure import OnStep, Subject, TimedRun
from eet_lab.bench.measured import Measurement, Parity, Perplexity
from eet_lab.bench.paired import Change
from eet_lab.bench.parity import ParityCheck
from eet_lab.bench.results import Comparison, changes
from eet_lab.bench.timing import PAIR_BUDGET_S, Rounds, Series, Tally, check_budget, in_turn
from eet_lab.bench.workloads import RunInputs
from eet_lab.engine.engine import Engine
from eet_lab.models import Model
from eet_lab.models.encoder import Encoder
from eet_lab.models.on_device import on_its_device
from eet_lab.monitor import Source, open_source
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
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
    """TimedRun `baseline` and `recipe` on the prompts, check that they say the same, and time both.

    Prompts are texts or lists of token ids (default: eight ragged ones); `settings` are those of `Settings`. Every row
    gets its full number of tokens unless `stop` is given. In order: each recipe is warmed up (phase "warm-up"), each
    runs once with `on_step` called for every step ("watched"), the output is checked ("check"), then both are timed in
    turn, A B, B A, A B, ... ("measured"); a live view should hold still then. What watching cost is the difference.
    They are timed until every change is known to one or two percent, or for `budget_s` seconds, but six times at
    least; or exactly `repeats` times. `on_partial` is given what is known after each round but the last: it narrows.
    Where one of them is lossy, the check includes both perplexities on held-out text.
    `on_engine` is given the engine of each watched run, to see its arena and KV cache meanwhile.
    An encoder reads texts instead, and generates none: see `compare_texts`.

    Errors: RecipeError, PromptError, OutOfMemory, and Cancelled once `cancel` is set.
    """
    check_budget(budget_s)
    recipes = [as_recipe(each, model.device, model.config) for each in (baseline, recipe)]
    job = RunInputs.of(model, prompts, repeats, settings)
    with closing(open_source(model.device)) as source:
        rounds = Rounds(repeats, budget_s, lambda: pair.changes().values())
        tally = Tally(4 + 2 * watch + 2 * rounds.expected, progress)
        pair = _Pair(job, recipes, source, cancel, tally, on_phase)
        try:
            pair.check(watch, on_step, on_engine)
            pair.time(rounds, on_partial)
            found = pair.comparison()
        finally:
            pair.close()
    tally.say("done")
    return found


class _Pair:
    """Both recipes of a comparison, from warming up to the result."""

    def __init__(
        self,
        job: RunInputs,
        recipes: Sequence[Recipe],
        source: Source,
        cancel: Cancel | None,
        tally: Tally,
        on_phase: OnPhase | None,
    ) -> None:
        self._job, self._recipes, self._cancel, self._tally = job, recipes, cancel, tally
        self._on_phase: OnPhase = on_phase or (lambda phase, about: None)
        self._described = job.described()
        self._subjects = [Subject(job.model, each, job.rows, job.settings, source, cancel) for each in recipes]
        self._timed = [Series(each.recipe, partial(self._measured, each)) for each in self._subjects]
        self._watched: list[TimedRun] = []
        self._quality: list[Perplexity | None] = [None, None]
        self._parity: Parity | None = None

    def check(self, watch: bool, on_step: OnStep | None, on_engine: Callable[[Engine], None] | None) -> None:
        """Warm up, run both once for those who watch, and check the output."""
        for subject in self._subjects:
            self._enter("warm-up", subject.recipe, f"warming up {subject.recipe}")
            if watch:
                subject.begin(self._tally.building)
            else:
                tokens = subject.prepare(self._tally.building)
            self._tally.finish()
        for subject in self._subjects if watch else []:
            self._enter("watched", subject.recipe, f"watching {subject.recipe}")
            if on_engine is not None:
                on_engine(subject.engine)
            self._watched.append(subject.run(on_step))
            tokens = self._watched[-1].generation.tokens
            self._tally.finish()
        self._judge(tokens)
        self._tally.finish(2)

    def _judge(self, tokens: Sequence[Sequence[int]]) -> None:
        """Hold what the second recipe said against the first; where one is lossy, compare perplexities too."""
        job, (before, after) = self._job, self._recipes
        self._enter("check", str(after), "checking the output against the baseline")
        check = ParityCheck(job.model.decoder, job.rows, job.settings, before.parts, self._cancel)
        self._parity = check.judge(after.parts, tokens, before.tolerance + after.tolerance)
        if before.lossy or after.lossy:
            self._tally.say("comparing perplexities on held-out text")
            self._quality = [held_out_perplexity(job.model, each, self._cancel) for each in self._recipes]

    def time(self, rounds: Rounds, on_partial: Callable[[Comparison], None] | None) -> None:
        """TimedRun both in turn, in both orders, until `rounds` are enough."""
        tell = None if on_partial is None else lambda: on_partial(self.comparison(costed=False))
        in_turn(self._timed, rounds, self._tally, self._cancel, on_round=tell)

    def _measured(self, subject: Subject) -> TimedRun:
        self._on_phase("measured", subject.recipe)
        return subject.run()

    def changes(self) -> dict[str, Change]:
        """What the pairs that there are say of every time."""
        return changes(*([run.generation for run in each.runs] for each in self._timed))

    def comparison(self, costed: bool = True) -> Comparison:
        """The result of the pairs that there are; `costed` once nothing is timed any more."""
        assert self._parity is not None, "what is timed has been checked"
        beside = [[run] for run in self._watched] or [[], []]
        before, after = (
            replace(subject.measurement(timed.runs, others, costed), perplexity=quality)
            for subject, timed, others, quality in zip(self._subjects, self._timed, beside, self._quality, strict=True)
        )
        seen = self._subjects[1].measurement(self._watched[1:], costed=costed) if self._watched else None
        return Comparison(
            **self._described,
            baseline=before,
            selection=after,
            parity=self._parity,
            watched=seen,
            watching_cost_percent=_cost_percent(seen, after),
            changes=self.changes(),
        )

    def close(self) -> None:
        """Give the memory back to the device."""
        for subject in self._subjects:
            subject.close()

    def _enter(self, phase: str, about: str, message: str) -> None:
        self._tally.say(message)
        self._on_phase(phase, about)


def _cost_percent(watched: Measurement | None, measured: Measurement) -> float | None:
    if watched is None or watched.total_ms is None or measured.total_ms is None:
        return None
    return round((watched.total_ms.p50 / measured.total_ms.p50 - 1) * 100, 2)
