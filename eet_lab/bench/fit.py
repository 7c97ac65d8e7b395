"""Does it fit? The memory that a run, a comparison or a benchmark needs, computed before anything is allocated.

B rows, S tokens of the longest prompt, N generated tokens that are checked, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from eet_lab.bench.cost import NUM_BYTES
from eet_lab.bench.held_out import BATCH, CHUNK, WINDOW, Scorer, why_not
from eet_lab.bench.launches import DispatchMode
from eet_lab.bench.parity import num_checked, reference_logits
from eet_lab.bench.workloads import Workload
from eet_lab.devices import present
from eet_lab.engine.engine import Engine
from eet_lab.engine.forecast import Forecast, Forecaster, Peak, workspace_bytes
from eet_lab.engine.meta_trace import META, MetaTracer, NoArithmetic
from eet_lab.engine.settings import Settings
from eet_lab.errors import OutOfMemory
from eet_lab.models import Model
from eet_lab.models.decoder import Decoder, mapped, num_bytes, tensors
from eet_lab.monitor import free_bytes_of
from eet_lab.parts import KeepsWeights, Parts
from eet_lab.scheduling import LEFT_PADDED
from eet_lab.technique import Recipe
from eet_lab.words import GiB, sized

if TYPE_CHECKING:
    from eet_lab.bench.op_workloads import OpWorkload

FLOAT_BYTES = 4


@dataclass(frozen=True)
class CompareForecast:
    """Bytes of a comparison at its peak: `total_bytes` is the sum of the others.

    `engine_bytes` is what both engines hold between runs, weights included; `check_bytes` the most that is held beside
    them: by the check of the output, by reading held-out text where a recipe is lossy, or on a CPU by the buffer over
    which the speed of memory is measured, once in a process.
    """

    engine_bytes: int
    check_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.engine_bytes + self.check_bytes + self.workspace_bytes


def forecast_compare(model: Model, lengths: Sequence[int], recipe: Recipe, settings: Settings) -> CompareForecast:
    """What comparing `recipe` to the baseline will need, for prompts of these lengths.

    Traced on meta tensors, so that nothing is computed. What the engines keep is counted as what their runs take,
    less the copies of a KV cache that grows: that is too much where activations are fresh tensors, and never too few.
    """
    engines = [Engine(model.decoder, each.parts) for each in (Recipe(), recipe)]
    before, after = (Forecaster(each.tracer, each.parts, settings).peak(lengths) for each in engines)
    check = _check_bytes(engines, lengths, settings, (before, after))
    if recipe.lossy and not why_not(model):
        check = max(check, *(_text_bytes(each) for each in engines))
    if model.device == "cpu":  # on a GPU it takes what is there
        check = max(check, NUM_BYTES["cpu"])
    weights = {str(each.parts.weights): each.model.weight_bytes for each in engines}  # shared where they are the same
    return CompareForecast(
        engine_bytes=sum(weights.values()) + sum(sum(peak) - peak.growth for peak in (before, after)),
        check_bytes=check,
        workspace_bytes=workspace_bytes(model.decoder.device, recipe.parts.is_captured),
    )


class Forecasts(NamedTuple):
    """The memory that a run needs, and a comparison of its recipe with the baseline; None for the baseline itself."""

    run: Forecast
    compare: CompareForecast | None


def forecasts(model: Model, recipe: Recipe, lengths: Sequence[int], settings: Settings) -> Forecasts:
    """Forecasts for prompts of these lengths, traced on meta tensors: only lengths count."""
    with present(model.decoder.device):
        engine = Engine(model.decoder, recipe.check(model.device, model.config).parts)
    run = engine.forecast([[model.config.bos_id] * length for length in lengths], settings)
    return Forecasts(run, forecast_compare(model, lengths, recipe, settings) if len(recipe) else None)


def _check_bytes(
    engines: Sequence[Engine], lengths: Sequence[int], settings: Settings, peaks: tuple[Peak, Peak]
) -> int:
    """The peak of the parity check, which has three stages, beside what both engines keep between runs.

    It records the baseline's logits, computes the reference at higher precision, and runs the recipe on the tokens of
    the baseline. `peaks` are those of the two engines' runs. A recipe that changes the weights is checked against a
    second reference, with the changed weights, while the first is kept.
    """
    check = parity_bytes(engines[0].tracer.model, lengths, settings)
    kept = check.reference if engines[1].parts.weights else 0  # other weights have a check of their own, inside this
    return check.recorded + max(
        kept + sum(peaks[0]),
        kept + check.precise,
        check.reference + max(check.widened, sum(peaks[1])),
    )


class ParityBytes(NamedTuple):
    """The memory of a parity check, in bytes, without the engines that it runs."""

    recorded: int  # the baseline's logits
    precise: int  # the peak of the pass at higher precision
    reference: int  # the logits of that pass, which are kept
    widened: int  # temporaries in fp32, while recorded logits are compared with the reference


def parity_bytes(model: Decoder, lengths: Sequence[int], settings: Settings) -> ParityBytes:
    """What a parity check of a model holds; `model` is on the meta device."""
    B = len(lengths)
    N, V = num_checked(settings, B), len(model.head.weight)
    rows = [[model.config.bos_id] * length for length in lengths]
    tokens = [[model.config.bos_id] * N] * B
    with PeakBytes() as alive, NoArithmetic():
        reference = reference_logits(model, rows, tokens, N)
    row = 3 * reference[0].nbytes  # widened, subtracted, and its absolute values
    return ParityBytes(B * (N + 1) * V * model.dtype.itemsize, alive.peak, reference.nbytes, row)


class PeakBytes(DispatchMode):
    """While it is entered: the most bytes at once of all storages that operators have made."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in given:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._alive.values()))
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _text_bytes(engine: Engine) -> int:
    """The peak of an engine while it computes the perplexity of held-out text."""
    model = engine.tracer.model
    window, V = min(model.config.context, WINDOW), len(model.head.weight)
    parts = replace(engine.parts, schedule=LEFT_PADDED)
    reading = Forecaster(
        MetaTracer(engine.model, parts, Scorer(parts.ops, torch.device("cpu"))), parts, Settings(max_new_tokens=1)
    )
    logits = CHUNK * V * (model.dtype.itemsize + 2 * FLOAT_BYTES)  # as the op gives them, widened, and their softmax
    return sum(reading.peak([window - 1] * BATCH)) + logits


