"""What Compare needs, foreseen: two engines that stay side by side, and the check that comes before the timing.

B rows, S tokens of the longest prompt, N generated tokens that are checked, V words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eet_lab.bench.cost import NUM_BYTES
from eet_lab.bench.perplexity import BATCH, CHUNK, WINDOW, Scorer, why_not
from eet_lab.bench.precise import reference_logits
from eet_lab.bench.sameness import num_checked
from eet_lab.engine.engine import Engine
from eet_lab.engine.forecast import LIBRARY_BYTES, Forecaster, Peak
from eet_lab.engine.rehearse import Rehearser
from eet_lab.engine.settings import Settings
from eet_lab.models import Model
from eet_lab.models.decoder import Decoder
from eet_lab.parts.prompts import right_aligned
from eet_lab.technique import Recipe

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


def foresee_compare(model: Model, lengths: Sequence[int], recipe: Recipe, settings: Settings) -> CompareForecast:
    """What comparing `recipe` to the baseline will need, for prompts of these lengths.

    Rehearsed on meta tensors, so that nothing is computed. What the engines keep is counted as what their runs take,
    less the copies of a KV cache that grows: that is too much where activations are fresh tensors, and never too few.
    """
    engines = [Engine(model.decoder, each.parts) for each in (Recipe(), recipe)]
    before, after = (Forecaster(each.rehearser, each.parts, settings).peak(lengths) for each in engines)
    check = _check_bytes(engines, lengths, settings, (before, after))
    if recipe.lossy and not why_not(model):
        check = max(check, *(_text_bytes(each) for each in engines))
    if model.device == "cpu":  # on a GPU it takes what is there
        check = max(check, NUM_BYTES["cpu"])
    weights = {str(each.parts.weights): each.model.weight_bytes for each in engines}  # shared where they are the same
    return CompareForecast(
        engine_bytes=sum(weights.values()) + sum(peak.kv + peak.activations for peak in (before, after)),
        check_bytes=check,
        workspace_bytes=0 if model.device == "cpu" else LIBRARY_BYTES,
    )


def _check_bytes(
    engines: Sequence[Engine], lengths: Sequence[int], settings: Settings, peaks: tuple[Peak, Peak]
) -> int:
    """At the most of: the baseline that is recorded, the pass at higher precision, the recipe with forced tokens."""
    check = witness_bytes(engines[0].rehearser.model, lengths, settings)
    kept = check.reference if engines[1].parts.weights else 0  # other weights have a check of their own, inside this
    return check.recorded + max(
        kept + sum(peaks[0]),
        kept + check.precise,
        check.reference + max(check.widened, sum(peaks[1])),
    )


class WitnessBytes(NamedTuple):
    """What the check of the output holds, beside the engines that run: the logits that it `recorded` of one, and of the
    `precise` pass (its peak) the `reference` that stays; `widened` is taken while the two are held together.
    """

    recorded: int
    precise: int
    reference: int
    widened: int


def witness_bytes(model: Decoder, lengths: Sequence[int], settings: Settings) -> WitnessBytes:
    """Of a model on meta."""
    B = len(lengths)
    N, V = num_checked(settings, B), len(model.head.weight)
    rows = [[model.config.bos_id] * length for length in lengths]
    tokens = [[model.config.bos_id] * N] * B
    with _Alive() as alive:
        reference = reference_logits(model, rows, tokens, N)
    row = 3 * reference[0].nbytes  # widened, subtracted, and its absolute values
    return WitnessBytes(B * (N + 1) * V * model.dtype.itemsize, alive.peak_bytes, reference.nbytes, row)


def _text_bytes(engine: Engine) -> int:
    """Of reading held-out text, as `perplexity` does."""
    model = engine.rehearser.model
    window, V = min(model.config.context, WINDOW), len(model.head.weight)
    parts = replace(engine.parts, prompts=right_aligned, schedule=None)
    reading = Forecaster(
        Rehearser(engine.model, parts, Scorer(parts.ops, torch.device("cpu"))), parts, Settings(max_new_tokens=1)
    )
    logits = CHUNK * V * (model.dtype.itemsize + 2 * FLOAT_BYTES)  # as the op gives them, widened, and their softmax
    return sum(reading.peak([window - 1] * BATCH)) + logits


class _Alive(TorchDispatchMode):
    """While it is entered: the most bytes at once of all storages that operators have made."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in given:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._alive.values()))
        return result


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
