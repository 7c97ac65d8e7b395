"""A batching policy: which of the requests that wait are run together, and when."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from eet_lab.errors import RecipeError, ScheduleError
from eet_lab.knobs import check_knobs
from eet_lab.scheduling.cost import Costs
from eet_lab.scheduling.schedule import LEFT_PADDED, PACKED, Schedule


class Waiting(Protocol):
    """What a policy sees of a request in the queue."""

    @property
    def length(self) -> int:
        """Tokens that are to be read."""

    @property
    def arrival_ms(self) -> float:
        """When it came."""


W = TypeVar("W", bound=Waiting)


class Plan(NamedTuple, Generic[W]):
    """Groups that run one after the other, each together; those who wait and are in none are asked about again.

    Without a group, the policy waits for company: ask again when another request comes, or at `wake_ms`. `is_full`: the
    groups would be the same whoever came next, so that a server may launch them while others are computed.
    """

    groups: Sequence[Sequence[W]]
    wake_ms: float | None = None
    is_full: bool = False


@dataclass(frozen=True)
class BasePolicy:
    """What policies share: the docstring is the card, the fields are knobs, `str` is what `parse` reads.

    A policy is a frozen value that a simulator and a server run alike: a loop around `next`. Whenever the model has
    nothing to do, they ask it for groups of those that wait; a server also asks while a full plan is computed, and
    launches what is full then. An encoder reads a group in one pass; a decoder runs it until the last answer is
    complete, as `Engine.generate` does. A policy that `joins` is asked before every pass, and hands over to the
    `Scheduler` of an engine with its `schedule`, which lets requests join.

    `stages` are what it is for: encoders ("encode"), decoders ("generate"), or both. `is_packed`: a group lies end to
    end, else as a rectangle with pads. `reads_costs`: it asks the cost table.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    stages: ClassVar[tuple[str, ...]] = ("encode", "generate")
    is_packed: ClassVar[bool] = False
    joins: ClassVar[bool] = False
    reads_costs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        try:
            check_knobs(self)
        except RecipeError as error:
            raise ScheduleError(str(error)) from None

    def next(self, waiting: Collection[W], now_ms: float, costs: Costs) -> Plan[W]:
        """Groups of those that wait, the oldest first among `waiting`, which has at least one."""
        raise NotImplementedError

    @property
    def schedule(self) -> Schedule:
        """How a decoder's scheduler runs what is handed over."""
        return PACKED if self.is_packed else LEFT_PADDED

    @property
    def card(self) -> str:
        """What the user reads: the docstring."""
        return inspect.getdoc(type(self)) or ""

    @property
    def knobs(self) -> dict[str, Any]:
        """The value of each knob."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __str__(self) -> str:
        turned = (
            f"{each.name}={value}" for each in fields(self) if (value := getattr(self, each.name)) != each.default
        )
        return ":".join([self.name, *turned])
