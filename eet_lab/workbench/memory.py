"""What a run did with memory, kept when its engine is gone, and the tabs that show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch

from eet_lab.engine.engine import Engine
from eet_lab.figures.plans import HEAD, footprints, lines, packing
from eet_lab.memory import DriverCalls, Plan, one_after_the_other
from eet_lab.memory.replays import Placed, side_by_side
from eet_lab.parts.kv_cache import KVCache
from eet_lab.words import counted, sized
from eet_lab.workbench.threads import Answer, Background

BOTH = "both"
PASSES = ("prefill", "decode", BOTH)


@dataclass(frozen=True)
class KVUse:
    """A KV cache at the end of a run: bytes held, those of them that stand for a token, and those copied on the way."""

    kind: str
    held_bytes: int
    used_bytes: int
    copied_bytes: int
    growth_bytes: int
    prompt_tokens: int = 0  # of requests that prefix caching looked up
    cached_tokens: int = 0  # those of them that it found

    @property
    def wasted_bytes(self) -> int:
        return self.held_bytes - self.used_bytes

    @classmethod
    def of(cls, cache: KVCache) -> KVUse:
        size = cache.num_bytes, cache.used_bytes, cache.copied_bytes, cache.growth_bytes
        return cls(cache.kind, *size, cache.prefix_cache_queries, cache.prefix_cache_hits)


@dataclass(frozen=True)
class TorchCalls:
    """How often torch asked the driver for memory of the GPU, and gave some back (None: that was not counted)."""

    allocations: int
    frees: int | None

    def __str__(self) -> str:
        if self.frees is None:
            return f"{counted(self.allocations, 'allocation')} (frees are not counted: Compare empties torch's cache)"
        return _called(self.allocations, self.frees)


class TorchCounter:
    """Counts torch's calls of the driver from here on; `read` gives None on a CPU, which has no such counter."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._before = self._now()

    def read(self, frees: bool = True) -> TorchCalls | None:
        """So far. `frees` False: they are not this run's own."""
        allocated, freed = (now - before for now, before in zip(self._now(), self._before, strict=True))
        return TorchCalls(allocated, freed if frees else None) if self._on_gpu else None

    def _now(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats() if self._on_gpu else {}
        return stats.get("num_device_alloc", 0), stats.get("num_device_free", 0)


@dataclass(frozen=True)
class RunMemory:
    """One run. `plans` go by pass, and hold only where there is an arena (`planned`); else they are what one would do.

    `torch_calls` are those of its first run, None on a CPU.
    """

    plans: Mapping[str, Plan]
    planned: bool
    weights_bytes: int
    activation_bytes: int
    kv: KVUse
    pool_calls: DriverCalls
    torch_calls: TorchCalls | None

    @classmethod
    def of(cls, engine: Engine, torch_calls: TorchCalls | None) -> RunMemory:
        """What the engine holds after a run."""
        memory, kv = engine.memory, KVUse.of(engine.cache)
        return cls(
            plans=engine.plans(),
            planned=memory.has_arena,
            weights_bytes=engine.model.weight_bytes,
            activation_bytes=engine.activation_bytes,
            kv=kv,
            pool_calls=memory.calls,
            torch_calls=torch_calls,
        )

    def plan(self, phase: str) -> Plan:
        """One pass's, or that of both, one after the other: nothing of the prefill is alive in a step."""
        if phase != BOTH:
            return self.plans[phase]
        first, then = self.plans.values()
        lifetimes = one_after_the_other((first.lifetimes, then.lifetimes))
        return Plan(lifetimes, first.offsets + then.offsets, then.chunks if self.planned else ())

    @property
    def story(self) -> str:
        """What the picture of its plans is a picture of."""
        whose = (
            ""
            if self.planned
            else "It allocates fresh tensors and has no arena: this is where a planner would put them. "
        )
        return (
            f"{whose}A rectangle is a tensor, from the request that made it to its last use; at the same height lie "
            "the same bytes. Hover to see its name."
        )

    def facts(self) -> dict[str, str]:
        """A table's rows."""
        kv = self.kv
        share = f" ({kv.wasted_bytes / kv.held_bytes:.0%})" if kv.held_bytes else ""
        found = {
            "weights": sized(self.weights_bytes),
            "activations, in the pass with the most": sized(self.activation_bytes),
            "KV cache": kv.kind,
            "held at the end": sized(kv.held_bytes),
            "used": sized(kv.used_bytes),
            "unused": f"{sized(kv.wasted_bytes)}{share}",
            "copied to make room, in the whole run": sized(kv.copied_bytes),
            "temporary copy while it grows": sized(kv.growth_bytes),
        }
        if kv.prompt_tokens:
            hit_rate = kv.cached_tokens / kv.prompt_tokens
            found["prompt tokens found in the prefix cache"] = f"{kv.cached_tokens:,} ({hit_rate:.0%})"
        if self.planned:
            found["calls of the arena's pool"] = _called(self.pool_calls.allocations, self.pool_calls.frees)
        if self.torch_calls is not None:
            found["torch's calls of the driver in the first run"] = str(self.torch_calls)
        return found


def _called(allocations: int, frees: int) -> str:
    return f"{counted(allocations, 'allocation')}, {counted(frees, 'free')}"


QUESTION = "planners"
AS_IT_RAN, AS_AN_ARENA = "as it ran", "as an arena would"
"""The run's own plan, and what one would be where it had none."""
SIDE_BY_SIDE = "What each planner would hold for the tensors of this pass. Pick one of them to see where it puts them."
LEGEND_BESIDE = {"x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top", "font": {"size": 11}, "tracegroupgap": 0}
ALL = "all, side by side"


class MemoryTab:
    """A run, a pass and a planner are picked; figures and tables follow. Only the ui thread calls it.

    Other planners than the run's own are asked in the background, since some take a while, and never during a run.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self.runs: Mapping[str, RunMemory] = {}
        """What each run did with memory; empty for a kept run, which has no plans."""
        self._placed: dict[tuple[str, str], list[Placed]] = {}
        self._num_results = 0  # in a question's key: another result's runs and passes have the same names
        self._asked: tuple[int, str, str] | None = None
        self._run, self._phase, self._planner = "", PASSES[0], ""
        self.open = False

    def put_up(self, runs: Mapping[str, RunMemory]) -> None:
        """Another result: its runs by name."""
        self.runs, self._placed, self._asked = dict(runs), {}, None
        self._num_results += 1
        self._run, self._planner = (list(runs)[-1] if runs else ""), ""

    def pick(self, what: str, name: str) -> None:
        """Another run, pass or planner: `what` is "run", "pass" or "planner"; what there is not is passed over."""
        if what == "run" and name in self.runs:
            self._run, self._planner = name, ""
        elif what == "pass" and name in PASSES:
            self._phase = name
        elif what == "planner":
            self._planner = name

    def turn(self, busy: bool) -> None:
        """Ask what other planners do, if somebody looks and nothing runs."""
        question = self._num_results, *self._key
        if self.open and self.runs and not busy and self._key not in self._placed and self._asked != question:
            self._asked, lifetimes = question, self._plan().lifetimes
            self._background.ask(QUESTION, question, lambda: side_by_side(lifetimes))

    def answered(self, answer: Answer) -> None:
        """The planners' plans; late ones, of another result or pass, are dropped."""
        if answer.key != self._asked:
            return
        if answer.error is not None:
            raise answer.error
        _, run, phase = answer.key
        self._placed[run, phase] = answer.value

    def picks(self) -> list[dict[str, Any]]:
        """The lists to choose from, for the page."""
        lists = (
            ("run", "Run", list(self.runs), self._run),
            ("pass", "Pass", list(PASSES), self._phase),
            ("planner", "Placed by", self._planners(), self._chosen()),
        )
        return [
            {"name": name, "label": label, "options": options, "value": value} for name, label, options, value in lists
        ]

    def figure(self, height: int) -> go.Figure:
        """Where the planner that was picked puts the tensors, or what each would hold."""
        if self._chosen() == ALL:
            return footprints(self._placed[self._key]).update_layout(height=height)
        fig = packing(self._plan()).update_layout(height=height, margin={"t": 36, "b": 40})
        fig.layout.legend = LEGEND_BESIDE
        fig.update_yaxes(nticks=4).update_yaxes(nticks=2, title="", row=2, col=1)
        return fig.update_xaxes(title_standoff=4)

    def tables(self) -> list[dict[str, Any]]:
        """Planners side by side, and what each run's KV cache was and how often it asked the driver."""
        placed = self._placed.get(self._key)
        notes = [] if placed else ["Asking the other planners…"]
        facts = {"head": ["", *self.runs], "rows": _facts(self.runs), "notes": []}
        return [{"head": list(HEAD), "rows": lines(placed or []), "notes": notes}, facts]

    @property
    def story(self) -> str:
        """What the picture is a picture of."""
        return SIDE_BY_SIDE if self._chosen() == ALL else self.runs[self._run].story

    @property
    def _key(self) -> tuple[str, str]:
        return self._run, self._phase

    def _planners(self) -> list[str]:
        run = self.runs[self._run]
        own = AS_IT_RAN if run.planned else AS_AN_ARENA
        placed = [each.name for each in self._placed.get(self._key, ()) if each.plan]
        return [own, *placed, *([ALL] if placed else [])]

    def _chosen(self) -> str:
        names = self._planners()
        return self._planner if self._planner in names else names[0]

    def _plan(self) -> Plan:
        """What is drawn: the run's own plan, or another planner's of the same lifetimes."""
        own = self.runs[self._run].plan(self._phase)
        others = {each.name: each.plan for each in self._placed.get(self._key, ()) if each.plan}
        return others.get(self._planner) or own


def _facts(runs: Mapping[str, RunMemory]) -> Sequence[Sequence[str]]:
    """A row for each fact, and a column for each run."""
    columns = [run.facts() for run in runs.values()]
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "–") for column in columns)] for name in names]
