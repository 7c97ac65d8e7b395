"""Notebook 0: this machine, the model, what recipes, techniques and parts are, and two exercises about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from html import escape
from typing import Any

from IPython.display import HTML

from eet_lab.bench.measured import device_name
from eet_lab.devices import default_device
from eet_lab.doctor import diagnose, to_html
from eet_lab.doctor.check import summary
from eet_lab.errors import RecipeError
from eet_lab.figures import theme
from eet_lab.lessons.exercise import Exercise, Wrong, ask, named
from eet_lab.lessons.show import Shown, note, table
from eet_lab.models import Model
from eet_lab.parts import Ops, Parts, replaced
from eet_lab.parts.kv_cache import StaticKV
from eet_lab.technique import Recipe, listed, obstacle, registry
from eet_lab.texts import Output
from eet_lab.words import brief


def machine() -> Shown:
    """What everything will run on, and the doctor's findings in a fold."""
    device, checks = default_device(), diagnose()
    if device == "cuda":
        words, kind = f"GPU: {device_name(device)}. All cells use it.", "good"
    else:
        words = f"CPU mode: {device_name(device)}. All lessons run here; parts that need an NVIDIA GPU say so."
        kind = "warn"
    fold = f"<details><summary>{escape(summary(checks))}</summary>{to_html(checks)}</details>"
    return Shown(note(words, kind), HTML(theme.stylesheet() + fold))


def model_card(model: Model) -> Shown:
    """A model in one line."""
    c = model.config
    return Shown(
        f"{model.name} ({model.label}): {c.num_params / 1e6:.1f} million parameters in {c.num_layers} layers of "
        f"{c.hidden_size} channels and {c.num_heads} heads, {c.vocab_size:,} tokens in its vocabulary, context "
        f"{c.context:,}; {model.dtype} "
        f"on {model.device}."
    )


def texts(output: Output) -> Shown:
    """Each prompt with its continuation, and how fast that was."""
    lines = "".join(
        f'<p class="eet-text">{escape(prompt)}<b>{escape(text)}</b></p>'
        for prompt, text in zip(output.prompts, output.texts, strict=True)
    )
    run = output.run
    return Shown(
        HTML(theme.stylesheet() + lines),
        f"{run.num_tokens:,} tokens in {brief(run.total_ms)} ms, {run.tokens_per_s:,.0f} per second, {output.recipe}.",
    )


def techniques() -> Shown:
    """Every known technique, what it does in a sentence, and why it cannot run here where it cannot."""
    rows, device = [], default_device()
    for name in listed():
        technique = registry()[name]
        one = technique()
        note = obstacle(one, device) or (f"needs {', '.join(one.requires)}" if one.requires else "")
        rows.append([name, one.summary.partition(". ")[0].rstrip(".") + ".", one.numerics, note])
    return Shown(table(["name", "what it does", "numerics", "here"], rows))


def parts_table(*recipes: str | Recipe) -> Shown:
    """What stands in each slot of `Parts`, for the baseline and for the recipes; changes are marked with a star.

    Ops that none of the recipes changes share a line.
    """
    chosen = [recipe if isinstance(recipe, Recipe) else Recipe.parse(recipe) for recipe in recipes]
    changed = [{".".join(slot.split(".")[:2]) for slot in replaced(Parts(), recipe.parts)} for recipe in chosen]
    columns = list(zip((_slots(recipe.parts) for recipe in chosen), changed, strict=True))
    rows = [
        [slot, _called(plain), *("★ " * (slot in own) + _called(parts[slot]) for parts, own in columns)]
        for slot, plain in _slots(Parts()).items()
        if "ops." not in slot or any(slot in own for own in changed)
    ]
    rows.insert(0, ["ops", *["plain PyTorch"] * (1 + len(columns))])
    return Shown(table(["slot", "baseline", *map(str, chosen)], rows))


def _slots(parts: Parts) -> dict[str, Any]:
    """What is in each slot, ops one by one."""
    slots: dict[str, Any] = {}
    for f in fields(parts):
        value = getattr(parts, f.name)
        if isinstance(value, Ops):
            slots |= {f"{f.name}.{op.name}": getattr(value, op.name) for op in fields(value)}
        elif f.name != "weights":
            slots[f.name] = value
    return slots


def _called(part: Any) -> str:
    """A part's name, with what is bound to it."""
    if isinstance(part, partial):
        return f"{_called(part.func)}({', '.join(f'{name}={_called(value)}' for name, value in part.keywords.items())})"
    return getattr(part, "__name__", None) or str(part)


WANTED = "pre_padding,memory_reuse:kv=paged:page=32"


def paged_recipe() -> str:
    """A knob follows its technique after a colon."""
    return WANTED


def _judge_recipe(answer: Callable) -> tuple[str, tuple[Any, ...]]:
    text = ask(answer)
    if not isinstance(text, str):
        raise Wrong(f"return the recipe as text, not {named(text)}.")
    try:
        given = Recipe.parse(text)
    except RecipeError as error:
        raise Wrong(f"this is no recipe: {error}") from error
    wanted = Recipe.parse(WANTED)
    if lacking := [name for name in wanted.names if name not in given.names]:
        raise Wrong(f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not in it.")
    if beside := [name for name in given.names if name not in wanted.names]:
        raise Wrong(f"{' and '.join(beside)} should not be in it.")
    for mine, right in zip(given, wanted, strict=True):
        for field in fields(right):
            if (is_so := getattr(mine, field.name)) != (should := getattr(right, field.name)):
                raise Wrong(f"the knob {field.name} of {right.name} is {named(is_so)}, and should be {should}.")
    return f"The lab reads it as {given}, and that is how it writes it.", ()


recipe_words = Exercise(_judge_recipe, paged_recipe)
"""Write a recipe with a knob."""


def static_cache(parts: Parts) -> Parts:
    """`replace` copies, and changes one field of the copy."""
    return replace(parts, kv_cache=StaticKV)


def _judge_technique(answer: Callable) -> tuple[str, tuple[Any, ...]]:
    for recipe in ("", "pre_padding", "pre_padding,mask_removal"):
        before = Recipe.parse(recipe).parts
        given, case = ask(answer, before), f"With the parts of {recipe or 'the baseline'}"
        if not isinstance(given, Parts):
            raise Wrong(f"{case}: return the new parts, not {named(given)}.")
        if given.kv_cache is not StaticKV:
            raise Wrong(f"{case}: kv_cache is {_called(given.kv_cache)}, and should be StaticKV, the class itself.")
        if others := [slot for slot in replaced(before, given) if slot != "kv_cache"]:
            raise Wrong(
                f"{case}: {', '.join(others)} changed, too. Start from the parts that you are given: other techniques "
                "have changed them already."
            )
    return "It changes one slot and keeps what other techniques have put into the rest.", ()


own_technique = Exercise(_judge_technique, static_cache)
"""Write a technique's `apply`."""
