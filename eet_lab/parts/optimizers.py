"""AdamW and SGD by PyTorch's own formulas: tensor by tensor, and over flat buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from eet_lab.devices import present
from eet_lab.errors import TrainingError
from eet_lab.ops import native
from eet_lab.ops.cuda import train_optimizer
from eet_lab.ops.cuda.launching import takes
from eet_lab.ops.noise import mix
from eet_lab.parts.buffers import Buffer, Buffered, Update, is_read_on_host
from eet_lab.scheduling.whole import check_number
from eet_lab.words import told


class AdamW(Buffered):
    """AdamW by PyTorch's own formulas, tensor by tensor; 16-bit weights have a master copy in fp32.

    `master` of 16-bit weights: "float32", which keeps a copy; "none" and "stochastic" keep none, and round the new
    weight to the nearest number, or at random so that small updates are not lost on average (bfloat16 alone; drawn
    from `seed` and the step). Moments are in fp32. The state is saved tensor by tensor, as torch.optim.AdamW saves it.
    Errors: TrainingError.
    """

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
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, settings, master, seed)

    @staticmethod
    def check(settings: dict[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            _check_positive(name, settings[name])
        betas = settings["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise TrainingError(f"betas is {told(betas)}, but it must be two numbers, such as (0.9, 0.999).")
        for i, beta in enumerate(betas):
            _check_share(f"betas[{i}]", beta)

    def moments(self, group: dict[str, Any]) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq")

    def formula(self, weights: Tensor, grads: Tensor, buffer: Buffer, update: Update) -> None:
        group, before = buffer.group, update.step - 1
        beta1, beta2 = group["betas"]
        adamw(
            [weights], [grads], [buffer.moments["exp_avg"]], [buffer.moments["exp_avg_sq"]], [], [before],
            foreach=False, amsgrad=False, beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False, **_read(update, weights),
        )  # fmt: skip


class SGD(Buffered):
    """SGD by PyTorch's own formulas, tensor by tensor, without dampening; `master` is as for AdamW.

    Weights decay through their gradients, as in torch.optim.SGD. A moment is kept where `momentum` is not 0. Errors:
    TrainingError.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        master: str = "float32",
        seed: int = 0,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, {**settings, "dampening": 0, "maximize": False}, master, seed)

    @staticmethod
    def check(settings: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            _check_positive(name, settings[name])
        _check_share("momentum", settings["momentum"])
        if settings["nesterov"] and not settings["momentum"]:
            raise TrainingError("nesterov looks ahead along the momentum, and momentum is 0. Give one, such as 0.9.")

    def moments(self, group: dict[str, Any]) -> Sequence[str]:
        return ("momentum_buffer",) if group["momentum"] else ()

    @staticmethod
    def check_momentum(buffer: Buffer) -> None:
        """TrainingError for a group whose momentum there is no room for."""
        if buffer.group["momentum"] and not buffer.moments:
            raise TrainingError("momentum was 0 when the optimizer was made, so none is kept. Make it with momentum.")

    def formula(self, weights: Tensor, grads: Tensor, buffer: Buffer, update: Update) -> None:
        group = buffer.group
        self.check_momentum(buffer)
        sgd(
            [weights], [grads], [buffer.moments.get("momentum_buffer")], foreach=False, momentum=group["momentum"],
            dampening=0.0, weight_decay=group["weight_decay"], nesterov=group["nesterov"], maximize=False,
            **_read(update, weights),
        )  # fmt: skip


class _Flat(Buffered):
    """Over flat buffers. Each is updated by what was found for it when it was made: on a GPU that kernels can be built
    for, a kernel that takes gradients and weights as they are.
    """

    flat = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        known = [*signature(super().__init__).parameters]
        if strange := [name for name in settings if name not in known]:
            raise TrainingError(f"{type(self).__name__} has no {strange[0]!r}; there are {', '.join(known)}.")
        super().__init__(*args, **settings)

    def _place(self) -> None:
        super()._place()
        seed = mix(mix(self.seed) + (self.seed >> 31))  # as `noise_key` begins
        self._noise = seed if self.master == "stochastic" else None
        self._by_kernel = [takes(buffer.weights) for buffer in self.buffers]
        for device in {buffer.weights.device for buffer in self.buffers if takes(buffer.weights)}:
            with present(device):
                native.prepare(train_optimizer.adamw.kernels)  # type: ignore[attr-defined]

    def launch(self, buffer: Buffer, update: Update, **shared: Any) -> None:
        """The formula, by a kernel; `shared` is for any formula."""
        raise NotImplementedError

    def grad_norm(self) -> Tensor:
        if not all(self._by_kernel) or len({buffer.grads.device for buffer in self.buffers}) != 1:
            return super().grad_norm()
        self.collect()
        with present(self.buffers[0].grads.device):
            return train_optimizer.norm_of([buffer.grads for buffer in self.buffers])

    def _update(self, buffer: Buffer, number: int, update: Update) -> None:
        if not self._by_kernel[number]:
            super()._update(buffer, number, update)
            return
        noise = self._noise if buffer.weights.dtype == torch.bfloat16 else None
        with present(buffer.weights.device):
            self.launch(buffer, update, noise=noise, number=number)


class FlatAdamW(_Flat, AdamW):
    """AdamW over one flat buffer for each group of parameters: an update is one launch, however many tensors there are.

    The data of the parameters and their gradients move into the buffers, and stay views of them; use it as any
    optimizer of PyTorch. A parameter that got no gradient has one of 0, so that momentum and weight decay still move
    it, where PyTorch's leave it: give only those that are trained. On a GPU the update is a kernel of ours where these
    can be built, and else PyTorch's. Source: LightSeq2 (Wang et al., SC 2022), "symbolic tensor link"; the formulas,
    unlike its, are those of torch.optim.AdamW.
    """

    def launch(self, buffer: Buffer, update: Update, **shared: Any) -> None:
        moments, group = [buffer.moments[name] for name in ("exp_avg", "exp_avg_sq")], buffer.group
        settings = {name: group[name] for name in ("betas", "eps", "weight_decay")}
        train_optimizer.adamw(buffer.weights, buffer.grads, moments, buffer.master, update, **settings, **shared)


class FlatSGD(_Flat, SGD):
    """SGD over one flat buffer for each group of parameters, as `FlatAdamW`."""

    def launch(self, buffer: Buffer, update: Update, **shared: Any) -> None:
        self.check_momentum(buffer)
        moments, group = [*buffer.moments.values()] if buffer.group["momentum"] else [], buffer.group
        settings = {name: group[name] for name in ("momentum", "weight_decay", "nesterov")}
        train_optimizer.sgd(buffer.weights, buffer.grads, moments, buffer.master, update, **settings, **shared)


PLAIN: dict[str, Any] = {"adamw": AdamW, "sgd": SGD}
"""Optimizers that update tensor by tensor, by name."""
FLAT: dict[str, Any] = {"adamw": FlatAdamW, "sgd": FlatSGD}
"""Those over flat buffers."""


def tensor_by_tensor(params: Any, name: str, /, *, seed: int, **settings: Any) -> Buffered:
    """The baseline: each tensor is updated by a launch of its own."""
    return PLAIN[name](params, seed=seed, **settings)


def groups_of(parameters: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices, which decay, and biases and norms, which do not."""
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in parameters:
        kinds[parameter.ndim > 1].append(parameter)
    decay = {True: weight_decay, False: 0.0}
    return [{"params": params, "weight_decay": decay[kind]} for kind, params in kinds.items() if params]


def _read(update: Update, weights: Tensor) -> dict[str, Any]:
    """How PyTorch's formulas read an update: its fused ones on the device, where they skip, too."""
    if is_read_on_host(weights):
        return {"fused": False, "lr": float(update.lr)}
    return {"fused": True, "lr": update.lr, "found_inf": update.skip.float()}


MOST_FACTOR = 1e30
"""The largest learning rate, decay or eps: its products with weights in float32 are numbers still."""


def _check_positive(name: str, value: object) -> None:
    check_number(TrainingError, name, value, 0, MOST_FACTOR, "from 0 to 1e30", last=True)


def _check_share(name: str, value: object) -> None:
    check_number(TrainingError, name, value, 0, 1, "from 0 to less than 1")
