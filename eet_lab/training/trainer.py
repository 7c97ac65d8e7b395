"""Trainer: examples in, steps of the optimizer out. It knows `Parts`, and no technique.

T tokens of a pass, N of them with a label, B texts, C channels.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, ClassVar
from weakref import proxy

import torch
from torch import Tensor

from eet_lab.devices import present
from eet_lab.engine.exclusive import exclusive
from eet_lab.errors import ModelError, RecipeError
from eet_lab.models.decoder import Decoder, mapped
from eet_lab.models.seq2seq import Seq2Seq
from eet_lab.models.table import constants
from eet_lab.models.vision import AnyEncoder
from eet_lab.ops import native
from eet_lab.ops.noise import library_noise, noise_key
from eet_lab.ops.oom import OTHERS, memory_for
from eet_lab.parts import Ops, Parts
from eet_lab.parts.buffers import Update
from eet_lab.parts.optimizers import groups_of
from eet_lab.parts.staging import Returned, Staging, sent
from eet_lab.progress import Cancel
from eet_lab.training import checkpoint
from eet_lab.training.batch import Checked, Given, Ready, Totals, TrainPass, UpdateInputs, as_integers, checked
from eet_lab.training.data import iterable_batches
from eet_lab.training.forward import check_trained, loss_of
from eet_lab.training.ranks import ranks
from eet_lab.training.reserved import PassSize, Scan, check_reserved
from eet_lab.training.settings import TrainSettings
from eet_lab.training.step import Step, Work, go_on, not_finite, not_finite_loss, until
from eet_lab.training.tasks import Example, task_of, trained

REMEDY = f"Use a smaller batch_tokens, a smaller model, or bfloat16. {OTHERS}"


class Trainer:
    """A model that is trained by parts. It trains a copy of the weights: `model` has them at any time.

    `task` is "language", "masked", "classes", "token-classes" or "seq2seq" (default: what the model's head is for).
    What the task does not read, such as a pooler, stays as it is. Two trainers with the same model, settings, examples
    and seed make the same steps, to the bit on a CPU; dropout is keyed, so that other layouts of a batch drop the same
    numbers. In a group of torch.distributed, trainers with the same model that are given the same examples train it
    together: each reads its share, and the first saves; call each method on all ranks, `save` too, or they wait for
    each other. It does one thing at a time. Errors: RecipeError for parts that do not fit, ModelError, TrainingError.
    """

    BUSY: ClassVar[str] = (
        "this trainer is in a step. Wait until it is done, or make another one: each has its own weights."
    )

    def __init__(
        self,
        network: Decoder | AnyEncoder | Seq2Seq,
        parts: Parts | None = None,
        *,
        task: str | None = None,
        settings: TrainSettings | None = None,
        **changes: Any,
    ) -> None:
        self.parts, self.settings = parts or Parts(), TrainSettings.of(settings, changes)
        if not isinstance(network, Decoder | AnyEncoder | Seq2Seq):
            raise ModelError(
                f"Trainer takes a model's network (a Decoder, Encoder, VisionEncoder or Seq2Seq), not "
                f"{type(network).__name__}: give model.network."
            )
        if network.device.type == "meta":
            raise ModelError("The model has shapes and no data. To train, load it on 'cpu' or 'cuda', not on 'meta'.")
        self.config = network.config.in_training
        self.ranks = ranks()
        check_trained(self.parts, self.config)
        if problem := self.parts.train_ops.unfit(self.config):
            raise RecipeError(f"These parts cannot train this model: {problem}. Use plain ops, or another model.")
        if problem := self.parts.train_ops.untrainable(network.dtype):
            raise RecipeError(f"These parts cannot train such weights: {problem}, or use plain ops.")
        if network.device.type == "cuda" and self.parts.train_ops.kernels:
            with present(network.device):
                native.prepare(self.parts.train_ops.kernels)
        self.task = task_of(task, network.config)
        fixed = constants(network)
        self.model: Any = mapped(network, lambda t: t if any(t is each for each in fixed) else t.detach().clone())
        self.parameters = trained(self.model, self.task.head(self.model, self.parts.train_ops), fixed)
        for parameter in self.parameters.values():
            parameter.requires_grad_()
        self.optimizer = self.parts.optimizer(
            groups_of(self.parameters.values(), self.settings.weight_decay), self.settings.optimizer,
            seed=self.settings.seed, **self.settings.of_optimizer,
        )  # fmt: skip
        self.loss_scale = self.settings.loss_scale(network.dtype)
        self.num_steps = 0
        self.reads: dict[str, int | str | None] = {}  # what a run reads, and how, for its checkpoint
        self.resumed: dict[str, Any] = {}  # the settings, and `reads`, of the run that it goes on from
        self._reserved: PassSize | None = None  # the most that memory is taken for; None: no limit
        self._made: Returned | None = None  # the last update's numbers, until it is counted
        self.busy = Lock()
        self._staging = Staging(network.device)
        own = proxy(self)  # a cycle would keep the weights until the collector comes by
        self._launch = self.parts.step_launch(lambda given: own._run(given), network.device)
        weights = {path: f"{t.dtype} {[*t.shape]}" for path, t in self.parameters.items()}
        kind = {"task": self.task.name, "optimizer": type(self.optimizer).__name__}
        self.ranks.agree("their trainers", network.device, asdict(self.settings) | kind | weights)
        self.ranks.watch([*self.parameters.values()], self.optimizer.buffers, self._launch.is_captured)

    @exclusive
    def step(self, examples: Sequence[Example], cancel: Cancel | None = None) -> Step:
        """One step: the gradients of all examples' mean loss, and an update. It takes as many passes as are needed.

        Errors: TrainingError and PromptError before any work; TrainingError where the loss or a gradient is not finite;
        Cancelled; OutOfMemory in a pass. After each of them the weights are as they were before the step; an
        OutOfMemory in the update itself may leave some of them updated.
        """
        begin = perf_counter()
        return self._step(self._ready(examples), cancel, begin)

    def steps(self, batches: Iterable[Sequence[Example]], cancel: Cancel | None = None) -> Iterator[Step]:
        """A step over each batch. The host checks and lays out the next one while the device computes.

        A batch is asked for before the step over the one before it is told, and while that one runs: what makes batches
        may not call the trainer. Errors: those of `step`, each in its turn.
        """
        source = iter(iterable_batches(batches))
        failures, coming = list[Exception](), deque[Ready]()

        def read() -> None:
            try:
                if (examples := next(source, None)) is not None:
                    coming.append(self._ready(examples))
            except Exception as error:  # noqa: BLE001  whatever it is: the step that is under way comes first
                failures.append(error)

        read()
        while coming:
            yield self._next(coming.popleft(), cancel, read)
        if failures:
            raise failures[0]

    @exclusive
    def _next(self, ready: Ready, cancel: Cancel | None, meanwhile: Callable[[], None]) -> Step:
        return self._step(ready, cancel, perf_counter(), meanwhile)

    def _step(
        self, ready: Ready, cancel: Cancel | None, begin: float, meanwhile: Callable[[], None] | None = None
    ) -> Step:
        """A step over a batch that is laid out; `meanwhile` is called while the device computes."""
        self._settle()
        number, batch, passes = self.num_steps, ready.batch, ready.passes
        scale, lr = self.loss_scale.scale, self.settings.lr_at(number)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self._memory("a training pass"):
            losses, total = self._backward(ready, cancel)
            with self.ranks.following():
                found = self._launch(Totals(total))
                made = Returned(found)  # while the update runs, the host has these numbers, and launches the next step
                self._launch(self._update_inputs(found, lr))
            self._made = made
            work = self._work(batch)  # before the host waits
            if meanwhile is not None:
                meanwhile()
            loss, norm = self._settle()
            grad_norm = norm / scale
            if self.num_steps == number:
                self.ranks.check()
                own = [float(each) for each in losses]
                again = partial(self._again, batch)
                raise not_finite(number, self.parameters, passes, own, loss, grad_norm, batch.names, again)
        computed = sum(each.group.computed_tokens for each in passes)
        return Step(
            number, loss, grad_norm, lr, batch.num_tokens, computed, len(passes), (perf_counter() - begin) * 1e3, scale,
            is_skipped=not math.isfinite(norm), work=work,
        )  # fmt: skip

    def _settle(self) -> tuple[float, float]:
        """Count the update that was launched, of this step or of one that was interrupted: its loss and norm."""
        if self._made is None:
            return 0.0, 0.0
        (loss, norm), self._made = self._made.numbers(), None  # the host waits here, and nowhere before
        if math.isfinite(loss) and self.loss_scale.update(math.isfinite(norm)):
            if math.isfinite(norm):
                self.optimizer.count()
            self.num_steps += 1
        return loss, norm

    def work(self, examples: Sequence[Example]) -> Work:
        """What a step over these examples has to compute. Errors: those of `step`."""
        return self._work(self._checked(examples))

    def _work(self, batch: Checked) -> Work:
        head = self.task.head(self.model, self.parts.train_ops).weights
        sizes = tuple((len(text.ids), len(text.source)) for text in batch.texts)
        return Work(sizes, batch.num_labels, sum(weight.numel() for weight in head if weight.ndim > 1))

    @exclusive
    def gradients(self, examples: Sequence[Example]) -> tuple[float, dict[str, Tensor]]:
        """The mean loss of examples, and each parameter's gradient by its path, in fp32. Nothing is updated."""
        self._settle()
        with self._memory("a training pass"):
            loss = float(self._backward(self._ready(examples), None)[1])
            self.ranks.check()
        grads = {path: parameter.grad for path, parameter in self.parameters.items() if parameter.grad is not None}
        scale, wide = self.loss_scale.scale, partial(torch.promote_types, torch.float32)
        return loss, {path: grad.to(wide(grad.dtype)) / scale for path, grad in grads.items()}

    @exclusive
    @torch.no_grad()
    def evaluate(self, examples: Sequence[Example], cancel: Cancel | None = None) -> float:
        """The mean loss of examples, without dropout and smoothing; nothing is updated. Errors: those of `step`."""
        self._settle()
        batch = self._checked(examples)
        passes = list[TrainPass]()
        plain = replace(self.settings, dropout=0.0, attention_dropout=0.0, label_smoothing=0.0)

        def work() -> list[Tensor]:
            go_on(cancel)
            passes.extend(self._passes(batch))
            of = partial(loss_of, self.model, self.config, self.parts, self.task)
            given = (self._given(each, batch, plain) for each in until(cancel, passes))
            return [of(sent(each, self._staging)) for each in given]

        with self._memory("a pass over examples"):
            losses, total = self.ranks.together(work, self.num_steps, batch.mark)
            loss = float(total) / batch.num_labels
            self.ranks.check()
        if not math.isfinite(loss):
            raise not_finite_loss(self.num_steps, loss, passes, [float(each) for each in losses], batch.names)
        return loss

    @exclusive
    def reserve(self, batches: Iterable[Sequence[Example]], cancel: Cancel | None = None) -> None:
        """Take all memory, and capture all launches, that steps over such batches will need: the largest pass first.

        No weight changes. From then on a step whose pass has more tokens or a longer text than all of these is refused
        before any work; another call adds to them. Without it, memory grows with the largest step so far. Errors: those
        of `step`, on all ranks.
        """
        self._settle()

        def take() -> None:
            found = Scan()
            for examples in iterable_batches(batches):
                batch = self._checked(examples)
                for number, each in enumerate(until(cancel, self._passes(batch))):
                    given = self._given(each, batch, self.settings, is_first=number == 0)
                    found.add(each.group, self._launch.kind(given), given)
            no_numbers = torch.full((2,), torch.nan, dtype=torch.float64, device=self.model.device)
            no_update = Totals(no_numbers[0].float()), self._update_inputs(no_numbers, 0.0)
            with self._memory("a training pass"), library_noise(0, self.model.device):  # others' draws stay theirs
                for piece in until(cancel, [*found.largest(), *no_update]):
                    for _ in range(1 + self._launch.is_captured):  # the first one is not captured
                        self._launch(piece)
            self._reserved = found.most.or_more(self._reserved) if found.most else self._reserved

        self.ranks.all_or_none(take)

    @exclusive
    def save(self, folder: str | Path) -> Path:
        """Write weights, moments and the number of steps, with which `resume` goes on to the bit.

        What lies there stays until the new file is whole. Errors: TrainingError, for a full disk too.
        """
        self._settle()
        return self.ranks.by_first(lambda: checkpoint.write(folder, self._state()))

    def _state(self) -> dict[str, Any]:
        state = {"num_steps": self.num_steps, "weights": self.parameters, "optimizer": self.optimizer.state_dict()}
        return state | {"settings": asdict(self.settings) | self.reads, "loss_scale": self.loss_scale.state_dict()}

    @exclusive
    @torch.no_grad()
    def resume(self, folder: str | Path) -> None:
        """Go on from what `save` wrote, to the bit where the settings are the same: they are this trainer's, and
        `resumed` has those of the one that saved.

        Errors: TrainingError, after which all is as it was.
        """
        self._settle()
        state = checkpoint.read(folder, {path: tuple(t.shape) for path, t in self.parameters.items()})
        self.optimizer.check_state(state["optimizer"], self.parameters)
        self.loss_scale.load_state_dict(state.get("loss_scale"))
        for path, parameter in self.parameters.items():
            parameter.copy_(state["weights"][path])
        own = self.optimizer.state_dict()["param_groups"]  # lr and the like stay those of this trainer
        self.optimizer.take_state({**state["optimizer"], "param_groups": own})
        self.num_steps, self.resumed = state["num_steps"], state["settings"]

    def _memory(self, what: str) -> AbstractContextManager[None]:
        """OutOfMemory where memory is full; what was kept for launches is then free again."""
        return memory_for(what, free=self._launch.close, remedy=REMEDY)

    def trained(self) -> Any:
        """A copy of the weights as they are now, for an engine or `Model.save`."""
        return mapped(self.model, lambda tensor: tensor.detach().clone())

    def _checked(self, examples: Sequence[Example]) -> Checked:
        """What can be learned from, of which this rank has its share. Errors: TrainingError, PromptError."""
        return checked(examples, self.task, self.config, self.ranks.share)

    def _passes(self, batch: Checked) -> Iterator[TrainPass]:
        return batch.passes(self.parts.texts, self.settings.batch_tokens)

    def _given(self, each: TrainPass, batch: Checked, settings: TrainSettings, is_first: bool = False) -> Given:
        """What a pass reads, on the host."""
        key, scale = noise_key(settings.seed, self.num_steps), self.loss_scale.scale
        return each.laid_out(key, (batch.num_labels, scale), settings, is_first)

    def _update_inputs(self, found: Tensor, lr: float) -> UpdateInputs:
        """What an update reads."""
        numbers = as_integers(lr, self.loss_scale.scale, self.optimizer.num_steps + 1)
        return UpdateInputs(found, numbers, self.settings)

    def _ready(self, examples: Sequence[Example]) -> Ready:
        """Examples, checked and divided, the first pass laid out. Errors: TrainingError, PromptError, OutOfMemory."""
        with self._memory("a training pass"):
            batch = self._checked(examples)
            passes = [*self._passes(batch)]
            return Ready(batch, passes, [self._given(each, batch, self.settings, is_first=True) for each in passes[:1]])

    def _backward(self, ready: Ready, cancel: Cancel | None) -> tuple[list[Tensor], Tensor]:
        """The shares of a batch's mean loss that its passes have, and this one; gradients lie with parameters."""
        batch, passes = ready.batch, ready.passes
        if not passes:
            self.optimizer.zero_grad()

        def work() -> list[Tensor]:
            go_on(cancel)  # also where this rank has no pass
            check_reserved(passes, self._reserved)
            losses = []
            later = (self._given(each, batch, self.settings) for each in passes[1:])  # as the one before it runs
            for each, given in until(cancel, zip(passes, chain(ready.first, later), strict=True)):
                if each is passes[-1]:
                    self.ranks.last_pass()
                key, scale = noise_key(self.settings.seed, self.num_steps), self.loss_scale.scale
                now = given._replace(noise=torch.tensor([key]), scales=as_integers(batch.num_labels, scale))
                with self._noise(each):
                    losses.append(self._launch(now))
            return losses

        return self.ranks.together(work, self.num_steps, batch.mark, has_gradients=True)

    @torch.no_grad()
    def _again(self, batch: Checked, each: TrainPass, change: Callable[[Ops], Ops]) -> None:
        """A pass of the step that was made last, forward alone, with its ops changed."""
        parts = replace(self.parts, train_ops=change(self.parts.train_ops))
        given = sent(self._given(each, batch, self.settings), self._staging)
        with self._noise(each):
            loss_of(self.model, self.config, parts, self.task, given)

    def _noise(self, each: TrainPass) -> AbstractContextManager[None]:
        """Libraries draw what attention drops in a pass from the seed, the step and the pass."""
        key = noise_key(noise_key(self.settings.seed, self.num_steps), each.numbers[0])
        return library_noise(key, self.model.device) if self.settings.attention_dropout else nullcontext()

    def _run(self, given: Given | Totals | UpdateInputs) -> Tensor:
        """What is launched: it reads what it is given, on the device, and nothing else that changes between steps."""
        if isinstance(given, Given):
            return self._pass(given)
        return self._totals(given) if isinstance(given, Totals) else self._updated(given)

    def _pass(self, given: Given) -> Tensor:
        """A pass forward and backward: its share of the batch's mean loss. Gradients add up to the first pass of a
        step.
        """
        if given.is_first:
            self.ranks.clear(self.optimizer)
        num_labels, scale = given.scales.view(torch.float64).float()
        loss = loss_of(self.model, self.config, self.parts, self.task, given) / num_labels
        (loss * scale).backward()
        if given.is_first:
            self.optimizer.collect()
        return loss.detach()

    @torch.no_grad()
    def _totals(self, given: Totals) -> Tensor:
        """What a step tells, and whether there is an update: the loss, and the norm of the scaled gradients, [2]."""
        return torch.stack([given.loss.double(), self.optimizer.grad_norm().double()])

    @torch.no_grad()
    def _updated(self, given: UpdateInputs) -> Tensor:
        """An update, unless a number of it is not finite; what it multiplied gradients by."""
        (_, norm), (lr, scale, step) = given.found, given.numbers.view(torch.float64)
        skip = ~given.found.isfinite().all()
        factor = torch.where(skip, 1.0, given.settings.clipping(norm / scale) / scale)
        wide = lr.dtype if lr.device.type == "cpu" else torch.float32
        self.optimizer.update(Update(lr.to(wide), factor.to(wide), step.float(), skip))
        return factor
