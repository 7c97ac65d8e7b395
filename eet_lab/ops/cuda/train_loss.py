"""Cross entropy of logits and its gradient, over csrc/cross_entropy.cu. N tokens, V words.

PyTorch does not see that a kernel writes over the logits, so it is told: whoever still needs them hears of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from eet_lab.errors import KernelError
from eet_lab.ops import native
from eet_lab.ops.cuda.launching import DTYPES, REMEDY, needs, stream_of


@needs("cross_entropy")
def cross_entropy_loss(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The sum of the losses of logits [N,V] with labels [N], and what is kept of the rows [2,N]: in fp32. Two launches.

    Kept are a row's maximum, and the logarithm of the sum of exponentials relative to it: together its log-sum-exp.
    """
    N, V = _check(logits, labels)
    losses, kept = (logits.new_empty(shape, dtype=torch.float32) for shape in ((N,), (2, N)))
    if N:
        native.loaded("cross_entropy").eet_cross_entropy_loss(
            losses=losses.data_ptr(), kept=kept.data_ptr(), logits=logits.data_ptr(), labels=labels.data_ptr(),
            dtype=DTYPES[logits.dtype], N=N, V=V, stride=logits.stride(0), smoothing=smoothing,
            stream=stream_of(logits),
        )  # fmt: skip
    return losses.sum(), kept


@needs("cross_entropy")
def cross_entropy_grad(logits: Tensor, labels: Tensor, kept: Tensor, smoothing: float, outer: Tensor) -> None:
    """The gradient of `outer`, fp32 on the device, times that sum, written over the logits. One launch."""
    N, V = _check(logits, labels)
    if N:
        native.loaded("cross_entropy").eet_cross_entropy_grad(
            logits=logits.data_ptr(), kept=kept.data_ptr(), labels=labels.data_ptr(), outer=outer.data_ptr(),
            dtype=DTYPES[logits.dtype], N=N, V=V, stride=logits.stride(0), smoothing=smoothing,
            stream=stream_of(logits),
        )  # fmt: skip
    increment_version(logits)


@needs("cross_entropy")
def cross_entropy_with_grad(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The sum of the losses, whose gradient is written over the logits: both read them once. Two launches."""
    N, V = _check(logits, labels)
    losses = logits.new_empty(N, dtype=torch.float32)
    if N:
        native.loaded("cross_entropy").eet_cross_entropy(
            losses=losses.data_ptr(), logits=logits.data_ptr(), labels=labels.data_ptr(), dtype=DTYPES[logits.dtype],
            N=N, V=V, stride=logits.stride(0), smoothing=smoothing, stream=stream_of(logits),
        )  # fmt: skip
    increment_version(logits)
    return losses.sum()


def _check(logits: Tensor, labels: Tensor) -> tuple[int, int]:
    """N, V; rows of logits may be further apart than they are long."""
    if logits.dtype not in DTYPES or logits.ndim != 2 or not logits.shape[1] or logits.stride(1) != 1:
        raise KernelError(
            f"The logits are {tuple(logits.shape)} {logits.dtype} with strides {logits.stride()}; the kernel takes "
            f"[N,V] with rows in one piece, of {', '.join(map(str, DTYPES))}. {REMEDY}"
        )
    if labels.shape != logits.shape[:1] or labels.dtype != torch.int64 or not labels.is_contiguous():
        raise KernelError(
            f"The labels are {tuple(labels.shape)} {labels.dtype}; the kernel takes [{len(logits)}] torch.int64, "
            "contiguous."
        )
    return logits.shape[0], logits.shape[1]
