"""race: our recipes beside their peers on one workload, in one process, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any, Protocol

import torch

from eet_lab.bench.cost import step_cost
from eet_lab.bench.launches import launches_per_token
from eet_lab.bench.measure import Run, Subject
from eet_lab.bench.peers import PEERS, Mode, Peer, Timing, to_hf
from eet_lab.bench.progress import Tally
from eet_lab.bench.results import Sameness, Spread
from eet_lab.bench.rows import Row, taken
from eet_lab.bench.sameness import Witness
from eet_lab.bench.workloads import Workload
from eet_lab.engine.settings import Settings, checked_prompts
from eet_lab.errors import Cancelled, PromptError, did_you_mean, first_line
from eet_lab.models import Model
from eet_lab.monitor import open_source
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
from eet_lab.texts import as_recipe
from eet_lab.threads import on_cpu_threads

OURS = "eet_lab"
PROVIDERS = (OURS, *PEERS)


class Racer(Protocol):
    """One provider with one recipe."""

    name: str

    def prepare(self, witness: Witness, progress: Progress) -> None:
        """Build, compile, warm up, and check the output."""

    def time(self) -> None:
        """One measured run."""

    def figures(self) -> dict[str, Any]:
        """What a row holds of it."""


@on_cpu_threads
def race(
    model: Model,
    workload: Workload,
    recipes: Sequence[str] = ("all",),
    providers: Sequence[str] = (OURS,),
    *,
    repeats: int = 3,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> tuple[list[Row], list[str]]:
    """Time each recipe (if "eet_lab" is among the providers) and each peer, A, B, ..., A, B, ..., on random prompts.

    Returns a row for each, and remarks: which peers could not run and why, and what makes a timing doubtful. All are
    prepared and their output is checked before anything is timed.
    Errors: RecipeError, PromptError, OutOfMemory, Cancelled.
    """
    for name in providers:
        if name not in PROVIDERS:
            hint = did_you_mean(name, PROVIDERS)
            raise PromptError(f"There is no provider {name!r}.{hint} Known ones: {', '.join(PROVIDERS)}.")
    chosen = [as_recipe(each, model.device) for each in (recipes if OURS in providers else ())]
    settings = Settings(max_new_tokens=workload.new_tokens)
    rows = checked_prompts(workload.prompts(model.config.vocab_size), workload.new_tokens, model.config)
    modes, remarks = _available(providers, model.device)
    if not chosen and not modes:
        why = "; ".join(remarks) or "no recipe is given"
        raise PromptError(f"Nothing is left to time: {why}. Add {OURS}, or others.")
    tally = Tally(1 + (len(chosen) + len(modes)) * (1 + repeats), progress)
    tally.say("reading what the baseline says")
    witness = Witness(model.decoder, rows, settings, cancel=cancel)
    tally.finish()
    with closing(open_source(model.device)) as source:
        ours = [Ours(Subject(model, recipe, rows, settings, source, cancel), recipe, model, rows) for recipe in chosen]
        hf = to_hf(model.decoder) if modes else None
        racers: list[Racer] = [*ours, *(Theirs(Peer(mode, hf, rows, settings), model, rows) for mode in modes)]
        try:
            ready, failed = _prepared(racers, witness, tally, cancel)
            for repeat in range(repeats):
                for racer in ready:
                    _check(cancel)
                    tally.say(f"timing {racer.name}, {repeat + 1} of {repeats}")
                    racer.time()
                    tally.finish()
            shared = {"workload": str(workload), "dtype": model.dtype} | taken(model.device)
            found = [Row(**shared, **racer.figures()) for racer in ready]
        finally:
            for each in ours:
                each.subject.close()
    doubts = [f"{each.name}: {warning}" for each in ours for warning in each.warnings]
    return found, [*remarks, *failed, *dict.fromkeys(doubts)]


class Ours:
    """A recipe of this package."""

    def __init__(self, subject: Subject, recipe: Recipe, model: Model, rows: Sequence[Sequence[int]]) -> None:
        self.name, self.subject = subject.recipe, subject
        self._recipe, self._model, self._rows = recipe, model, rows
        self._runs: list[Run] = []
        self._sameness: Sameness | None = None
        self.warnings: tuple[str, ...] = ()

    def prepare(self, witness: Witness, progress: Progress) -> None:
        tokens = self.subject.prepare(progress)
        self._sameness = witness.judge(self._recipe.parts, tokens)

    def time(self) -> None:
        self._runs.append(self.subject.run())

    def figures(self) -> dict[str, Any]:
        m, same = self.subject.measurement(self._runs), self._sameness
        assert m.cost is not None and same is not None
        self.warnings = m.warnings
        return {
            "provider": OURS,
            "recipe": self.name,
            "ttft_ms": m.ttft_ms,
            "tpot_ms": m.tpot_ms,
            "total_ms": m.total_ms,
            "peak_bytes": m.memory["peak"],
            "floor_ms": m.cost.floor_ms,
            "gb_per_s": m.cost.gb_per_s,
            "launches_per_token": launches_per_token(self.subject.engine, len(self._rows)),
            "equality": "passed" if same.verdict != "different" else same.explanation,
            "same_tokens": same.same_tokens,
        }


class Theirs:
    """A peer. Its logits cannot be had, so its tokens are checked: they may part from the baseline's at near-ties."""

    def __init__(self, peer: Peer, model: Model, rows: Sequence[Sequence[int]]) -> None:
        self.name, self._peer, self._model, self._rows = peer.name, peer, model, rows
        self._timings: list[Timing] = []
        self._equality, self._same = "", False

    def prepare(self, witness: Witness, progress: Progress) -> None:
        self._peer.prepare()
        places, margins = witness.partings(self._peer.time().tokens)
        self._same = not any(place is not None for place in places)
        self._equality = witness.doubt(places, margins) or "passed"

    def time(self) -> None:
        self._timings.append(self._peer.time())

    def figures(self) -> dict[str, Any]:
        tpot_ms = Spread.of([t.tpot_ms for t in self._timings])
        tokens = len(self._timings[0].tokens[0])
        cost = step_cost(self._model.decoder, self._rows, tokens, tpot_ms)
        return {
            "provider": self.name,
            "recipe": "",
            "ttft_ms": Spread.of([t.ttft_ms for t in self._timings]),
            "tpot_ms": tpot_ms,
            "total_ms": Spread.of([t.total_ms for t in self._timings]),
            "peak_bytes": self._peer.peak_bytes,
            "floor_ms": cost.floor_ms,
            "gb_per_s": cost.gb_per_s,
            "launches_per_token": None,
            "equality": self._equality,
            "same_tokens": self._same,
        }


def _available(providers: Sequence[str], device: str) -> tuple[list[Mode], list[str]]:
    modes = [PEERS[name] for name in providers if name in PEERS]
    absent = {mode.name: mode.unavailable(device) for mode in modes}
    remarks = [f"{name} is left out: {why}" for name, why in absent.items() if why]
    return [mode for mode in modes if not absent[mode.name]], remarks


def _check(cancel: Cancel | None) -> None:
    if cancel is not None and cancel.is_set():
        raise Cancelled("The benchmark was stopped.")


def _prepared(
    racers: Sequence[Racer], witness: Witness, tally: Tally, cancel: Cancel | None
) -> tuple[list[Racer], list[str]]:
    """Those that are ready, and why the others are not. Ours raise; a peer that fails is left out."""
    ready, failed = [], []
    for racer in racers:
        _check(cancel)
        tally.say(f"preparing {racer.name}")
        try:
            racer.prepare(witness, tally.building)
            ready.append(racer)
        except Exception as error:
            if not isinstance(racer, Theirs):
                raise
            failed.append(f"{racer.name} failed: {type(error).__name__}: {first_line(error)}")
            torch._dynamo.reset()
        tally.finish()
    return ready, failed
