"""What a reader asks of the serving page, and what answers it: simulations, and work on the model itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import Any, TypeAlias

from eet_lab.errors import Cancelled, CostError, ScheduleError, TrafficError
from eet_lab.labels import short_form
from eet_lab.models import Model
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.agreement import Compared, agreement
from eet_lab.scheduling.choices import by_title, fitting_policies, one_by_one_rate, usual_lengths
from eet_lab.scheduling.cost import CostTable
from eet_lab.scheduling.policies import POLICIES
from eet_lab.scheduling.policy import BasePolicy
from eet_lab.scheduling.served import Served
from eet_lab.scheduling.simulator import check_fits, simulate_traffic
from eet_lab.scheduling.sweep import LoadPoint, rates_past_capacity, sweep
from eet_lab.scheduling.trace import read_trace
from eet_lab.scheduling.traffic import Gamma, Lengths, Traffic, make_traffic, read_lengths
from eet_lab.serving.live import OnLook, serve_traffic
from eet_lab.serving.profile import profile
from eet_lab.technique import Recipe, registry
from eet_lab.techniques.continuous_batching import ContinuousBatching
from eet_lab.words import brief, counted, told, visible

MOST_REQUESTS = 20_000
MOST_SEED = 2**53
"""The largest whole number that a page keeps."""
MOST_POLICIES = 6
NUM_LOADS = 12
"""Rates at which latency is drawn against load."""


@dataclass(frozen=True)
class Asked:
    """Traffic and policies. `rate` requests come a second, `cv` is their burstiness; None: what suits the table.

    `lengths` and `new_tokens` are what `read_lengths` reads, `policies` what `parse_policy` reads. `trace` is a file of
    requests, whose own times, lengths and answers count in place of all that is drawn. Files are read once.
    """

    policies: tuple[str, ...]
    rate: float | None = None
    cv: float = 1.0
    lengths: str = ""
    new_tokens: str = ""
    requests: int = 300
    seed: int = 0
    trace: str = ""

    @cached_property
    def recorded(self) -> Traffic | None:
        """The requests of the trace; None without one. TrafficError."""
        return read_trace(self.trace) if self.trace else None

    @cached_property
    def _read(self) -> dict[tuple[str, int], Lengths]:
        return {}

    def drawn(self, table: CostTable) -> tuple[Lengths, Lengths]:
        """Where lengths and answers are drawn from; an encoder answers nothing. TrafficError."""
        usual, most = usual_lengths(table), table.most_length
        words = self.lengths or usual, (self.new_tokens or usual) if table.kind == "decoder" else "1"
        for each in words:
            if (each, most) not in self._read:
                self._read[each, most] = read_lengths(each, most)
        lengths, answers = (self._read[each, most] for each in words)
        return lengths, answers

    def rate_on(self, table: CostTable) -> float:
        """The rate; where none is given, nine tenths of what can be served one by one, in two digits. TrafficError."""
        if self.recorded is not None:
            if not isfinite(self.recorded.rate):
                raise TrafficError(
                    f"All requests of {self.recorded.name} come at once, so it has no rate to multiply. Press Simulate "
                    "for the trace as it is, or take one whose times differ."
                )
            return self.recorded.rate
        return self.rate if self.rate is not None else float(f"{0.9 * one_by_one_rate(*self.drawn(table), table):.2g}")

    def in_words(self, table: CostTable) -> str:
        """The requests but for their rate, for a figure's title."""
        if self.recorded is not None:
            return f"{counted(len(self.recorded), 'request')} of {self.recorded.name}"
        lengths, answers = self.drawn(table)
        told = f", answers {answers}" if table.kind == "decoder" else ""
        return visible(
            f"{counted(self.requests, 'request')}, lengths {lengths}{told}, cv {brief(self.cv)}, seed {self.seed}"
        )

    def run_in_words(self, table: CostTable) -> str:
        """The requests with their rate, which tell a run from others; a trace has its own."""
        told = self.in_words(table)
        return told if self.recorded is not None else f"{told}, {brief(self.rate_on(table))} requests/s"

    def traffic(self, table: CostTable, times: float = 1.0) -> Traffic:
        """The requests, `times` as close together. TrafficError."""
        trace = self.recorded
        requests = self.requests if trace is None else len(trace)
        if isinstance(requests, int) and requests > MOST_REQUESTS:
            raise TrafficError(
                f"requests is {requests:,}, but this view draws at most {MOST_REQUESTS:,}. Take fewer, or "
                "`eet-lab simulate`, which draws nothing and tells its progress; with --policy NAME it simulates that "
                "policy alone, in less time."
            )
        if trace is not None:
            return replace(trace, arrival_ms=trace.arrival_ms / times)
        return make_traffic(
            self.requests, Gamma(times * self.rate_on(table), self.cv), *self.drawn(table), seed=self.seed
        )

    def live(self, table: CostTable, traffic: Traffic) -> tuple[str, BasePolicy]:
        """The first policy that can be served for real, and what it is called; ScheduleError where none can."""
        for name, policy in self.chosen(table, traffic).items():
            if policy.joins or table.kind == "encoder":
                return name, policy
        raise ScheduleError(
            "None of the policies can be served for real: a decoder serves requests that join. Write "
            "continuous_batching as one of them."
        )

    def chosen(self, table: CostTable, traffic: Traffic) -> dict[str, BasePolicy]:
        """The policies by name, with knobs within the table's reach. ScheduleError, CostError."""
        if not 1 <= len(self.policies) <= MOST_POLICIES:
            raise ScheduleError(f"There are {len(self.policies)} policies, but 1 to {MOST_POLICIES} are compared.")
        found = fitting_policies(self.policies, traffic, table)
        for policy in found:
            check_fits(traffic, policy, table)
        return by_title(found)


