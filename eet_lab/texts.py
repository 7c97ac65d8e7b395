"""generate: text in, text out, with a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eet_lab.engine.engine import Engine
from eet_lab.engine.generation import Generation, StepEvent
from eet_lab.engine.settings import Settings
from eet_lab.models import Model
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
from eet_lab.threads import on_cpu_threads


@dataclass(frozen=True)
class Output:
    """What each prompt became, and the run behind it."""

    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    recipe: Recipe
    run: Generation


def as_recipe(recipe: str | Recipe, device: str) -> Recipe:
    """A recipe from its words or itself, checked against the device."""
    return (Recipe.parse(recipe, device) if isinstance(recipe, str) else recipe).check(device)


@on_cpu_threads
def generate(
    model: Model,
    prompts: Sequence[str | list[int]] | str,
    recipe: str | Recipe = "all",
    *,
    stop_at_eos: bool = True,
    on_step: Callable[[StepEvent], None] | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    **settings: Any,
) -> Output:
    """Continue the prompts (texts, or lists of token ids) and return texts with their timing.

    `progress` is told of the kernels that are built first, if any. `cancel` ends the run at its next step, and what is
    there is kept. `settings` are those of `Settings` (max_new_tokens, temperature, top_k, top_p, seed, stop).

    Errors: PromptError, RecipeError, KernelBuildError, OutOfMemory, and Cancelled where kernels were still being built.
    """
    rows = [model.encode(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
    chosen = Settings(**settings)
    if stop_at_eos and model.config.eos_id is not None:
        chosen = replace(chosen, stop=(*chosen.stop, model.config.eos_id))
    recipe = as_recipe(recipe, model.device)
    engine = Engine(model.decoder, recipe.parts)
    try:
        engine.prepare(progress, cancel)
        run = engine.generate(rows, chosen, on_step=on_step, cancel=cancel)
    finally:
        engine.close()
    ended = [row[:-1] if why == "stop" else row for row, why in zip(run.tokens, run.finish, strict=True)]
    return Output(tuple(map(model.decode, rows)), tuple(map(model.decode, ended)), recipe, run)
