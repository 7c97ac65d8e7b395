"""Flat optimizer: all weights in one buffer, and one update for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from eet_lab.parts import Parts
from eet_lab.parts.buffers import MASTERS, Buffered
from eet_lab.parts.optimizers import FLAT
from eet_lab.technique import Technique, knob


@dataclass(frozen=True)
class FlatOptimizer(Technique):
    """Keep all weights in one buffer, and their gradients and moments too, so that one launch updates everything.

    Without it, each of a model's tensors has its own launches: GPT-2 has 148 tensors. With it, the weights and their
    gradients are views of one buffer for each kind of decay (matrices, and biases with norms), and each is updated by
    one call, by the same formulas: on a GPU a kernel that takes 16-bit gradients and weights as they are, where
    PyTorch widens, scales and copies them in passes of their own. Clearing the gradients, and the norm by which they
    are clipped, are one call as well. At the peak of a step's first pass, memory holds one more set of gradients.

    16-bit weights are updated in fp32. `master` says what of: a copy that is kept takes 4 bytes a weight; without one
    the new weight is rounded to the nearest 16-bit number, which loses updates below half of its last digit; rounded
    at random, such updates arrive on average. In fp32 the knob changes nothing.

    Expect small models and small batches to gain, where the host launches more slowly than the GPU works.

    Source: LightSeq2 (Wang et al., SC 2022), "symbolic tensor link"; stochastic rounding as in llm.c and torchao.
    """

    name: ClassVar[str] = "flat_optimizer"
    title: ClassVar[str] = "Flat optimizer"
    numerics: ClassVar[str] = "reordered"
    stages: ClassVar[tuple[str, ...]] = ("train",)
    lesson: ClassVar[str] = "08_fast_training"

    master: str = knob(
        "float32",
        "What 16-bit weights are updated in.",
        label="16-bit weights",
        choices=MASTERS,
        words={"float32": "fp32 copy", "none": "no copy", "stochastic": "no copy, rounded at random"},
    )

    def apply(self, parts: Parts) -> Parts:
        return replace(parts, optimizer=Flat(self.master))


@dataclass(frozen=True)
class Flat:
    """Makes the optimizer of a trainer."""

    master: str

    def __call__(self, params: Any, name: str, /, *, seed: int, **settings: Any) -> Buffered:
        return FLAT[name](params, master=self.master, seed=seed, **settings)