class RecipeFit(NamedTuple):
    """A recipe's engine on meta tensors, and what its runs take beside the weights."""

    recipe: Recipe
    engine: Engine
    peak: Peak
    precise_bytes: int  # of the pass at higher precision with its own weights, which it is checked against; else 0

    @property
    def kept_bytes(self) -> int:
        """What the engine holds from one run to the next: its KV cache, and its arena if it has one."""
        return self.peak.kv + (self.peak.activations if self.engine.memory.has_arena else 0)


def check_fit(
    model: Decoder, device: str, workload: Workload, recipes: Sequence[Recipe]
) -> tuple[list[Recipe], list[str]]:
    """The recipes whose runs fit into the memory of `device`, and a remark on each of the others.

    `model` is on that device, or on meta if it is still to be loaded. OutOfMemory is raised if no recipe fits, if the
    baseline does not fit (every output is checked against it), or if the recipes do not fit together.
    """
    there = torch.device(device)
    free = _free_bytes(there, model)
    outline, settings = mapped(model, lambda tensor: tensor.to(META)), Settings(max_new_tokens=workload.new_tokens)
    told = {
        recipe: _fit_of(outline, recipe, workload.lengths, settings, there, free + _held_bytes(model, [recipe]))
        for recipe in (Recipe(), *recipes)
    }
    baseline, entered = told[Recipe()], {recipe: told[recipe] for recipe in recipes}
    if isinstance(baseline, Forecast):
        raise OutOfMemory(
            f"{workload} cannot be timed, since the baseline, which every output is held against, does not run: "
            f"{baseline}"
        )
    remarks = [f"{recipe} is left out: {each}" for recipe, each in entered.items() if isinstance(each, Forecast)]
    fitting = [each for each in entered.values() if isinstance(each, RecipeFit)]
    if entered and not fitting:
        raise OutOfMemory(f"{workload} cannot be timed. {' '.join(remarks)}")
    weights = num_bytes([t for each in (baseline, *fitting) for t in tensors(each.engine.model)])
    check = parity_bytes(outline, workload.lengths, settings)
    captures = any(each.recipe.parts.is_captured for each in fitting)
    needed = weights + workspace_bytes(there, captures) + benchmark_peak(baseline, fitting, check)
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
    """Memory for weights and runs: what is free now, and the weights of `model` if they are on the device already."""
    gc.collect()  # engines that ended in an error or were stopped are cycles
    return free_bytes_of(device) + (0 if model.device.type == "meta" else model.weight_bytes)


