"""compare for an encoder: a baseline and a selection on the same texts, timed in pairs as decoders are.

A run goes from lists of token ids to the mean of each text's last hidden states on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import torch

from eet_lab.bench.encoding import ErrorBudget, Read, encoded
from eet_lab.bench.environment import environment
from eet_lab.bench.measured import Measurement, Parity, Spread
from eet_lab.bench.paired import Change
from eet_lab.bench.results import Comparison
from eet_lab.bench.timing import (
    PAIR_BUDGET_S,
    SHARED,
    Rounds,
    Series,
    Tally,
    check,
    check_budget,
    check_repeats,
    in_turn,
    median_run,
)
from eet_lab.bench.workloads import Texts, default_prompts
from eet_lab.encoding import Texts as GivenTexts
from eet_lab.encoding import as_texts
from eet_lab.engine.encode import EncoderEngine, readable
from eet_lab.errors import PromptError
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_encoders_device
from eet_lab.parts.passes import Batching
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike, as_recipe
from eet_lab.words import plain

Rows = Sequence[Sequence[int]]


@on_its_encoders_device
def compare_texts(
    model: Model,
    texts: GivenTexts | None = None,
    recipe: RecipeLike = "all",
    *,
    baseline: RecipeLike = "",
    repeats: int | None = None,
    budget_s: float = PAIR_BUDGET_S,
    batch_tokens: int = Batching.batch_tokens,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    on_partial: Callable[[Comparison], None] | None = None,
    **others: Any,
) -> Comparison:
    """`compare` for an encoder: read the texts with `baseline` and `recipe`, check the vectors, then time both in turn.

    `batch_tokens` is what a pass reads at most. The result has the time end to end and the throughput, but no time to a
    first token and none per token. Settings of generation, and views of its steps, are a PromptError.
    """
    check_repeats(repeats)
    check_budget(budget_s)
    if others:
        raise PromptError(f"An encoder reads texts and generates none, so it takes no {', '.join(others)}.")
    recipes = [as_recipe(each, model.device, model.config) for each in (baseline, recipe)]
    given = readable(as_texts(model, default_prompts(model) if texts is None else texts), model.encoder.config, False)
    rows, batching = [np.asarray(text.ids).tolist() for text in given], Batching(batch_tokens)
    with ExitStack() as engines:
        sides = [engines.enter_context(closing(_Side(model, each, rows, batching, cancel))) for each in recipes]
        pair = _TextPair(model, rows, batching, sides)
        rounds = Rounds(repeats, budget_s, lambda: pair.changes().values())
        tally = Tally(3 + 2 * rounds.expected, progress)
        pair.check(tally)
        tell = None if on_partial is None else lambda: on_partial(pair.comparison())
        in_turn([side.timed for side in sides], rounds, tally, cancel, on_round=tell)
        tally.say("done")
        return pair.comparison()


class _Side:
    """One recipe of a comparison: its engine and its runs."""

    def __init__(self, model: Model, recipe: Recipe, rows: Rows, batching: Batching, cancel: Cancel | None) -> None:
        self.recipe, self.timed = recipe, Series(str(recipe), self.read)
        self._model, self._rows, self._batching, self._cancel = model, rows, batching, cancel
        self._engine = EncoderEngine(model.encoder, recipe.parts)
        self.first: Read | None = None

    def read(self) -> Read:
        """One run over all texts."""
        check(self._cancel)
        return encoded(self._engine, self._rows, self._batching, self._cancel)

    def measurement(self) -> Measurement:
        """What its runs say; a run counts as one step, whose tokens are those that were read."""
        assert self.first is not None, "what is timed has been warmed up"
        num_tokens = sum(map(len, self._rows))
        runs = self.timed.runs
        middle = median_run(runs, lambda run: run.total_s)
        activations = middle.activation_bytes if middle.peak_bytes is None else middle.peak_bytes
        weights = self._model.encoder.weight_bytes
        memory = {"weights": weights, "kv": 0, "kv_growth": 0, "activations": activations, "workspace": 0}
        return Measurement(
            recipe=str(self.recipe),
            title=" + ".join(t.title for t in self.recipe) or "Baseline",
            ttft_ms=None,
            tpot_ms=None,
            total_ms=Spread.of([run.total_s * 1e3 for run in runs]),
            tokens_per_s=Spread.of([num_tokens / run.total_s for run in runs]),
            step_ms=(round(middle.total_s * 1e3, 4),),
            step_tokens=(num_tokens,),
            memory=memory | {"peak": weights + activations},
            memory_source="planned" if middle.peak_bytes is None else "measured",
            prepare_s=round(self.first.total_s, 4),
            captures=0,
            joules_per_token=None,
            tokens=tuple(map(tuple, self._rows)),
            texts=tuple(map(self._model.decode, self._rows)),
            repeats=len(runs),
            warnings=(SHARED,) * any(run.was_disturbed for run in runs),
        )

    def close(self) -> None:
        """Give the memory back to the device."""
        self._engine.close()


class _TextPair:
    """Both recipes on the same texts, and whether their vectors agree."""

    def __init__(self, model: Model, rows: Rows, batching: Batching, sides: Sequence[_Side]) -> None:
        self._rows, self._sides = rows, sides
        self._budget = ErrorBudget(model.encoder, rows)
        lengths = tuple(map(len, rows))
        self._described: dict[str, Any] = {
            "environment": environment(model),
            "workload": str(Texts(model.name, len(rows), min(lengths), max(lengths))),
            "prompts": tuple(map(model.decode, rows)),
            "prompt_lengths": lengths,
            "settings": {"batch_tokens": batching.batch_tokens},
        }
        self._parity: Parity | None = None

    def check(self, tally: Tally) -> None:
        """Warm both up, and hold the vectors of that run against each other and against fp32."""
        for side in self._sides:
            tally.say(f"warming up {side.recipe}")
            side.first = side.read()
            tally.finish()
        tally.say("checking the vectors against the baseline")
        self._parity = self._judged(*(side.first.vectors for side in self._sides if side.first is not None))
        tally.finish()

    def _judged(self, before: torch.Tensor, after: torch.Tensor) -> Parity:
        off, most, nothing = self._budget.error(after), self._budget.most, (None,) * len(self._rows)
        verdict = "identical" if torch.equal(before, after) else "within rounding" if off <= most else "different"
        return Parity(
            same_tokens=verdict != "different",
            first_difference=nothing,
            margins=nothing,
            max_error=off if math.isfinite(off) else None,
            budget=most,
            verdict=verdict,  # type: ignore[arg-type]
            explanation=f"Vectors are at most {plain(off)} off those in fp32; the budget is {plain(most)}.",
        )

    def changes(self) -> dict[str, Change]:
        """What the pairs of runs say of the time and of the throughput."""
        before, after = ([run.total_s * 1e3 for run in side.timed.runs] for side in self._sides)
        num_tokens = sum(map(len, self._rows)) * 1e3
        rate, other = ([num_tokens / ms for ms in series] for series in (before, after))
        found = {"total_ms": Change.of(before, after), "tokens_per_s": Change.of(rate, other, more_is_better=True)}
        return {key: change for key, change in found.items() if change is not None}

    def comparison(self) -> Comparison:
        """The result of the pairs that there are."""
        assert self._parity is not None, "what is timed has been checked"
        before, after = (side.measurement() for side in self._sides)
        return Comparison(
            **self._described, baseline=before, selection=after, parity=self._parity, changes=self.changes()
        )
