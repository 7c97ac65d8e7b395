"""What the engines have in common: a model, parts, and the memory that their ops ask for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from threading import Lock
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from eet_lab.devices import present
from eet_lab.engine.exclusive import exclusive
from eet_lab.engine.settings import told
from eet_lab.errors import ModelError, RecipeError
from eet_lab.memory import Plan
from eet_lab.models.decoder import Decoder, tensors
from eet_lab.models.seq2seq import Seq2Seq
from eet_lab.models.vision import AnyEncoder
from eet_lab.ops import native
from eet_lab.parts import Parts
from eet_lab.parts.trace import TracedPass
from eet_lab.progress import Cancel, Progress, raise_if_cancelled
from eet_lab.words import type_of, with_article

Model = TypeVar("Model", Decoder, AnyEncoder)
FOR_OTHERS = ("weights", "layers", "cross_kv", "train_ops", "loss", "optimizer", "step_launch")
"""Slots that decoders and training alone read: elsewhere, parts that change these alone would be on and do nothing."""


class BaseEngine(Generic[Model]):
    """A model run by parts. Building one is cheap: weights are shared, nothing is compiled or allocated.

    An engine does one thing at a time (see `exclusive`). Errors: RecipeError for a model that one of the ops does not
    take.
    """

    BUSY: ClassVar[str] = (
        "this engine is generating, and runs one batch at a time. Wait until it is done, or build another Engine of "
        "the same model: the weights are shared."
    )

    def __init__(self, model: Model, parts: Parts | None) -> None:
        self.parts = parts or Parts()
        if problem := self.parts.ops.unfit(model.config):
            raise RecipeError(f"These parts cannot run this model: {problem}. Use plain ops, or another model.")
        self.model: Model = model
        self.memory, self._like = self.parts.memory(), tensors(model)[0]
        self.ops = self.parts.ops.bind_each(lambda op: partial(self._empty, op=op))
        window, empty = model.config.spec.window, partial(self._empty, op="mask")
        self.attend = partial(self.parts.attend, self.ops, empty=empty, window=window)
        self.libraries: tuple = ()  # what is loaded for these ops; others once a source was edited
        self.busy = Lock()
        self._cancel: Cancel | None = None
        self._allocating = ""

    def prepare(self, progress: Progress | None = None, cancel: Cancel | None = None) -> bool:
        """Build the CUDA kernels that the parts need, if any; seconds at first, nothing later.

        Returns whether others are loaded now than when this engine last asked.
        """
        if self.model.device.type == "meta":
            raise ModelError("The model has shapes and no data. To run it, load it on 'cpu' or 'cuda', not on 'meta'.")
        if not (kernels := self.parts.ops.kernels):
            return False
        with present(self.model.device):
            native.prepare(kernels, progress=progress, cancel=cancel)
        before, self.libraries = self.libraries, tuple(native.loaded(name).path for name in kernels)
        return self.libraries != before

    def plans(self) -> dict[str, Plan]:
        """What the passes of the last run asked for and where it lay: {name of the pass: Plan}."""
        return self.memory.plans()

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations as `memory` counts them: the most alive at once, or the arena."""
        return self.memory.num_bytes

    @exclusive
    def close(self) -> None:
        """Give back all memory but the weights; the engine can be used again."""
        self._free()

    def _free(self) -> None:
        self.memory = self.parts.memory()

    def place(self, passes: Mapping[str, TracedPass], *, reserved: bool) -> bool:
        """Give the activations of these passes their places; `reserved`: and those of smaller ones to come.

        Returns whether it had to trace or to place anything, as `FreshMemory.plan` does.
        """
        generation, self._allocating = self.memory.generation, "the arena of activations"
        had_to = (self.memory.reserve if reserved else self.memory.plan)(passes, like=self._like)
        if self.memory.generation != generation:
            self._void()
        return had_to

    def _void(self) -> None:
        """Let go of all graphs: memory that they refer to has moved."""

    def _empty(
        self, name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None, *, op: str
    ) -> Tensor:
        """Every op comes by here for its memory, so this is also where a pass can be stopped."""
        self._check_stop()
        self._allocating = name
        return self.memory.empty(name, shape, like, dtype, op=op)

    def _check_stop(self) -> None:
        raise_if_cancelled(self._cancel, "The run")


def check_model(engine: str, model: object, kinds: tuple[type, ...], preset: str) -> None:
    """ModelError for what this engine cannot run, with what it takes instead; `preset` is the example of the first."""
    if isinstance(model, kinds):
        return
    kind = kinds[0]
    name = "network" if kind is Seq2Seq else kind.__name__.lower()
    given, instead = told(model), f"eet_lab.load({preset!r}).{name}"
    if isinstance(model, Seq2Seq) and kind is Decoder:
        given, instead = "a Seq2Seq", f"a decoder, or this one to Seq2SeqEngine: {instead}"
    elif hasattr(model, "network"):
        given, instead = type_of(model), f"model.{name}"
    elif isinstance(model, str) and kind is Decoder:
        instead = f"eet_lab.load({model!r}).{name}"
    raise ModelError(f"{engine} takes {with_article(kind.__name__)}, not {given:.60}: give it {instead}.")


def check_parts(engine: str, parts: object, recipe: str) -> None:
    """RecipeError for what are no parts, with what is taken instead; `recipe` is the example."""
    if parts is None or isinstance(parts, Parts):
        return
    given, instead = told(parts), f"Recipe.parse({recipe!r}).parts"
    if isinstance(getattr(parts, "parts", None), Parts):
        given, instead = type_of(parts), "recipe.parts"
    elif isinstance(parts, str):
        instead = f"Recipe.parse({parts!r}).parts"
    raise RecipeError(f"{engine} takes Parts, not {given:.60}: give it {instead}.")
