"""How a decode step, or an encoder's pass, is launched. A launch part turns `decode(max_kv)` into a function of the
columns that it sees; one that captures an encoder's passes says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from threading import RLock
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from eet_lab.collector import no_collection
from eet_lab.errors import RecipeError
from eet_lab.memory.lifetimes import aligned

Decode = Callable[[int], None]


def eager(decode: Decode, longest: int, pool: GraphPool) -> Decode:
    """The baseline: Python launches every kernel of every step."""
    return decode


@dataclass(frozen=True)
class GraphLaunch:
    """Capture a step once for each number of rows and bucket of columns, then replay it: one launch a token.

    The replayed step reads its column from the device, so one graph serves every column of its bucket. Other passes of
    at most so many `tokens` are captured, an encoder's (`buckets.Size`) and those that read prompts: by their sizes
    where requests join (`buckets.mixed`), else for rows of the very same lengths; `graphs` of them are kept.
    """

    is_captured: ClassVar[bool] = True
    """The host launches a step as one thing."""

    bucket: int = 256
    tokens: int = 16_384
    graphs: int = 256

    def __call__(self, decode: Decode, longest: int, pool: GraphPool) -> Graphs:
        return Graphs(decode, longest, self.bucket, pool)


class Graphs:
    """The captured steps of so many rows; `captures` counts them."""

    def __init__(self, decode: Decode, longest: int, bucket: int, pool: GraphPool) -> None:
        """`longest` is the largest `max_kv` that a step will have."""
        self._decode, self._longest, self._bucket, self._pool = decode, longest, bucket, pool
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._warm = False

    @property
    def captures(self) -> int:
        return len(self._graphs)

    def is_replayed(self, max_kv: int) -> bool:
        """Whether such a step is there already: Python launches nothing for it."""
        return self._rounded(max_kv) in self._graphs

    def _rounded(self, max_kv: int) -> int:
        return min(aligned(max_kv, self._bucket), self._longest)

    def __call__(self, max_kv: int) -> None:
        max_kv = self._rounded(max_kv)
        if not self._warm:  # libraries make their handles and workspaces at the first call, which can't be captured
            self._decode(max_kv)
            self._warm = True
            return
        if max_kv not in self._graphs:
            self._graphs[max_kv] = capture(partial(self._decode, max_kv), self._pool)
        self._graphs[max_kv].replay()


class GraphPool:
    """Memory that graphs share, of which no two run at once."""

    def __init__(self) -> None:
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()
        self._handle: Any = None

    def handle_for_next(self) -> Any:
        """PyTorch's name for it, for the next graph: PyTorch forgets a pool with the last graph that has it."""
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        """A graph that has been captured into the pool keeps it as long as somebody keeps the graph."""
        self._graphs.add(graph)


def capture(work: Callable[[], object], pool: GraphPool | None = None) -> torch.cuda.CUDAGraph:
    """The launches of some work on the current device, which are not made. Without a `pool` it has one of its own."""
    pool = pool or GraphPool()
    # The collector might destroy an earlier graph, which ends a capture with an error.
    with capturing(), no_collection():
        graph = torch.cuda.CUDAGraph()
        # Thread-local: the threads that watch the run may ask the driver things meanwhile.
        graph.capture_begin(pool.handle_for_next(), capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # that the capture is of no use; why is told already
                graph.capture_end()
            raise
        graph.capture_end()
    pool.add(graph)
    return graph


_capturing = RLock()
"""Of the thread that captures, or runs what is captured next: another one's work would be in its graph, or end it."""


@contextmanager
def capturing() -> Iterator[None]:
    """The stream of all captures, in its order with the current one, for one thread at a time.

    Errors: RecipeError without a GPU.
    """
    if not torch.cuda.is_available():
        raise RecipeError("CUDA graphs need an NVIDIA GPU. Leave them out; `Recipe.check(device)` tells it beforehand.")
    with _capturing:
        current = torch.cuda.current_stream()
        stream = _capture_stream(current.device_index)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                _hold_workspaces(stream.device_index)
                yield
        finally:
            current.wait_stream(stream)


def _hold_workspaces(device_index: int) -> None:
    """Let cuBLAS have its workspaces for captures in memory that is kept for good, and that nothing else gets.

    Graphs hold their addresses. But PyTorch frees all workspaces when a compiler asks for it, and those of a stream
    when any graph ends that was captured on it (pytorch/pytorch#193402).
    """
    pool = _workspace_pool(device_index)
    try:
        with torch.cuda.use_mem_pool(pool):
            _multiply(device_index)
    except torch.OutOfMemoryError:  # PyTorch does not free what it caches for the sake of a pool
        torch.cuda.empty_cache()
        with torch.cuda.use_mem_pool(pool):
            _multiply(device_index)
    except RuntimeError as error:
        if "expandable_segments" not in str(error):
            raise
        _multiply(device_index)  # this version of PyTorch has no such pools beside them


@torch.inference_mode()
def _multiply(device_index: int) -> None:
    """The least that cuBLAS, and cuBLASLt, take a workspace for."""
    square, row, out = _matrices(device_index)
    torch.mm(square, square, out=out)
    torch.addmm(row, square, square, out=out)


@cache
def _matrices(device_index: int) -> list[torch.Tensor]:
    device = torch.device("cuda", device_index)
    return [torch.zeros(size, dtype=torch.float16, device=device) for size in ((16, 16), (16,), (16, 16))]


@cache
def _workspace_pool(device_index: int) -> Any:
    return torch.cuda.MemPool()


@cache
def _capture_stream(device_index: int) -> torch.cuda.Stream:
    """One stream for all captures: cuBLAS keeps a workspace of 32 MiB for each stream that it has seen."""
    return torch.cuda.Stream(device_index)
