"""Data parallel training: what the processes of a group tell each other. Without a group there is one, which is alone.

All ranks are given the same examples, and each reads its share of them: so all check the same, and know how many labels
there are, before any work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

# Its functions keep the group that is there when they are imported (torch 2.13), as transformers does late: destroying
# that group would leave its threads, of which one that frees a tensor aborts the interpreter as it ends.
import torch.distributed.nn
from torch import Tensor

from eet_lab.devices import present
from eet_lab.errors import Cancelled, TrainingError, first_line
from eet_lab.parts.buffers import Buffer, Buffered
from eet_lab.words import told

T = TypeVar("T")

BUCKET_BYTES = 25 << 20
"""How many bytes of gradients are summed together at least, as in DistributedDataParallel."""
TEXT_BYTES = 512
"""How much of an error's text a rank tells the others."""
STOPPED = f"{Cancelled.__name__}: "
"""How the text of a rank that was stopped begins."""


class BatchMark(NamedTuple):
    """What tells one batch from another."""

    num_examples: int
    checksum: int  # of 32 bits


class Alone:
    """The only rank."""

    def share(self, num_examples: int) -> range:
        """The numbers of the examples that this rank reads."""
        return range(num_examples)

    def agree(self, what: str, device: torch.device, given: Mapping[str, object]) -> None:
        """Errors: TrainingError on all ranks, where `what` was given other values on one, such as another number."""

    def all_or_none(self, work: Callable[[], object]) -> None:
        """Work of each rank. Errors: its own, and TrainingError or Cancelled on the others."""
        work()

    def together(
        self,
        work: Callable[[], list[Tensor]],
        num_steps: int,
        mark: Callable[[], BatchMark],
        has_gradients: bool = False,
    ) -> tuple[list[Tensor], Tensor]:
        """What work of this rank makes, and its sum over all ranks; gradients of it, which are zero before, are summed
        as well. Where work fails on one rank, the sum is NaN on the others, who learn why by `check`; it is NaN on all
        where they differ in `num_steps`, which each has made, or in the `mark` of the batch that each was given.
        Errors: its own.
        """
        made = work()
        return made, torch.stack(made).sum()

    def check(self) -> None:
        """Wait for the sum of `together`, on the host. Errors: TrainingError or Cancelled, if another rank failed;
        TrainingError, if ranks have made different numbers of steps, or were given different batches.
        """

    @contextmanager
    def following(self) -> Iterator[None]:
        """Work that goes on with the sum of `together`. Where it fails on this rank alone, ranks are apart, which the
        next `together` tells all. Errors: its own, or those of `check`: a rank that failed before waits for this one.
        """
        try:
            yield
        except Exception:
            self.check()
            raise

    def watch(self, params: Sequence[Tensor], buffers: Sequence[Buffer], is_captured: bool) -> None:
        """Make weights, in the order in which a forward pass reads them, the first rank's, and sum their gradients:
        while the last backward pass of a step makes the next ones, or after it, where passes are captured.
        """

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

    def all_or_none(self, work: Callable[[], object]) -> None:
        def done() -> list[Tensor]:
            work()
            return [torch.zeros((), device=self.device)]

        self.together(done, 0, lambda: BatchMark(0, 0))
        self.check()

    def agree(self, what: str, device: torch.device, given: Mapping[str, object]) -> None:
        each = list[Any]([None] * self.num_ranks)
        with present(device):  # objects of a group of GPUs are sent from the present one
            dist.all_gather_object(each, given)
        for rank, own in enumerate(each):
            for name in {**each[0], **own}:
                first, other = (told(found[name]) if name in found else "not there" for found in (each[0], own))
                if each[0].get(name) != own.get(name):
                    raise TrainingError(
                        f"Ranks differ in {what}: {name} is {first} on rank 0 and {other} on rank {rank}. Give all "
                        "ranks the same."
                    )

    def together(
        self,
        work: Callable[[], list[Tensor]],
        num_steps: int,
        mark: Callable[[], BatchMark],
        has_gradients: bool = False,
    ) -> tuple[list[Tensor], Tensor]:
        made, failure = list[Tensor](), None
        self._begin()
        try:
            made = work()
        except Exception as error:  # noqa: BLE001  whatever it is: the others wait for this rank
            failure = error
        if has_gradients:
            self._sum_gradients()
        self.told.zero_()
        if failure is not None:
            self.told[1] = 1
        elif made:
            self.told[0] = torch.stack(made).sum()
        for place, number in enumerate((num_steps, *mark()), 2 + 3 * self.rank):
            self.told[place] = number  # one by one: the host would wait for the copy of a tensor
        dist.all_reduce(self.told)
        if failure is not None:
            self._failures(failure)
            raise failure
        # The host does not wait for it here: an update that follows is skipped where the sum is no number.
        each = self.told[2:].view(self.num_ranks, -1)
        is_apart = (each != each[0]).any()
        total = torch.where((self.told[1] > 0) | is_apart, torch.nan, self.told[0])
        return made, total.to(made[0].dtype if made else torch.float32)

    def check(self) -> None:
        _, num_failed, *found = self.told.tolist()
        num_steps, num_examples, sums = found[::3], found[1::3], found[2::3]
        if not num_failed:
            if min(num_steps) < max(num_steps):
                each = ", ".join(f"rank {rank} has made {number:,.0f}" for rank, number in enumerate(num_steps))
                raise TrainingError(
                    f"Ranks differ in their steps: {each}. One failed in an update that others made, so their weights "
                    "differ, too. Nothing was changed now. Resume all ranks from the last checkpoint."
                )
            if other := next((rank for rank, own in enumerate(sums) if own != sums[0]), None):
                raise TrainingError(
                    f"Ranks were given different examples: rank 0 has {num_examples[0]:,.0f}, and rank {other} has "
                    f"{num_examples[other]:,.0f} that are not the same. Nothing was changed. Give all ranks the whole "
                    "batch, of which each reads its own share by itself."
                )
            return
        texts = enumerate(self._failures(None))
        failed = next(((rank, text) for rank, text in texts if text and not text.startswith(STOPPED)), None)
        if failed is None:
            raise Cancelled("The training was stopped.")
        raise TrainingError(
            f"Rank {failed[0]} failed, and all ranks left this step out; the weights are those before it. It says: "
            f"{failed[1]}"
        )

    def _failures(self, own: Exception | None) -> list[str]:
        """What each rank failed by, which all ask at the same time; "" of those that did not."""
        rows = torch.zeros(self.texts.shape, dtype=torch.uint8)
        if own is not None:
            text = f"{type(own).__name__}: {first_line(own)}".encode()[:TEXT_BYTES]
            rows[self.rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.texts.copy_(rows)
        dist.all_reduce(self.texts)
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in self.texts.cpu().numpy()]

    def watch(self, params: Sequence[Tensor], buffers: Sequence[Buffer], is_captured: bool) -> None:
        self.device, self.is_captured = params[0].device, is_captured
        # There from the beginning: a rank whose memory is full has none for them.
        # The sum, how many failed, and each rank's number of steps and mark of its batch.
        self.told = torch.zeros(2 + 3 * self.num_ranks, dtype=torch.float64, device=self.device)
        self.texts = torch.zeros(self.num_ranks, TEXT_BYTES, dtype=torch.uint8, device=self.device)
        for buffer in buffers:
            for tensor in (buffer.weights, buffer.master):
                if tensor is not None:
                    dist.broadcast(tensor, 0)
        place = {id(param): number for number, param in enumerate(params)}
        found = [bucket for buffer in buffers for bucket in _buckets(buffer)]
        # The gradients of what a forward pass reads first come last.
        self.buckets = sorted(found, key=lambda bucket: -min(place[id(param)] for param in bucket.params))
        for bucket in self.buckets if not is_captured else ():
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(partial(self._made, bucket))

    def _begin(self) -> None:  # also after a step that was broken off
        self.waiting, self.is_last_pass = deque(self.buckets), False
        self.works: list[Any] = []
        for bucket in self.buckets:
            bucket.num_missing = len(bucket.params)

    def clear(self, optimizer: Buffered) -> None:
        if self.is_captured:
            super().clear(optimizer)
        else:
            optimizer.zero_grad()  # they are summed where they lie, as soon as they are there

    def last_pass(self) -> None:
        self.is_last_pass = True

    def _sum_gradients(self) -> None:
        while self.waiting:  # those of weights that this rank's texts do not read, or that has none
            self._send()
        for work in self.works:
            work.wait()

    def by_first(self, work: Callable[[], T]) -> T:
        made, why = list[T](), "no message"
        try:
            if self.rank == 0:
                made.append(work())
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            raise
        finally:
            found: list[Any] = [made, why]
            with present(self.device):  # objects of a group of GPUs are sent from the present one
                dist.broadcast_object_list(found, 0)
        made, why = found
        if not made:
            raise TrainingError(f"The first rank failed: {why}")
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