def usual_policies(table: CostTable) -> tuple[str, ...]:
    """Two policies that tell most beside each other on such a model."""
    return ("token_budget", "continuous_batching") if table.kind == "decoder" else ("naive_padding", "dynamic_program")


def checked_policies(policies: str | Sequence[str]) -> tuple[str, ...]:
    """Words of policies, of which one may stand alone; ScheduleError for what are none."""
    words = [policies] if isinstance(policies, str) else policies
    if not isinstance(words, Sequence) or not all(isinstance(each, str) for each in words):
        raise ScheduleError(
            f"policies is {told(policies)}, but it must be the name of a policy or a list of names, such as "
            "['token_budget', 'continuous_batching']."
        )
    return tuple(words)


def names_for(table: CostTable) -> list[str]:
    """The policies for such a model."""
    stage = "generate" if table.kind == "decoder" else "encode"
    return [name for name, kind in POLICIES.items() if stage in kind.stages]


def simulated(asked: Asked, table: CostTable, progress: Progress, cancel: Cancel) -> dict[str, Served]:
    """What each policy makes of the traffic. Errors as above, and Cancelled."""
    traffic, found = asked.traffic(table), dict[str, Served]()
    policies = asked.chosen(table, traffic)
    for name, policy in policies.items():
        progress(len(found), len(policies), name)
        found[name] = simulate_traffic(traffic, policy, table, cancel=cancel)
    return found


@dataclass(frozen=True)
class Loads:
    """Points of all policies that suit the model, in the order in which they are taught; `chosen` ones were asked for.

    Passes of what is `beyond` go beyond the table after its last point. Not `is_whole`: Stop was pressed, and the
    points are those until then.
    """

    points: Mapping[str, Sequence[LoadPoint]]
    chosen: Sequence[str]
    beyond: Sequence[str]
    is_whole: bool


