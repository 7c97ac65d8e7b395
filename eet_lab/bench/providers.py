"""Providers of a benchmark: a recipe of ours, or a peer; each is prepared, checked, timed and asked for its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from eet_lab.bench.cost import expansion_ms, predicted_ms, step_cost
from eet_lab.bench.launches import StepLaunches, launches_per_token
from eet_lab.bench.measure import Subject, TimedRun
from eet_lab.bench.measured import Cost, Parity, Spread
from eet_lab.bench.parity import ParityCheck
from eet_lab.bench.peers import Peer, Timing
from eet_lab.errors import PromptError, did_you_mean
from eet_lab.models import Model
from eet_lab.progress import Progress
from eet_lab.technique import Recipe
from eet_lab.words import brief

OURS = "eet_lab"


def named(providers: Sequence[str] | str, known: Sequence[str], what: str = "", beside: str = "") -> list[str]:
    """The providers, one or several, by their names; PromptError for what is none of `known`.

    The error says `what` they provide, and what there is `beside` those that are known.
    """
    names = [providers] if isinstance(providers, str) else list(providers)
    for name in names:
        if name not in known:
            of, told = f" of {what}" if what else "", ", ".join(known) + beside
            raise PromptError(f"There is no provider {name!r}{of}.{did_you_mean(name, known)} Known ones: {told}.")
    return names


class Provider(Protocol):
    """One that takes part, ours with one recipe."""

    name: str

    def prepare(self, check: ParityCheck, progress: Progress) -> None:
        """Build, compile, warm up, and check the output."""

    def time(self) -> Any:
        """One measured run."""

    def figures(self, runs: Sequence[Any]) -> dict[str, Any]:
        """What a row holds of these runs."""
        ...

    def close(self) -> None:
        """Give the memory back."""


class RecipeProvider:
    """A recipe of this package."""

    def __init__(self, subject: Subject, recipe: Recipe, model: Model, rows: Sequence[Sequence[int]]) -> None:
        self.name, self.subject = subject.recipe, subject
        self._recipe, self._model, self._rows = recipe, model, rows
        self._parity: Parity | None = None
        self.warnings: tuple[str, ...] = ()

    def prepare(self, check: ParityCheck, progress: Progress) -> None:
        tokens = self.subject.prepare(progress)
        self._parity = check.judge(self._recipe.parts, tokens, self._recipe.tolerance)

    def time(self) -> TimedRun:
        return self.subject.run()

    def figures(self, runs: Sequence[TimedRun]) -> dict[str, Any]:
        m, same = self.subject.measurement(runs), self._parity
        assert m.cost is not None and same is not None
        launches, extra_ms = self._launches(), expansion_ms(self.subject.engine.model)
        self.warnings = m.warnings
        if self._model.device == "cpu" and self.subject.uncounted:
            self.warnings += (self.subject.uncounted,)
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
            "lower_bound_bytes": max(plan.lower_bound_bytes for plan in self.subject.engine.plans().values()),
            "equality": equality(same),
            "same_tokens": same.same_tokens,
            **costs(m.cost, launches, self._model.device, extra_ms),
        }

    def close(self) -> None:
        self.subject.close()

    def _launches(self) -> StepLaunches | None:
        """On a CPU each call is a launch."""
        if self._model.device == "cpu":
            calls = self.subject.launches
            return None if calls is None else StepLaunches(calls, calls)
        return launches_per_token(self.subject.engine, len(self._rows))


class PeerProvider:
    """A peer. Its logits cannot be had, so its tokens are checked: they may part from the baseline's at near-ties."""

    def __init__(self, peer: Peer, model: Model, rows: Sequence[Sequence[int]]) -> None:
        self.name, self._peer, self._model, self._rows = peer.name, peer, model, rows
        self._equality, self._same = "", False

    def prepare(self, check: ParityCheck, progress: Progress) -> None:
        firsts, margins = check.first_differences(self._peer.prepare().tokens)
        self._same = not any(first is not None for first in firsts)
        self._equality = check.doubt(firsts, margins) or "passed"

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


def equality(same: Parity) -> str:
    """What a row says of the check: "passed", how far a lossy recipe is off, or why it did not pass."""
    if same.verdict == "lossy":
        return f"lossy: logits off by {brief(same.max_error or 0.0, 2)}, stated bound {brief(same.budget, 2)}"
    return "passed" if same.verdict != "different" else same.explanation
