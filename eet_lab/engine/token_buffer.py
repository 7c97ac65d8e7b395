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
from eet_lab.memory.lifetimes import aligned
from eet_lab.ops.noise import noise_key
from eet_lab.ops.types import Choice, Sampling, TokenBuffer
from eet_lab.parts.batches import LOGGED
from eet_lab.parts.staging import ALIGNED_NUMBERS, Staging
from eet_lab.scheduling import Row

NO_REQUEST = -1
"""The noise key of an idle slot."""


class RequestSettings(NamedTuple):
    """What a request asks for that the scheduler need not know."""

    stop: frozenset[int]
    noise: int  # key of its row's noise
    temperature: float
    top_k: int
    top_p: float
    choice: Choice
    forced: tuple[int, ...] = ()  # what it shall generate, whatever the model says
    logprobs: int | None = None
    last: int | None = None  # what its last token shall be, which nothing reads, if it goes on to its limit

    @classmethod
    def of(cls, settings: Settings, num_tokens: int, number: int = 0, forced: Sequence[int] = ()) -> RequestSettings:
        """The settings of request `number` among those of one seed. It draws what row `number` of a batch draws.

        `num_tokens` is the vocabulary's size.
        """
        noise, stop = noise_key(settings.seed, number), frozenset(() if forced else settings.stop)
        return cls(stop, noise, *settings.asked, settings.choice(num_tokens), tuple(forced), settings.logprobs)


class Numbers(NamedTuple):
    """What the device holds of one slot, beside its tokens; as it is for an idle one."""

    end: int = 0
    limit: int = 0
    column: int = 0
    id: int = 0
    position: int = 0
    noise: int = NO_REQUEST
    begin: int = 0
    top_k: int = 0


class Reals(NamedTuple):
    """The same: what is no whole number."""

    temperature: float = 0.0
    top_p: float = 1.0


IDLE = Numbers(), Reals()


def num_numbers_of_changes(num_slots: int) -> int:
    """The numbers that are sent where so many leave at once: a batch that ends needs no more."""
    sizes = num_slots, len(Numbers._fields) * num_slots, num_slots
    return sum(aligned(size, ALIGNED_NUMBERS) for size in sizes)


class Arrival(NamedTuple):
    """A request that takes a slot: all its tokens that are known, and the slot's numbers."""

    slot: int
    pad: int
    known: Sequence[int]
    numbers: tuple[Numbers, Reals]

    @classmethod
    def of(cls, row: Row, settings: RequestSettings) -> Arrival:
        """The arrival of a request, with the row that it reads first."""
        request, pad = row.request, row.request.pad
        known: Sequence[int] = request.prompt
        if request.generated or settings.forced:
            known = *request.prompt, *request.generated, *settings.forced[len(request.generated) :]
        limit = pad + request.full_length - 1
        first, end = row.start, pad + len(known)
        whole = Numbers(end, limit, pad + first, known[first], first, settings.noise, pad, settings.top_k)
        return cls(row.slot, pad, known, (whole, Reals(settings.temperature, settings.top_p)))


class SlotTable:
    """The token buffer, and what else is known of each slot: how its tokens are chosen, and its pads.

    It is there once it was filled, and lies at the same addresses from then on, as long as none is larger.
    """

    buffer: TokenBuffer
    sampling: Sampling  # with the most general choice, until a pass says its own
    begin: Tensor  # [B]  columns of the KV cache before the slot's first token

    def __init__(self, memory: Staging, num_slots: int, num_columns: int) -> None:
        self._memory, self._shape = memory, (num_columns, num_slots)

    def fill(self, arrivals: Iterable[Arrival]) -> None:
        """All slots anew, in one copy: those of `arrivals`, all others idle. No pass is counted yet."""
        S, B = self._shape
        slots = [IDLE] * aligned(B, ALIGNED_NUMBERS)  # so that every row begins at an address that kernels take
        tokens = np.zeros((S, B), np.int64)
        for slot, pad, known, its_numbers in arrivals:
            tokens[pad : pad + len(known), slot] = known
            slots[slot] = its_numbers
        parts = (tokens, *_rows(slots), np.zeros((LOGGED, B), np.int64), np.zeros(1, np.int64))
        tokens_on, self._whole, real, log, num_passes = self._memory.receive(list(map(torch.from_numpy, parts)))
        self._real = _as_reals(real)
        end, limit, columns, ids, positions, noise, self.begin, top_k = self._whole[:, :B]
        temperature, top_p = self._real[:, :B]
        self.sampling = Sampling(Choice.LIMITED, noise, temperature, top_k, top_p)
        self.buffer = TokenBuffer(tokens_on.t(), end, limit, columns, ids, positions, log, num_passes)

    def of_first(self, num_slots: int) -> tuple[TokenBuffer, Sampling]:
        """Both for the first so many slots alone; they share memory with those of all."""
        *of_slots, log, num_passes = self.buffer
        choice, *of_requests = self.sampling
        buffer = TokenBuffer._make([*(part[:num_slots] for part in of_slots), log[:, :num_slots], num_passes])
        return buffer, Sampling._make([choice, *(part[:num_slots] for part in of_requests)])

    def changes(self, arrivals: Sequence[Arrival], left: Sequence[int]) -> list[Tensor]:
        """The changes on the host: slots and their numbers, then the slots, columns and ids of the tokens that came."""
        if not arrivals and not left:
            return []
        slots = {slot: IDLE for slot in left} | {arrival.slot: arrival.numbers for arrival in arrivals}
        lengths = [len(arrival.known) for arrival in arrivals]
        where = np.repeat(np.array([arrival.slot for arrival in arrivals], np.int64), lengths)
        columns = [np.arange(arrival.pad, arrival.pad + len(arrival.known)) for arrival in arrivals]
        ids = np.fromiter(chain.from_iterable(arrival.known for arrival in arrivals), np.int64, sum(lengths))
        parts = (np.array([*slots], np.int64), *_rows([*slots.values()]), where)
        return list(map(torch.from_numpy, (*parts, np.concatenate(columns or [where]), ids)))

    def change(self, arrived: Sequence[Tensor]) -> None:
        """Take in what `changes` told, once it is on the device."""
        slots, whole, real, where, columns, ids = arrived
        self._whole.index_copy_(1, slots, whole)
        self._real.index_copy_(1, slots, _as_reals(real))
        self.buffer.tokens.index_put_((where, columns), ids)


def _rows(slots: Sequence[tuple[Numbers, Reals]]) -> tuple[np.ndarray, np.ndarray]:
    """What slots hold, all of a kind side by side; the real numbers are fp32, two in the room of one whole number."""
    whole = np.array([numbers for numbers, _ in slots], np.int64).T.copy()
    real = np.array([reals for _, reals in slots], np.float32).T.copy()
    return whole, real.reshape(-1).view(np.int64)


def _as_reals(arrived: Tensor) -> Tensor:
    return arrived.view(torch.float32).view(len(Reals._fields), -1)
