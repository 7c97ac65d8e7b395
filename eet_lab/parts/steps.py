"""How a pass of training, or an update, is launched. A part turns such work into a function of what it reads.

What it reads is a tree of named tuples: tensors, whose numbers differ from call to call, and numbers of the host. Work
has one result, and changes nothing but tensors.

T tokens of a pass, B texts of it, N labels.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from eet_lab.devices import present
from eet_lab.memory.lifetimes import aligned
from eet_lab.ops.types import Batch
from eet_lab.parts import launch
from eet_lab.parts.passes import Batching, Group, Readable, Text
from eet_lab.parts.staging import Staging, sent

if TYPE_CHECKING:
    from eet_lab.parts.launch import GraphPool
    from eet_lab.parts.protocols import LaysOutTexts

Work = Callable[[Any], Tensor]
SMALL_BUCKET = 16
"""Counts of texts, of small numbers of labels, and lengths of texts are rounded up to multiples of it, or of four."""


class Eager:
    """The baseline: Python launches every kernel of every step."""

    is_captured: ClassVar[bool] = False

    def __init__(self, work: Work, device: torch.device) -> None:
        self._work, self._staging = work, Staging(device)

    def __call__(self, given: Any) -> Tensor:
        return self._work(sent(given, self._staging))

    def kind(self, given: Any) -> Hashable:
        """Work of the same kind has the same launches; None: that does not matter."""
        return None

    def close(self) -> None:
        """Give memory back."""
        self._staging.close()


@dataclass(frozen=True)
class CapturedSteps:
    """Capture work once for each kind of what it reads, then replay it: one launch a pass, and one an update.

    Work is of one kind where all shapes are the same, and all numbers of the host. Its first call runs as it is, since
    libraries make their handles and workspaces then; the second is captured. `graphs` is the most that are kept.
    """

    is_captured: ClassVar[bool] = True
    """The host launches a pass as one thing: ops see no lengths of the host, unless all are the same."""

    graphs: int = 32

    def __call__(self, work: Work, device: torch.device) -> Replays:
        return Replays(work, device, self.graphs)


@dataclass
class _Kept:
    """Work of one kind: what it reads, and where; and its graph with the result, once it is captured."""

    staging: Staging
    is_warm: bool = False
    graph: Any = None
    address: int = 0  # where the graph reads
    result: Tensor | None = None
    graph_bytes: int = 0  # what its capture has allocated


class Replays:
    """The graphs of one kind of work, which share their memory; `captures` counts them, those that are gone, too."""

    is_captured: ClassVar[bool] = True

    def __init__(
        self,
        work: Work,
        device: torch.device,
        most: int,
        *,
        shown: Callable[[Any], Any] | None = None,
        frees_first: bool = True,
        staging: Staging | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        """`shown` is what a graph gets to see of what is given; None: the host's lengths, only if all are the same.

        `frees_first`: before a capture what else was used goes back to the device, which takes some time. `staging` is
        where work of all kinds reads, which may serve others, too; None: each kind has memory of its own. Graphs share
        the memory of `pool`; None: of one of their own.
        """
        self._work, self._device, self._most = work, device, most
        self._shown, self._frees_first, self._staging = shown or _by_device, frees_first, staging
        self._kept: dict[Hashable, _Kept] = {}  # the one that was used last is the last
        self._pool = pool or launch.GraphPool()
        self.captures = 0

    def __call__(self, given: Any) -> Tensor:
        with present(self._device):
            return self._launched(self._shown(given))

    def _launched(self, given: Any) -> Tensor:
        kind = _kind(given)
        kept = self._kept.pop(kind, None) or _Kept(self._staging or Staging(self._device))
        arrived = sent(given, kept.staging)
        if not kept.is_warm:
            with launch.capturing():
                result, kept.is_warm = self._work(arrived), True
        else:
            if kept.graph is None or kept.address != kept.staging.address:
                self._capture(kept, arrived)
            kept.graph.replay()
            assert kept.result is not None
            result = kept.result.clone()
        self._kept[kind] = kept
        while len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]
        return result

    def kind(self, given: Any) -> Hashable:
        """What a graph is kept by."""
        return _kind(self._shown(given))

    def void(self) -> None:
        """Let go of all graphs, since memory that they use has moved: each is captured again when it is used next."""
        for kept in self._kept.values():
            kept.graph, kept.result, kept.graph_bytes = None, None, 0

    @property
    def held_bytes(self) -> int:
        """What captures have allocated, as long as their graphs are kept, and the memory of what they alone read."""
        every, shared = [*self._kept.values()], self._staging
        own = sum(kept.staging.held_bytes for kept in every if kept.staging is not shared)
        return own + sum(kept.graph_bytes for kept in every)

    def close(self) -> None:
        """Give graphs back, and their memory."""
        self._kept.clear()

    def _capture(self, kept: _Kept, arrived: Any) -> None:
        if self._frees_first:
            gc.collect()  # what of other passes waits for it holds memory, and nodes that belong to other streams
            torch.cuda.empty_cache()  # what the same work took before would stay beside the graphs' own

        def work() -> None:
            kept.result = self._work(arrived)

        before = torch.cuda.memory_allocated()
        kept.graph, kept.address = launch.capture(work, self._pool), kept.staging.address
        kept.graph_bytes = max(torch.cuda.memory_allocated() - before, 0)
        self.captures += 1


def _kind(part: Any) -> Hashable:
    if isinstance(part, Tensor):
        return part.shape, part.dtype
    return (type(part), *map(_kind, part)) if hasattr(part, "_fields") else part


def _by_device(part: Any) -> Any:
    """The same, where the host knows lengths only if all are the same: then they belong to the shape."""
    if isinstance(part, Batch):
        if part.spans is None or len({count for _, count in part.spans}) == 1:
            return part
        longest = [aligned(length, 4 * SMALL_BUCKET) for length in (part.max_q, part.max_kv)]
        return part._replace(keys=part.keys._replace(spans=None), max_q=longest[0], max_kv=longest[1], spans=None)
    return type(part)(*map(_by_device, part)) if hasattr(part, "_fields") else part


@dataclass(frozen=True)
class Bucketed:
    """Passes of few shapes: the tokens and the labels of those that `texts` lays out are rounded up to a `bucket`.

    A pass whose texts differ in length gets texts of pads and empty ones behind its own, and all get places that are
    asked for beyond their labels. Whoever learns from it has nothing to learn there. Rectangles keep their shape.
    Texts that share a pass stay within `batch_tokens`, unless that is less than one bucket, or than two of sources.
    """

    texts: LaysOutTexts
    bucket: int

    def __call__(self, texts: Sequence[Readable], batching: Batching) -> Iterator[Group]:
        whole = max(batching.batch_tokens // self.bucket, 1) * self.bucket
        if any(len(text.source) for text in texts):  # each text of pads has a token of a source: room for so many
            whole = max(whole + (1 - self.bucket) // min(len(text.ids) for text in texts), self.bucket)
        groups = self.texts(texts, replace(batching, batch_tokens=whole))
        return map(partial(_filled, bucket=self.bucket), groups)


def _filled(group: Group, bucket: int) -> Group:
    texts, num_asked = list(group.texts), group.num_asked
    missing = aligned(num_asked, bucket if num_asked > bucket else SMALL_BUCKET) - num_asked
    if missing:
        texts[-1] = texts[-1]._replace(asked=(*texts[-1].asked, *[0] * missing))
    ids, sources = (np.array(lengths) for lengths in ([len(t.ids) for t in texts], [len(t.source) for t in texts]))
    if np.ptp(ids) or np.ptp(sources):
        of_ids = _shared(aligned(ids.sum(), bucket) - ids.sum(), ids.max())
        # Each of them has a source, too: attention to nothing is no number.
        wanted = aligned(sources.sum() + len(of_ids), bucket)
        of_sources = _shared(wanted - sources.sum(), sources.max(), len(of_ids)) if sources.any() else []
        num_pads = aligned(len(texts) + max(len(of_ids), len(of_sources)), SMALL_BUCKET) - len(texts)
        sides = ([*side, *[0] * (num_pads - len(side))] for side in (of_ids, of_sources))
        texts += [Text([0] * num, source=[0] * of_source) for num, of_source in zip(*sides, strict=True)]
    return group._replace(texts=tuple(texts))


def _shared(total: int, most: int, least: int = 0) -> list[int]:
    """A number as a sum of `least` numbers or more, none above `most`."""
    count = max(-(-total // most), least)
    return [total // count + (i < total % count) for i in range(count)] if count else []
