"""Whether what a race times fits into memory, told from rehearsals before anything is made or run."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import NamedTuple

import torch

from eet_lab.bench.foresee import WitnessBytes, witness_bytes
from eet_lab.bench.workloads import Workload
from eet_lab.engine.engine import Engine
from eet_lab.engine.forecast import LIBRARY_BYTES, Forecast, Forecaster, Peak
from eet_lab.engine.rehearse import META
from eet_lab.engine.settings import Settings
from eet_lab.errors import OutOfMemory
from eet_lab.models.decoder import Decoder, mapped, num_bytes, tensors
from eet_lab.monitor import free_bytes_of
from eet_lab.parts import KeepsWeights, Parts
from eet_lab.technique import Recipe
from eet_lab.words import sized


class Foreseen(NamedTuple):
    """A recipe's engine on meta tensors, and what its runs take beside the weights."""

    recipe: Recipe
    engine: Engine
    peak: Peak
    precise_bytes: int  # of the pass at higher precision with its own weights, which it is checked against; else 0

    @property
    def kept_bytes(self) -> int:
        """What the engine holds from one run to the next: its KV cache, and its arena if it has one."""
        return self.peak.kv + (self.peak.activations if self.engine.memory.has_arena else 0)


def check_room(
    model: Decoder, device: str, workload: Workload, recipes: Sequence[Recipe]
) -> tuple[list[Recipe], list[str]]:
    """The recipes whose runs fit into the memory of `device`, and a remark on each of the others.

    `model` lies there, or on meta, if it is to be loaded. OutOfMemory, in the words of the forecast, where none of
    them fits, where the baseline does not, which all are held against, or where they do not fit beside each other.
    """
    there = torch.device(device)
    free = _free_bytes(there, model)
    outline, settings = mapped(model, lambda tensor: tensor.to(META)), Settings(max_new_tokens=workload.new_tokens)
    told = {
        recipe: _foresee(outline, recipe, workload.lengths, settings, there, free + _held_bytes(model, [recipe]))
        for recipe in (Recipe(), *recipes)
    }
    baseline, racers = told[Recipe()], {recipe: told[recipe] for recipe in recipes}
    if isinstance(baseline, Forecast):
        raise OutOfMemory(
            f"{workload} cannot be timed, since the baseline, which every output is held against, does not run: "
            f"{baseline}"
        )
    remarks = [f"{recipe} is left out: {each}" for recipe, each in racers.items() if isinstance(each, Forecast)]
    fitting = [each for each in racers.values() if isinstance(each, Foreseen)]
    if racers and not fitting:
        raise OutOfMemory(f"{workload} cannot be timed. {' '.join(remarks)}")
    weights = num_bytes([t for each in (baseline, *fitting) for t in tensors(each.engine.model)])
    check = witness_bytes(outline, workload.lengths, settings)
    needed = weights + _library_bytes(there) + most_bytes(baseline, fitting, check)
    free += _held_bytes(model, [each.recipe for each in fitting])
    if needed > free:
        names = ", ".join(str(each.recipe) for each in fitting) or "its baseline"
        raise OutOfMemory(
            f"{workload} cannot be timed: {names}, kept side by side, and the check of the output take {sized(needed)} "
            f"of {sized(free)} (weights {sized(weights)}). Give fewer recipes at once, fewer or shorter prompts, fewer "
            "new tokens, or half precision."
        )
    return [each.recipe for each in fitting], remarks


def _free_bytes(device: torch.device, model: Decoder) -> int:
    """What there is for weights and runs: what is free, and the weights of `model` if they lie there already."""
    gc.collect()  # engines that ended in an error or were stopped are cycles
    return free_bytes_of(device) + (0 if model.device.type == "meta" else model.weight_bytes)


def _held_bytes(model: Decoder, recipes: Sequence[Recipe]) -> int:
    """What passes of these recipes keep of the model's weights in other forms, which then take no room again."""
    changes = (change for recipe in recipes for change in recipe.parts.weights if isinstance(change, KeepsWeights))
    return 0 if model.device.type == "meta" else num_bytes([t for change in changes for t in change.held(model)])


def _library_bytes(device: torch.device) -> int:
    return 0 if device.type == "cpu" else LIBRARY_BYTES


def _foresee(
    outline: Decoder, recipe: Recipe, lengths: Sequence[int], settings: Settings, device: torch.device, free: int
) -> Foreseen | Forecast:
    """The engine of a recipe that fits into `free` bytes alone; of another, the forecast that says so."""
    engine = Engine(outline, recipe.parts)
    forecaster = Forecaster(engine.rehearser, engine.parts, settings)
    peak = forecaster.peak(lengths)
    if engine.model.weight_bytes + _library_bytes(device) + sum(peak) > free:
        return forecaster.forecast(lengths, device, free)
    changed = bool(recipe.parts.weights)
    return Foreseen(recipe, engine, peak, witness_bytes(engine.model, lengths, settings).precise if changed else 0)


def most_bytes(baseline: Foreseen, racers: Sequence[Foreseen], check: WitnessBytes) -> int:
    """The peak beside the weights: of the baseline that is recorded, of the check of each racer, or of a run of one.

    Racers are prepared one after another, each is checked by an engine of its own, and all are kept.
    """
    found = [check.recorded + max(sum(baseline.peak), check.precise)]
    kept = [each.kept_bytes for each in racers]
    for place, each in enumerate(racers):
        found.append(check.reference + sum(kept) - kept[place] + sum(each.peak))
        if each.engine.parts != Parts():
            beside = check.reference + check.recorded + sum(kept[: place + 1])
            found.append(beside + max(check.widened, sum(each.peak), each.precise_bytes))
    return max(found)
