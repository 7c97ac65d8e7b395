"""The batching policies, in the order in which they are taught; each card says what it optimizes, and what not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar

from eet_lab.errors import RecipeError, ScheduleError, did_you_mean
from eet_lab.knobs import knob, read_knobs
from eet_lab.scheduling.cost import Costs
from eet_lab.scheduling.dynamic_program import cheapest
from eet_lab.scheduling.policy import BasePolicy, Plan, W
from eet_lab.scheduling.schedule import MOST_ROWS, Schedule
from eet_lab.words import told

MOST_TOKENS = 2**20


def _max_rows(default: int = 16) -> Any:
    return knob(default, "The most requests that run together.", label="Rows", unit="rows", low=1, high=MOST_ROWS)


def _window() -> Any:
    text = "How many of the oldest requests that wait are looked at: planning takes the host's time between two passes."
    return knob(1024, text, label="Window", unit="requests", low=1, high=2**20)


@dataclass(frozen=True)
class NoBatching(BasePolicy):
    """Run one request after the other, in the order in which they came.

    It optimizes nothing, and wastes nothing: no pad is ever computed. It ignores that a GPU reads two short requests in
    hardly more time than one. Deadlines are ignored; nobody starves, since the oldest is always next.
    """

    name: ClassVar[str] = "no_batching"
    title: ClassVar[str] = "No batching"
    is_packed: ClassVar[bool] = True

    def next(self, waiting: Collection[W], now_ms: float, costs: Costs) -> Plan[W]:
        return _up_to(1, waiting)


@dataclass(frozen=True)
class NaivePadding(BasePolicy):
    """Run the oldest requests together, padded to the longest of them.

    It optimizes the number of passes. It ignores lengths: one long request makes pads of most of a batch, and then it
    can be slower than no batching. Deadlines are ignored; nobody starves, since the oldest are always next.
    """

    name: ClassVar[str] = "naive_padding"
    title: ClassVar[str] = "Naive padding"

    max_rows: int = _max_rows()

    def next(self, waiting: Collection[W], now_ms: float, costs: Costs) -> Plan[W]:
        return _up_to(self.max_rows, waiting)


@dataclass(frozen=True)
class LengthBuckets(BasePolicy):
    """Run the oldest request together with others of its bucket of lengths, padded to the longest of them.

    It optimizes waste: a row has fewer pads than a bucket is wide. It ignores how long passes take, and that a bucket
    may hold too few requests for a good batch. Deadlines are ignored, and short requests wait for a long one that came
    first; nobody starves, since the oldest is always in the next batch.
    """

    name: ClassVar[str] = "length_buckets"
    title: ClassVar[str] = "Length buckets"

    width: int = knob(64, "Lengths that share a bucket.", label="Bucket", unit="tokens", low=1, high=MOST_TOKENS)
    max_rows: int = _max_rows()
    window: int = _window()

    def next(self, waiting: Collection[W], now_ms: float, costs: Costs) -> Plan[W]:
        bucket = -(-next(iter(waiting)).length // self.width)
        same = (each for each in islice(waiting, self.window) if -(-each.length // self.width) == bucket)
        return _up_to(self.max_rows, same)


@dataclass(frozen=True)
class DynamicProgram(BasePolicy):
    """Cut the queue, sorted by length, into the padded batches that take the least time by the cost table.

    It optimizes the time until all that wait now are served: no other partition into padded batches of at most
    `max_rows` is quicker on the table. `hungry` plans as soon as the model has nothing to do. `lazy` first waits until
    `max_rows` requests wait, or the oldest has waited for `wait_ms`. Batches run in the order of their oldest request,
    and those that come meanwhile wait until all have run. It ignores requests that are about to come, deadlines,
    memory, and how long answers are: of a decoder it counts the first pass. Nobody starves, since a plan holds all that
    wait, or the oldest `window` of them. It needs a table of what padded passes cost; where requests are packed, there
    is no waste left for it to save.

    Source: Fang et al., TurboTransformers (PPoPP 2021); its scheduler was never released.
    """

    name: ClassVar[str] = "dynamic_program"
    title: ClassVar[str] = "Dynamic program"
    reads_costs: ClassVar[bool] = True

    trigger: str = knob("hungry", "When a queue is planned.", choices=("hungry", "lazy"), label="Trigger")
    wait_ms: float = knob(
        5.0,
        "How long the oldest request waits for others at most.",
        label="Wait",
        unit="ms",
        low=0.0,
        high=60_000.0,
        when={"trigger": ("lazy",)},
    )
    max_rows: int = _max_rows()
    window: int = _window()

    def next(self, waiting: Collection[W], now_ms: float, costs: Costs) -> Plan[W]:
        if self.trigger == "lazy" and len(waiting) < self.max_rows:
            wake_ms = next(iter(waiting)).arrival_ms + self.wait_ms
            if now_ms < wake_ms:
                return Plan([], wake_ms)
        taken = list(islice(waiting, self.window))
        order = sorted(range(len(taken)), key=lambda place: taken[place].length)
        lengths = [taken[place].length for place in order]
        slices = cheapest(lengths, costs.padded_up_to, self.max_rows)
        places = sorted((sorted(order[begin:end]) for begin, end in slices), key=lambda group: group[0])
        return Plan([[taken[place] for place in group] for group in places])


@dataclass(frozen=True)
class TokenBudget(BasePolicy):
    """Run the oldest requests together, end to end without pads, as many as have `budget` tokens between them.

    It optimizes throughput: every token that is computed is somebody's, and passes are equally large. It needs no cost
    table, but a model that reads packed requests. A request with more tokens than the budget runs alone. It ignores
    deadlines, and that attention to a long text costs more a token; nobody starves, since the oldest are always next.
    """

    name: ClassVar[str] = "token_budget"
    title: ClassVar[str] = "Packed, token budget"
    is_packed: ClassVar[bool] = True

    budget: int = knob(
        4096, "The most tokens that are read together.", label="Budget", unit="tokens", low=1, high=MOST_TOKENS
    )
    max_rows: int = _max_rows()

    def next(self, waiting: Collection[W], now_ms: float, costs: Costs) -> Plan[W]:
        group, left = list[W](), self.budget
        for each in islice(waiting, self.max_rows):
            if group and each.length > left:
                return Plan([group], is_full=True)
            group.append(each)
            left -= each.length
        return Plan([group], is_full=left <= 0 or len(group) == self.max_rows)


@dataclass(frozen=True)
class ContinuousBatching(BasePolicy):
    """Let a request join as soon as a slot is free, between two passes, beside those whose answers go on.

    It optimizes the use of the slots: nobody waits for the longest answer of a batch. A pass has a `budget` of tokens:
    one for each row that generates, and what is left reads prompts, in chunks, so that a long prompt holds up no
    answer for long. It ignores deadlines and priorities, and how long answers will be; where pages run out, the newest
    request gives way. Nobody starves, since requests join in the order in which they came. The simulator and the
    engine plan with the same `Scheduler`.

    Source: Orca (Yu et al., OSDI 2022); chunked prefill from Sarathi-Serve (Agrawal et al., OSDI 2024).
    """

    name: ClassVar[str] = "continuous_batching"
    title: ClassVar[str] = "Continuous batching"
    stages: ClassVar[tuple[str, ...]] = ("generate",)
    is_packed: ClassVar[bool] = True
    joins: ClassVar[bool] = True

    max_rows: int = _max_rows()
    budget: int = knob(
        512,
        "The most tokens of a pass, one for each row at least.",
        label="Budget of a pass",
        unit="tokens",
        low=1,
        high=MOST_TOKENS,
        at_least="max_rows",
    )
    chunk: int = knob(
        256, "The most tokens of a prompt in a pass.", label="Chunk", unit="tokens", low=1, high=MOST_TOKENS
    )

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.chunk, self.budget, self.max_rows, joins=True)

    def next(self, waiting: Collection[W], now_ms: float, costs: Costs) -> Plan[W]:
        return Plan([list(waiting)])


POLICIES: dict[str, type[BasePolicy]] = {
    each.name: each
    for each in (NoBatching, NaivePadding, LengthBuckets, DynamicProgram, TokenBudget, ContinuousBatching)
}


def policy_kind(words: str) -> type[BasePolicy]:
    """Which policy such words name; ScheduleError where there is none. Their knobs are not read."""
    name = words.strip().partition(":")[0]
    if name not in POLICIES:
        raise ScheduleError(
            f"There is no policy {told(name)}; there are {', '.join(POLICIES)}.{did_you_mean(name, POLICIES)}"
        )
    return POLICIES[name]


def parse_policy(words: str, limits: Mapping[str, Any] = MappingProxyType({})) -> BasePolicy:
    """The policy of words such as "dynamic_program:trigger=lazy:wait_ms=2"; ScheduleError where there is none.

    `limits` are values of knobs that the words leave open, for those policies that have such a knob. One that another
    knob must not be below (`at_least`) is lowered to that: "budget=8" lowers `max_rows` to 8.
    """
    kind, turns = policy_kind(words), words.strip().split(":")[1:]
    try:
        given = read_knobs(kind(), turns)
    except RecipeError as error:
        raise ScheduleError(str(error)) from None
    values = {each.name: limits[each.name] for each in fields(kind) if each.name in limits} | given
    for each in fields(kind):
        least = each.metadata["at_least"]
        if least in values and least not in given:
            values[least] = min(values[least], max(values.get(each.name, each.default), 1))
    return kind(**values)


def _up_to(rows: int, some: Iterable[W]) -> Plan[W]:
    """The first of them as a group."""
    group = list(islice(some, rows))
    return Plan([group], is_full=len(group) == rows)
