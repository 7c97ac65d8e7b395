"""Mask removal for any transformers model: `attn_implementation="eet"`.

B rows, H heads, G KV heads, D head dim, Q queries and K keys of a row, pads included.

Source: EET's mask-free attention (Li et al. 2021), behind transformers' `AttentionInterface`. A function of the same
name is registered with `AttentionMaskInterface`: without it, transformers passes no mask at all, and pads are read.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from inspect import Parameter, signature
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from eet_lab.errors import ModelError
from eet_lab.ops import cuda, native
from eet_lab.ops.cuda.launching import DTYPES
from eet_lab.ops.types import Batch, Keys, Spec, fresh

OF_ONE_TEXT = {"self", "hidden_states", "attention_mask", "head_mask", "position_embeddings", "position_ids"}
OF_ONE_TEXT |= {"past_key_values", "past_key_value", "layer_past", "use_cache", "cache_position", "output_attentions"}
OF_ONE_TEXT |= {"cu_seqlens", "max_seqlen"}
"""What a module may ask for that has no room for another text: keys are made of what queries are made of."""
GIVEN_APART = {"MobileBertSelfAttention.forward"}
"""What modules of transformers run that are given queries, keys and values apart, all of one text."""
READS = {"__get__", "__set__", "__repr__", "__len__", "dim", "size", "stride", "numel", "__getitem__", "view", "bool"}
MOVES = {"to", "cuda", "cpu", "detach", "clone", "contiguous"}
"""What may be done with a mask: look at it, as transformers does where `generate` made it before, and take it along
from device to device.
"""
WRAPPERS = {"torch._tensor", "torch.overrides", "torch.functional", "torch.nn.functional"}
"""Where PyTorch has functions in Python that others call."""
WARNED: set[tuple[str, str]] = set()
"""The kinds of modules that were warned of, each with a kind of reason."""
REMEDY = "Use attn_implementation='sdpa' for this model."
EAGER = "Use attn_implementation='eager' for this model."
"""What PyTorch's function does not take either."""


def register_attention(name: str = "eet") -> None:
    """Let transformers models take `attn_implementation="eet"`: attention that builds and reads no mask.

        eet_lab.register_attention()
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eet")

    Two numbers bound the keys of a row, so pads (left or right) are neither read nor computed with; a pad's own output
    tells nothing. So pad right where a head reads the first column, as BERT's do for classes of texts. Causal,
    sliding-window, bidirectional and cross attention, with and without a cache. On a GPU, passes in inference take our
    kernels; what these do not take, such as cross attention and windows that are not causal, is warned of once for each
    kind of module, and takes PyTorch's attention over each row's own keys, as training does.
    Errors, when the model runs: ModelError for masks that two numbers cannot say, dropout, attention weights, and
    models that ask for a mask but attend by themselves, such as CodeGen. Of those that ask for none, such as DeBERTa,
    nothing is known here: transformers takes any name for them, and they stay as they are. ModelError at once for a
    name that is another's, such as "sdpa".
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise ModelError(f"name is {name!r}, but it must be a word of letters, digits, _ and -, such as 'eet'.")
    if name == "eager" or AttentionInterface().get(name, attention) is not attention:
        raise ModelError(f"name is {name!r}, but transformers has another attention of this name. Choose another.")
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, real_tokens)


class Bounds(NamedTuple):
    """What a row's queries may see: its keys `begin .. end - 1`; the newest query is key K - 1."""

    begin: list[int]  # B
    end: list[int]


class Sight(NamedTuple):
    """Which keys a query may see beside pads, as transformers' mask function has it; a module may tell otherwise."""

    is_causal: bool
    window: int | None = None  # of so many keys, its own among them; where it is not causal, so many on each side


