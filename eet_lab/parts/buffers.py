"""Weights, gradients and moments in buffers: tensor by tensor, or flat, one buffer for all that are alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from eet_lab.errors import TrainingError
from eet_lab.memory.lifetimes import aligned
from eet_lab.ops.noise import mix, noise_key
from eet_lab.parts.optimizer_state import DAMAGED, check_values, is_dense, is_step, read_state
from eet_lab.scheduling.whole import MOST, check_choice
from eet_lab.words import counted, some, told

MASTERS = ("float32", "none", "stochastic")
"""What 16-bit weights are updated in: a copy in fp32; themselves, rounded to the nearest, or rounded at random."""
ALIGNED_BYTES = 128
"""Bytes at a multiple of which each tensor begins in a flat buffer: kernels load many at a time."""
MOVED = "would not be updated. Move, freeze or unfreeze the model first, and then make the optimizer."


class Update(NamedTuple):
    """What an update reads, on the device: so it can be captured once, and launched before the host knows the numbers.

    On a CPU, `lr` and `scale` may have 64 bits.
    """

    lr: Tensor  # fp32
    scale: Tensor  # fp32: what gradients are multiplied by
    step: Tensor  # fp32: the number of this update, from 1
    skip: Tensor  # bool: nothing may change

    @classmethod
    def of(cls, lr: float, scale: float, step: int, device: torch.device) -> Update:
        """One that is made, by numbers of the host. Filled on the device: a copy would wait for what is launched."""
        wide = torch.float64 if device.type == "cpu" else torch.float32
        numbers = ((lr, wide), (scale, wide), (step, torch.float32), (False, torch.bool))
        return cls(*(torch.full((), value, dtype=dtype, device=device) for value, dtype in numbers))


@dataclass
class Buffer:
    """Weights that are updated together, with their gradients and moments, in 32 bits at least."""

    params: list[Tensor]
    group: dict[str, Any]
    weights: Tensor
    grads: Tensor
    moments: dict[str, Tensor]
    master: Tensor | None
    places: list[slice]
    own_grads: list[Tensor]  # the places of their gradients

    @classmethod
    def of(cls, params: list[Tensor], group: dict[str, Any], moments: Sequence[str], has_master: bool) -> Buffer:
        """Move the data of these tensors, and their gradients, into one buffer each, of which they become views."""
        first, places, end = params[0], list[slice](), 0
        for param in params:
            places.append(slice(end, end + param.numel()))
            end += aligned(param.numel(), ALIGNED_BYTES // first.element_size())
        weights = torch.zeros(end, dtype=first.dtype, device=first.device)
        grads, wide = torch.zeros_like(weights), torch.promote_types(first.dtype, torch.float32)
        own_grads = [grads[place].view(param.shape) for param, place in zip(params, places, strict=True)]
        for param, place, own in zip(params, places, own_grads, strict=True):
            weights[place].view(param.shape).copy_(param.detach())
            given, param.data = param.grad, weights[place].view(param.shape)
            param.grad = own
            if given is not None:
                own.copy_(given)
        zeros = {name: torch.zeros_like(weights, dtype=wide) for name in moments}
        master = weights.to(wide) if has_master and wide != weights.dtype else None
        return cls(params, group, weights, grads, zeros, master, places, own_grads)

    def collect(self) -> None:
        """Gradients that were put elsewhere since: None is zero. Errors: TrainingError for weights that were."""
        elsewhere: list[tuple[Tensor, Tensor]] = []
        begin, itemsize = self.weights.data_ptr(), self.weights.element_size()
        for param, place, own in zip(self.params, self.places, self.own_grads, strict=True):
            if param.data_ptr() != begin + place.start * itemsize:
                raise TrainingError(
                    f"A weight {list(param.shape)} was moved after its optimizer was made, as `module.to` does, and "
                    f"{MOVED}"
                )
            if not param.requires_grad:
                raise TrainingError(f"A weight {list(param.shape)} was frozen after its optimizer was made: it {MOVED}")
            if param.grad is own:  # as a rule: a view and two addresses of each would take the host as long as the GPU
                continue
            if param.grad is None:
                own.zero_()
            elif param.grad.data_ptr() != own.data_ptr():
                elsewhere.append((own, param.grad))
            param.grad = own
        if elsewhere:
            torch._foreach_copy_(*map(list, zip(*elsewhere, strict=True)))  # type: ignore[arg-type]

    @property
    def tensors(self) -> list[Tensor]:
        """All that an update reads."""
        kept = (self.weights, self.grads, self.master, *self.moments.values())
        return [tensor for tensor in kept if tensor is not None]

    def of_param(self, place: slice, like: Tensor) -> dict[str, Tensor]:
        """What belongs to one of the tensors."""
        kept = self.moments if self.master is None else {**self.moments, "master": self.master}
        return {name: tensor[place].view(like.shape) for name, tensor in kept.items()}


class Buffered(torch.optim.Optimizer):
    """An optimizer over buffers; who makes one says the formula, and the moments that it keeps.

    Use it as any optimizer of PyTorch: groups, hooks, schedulers and GradScaler are its own. A gradient that is None
    counts as zero, and weights that are frozen stay as they are. `zero_grad` keeps the gradients' memory; where
    `module.zero_grad` drops it, the next gradients are copied into their places.
    """

    flat: ClassVar[bool] = False

    def __init__(self, params: Iterable[Any], settings: dict[str, Any], master: str, seed: int) -> None:
        check_choice(TrainingError, "master", master, MASTERS)
        super().__init__(params, settings)
        if (found := [*self._params()]) and not any(param.requires_grad for param in found):
            names = [name for group in self.param_groups for name in group.get("param_names", ())] or ["the first"]
            raise TrainingError(
                f"No tensor of {len(found)} requires a gradient, so no step would change any; {names[0]} "
                f"has {found[0].dtype} {list(found[0].shape)}. Give weights of floating point, and call "
                "requires_grad_() on them before the optimizer is made."
            )
        self.master, self.seed = master, seed
        self._place()
        if master == "stochastic" and any(buffer.weights.dtype == torch.float16 for buffer in self.buffers):
            raise TrainingError("master is 'stochastic', which rounds bfloat16; for float16 use 'float32'.")

    def _place(self) -> None:
        """Move weights into buffers, with moments of 0."""
        self.buffers = [
            Buffer.of(together, group, self.moments(group), self.master == "float32")
            for group in self.param_groups
            for together in (_alike if self.flat else _alone)(p for p in group["params"] if p.requires_grad)
        ]
        self._steps = torch.zeros(())  # one for all: PyTorch's are on the host, too
        for buffer in self.buffers:
            for param, place in zip(buffer.params, buffer.places, strict=True):
                self.state[param] = {"step": self._steps, **buffer.of_param(place, param)}
        self.frozen = [param for param in self._params() if param not in self.state]

    def __getstate__(self) -> dict[str, Any]:
        """What a copy is made of, as by `copy.deepcopy` and `pickle`; each moment for itself, not its whole buffer."""
        states = {param: {name: kept.clone() for name, kept in own.items()} for param, own in self.state.items()}
        return {**super().__getstate__(), "state": states, "master": self.master, "seed": self.seed}

    @torch.no_grad()
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "state": defaultdict(dict)})
        self._place()
        for param, own in self.state.items():
            for name, kept in own.items():
                kept.copy_(state["state"][param][name])

    @staticmethod
    def check(settings: dict[str, Any]) -> None:
        """TrainingError for numbers of a group with which no step makes sense."""
        raise NotImplementedError

    def moments(self, group: dict[str, Any]) -> Sequence[str]:
        """The names of what is kept of each weight of a group."""
        raise NotImplementedError

    def formula(self, weights: Tensor, grads: Tensor, buffer: Buffer, update: Update) -> None:
        """Update weights, and the buffer's moments, by gradients, which are scaled, all in 32 bits at least. On a CPU
        it is not called where nothing may change.
        """
        raise NotImplementedError

    @property
    def num_steps(self) -> int:
        """How many updates there were."""
        return int(self._steps)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, scale: float = 1.0) -> float | None:  # type: ignore[override]
        """Update all weights by their gradients, which are multiplied by `scale` where they have 32 bits already."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.collect()
        for number, buffer in enumerate(self.buffers):
            update = Update.of(buffer.group["lr"], scale, self.num_steps + 1, buffer.weights.device)
            self._update(buffer, number, update)
        self.count()
        return loss

    @torch.no_grad()
    def update(self, update: Update) -> None:
        """The same as `step`, for all groups at one learning rate, of numbers that are on the device alone. Whether it
        was skipped the host learns later, and calls `count` where it was not.
        """
        self.collect()
        for number, buffer in enumerate(self.buffers):
            self._update(buffer, number, update)

    def count(self) -> None:
        """An update was made."""
        self._steps += 1

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Gradients stay where they are, and become 0."""
        self.collect()
        for buffer in self.buffers:
            buffer.grads.zero_()

    def drop_grads(self) -> None:
        """No gradients: the next ones are not added to zeros, but taken as they come, and copied by `collect`.

        Until then they take the memory of one more set of gradients.
        """
        for param in self.state:
            param.grad = None

    def grad_norm(self) -> Tensor:
        """The norm of all gradients, in fp32: one pass over them, which also tells whether all are finite."""
        self.collect()
        norms = [torch.linalg.vector_norm(buffer.grads, dtype=torch.float32) for buffer in self.buffers]
        return torch.linalg.vector_norm(torch.stack(norms))

    @torch.no_grad()
    def collect(self) -> None:
        """Bring together gradients that were put elsewhere. Errors: TrainingError for weights that were moved."""
        if any(param.requires_grad for param in self.frozen):
            raise TrainingError(f"A weight was unfrozen after its optimizer was made, and {MOVED}")
        for buffer in self.buffers:
            buffer.collect()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is made: buffers have a size. Errors: TrainingError."""
        if hasattr(self, "buffers"):
            raise TrainingError("The weights have their places already. Make the optimizer of all groups at once.")
        self.check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for param, times in Counter(self.param_groups[-1]["params"]).items():
            if times > 1:
                raise TrainingError(
                    f"A weight {list(param.shape)} is given {times} times, but it can have one place. Give each weight "
                    "once, as module.parameters() does."
                )

    def state_dict(self) -> dict[str, Any]:
        """The moments of each tensor, which are views of the buffers, in the order of the groups."""
        found = super().state_dict()  # whose dicts of tensors are the optimizer's own
        states = {i: {**state, "step": state["step"].clone()} for i, state in found["state"].items()}
        return {**found, "state": states}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same formula in whatever layout.

        A master copy that it lacks begins with the weights, so weights come first. Moments and steps that it lacks are
        zero, as where a weight had no gradient yet. Errors: TrainingError where it is another model's, or another
        formula's.
        """
        self.check_state(state_dict)
        self.take_state(state_dict)

    @torch.no_grad()
    def take_state(self, state_dict: dict[str, Any]) -> None:
        """What `load_state_dict` does with a state that was checked."""
        states, groups = state_dict["state"], state_dict["param_groups"]
        steps = [float(state["step"]) for state in states.values() if "step" in state]
        for i, param in enumerate(self._params()):
            if param not in self.state:
                continue
            saved, own = states.get(i, {}), self.state[param]
            for name, part in own.items():
                if name == "master":
                    part.copy_(saved.get(name, param))
                elif name in saved:
                    part.copy_(saved[name])
                else:
                    part.zero_()
        self._steps.fill_(max(steps, default=0))  # one for all, even those that the state lacks
        for group, saved in zip(self.param_groups, groups, strict=True):
            group |= {name: value for name, value in saved.items() if name != "params"}

    def check_state(self, state_dict: dict[str, Any], whole: Mapping[str, Tensor] | None = None) -> None:
        """TrainingError for a state that `load_state_dict` cannot take over; nothing is changed.

        Of the weights `whole`, by their names, it must have all but a master copy: nothing of them begins anew.
        """
        states, sizes = read_state(state_dict)
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise TrainingError(
                f"The optimizer's state has groups of {sizes} tensors, and this optimizer has others: it is the state "
                "of another model, or of another division into groups."
            )
        if strange := [key for key in states if not (isinstance(key, int) and 0 <= key < sum(sizes))]:
            raise TrainingError(
                f"There is a state of tensor {told(strange[0])}, but this optimizer has {sum(sizes)}, from 0: {DAMAGED}"
            )
        for i, param in enumerate(self._params()):
            own, saved = self.state.get(param, {}), states.get(i, {})
            for name, value in saved.items():
                if not (is_step(value) if name == "step" else is_dense(value)):
                    what = f"a number from 0 to {MOST:,}" if name == "step" else "a dense tensor of floats"
                    raise TrainingError(
                        f"Tensor {i} of the optimizer's state has the {name!s:.40} {told(value)}, but it must be "
                        f"{what}: {DAMAGED}"
                    )
            names = [{*found} - {"step", "master"} for found in (own, saved)]
            if own and saved and names[0] != names[1]:
                raise TrainingError(
                    f"The optimizer's state has {sorted(names[1], key=str)}, and this optimizer keeps "
                    f"{sorted(names[0])}: it is the state of another kind of optimizer, or of another momentum. Go on "
                    "with the one that it was saved with."
                )
            if any(saved[name].shape != param.shape for name in {*saved} - {"step"}):
                raise TrainingError(f"Tensor {i} of the optimizer's state has another shape: it is of another model.")
        kept = {param: states.get(i, {}).keys() | {"master"} for i, param in enumerate(self._params())}
        if lacks := [name for name, param in (whole or {}).items() if not self.state[param].keys() <= kept[param]]:
            num = counted(len(lacks), "tensor")
            raise TrainingError(f"The optimizer's state lacks what it keeps of {num}, {some(lacks)}: {DAMAGED}")
        paths = {param: path for path, param in (whole or {}).items()}
        check_values(
            (name, paths.get(param, f"tensor {i}"), value)
            for i, param in enumerate(self._params())
            for name, value in states.get(i, {}).items()
            if name != "step" and param in self.state and value.numel()
        )

    def _params(self) -> Iterable[Tensor]:
        return (param for group in self.param_groups for param in group["params"])

    def _update(self, buffer: Buffer, number: int, update: Update) -> None:
        if is_read_on_host(buffer.weights) and bool(update.skip):
            return
        wide = torch.promote_types(buffer.weights.dtype, torch.float32)
        weights, grads = buffer.weights.to(wide) if buffer.master is None else buffer.master, buffer.grads.to(wide)
        self.formula(weights, grads.mul_(update.scale), buffer, update)
        if weights is not buffer.weights:
            if self.master == "stochastic":
                weights = rounded_at_random(weights, mix(noise_key(self.seed, update.step.long()) + number))
            # What was skipped stays, even where the master copy says otherwise.
            buffer.weights.copy_(torch.where(update.skip, buffer.weights, weights.to(buffer.weights.dtype)))


def is_read_on_host(weights: Tensor) -> bool:
    """Whether the host may look at the numbers of an update: on a CPU it waits for nobody."""
    return not weights.is_cuda


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


def _alone(params: Iterable[Tensor]) -> list[list[Tensor]]:
    return [[param] for param in params]
