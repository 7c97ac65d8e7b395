"""The meta trace: the passes of a request, run on meta tensors. It needs no GPU, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm
from torch.overrides import TorchFunctionMode

from eet_lab.engine.settings import Settings, one_each
from eet_lab.engine.tasks import Task
from eet_lab.models.decoder import Decoder, forward, mapped, tensors
from eet_lab.models.vision import AnyEncoder
from eet_lab.ops.types import Batch, Choice, Keys, Sampling
from eet_lab.parts import Ops, Parts
from eet_lab.parts.batches import empty_buffer
from eet_lab.parts.kv_cache import KVCache
from eet_lab.parts.trace import Trace, TracedPass
from eet_lab.scheduling import Schedule

META = torch.device("meta")

TELLING = 3
"""Layers that tell what any number of the same does: a first one, a last one, and one between others."""


class RequestShape(NamedTuple):
    """A request before anything is known of its tokens: its passes, {"prefill": ..., "decode": ...}, the latter the
    longest step, by what chooses its tokens; the pads of each slot, and where it ends; how many columns it has, and how
    many the first pass reads.
    """

    passes: dict[str, TracedPass]
    choices: tuple[Choice, ...]
    num_pad: list[int]
    ends: list[int]
    capacity: int
    max_kv: int


class MetaTracer:
    """A model without its data, the parts that run it, and what is made of a pass."""

    def __init__(self, model: Decoder, parts: Parts, task: Task) -> None:
        self._given, self._parts, self._task = model, parts, task

    @cached_property
    def model(self) -> Decoder:
        return mapped(self._given, lambda tensor: tensor.to(META))

    def request(
        self, lengths: Sequence[int], settings: Settings | Sequence[Settings], capacity: int | None = None
    ) -> RequestShape:
        """What prompts of such lengths do to memory, as `Engine.generate` runs them.

        `capacity`: the columns of a slot, if they are more than these prompts take.
        """
        each, schedule = one_each(settings, len(lengths)), self._parts.schedule.of_at_most(len(lengths))
        choices = dict.fromkeys(asked.choice(self.model.config.vocab_size) for asked in each)
        if (B := schedule.max_rows) is not None:
            full = [length + asked.max_new_tokens for length, asked in zip(lengths, each, strict=True)]
            capacity = capacity or max(full)
            passes = self.mixed(schedule, capacity, (*choices,), schedule.most_tokens(capacity), capacity)
            return RequestShape(passes, (*choices,), [0] * B, [capacity] * B, capacity, capacity)
        pads, counts = schedule.pads(lengths), schedule.first_counts(lengths)
        ends = [pad + length + asked.max_new_tokens for pad, length, asked in zip(pads, lengths, each, strict=True)]
        capacity, choice = capacity or max(ends), max(choices)
        T = sum(counts) + (sum(pads) if schedule.aligned else 0)
        max_kv = max(pad + count for pad, count in zip(pads, counts, strict=True))
        passes = self._passes(len(lengths), T, max(counts), max_kv, capacity, choice)
        return RequestShape(passes, (choice,), pads, ends, capacity, max_kv)

    def mixed(
        self,
        schedule: Schedule,
        capacity: int,
        choices: Sequence[Choice],
        T: int,
        max_kv: int,
        decode_rows: int | None = None,
    ) -> dict[str, TracedPass]:
        """A pass over T tokens, whichever slots they are of, in columns [0, max_kv); and the longest decode step, of
        so many rows; None: of all slots.

        Both for each of the choices; those of the first have plain names.
        """
        sizes = schedule.max_rows or 0, T, T, max_kv, capacity
        return {
            pass_name(name, choice, choices): traced_pass
            for choice in choices
            for name, traced_pass in self._passes(*sizes, choice, decode_rows).items()
        }

    def _passes(
        self, B: int, T: int, max_q: int, max_kv: int, capacity: int, choice: Choice, decode_rows: int | None = None
    ) -> dict[str, TracedPass]:
        """A first pass, and the longest decode step of slots of `capacity` columns, whose last one is never read."""
        padded, D = self._parts.schedule.aligned and B > 1, decode_rows or B
        sizes = {"prefill": (B, T, max_q, max_kv), "decode": (D, D, 1, capacity - 1)}

        def traced_pass(name: str) -> TracedPass:
            run = partial(self._trace, *sizes[name], padded, name == "decode", choice)
            key = name, *sizes[name], padded, choice, *self._key()
            is_captured = name == "decode" or self._parts.captures_prompts is not None
            return TracedPass(key, partial(run, None), partial(run, self._telling), repeated=is_captured)

        return {name: traced_pass(name) for name in sizes}

    @cached_property
    def _telling(self) -> int | None:
        """How many layers tell what all of them do; None: all, since they differ."""
        return TELLING if are_alike(self._given) else None

    def _outlined(self, num_layers: int | None) -> Decoder:
        """The model with so many layers; None: all."""
        return self.model if num_layers is None else self.model._replace(layers=self.model.layers[:num_layers])

    def _key(self) -> tuple:
        """What passes depend on besides their sizes."""
        return ()

    def _hidden(self, model: Decoder, ops: Ops, attend: Callable, batch: Batch) -> Tensor:
        return forward(model, ops, attend(batch), batch, self._parts.layers)

    @torch.inference_mode()
    def _trace(
        self,
        B: int,
        T: int,
        max_q: int,
        max_kv: int,
        padded: bool,
        is_decode: bool,
        choice: Choice,
        num_layers: int | None,
        trace: Trace,
    ) -> None:
        """Run one pass; what its ops ask for comes from `trace`."""
        parts, model = self._parts, self._outlined(num_layers)
        ops = parts.ops.bind_each(lambda op: partial(trace.empty, op=op))
        cache, buffer = new_cache(model, parts), empty_buffer(B, 1, META)
        cache.open([0] * B, max_kv)
        spans = None if is_decode and parts.is_captured else ((0, 0),) * B
        token, each = (torch.empty(num, dtype=torch.long, device=META) for num in (T, B))
        real = each.float()
        keys = Keys(each, cache.block_table, spans, padded)
        batch = Batch(token, token, token, token, each, each, each, keys, max_q, max_kv, spans)
        with NoArithmetic():
            empty, window = partial(trace.empty, op="mask"), model.config.spec.window
            attend = partial(parts.attend, ops, empty=empty, window=window)
            # The attention of a pass lets go of its mask once it is over.
            hidden = self._hidden(model, ops, partial(attend, cache=cache), batch)
            next_token = self._task(model, ops, hidden, batch, Sampling(choice, each, real, each, real))
            ops.advance(buffer, next_token, batch.count)


COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
OPERATORS = {f"__{name}__" for name in ("floordiv", "rdiv", "and", "or", "xor", "rshift")}
OF_EACH = frozenset(("cos", "sin"))
"""Functions of each number, which keep a floating-point type."""
ARITHMETIC = frozenset(("add", "sub", "mul", "remainder", "where", *OPERATORS))
"""Functions of one number from each of their tensors, by the names that torch hands to a mode."""


class NoArithmetic(TorchFunctionMode):
    """Makes what PyTorch's calls on meta tensors return, without asking PyTorch where that takes it long.

    A meta tensor has no data. PyTorch takes up to a millisecond to find the shape of a sum, and seconds for the first
    one, for which it imports its compiler. A call that writes to a given tensor returns that tensor unchanged.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, function.__name__
        if name == "__get__":  # an attribute, which is what most calls ask for
            return function(*args)
        if kwargs.get("out") is not None:
            return kwargs["out"]
        if name == "__setitem__":
            return None
        if name == "__getitem__" and (shape := _picked(*args)) is not None:
            return torch.empty(shape, dtype=args[0].dtype, device=META)
        if name.endswith("_") and not name.endswith("__"):  # in place, as torch names it
            return args[0]
        if name in COMPARISONS:
            return _broadcast(args, torch.bool)
        if name in ARITHMETIC and not kwargs:
            dtype = torch.result_type(*args[-2:])
            is_whole = name == "__rdiv__" and not dtype.is_floating_point  # whole numbers, but their quotient is none
            return _broadcast(args, torch.get_default_dtype() if is_whole else dtype)
        is_plain = name in ("softmax", "cumsum") and not kwargs and len(args) == 2 and args[0].is_floating_point()
        if is_plain or name in OF_EACH or function in (layer_norm, rms_norm, torch.empty_like, torch.ones_like):
            return _broadcast(args[:1], args[0].dtype)
        if name == "sum" and args[1:] == (-1,) and kwargs == {"keepdim": True} and args[0].dtype == torch.bool:
            return torch.empty((*args[0].shape[:-1], 1), dtype=torch.long, device=META)
        if name == "masked_fill":
            return _broadcast(args[:2], args[0].dtype)
        if name == "clamp" and [*kwargs] == ["max"]:
            return _broadcast(args, torch.result_type(args[0], kwargs["max"]))
        if name == "sort":
            indices = torch.empty(args[0].shape, dtype=torch.long, device=META)
            return torch.return_types.sort((_broadcast(args[:1], args[0].dtype), indices))
        if name == "argmax" and args[1:] == (-1,):
            return torch.empty(args[0].shape[:-1], dtype=torch.long, device=META)
        if name == "gather":
            return _broadcast(args[2:], args[0].dtype)
        if name == "new_zeros":
            return torch.empty(*args[1:], dtype=kwargs.get("dtype", args[0].dtype), device=META)
        if function is torch.arange:
            return torch.empty(args[-1] - sum(args[:-1]), dtype=torch.long, device=META)
        if function is torch.cat:
            return _joined(*args, **kwargs)
        return function(*args, **kwargs)


