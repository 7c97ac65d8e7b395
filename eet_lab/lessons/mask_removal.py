"""Lesson 2, mask removal: what does a mask cost, and what does it cost to have none?

B rows, H heads, Q queries, K keys or columns of the cache, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from eet_lab.bench import Change, Comparison
from eet_lab.bench.measured import p50
from eet_lab.bench.timing import took_ms
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.figures import theme
from eet_lab.figures.batch_steps import mask_steps
from eet_lab.lessons import recorded
from eet_lab.lessons.batch import PROMPTS, SHORT, lengths, rows
from eet_lab.lessons.exercise import Exercise, Wrong, ask, formula, named
from eet_lab.lessons.prediction import Prediction, after_prediction
from eet_lab.lessons.show import Shown, here, in_words, saved_words, table, there
from eet_lab.models import Model
from eet_lab.models.decoder import mapped
from eet_lab.ops.types import KV, Batch, Extras, fresh
from eet_lab.parts import Parts
from eet_lab.parts.attend import Bounds, DenseMask
from eet_lab.parts.batches import left_padded
from eet_lab.parts.kv_cache import StaticKV
from eet_lab.parts.protocols import MakesAttend
from eet_lab.technique import Recipe
from eet_lab.words import MiB, brief, ms_words, percent


def predict(model: Model) -> Prediction:
    """What share of the scores is thrown away? Reveals the count, and no time."""
    whole, seen = first_pass_scores(lengths(model))
    return Prediction(
        f"The batch is padded to {max(lengths(model))} columns. Of all attention scores that its first pass computes, "
        "how many percent does the mask throw away?",
        reveal=f"{percent(1 - seen / whole)}: of {whole:,} scores a head, {seen:,} are used. The picture shows where "
        "they lie. Will the run take that many percent less time without them?",
        number=(0, 100),
        unit="%",
    )


def picture(model: Model) -> Shown:
    """The mask of three short prompts, step by step."""
    return Shown(
        mask_steps(SHORT, model=model),
        "Look at the blue squares: each query (a line) may see itself and the keys before it, back to its row's "
        "first real token. Red is the future, and grey is a pad. The mask undoes the work of all squares but the blue "
        "ones. Each decode step builds a new mask.",
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
        "A mask hides a pad after reading it: its weight becomes 0, and 0 × NaN is NaN. With bounds, "
        "attention never reads the pad.",
    )


class PoisonedKV(StaticKV):
    """A KV cache that puts NaN into every pad's key and value before each decode step."""

    def layer(self, number: int, batch: Batch) -> KV:
        keys, values = super().layer(number, batch)
        if batch.one_each and batch.keys.spans is not None:  # a decode step, so the prompts have been read
            for row, (begin, _) in enumerate(batch.keys.spans):
                keys[row, :, :begin] = values[row, :, :begin] = torch.nan
        return keys, values


def attention_ms(model: Model) -> tuple[float, float]:
    """Milliseconds of the first pass's attention, all layers, plain PyTorch: with a mask, and without."""
    config, spec = model.config, model.config.spec
    batch = mapped(left_padded(rows(model)), lambda part: part.to(model.decoder.device))
    like = model.decoder.token_embedding
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv = torch.randn(len(batch.ids), width, device=like.device, dtype=like.dtype)
    extras = Extras(model.decoder.layers[0].q_norm, model.decoder.layers[0].k_norm, model.decoder.inv_freq)
    cache = StaticKV(1, config.num_kv_heads, config.head_dim, like)
    cache.open([0] * len(PROMPTS), batch.max_kv)
    ops = Parts().ops.bind(fresh)

    def run(kind: MakesAttend) -> None:
        attend = kind(ops, batch, cache, empty=fresh)
        for _ in model.decoder.layers:
            attend(0, qkv, spec, extras)

    masked, bounded = (_median_ms(partial(run, kind), like.device.type) for kind in (DenseMask, Bounds))
    return masked, bounded


@torch.inference_mode()
def _median_ms(run: Callable[[], None], device: str) -> float:
    run()  # warm up
    return median(took_ms(run, device) for _ in range(9))


