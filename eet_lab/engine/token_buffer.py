"""What the device holds of each slot, and how it gets there: whole, or for those that come and leave.

B slots, S columns of the token buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eet_lab.engine.settings import Settings
from eet_lab.engine.staging import ALIGNED, Staging
from eet_lab.ops.reference import noise_keys
from eet_lab.ops.types import TokenBuffer
from eet_lab.parts.batches import LOGGED
from eet_lab.scheduling import Row

NO_REQUEST = -1
"""The noise key of an idle slot."""

IDLE = (0, 0, 0, 0, 0, NO_REQUEST, 0)
"""The numbers of an idle slot, in the order of `SlotTable.numbers`."""


def num_numbers_of_changes(num_slots: int) -> int:
    """The numbers that are sent where so many leave at once: a batch that ends needs no more."""
    return (1 + len(IDLE)) * -(-num_slots // ALIGNED) * ALIGNED


class RequestSettings(NamedTuple):
    """What a request asks for that the scheduler need not know."""

    stop: frozenset[int]
    noise: int  # key of its row's noise
    forced: tuple[int, ...] = ()  # what it shall generate, whatever the model says

    @classmethod
    def of(cls, settings: Settings, number: int = 0, forced: Sequence[int] = ()) -> RequestSettings:
        """The settings of request `number` among those of one seed. It draws what row `number` of a batch draws."""
        noise = int(noise_keys(settings.seed, 1, first=number))
        return cls(frozenset(() if forced else settings.stop), noise, tuple(forced))


class Arrival(NamedTuple):
    """A request that takes a slot: all its tokens that are known, and the slot's numbers."""

    slot: int
    pad: int
    known: Sequence[int]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, row: Row, settings: RequestSettings) -> Arrival:
        """The arrival of a request, with the row that it reads first."""
        request, pad = row.request, row.request.pad
        known: Sequence[int] = request.prompt
        if request.generated or settings.forced:
            known = *request.prompt, *request.generated, *settings.forced[len(request.generated) :]
        limit = pad + request.full_length - 1
        return cls(row.slot, pad, known, (pad + len(known), limit, pad, known[0], 0, settings.noise, pad))


class SlotTable:
    """The token buffer, and what else is known of each slot: the noise key of its draws, and its pads.

    It is there once it was filled, and lies at the same addresses from then on, as long as none is larger.
    """

    buffer: TokenBuffer
    noise: Tensor  # [B]
    begin: Tensor  # [B]  columns of the KV cache before the slot's first token

    def __init__(self, memory: Staging, num_slots: int, num_columns: int) -> None:
        self._memory, self._shape = memory, (num_columns, num_slots)

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        """[B] each: what a slot has a number of."""
        b = self.buffer
        return b.end, b.limit, b.columns, b.ids, b.positions, self.noise, self.begin

    def fill(self, arrivals: Iterable[Arrival]) -> None:
        """All slots anew, in one copy: those of `arrivals`, all others idle. No pass is counted yet."""
        S, B = self._shape
        tokens, numbers = np.zeros((S, B), np.int64), np.tile(np.array(IDLE, np.int64)[:, None], (1, B))
        for slot, pad, known, its_numbers in arrivals:
            tokens[pad : pad + len(known), slot] = known
            numbers[:, slot] = its_numbers
        parts = (tokens, *numbers, np.zeros((LOGGED, B), np.int64), np.zeros(1, np.int64))
        tokens_on, *numbers_on, log, num_passes = self._memory.receive(list(map(torch.from_numpy, parts)))
        end, limit, columns, ids, positions, self.noise, self.begin = numbers_on
        self.buffer = TokenBuffer(tokens_on.t(), end, limit, columns, ids, positions, log, num_passes)

    def changes(self, arrivals: Sequence[Arrival], left: Sequence[int]) -> list[Tensor]:
        """The changes on the host: slots and their numbers, then the slots, columns and ids of the tokens that came."""
        if not arrivals and not left:
            return []
        slots = {slot: IDLE for slot in left} | {arrival.slot: arrival.numbers for arrival in arrivals}
        lengths = [len(arrival.known) for arrival in arrivals]
        where = np.repeat(np.array([arrival.slot for arrival in arrivals], np.int64), lengths)
        columns = [np.arange(arrival.pad, arrival.pad + len(arrival.known)) for arrival in arrivals]
        ids = np.fromiter(chain.from_iterable(arrival.known for arrival in arrivals), np.int64, sum(lengths))
        parts = (np.array([*slots], np.int64), *np.array([*slots.values()], np.int64).T.copy(), where)
        return list(map(torch.from_numpy, (*parts, np.concatenate(columns or [where]), ids)))

    def change(self, arrived: Sequence[Tensor]) -> None:
        """Take in what `changes` told, once it is on the device."""
        slots, *numbers, where, columns, ids = arrived
        for part, new in zip(self.numbers, numbers, strict=True):
            part.index_copy_(0, slots, new)
        self.buffer.tokens.index_put_((where, columns), ids)
