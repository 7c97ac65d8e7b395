"""Int8 weights: half the bytes a token has to wait for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from eet_lab.models.decoder import Decoder, Layer
from eet_lab.ops.int8 import quantized
from eet_lab.ops.types import Linear
from eet_lab.parts import Parts
from eet_lab.technique import Technique, knob


@dataclass(frozen=True)
class Int8Weights(Technique):
    """Keep the weights as 8-bit whole numbers with a scale for each output, and compute in the type of the activations.

    A decode step reads every weight once for a few tokens, so its time is the bytes over the bandwidth. Each weight
    becomes an integer from -127 to 127; one fp32 scale per output (or per `group` of its inputs) dequantizes it. No
    weight is off by more than half its scale. Activations, norms, biases, embeddings and the KV cache stay as they
    are; the LM head gets an int8 copy of its own, since a step reads all of it.

    With `fused_kernels`, batches of up to 16 rows convert the integers in registers, on their way from memory to the
    tensor cores, and scale the sums; longer passes dequantize one matrix at a time and use cuBLAS for the product.
    Plain PyTorch dequantizes every matrix in every step, which is slower than no quantization: on a CPU, look at the
    text and the perplexity, not at the time.

    Expect the time per token to fall by less than the bytes do, since starting and ending a kernel costs the same, and
    to fall for few rows only: with eight or more, the linears in a layer of GPT-2 XL are no faster on an H200 than in
    16 bits. Wider ones take less, by a fifth to a third with 4,096 channels; but where activations do not fit beside
    the weights (16 rows of 6,400 inputs, eight of 16,384) every step dequantizes whole matrices, and takes up to three
    times as long. Groups cost more than they save. `persistent_layers` supports 16-bit weights only, so with int8
    weights a layer is five launches again: one row of GPT-2 XL takes 13 % less time than the same recipe in 16 bits.

    Lossy: the text may change. Compare shows the perplexity on held-out text before and after, where the weights were
    trained. Smaller groups lose less and read more: a scale is 4 bytes, 6 % of a group of 64.

    Source: LLM.int8() (Dettmers et al., NeurIPS 2022) for per-channel symmetric scales; MARLIN (Frantar et al., 2024)
    for expanding weights next to the tensor cores.
    """

    name: ClassVar[str] = "int8_weights"
    title: ClassVar[str] = "Int8 weights"
    lesson: ClassVar[str] = "04_decode_speed"
    numerics: ClassVar[str] = "lossy"
    tolerance: ClassVar[float] = 0.1

    group: int = knob(
        0,
        "How many weights of an output share one scale. Smaller groups are more precise, and take more bytes.",
        label="Group",
        choices=(0, 64, 128),
        words={0: "whole output", 64: "64 inputs", 128: "128 inputs"},
    )
    head: bool = knob(True, "Quantize the LM head as well.", choices=(True, False), label="LM head")

    def apply(self, parts: Parts) -> Parts:
        return replace(parts, weights=(*parts.weights, ToInt8(self.group, self.head)))


@dataclass(frozen=True)
class ToInt8:
    """A weights pass: the same decoder with int8 linears."""

    group: int
    head: bool

    def __call__(self, model: Decoder) -> Decoder:
        layers = tuple(Layer(*map(self._part, layer)) for layer in model.layers)
        return model._replace(layers=layers, head=self._part(model.head) if self.head else model.head)

    def held(self, model: Decoder) -> list[Tensor]:
        """The copies of this model's weights that are there already."""
        parts = [part for layer in model.layers for part in layer] + [model.head] * self.head
        known = (_QUANTIZED.get(part.weight, {}) for part in parts if isinstance(part, Linear))
        return [tensor for each in known for tensor in each.get(self.group, ())]

    def _part(self, part: Any) -> Any:
        if not isinstance(part, Linear):
            return part
        known = _QUANTIZED.setdefault(part.weight, {})
        if self.group not in known:
            known[self.group] = quantized(part.weight, self.group)
        weight, scale = known[self.group]
        return Linear(weight, part.bias, scale)


_QUANTIZED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of a weight: its int8 copies by group. They go when the weight goes, so that flipping the toggle costs once."""