class RealTokens(Tensor):
    """transformers' mask [B,K] as it came, True for real tokens. It brings the host's numbers: read once a pass."""

    bounds: Bounds | None = None  # None: of a part of a mask
    sight: Sight | None = None  # None: as the module tells

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """ModelError where a module computes with it: added to scores it would hide nothing, without a word."""
        name = getattr(func, "__name__", "")
        if name not in READS | MOVES and (module := _computing()):
            raise ModelError(
                f"{_named(module)} attends by itself ({name} of its mask), and not through AttentionInterface. Leave "
                "attn_implementation out for this model."
            )
        found = super().__torch_function__(func, types, args, kwargs or {})
        if name in MOVES:
            found.bounds, found.sight = args[0].bounds, args[0].sight
        return found


def _named(module: torch.nn.Module) -> str:
    return f"{type(module).__name__} of transformers {version('transformers')}"


def _computing() -> torch.nn.Module | None:
    """The module that calls a function of PyTorch now, or None where PyTorch itself does, as its compiler may."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in WRAPPERS:
        frame = frame.f_back
    if frame is not None and str(frame.f_globals.get("__name__")).startswith("torch."):
        return None
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), torch.nn.Module):
            return found
        frame = frame.f_back
    return None


def real_tokens(
    batch_size: int,
    *args: Any,
    kv_length: int,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> RealTokens:
    """`attention_mask` [B,K], or all True, as `AttentionMaskInterface` asks for it once a pass.

    ModelError where a row's real tokens have gaps, or where keys are hidden in another way.
    """
    sight = None if mask_function is None else _sight(mask_function)
    if mask_function is not None and sight is None:
        raise ModelError(
            "This pass hides keys in a way that a first and a last key of each row do not say, such as by position_ids "
            f"that begin again within a row (packed texts), or by chunks. {REMEDY}"
        )
    if attention_mask is None:
        kv_length = _num_written(kv_length, sight, others)
        attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    with torch._C.DisableTorchFunctionSubclass():  # `generate` may have made it before
        real = attention_mask.as_subclass(Tensor)[:, -kv_length:].bool()
    changes = pad(real, (1, 1)).int().diff()  # 1 where real tokens begin, -1 behind them
    begin, end = changes.argmax(-1), changes.argmin(-1)
    *bounds, parts = torch.stack((begin, end, (changes > 0).sum(-1))).tolist()  # the pass's only copy to the host
    if gaps := [row for row, count in enumerate(parts) if count > 1]:
        raise ModelError(
            f"Row {gaps[0]} of attention_mask has pads between its tokens; pads may stand left or right of them. "
            f"{REMEDY}"
        )
    told = real.as_subclass(RealTokens)
    told.bounds = Bounds(*bounds)
    told.sight = sight
    return told


def _num_written(kv_length: int, sight: Sight | None, asked: Mapping[str, Any]) -> int:
    """How many columns hold keys where no mask tells it: a static cache is longer than its tokens."""
    if sight is None or not sight.is_causal:
        return kv_length
    if (places := asked.get("cache_position")) is not None:  # of the queries, before transformers 5
        end = places[-1] + 1
    else:
        end = asked.get("q_offset", 0) + asked.get("q_length", kv_length)
    return min(int(end) - asked.get("kv_offset", 0), kv_length)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [B,H,Q,D], key and value [B,G,K,D] -> [B,Q,H,D], and no attention weights."""
    for reason in _refused(others):
        raise ModelError(f"eet attention takes no {reason}. {EAGER}")
    if dropout > 0:
        raise ModelError(f"eet attention takes no dropout (set the model's attention dropout to 0). {REMEDY}")
    if not isinstance(attention_mask, RealTokens) or attention_mask.bounds is None:
        asker = _named(module)
        if attention_mask is not None:
            raise ModelError(
                f"{asker} was given a mask of its own {list(attention_mask.shape)}; give attention_mask as real tokens "
                f"[B,K], if a first and a last key say it. {REMEDY}"
            )
        raise ModelError(
            f"{asker} does not ask AttentionMaskInterface for its mask, so pads would be read as tokens. Use a newer "
            "transformers, or attn_implementation='sdpa'."
        )
    if attention_mask.sight is not None:  # a mask is the truth for transformers, whatever comes beside it
        is_causal, sliding_window = attention_mask.sight
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    keys, held = attention_mask.bounds, attention_mask.shape[1]
    key, value = key[:, :, :held], value[:, :, :held]  # a static cache is longer than its tokens
    spec = Spec(query.shape[1], key.shape[1], key.shape[3], is_causal, sliding_window, scaling)
    is_cross = not is_causal and _is_cross(module, query.shape[2], held, sliding_window)
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if _is_on_gpu(query) and not is_trained:
        why = "it may look at another text" if is_cross else _beyond_kernels(query, key, value, spec)
        if why is None:
            return _by_kernel(query, key, value, keys, spec), None
        _warn(type(module).__name__, why)
    return _by_torch(query, key, value, keys, spec, is_cross), None


