"""What a decode step calls, launches and reads.

It is counted by torch's profiler on a GPU, and by PyTorch's dispatcher on a CPU; or told without a GPU, from what ops
declare and from a tiny decoder. B rows, T tokens, K columns of the KV cache, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from eet_lab.engine.engine import Engine
from eet_lab.engine.meta_trace import META, NoArithmetic, new_cache
from eet_lab.engine.settings import Settings
from eet_lab.models.config import PRESETS, Config
from eet_lab.models.decoder import forward
from eet_lab.models.weights import random_decoder
from eet_lab.ops import pieces
from eet_lab.ops.records import OPS
from eet_lab.ops.types import Keys, TokenBuffer, fresh
from eet_lab.parts import Ops, Parts
from eet_lab.parts.batches import decode_batch, empty_buffer

CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
"""What the host hands to the GPU; names with a suffix such as cudaLaunchKernelExC count as well."""

STEPS = 8


class StepLaunches(NamedTuple):
    """What a step hands to the device (a graph is one launch), and what the device does for it, kernel by kernel.

    Copies and fills count as both; so do those that bring each token to the host.
    """

    launches: float
    kernels: float

    def per_step(self) -> StepLaunches | None:
        """The counts of one of the `STEPS` steps; None where launches or kernels cannot be seen."""
        return StepLaunches(self.launches / STEPS, self.kernels / STEPS) if all(self) else None


def is_work(function: Any) -> bool:
    """Whether a call of PyTorch is work for the device, and neither a view nor new memory."""
    return not (function.is_view or function.__name__.startswith(("empty", "new_empty", "detach")))


class Call(NamedTuple):
    """One op of a step. `launches` is None for plain PyTorch, which decides for itself; bytes are those that it moves,
    each once: weights, keys, values and activations.
    """

    op: str
    launches: int | None
    read_bytes: int


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not import torch._dynamo, which takes seconds; torch.compile may trace into it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class TorchCalls(DispatchMode):
    """Notes what PyTorch computes while it is entered; views and new memory are no work for the device."""

    torch_call = Call("torch", None, 0)

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_work(function):
            self.calls.append(self.torch_call)
        return function(*args, **(kwargs or {}))


class CallCounter(TorchCalls):
    """The counter for a CPU, where every call of PyTorch is launch and kernel in one."""

    def __init__(self, running: ExitStack) -> None:
        super().__init__()
        self._running = running

    def start(self) -> None:
        self.calls.clear()
        self._running.enter_context(self)

    def stop(self) -> StepLaunches:
        self._running.close()
        return StepLaunches(len(self.calls), len(self.calls))


class Profile:
    """The same for a GPU, as far as torch's profiler may look: what was launched before `start` does not count."""

    def __init__(self, running: ExitStack) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self._profile, self._running = torch.profiler.profile(activities=activities), running

    def start(self) -> None:
        torch.cuda.synchronize()
        self._running.enter_context(self._profile)

    def stop(self) -> StepLaunches:
        torch.cuda.synchronize()
        self._running.close()
        events = self._profile.events() or []
        on_device = [e for e in events if e.device_type == torch.profiler.DeviceType.CUDA and not e.is_user_annotation]
        launches = sum(e.name.startswith(CALLS) for e in events if e.device_type == torch.profiler.DeviceType.CPU)
        return StepLaunches(launches, len(on_device))


@contextmanager
def counting(device: str) -> Iterator[CallCounter | Profile]:
    """What counts between `start` and `stop`, on "cpu" or "cuda"; it ends with the block, whatever happened there."""
    with ExitStack() as running:
        yield CallCounter(running) if device == "cpu" else Profile(running)


def launches_per_token(engine: Engine, num_rows: int) -> StepLaunches | None:
    """What one decode step launches: the difference of a run with 1 and one with 9 new tokens, over 8.

    Prompts have 1, 2, ... tokens, since some ops launch once for each length. None on the CPU, and where the profiler
    cannot see the GPU. The engine's slots are others afterwards.
    """
    if engine.model.device.type != "cuda":
        return None
    longest = engine.model.config.context - 1 - STEPS
    rows = [[1] * min(row + 1, longest) for row in range(num_rows)]
    few, many = (_counted(engine, rows, Settings(max_new_tokens=n)) for n in (1, 1 + STEPS))
    if not (all(few) and all(many)):
        return None
    return StepLaunches(*((more - less) / STEPS for less, more in zip(few, many, strict=True)))