@after_prediction
def verdict(guess: Prediction, result: Comparison, model: Model) -> Shown:
    """What is thrown away, in percent, beside what attention alone, the first pass and the whole run save."""
    a, b = result.baseline, result.selection
    if not (a.ttft_ms and b.ttft_ms and a.total_ms and b.total_ms):
        return Shown("Some time could not be measured: run the comparison again.")
    whole, seen = first_pass_scores(result.prompt_lengths)
    masked, bounded = attention_ms(model)
    num_rows, longest = len(result.prompt_lengths), max(result.prompt_lengths)
    mask_bytes = num_rows * longest**2 * model.decoder.dtype.itemsize
    lines = [
        ["scores a head in the first pass (counted)", f"{whole:,}", f"{seen:,}", _saved(whole, seen)],
        ["attention alone, first pass (measured)", *_both(masked, bounded)],
        ["to the first token (measured)", *_both(a.ttft_ms.p50, b.ttft_ms.p50, result.all_changes.get("ttft_ms"))],
        ["whole run (measured)", *_both(a.total_ms.p50, b.total_ms.p50, result.all_changes.get("total_ms"))],
        ["the mask of the first pass (counted)", f"{brief(mask_bytes / MiB)} MiB", "0", "100 %"],
    ]
    bars = {
        "scores: you said": float(guess.value),
        "scores: counted": 100 * (1 - seen / whole),
        "attention alone": 100 * (1 - bounded / masked),
        _named("first pass", result.all_changes.get("ttft_ms")): 100 * (1 - b.ttft_ms.p50 / a.ttft_ms.p50),
        _named("whole run", result.all_changes.get("total_ms")): 100 * (1 - b.total_ms.p50 / a.total_ms.p50),
    }
    share, spans = percent(masked / a.ttft_ms.p50), len(set(result.prompt_lengths))
    slower = " Left of zero it got slower." if min(bars.values()) < 0 else ""
    return Shown(
        here(model),
        table(["", "mask", "no mask", "saved"], lines),
        _saved_figure(bars),
        f"Look how the gain shrinks from bar to bar.{slower} Attention with its mask took about {share} of the first "
        "pass. The linear layers still compute the pads, so the rest of the pass cannot gain. Attention alone "
        "does not follow the count either: plain PyTorch needs a call of its own for each number of pads (here "
        f"{spans} calls a layer in place of one), and its mask-free call is a fused one.",
        in_words(result, "total_ms", "The whole run"),
    )


UNTOLD = "(cannot tell apart)"


def _named(name: str, change: Change | None) -> str:
    """The name of a bar, which says so where the pairs of runs cannot tell the two apart."""
    return f"{name} {UNTOLD}" if change and change.verdict == "cannot tell apart" else name


def _saved_figure(bars: Mapping[str, float]) -> go.Figure:
    """Percentages as bars; grey is counted, or cannot be told from noise; red got slower."""
    fig = theme.figure("Saved without the mask, in percent", height=100 + 32 * len(bars))
    grey = {name for name in bars if name.startswith("scores") or name.endswith(UNTOLD)}
    colors = [
        theme.BASELINE if name in grey else theme.LOSS if value < 0 else theme.GAIN for name, value in bars.items()
    ]
    fig.add_bar(
        y=list(bars), x=[round(v, 2) for v in bars.values()], orientation="h", hoverinfo="skip", marker_color=colors,
        text=[percent(v / 100) for v in bars.values()], textposition="outside", cliponaxis=False,
    )  # fmt: skip
    fig.add_vline(x=0, line={"color": theme.INK})
    low = min(bars.values())  # a label stands left of what got slower
    units = "% of scores, % of time" if any(name.startswith("scores") for name in bars) else "% of time"
    fig.update_xaxes(title=units, range=[low - 12 if low < 0 else 0, 108])
    return fig.update_yaxes(autorange="reversed")


def _both(before: float, after_: float, change: Change | None = None) -> list[str]:
    return [ms_words(before), ms_words(after_), saved_words(change, _saved(before, after_))]


def _saved(before: float, after_: float) -> str:
    return percent(1 - after_ / before)


PREFILL = "prefill_{}attention/b8/s2048/h25/d64"


@after_prediction
def on_the_h200(guess: Prediction) -> Shown:
    """Mask removal on an H200, in plain PyTorch and in a kernel."""
    result = recorded.batch()
    with_mask, without = (recorded.rung(name).measurement for name in ("pre_padding", "mask_removal"))
    changes = recorded.rung("mask_removal").changes
    [left_out] = [rung for rung in result.left_out if rung.technique == "mask_removal"]
    full, kernels = result.rungs[-1].measurement, recorded.masked_and_not(PREFILL)
    pairs = {
        _named(f"{name}: {words}", told.get(metric)): (getattr(before, metric).p50, getattr(now, metric).p50)
        for name, before, now, told in (
            ("plain PyTorch", with_mask, without, changes),
            ("all techniques", left_out.measurement, full, left_out.changes),
        )
        for words, metric in (("first token", "ttft_ms"), ("per token", "tpot_ms"))
    }
    masked, bounded = (p50(row.total_ms) or 0.0 for row in kernels)
    pairs["one kernel, 8 rows of 2,048 tokens"] = masked, bounded
    launches = [m.cost.launches_per_token or 0 for m in (with_mask, without) if m.cost]
    num_rows, head = len(result.prompt_lengths), ["GPT-2 XL on an H200", "mask", "no mask", "saved"]
    return Shown(
        there(result),
        table(head, [[name, *_both(*pair)] for name, pair in pairs.items()]),
        _saved_figure({name: 100 * (1 - now / before) for name, (before, now) in pairs.items()}),
        "Why is the first pair slower without a mask? The batch has "
        f"{num_rows} rows with {len(set(result.prompt_lengths))} numbers of pads, and plain PyTorch has no single call "
        f"for that: a step of all rows needs {launches[1]:,.0f} launches without the mask and {launches[0]:,.0f} with "
        "it. Python issues each of them, and that takes longer than what is saved. This is the red bar in the ladder "
        "of the workbench. A kernel that takes `num_pad` needs one launch in both cases, and there removal saves time. "
        '(Packed prefill cannot run with the mask, so "all techniques" includes its gain, too.)',
        there(kernels),
    )