def _is_cross(module: torch.nn.Module, num_queries: int, num_keys: int, window: int | None) -> bool:
    """Whether queries that see all keys may be those of another text, so that its pads are none of theirs.

    As many may be by chance. Then all are computed, unless the module cannot look at another text: real tokens are
    the same either way, and pads cost time.
    """
    if num_queries != num_keys:
        return True
    return window is None and getattr(module, "is_decoder", True) and _may_cross(type(module).forward)


@cache
def _may_cross(forward: Callable) -> bool:
    """Whether a module's `forward` asks for anything that keys of another text may come from, by whichever name."""
    if forward.__qualname__ in GIVEN_APART and forward.__module__.startswith("transformers."):
        return False
    asked = signature(forward).parameters.values()
    return any(each.name not in OF_ONE_TEXT and each.kind != Parameter.VAR_KEYWORD for each in asked)


def _refused(others: dict[str, Any]) -> list[str]:
    named = {"softcap": "softcap", "position_bias": "position bias", "output_attentions": "output_attentions"}
    named |= {"s_aux": "attention sinks", "cache": "cache of continuous batching"}
    return [word for name, word in named.items() if others.get(name) is not None and others[name] is not False]


def _by_torch(query: Tensor, key: Tensor, value: Tensor, keys: Bounds, spec: Spec, is_cross: bool) -> Tensor:
    """Rows that see the same keys take one call together."""
    (B, H, Q, D), K = query.shape, key.shape[2]
    is_causal, window = spec.causal, spec.window
    out = query.new_zeros(B, Q, H, D)
    bounds = list(zip(*keys, strict=True))
    groups = [slice(0, B)] if len(set(bounds)) == 1 else [slice(row, row + 1) for row in range(B)]
    for rows in groups:
        begin, end = bounds[rows.start]
        first, last = (0, Q) if is_cross else (max(begin - (K - Q), 0), end - (K - Q))  # its queries that are no pads
        if first >= last or begin >= end:
            continue
        num = last - first
        if window is not None and is_causal:
            begin = max(begin, end - num + 1 - window)  # what the first of them sees
        seen, mask = end - begin, None
        if is_causal and num > 1 and (num < seen or window is not None):
            ago = torch.arange(seen - num, seen, device=query.device)[:, None] - torch.arange(seen, device=query.device)
            mask = (ago >= 0) if window is None else (ago >= 0) & (ago < window)
        elif window is not None and not is_causal:
            ago = torch.arange(seen - num, seen, device=query.device)[:, None] - torch.arange(seen, device=query.device)
            mask = ago.abs() <= window
        mixed = scaled_dot_product_attention(
            query[rows, :, first:last],
            key[rows, :, begin:end],
            value[rows, :, begin:end],
            attn_mask=mask,
            is_causal=is_causal and num > 1 and mask is None,
            scale=spec.scale,
            **({"enable_gqa": True} if key.shape[1] < H else {}),
        )
        out[rows, first:last] = mixed.transpose(1, 2)
    return out


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _beyond_kernels(query: Tensor, key: Tensor, value: Tensor, spec: Spec) -> str | None:
    """Why kernels do not take a pass, by what they declare, or None; the newest keys are written where they stand."""
    if why := cuda.attention.unfit(_Asked(spec)):  # type: ignore[attr-defined]
        return why
    if query.dtype not in DTYPES or value.shape != key.shape:
        return f"the kernels do not take {query.dtype} with keys {list(key.shape)} and values {list(value.shape)}"
    if key.stride() != value.stride() or key.stride(3) != 1 or any(stride % 8 for stride in key.stride()[:3]):
        return f"the kernels do not take keys and values that lie apart by {key.stride()} and {value.stride()} numbers"
    return native.available(query.device)


