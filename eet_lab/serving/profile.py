"""profile: measure how long a model's passes take, by what they read, into a cost table. Seconds, once a machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import eet_lab
from eet_lab.bench.measured import device_name, versions
from eet_lab.bench.timing import check_repeats
from eet_lab.errors import CostError
from eet_lab.models import Model
from eet_lab.models.on_device import checked_model
from eet_lab.paths import PACKAGE, cache_dir, is_clone
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.cost import CostTable, Provenance
from eet_lab.scheduling.cost_files import load_cost, save_cost
from eet_lab.serving.options import DECODER_RECIPE, ENCODER_RECIPE
from eet_lab.serving.profile_passes import (
    REPEATS,
    decoder_axes,
    encoder_axes,
    filled_decoder,
    filled_encoder,
    measured_decoder,
    measured_encoder,
)
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike, as_recipe


def profile(
    model: Model,
    recipe: RecipeLike | None = None,
    *,
    axes: Sequence[Sequence[int]] | None = None,
    repeats: int = REPEATS,
    note: str = "",
    fresh: bool = False,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> CostTable:
    """The cost table of a model under a recipe: measured, or what was measured before in the user's cache folder.

    `axes` are what is measured: lengths and batches of an encoder; extras, rows and columns of a decoder, as
    `DecoderCost` names them. None: powers up to the model's context and the recipe's rows and budget. Each time is the
    median of `repeats`; of a decoder on a GPU there are two, the device's and the host's. A table is kept by the
    model's name and shape, recipe, device, commit (or what pip installed) and axes; `fresh` measures it again, as does
    code that differs from its commit. Errors: RecipeError for a decoder's recipe without continuous batching; CostError
    for axes that the model cannot run; OutOfMemory; Cancelled.
    """
    check_repeats(repeats)
    chosen = _chosen(model, recipe)
    decodes, source = model.config.stage == "generate", _source(model, chosen, note)
    wanted = [tuple(axis) for axis in (_usual_axes(model, chosen, repeats) if axes is None else axes)]
    if len(wanted) != (3 if decodes else 2):
        raise CostError(f"There are {len(wanted)} axes, but a table of {model.name} has {3 if decodes else 2}.")
    code = _code(source.commit)
    kept = None if code is None else _place(model, source, code, wanted, repeats)
    if kept is not None and not fresh and kept.exists():
        with suppress(CostError):
            return load_cost(kept)
    measure = measured_decoder if decodes else measured_encoder
    table: CostTable = measure(model, chosen, wanted, source, repeats, progress, cancel)
    if kept is not None:
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        save_cost(table, kept)
    return table


def unmeasured(model: Model, recipe: RecipeLike | None = None) -> CostTable:
    """The table that `profile` would measure, as if each pass took 1 ms: it tells what would be beyond the real one.

    Errors: RecipeError, as `profile`.
    """
    chosen = _chosen(model, recipe)
    axes, source = _usual_axes(model, chosen, REPEATS), _source(model, chosen, "")
    return filled_decoder(axes, source) if model.config.stage == "generate" else filled_encoder(axes, source)


def _chosen(model: Model, recipe: RecipeLike | None) -> Recipe:
    usual = DECODER_RECIPE if checked_model(model).config.stage == "generate" else ENCODER_RECIPE
    return as_recipe(usual if recipe is None else recipe, model.device, model.config)


def _usual_axes(model: Model, recipe: Recipe, repeats: int) -> tuple[tuple[int, ...], ...]:
    return decoder_axes(model, recipe, repeats) if model.config.stage == "generate" else encoder_axes(model)


def _source(model: Model, recipe: Recipe, note: str) -> Provenance:
    known = versions(model.device)
    del known["transformers"]
    where = {"device": device_name(model.device), "dtype": model.dtype, "eet_lab": eet_lab.__version__}
    return Provenance(model.name, str(recipe), **where, **known | {"torch": str(known["torch"])}, note=note)


def _code(commit: str | None) -> str | None:
    """What tells this code from other code: a clone's commit, or what pip installed; None where files may differ."""
    if is_clone():
        return None if commit is None or commit.endswith("+") else commit
    try:
        installed = metadata.distribution("eet_lab")
    except metadata.PackageNotFoundError:
        return None
    record = installed.read_text("RECORD") if Path(str(installed.locate_file("eet_lab"))) == PACKAGE else None
    return hashlib.blake2b(record.encode(), digest_size=10).hexdigest() if record else None


def _place(model: Model, source: Provenance, code: str, axes: Any, repeats: int) -> Path:
    """Where the table is kept. Its model's shape is part of that: two folders may have one name."""
    shape = repr(model.config)
    told = [source.model, shape, source.recipe, source.device, source.dtype, code, source.torch, source.note]
    digest = hashlib.blake2b(json.dumps([*told, axes, repeats]).encode(), digest_size=10).hexdigest()
    return cache_dir() / "cost" / f"{digest}.json"