def first_pass_scores(lengths: Sequence[int]) -> tuple[int, int]:
    """All cells of a square for each row, and the triangle over a row's own tokens."""
    return len(lengths) * max(lengths) ** 2, sum(n * (n + 1) // 2 for n in lengths)


count_scores = formula(
    first_pass_scores,
    {
        "one prompt of 4 tokens": ([4],),
        "prompts of 3 and 5 tokens": ([3, 5],),
        "this lesson's batch": ([3, 18, 44, 124],),
        "eight prompts of 1,024 tokens": ([1024] * 8,),
    },
    {
        "A token sees itself, too: n (n + 1) / 2 for a row of n tokens.":
            lambda lengths: (None, sum(n * (n - 1) // 2 for n in lengths)),
        "A row of n real tokens uses a triangle, not the whole square.":
            lambda lengths: (None, sum(n * n for n in lengths)),
        "With pads, every row has as many columns as the longest one.":
            lambda lengths: (sum(n * n for n in lengths), len(lengths) * max(lengths) * (max(lengths) + 1) // 2),
        "Count the scores of all rows.": lambda lengths: (max(lengths) ** 2, max(lengths) * (max(lengths) + 1) // 2),
        "A score is of one query and one key: columns times columns.":
            lambda lengths: (len(lengths) * max(lengths), sum(lengths)),
    },
    "Even where all rows are equally long, about half of the scores are thrown away: those of the future.",
    names=("scores computed with a mask", "scores used"),
    otherwise="With a mask, each row computes a square as wide as the longest prompt.",
)  # fmt: skip


def attend(q: Tensor, keys: Tensor, values: Tensor, num_pad: int, column: int) -> Tensor:
    """One query [D] over the columns that it may see of keys and values [K,D]."""
    seen = slice(num_pad, column + 1)
    weights = torch.softmax(keys[seen] @ q / len(q) ** 0.5, dim=0)
    return weights @ values[seen]


def _judge_attention(answer: Callable) -> tuple[str, tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    for num_pad, column, K in ((0, 3, 4), (2, 5, 6), (1, 3, 7), (4, 4, 9)):
        q, keys, values = (torch.randn(*shape, generator=generator) for shape in ((8,), (K, 8), (K, 8)))
        case = f"With num_pad={num_pad}, column={column} and {K} columns in the cache"
        expected = attend(q, keys, values, num_pad, column)
        given = ask(answer, q, keys, values, num_pad, column)
        _judge_kind(case, given, expected)
        if not torch.allclose(given, expected, atol=1e-5):
            raise Wrong(f"{case}: {_likely(given, q, keys, values, num_pad, column)}")
        hidden = torch.ones(K, dtype=torch.bool)
        hidden[num_pad : column + 1] = False
        poisoned_keys, poisoned_values = keys.clone(), values.clone()
        poisoned_keys[hidden] = poisoned_values[hidden] = torch.nan
        given = ask(answer, q, poisoned_keys, poisoned_values, num_pad, column)
        _judge_kind(case, given, expected)
        if not torch.allclose(given, expected, atol=1e-5):
            raise Wrong(
                f"{case}: the numbers are right, but they turn into NaN when the hidden columns hold NaN. So hidden "
                "keys or values are still read and then weighted with 0. Do not read them: slice."
            )
    return "It agrees with the masked result, and NaN in pads and in the future changes nothing.", ()


def _judge_kind(case: str, given: Any, expected: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise Wrong(f"{case}: return a tensor [D] = [8], not {named(given)}.")
    if (given.shape, given.dtype) != (expected.shape, expected.dtype):
        kind = f"{list(given.shape)} of {str(given.dtype).removeprefix('torch.')}"
        raise Wrong(f"{case}: return a tensor [D] = [8] of float32, as q is, not {kind}.")


def _likely(given: Tensor, q: Tensor, keys: Tensor, values: Tensor, num_pad: int, column: int) -> str:
    """What a wrong result looks like."""
    mistakes = {
        "it sees the pads, too. A row's first real token is in column num_pad.": (q, num_pad, num_pad, column),
        "it sees the future, too. The query's own column is the last that it may see.": (q, 0, num_pad, len(keys) - 1),
        "it does not see its own column. A slice ends before its end.": (q, 0, num_pad, column - 1),
        "the scores are not divided by √D.": (q * len(q) ** 0.5, 0, num_pad, column),
    }
    for words, (query, before, first, last) in mistakes.items():
        if last >= first - before and torch.allclose(
            given, attend(query, keys, values, first - before, last), atol=1e-5
        ):
            return words
    return "the result differs from softmax(q·k / √D) over columns num_pad to column, times their values."


attention = Exercise(_judge_attention, attend)
"""Write attention for one query without a mask."""
