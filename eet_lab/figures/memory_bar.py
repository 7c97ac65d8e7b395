"""Memory as one bar of named parts: what a device holds now, and what a run would make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from eet_lab.figures import theme
from eet_lab.words import sized


class Part(NamedTuple):
    """A stretch of the bar. `why` is its tooltip."""

    name: str
    num_bytes: float
    color: str
    why: str = ""


WEIGHTS, KV, ARENA = "#94a3b8", theme.SELECTION, "#f59e0b"
REST, SPARE, OTHERS, FREE = "#a855f7", "#ec4899", "#64748b", "transparent"


def bar(parts: Sequence[Part], limit_bytes: float = 0) -> str:
    """The bar, and below it each part's name and size; a part of nothing is left out.

    `limit_bytes` is marked where the parts run past it.
    """
    state, stretches, names = bar_state(parts, limit_bytes), "", ""
    for part in state["parts"]:
        name, color, tip = escape(part["name"]), part["color"], escape(part["tip"])
        told = f"{name}: {part['size']}{'; ' + tip if tip else ''}"
        stretches += f'<i style="width:{100 * part["share"]:.3f}%;background:{color}" title="{told}"></i>'
        names += f'<span title="{tip}"><i style="background:{color}"></i>{name} <b>{part["size"]}</b></span>'
    if (share := state["limit_share"]) is not None:
        tip = f"free memory ends here: {sized(limit_bytes)}"
        stretches += f'<u style="left:{100 * share:.3f}%" title="{tip}"></u>'
    return f'<div class="eet-stack"><div class="eet-stack-bar">{stretches}</div><div>{names}</div></div>'


def bar_state(parts: Sequence[Part], limit_bytes: float = 0) -> dict[str, Any]:
    """The same bar as plain values: each part's share of the whole, its size in words, its colour and tooltip."""
    parts = [part for part in parts if part.num_bytes > 0]
    total = sum(part.num_bytes for part in parts) or 1
    shown = [
        {
            "name": part.name, "size": sized(part.num_bytes), "share": round(part.num_bytes / total, 5),
            "color": part.color, "tip": part.why,
        }
        for part in parts
    ]  # fmt: skip
    return {"parts": shown, "limit_share": limit_bytes / total if 0 < limit_bytes < total else None}


def held_now(values: Mapping[str, float]) -> list[Part]:
    """The lines of the live chart as what lies between them, from the plan up to what the device counts.

    `values` are those of a `Sample`; whatever is not known is left out, and what cannot be told apart stays together.
    """
    weights, planned = values.get("weights_bytes", 0.0), values.get("planned_bytes", 0.0)
    plan = "the plan: the KV cache and the arena of the engine that runs"
    parts = [
        Part("weights", weights, WEIGHTS, "the model"), Part("KV cache and activations", planned, ARENA, plan),
    ]  # fmt: skip
    below = weights + planned
    for metric, name, color, why in LEVELS:
        if metric in values:
            parts.append(Part(name, max(values[metric] - below, 0), color, why))
            below = max(values[metric], below)
    return parts


LEVELS = (
    (
        "torch_allocated_bytes", "more of torch's", REST,
        "torch allocated, less the plan: temporaries of PyTorch's functions, workspaces of cuBLAS, tensors of other "
        "engines and models",
    ),
    (
        "torch_reserved_bytes", "spare in torch's cache", SPARE,
        "torch reserved, less allocated: freed tensors that its caching allocator keeps, and the ends of its blocks",
    ),
    (
        "memory_used_bytes", "context, libraries, other programs", OTHERS,
        "NVML's used, less what torch reserved: the CUDA context, loaded kernels, libraries, and other programs",
    ),
    (
        "process_rss_bytes", "Python, PyTorch and the rest of this process", OTHERS,
        "the process's resident memory, less the plan: code, libraries, and what the C allocator keeps",
    ),
)  # fmt: skip
"""What each counter counts beyond the one below it."""
