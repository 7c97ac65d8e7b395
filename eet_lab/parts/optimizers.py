"""AdamW: tensor by tensor, and over one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from eet_lab.errors import TrainingError
from eet_lab.ops.noise import mix, noise_keys
from eet_lab.scheduling.whole import check_number
from eet_lab.words import told

MASTERS = ("float32", "none", "stochastic")
"""What 16-bit weights are updated in: a copy in fp32; themselves, rounded to the nearest, or rounded at random."""
ALIGNED = 128
"""Bytes at a multiple of which each tensor begins in a flat buffer: kernels load many at a time."""


@dataclass
class Buffer:
    """Weights that are updated together, with their gradients and moments, in 32 bits at least."""

    params: list[Tensor]
    group: dict[str, Any]
    weights: Tensor
    grads: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None
    places: list[slice]

    @classmethod
    def of(cls, params: list[Tensor], group: dict[str, Any], has_master: bool) -> Buffer:
        """Move the data of these tensors, and their gradients, into one buffer each, of which they become views."""
        first, places, end = params[0], list[slice](), 0
        aligned = ALIGNED // first.element_size()
        for param in params:
            places.append(slice(end, end + param.numel()))
            end += math.ceil(param.numel() / aligned) * aligned
        weights = torch.zeros(end, dtype=first.dtype, device=first.device)
        grads, wide = torch.zeros_like(weights), torch.promote_types(first.dtype, torch.float32)
        for param, place in zip(params, places, strict=True):
            weights[place].view(param.shape).copy_(param.detach())
            given, param.data = param.grad, weights[place].view(param.shape)
            param.grad = grads[place].view(param.shape)
            if given is not None:
                param.grad.copy_(given)
        averages = torch.zeros_like(weights, dtype=wide), torch.zeros_like(weights, dtype=wide)
        master = weights.to(wide) if has_master and wide != weights.dtype else None
        return cls(params, group, weights, grads, *averages, master, places)

    def collect(self) -> None:
        """Gradients that were put elsewhere since: None is zero. Errors: TrainingError for weights that were."""
        for param, place in zip(self.params, self.places, strict=True):
            if param.data_ptr() != self.weights[place].data_ptr():
                raise TrainingError(
                    f"A weight {list(param.shape)} was moved after its optimizer was made, as `module.to` does, and "
                    "would not be updated. Move the model first, and then make the optimizer."
                )
            own = self.grads[place].view(param.shape)
            if param.grad is None:
                own.zero_()
            elif param.grad.data_ptr() != own.data_ptr():
                own.copy_(param.grad)
            param.grad = own

    def of_param(self, place: slice, like: Tensor) -> dict[str, Tensor]:
        """What belongs to one of the tensors."""
        kept = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        kept |= {} if self.master is None else {"master": self.master}
        return {name: tensor[place].view(like.shape) for name, tensor in kept.items()}


class AdamW(torch.optim.Optimizer):
    """AdamW by PyTorch's own formulas, tensor by tensor; 16-bit weights have a master copy in fp32.

    `master` of 16-bit weights: "float32", which keeps a copy; "none" and "stochastic" keep none, and round the new
    weight to the nearest number, or at random so that small updates are not lost on average (bfloat16 alone; drawn
    from `seed` and the step). Moments are in fp32. The state is saved tensor by tensor, as torch.optim.AdamW saves it.
    Errors: TrainingError.
    """

    flat: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master: str = "float32",
        seed: int = 0,
    ) -> None:
        check_moments(lr, betas, eps, weight_decay)
        if master not in MASTERS:
            raise TrainingError(f"master is {told(master)}, but it must be one of {', '.join(MASTERS)}.")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.master, self.seed, self.num_steps = master, seed, 0
        self.buffers = [
            Buffer.of(together, group, master == "float32")
            for group in self.param_groups
            for together in (_alike(group["params"]) if self.flat else [[param] for param in group["params"]])
        ]
        if master == "stochastic" and any(buffer.weights.dtype == torch.float16 for buffer in self.buffers):
            raise TrainingError("master is 'stochastic', which rounds bfloat16; for float16 use 'float32'.")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all weights by their gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for buffer in self.buffers:
            buffer.collect()
        for number, buffer in enumerate(self.buffers):
            self._update(buffer, number)
        self.num_steps += 1
        return loss

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Gradients stay where they are, and become 0."""
        for buffer in self.buffers:
            buffer.collect()
            buffer.grads.zero_()

    def grad_norm(self) -> Tensor:
        """The norm of all gradients, in fp32."""
        for buffer in self.buffers:
            buffer.collect()
        norms = [torch.linalg.vector_norm(buffer.grads, dtype=torch.float32) for buffer in self.buffers]
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def clip(self, max_norm: float | None, norm: float) -> None:
        """Where the gradients' `norm` is above `max_norm`, scale them down to it."""
        if max_norm is not None and norm > max_norm:
            for buffer in self.buffers:
                buffer.grads.mul_(max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: buffers have a size. Errors: TrainingError."""
        if hasattr(self, "buffers"):
            raise TrainingError("The weights have their places already. Make the optimizer of all groups at once.")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The moments of each tensor, in the order of the groups."""
        states, index = {}, {id(param): i for i, param in enumerate(self._params())}
        for buffer in self.buffers:
            for param, place in zip(buffer.params, buffer.places, strict=True):
                kept = {name: part.clone() for name, part in buffer.of_param(place, param).items()}
                states[index[id(param)]] = {"step": torch.tensor(float(self.num_steps)), **kept}
        groups, first = [], 0
        for group in self.param_groups:
            last = first + len(group["params"])
            groups.append({**group, "params": list(range(first, last))})
            first = last
        return {"state": states, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over such a state, of AdamW in whatever layout; a master copy that it lacks begins with the weights.

        So weights come first. Errors: TrainingError where it is another model's.
        """
        states, params = state_dict["state"], list(self._params())
        shapes = [tuple(states[i]["exp_avg"].shape) if i in states else None for i in range(len(params))]
        if len(states) != len(params) or shapes != [tuple(param.shape) for param in params]:
            raise TrainingError(
                f"The optimizer's state has {len(states)} tensors, and this model has {len(params)}, or others: it is "
                "the state of another model."
            )
        index = {id(param): i for i, param in enumerate(params)}
        for buffer in self.buffers:
            for param, place in zip(buffer.params, buffer.places, strict=True):
                state = states[index[id(param)]]
                self.num_steps = int(state["step"])
                for name, part in buffer.of_param(place, param).items():
                    part.copy_(state.get(name, param))  # a master copy begins with the weight as it is
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group |= {name: value for name, value in saved.items() if name != "params"}

    def _params(self) -> Iterable[Tensor]:
        return (param for group in self.param_groups for param in group["params"])

    def _update(self, buffer: Buffer, number: int) -> None:
        wide, group = buffer.exp_avg.dtype, buffer.group
        weights = buffer.weights.to(wide) if buffer.master is None else buffer.master
        (beta1, beta2), on_gpu = group["betas"], weights.is_cuda
        step = torch.tensor(float(self.num_steps), device=weights.device if on_gpu else "cpu")
        adamw(
            [weights], [buffer.grads.to(wide)], [buffer.exp_avg], [buffer.exp_avg_sq], [], [step],
            fused=on_gpu, foreach=False, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        if weights is not buffer.weights:
            if self.master == "stochastic":
                key = noise_keys(self.seed, 1, weights.device, first=self.num_steps + 1) + (number << 20)
                weights = rounded_at_random(weights, key)
            buffer.weights.copy_(weights)


class FlatAdamW(AdamW):
    """AdamW over one flat buffer for each group of parameters: an update is one launch, however many tensors there are.

    The data of the parameters and their gradients move into the buffers, and stay views of them; use it as any
    optimizer of PyTorch. Source: LightSeq2 (Wang et al., SC 2022), "symbolic tensor link"; the formulas, unlike its,
    are those of torch.optim.AdamW.
    """

    flat = True


def check_moments(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """TrainingError for numbers with which no step makes sense."""
    limits = {"lr": (lr, math.inf), "eps": (eps, math.inf), "weight_decay": (weight_decay, math.inf)}
    limits |= {f"betas[{i}]": (beta, 1.0) for i, beta in enumerate(betas)}
    for name, (value, most) in limits.items():
        what = "of 0 or more" if most == math.inf else "from 0 to less than 1"
        check_number(TrainingError, name, value, 0, most, what)


def rounded_at_random(wide: Tensor, key: Tensor) -> Tensor:
    """fp32 numbers that bfloat16 holds: one of the two neighbours, the nearer the likelier. Its mean is the number."""
    noise = mix(key + torch.arange(wide.numel(), device=wide.device)).view(wide.shape) & 0xFFFF
    bits = wide.view(torch.int32) + noise.to(torch.int32)
    return torch.where(wide.isfinite(), (bits & -0x10000).view(torch.float32), wide)


def _alike(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors that can share a buffer: of one dtype, on one device."""
    found: dict[Any, list[Tensor]] = {}
    for param in params:
        found.setdefault((param.dtype, param.device), []).append(param)
    return list(found.values())
