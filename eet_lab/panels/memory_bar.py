"""Memory as one bar of named parts: what a device holds now, and what a run would make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from eet_lab.panels import theme
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
    parts = [part for part in parts if part.num_bytes > 0]
    total = sum(part.num_bytes for part in parts) or 1
    stretches = "".join(
        f'<i style="width:{100 * part.num_bytes / total:.3f}%;background:{part.color}" title="{_tip(part)}"></i>'
        for part in parts
    )
    names = "".join(
        f'<span title="{escape(part.why)}"><i style="background:{part.color}"></i>{escape(part.name)} '
        f"<b>{sized(part.num_bytes)}</b></span>"
        for part in parts
    )
    if 0 < limit_bytes < total:
        tip = f"here ends what is free: {sized(limit_bytes)}"
        stretches += f'<u style="left:{100 * limit_bytes / total:.3f}%" title="{tip}"></u>'
    return f'<div class="eet-stack"><div class="eet-stack-bar">{stretches}</div><div>{names}</div></div>'


def held_now(values: Mapping[str, float]) -> list[Part]:
    """The lines of the live chart as what lies between them, from the plan up to what the device counts.

    `values` are those of a `Sample`; whatever is not known is left out, and what cannot be told apart stays together.
    """
    weights, planned = values.get("weights_bytes", 0.0), values.get("planned_bytes", 0.0)
    parts = [
        Part("weights", weights, WEIGHTS, "the model"),
        Part(
            "KV cache and activations", planned, ARENA, "the plan: the KV cache and the arena of the engine that runs"
        ),
    ]
    below = weights + planned
    for metric, name, color, why in LEVELS:
        if metric in values:
            parts.append(Part(name, max(values[metric] - below, 0), color, why))
            below = max(values[metric], below)
    return parts


LEVELS = (
    (
        "torch_allocated_bytes",
        "more of torch's",
        REST,
        "torch allocated, less the plan: temporaries of PyTorch's functions, workspaces of cuBLAS, tensors of other "
        "engines and models",
    ),
    (
        "torch_reserved_bytes",
        "spare in torch's cache",
        SPARE,
        "torch reserved, less allocated: freed tensors that its caching allocator keeps, and the ends of its blocks",
    ),
    (
        "memory_used_bytes",
        "context, libraries, other programs",
        OTHERS,
        "NVML's used, less what torch reserved: the CUDA context, loaded kernels, libraries, and whoever else is there",
    ),
    (
        "process_rss_bytes",
        "Python, PyTorch and the rest of this process",
        OTHERS,
        "the process's resident memory, less the plan: code, libraries, and what the C allocator keeps",
    ),
)
"""What each counter counts beyond the one below it."""


def _tip(part: Part) -> str:
    return escape(f"{part.name}: {sized(part.num_bytes)}{'; ' + part.why if part.why else ''}")
