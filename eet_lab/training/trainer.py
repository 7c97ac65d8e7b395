"""Trainer: examples in, steps of the optimizer out. It knows `Parts`, and no technique.

T tokens of a pass, N of them with a label, B texts, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import proxy

import torch
from torch import Tensor

from eet_lab.devices import present
from eet_lab.engine.exclusive import exclusive
from eet_lab.errors import Cancelled, ModelError, RecipeError, TrainingError
from eet_lab.models import seq2seq
from eet_lab.models.config import Config, Seq2SeqConfig
from eet_lab.models.decoder import Decoder, mapped, tensors
from eet_lab.models.seq2seq import Seq2Seq
from eet_lab.models.table import constants, flat
from eet_lab.models.vision import AnyEncoder
from eet_lab.ops import native
from eet_lab.ops.noise import Dropout, library_noise, noise_key, token_keys
from eet_lab.ops.oom import OTHERS, memory_for
from eet_lab.ops.types import Batch, Source, autograd
from eet_lab.parts import Ops, Parts, unread
from eet_lab.parts.buffers import Update
from eet_lab.parts.passes import Pass
from eet_lab.parts.staging import Staging, sent
from eet_lab.progress import Cancel
from eet_lab.training import checkpoint
from eet_lab.training.batch import Checked, Given, TrainPass, as_integers, checked
from eet_lab.training.ranks import Alone, ranks
from eet_lab.training.ranks import Group as Ranks
from eet_lab.training.settings import TrainSettings
from eet_lab.training.tasks import Example, task_of
from eet_lab.words import counted, some

T = TypeVar("T")

REMEDY = f"Use a smaller batch_tokens, a smaller model, or bfloat16. {OTHERS}"
UNREAD = ("ops", "weights", "kv_cache", "memory", "launch", "layers")
"""Slots that training does not read: parts that change them alone would be on and do nothing."""


class Work(NamedTuple):
    """What a step's arithmetic is counted from; pads are left out.

    `sizes` are the tokens of each text and of its source; `head_size` the numbers in the matrices of the head, which
    each of the labels reads.
    """

    sizes: tuple[tuple[int, int], ...]
    num_labels: int
    head_size: int


@dataclass(frozen=True)
class Step:
    """One step of the optimizer. `loss` is the mean over all labels of the batch, and `grad_norm` is that before
    gradients were clipped; `num_tokens` are those of the texts, `computed_tokens` the same with pads. A step whose
    gradients overflowed in float16, as scaled by `loss_scale`, has updated nothing: `is_skipped`. `work` is what had to
    be computed.
    """

    number: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    computed_tokens: int
    num_passes: int
    ms: float
    loss_scale: float = 1.0
    is_skipped: bool = False
    work: Work | None = None


class _Asked(NamedTuple):
    """All that an update reads."""

    loss: Tensor  # 0-d: the sum over all passes, and all ranks
    numbers: Tensor  # [3] float64, as int64: learning rate, loss scale, and the number of the update, from 1
    settings: TrainSettings


class Trainer:
    """A model that is trained by parts. It trains a copy of the weights: `model` has them at any time.

    `task` is "language", "masked", "classes", "token-classes" or "seq2seq" (default: what the model's head is for).
    What the task does not read, such as a pooler, stays as it is. Two trainers with the same model, settings, examples
    and seed make the same steps, to the bit on a CPU; dropout is keyed, so that other layouts of a batch drop the same
    numbers. In a group of torch.distributed, trainers with the same model that are given the same examples train it
    together: each reads its share, and the first saves. A trainer does one thing at a time. Errors: RecipeError for
    parts that do not fit, ModelError, TrainingError.
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
            raise ModelError(
                "The model has shapes and no data. To train it, load it on 'cpu' or 'cuda', not on 'meta'."
            )
        self.config = network.config.in_training
        self.ranks = ranks()
        _check_parts(self.parts, self.config, self.ranks)
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
        self.parameters = self._trained(fixed)
        for parameter in self.parameters.values():
            parameter.requires_grad_()
        self.optimizer = self.parts.optimizer(
            _groups(self.parameters.values(), self.settings.weight_decay), self.settings.optimizer,
            seed=self.settings.seed, **self.settings.of_optimizer,
        )  # fmt: skip
        self.ranks.watch([*self.parameters.values()], self.optimizer.buffers)
        self.loss_scale = self.settings.loss_scale(network.dtype)
        self.num_steps = 0
        self.busy = Lock()
        self._staging = Staging(network.device)
        own = proxy(self)  # a cycle would keep the weights until the collector comes by
        self._launch = self.parts.step_launch(lambda given: own._run(given), network.device)

    @exclusive
    def step(self, examples: Sequence[Example], cancel: Cancel | None = None) -> Step:
        """One step: the gradients of all examples' mean loss, and an update. It takes as many passes as are needed.

        Errors: TrainingError and PromptError before any work; TrainingError where the loss or a gradient is not finite;
        Cancelled; OutOfMemory in a pass. After each of them the weights are as they were before the step.
        """
        begin, number = perf_counter(), self.num_steps
        batch = self._checked(examples)
        cancel = self.ranks.stops(cancel)
        scale, lr = self.loss_scale.scale, self.settings.lr_at(number)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self._memory("a training pass"):
            passes, losses, total = self._backward(batch, cancel)
            loss, norm = self._launch(self._asked(total, lr)).tolist()  # the host waits here, and nowhere before
            grad_norm = norm / scale
            is_finite = math.isfinite(grad_norm)
            if not math.isfinite(loss) or not self.loss_scale.update(is_finite):
                raise self._not_finite(passes, [float(each) for each in losses], loss, grad_norm)
        if is_finite:
            self.optimizer.count()
        self.num_steps += 1
        computed = sum(each.group.computed_tokens for each in passes)
        ms = (perf_counter() - begin) * 1e3
        return Step(
            number, loss, grad_norm, lr, batch.num_tokens, computed, len(passes), ms, scale, is_skipped=not is_finite,
            work=self._work(batch),
        )  # fmt: skip

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
        with self._memory("a training pass"):
            loss = float(self._backward(self._checked(examples), None)[2])
        grads = ((path, parameter.grad) for path, parameter in self.parameters.items())
        return loss, {
            path: grad.to(torch.promote_types(grad.dtype, torch.float32)) / self.loss_scale.scale
            for path, grad in grads
            if grad is not None
        }

    @exclusive
    @torch.no_grad()
    def evaluate(self, examples: Sequence[Example], cancel: Cancel | None = None) -> float:
        """The mean loss of examples, without dropout and smoothing; nothing is updated. Errors: those of `step`."""
        batch = self._checked(examples)
        cancel = self.ranks.stops(cancel)
        plain = replace(self.settings, dropout=0.0, attention_dropout=0.0, label_smoothing=0.0)

        def work() -> list[Tensor]:
            given = (self._given(each, batch, plain) for each in _until(cancel, self._passes(batch)))
            return [self._loss(sent(each, self._staging)) for each in given]

        with self._memory("a pass over examples"):
            return float(self.ranks.together(work)[1]) / batch.num_labels

    @exclusive
    def reserve(self, batches: Iterable[Sequence[Example]], cancel: Cancel | None = None) -> None:
        """Take all memory, and capture all launches, that steps over such batches will need: the largest pass first.

        No weight changes. Without it, the first steps do so, and memory grows with the largest step so far. Errors:
        those of `step`.
        """
        found: dict[Hashable, tuple[int, Given]] = {}
        for examples in batches:
            batch = self._checked(examples)
            for number, each in enumerate(_until(cancel, self._passes(batch))):
                given = self._given(each, batch, self.settings, is_first=number == 0)
                size, kind = each.group.computed_tokens, self._launch.kind(given)
                if kind not in found or size > found[kind][0]:
                    found[kind] = size, given
        no_number = torch.full((), torch.nan, device=self.model.device)  # such a step changes nothing
        work: list[Given | _Asked] = [given for _, given in sorted(found.values(), key=lambda sized: -sized[0])]
        work.append(self._asked(no_number, 0.0))
        with self._memory("a training pass"), library_noise(0, self.model.device):  # others' draws stay theirs
            for piece in _until(cancel, work):
                for _ in range(1 + self._launch.is_captured):  # the first one is not captured
                    self._launch(piece)

    @exclusive
    def save(self, folder: str | Path) -> Path:
        """Write weights, moments and the number of steps, with which `resume` goes on to the bit.

        What lies there stays until the new file is whole. Errors: TrainingError, for a full disk too.
        """
        return self.ranks.by_first(lambda: checkpoint.write(Path(folder), self._state()))

    def _state(self) -> dict[str, Any]:
        state = {"num_steps": self.num_steps, "settings": asdict(self.settings), "weights": self.parameters}
        own = {"optimizer": self.optimizer.state_dict(), "loss_scale": self.loss_scale.state_dict()}
        return state | own

    @exclusive
    @torch.no_grad()
    def resume(self, folder: str | Path) -> None:
        """Go on from what `save` wrote, to the bit where the settings are the same: they are this trainer's.

        Errors: TrainingError.
        """
        state = checkpoint.read(Path(folder), {path: tuple(t.shape) for path, t in self.parameters.items()})
        for path, parameter in self.parameters.items():
            parameter.copy_(state["weights"][path])
        kept = [{**group, "params": None} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(self.optimizer.param_groups, kept, strict=True):
            group |= {name: value for name, value in own.items() if name != "params"}
        self.loss_scale.load_state_dict(state.get("loss_scale"))
        self.num_steps = state["num_steps"]

    def _memory(self, what: str) -> AbstractContextManager[None]:
        """OutOfMemory where memory is full; what was kept for launches is then free again."""
        return memory_for(what, free=self._launch.close, remedy=REMEDY)

    def trained(self) -> Any:
        """A copy of the weights as they are now, for an engine or `Model.save`."""
        return mapped(self.model, lambda tensor: tensor.detach().clone())

    def _checked(self, examples: Sequence[Example]) -> Checked:
        """What can be learned from, of which this rank has its share. Errors: TrainingError, PromptError."""
        return checked(examples, self.task, self.config, self.ranks.share(len(examples)))

    def _passes(self, batch: Checked) -> Iterator[TrainPass]:
        return batch.passes(self.parts.texts, self.settings.batch_tokens)

    def _given(self, each: TrainPass, batch: Checked, settings: TrainSettings, is_first: bool = False) -> Given:
        """What a pass reads, on the host."""
        key, scale = noise_key(settings.seed, self.num_steps), self.loss_scale.scale
        return each.laid_out(key, (batch.num_labels, scale), settings, is_first)

    def _asked(self, loss: Tensor, lr: float) -> _Asked:
        """What an update reads."""
        numbers = as_integers(lr, self.loss_scale.scale, self.optimizer.num_steps + 1)
        return _Asked(loss, numbers, self.settings)

    def _backward(self, batch: Checked, cancel: Cancel | None) -> tuple[list[TrainPass], list[Tensor], Tensor]:
        """The passes over a batch, their shares of its mean loss, and this one; its scaled gradients lie with the
        parameters.
        """
        passes = [*self._passes(batch)]
        if not passes:
            self.optimizer.zero_grad()

        def work() -> list[Tensor]:
            losses = []
            for each in _until(cancel, passes):
                given = self._given(each, batch, self.settings, is_first=each is passes[0])
                if each is passes[-1]:
                    self.ranks.last_pass()
                with self._noise(each):
                    losses.append(self._launch(given))
            return losses

        return passes, *self.ranks.together(work, has_gradients=True)

    def _noise(self, each: TrainPass) -> AbstractContextManager[None]:
        """Libraries draw what attention drops in a pass from the seed, the step and the pass."""
        if not self.settings.attention_dropout:
            return nullcontext()
        key = noise_key(noise_key(self.settings.seed, self.num_steps), each.numbers[0])
        return library_noise(key, self.model.device)

    def _run(self, given: Given | _Asked) -> Tensor:
        """What is launched: it reads what it is given, on the device, and nothing else that changes between steps."""
        return self._pass(given) if isinstance(given, Given) else self._updated(given)

    def _pass(self, given: Given) -> Tensor:
        """A pass forward and backward: its share of the batch's mean loss. Gradients add up to the first pass of a
        step.
        """
        if given.is_first:
            self.ranks.clear(self.optimizer)
        num_labels, scale = given.scales.view(torch.float64).float()
        loss = self._loss(given) / num_labels
        (loss * scale).backward()
        if given.is_first:
            self.optimizer.collect()
        return loss.detach()

    @torch.no_grad()
    def _updated(self, given: _Asked) -> Tensor:
        """An update, unless a number of it is not finite: the loss, and the norm of the scaled gradients, [2]."""
        lr, scale, step = given.numbers.view(torch.float64)
        norm = self.optimizer.grad_norm()
        skip = ~(norm.isfinite() & given.loss.isfinite())
        factor = torch.where(skip, 1.0, given.settings.clipping(norm / scale) / scale)
        wide = lr.dtype if lr.device.type == "cpu" else torch.float32
        self.optimizer.update(Update(lr.to(wide), factor.to(wide), step.float(), skip))
        return torch.stack([given.loss.double(), norm.double()])

    def _loss(self, given: Given) -> Tensor:
        """The sum of the losses of a pass that is on the device."""
        settings, read, ops = given.settings, given.read, self.parts.train_ops

        def ops_of(batch: Batch, is_source: bool = False) -> Ops:
            """The ops of a pass, which drop what belongs to its tokens."""
            if not (settings.dropout or settings.attention_dropout):
                return ops.differentiable(None)
            numbers = given.numbers[batch.rows]
            # A source has noise of its own.
            keys = token_keys(given.noise, ~numbers if is_source else numbers, batch.positions)
            return ops.differentiable(Dropout(settings.dropout, settings.attention_dropout, keys, batch.positions))

        states = self._hidden(ops_of, read).index_select(0, read.asked)
        head = self.task.head(self.model, ops.differentiable(None))
        return self.parts.loss(states, given.labels, head, settings.label_smoothing)

    def _hidden(self, ops_of: Callable[..., Ops], read: Pass) -> Tensor:
        made, ops = partial(self.parts.attend, empty=autograd, window=self.config.spec.window), ops_of(read.batch)
        if read.source is None:
            return self.model.hidden(ops, made(ops, read.batch, None), read)
        of_source = ops_of(read.source, is_source=True)
        looks = made(of_source, read.source, None)
        encoded = seq2seq.encode(self.model, of_source, looks, read.source, self.parts.cross_kv)
        attend = made(ops, read.batch, None, source=Source(read.source, tuple(encoded)))
        return seq2seq.forward(self.model, ops, attend, read.batch)

    def _trained(self, fixed: Sequence[Tensor]) -> dict[str, Tensor]:
        """What the task reads, by its path; a tensor that is there twice has its first one."""
        embeddings = ("token_embedding", "position_embedding", "type_embedding", "cls_token", "patches")
        body = (*embeddings, "norm", "layers", "encoder", "decoder")
        read = [t for name in body for t in tensors(getattr(self.model, name, None))]
        read += self.task.head(self.model, self.parts.train_ops).weights
        ids, found = {id(t) for t in read}, dict[int, tuple[str, Tensor]]()
        for path, tensor in flat(self.model):
            if id(tensor) in ids and not any(tensor is each for each in fixed):
                found.setdefault(id(tensor), (path, tensor))
        return dict(found.values())

    def _not_finite(self, passes: list[TrainPass], losses: list[float], loss: float, grad_norm: float) -> TrainingError:
        """What to tell of a step that cannot be made: which examples, and the first tensor that is not finite."""
        bad = [each for each, own in zip(passes, losses, strict=False) if not math.isfinite(own)][:1]
        examples = [str(number + 1) for number in sorted(n for each in bad or passes for n in each.numbers)]
        named = ((f"weight {path}", t) for path, t in self.parameters.items())
        grads = ((f"gradient of {path}", t.grad) for path, t in self.parameters.items() if t.grad is not None)
        first = next((name for name, t in (*named, *grads) if not bool(t.isfinite().all())), "none of the weights")
        return TrainingError(
            f"Step {self.num_steps} has a loss of {loss} and a gradient norm of {grad_norm}, and was left "
            f"out: the weights are those before it. The first tensor that is not finite is the {first}, in a pass over "
            f"{counted(len(examples), 'example')}, {some(examples)}. Use a smaller lr or max_grad_norm, more "
            "warmup_steps, or look at these examples."
        )


def _until(cancel: Cancel | None, found: Iterable[T]) -> Iterator[T]:
    """The same, one by one. Errors: Cancelled."""
    for each in found:
        if cancel is not None and cancel.is_set():
            raise Cancelled("The training was stopped.")
        yield each


def _groups(parameters: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices, which decay, and biases and norms, which do not."""
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in parameters:
        kinds[parameter.ndim > 1].append(parameter)
    decay = {True: weight_decay, False: 0.0}
    return [{"params": params, "weight_decay": decay[kind]} for kind, params in kinds.items() if params]


def _check_parts(parts: Parts, config: Config, group: Alone) -> None:
    """RecipeError for parts that would be on and do nothing, and for captures of what waits for others."""
    if getattr(parts.step_launch, "is_captured", False) and isinstance(group, Ranks):
        raise RecipeError(
            f"captured_steps trains in one process, and this is one of {group.num_ranks}, whose gradients are summed "
            "while a pass runs. Leave it out."
        )
    if names := unread(parts, UNREAD if isinstance(config, Seq2SeqConfig) else (*UNREAD, "cross_kv")):
        raise RecipeError(
            f"These parts change {' and '.join(names)}, which training this model does not use. Leave out what changes "
            "them."
        )