def _held_bytes(model: Decoder, recipes: Sequence[Recipe]) -> int:
    """Copies of the weights in other formats that these recipes' passes already hold, and so need not make again."""
    changes = (change for recipe in recipes for change in recipe.parts.weights if isinstance(change, KeepsWeights))
    return 0 if model.device.type == "meta" else num_bytes([t for change in changes for t in change.held(model)])


def _fit_of(
    outline: Decoder, recipe: Recipe, lengths: Sequence[int], settings: Settings, device: torch.device, free: int
) -> RecipeFit | Forecast:
    """The engine and peak of a recipe that fits into `free` bytes on its own, else the forecast of why it does not."""
    engine = Engine(outline, recipe.parts)
    forecaster = Forecaster(engine.tracer, engine.parts, settings)
    peak = forecaster.peak(lengths)
    if engine.model.weight_bytes + workspace_bytes(device, recipe.parts.is_captured) + sum(peak) > free:
        return forecaster.forecast(lengths, device, free)
    changed = bool(recipe.parts.weights)
    return RecipeFit(recipe, engine, peak, parity_bytes(engine.model, lengths, settings).precise if changed else 0)


def benchmark_peak(baseline: RecipeFit, entered: Sequence[RecipeFit], check: ParityBytes) -> int:
    """The peak memory of a benchmark, without weights.

    First the baseline is recorded. Then each recipe is prepared and checked by a second engine, while the engines that
    were prepared before stay. Last, each recipe is timed beside all other engines. The largest of these is the peak.
    """
    found = [check.recorded + max(sum(baseline.peak), check.precise)]
    kept = [each.kept_bytes for each in entered]
    for place, each in enumerate(entered):
        found.append(check.reference + sum(kept) - kept[place] + sum(each.peak))
        if each.engine.parts != Parts():
            beside = check.reference + check.recorded + sum(kept[: place + 1])
            found.append(beside + max(check.widened, sum(each.peak), each.precise_bytes))
    return max(found)


DRAWN_BYTES = 4  # random numbers are drawn on the host in fp32
EXACT_BYTES = 8  # the reference computes in fp64


def check_op_fit(workload: OpWorkload, device: str, dtype: torch.dtype, num_copies: int) -> None:
    """OutOfMemory if the inputs of an op benchmark need more memory than is free.

    Inputs are drawn on the host in fp32. There are `num_copies` of them, and every provider may lay out a copy again.
    On the CPU the fp64 reference is counted too; a GPU that has no memory for it is timed without that check.
    """
    numbers = workload.shape.held_bytes(1)
    host, copies = numbers * (DRAWN_BYTES + dtype.itemsize), 2 * num_copies * numbers * dtype.itemsize
    if device == "cpu":
        host, copies = host + copies + 2 * numbers * EXACT_BYTES, 0
    for where, kind, needed in (("this machine", "cpu", host), ("the GPU", device, copies)):
        if needed > (free := free_bytes_of(torch.device(kind))):
            raise OutOfMemory(
                f"{workload} needs about {needed / GiB:,.1f} GiB, but {where} has {free / GiB:,.1f} GiB free. "
                "Give smaller sizes, or half precision."
            )
