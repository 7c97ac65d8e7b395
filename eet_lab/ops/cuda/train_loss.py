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
    losses, kept = (logits.new_empty(*shape, len(logits), dtype=torch.float32) for shape in ((), (2,)))
    _launch("eet_cross_entropy_loss", logits, labels, smoothing, losses=losses, kept=kept)
    return losses.sum(), kept


@needs("cross_entropy")
def cross_entropy_grad(logits: Tensor, labels: Tensor, kept: Tensor, smoothing: float, outer: Tensor) -> None:
    """The gradient of `outer`, fp32 on the device, times that sum, written over the logits. One launch."""
    _launch("eet_cross_entropy_grad", logits, labels, smoothing, kept=kept, outer=outer)
    increment_version(logits)


@needs("cross_entropy")
def cross_entropy_with_grad(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The sum of the losses, whose gradient is written over the logits: both read them once. Two launches."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    _launch("eet_cross_entropy", logits, labels, smoothing, losses=losses)
    increment_version(logits)
    return losses.sum()


def _launch(name: str, logits: Tensor, labels: Tensor, smoothing: float, **more: Tensor) -> None:
    """By the launcher of that name, unless there are no rows; these may be further apart than they are long."""
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
    N, V = logits.shape
    if N:
        getattr(native.loaded("cross_entropy"), name)(
            logits=logits.data_ptr(), labels=labels.data_ptr(), **{key: each.data_ptr() for key, each in more.items()},
            dtype=DTYPES[logits.dtype], N=N, V=V, stride=logits.stride(0), smoothing=smoothing,
            stream=stream_of(logits),
        )  # fmt: skip
