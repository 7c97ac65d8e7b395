"""Norms of heads and rotary positions, before attention. T tokens, H heads, G KV heads, D head dim."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eet_lab.ops import native
from eet_lab.ops.cuda.launching import DTYPES, at, check, needs, stream_of
from eet_lab.ops.types import Extras, Spec


def rotation(qkv: Tensor, positions: Tensor, spec: Spec, extras: Extras) -> dict[str, Any]:
    """The rotation of qkv [T,(H+2G)D], for launchers; KernelError for tensors that are not as the kernels need them."""
    T, D = len(qkv), spec.head_dim
    check(positions, "positions", torch.int64, (T,))
    q_norm, k_norm = (None if norm is None else norm.weight for norm in (extras.q_norm, extras.k_norm))
    check(q_norm, "the weight of q_norm", qkv.dtype, (D,))
    check(k_norm, "the weight of k_norm", qkv.dtype, (D,))
    check(extras.inv_freq, "inv_freq", torch.float32, (D // 2,))
    return {
        "positions": positions.data_ptr(),
        "q_norm": at(q_norm),
        "k_norm": at(k_norm),
        "inv_freq": at(extras.inv_freq),
        "factor": spec.rope_factor,  # of cosines and sines
        "eps": extras.q_norm.eps if extras.q_norm else 0.0,
    }


NO_ROTATION: dict[str, Any] = dict.fromkeys(("positions", "q_norm", "k_norm", "inv_freq")) | {"factor": 1.0, "eps": 0.0}


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
    native.loaded("rotary").eet_rotary(
        qkv=at(qkv), **rotation(qkv, positions, spec, extras), dtype=DTYPES[qkv.dtype], T=T, H=H, G=G, D=D,
        dependent=dependent, stream=stream_of(qkv),
    )  # fmt: skip
    return qkv
