"""What TurboTransformers' last version counts as well, and the sizes that BERT base really has."""

from __future__ import annotations

from dataclasses import replace

from eet_lab.memory import Lifetime
from eet_lab.memory.workloads import Request, Workload, bert_layer, drawn


def turbo_head() -> Workload:
    """The artifact's 50 requests as its last version, in C++, writes them down: with the inputs and the pooler."""
    return tuple(with_inputs(length) for length in drawn(50, 250))


def bert_base(rows: int = 1) -> Workload:
    """The lengths of the paper's latency runs, 150 of 5 to 500 tokens, with all heads, and `self_out` as it is."""
    return tuple(with_inputs(length, rows, corrected=True) for length in drawn(150, 500))


def with_inputs(length: int, rows: int = 1, corrected: bool = False) -> Request:
    ids, x = 8 * length, 4 * length * 768
    sizes = {"scores": 12 * 4 * length * length, "self_out": x} if corrected else {}
    before = (
        Lifetime("position_ids", ids, 0, 1),
        Lifetime("segment_ids", ids, 0, 1),
        Lifetime("mask", ids, 0, 0),
        Lifetime("extended_mask", ids // 2, 0, 11),
        Lifetime("layer_output", x, 1, 11),
    )
    lives = (*before, *bert_layer(length).lifetimes[:-1], Lifetime("pooler", 4 * 768, 11, 12))
    return Request(
        length, tuple(replace(life, num_bytes=rows * sizes.get(life.name, life.num_bytes)) for life in lives)
    )
