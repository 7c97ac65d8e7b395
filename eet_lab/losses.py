"""Label-smoothed cross entropy for scripts of one's own: the reference, in place, and chunked with the LM head.

Arguments have the names and the meaning of torch.nn.functional's, and so have results, but that losses are in fp32
where logits have 16 bits. On a GPU where our kernels can be built, they compute the latter two. Labels are checked
first, for which the host waits for the device; `check=False` leaves that out, as under a CUDA graph. N tokens of any
shape, C channels, V words or classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from eet_lab.devices import present
from eet_lab.errors import TrainingError
from eet_lab.ops.cuda.launching import takes
from eet_lab.ops.reference import linear
from eet_lab.ops.types import Linear, autograd
from eet_lab.parts import losses
from eet_lab.scheduling.whole import MOST, check_number, check_whole
from eet_lab.words import told, type_of

IGNORED = losses.IGNORED
NO_LABELS = (torch.bool, torch.complex64, torch.complex128)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    in_place: bool = False,
    check: bool = True,
) -> Tensor:
    """The loss of logits [N,V] with labels [N]; `in_place`, the backward pass writes their gradient over them.

    In place, no copy of the logits in fp32 and no probabilities are kept, and the gradient takes no memory; logits that
    are a leaf cannot be overwritten. Errors: TrainingError.
    """
    _check_numbers("The logits", input, "[...,V]")
    if in_place and input.is_leaf and input.requires_grad:
        raise TrainingError("in_place writes over the logits, but they are a leaf, which would be lost. Leave it out.")
    _check_settings(reduction, label_smoothing)
    labels, num = _labels(target, tuple(input.shape), input.device, ignore_index, check, reduction == "mean")
    logits = input.reshape(-1, input.shape[-1])
    if in_place and takes(input):
        with present(input.device):
            total = losses.fused_cross_entropy(logits.contiguous(), labels, label_smoothing)
    else:
        loss = losses.cross_entropy_in_place if in_place and torch.is_grad_enabled() else losses.cross_entropy
        total = loss(logits, labels, label_smoothing)
    return total if reduction == "sum" else total / num


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk: int = 1024,
    check: bool = True,
) -> Tensor:
    """The loss of hidden states [N,C] with labels [N] through a head [V,C]: the logits of `chunk` tokens at a time.

    The gradients are taken with the loss, and are all that is kept. Errors: TrainingError.
    """
    _check_settings(reduction, label_smoothing)
    check_whole(TrainingError, "chunk", chunk, 1, MOST)
    _check_numbers("The states", input, "[...,C]")
    _check_numbers("The head's weight", linear_weight, "[V,C]", "is")
    if linear_bias is not None:
        _check_numbers("The head's bias", linear_bias, "[V]", "is")
    shape = tuple(linear_weight.shape)
    if len(shape) != 2 or input.shape[-1:] != shape[1:]:
        raise TrainingError(
            f"The head's weight is {list(shape)} and the states are {list(input.shape)}, but a head [V,C] reads states "
            "[...,C]."
        )
    if linear_bias is not None and linear_bias.shape != shape[:1]:
        raise TrainingError(f"The head's bias is {list(linear_bias.shape)}, but it must be [{shape[0]}], one a word.")
    _check_alike(input, linear_weight, linear_bias)
    logits = (*input.shape[:-1], shape[0])
    labels, num = _labels(target, logits, input.device, ignore_index, check, reduction == "mean")
    weights = (linear_weight,) if linear_bias is None else (linear_weight, linear_bias)
    layer, states = Linear(linear_weight, linear_bias), input.reshape(-1, shape[1])
    head = losses.Head(lambda states, linear=linear: linear(states, layer, empty=autograd), weights)
    how = losses.fused_cross_entropy if takes(input) else losses.cross_entropy_in_place
    with present(input.device):
        total = losses.Chunked(chunk)(states, labels, head, label_smoothing, cross_entropy=how)
    return total if reduction == "sum" else total / num


class CrossEntropyLoss(nn.Module):
    """`cross_entropy` as a module with torch.nn.CrossEntropyLoss's arguments, and `in_place` and `check`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(input, target, **self.settings)


