"""Norms of heads and rotary positions, before attention. T tokens, H heads, G KV heads, D head dim."""

from __future__ import annotations

import torch
from torch import Tensor

from eet_lab.ops import native
from eet_lab.ops.cuda.launching import DTYPES, at, check, needs, stream_of
from eet_lab.ops.types import Extras, Spec


@needs("rotary")
def rotary(qkv: Tensor, positions: Tensor, spec: Spec, extras: Extras, *, dependent: bool = False) -> Tensor:
    """Queries and keys as attention takes them: normed where `extras` has norms, rotated where it has frequencies.

    One launch, in place: [T,(H+2G)D] -> the same tensor; values stay as they are.
    """
    T, (H, G, D) = len(qkv), spec[:3]
    check(positions, "positions", torch.int64, (T,))
    norms = [None if norm is None else norm.weight for norm in (extras.q_norm, extras.k_norm)]
    for weight, name in zip(norms, ("q_norm", "k_norm"), strict=True):
        if weight is not None:
            check(weight, f"the weight of {name}", qkv.dtype, (D,))
    if extras.inv_freq is not None:
        check(extras.inv_freq, "inv_freq", torch.float32, (D // 2,))
    if qkv.is_meta or not T:
        return qkv
    tensors = (at(qkv), positions.data_ptr(), *map(at, norms), at(extras.inv_freq))
    numbers = (spec.rope_factor, extras.q_norm.eps if extras.q_norm else 0.0)
    sizes = (DTYPES[qkv.dtype], T, H, G, D)
    native.loaded("rotary").eet_rotary(*tensors, *numbers, *sizes, dependent, stream_of(qkv))
    return qkv
