"""race: our recipes beside their peers on one workload, in one process, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch

from eet_lab.bench import peers, turns
from eet_lab.bench.measure import Subject
from eet_lab.bench.peers import PEERS
from eet_lab.bench.perplexity import held_out_perplexity
from eet_lab.bench.progress import Tally
from eet_lab.bench.racers import OURS, Ours, Racer, Theirs
from eet_lab.bench.rows import Row, taken
from eet_lab.bench.sameness import Witness
from eet_lab.bench.tables import perplexities
from eet_lab.bench.workloads import Workload
from eet_lab.engine.settings import Settings, checked_prompts
from eet_lab.errors import PromptError, did_you_mean
from eet_lab.models import Model
from eet_lab.monitor import open_source
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
from eet_lab.texts import as_recipe
from eet_lab.threads import on_cpu_threads

PROVIDERS = (OURS, *PEERS)


@on_cpu_threads
def race(
    model: Model,
    workload: Workload,
    recipes: Sequence[str] = ("all",),
    providers: Sequence[str] = (OURS,),
    *,
    repeats: int = 3,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> tuple[list[Row], list[str]]:
    """Time each recipe (if "eet_lab" is among the providers) and each peer, A, B, ..., A, B, ..., on random prompts.

    Returns a row for each, and remarks: which peers could not run and why, and what makes a timing doubtful. All are
    prepared and their output is checked before anything is timed.
    Errors: RecipeError, PromptError, OutOfMemory, Cancelled.
    """
    turns.check_repeats(repeats)
    for name in providers:
        if name not in PROVIDERS:
            hint = did_you_mean(name, PROVIDERS)
            known = f"{', '.join(PROVIDERS)}; single ops (op:...) have others"
            raise PromptError(f"There is no provider {name!r}.{hint} Known ones: {known}.")
    chosen = [as_recipe(each, model.device) for each in (recipes if OURS in providers else ())]
    settings = Settings(max_new_tokens=workload.new_tokens)
    rows = checked_prompts(workload.prompts(model.config.vocab_size), workload.new_tokens, model.config)
    others, remarks = turns.split({name: PEERS[name].unavailable(model.device) for name in providers if name in PEERS})
    if not chosen and not others:
        why = "; ".join(remarks) or "no recipe is given"
        raise PromptError(f"Nothing is left to time: {why}. Add {OURS}, or others.")
    tally = Tally(1 + (len(chosen) + len(others)) * (1 + repeats), progress)
    tally.say("reading what the baseline says")
    witness = Witness(model.decoder, rows, settings, cancel=cancel)
    tally.finish()
    with closing(open_source(model.device)) as source:
        ours = [Ours(Subject(model, recipe, rows, settings, source, cancel), recipe, model, rows) for recipe in chosen]
        made, absent = peers.make(others, model.decoder, rows, settings)
        theirs = [Theirs(peer, model, rows) for peer in made]
        racers: list[Racer] = [*ours, *theirs]
        try:
            ready, failed = _prepared(racers, witness, tally, cancel)
            turns.time_in_turn(ready, repeats, tally, cancel)
            shared = {"workload": str(workload), "dtype": model.dtype} | taken(model.device)
            found = [Row(**shared, **racer.figures()) for racer in ready]
        finally:
            for racer in racers:
                racer.close()
    doubts = [f"{each.name}: {warning}" for each in ours for warning in each.warnings]
    quality = _quality(model, chosen, tally, cancel)  # once the racers' memory is free again
    return found, [*remarks, *turns.split(absent)[1], *failed, *quality, *dict.fromkeys(doubts)]


def _quality(model: Model, recipes: Sequence[Recipe], tally: Tally, cancel: Cancel | None) -> list[str]:
    """What lossy recipes did to the perplexity of a held-out text, or why that cannot be told."""
    lossy = [recipe for recipe in recipes if recipe.lossy]
    if not lossy:
        return []
    tally.say("comparing perplexities on held-out text")
    before = held_out_perplexity(model, Recipe(()), cancel)
    return [f"{each}: {perplexities(before, held_out_perplexity(model, each, cancel))}" for each in lossy]


def _prepared(
    racers: Sequence[Racer], witness: Witness, tally: Tally, cancel: Cancel | None
) -> tuple[list[Racer], list[str]]:
    """Those that are ready, and why the others are not. Ours raise; a peer that fails is left out."""
    ready, failed = [], []
    for racer in racers:
        turns.check(cancel)
        tally.say(f"preparing {racer.name}")
        try:
            racer.prepare(witness, tally.building)
            ready.append(racer)
        except Exception as error:
            if not isinstance(racer, Theirs):
                raise
            failed.append(turns.failed(racer.name, error))
            torch._dynamo.reset()
        tally.finish()
    return ready, failed
