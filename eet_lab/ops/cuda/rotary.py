"""Norms of heads and rotary positions, before attention. T tokens, H heads, G KV heads, D head dim."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from eet_lab.ops import native
from eet_lab.ops.cuda.launching import DTYPES, at, check, needs, stream_of
from eet_lab.ops.types import Extras, Spec


class Rotation(NamedTuple):
    """What launchers want to know of it."""

    addresses: tuple[int | None, ...]  # of positions, q_norm, k_norm, inv_freq
    numbers: tuple[float, float]  # the factor of cosines and sines; eps of the norms


def rotation(qkv: Tensor, positions: Tensor, spec: Spec, extras: Extras) -> Rotation:
    """The rotation of qkv [T,(H+2G)D]; KernelError for tensors that are not as the kernels need them."""
    T, D = len(qkv), spec.head_dim
    check(positions, "positions", torch.int64, (T,))
    norms = [None if norm is None else norm.weight for norm in (extras.q_norm, extras.k_norm)]
    for weight, name in zip(norms, ("q_norm", "k_norm"), strict=True):
        if weight is not None:
            check(weight, f"the weight of {name}", qkv.dtype, (D,))
    if extras.inv_freq is not None:
        check(extras.inv_freq, "inv_freq", torch.float32, (D // 2,))
    addresses = (positions.data_ptr(), *map(at, norms), at(extras.inv_freq))
    return Rotation(addresses, (spec.rope_factor, extras.q_norm.eps if extras.q_norm else 0.0))


NO_ROTATION = Rotation((None,) * 4, (1.0, 0.0))


def is_rotated(spec: Spec, extras: Extras) -> bool:
    """Whether a model has norms of heads, or rotary positions."""
    return spec.rope or extras.q_norm is not None


@needs("rotary")
def rotary(qkv: Tensor, positions: Tensor, spec: Spec, extras: Extras, *, dependent: bool = False) -> Tensor:
    """Queries and keys as attention takes them: normed where `extras` has norms, rotated where it has frequencies.

    One launch, in place: [T,(H+2G)D] -> the same tensor; values stay as they are.
    """
    T, (H, G, D) = len(qkv), spec[:3]
    if qkv.is_meta or not T:
        return qkv
    addresses, numbers = rotation(qkv, positions, spec, extras)
    sizes = (DTYPES[qkv.dtype], T, H, G, D)
    native.loaded("rotary").eet_rotary(at(qkv), *addresses, *numbers, *sizes, dependent, stream_of(qkv))
    return qkv