def against_load(asked: Asked, table: CostTable, progress: Progress, cancel: Cancel) -> Loads:
    """The same requests at rates that pass what the policies that are chosen can serve; these come first.

    Errors as above, and Cancelled before there is a point.
    """
    traffic, rate = asked.traffic(table), asked.rate_on(table)
    if len(traffic) < 2:
        raise TrafficError("There is 1 request, which comes at no rate. Take 2 or more for latency against load.")
    chosen, points, beyond = asked.chosen(table, traffic), dict[str, list[LoadPoint]](), list[str]()
    own = {policy.name for policy in chosen.values()}
    others = [name for name in names_for(table) if name not in own]
    policies = chosen | by_title(fitting_policies(others, traffic, table) if others else [])

    def make(each: float) -> Traffic:
        return asked.traffic(table, each / rate)

    progress(0, len(policies) * NUM_LOADS, "finding out what can be served")
    rates, is_whole = rates_past_capacity(make, [*chosen.values()], table, rate, NUM_LOADS, cancel), True
    try:
        for number, (name, policy) in enumerate(policies.items()):
            found = points[name] = []
            for at, each in enumerate(rates):
                progress(number * NUM_LOADS + at, len(policies) * NUM_LOADS, name)
                more = sweep(make, {name: policy}, table, [each], cancel=cancel)[name]
                if not more:
                    beyond.append(name)
                    break
                found += more
    except Cancelled:
        if not any(points.values()):
            raise
        is_whole = False
    taught = sorted(policies, key=lambda name: [*POLICIES].index(policies[name].name))
    return Loads({name: points.get(name, ()) for name in taught}, [*chosen], beyond, is_whole)


ModelWork: TypeAlias = Callable[[Model, Recipe, Progress, Cancel], Any]
"""Work on a model under a recipe."""
RunOnModel: TypeAlias = Callable[[str, ModelWork, threading.Event], None]
"""Has such work done for an action, until the last is set; its answer comes later. EETError where it cannot be."""


@dataclass(frozen=True, eq=False)
class Measured:
    """Traffic that was served for real, and what the simulator said of it over the model's own table."""

    policy: str
    served: Served
    simulated: Served

    @property
    def compared(self) -> Sequence[Compared]:
        return agreement(self.simulated, self.served)

    @property
    def point(self) -> LoadPoint:
        """What was measured, for latency against load."""
        return LoadPoint.of(self.served)


def serving_recipe(recipe: Recipe, model: Model) -> Recipe:
    """The recipe, and what requests of a decoder need to join. RecipeError where that cannot run."""
    if model.config.stage != "generate":
        return recipe
    there = {technique.name: technique for technique in recipe}
    for name in (*ContinuousBatching.requires, ContinuousBatching.name):
        there.setdefault(name, registry()[name]())
    return Recipe(tuple(there.values())).check(model.device, model.config)


def measure(model: Model, recipe: Recipe, progress: Progress, cancel: Cancel) -> CostTable:
    """The model's cost table, measured here or on this machine before. Errors as in `profile`."""
    return profile(model, serving_recipe(recipe, model), progress=progress, cancel=cancel)


def serve(
    asked: Asked, table: CostTable, on_look: OnLook, model: Model, recipe: Recipe, progress: Progress, cancel: Cancel
) -> Measured:
    """Serve what is asked for, and simulate the same over the `table`, which must be the model's own (CostError)."""
    of = table.source
    wanted = model.name, str(serving_recipe(recipe, model)), model.dtype
    if (of.model, of.recipe, of.dtype) != wanted:
        raise CostError(
            f"The cost table is of {visible(of.model)} in {of.dtype} under {short_form(of.recipe, model.device)}, "
            f"but {model.name} in {model.dtype} under {short_form(wanted[1], model.device)} would be served. Press "
            "Measure this model first."
        )
    traffic = asked.traffic(table)
    name, policy = asked.live(table, traffic)
    served = serve_traffic(model, traffic, policy, table, on_look=on_look, progress=progress, cancel=cancel)
    return Measured(name, served, simulate_traffic(traffic, policy, table, cancel=cancel))