def _counted(engine: Engine, rows: list[list[int]], settings: Settings) -> StepLaunches:
    for _ in range(engine.parts.num_warm_ups):  # allocate, and capture
        engine.generate(rows, settings)
    with counting("cuda") as counter:
        counter.start()
        engine.generate(rows, settings)
        return counter.stop()


def decode_calls(
    config: Config, parts: Parts, batch: int, context: int, dtype: torch.dtype = torch.float16
) -> tuple[Call, ...]:
    """The ops of the decode step of `batch` rows that reads `context` columns, its own among them, in order.

    What plain PyTorch does between the ops, such as building a mask, is a call named "torch". Nothing is computed.
    Where rows are too many, or their channels, for a linear to stream its weights with a norm (`ops.cuda.linear`: on an
    H200 more than eight rows in 16 bits, and always more than 16), its product is one launch, in tiles or by cuBLAS.
    Without a GPU the limits are an H200's.
    """
    engine = Engine(random_decoder(config, 0, torch.device("meta"), dtype), parts)
    return CallRecorder().decoded(engine, empty_buffer(batch, context, META), [(0, context)] * batch)


def is_countable(recipe: Iterable[Any]) -> bool:
    """Whether its ops run on meta tensors; those of a user's own techniques may need real memory."""
    return all(type(technique).__module__.startswith("eet_lab.") for technique in recipe)


def num_launches(calls: tuple[Call, ...]) -> int | None:
    """The launches of all calls together; None where plain PyTorch is among them."""
    known = [call.launches for call in calls if call.launches is not None]
    return sum(known) if len(known) == len(calls) else None


class CallRecorder(TorchCalls):
    """Notes the ops of a step on meta tensors, and what PyTorch computes between them."""

    _unnoted: Callable[[], AbstractContextManager] = NoArithmetic
    """Entered where nothing is noted."""
    _in_op = False

    def decoded(self, engine: Engine, buffer: TokenBuffer, seen: Sequence[tuple[int, int]]) -> tuple[Call, ...]:
        """The ops of one decode step of an engine whose rows see these columns, which the KV cache has room for."""
        parts, B, device = engine.parts, len(seen), buffer.ids.device
        max_kv = max(end for _, end in seen)
        ops: Any = parts.ops.wrapped(lambda name, op: partial(self.run, name, op)).bind(fresh)
        cache = new_cache(engine.model, parts)
        cache.open([0] * B, max_kv)
        begin = torch.tensor([begin for begin, _ in seen], device=device)
        keys = Keys(begin, cache.block_table, tuple(seen), padded=any(first for first, _ in seen))
        with self._unnoted():
            batch = decode_batch(buffer, keys, max_kv)._replace(spans=tuple((row, 1) for row in range(B)))
            sampling = Settings().sampling(B, device)
        if parts.is_captured:
            batch = batch._replace(spans=None, keys=keys._replace(spans=None))
        with torch.inference_mode(), self:
            attend = parts.attend(ops, batch, cache, empty=fresh, window=engine.model.config.spec.window)
            hidden = forward(engine.model, ops, attend, batch, parts.layers)
            ops.advance(buffer, engine.task(engine.model, ops, hidden, batch, sampling), batch.count)
        return tuple(self.calls)

    def run(self, name: str, op: Callable, *args: Any, **keywords: Any) -> Any:
        """An op by the name of its slot."""
        record, described = OPS[name], {key: value for key, value in keywords.items() if key != "empty"}
        launches, work = record.launches_of(op), record.work(*args, **described)
        self.calls.append(Call(name, None if launches is None else launches + work.more_launches, work.num_bytes))
        if name == "advance":  # it changes its state and gives nothing, so nothing is learned by running it
            return None
        self._in_op = True
        try:
            with self._unnoted():
                return op(*args, **keywords)
        finally:
            self._in_op = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._in_op:
            return function(*args, **(kwargs or {}))
        return super().__torch_dispatch__(function, types, args, kwargs)


def around_each(ops: Ops, around: Callable[[str], AbstractContextManager]) -> Ops:
    """The same ops, each run within `around(the name of its slot)`; a meta trace is not."""

    def within(name: str, op: Callable) -> Callable:
        def run(*args: Any, **keywords: Any) -> Any:
            if any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in args):
                return op(*args, **keywords)
            with around(name):
                return op(*args, **keywords)

        return wraps(op)(partial(run, **pieces.composed(op)[1]))  # its pieces stay visible, and can be replaced

    return ops.wrapped(within)


