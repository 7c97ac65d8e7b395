"""Attention of packed rows to packed rows: one call of PyTorch's libraries serves all of a pass. For training.

T tokens, S source tokens, B rows, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.functional import pad

from eet_lab.errors import KernelError
from eet_lab.ops.fits import Shapes, refuses
from eet_lab.ops.noise import Dropout, all_kept
from eet_lab.ops.rows import attend
from eet_lab.ops.types import NO_EXTRAS, Batch, Empty, Extras, Spec

OLDEST_GPU = (8, 0)
"""Compute capability: what PyTorch's flash attention needs."""
CUDNN_GPU = (9, 0)
"""Those on which cuDNN's attention is faster than flash attention 2."""
HALVES = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256


def _unfit(model: Shapes) -> str | None:
    """Why packed attention does not take a model, or None."""
    if model.spec.max_distance:
        return "packed attention takes no bias of relative positions, and this model adds one to its scores, as T5 does"
    if (D := model.spec.head_dim) % 8 or D > LARGEST_HEAD:
        return f"packed attention takes head dims that are multiples of 8 up to {LARGEST_HEAD}, and this model's is {D}"
    return None


def untrainable(dtype: torch.dtype) -> str | None:
    """Why packed attention does not train weights of a type, or None."""
    if dtype in HALVES:
        return None
    return f"packed attention computes in float16 and bfloat16, not {_name(dtype)}. Load the model in bfloat16"


@refuses(_unfit, untrainable)
def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    source: Batch,
    spec: Spec,
    extras: Extras = NO_EXTRAS,
    *,
    empty: Empty,
    drop: Dropout = all_kept,
) -> Tensor:
    """`attend_rows` by one call: queries [T,H,D], keys and values [S,G,D] -> [T,HD]. PyTorch chooses the memory.

    Rows of equal lengths are rectangles: views of what they lie in, for the dense call, which is cuDNN's on Hopper.
    Other lengths, and windows that are shorter than a row, are for flash attention over `cu_seqlens`. Which of the two
    it is follows from shapes, so that a captured pass can be replayed for other rows, of which the last may have no
    tokens. Each token must belong to a row. The gradients of q, k and v are repeated to the bit under
    `torch.use_deterministic_algorithms(True)`. Weights are dropped by the library (`library_noise`): what they lose
    depends on the layout of the pass.

    Source: FlashAttention-2 (Dao, 2023), as aten has it: differentiable, and with the same arguments since torch 2.6.
    `torch.nn.attention.varlen`, from 2.10 on, calls it too, and keeps cuDNN's varlen switched off.
    """
    if extras.bias is not None:
        raise KernelError("Packed attention takes no bias of relative positions. Leave varlen_attention out.")
    if batch.keys.padded or source.keys.padded:
        raise KernelError("Packed attention reads rows end to end, and this pass has pads. Turn packed_prefill on.")
    has_window = spec.window is not None and spec.window < batch.max_q
    noise = drop.attention_noise()  # a call that counts, so that other ops drop what they drop beside plain attention
    dropout_p = 0.0 if noise is None else noise.p
    if has_window or not (is_rectangle(batch) and is_rectangle(source)):
        return _flash(q, k, v, batch, source, spec, dropout_p).flatten(1)
    q, k, v = (part.unflatten(0, (batch.num_rows, -1)) for part in (q, k, v))
    return _dense(q, k.transpose(1, 2), v.transpose(1, 2), spec, dropout_p).flatten(1)


def is_rectangle(batch: Batch) -> bool:
    """Whether all rows of a packed pass have the same length, by shapes alone."""
    return batch.num_rows * batch.max_q == len(batch.ids)


def with_cu_seqlens(batch: Batch) -> Batch:
    """The batch with the ends of its rows, which all layers share."""
    return batch if batch.cu_seqlens is not None else batch._replace(cu_seqlens=cu_seqlens(batch))


def cu_seqlens(batch: Batch) -> Tensor:
    """Where each row of a packed pass begins, and where the last one ends: [B+1] int32."""
    return pad(batch.count.cumsum(0, dtype=torch.int32), (1, 0))


def _flash(q: Tensor, k: Tensor, v: Tensor, batch: Batch, source: Batch, spec: Spec, dropout_p: float) -> Tensor:
    """[T,H,D], [S,G,D] -> [T,H,D]."""
    if q.dtype not in HALVES or q.device.type == "cpu":
        raise KernelError(
            "Flash attention takes rows of different lengths in float16 or bfloat16 on a GPU, not in "
            f"{_name(q.dtype)} on {q.device.type!r}. Leave varlen_attention out."
        )
    ends = [with_cu_seqlens(rows).cu_seqlens for rows in (batch, source)]
    left, right = None if spec.window is None else spec.window - 1, 0 if spec.causal else None
    return torch.ops.aten._flash_attention_forward(
        q, k, v, *ends, batch.max_q, source.max_q, dropout_p, spec.causal, False,
        scale=spec.scale, window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dense(q: Tensor, k: Tensor, v: Tensor, spec: Spec, dropout_p: float) -> Tensor:
    """Rows of equal lengths: [B,Q,H,D], [B,G,K,D] -> [BQ,H,D]. Where cuDNN is not the fastest, PyTorch chooses."""
    queries, causal, grouped = q.transpose(1, 2), spec.causal and q.shape[1] > 1, spec.heads > spec.kv_heads
    if (
        dropout_p
        or not (q.is_cuda and _has_fast_cudnn(q.device.index))
        or not can_use_cudnn_attention(SDPAParams(queries, k, v, None, 0.0, causal, grouped))  # or it is switched off
    ):
        return attend(q, k, v, None, spec, dropout_p)
    # Called by its name: `sdpa_kernel`, which would prefer it, takes the host as long as several launches.
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, k, v, None, torch.is_grad_enabled(), 0.0, causal, False, scale=spec.scale
    )[0]
    return out.transpose(1, 2).flatten(0, 1)


@cache
def _has_fast_cudnn(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= CUDNN_GPU


def unavailable(device: str) -> str | None:
    """None where packed attention can run on that kind of device, else the reason why not."""
    if torch.device(device).type != "cuda":
        return f"PyTorch's attention for packed rows needs an NVIDIA GPU; the device is {device!r}."
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU (see: eet-lab doctor)."
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of PyTorch has no flash attention; install one with it."
    if (found := torch.cuda.get_device_capability(device)) < OLDEST_GPU:
        name, needed = torch.cuda.get_device_name(device), ".".join(map(str, OLDEST_GPU))
        return f"{name} has compute capability {found[0]}.{found[1]}, but flash attention needs {needed} or newer."
    return None
