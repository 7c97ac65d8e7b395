"""generate: text in, text out, with a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eet_lab.engine.generation import Generation, StepEvent
from eet_lab.engine.seq2seq import engine_of
from eet_lab.engine.settings import Settings
from eet_lab.errors import PromptError, RecipeError
from eet_lab.models import Config, Model
from eet_lab.models.on_device import on_its_generators_device
from eet_lab.models.transcript import ended_by
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe, Technique, check_runnable, named

Prompts = Sequence[str | list[int]] | str


@dataclass(frozen=True)
class Output:
    """What each prompt became, and the run behind it."""

    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    recipe: Recipe
    run: Generation


RecipeLike = str | Recipe | Technique | Sequence[str | Technique]
"""A recipe: itself, its words ("pre_padding,mask_removal", "all"), or a list of words and techniques, each of
which stands in place of the one that "all" means."""


def as_recipe(recipe: RecipeLike, device: str, config: Config | None = None) -> Recipe:
    """What the user gave as a recipe, checked against the device and the model; RecipeError for what is none."""
    techniques = _techniques(recipe, device, config)
    check_runnable(techniques, device, config)  # first: what it requires need not be turned on where it cannot run
    return Recipe(techniques)


def read_recipe(recipe: RecipeLike, device: str) -> Recipe:
    """The same unchecked: it may hold techniques that cannot run on the device."""
    return Recipe(_techniques(recipe, device))


def _techniques(recipe: RecipeLike, device: str, config: Config | None = None) -> tuple[Technique, ...]:
    if isinstance(recipe, Recipe):
        return recipe.techniques
    given = [recipe] if isinstance(recipe, (str, Technique)) else recipe
    if not isinstance(given, Sequence) or not all(isinstance(each, (str, Technique)) for each in given):
        raise RecipeError(
            f"recipe is {recipe!r}, but it must be words such as 'all' or 'pre_padding,mask_removal', a list of "
            "them, or a Recipe; '' is the baseline."
        )
    text = ",".join(each for each in given if isinstance(each, str))
    own = [each for each in given if isinstance(each, Technique)]
    by_name = {word.split(":")[0].strip() for word in text.split(",")}
    replaced = {t.name for t in own} - by_name  # of those that `all` stands for
    return (*(t for t in named(text, device, config) if t.name not in replaced), *own)


def as_rows(model: Model, prompts: Prompts) -> list[list[int]]:
    """One prompt or several as token ids; PromptError for what is neither."""
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise PromptError(
            f"prompts is {prompts!r:.60}, but it must be a text, or a list of texts or lists of token ids."
        )
    return [model.encode(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]


@on_its_generators_device
def generate(
    model: Model,
    prompts: Prompts,
    recipe: RecipeLike = "all",
    *,
    stop_at_eos: bool = True,
    on_step: Callable[[StepEvent], None] | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    **settings: Any,
) -> Output:
    """Continue the prompts (texts, or lists of token ids), and return texts with their timing.

    An encoder-decoder answers them, each from its beginning.

    `progress` is told of the kernels that are built first, if any. `cancel` ends the run at its next step, and what is
    there is kept. `settings` are those of `Settings` (max_new_tokens, temperature, top_k, top_p, seed, stop, logprobs).

    Errors: PromptError, RecipeError, KernelBuildError, OutOfMemory, and Cancelled where kernels were still being built.
    """
    rows, how = as_rows(model, prompts), Settings.of(**settings)
    if stop_at_eos:
        how = replace(how, stop=(*how.stop, *model.config.ends))
    chosen = as_recipe(recipe, model.device, model.config)
    engine = engine_of(model.generator, chosen.parts)
    try:
        engine.prepare(progress, cancel)
        run = engine.generate(rows, how, on_step=on_step, cancel=cancel)
    finally:
        engine.close()
    texts = map(ended_by(how.stop, model.decode), run.tokens)
    return Output(tuple(map(model.decode, rows)), tuple(texts), chosen, run)
