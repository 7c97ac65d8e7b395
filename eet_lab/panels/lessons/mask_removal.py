"""Lesson 2, mask removal: what does a mask cost, and what does it cost to have none?

B rows, H heads, Q queries, K keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from eet_lab.bench import Comparison
from eet_lab.bench.timing import took_ms
from eet_lab.engine.engine import Engine
from eet_lab.engine.kv_cache import StaticKV
from eet_lab.engine.mask import dense_mask
from eet_lab.engine.prompts import right_aligned
from eet_lab.engine.rehearse import moved
from eet_lab.engine.settings import Settings
from eet_lab.models import Model
from eet_lab.ops import reference
from eet_lab.ops.types import Step, fresh
from eet_lab.panels import theme
from eet_lab.panels.lessons.attend import exercise
from eet_lab.panels.lessons.batch import PROMPTS, SHORT, lengths, rows
from eet_lab.panels.lessons.prediction import Prediction
from eet_lab.panels.lessons.show import Shown, after, table
from eet_lab.panels.pictures import mask_heatmap
from eet_lab.parts import Parts
from eet_lab.technique import Recipe

MiB = 2**20


def predict(model: Model) -> Prediction:
    """What share of the scores is thrown away? Reveals the count, and no time."""
    seen, whole = scores(model)
    return Prediction(
        f"The batch is padded to {max(lengths(model))} columns. Of all attention scores that its first pass computes, "
        "how many percent does the mask throw away?",
        reveal=f"{1 - seen / whole:.1%}: of {whole:,} scores a head, {seen:,} are used. The picture shows where they "
        "lie. So, will the run be that much faster without them?",
        number=(0, 100),
        unit="%",
    )


def scores(model: Model) -> tuple[int, int]:
    """Scores a head that the first pass needs, and that it computes with a mask."""
    counts = lengths(model)
    return sum(n * (n + 1) // 2 for n in counts), len(counts) * max(counts) ** 2


def picture(model: Model) -> Shown:
    """The mask of three short prompts."""
    return Shown(
        mask_heatmap(SHORT, model=model),
        "Look at the blue squares: a query (down) may see itself and what is before it (across), back to its row's "
        "first real token. Red is the future, grey has to do with a pad. The mask exists to undo the work that was "
        "done for all squares but the blue ones.",
    )


def poisoned(model: Model) -> Shown:
    """Pads' keys and values become NaN after the prompts are read: who notices, the mask or the bounds?"""
    batch, settings = rows(model), Settings(max_new_tokens=8)

    def tokens(recipe: str, **parts: Any) -> tuple[tuple[int, ...], ...]:
        built = replace(Recipe.parse(recipe, model.device).parts, **parts)
        return Engine(model.decoder, built).generate(batch, settings).tokens

    verdicts = []
    for recipe in ("pre_padding", "pre_padding,mask_removal"):
        clean, poison = tokens(recipe), tokens(recipe, kv_cache=PoisonedKV)
        verdicts.append(["as before" if a == b else "destroyed" for a, b in zip(clean, poison, strict=True)])
    pads = [max(map(len, batch)) - len(row) for row in batch]
    lines = [[f"{b}", f"{pad}", *both] for b, (pad, *both) in enumerate(zip(pads, *verdicts, strict=True))]
    return Shown(
        table(["row", "pads", "with a mask", "mask removed"], lines),
        "A mask hides a pad after reading it: its weight becomes 0, and 0 × NaN is NaN. Bounds never read it.",
    )


class PoisonedKV(StaticKV):
    """A KV cache that puts NaN into every pad's key and value before each decode step."""

    def room(self, layer: int, step: Step) -> tuple[Tensor, Tensor]:
        keys, values = super().room(layer, step)
        if len(step.ids) == len(step.spans):  # a decode step, so the prompts have been read
            for row, span in enumerate(step.spans):
                keys[row, :, : span.num_pad] = values[row, :, : span.num_pad] = torch.nan
        return keys, values