class CausalLMLoss(nn.Module):
    """The loss of each next token, as transformers' Trainer calls it: `compute_loss_func=CausalLMLoss()`.

    It is taken from `outputs.logits`, in place. With a `head`, such as `model.lm_head`, it is taken from the last of
    `outputs.hidden_states` in chunks; let the model compute few logits then (`logits_to_keep=1`).
    """

    def __init__(self, head: nn.Linear | None = None, *, label_smoothing: float = 0.0, chunk: int = 1024) -> None:
        super().__init__()
        _check_settings("mean", label_smoothing)
        check_whole(TrainingError, "chunk", chunk, 1, MOST)
        if head is not None and not isinstance(head, nn.Linear):
            raise TrainingError(
                f"head is {_called(head)}, but it must be a torch.nn.Linear, such as model.lm_head. Without one, the "
                "loss is taken from the logits."
            )
        self.head, self.label_smoothing, self.chunk = [head], label_smoothing, chunk  # a list: the weights are not ours

    def forward(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """The mean, or the sum over `num_items_in_batch`, which counts the labels of an accumulated batch."""
        [head], how = self.head, dict[str, Any](label_smoothing=self.label_smoothing)
        how["reduction"] = "mean" if num_items_in_batch is None else "sum"
        if head is None:
            logits = _logits(outputs)
            loss = cross_entropy(logits, _following(labels, "logits", logits), in_place=True, **how)
        else:
            states = _last_states(outputs)
            following, how["linear_bias"] = _following(labels, "hidden states", states), head.bias
            loss = linear_cross_entropy(states, head.weight, following, chunk=self.chunk, **how)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def _logits(outputs: Any) -> Tensor:
    """Those of a model. Errors: TrainingError."""
    found = getattr(outputs, "logits", None)
    if not isinstance(found, Tensor):
        raise TrainingError(
            f"outputs is {_called(outputs)} whose logits are {_called(found)}, but the loss is taken from "
            "outputs.logits, a tensor [B,T,V]. Give what a transformers model with a language modeling head returns "
            "(return_dict=True)."
        )
    return found


def _last_states(outputs: Any) -> Tensor:
    """The last hidden states of a model. Errors: TrainingError."""
    found = getattr(outputs, "hidden_states", None)
    if not isinstance(found, tuple | list) or not found or not isinstance(found[-1], Tensor):
        raise TrainingError(
            f"outputs is {_called(outputs)} whose hidden_states are {_called(found)}, but a loss with a head is taken "
            "from the last of outputs.hidden_states, a tuple of tensors [B,T,C]. Call the model with "
            "output_hidden_states=True, set model.config.output_hidden_states = True, or make the loss without a head."
        )
    return found[-1]


def _following(labels: Tensor, what: str, read: Tensor) -> Tensor:
    """The label of each token's next one. TrainingError for labels of other tokens than those that a model has read."""
    if not isinstance(labels, Tensor) or not labels.ndim or labels.shape != read.shape[:-1]:
        few = " Without a head, let the model compute all of its logits (no logits_to_keep)." * (what == "logits")
        raise TrainingError(
            f"The labels are {_called(labels)}, but the model's {what} are {_called(read)}: there must be a tensor "
            f"with one label for each token, {list(read.shape[:-1])}. Give the labels of this batch.{few}"
        )
    return pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _called(value: object) -> str:
    """What was given, for an error; of a tensor, what matters is its shape."""
    if value is None:
        return "None"
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type_of(value)


def _check_numbers(name: str, given: object, shape: str, verb: str = "are") -> None:
    """TrainingError for what is no tensor of real numbers."""
    if not isinstance(given, Tensor) or not given.ndim or not given.shape[-1] or not given.is_floating_point():
        raise TrainingError(f"{name} {verb} {_called(given)}, but must be a tensor of real numbers {shape}.")


def _check_settings(reduction: str, label_smoothing: float) -> None:
    if reduction not in ("mean", "sum"):
        raise TrainingError(f"reduction is {told(reduction)}, but it must be 'mean' or 'sum'.")
    check_number(TrainingError, "label_smoothing", label_smoothing, 0, 1, "from 0 to 1", last=True)


def _check_alike(states: Tensor, *head: Tensor | None) -> None:
    """TrainingError for a head that cannot be multiplied by states of another type, or on another device."""
    for each in head:
        if each is None or (each.dtype, each.device) == (states.dtype, states.device):
            continue
        # Autocast makes them alike where no gradient is taken.
        kind = states.device.type
        can_cast = not torch.is_grad_enabled() and torch.amp.is_autocast_available(kind)  # meta cannot
        is_cast = can_cast and torch.is_autocast_enabled(kind)
        if each.device != states.device or not is_cast:
            raise TrainingError(
                f"The head is {each.dtype} on {each.device} and the states are {states.dtype} on {states.device}, but "
                "both must be the same. Give states.to(weight.dtype), or move one to the other's device."
            )


def _labels(
    target: Tensor, logits: tuple[int, ...], device: torch.device, ignore_index: int, check: bool, is_mean: bool
) -> tuple[Tensor, Tensor]:
    """Labels [N] with `IGNORED` for those that are, and how many are not: a mean needs one. Errors: TrainingError."""
    if not isinstance(target, Tensor):
        raise TrainingError(f"The labels are {_called(target)}, but must be a tensor: torch.tensor(labels).")
    if target.is_floating_point() or target.dtype in NO_LABELS or tuple(target.shape) != logits[:-1]:
        raise TrainingError(
            f"The labels are {list(target.shape)} of {target.dtype}, but logits {list(logits)} need whole numbers "
            f"{list(logits[:-1])}, one for each row."
        )
    if target.device != device:
        raise TrainingError(f"The labels are on {target.device}, but must be on {device}: labels.to('{device}').")
    if check and target.is_meta:
        raise TrainingError(
            "The labels are on meta, where they have no values that could be checked. Give check=False."
        )
    labels = target.reshape(-1).long().contiguous()
    is_label = labels != ignore_index
    if check:
        outside = is_label & ((labels < 0) | (labels >= logits[-1]))
        num_outside, num = torch.stack([outside.sum(), is_label.sum()]).tolist()
        if num_outside:
            first = int(labels[outside][0])
            raise TrainingError(
                f"{num_outside} of the labels, {first} the first, are not from 0 to {logits[-1] - 1:,}, nor "
                f"{ignore_index}, which is ignored."
            )
        if not num and is_mean:
            each = f"None of the {len(labels):,} labels can" if len(labels) > 1 else "The one label cannot"
            why = (
                f"{each} be learned from: {'all are' if len(labels) > 1 else 'it is'} {ignore_index}, which is ignored"
            )
            raise TrainingError(
                f"{why if len(labels) else 'There are no labels'}. Give a longer text, or other labels."
            )
    return labels if ignore_index == IGNORED else labels.where(is_label, IGNORED), is_label.sum()
