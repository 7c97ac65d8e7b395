"""benchmark: our recipes beside their peers on one workload, in one process, interleaved."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from eet_lab.bench import peers, timing
from eet_lab.bench.fit import check_fit
from eet_lab.bench.measure import Subject
from eet_lab.bench.parity import ParityCheck
from eet_lab.bench.peers import PEERS
from eet_lab.bench.perplexity import held_out_perplexity
from eet_lab.bench.providers import OURS, PeerProvider, Provider, RecipeProvider, named
from eet_lab.bench.rows import Row, taken
from eet_lab.bench.tables import perplexities
from eet_lab.bench.timing import Tally
from eet_lab.bench.workloads import Requests, Texts, Workload
from eet_lab.engine.settings import Settings, checked_prompts
from eet_lab.errors import PromptError
from eet_lab.models import Config, Model
from eet_lab.models.on_device import on_its_device
from eet_lab.monitor import open_source
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe, Technique
from eet_lab.texts import RecipeLike, as_recipe

PROVIDERS = (OURS, *PEERS)


@on_its_device
def benchmark(
    model: Model,
    workload: Workload | str,
    recipes: RecipeLike | Sequence[RecipeLike] = ("all",),
    providers: Sequence[str] | str = (OURS,),
    *,
    repeats: int = 3,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> tuple[list[Row], list[str]]:
    """Time each recipe (if "eet_lab" is among the providers) and each peer, A, B, ..., A, B, ..., on random prompts.

    `workload` may be its name, and must be one of `model`; `recipes` are one or several, each as `as_recipe` takes it.
    Returns a row for each, and remarks: which peers could not run and why, which recipes do not fit into memory, and
    what makes a timing doubtful. All are prepared and their output is checked before anything is timed.
    What lossy recipes did to the perplexity of a held-out text is a remark too, read once all is timed.
    Errors, before any work: RecipeError, PromptError, OutOfMemory where nothing fits; then OutOfMemory, Cancelled.
    """
    timing.check_repeats(repeats)
    workload = Workload.parse(workload) if isinstance(workload, str) else workload
    check_is_of(workload, model)
    chosen, others, remarks, rows = entered(model, workload, recipes, providers, model.device)
    tally = Tally(1 + (len(chosen) + len(others)) * (1 + repeats), progress)
    found, told, doubts = _timed(model, workload, chosen, others, rows, repeats, tally, cancel)
    quality = _quality(model, chosen, tally, cancel)  # nothing of what was timed is in memory any more
    return found, [*remarks, *told, *quality, *doubts]


class Entries(NamedTuple):
    """Who is to be timed, why others are not, and the prompts."""

    recipes: list[Recipe]
    peers: list[str]
    remarks: list[str]
    rows: list[list[int]]


def entered(
    model: Model,
    workload: Workload,
    recipes: RecipeLike | Sequence[RecipeLike],
    providers: Sequence[str] | str,
    device: str,
) -> Entries:
    """Who of those that are named takes part on `device`, told before any work; `model` may be shapes on meta.

    Errors: those of `benchmark` that come before any work.
    """
    providers = named(providers, PROVIDERS, beside="; single ops (op:...) have others")
    chosen, repeated = distinct(recipes, device, model.config) if OURS in providers else ([], [])
    rows = checked_prompts(workload.prompts(model.config.vocab_size), Settings(workload.new_tokens), model.config)
    peers = {name: PEERS[name].unavailable(device, model.config) for name in providers if name in PEERS}
    others, absent = timing.split(peers)
    if not chosen and not others:
        why = "; ".join(absent) or "no recipe is given"
        raise PromptError(f"Nothing is left to time: {why}. Add {OURS}, or others.")
    fitting, too_large = check_fit(model.decoder, device, workload, chosen)
    return Entries(fitting, others, [*absent, *repeated, *too_large], rows)


def check_is_of(workload: Workload | Requests | Texts, model: Model) -> None:
    """PromptError where a workload names another model than the one that is there: its rows would tell a lie.

    A live model came without a name, so that it goes by any.
    """
    names = (model.name, model.label, Path(model.name).name)
    if model.kind != "live" and workload.model not in names and Path(workload.model).resolve().name != model.name:
        raise PromptError(
            f"{workload} is a workload of {workload.model!r}, but the model is {model.name!r}. Load "
            f"that model, or name {replace(workload, model=model.name)}."
        )


def distinct(
    recipes: RecipeLike | Sequence[RecipeLike], device: str, config: Config | None = None
) -> tuple[list[Recipe], list[str]]:
    """Each recipe once, and a remark on those that are the same in other words. Errors: those of `as_recipe`."""
    given = [recipes] if isinstance(recipes, (str, Recipe, Technique)) else recipes
    words: dict[Recipe, list[str]] = {}
    for each in given:
        words.setdefault(as_recipe(each, device, config), []).append(repr(str(each)))
    remarks = [
        f"{recipe} was given {len(said)} times, as {' and '.join(said)}: it is timed once."
        for recipe, said in words.items()
        if len(said) > 1
    ]
    return list(words), remarks


def _timed(
    model: Model,
    workload: Workload,
    recipes: Sequence[Recipe],
    others: Sequence[str],
    rows: list[list[int]],
    repeats: int,
    tally: Tally,
    cancel: Cancel | None,
) -> tuple[list[Row], list[str], list[str]]:
    """A row for each who could be prepared, why others could not, and what makes a time doubtful."""
    settings = Settings(max_new_tokens=workload.new_tokens)
    check = ParityCheck(model.decoder, rows, settings, cancel=cancel, say=tally.say)
    tally.finish()
    with closing(open_source(model.device)) as source:
        subjects = [Subject(model, recipe, rows, settings, source, cancel) for recipe in recipes]
        ours = [RecipeProvider(each, recipe, model, rows) for each, recipe in zip(subjects, recipes, strict=True)]
        made, absent = peers.make(others, model.decoder, rows, settings)
        providers: list[Provider] = [*ours, *(PeerProvider(peer, model, rows) for peer in made)]
        try:
            ready, failed = _prepared(providers, check, tally, cancel)
            runs = timing.interleaved({each.name: each.time for each in ready}, repeats, tally, cancel)
            shared = {"workload": str(workload), "dtype": model.dtype}
            found = [taken(model.device, **shared, **each.figures(runs[each.name])) for each in ready]
        finally:
            for each in providers:
                each.close()
    doubts = dict.fromkeys(f"{each.name}: {warning}" for each in ours for warning in each.warnings)
    return found, [*timing.split(absent)[1], *failed], list(doubts)


def _quality(model: Model, recipes: Sequence[Recipe], tally: Tally, cancel: Cancel | None) -> list[str]:
    """What lossy recipes did to the perplexity of a held-out text, or why that cannot be told.

    Nothing that happens here loses what was timed.
    """
    lossy = [recipe for recipe in recipes if recipe.lossy]
    if not lossy:
        return []
    tally.say("comparing perplexities on held-out text")
    before, told = None, []
    for recipe in lossy:
        try:
            before = before or held_out_perplexity(model, Recipe(()), cancel)
            told.append(f"{recipe}: {perplexities(before, held_out_perplexity(model, recipe, cancel))}")
        except Exception as problem:  # noqa: BLE001  a user's own op may raise anything
            told.append(f"{recipe}: perplexity is not told. {problem}")
    return told


def _prepared(
    providers: Sequence[Provider], check: ParityCheck, tally: Tally, cancel: Cancel | None
) -> tuple[list[Provider], list[str]]:
    """Those that are ready, and why the others are not. Ours raise; a peer that fails is left out."""
    ready, failed = [], []
    for each in providers:
        timing.check(cancel)
        tally.say(f"preparing {each.name}")
        try:
            each.prepare(check, tally.building)
            ready.append(each)
        except Exception as error:
            if not isinstance(each, PeerProvider):
                raise
            failed.append(timing.failed(each.name, error))
            torch._dynamo.reset()
        tally.finish()
    return ready, failed