Counts = tuple[tuple[str, int], ...]


class StepCalls(NamedTuple):
    """How often something is handed to the device: by each op of a layer, and in a whole step."""

    layer: Counts
    layers: int
    beside: int

    @property
    def total(self) -> int:
        return self.layers * sum(count for _, count in self.layer) + self.beside


def counted(parts: Parts, lengths: Sequence[int], num_layers: int, like: Config = PRESETS["gpt2"]) -> StepCalls:
    """What a decode step of rows with prompts of `lengths` tokens calls, in a decoder of `num_layers` layers.

    It is of the family of `like`.

    PyTorch's calls are counted while they happen, on the CPU, less views and new memory; ours count what their cases
    declare, and where an op over kernels leaves something to PyTorch, what its reference calls. Sizes do not matter,
    only how many rows there are and which are equally long, so the decoder is tiny. On a GPU some calls of PyTorch
    are two kernels: its profiler counts up to a fifth more.
    """
    places = {length: place for place, length in enumerate(sorted(set(lengths)), 2)}
    one, two = (_calls(parts, tuple(places[length] for length in lengths), num, like) for num in (1, 2))
    in_all = [sum(count for _, count in calls) for calls in (one, two)]
    per_layer = in_all[1] - in_all[0]
    layer = tuple((op, count) for op, count in one if op in ("norm_linear", "linear_residual", "attention"))
    cache = per_layer - sum(count for _, count in layer)  # a KV cache that grows, before the attention of each layer
    layer = tuple((op, count + (cache if op == "attention" else 0)) for op, count in layer)
    return StepCalls(layer, num_layers, in_all[0] - per_layer)


def num_kernels(parts: Parts, lengths: Sequence[int], config: Config, dtype: torch.dtype = torch.float16) -> int:
    """The kernels of a decode step of a model, as `counted`, with what `decode_calls` knows besides.

    Most of a layer may be one kernel. An op takes more than one where rows or channels are too many to stream its
    weights, and in float32.
    """
    layers, found = config.num_layers, counted(parts, lengths, config.num_layers, config)
    if not parts.ops.kernels:  # of what plain PyTorch launches, `decode_calls` knows no more
        return found.total
    one_layer = decode_calls(replace(config, num_layers=1), parts, len(lengths), max(lengths) + 1, dtype)
    if "fused_layer" in (call.op for call in one_layer):
        return found.beside + 2 * layers + 1  # the first layer's queries, keys and values are on their own
    more = [(call.op, call.launches - (OPS[call.op].launches or 0)) for call in one_layer if call.launches is not None]
    return found.total + sum(count if op == "next_token" else count * layers for op, count in more)


def _calls(parts: Parts, lengths: tuple[int, ...], num_layers: int, like: Config) -> Counts:
    device = torch.device("cpu")
    column = max(lengths)
    sizes: dict[str, Any] = {"hidden_size": 32, "ffn_size": 64, "vocab_size": 64, "bos_id": 0, "eos_id": None}
    sizes |= {"num_heads": 2, "num_kv_heads": 1 if like.num_kv_heads < like.num_heads else 2, "head_dim": 16}
    config = replace(like, num_layers=num_layers, context=column + 2, tied_head=True, **sizes)
    engine = Engine(random_decoder(config, 0, device, torch.float32), parts)
    pads = parts.schedule.pads(lengths)
    ends = [pad + length for pad, length in zip(pads, lengths, strict=True)]
    buffer = empty_buffer(len(lengths), column + 2, device)
    buffer.columns.copy_(torch.tensor(ends))
    found = _Counter().decoded(engine, buffer, [(pad, end + 1) for pad, end in zip(pads, ends, strict=True)])
    return tuple((call.op.removeprefix("masked_"), call.launches or 0) for call in found)


class _Counter(CallRecorder):
    """Runs every op, those over kernels by their reference, and notes how much each of them launches."""

    _unnoted = nullcontext
    torch_call = Call("torch", 1, 0)

    def run(self, name: str, op: Callable, *args: Any, **keywords: Any) -> Any:
        before = len(self.calls)
        result = (OPS[name].reference if hasattr(op, "kernels") else op)(*args, **keywords)
        declared = OPS[name].launches_of(op)
        self.calls[before:] = [Call(name, len(self.calls) - before if declared is None else declared, 0)]
        return result
