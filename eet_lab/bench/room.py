"""Whether what a race times fits into memory, told from rehearsals before anything is made or run."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import NamedTuple

import torch

from eet_lab.bench.foresee import WitnessBytes, witness_bytes
from eet_lab.bench.workloads import Workload
from eet_lab.engine.engine import Engine
from eet_lab.engine.forecast import LIBRARY_BYTES, Forecaster, Peak
from eet_lab.engine.rehearse import META
from eet_lab.engine.settings import Settings
from eet_lab.errors import OutOfMemory
from eet_lab.models.decoder import Decoder, mapped, num_bytes, tensors
from eet_lab.monitor import free_bytes_of
from eet_lab.parts import Parts
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
        return self.peak.kv + (0 if self.engine.parts.memory is Parts().memory else self.peak.activations)


def check_room(
    model: Decoder, device: str, workload: Workload, recipes: Sequence[Recipe]
) -> tuple[list[Recipe], list[str]]:
    """The recipes whose runs fit into the memory of `device`, and a remark on each of the others.

    `model` lies there, or on meta, if it is to be loaded. OutOfMemory, in the words of the forecast, where none of
    them fits, where the baseline does not, which all are held against, or where they do not fit beside each other.
    """
    there = torch.device(device)
    gc.collect()  # engines that ended in an error or were stopped are cycles
    free = free_bytes_of(there)
    if model.device.type != "meta":
        changes = {change for recipe in recipes for change in recipe.parts.weights if hasattr(change, "held_bytes")}
        free += model.weight_bytes + sum(change.held_bytes(model) for change in changes)
    outline, settings = mapped(model, lambda tensor: tensor.to(META)), Settings(max_new_tokens=workload.new_tokens)
    library_bytes = 0 if device == "cpu" else LIBRARY_BYTES
    fit, refused = [], {}
    for recipe in (Recipe(), *recipes):
        engine = Engine(outline, recipe.parts)
        forecaster = Forecaster(engine.rehearser, engine.parts, settings)
        peak = forecaster.peak(workload.lengths)
        if engine.model.weight_bytes + library_bytes + sum(peak) <= free:
            changed = bool(recipe.parts.weights)
            precise = witness_bytes(engine.model, workload.lengths, settings).precise if changed else 0
            fit.append(Foreseen(recipe, engine, peak, precise))
        else:
            refused[recipe] = forecaster.forecast(workload.lengths, there, free)
    if Recipe() in refused:
        raise OutOfMemory(
            f"{workload} cannot be timed, since the baseline, which every output is held against, does not run: "
            f"{refused[Recipe()]}"
        )
    baseline, *fitting = fit
    remarks = [f"{recipe} is left out: {told}" for recipe, told in refused.items()]
    if recipes and not fitting:
        raise OutOfMemory(f"{workload} cannot be timed. {' '.join(remarks)}")
    weights = num_bytes([t for each in fit for t in tensors(each.engine.model)])
    check = witness_bytes(outline, workload.lengths, settings)
    needed = weights + library_bytes + most_bytes(baseline, fitting, check)
    if needed > free:
        names = ", ".join(str(each.recipe) for each in fitting) or "its baseline"
        raise OutOfMemory(
            f"{workload} cannot be timed: {names}, kept side by side, and the check of the output take {sized(needed)} "
            f"of {sized(free)} (weights {sized(weights)}). Give fewer recipes at once, fewer or shorter prompts, fewer "
            "new tokens, or half precision."
        )
    return [each.recipe for each in fitting], remarks


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
