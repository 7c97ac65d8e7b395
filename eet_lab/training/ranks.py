"""Data parallel training: what the processes of a group tell each other. Without a group there is one, which is alone.

All ranks are given the same examples, and each reads its share of them: so all check the same, and know how many labels
there are, before any work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from eet_lab.errors import Cancelled, TrainingError
from eet_lab.parts.buffers import Buffer, Buffered
from eet_lab.progress import Cancel

T = TypeVar("T")

BUCKET_BYTES = 25 << 20
"""How many bytes of gradients are summed together at least, as in DistributedDataParallel."""


class Alone:
    """The only rank."""

    def share(self, num_examples: int) -> range:
        """The numbers of the examples that this rank reads."""
        return range(num_examples)

    def together(self, work: Callable[[], list[Tensor]], has_gradients: bool = False) -> tuple[list[Tensor], Tensor]:
        """What work of this rank makes, and its sum over all ranks; gradients of it, which are zero before, are summed
        as well. Where work fails, all ranks fail. Errors: its own, and TrainingError on the others.
        """
        made = work()
        return made, torch.stack(made).sum()

    def stops(self, cancel: Cancel | None) -> Cancel | None:
        """What a step looks at between its passes. In a group all ranks stop before a step, if one of them is to, since
        each would wait for the others' gradients. Errors: Cancelled.
        """
        return cancel

    def watch(self, params: Sequence[Tensor], buffers: Sequence[Buffer]) -> None:
        """Make weights, in the order in which a forward pass reads them, the first rank's, and sum their gradients."""

    def clear(self, optimizer: Buffered) -> None:
        """Forget the last step's gradients, before the first pass of a step: the next need not lie in their places."""
        optimizer.drop_grads()

    def last_pass(self) -> None:
        """Gradients are complete as the next backward pass makes them."""

    def by_first(self, work: Callable[[], T]) -> T:
        """What the first rank makes, alone. Errors: its own, and TrainingError on the others."""
        return work()


@dataclass
class _Bucket:
    """A part of a flat gradient that is summed at once."""

    grads: Tensor
    params: list[Tensor]
    num_missing: int


class Group(Alone):
    """A rank among others, in torch.distributed's group: flat gradients are summed in buckets, while the backward pass
    makes the next ones.
    """

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.buckets: list[_Bucket] = []
        self._begin()

    def share(self, num_examples: int) -> range:
        return range(self.rank, num_examples, self.num_ranks)

    def together(self, work: Callable[[], list[Tensor]], has_gradients: bool = False) -> tuple[list[Tensor], Tensor]:
        made, failure = list[Tensor](), None
        self._begin()
        try:
            made = work()
        except Exception as error:  # noqa: BLE001  whatever it is: the others wait for this rank
            failure = error
        if has_gradients:
            self._sum_gradients()
        own = torch.stack(made).sum() if made else torch.zeros((), device=self.device)
        both = self._total(torch.stack([own.double(), own.new_full((), failure is not None).double()]))
        if failure is not None:
            raise failure
        if float(both[1]):
            raise TrainingError(
                "Another rank could not do its part of the step, which was left out; its own error says why. The "
                "weights are those before it."
            )
        return made, both[0].to(own.dtype)

    def stops(self, cancel: Cancel | None) -> Cancel | None:
        told = torch.tensor(float(cancel is not None and cancel.is_set()), device=self.device)
        if float(self._total(told)):
            raise Cancelled("The training was stopped.")
        return None

    def _total(self, part: Tensor) -> Tensor:
        """The sum over all ranks."""
        whole = part.detach().clone()
        dist.all_reduce(whole)
        return whole

    def watch(self, params: Sequence[Tensor], buffers: Sequence[Buffer]) -> None:
        self.device = params[0].device
        for buffer in buffers:
            for tensor in (buffer.weights, buffer.master):
                if tensor is not None:
                    dist.broadcast(tensor, 0)
        place = {id(param): number for number, param in enumerate(params)}
        found = [bucket for buffer in buffers for bucket in _buckets(buffer)]
        # The gradients of what a forward pass reads first come last.
        self.buckets = sorted(found, key=lambda bucket: -min(place[id(param)] for param in bucket.params))
        for bucket in self.buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(partial(self._made, bucket))

    def _begin(self) -> None:  # also after a step that was broken off
        self.waiting, self.is_last_pass = deque(self.buckets), False
        self.works: list[Any] = []
        for bucket in self.buckets:
            bucket.num_missing = len(bucket.params)

    def clear(self, optimizer: Buffered) -> None:
        optimizer.zero_grad()  # they are summed where they lie, as soon as they are there

    def last_pass(self) -> None:
        self.is_last_pass = True

    def _sum_gradients(self) -> None:
        while self.waiting:  # those of weights that this rank's texts do not read, or that has none
            self._send()
        for work in self.works:
            work.wait()

    def by_first(self, work: Callable[[], T]) -> T:
        made: list[Any] = [None]
        try:
            if self.rank == 0:
                made = [work()]
        finally:
            dist.broadcast_object_list(made, 0)
        if made[0] is None:
            raise TrainingError("The first rank could not do its work; its own error says why.")
        return made[0]

    def _made(self, bucket: _Bucket, _: Tensor) -> None:
        """A gradient is there. Buckets are sent in one order on all ranks, whichever is full first."""
        if self.is_last_pass:
            bucket.num_missing -= 1
            while self.waiting and not self.waiting[0].num_missing:
                self._send()

    def _send(self) -> None:
        self.works.append(dist.all_reduce(self.waiting.popleft().grads, async_op=True))


def ranks() -> Alone:
    """This process among those of torch.distributed's group, where one was initialized."""
    is_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return Group() if is_group else Alone()


def _buckets(buffer: Buffer) -> Iterator[_Bucket]:
    """A buffer's gradients in parts of some size, each of whole tensors."""
    params: list[Tensor] = []
    begin = 0
    for param, place in zip(buffer.params, buffer.places, strict=True):
        params.append(param)
        is_last = param is buffer.params[-1]
        if is_last or (place.stop - begin) * buffer.grads.element_size() >= BUCKET_BYTES:
            yield _Bucket(buffer.grads[begin : place.stop], params, len(params))
            params, begin = [], place.stop