def _picked(of: Tensor, index: Any) -> list[int] | None:
    """The shape of what whole numbers in tensors pick from leading dimensions; None for any other index."""
    index = index if isinstance(index, tuple) else (index,)
    tensors = [each for each in index if isinstance(each, Tensor)]
    if not tensors or any(each.dtype == torch.bool for each in tensors):
        return None
    num = len(tensors)
    if not all(isinstance(each, Tensor) for each in index[:num]) or any(each is not None for each in index[num:]):
        return None
    return [*_common({each.shape for each in tensors}), *[1] * (len(index) - num), *of.shape[num:]]


def _broadcast(args: Sequence[Any], dtype: torch.dtype) -> Tensor:
    shapes = {arg.shape for arg in args if isinstance(arg, Tensor)}
    return torch.empty(shapes.pop() if len(shapes) == 1 else _common(shapes), dtype=dtype, device=META)


def _common(shapes: Collection[Sequence[int]]) -> list[int]:
    """What shapes broadcast to; `torch.broadcast_shapes` imports a compiler's library for it."""
    sizes = [{*of_one} - {1} for of_one in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)]
    if any(len(of_one) > 1 for of_one in sizes):
        named = " and ".join(str([*shape]) for shape in shapes)
        raise RuntimeError(f"Shapes {named} do not broadcast: from the last on, sizes must be the same or 1.")
    return [of_one.pop() if of_one else 1 for of_one in sizes][::-1]


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return torch.empty(shape, dtype=parts[0].dtype, device=META)


def new_cache(model: Decoder, parts: Parts) -> KVCache:
    """The KV cache that the parts ask for, on the model's device; nothing is held until it is opened."""
    return parts.kv_cache(len(model.layers), model.config.num_kv_heads, model.config.head_dim, model.token_embedding)


def pass_name(name: str, choice: Choice, choices: Sequence[Choice]) -> str:
    """What a pass is called whose tokens are chosen so, where slots have such choices."""
    return name if choice == choices[0] else f"{name}, {choice.name.lower()}"


def are_alike(model: Decoder | AnyEncoder) -> bool:
    """Whether all layers have the same shapes and types."""
    return len({tuple((t.shape, t.dtype) for t in tensors(layer)) for layer in model.layers}) <= 1
