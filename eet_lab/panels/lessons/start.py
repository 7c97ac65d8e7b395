"""Notebook 0: this machine, the model, and what recipes, techniques and parts are."""

from __future__ import annotations

from dataclasses import fields
from html import escape
from typing import Any

from IPython.display import HTML

from eet_lab.bench.environment import device_name
from eet_lab.doctor import diagnose, to_html
from eet_lab.doctor.check import summary
from eet_lab.models import Model
from eet_lab.models.load import default_device
from eet_lab.panels import theme
from eet_lab.panels.lessons.show import Shown, table
from eet_lab.parts import Ops, Parts
from eet_lab.technique import Recipe, obstacle, registry
from eet_lab.texts import Output


def machine() -> Shown:
    """What everything will run on, and the doctor's findings in a fold."""
    device, checks = default_device(), diagnose()
    if device == "cuda":
        words, kind = f"GPU: {device_name(device)}. All cells use it.", "good"
    else:
        words = f"CPU mode: {device_name(device)}. All lessons run here; what needs an NVIDIA GPU says so."
        kind = "warn"
    fold = f"<details><summary>{escape(summary(checks))}</summary>{to_html(checks)}</details>"
    return Shown(HTML(theme.stylesheet() + theme.note(words, kind) + fold))


def model_card(model: Model) -> Shown:
    """A model in one line."""
    c = model.config
    return Shown(
        f"{model.name} ({model.label}): {c.num_params / 1e6:.1f} million parameters in {c.num_layers} layers of "
        f"{c.hidden_size} channels and {c.num_heads} heads, {c.vocab_size} words, context {c.context}; {model.dtype} "
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
        f"{run.num_tokens} tokens in {run.total_ms:.3g} ms, {run.tokens_per_s:,.0f} a second, with {output.recipe}.",
    )


def techniques(device: str | None = None) -> Shown:
    """Every known technique, what it does in a sentence, and why it cannot run here where it cannot."""
    device = device or default_device()
    rows = []
    for name, technique in registry().items():
        one = technique()
        note = obstacle(one, device) or (f"needs {', '.join(one.requires)}" if one.requires else "")
        rows.append([name, one.summary.partition(". ")[0].rstrip(".") + ".", one.numerics, note])
    return Shown(table(["name", "what it does", "numerics", "here"], rows))


def parts_table(*recipes: str | Recipe) -> Shown:
    """What stands in each slot of `Parts`, for the baseline and for the recipes; changes are marked with a star.

    Ops that none of the recipes changes share a line.
    """
    chosen = [recipe if isinstance(recipe, Recipe) else Recipe.parse(recipe) for recipe in recipes]
    baseline = _slots(Parts())
    columns = [_slots(recipe.parts) for recipe in chosen]
    rows = [
        [slot, name, *(name if c[slot] == name else f"★ {c[slot]}" for c in columns)]
        for slot, name in baseline.items()
        if not slot.startswith("ops.") or any(c[slot] != name for c in columns)
    ]
    rows.insert(0, ["ops", *["plain PyTorch"] * (1 + len(columns))])
    return Shown(table(["slot", "baseline", *map(str, chosen)], rows))


def _slots(parts: Parts) -> dict[str, str]:
    """Every slot, ops one by one, and the name of what is in it."""
    slots: dict[str, str] = {}
    for f in fields(parts):
        value = getattr(parts, f.name)
        if isinstance(value, Ops):
            slots |= {f"ops.{op.name}": _called(getattr(value, op.name)) for op in fields(value)}
        elif f.name != "weights":
            slots[f.name] = _called(value)
    return slots


def _called(part: Any) -> str:
    return getattr(part, "__name__", None) or str(part)


def glossary() -> Shown:
    """The words that the lab uses, one for each idea."""
    return Shown(table(["word", "meaning"], [[word, meaning] for word, meaning in WORDS.items()]))


WORDS = {
    "technique": "one optimization that can be on or off",
    "recipe": "a set of techniques, for example pre_padding,mask_removal",
    "parts": "what an engine is built from; a technique replaces some of them",
    "baseline": "the empty recipe: every part is plain PyTorch",
    "prefill": "the first pass, which reads the prompts (or as much of them as the recipe reads at once)",
    "decode, step": "a later pass: each row reads one token and gets its next one",
    "KV cache": "the keys and values of all tokens so far, so that they are not computed again",
    "left padding, num_pad": "empty columns before a row's first token, so that all rows end in the same column",
    "position": "a token's place in its own sequence, from 0, pads not counted",
    "lifetime": "from a tensor's making to its last use",
    "arena": "one allocation in which many tensors have their places",
    "chunk": "one of several allocations that a pool holds instead of an arena, each with places for many tensors",
    "arrival, ascending": "the order in which chunks are searched for a gap: as they were made, or smallest first. "
    "Tensors go in from the largest to the smallest in both",
    "memory plan": "which tensor lies where in the arena",
    "footprint, peak": "bytes that a plan needs; the most bytes that are in use at once",
    "TTFT": "time to first token: when the last row of the batch has its first one",
    "TPOT": "time per output token after the first: the median over rows",
    "throughput": "tokens a second, all rows together",
    "launch, capture, replay": "starting a GPU kernel; recording many launches; starting them all with one call",
    "roofline": "the most a device can do, given by its arithmetic and by its memory's rate",
    "ablation": "measuring with one technique more, or one less",
    "reference": "what an op means, in plain PyTorch",
}
