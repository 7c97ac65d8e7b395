"""Cost tables that are made up, for tests of what plans and simulates by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eet_lab.scheduling.cost import DecoderCost, EncoderCost, Provenance

MADE_UP = Provenance("toy", "", "no device", "-", None, "-", "-", "2026-01-01T00:00:00+00:00")


def encoder_cost(
    cost: Callable[[int, int], float],
    lengths: Sequence[int] = (1, 16, 32, 64, 128, 256, 512),
    batches: Sequence[int] = (1, 2, 4, 8, 16, 20),
) -> EncoderCost:
    times = tuple(tuple(cost(length, batch) for batch in batches) for length in lengths)
    return EncoderCost(tuple(lengths), tuple(batches), times, MADE_UP)


def decoder_cost(cost: Callable[[int, int, int], float]) -> DecoderCost:
    extras, rows, kv = (0, 1, 64, 256, 1024, 4096), (1, 4, 16), (16, 256, 1024)
    times = tuple(tuple(tuple(cost(e, r, k) for k in kv) for r in rows) for e in extras)
    return DecoderCost(extras, rows, kv, times, MADE_UP)


TURBO_2060 = encoder_cost(lambda length, batch: 2.0 + 0.0185 * batch * length + 1.14e-5 * batch * length**2)
"""Fitted by eye to the chart of TurboTransformers' repository for BERT-base on an RTX 2060."""
TOY_DECODER = decoder_cost(lambda extra, rows, kv: 0.5 + 0.3 * bool(extra) + 0.005 * (extra + rows) + 1e-5 * rows * kv)
