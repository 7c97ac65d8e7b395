"""Rotary positions: how fast each pair of a head's numbers turns, for the scalings that checkpoints use.

D head dim. Formulas as in transformers, in fp32, so that the numbers are the same to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.errors import ModelError, did_you_mean
from eet_lab.words import shortened

REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""What a scaling must tell."""
OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
"""What "yarn" may tell beside."""
NAMES = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *OPTIONAL}.union(*REQUIRED.values())
"""What is said once for all layers."""
MOST_POSITIONS = 2**31 - 1
"""Positions are 32-bit numbers."""
REMEDY = "Use a model whose rotary positions are supported, or run this one with transformers."


class Rope(NamedTuple):
    """Pair i turns by `theta ** (-2i/D)` radians from one position to the next, but for the scaling.

    "dynamic" changes frequencies beyond the model's own context only, which a `Config` ends at: so it changes nothing.
    There they would depend on the longest text of a batch at each step, and keys in the KV cache have been turned.
    """

    theta: float = 10000.0
    kind: str = "default"
    numbers: tuple[tuple[str, float], ...] = ()  # of the scaling, by the names that checkpoints give them

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by; 1 but for "yarn"."""
        told = dict(self.numbers)
        if self.kind != "yarn" or "attention_factor" in told:
            return told.get("attention_factor", 1.0)
        over, under = told.get("mscale", 0.0), told.get("mscale_all_dim", 0.0)
        if over and under:
            return _longer(told["factor"], over) / _longer(told["factor"], under)
        return _longer(told["factor"])

    def context(self, positions: int) -> int:
        """The longest text in tokens, where the config says max_position_embeddings = `positions`; as in vLLM.

        A longer one that it says is kept.
        """
        told = dict(self.numbers)
        own = {"linear": positions, "yarn": told.get("original_max_position_embeddings", 0)}.get(self.kind, 0)
        return max(positions, int(min(own * told.get("factor", 1.0), MOST_POSITIONS)))

    def max_position_embeddings(self, context: int) -> int:
        """The other way round."""
        factor = dict(self.numbers)["factor"] if self.kind == "linear" else 1.0
        return math.ceil(context / max(factor, 1.0) - 1e-9)

    def inv_freq(self, head_dim: int) -> Tensor:
        """Radians from one position to the next, [D/2] in fp32 on the CPU."""
        told, each = dict(self.numbers), torch.arange(0, head_dim, 2).float() / head_dim
        plain = 1.0 / (self.theta**each)
        if self.kind == "linear":
            return plain / told["factor"]
        if self.kind == "llama3":
            return _llama3(plain, told)
        if self.kind == "yarn":
            return _yarn(self.theta, head_dim, told)
        return plain


def read_rope(settings: Mapping[str, Any]) -> Rope:
    """Read a checkpoint's config: `rope_parameters`, or in older ones `rope_theta` and `rope_scaling`.

    Where it has both, `rope_scaling` counts, as in transformers. Errors: ModelError.
    """
    told, field = _object(settings, "rope_scaling"), "rope_scaling"
    if not told:
        told, field = _object(settings, "rope_parameters"), "rope_parameters"
    if layers := [name for name, value in told.items() if isinstance(value, Mapping) and name not in NAMES]:
        raise ModelError(f"The {field} differ by layer ({', '.join(layers)}), which is not supported. {REMEDY}")
    kind = told.get("rope_type", told.get("type", "default"))
    if not isinstance(kind, str) or kind not in REQUIRED:
        hint = did_you_mean(str(kind), REQUIRED)
        raise ModelError(f"The rope type {kind!r} is not supported; supported: {', '.join(REQUIRED)}.{hint} {REMEDY}")
    if told.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0)) not in (None, 1):
        raise ModelError(f"Heads are rotated in part (partial_rotary_factor); only whole ones are supported. {REMEDY}")
    own = settings.get("original_max_position_embeddings", settings.get("max_position_embeddings"))
    told = {"rope_theta": settings.get("rope_theta", 10000.0), "original_max_position_embeddings": own, **told}
    names = [*REQUIRED[kind], *(name for name in OPTIONAL if kind == "yarn" and told.get(name) is not None)]
    return Rope(_number(told, "rope_theta", kind), kind, tuple((name, _number(told, name, kind)) for name in names))


def rope_settings(rope: Rope) -> dict[str, Any]:
    """The same as a config has it, in the older way, which every version of transformers reads."""
    scaling = None if rope.kind == "default" else {"rope_type": rope.kind, **dict(rope.numbers)}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _object(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the config that has names of its own, or none."""
    value = settings.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ModelError(
            f"{name} is {shortened(value)}, but it must be an object such as {{'rope_type': 'linear', 'factor': 2.0}}. "
            "Mend config.json, or download or save the model again."
        )
    return value


def _number(told: Mapping[str, Any], name: str, kind: str) -> float:
    value = told.get(name)
    is_number = isinstance(value, (int, float)) and math.isfinite(value) and (value > 0 or name == "truncate")
    if value is None or not is_number:
        needed = ", ".join(("rope_theta", *REQUIRED[kind]))
        raise ModelError(
            f"{name} is {value!r} in the checkpoint's rope settings, but it must be a positive number; {kind!r} needs "
            f"{needed}. Mend config.json, or download or save the model again."
        )
    return value


def _llama3(plain: Tensor, told: Mapping[str, float]) -> Tensor:
    """Slow pairs turn more slowly by `factor`, fast ones as ever, those between partly."""
    factor, low, high = told["factor"], told["low_freq_factor"], told["high_freq_factor"]
    context, wavelength = told["original_max_position_embeddings"], 2 * math.pi / plain
    scaled = torch.where(wavelength > context / low, plain / factor, plain)
    share = (context / wavelength - low) / (high - low)
    between = ~(wavelength < context / high) * ~(wavelength > context / low)
    return torch.where(between, (1 - share) * scaled / factor + share * scaled, scaled)


def _yarn(theta: float, head_dim: int, told: Mapping[str, float]) -> Tensor:
    """Pairs that turn often within the original context stay, rare ones turn more slowly, a ramp lies between.

    Source: YaRN (Peng et al., 2023).
    """
    context, half = told["original_max_position_embeddings"], head_dim // 2

    def pair(turns: float) -> float:
        """Which pair turns so often within the original context."""
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(told.get("beta_fast", 32)), pair(told.get("beta_slow", 1))
    if told.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(half).float() - low) / ((high if high != low else high + 0.001) - low)
    stays, period = 1 - ramp.clamp(0, 1), theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return 1.0 / (told["factor"] * period) * (1 - stays) + 1.0 / period * stays


def _longer(factor: float, scale: float = 1.0) -> float:
    """How much larger scores should be in a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