class _Asked(NamedTuple):
    """What kernels are asked of a model whose attention alone is known."""

    spec: Spec


def _warn(module: str, why: str) -> None:
    """Once for each kind of module, and of reason whatever its numbers: a pass on a GPU that is not our kernels'."""
    kind = module, re.sub(r"\d+", "", why)
    if kind in WARNED:
        return
    WARNED.add(kind)
    warnings.warn(
        f"attn_implementation='eet': {module} takes PyTorch's attention over each row's own keys instead of a kernel, "
        f"since {why}. The numbers are the same.",
        stacklevel=3,
    )


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, keys: Bounds, spec: Spec) -> Tensor:
    (B, H, Q, D), (_, G, K, _) = query.shape, key.shape
    newest = [x[:, :, K - Q :].transpose(1, 2) for x in (key, value)]
    qkv = torch.cat((query.transpose(1, 2), *newest), 2)
    spans = [_span(row, begin, end, K, Q) for row, (begin, end) in enumerate(zip(*keys, strict=True))]
    of_rows = (*zip(*spans, strict=True), keys.begin, [begin + max(count, 1) - 1 for begin, count in spans])
    first, count, num_pad, last = torch.tensor(of_rows).to(query.device, non_blocking=True)  # each lies as ops read it
    token = torch.arange(B * Q, device=query.device)
    columns = token % Q + (K - Q)
    seen = Keys(num_pad, None, tuple(zip(*keys, strict=True)), padded=any(keys.begin))
    longest = max(count for _, count in spans)
    batch = Batch(token, columns, token // Q, columns, last, first, count, seen, longest, K, tuple(spans))
    kv = (key, value) if Q < K else None  # else all keys are those of the pass
    attended = cuda.attention(qkv.view(B * Q, (H + 2 * G) * D), kv, batch, spec, empty=fresh)
    return attended.view(B, Q, H, D)


def _span(row: int, begin: int, end: int, K: int, Q: int) -> tuple[int, int]:
    """The first of the queries of a row that are no pads, and how many there are."""
    first, last = max(begin - (K - Q), 0), max(end - (K - Q), 0)
    return row * Q + first, max(last - first, 0)


def _sight(function: Callable) -> Sight | None:
    """What transformers' mask functions say, which it composes of closures; None where two numbers do not say it."""
    from transformers import masking_utils as masks

    if function is masks.causal_mask_function:
        return Sight(True)
    if function is getattr(masks, "bidirectional_mask_function", None):
        return Sight(False)
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if closure and code == masks.and_masks().__code__:
        each = closure[0].cell_contents
        found = [sight for part in each if (sight := _sight(part)) is not None]
        if len(found) < len(each) or len({sight.is_causal for sight in found}) != 1:
            return None
        windows = [sight.window for sight in found if sight.window is not None]
        return Sight(found[0].is_causal, min(windows, default=None))
    for name, is_causal in (("sliding_window_overlay", True), ("sliding_window_bidirectional_overlay", False)):
        overlay = getattr(masks, name, None)
        if closure and overlay is not None and code == overlay(1).__code__:
            return Sight(is_causal, closure[0].cell_contents)
    return None
