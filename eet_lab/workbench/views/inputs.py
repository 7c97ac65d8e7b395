"""Prompts, settings of a generation, and whether it fits: three folds, each with a line that tells its content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eet_lab.words import counted, plain
from eet_lab.workbench.choices import MOST_PROMPTS, State

FIELDS = (
    ("max_new_tokens", "New tokens", "For every prompt.", 1),
    ("temperature", "Temperature", "0 is greedy: always the most likely token.", 0.1),
    ("top_k", "Top-k", "Sample from this many tokens, the most likely ones; 0: no limit.", 1),
    ("top_p", "Top-p", "Sample from the most likely tokens whose probabilities sum to this; 1: no limit.", 0.05),
    ("seed", "Seed", "The same seed gives the same samples.", 1),
    (
        "repeats",
        "Pairs of runs",
        "How many times Compare and Ladder time each recipe; 0: until the interval is narrow.",
        1,
    ),
)


def inputs_state(
    state: State, lengths: Sequence[int] | None, context: int | None, fits: Mapping[str, Any], read_only: bool
) -> dict[str, Any]:
    """`lengths` are the prompts' tokens, None before a model is there."""
    return {
        "prompts": _prompts(state, lengths, context),
        "generation": _generation(state),
        "fits": dict(fits),
        "read_only": read_only,
    }


def _prompts(state: State, lengths: Sequence[int] | None, context: int | None) -> dict[str, Any]:
    new = state.generation["max_new_tokens"]
    new = new if isinstance(new, int) else 0
    known: Sequence[int | None] = lengths or [None] * len(state.prompts)
    over = [length is not None and context is not None and length + new > context for length in known]
    rows = [
        {"text": text, "tokens": length, "over": too_long}
        for text, length, too_long in zip(state.prompts, known, over, strict=True)
    ]
    summary, longest = _told(lengths), max(lengths or [0])
    total = f"Longest {longest:,} + {new:,} new = {longest + new:,} of {context:,}" if lengths and context else ""
    return {
        "summary": f"{summary}: too long" if any(over) else summary,
        "kind": "bad" if any(over) else "plain",
        "rows": rows,
        "sum": total,
        "share": min((longest + max(new, 0)) / context, 1.0) if context else 0.0,
        "most": MOST_PROMPTS,
    }


def _told(lengths: Sequence[int] | None) -> str:
    if not lengths:
        return "none" if lengths is not None else ""
    longest = max(lengths)
    pads = sum(longest - length for length in lengths)
    span = counted(longest, "token") if min(lengths) == longest else f"{min(lengths):,} to {counted(longest, 'token')}"
    return f"{len(lengths):,}, {span}, {counted(pads, 'pad')} as a rectangle"


def _generation(state: State) -> dict[str, Any]:
    values = {**state.generation, "repeats": state.repeats}
    temperature = values["temperature"]
    shown = plain(temperature) if isinstance(temperature, int | float) else temperature  # an empty field is ""
    how = "greedy" if temperature == 0 else f"temperature {shown}, seed {values['seed']}"
    fields = [
        {"name": name, "label": label, "help": help, "value": values[name], "step": step}
        for name, label, help, step in FIELDS
    ]
    return {
        "summary": f"{values['max_new_tokens']} new, {how}",
        "fields": fields,
        "stop": {
            "value": state.stop_at_eos,
            "label": "Stop at the end of a text",
            "help": "A row ends at the model's end-of-text token.",
        },
    }