def attention_ms(model: Model) -> tuple[float, float]:
    """Milliseconds of the first pass's attention, all layers, plain PyTorch: with a mask, and without."""
    config = model.config
    _, first = right_aligned(rows(model), 0)
    step = moved(first, model.decoder.device)
    like = model.decoder.words
    qkv = torch.randn(len(step.ids), 3 * config.hidden_size, device=like.device, dtype=like.dtype)
    cache = StaticKV(1, config.num_heads, config.head_dim, like)
    cache.open([0] * len(PROMPTS), step.extent)
    (kv,) = cache
    ops = Parts().ops.bind(fresh)

    def masked() -> None:
        attend = dense_mask(ops, step, like, empty=fresh)
        for _ in model.decoder.layers:
            attend(qkv, kv, step)

    def bounded() -> None:
        for _ in model.decoder.layers:
            reference.attention(qkv, kv, step, empty=fresh)

    return _median_ms(masked, like.device.type), _median_ms(bounded, like.device.type)


@torch.inference_mode()
def _median_ms(run: Callable[[], None], device: str) -> float:
    run()  # warm up
    return median(took_ms(run, device) for _ in range(9))


def verdict(guess: Prediction, result: Comparison, model: Model) -> Shown:
    """Scores counted beside the time of attention alone, of the first pass, and of the whole run."""
    return after(guess, lambda: _verdict(float(guess.value), result, model))


def _verdict(guess: float, result: Comparison, model: Model) -> Shown:
    a, b = result.baseline, result.selection
    if not (a.ttft_ms and b.ttft_ms and a.total_ms and b.total_ms):
        return Shown("Some time could not be measured: run the comparison again.")
    seen, whole = scores(model)
    masked, bounded = attention_ms(model)
    num_rows, longest = len(result.prompt_lengths), max(result.prompt_lengths)
    itemsize = model.decoder.dtype.itemsize
    mask_bytes = num_rows * longest**2 * itemsize
    score_bytes = 3 * mask_bytes * model.config.num_heads
    lines = [
        ["scores a head in the first pass (counted)", f"{whole:,}", f"{seen:,}", _times(whole / seen)],
        ["attention alone, first pass (measured)", f"{masked:.3g} ms", f"{bounded:.3g} ms", _times(masked / bounded)],
        ["to the first token (measured)", *_both(a.ttft_ms.p50, b.ttft_ms.p50)],
        ["whole run (measured)", *_both(a.total_ms.p50, b.total_ms.p50)],
        ["mask (counted)", f"{mask_bytes / MiB:.3g} MiB", "0", ""],
        ["scores kept for a layer (counted)", f"{score_bytes / MiB:.3g} MiB", "0", ""],
    ]
    bars = {
        "scores, you said": 100 / max(100 - guess, 0.1),
        "scores, counted": whole / seen,
        "attention alone": masked / bounded,
        "first pass": a.ttft_ms.p50 / b.ttft_ms.p50,
        "whole run": a.total_ms.p50 / b.total_ms.p50,
    }
    fig = theme.figure("How many times less, or sooner, without the mask", height=260)
    fig.add_bar(
        y=list(bars), x=list(bars.values()), orientation="h", text=[_times(v) for v in bars.values()], hoverinfo="skip",
        marker_color=[theme.BASELINE] * 2 + [theme.GAIN] * 3, textposition="outside", cliponaxis=False,
    )  # fmt: skip
    fig.add_vline(x=1, line={"dash": "dot", "color": theme.INK})
    fig.update_xaxes(range=[0, 1.15 * max(*list(bars.values())[1:], min(bars["scores, you said"], 12))])
    fig.update_yaxes(autorange="reversed")
    share = f"{masked / a.ttft_ms.p50:.0%}"
    slower = " Left of the dotted line it got slower." if min(bars.values()) < 1 else ""
    return Shown(
        table(["", "mask", "no mask", "ratio"], lines),
        fig,
        f"Look how the gain shrinks from bar to bar.{slower} Attention with its mask was about {share} of the first "
        "pass; the linear layers compute the pads all the same, so the rest cannot gain. And attention alone does "
        "not follow the count: plain PyTorch needs a call of its own for each number of pads (here "
        f"{len(set(result.prompt_lengths))} calls a layer instead of one), and part of what you see is that its "
        "mask-free call is a fused one. The CUDA kernels of fused_kernels exist with and without a mask, so there "
        f"the two are measured apart. Same output? {result.sameness.verdict}.",
    )


def _both(before: float, after_: float) -> list[str]:
    return [f"{before:.4g} ms", f"{after_:.4g} ms", _times(before / after_)]


def _times(ratio: float) -> str:
    return f"{ratio:.3g}×"


__all__ = ["PROMPTS", "attention_ms", "exercise", "picture", "poisoned", "predict", "scores", "verdict"]
