"""benchmark: our recipes beside their peers on one workload, in one process, timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

from eet_lab.bench import peers, timing
from eet_lab.bench.cost import expansion_ms, predicted_ms, step_cost
from eet_lab.bench.fit import check_fit
from eet_lab.bench.held_out import held_out_perplexity
from eet_lab.bench.launches import StepLaunches, launches_per_token
from eet_lab.bench.measure import Subject, TimedRun
from eet_lab.bench.measured import Cost, Parity, Spread
from eet_lab.bench.parity import ParityCheck
from eet_lab.bench.peers import PEERS, Peer, Timing
from eet_lab.bench.rows import OURS, Row, distinct, equality, named, taken
from eet_lab.bench.tables import perplexities
from eet_lab.bench.timing import Rounds, Series, Tally
from eet_lab.bench.workloads import Workload
from eet_lab.engine.settings import Settings, checked_prompts
from eet_lab.errors import PromptError
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_device
from eet_lab.monitor import open_source
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike
from eet_lab.words import brief

PROVIDERS = (OURS, *PEERS)


@on_its_device
def benchmark(
    model: Model,
    workload: Workload | str,
    recipes: RecipeLike | Sequence[RecipeLike] = ("all",),
    providers: Sequence[str] | str = (OURS,),
    *,
    repeats: int = 3,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> tuple[list[Row], list[str]]:
    """Time each recipe (if "eet_lab" is among the providers) and each peer, A B, B A, A B, ..., on random prompts.

    `workload` may be its name, and must be one of `model`; `recipes` are one or several, each as `as_recipe` takes it.
    Returns a row for each, and remarks: which peers could not run and why, which recipes do not fit into memory, and
    what makes a timing doubtful. All are prepared and their output is checked before anything is timed.
    What lossy recipes did to the perplexity of a held-out text is a remark too, read once all is timed.
    Errors, before any work: RecipeError, PromptError, OutOfMemory where nothing fits; then OutOfMemory, Cancelled.
    """
    timing.check_repeats(repeats)
    workload = Workload.of(workload, model)
    chosen, others, remarks, rows = entered(model, workload, recipes, providers, model.device)
    tally = Tally(1 + (len(chosen) + len(others)) * (1 + repeats), progress)
    found, told, doubts = _timed(model, workload, chosen, others, rows, repeats, tally, cancel)
    quality = _quality(model, chosen, tally, cancel)  # nothing of what was timed is in memory any more
    return found, [*remarks, *told, *quality, *doubts]


class Entries(NamedTuple):
    """Who is to be timed, why others are not, and the prompts."""

    recipes: list[Recipe]
    peers: list[str]
    remarks: list[str]
    rows: list[list[int]]


def entered(
    model: Model,
    workload: Workload,
    recipes: RecipeLike | Sequence[RecipeLike],
    providers: Sequence[str] | str,
    device: str,
) -> Entries:
    """Who of those that are named takes part on `device`, told before any work; `model` may be shapes on meta.

    Errors: those of `benchmark` that come before any work.
    """
    providers = named(providers, PROVIDERS, beside="; single ops (op:...) have others")
    chosen, repeated = distinct(recipes, device, model.config) if OURS in providers else ([], [])
    rows = checked_prompts(workload.prompts(model.config.vocab_size), Settings(workload.new_tokens), model.config)
    peers = {name: PEERS[name].unavailable(device) for name in providers if name in PEERS}
    others, absent = timing.split(peers)
    if not chosen and not others:
        why = "; ".join(absent)
        raise PromptError(f"Nothing is left to time: {why}. Add {OURS}, or another of {', '.join(PEERS)}.")
    fitting, too_large = check_fit(model.decoder, device, workload, chosen)
    return Entries(fitting, others, [*absent, *repeated, *too_large], rows)


def _timed(
    model: Model,
    workload: Workload,
    recipes: Sequence[Recipe],
    others: Sequence[str],
    rows: list[list[int]],
    repeats: int,
    tally: Tally,
    cancel: Cancel | None,
) -> tuple[list[Row], list[str], list[str]]:
    """A row for each who could be prepared, why others could not, and what makes a time doubtful."""
    settings = Settings(max_new_tokens=workload.new_tokens)
    check = ParityCheck(model.decoder, rows, settings, cancel=cancel, say=tally.say)
    tally.finish()
    with closing(open_source(model.device)) as source:
        subjects = [Subject(model, recipe, rows, settings, source, cancel) for recipe in recipes]
        ours = [RecipeProvider(each, recipe, model, rows) for each, recipe in zip(subjects, recipes, strict=True)]
        made, absent = peers.make(others, model.decoder, rows, settings)
        tally.add(-len(absent) * (1 + repeats))
        providers: list[Provider] = [*ours, *(PeerProvider(peer, model, rows) for peer in made)]
        try:
            makers: dict[str, Callable[[], Provider]] = {
                each.name: partial(each.prepare, check, tally.building) for each in providers
            }
            ready, failed = timing.ready(makers, [each.name for each in ours], repeats, tally, cancel)
            series: list[Series[Any]] = [Series(name, each.time) for name, each in ready.items()]
            timing.in_turn(series, Rounds(repeats), tally, cancel)
            shared = {"workload": str(workload), "dtype": model.dtype}
            timed = zip(ready.values(), series, strict=True)
            found = [taken(model.device, **shared, **each.figures(its.runs)) for each, its in timed]
        finally:
            for each in providers:
                each.close()
    doubts = dict.fromkeys(f"{each.name}: {warning}" for each in ours for warning in each.warnings)
    return found, [*timing.split(absent)[1], *failed], list(doubts)


def _quality(model: Model, recipes: Sequence[Recipe], tally: Tally, cancel: Cancel | None) -> list[str]:
    """What lossy recipes did to the perplexity of a held-out text, or why that cannot be told.

    Nothing that happens here loses what was timed.
    """
    lossy = [recipe for recipe in recipes if recipe.lossy]
    if not lossy:
        return []
    tally.say("comparing perplexities on held-out text")
    before, told = None, []
    for recipe in lossy:
        try:
            before = before or held_out_perplexity(model, Recipe(()), cancel)
            told.append(f"{recipe}: {perplexities(before, held_out_perplexity(model, recipe, cancel))}")
        except Exception as problem:  # noqa: BLE001  a user's own op may raise anything
            told.append(f"{recipe}: perplexity is not told. {problem}")
    return told


class RecipeProvider:
    """A recipe of this package. `figures` is what a row holds of its runs."""

    def __init__(self, subject: Subject, recipe: Recipe, model: Model, rows: Sequence[Sequence[int]]) -> None:
        self.name, self.subject = subject.recipe, subject
        self._recipe, self._model, self._rows = recipe, model, rows
        self._parity: Parity | None = None
        self.warnings: tuple[str, ...] = ()

    def prepare(self, check: ParityCheck, progress: Progress) -> RecipeProvider:
        tokens = self.subject.prepare(progress)
        self._parity = check.judge(self._recipe.parts, tokens, self._recipe.tolerance)
        return self

    def time(self) -> TimedRun:
        return self.subject.run()

    def figures(self, runs: Sequence[TimedRun]) -> dict[str, Any]:
        m, same, plans = self.subject.measurement(runs), self._parity, self.subject.engine.plans()
        assert m.cost is not None and same is not None
        launches, extra_ms = self._launches(), expansion_ms(self.subject.engine.model)
        self.warnings = m.warnings
        if self._model.device == "cpu" and (uncounted := self.subject.launches[1]):
            self.warnings += (uncounted,)
        if extra_ms:
            self.warnings += (
                f"plain PyTorch expands int8 weights in every step: of the prediction that is {brief(extra_ms)} ms, "
                "which the floor leaves out",
            )
        return {
            "provider": OURS,
            "recipe": self.name,
            "ttft_ms": m.ttft_ms,
            "tpot_ms": m.tpot_ms,
            "total_ms": m.total_ms,
            "peak_bytes": m.memory["peak"],
            "activation_bytes": m.memory["activations"],
            "lower_bound_bytes": max(plan.lower_bound_bytes for plan in plans.values()),
            "equality": equality(same),
            "same_tokens": same.same_tokens,
            **costs(m.cost, launches, self._model.device, extra_ms),
        }

    def close(self) -> None:
        self.subject.close()

    def _launches(self) -> StepLaunches | None:
        """On a CPU each call is a launch."""
        if self._model.device == "cpu":
            calls, _ = self.subject.launches
            return None if calls is None else StepLaunches(calls, calls)
        return launches_per_token(self.subject.engine, len(self._rows))


class PeerProvider:
    """A peer. Its logits cannot be had, so its tokens are checked: they may part from the baseline's at near-ties."""

    def __init__(self, peer: Peer, model: Model, rows: Sequence[Sequence[int]]) -> None:
        self.name, self._peer, self._model, self._rows = peer.name, peer, model, rows
        self._equality, self._same = "", False

    def prepare(self, check: ParityCheck, progress: Progress) -> PeerProvider:
        firsts, margins = check.first_differences(self._peer.prepare().tokens)
        self._same = not any(first is not None for first in firsts)
        self._equality = check.doubt(firsts, margins) or "passed"
        return self

    def time(self) -> Timing:
        return self._peer.time()

    def figures(self, runs: Sequence[Timing]) -> dict[str, Any]:
        tpot_ms = Spread.of([t.tpot_ms for t in runs])
        tokens = len(runs[0].tokens[0])
        cost = step_cost(self._model.decoder, self._rows, tokens, tpot_ms)
        return {
            "provider": self.name,
            "recipe": "",
            "ttft_ms": Spread.of([t.ttft_ms for t in runs]),
            "tpot_ms": tpot_ms,
            "total_ms": Spread.of([t.total_ms for t in runs]),
            "peak_bytes": self._peer.peak_bytes,
            "activation_bytes": self._activation_bytes(tokens),
            "equality": self._equality,
            "same_tokens": self._same,
            **costs(cost, self._peer.launches(), self._model.device),
        }

    def close(self) -> None:
        self._peer.close()

    def _activation_bytes(self, new_tokens: int) -> int | None:
        """The peak beyond weights and a KV cache of all columns, pads among them; what is longer counts."""
        if self._peer.peak_bytes is None:
            return None
        columns = max(map(len, self._rows)) + new_tokens - 1
        per_column = self._model.config.kv_bytes_per_token(self._model.decoder.dtype.itemsize)
        return self._peer.peak_bytes - self._peer.weight_bytes - len(self._rows) * columns * per_column


Provider = RecipeProvider | PeerProvider


def costs(cost: Cost, counted: StepLaunches | None, device: str, extra_ms: float = 0.0) -> dict[str, Any]:
    """What a row tells of the hardware's bound, of launches, and of what they predict, `extra_ms` on top."""
    predicted = counted and round(predicted_ms(cost.step_bytes, counted, device) + extra_ms, 5)
    return {
        "floor_ms": cost.floor_ms,
        "gb_per_s": cost.gb_per_s,
        "ceiling_gb_per_s": cost.ceiling_gb_per_s,
        "launches_per_token": counted and counted.launches,
        "kernels_per_token": counted and counted.kernels,
        "predicted_ms": predicted,
    }
