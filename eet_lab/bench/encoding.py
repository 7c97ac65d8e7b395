"""An encoder over many texts: tokens a second by recipe, transformers' beside it, and two recipes compared.

A row of `encode:bert-base/t2048/p5-500`: 2,048 texts of random lengths from 5 to 500 tokens, drawn with seed 0, in
order of arrival, from lists of token ids to the mean of each text's last hidden states on the host. A comparison's
runs go the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from eet_lab.bench import timing
from eet_lab.bench.measure import as_measurement
from eet_lab.bench.measured import Measurement, Parity, Spread
from eet_lab.bench.peers import right_padded, to_hf
from eet_lab.bench.results import Comparison, changes
from eet_lab.bench.rows import OURS, Row, credited, distinct, named, taken
from eet_lab.bench.run_memory import MEMORY_KEYS, with_peak
from eet_lab.bench.timing import SHARED, Rounds, Series, Tally, check_budget, check_repeats, in_turn
from eet_lab.bench.workloads import Texts, default_prompts, described
from eet_lab.encoding import Texts as GivenTexts
from eet_lab.encoding import as_texts
from eet_lab.engine.encode import EncoderEngine
from eet_lab.engine.readable import readable
from eet_lab.engine.settings import Settings
from eet_lab.engine.tasks import MEAN
from eet_lab.errors import ModelError, PromptError
from eet_lab.models import Model
from eet_lab.models.decoder import mapped
from eet_lab.models.encoder import Encoder
from eet_lab.models.on_device import on_its_encoders_device
from eet_lab.models.vision import VisionEncoder
from eet_lab.ops.cases import error_budget
from eet_lab.ops.oom import memory_for
from eet_lab.parts import Parts
from eet_lab.parts.passes import Batching, Text
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike, as_recipe
from eet_lab.words import plain

Rows = Sequence[Sequence[int]]

HF, SORTED = "hf-sdpa", "hf-sdpa-sorted"
"""transformers, padded: batches in order of arrival, and of texts that were sorted by their length before."""
PEER_BATCH = 128
"""Texts of a batch of transformers; its fastest of 1, 32 and 128 on an H200."""
CHECKED = 16
"""Texts whose vectors are checked before anything is timed: the longest and the shortest."""


class Read(NamedTuple):
    """One run over `rows`: seconds in all, the vectors [N,C] on the host, and the most bytes beyond those before it.

    `activation_bytes` are those that an engine of ours asked for; 0 for others. As a `TimedTokens` it is one step.
    """

    rows: Rows
    total_s: float
    vectors: Tensor
    peak_bytes: int | None
    activation_bytes: int
    was_disturbed: bool
    ttft_ms: None = None
    tpot_ms: None = None

    @property
    def total_ms(self) -> float:
        return self.total_s * 1e3

    @property
    def tokens_per_s(self) -> float:
        return self.step_tokens[0] / self.total_s

    @property
    def step_ms(self) -> tuple[float, ...]:
        return (self.total_ms,)

    @property
    def step_tokens(self) -> tuple[int, ...]:
        return (sum(map(len, self.rows)),)

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self.rows))


@on_its_encoders_device
def encode_all(
    model: Model,
    texts: Texts | str,
    recipes: RecipeLike | Sequence[RecipeLike] = ("all",),
    providers: Sequence[str] | str = (OURS,),
    *,
    batch_tokens: int = Batching.batch_tokens,
    repeats: int = 5,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> tuple[list[Row], list[str]]:
    """Encode all texts with each recipe and peer in turn, `repeats` times, after each has been warmed up.

    `batch_tokens` is what a pass of ours reads. The vectors of some texts are held against those of the baseline in
    fp32, within an error budget that the baseline's own error sets. Returns rows and remarks.
    Errors: RecipeError, PromptError, ModelError, OutOfMemory, Cancelled.
    """
    check_repeats(repeats)
    texts = Texts.of(texts, model)
    providers = named(providers, (OURS, HF, SORTED), "texts")
    chosen, remarks = distinct(recipes, model.device, model.config) if OURS in providers else ([], [])
    encoder = model.encoder
    if isinstance(encoder, VisionEncoder):
        raise ModelError(
            f"{model.name} reads images, and {texts} are texts. Give an encoder of texts such as 'bert-base', or time "
            f"how {model.name} is trained: `eet-lab bench train:MODEL/b8`."
        )
    rows = texts.prompts(model.config.vocab_size)
    budget = ErrorBudget(encoder, rows)
    series: list[Series[Read]] = []
    with ExitStack() as open_engines:
        for recipe in chosen:
            engine = open_engines.enter_context(closing(EncoderEngine(encoder, recipe.parts)))
            run = partial(encoded, engine, rows, Batching(batch_tokens), cancel)
            series.append(Series(str(recipe), run, warm_ups=recipe.parts.num_warm_ups))
        peers = [name for name in providers if name != OURS]
        hf = to_hf(encoder) if peers else None
        for name in peers:
            series.append(Series(name, partial(encoded_by_hf, hf, rows, name == SORTED)))
        timing.after_warm_up(series, repeats, progress, cancel)
    return [_row(texts, each, model, budget) for each in series], remarks


def encoded(engine: EncoderEngine, rows: Rows, batching: Batching, cancel: Cancel | None = None) -> Read:
    """All texts by an engine of ours."""

    def work() -> tuple[Tensor, int]:
        run = engine.read([Text(row) for row in rows], MEAN, batching, cancel=cancel)
        return cast(Tensor, run.values), run.activation_bytes

    return _timed(rows, work, engine.model.device, engine.held_bytes)


def encoded_by_hf(model: Any, rows: Rows, is_sorted: bool) -> Read:
    """The same by transformers: padded on the right, a batch after the other."""

    @memory_for("a buffer of transformers")
    @torch.inference_mode()
    def work() -> tuple[Tensor, int]:
        order = sorted(range(len(rows)), key=lambda number: len(rows[number])) if is_sorted else [*range(len(rows))]
        vectors = torch.empty(len(rows), model.config.hidden_size)
        for at in range(0, len(order), PEER_BATCH):
            numbers = order[at : at + PEER_BATCH]
            ids, is_real = right_padded([rows[number] for number in numbers], "cpu")
            real = is_real.long().to(model.device)
            hidden = model(ids.to(model.device), attention_mask=real)[0]
            mean = (hidden * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)
            vectors[numbers] = mean.float().cpu()
        return vectors, 0

    return _timed(rows, work, model.device)


def _timed(rows: Rows, work: Callable[[], tuple[Tensor, int]], device: torch.device, held_bytes: int = 0) -> Read:
    """A run that ends with its vectors on the host, so that all of the GPU's work is in its time.

    `held_bytes`: what an earlier run left allocated, which counts for this one too.
    """
    run, peak = with_peak(lambda: timing.on_host(work), device.type)
    peak = None if peak is None else peak + held_bytes
    return Read(rows, run.seconds, run.value[0], peak, run.value[1], device.type == "cpu" and run.was_disturbed)


class ErrorBudget:
    """How far vectors may be from the baseline's in fp32: twice as far as the baseline's own in the model's dtype.

    For an fp32 model these are the same, and what remains is rounding in another order. Where the baseline itself
    overflows there is nothing to judge by, and nothing passes.
    """

    def __init__(self, encoder: Encoder, rows: Rows) -> None:
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        self._numbers = sorted({*order[: CHECKED // 2], *order[-CHECKED // 2 :]})
        some = [rows[number] for number in self._numbers]
        self._precise = _plain(mapped(encoder, lambda tensor: tensor.float()), some)
        low = _plain(encoder, some) if encoder.dtype != torch.float32 else self._precise
        largest = float(self._precise.abs().max())
        most = error_budget(float((low - self._precise).abs().max()), largest, torch.float32, 64)
        self.most = most if math.isfinite(most) else 0.0

    def verdict(self, vectors: Tensor) -> str:
        """ "passed", or their largest error beside the budget."""
        off = self.error(vectors)
        return "passed" if off <= self.most else f"error {plain(off)}, the budget is {plain(self.most)}"

    def error(self, vectors: Tensor) -> float:
        """The largest difference from the baseline in fp32."""
        return float((vectors[self._numbers] - self._precise).abs().max())

    def parity(self, before: Tensor, after: Tensor) -> Parity:
        """Whether the vectors of two recipes are the same."""
        off, nothing = self.error(after), (None,) * len(after)
        verdict = "identical" if torch.equal(before, after) else "within rounding" if off <= self.most else "different"
        return Parity(
            same_tokens=verdict != "different",
            first_difference=nothing,
            margins=nothing,
            max_error=off if math.isfinite(off) else None,
            budget=self.most,
            verdict=verdict,  # type: ignore[arg-type]
            explanation=f"Vectors are at most {plain(off)} off those in fp32; the budget is {plain(self.most)}.",
        )


def _plain(encoder: Encoder, rows: Rows) -> Tensor:
    with closing(EncoderEngine(encoder, Parts())) as engine:
        return cast(Tensor, engine.read([Text(row) for row in rows], MEAN).values)


def _row(texts: Texts, series: Series[Read], model: Model, budget: ErrorBudget) -> Row:
    middle = timing.median_run(series.runs, lambda run: run.total_s)
    return taken(
        model.device,
        workload=str(texts),
        **credited(series.name, (HF, SORTED)),
        dtype=model.dtype,
        total_ms=Spread.of([run.total_ms for run in series.runs]),
        peak_bytes=middle.peak_bytes,
        equality=budget.verdict(middle.vectors),
        tok_s=middle.tokens_per_s,
    )


@on_its_encoders_device
def compare_texts(
    model: Model,
    texts: GivenTexts | None = None,
    recipe: RecipeLike = "all",
    *,
    baseline: RecipeLike = "",
    repeats: int | None = None,
    budget_s: float | None = None,
    batch_tokens: int = Batching.batch_tokens,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    on_partial: Callable[[Comparison], None] | None = None,
    **others: Any,
) -> Comparison:
    """`compare` for an encoder: read the texts with `baseline` and `recipe`, check the vectors, then time both in turn.

    `batch_tokens` is what a pass reads at most. The result has the time end to end and the throughput, but no time to a
    first token and none per token. Settings of generation, and views of its steps, are a PromptError.
    """
    check_repeats(repeats)
    check_budget(budget_s)
    if others:
        raise PromptError(f"An encoder reads texts and generates none, so it takes no {', '.join(others)}.")
    recipes = [as_recipe(each, model.device, model.config) for each in (baseline, recipe)]
    given = readable(as_texts(model, default_prompts(model) if texts is None else texts), model.encoder.config, False)
    rows, batching = [np.asarray(text.ids).tolist() for text in given], Batching(batch_tokens)
    lengths = [*map(len, rows)]
    name = str(Texts(model.name, len(rows), min(lengths), max(lengths)))
    about = described(model, name, rows, {"batch_tokens": batch_tokens})
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(EncoderEngine(model.encoder, each.parts))) for each in recipes]
        runs = (partial(encoded, engine, rows, batching, cancel) for engine in engines)
        sides = [
            Series(str(each), run, warm_ups=each.parts.num_warm_ups) for each, run in zip(recipes, runs, strict=True)
        ]
        budget = ErrorBudget(model.encoder, rows)
        rounds = Rounds(repeats, budget_s, lambda: changes(*(side.runs for side in sides)).values())
        tally = Tally(1 + sum(side.warm_ups for side in sides) + 2 * rounds.expected, progress)
        first = timing.warm_up(sides, tally, cancel)
        tally.say("checking the vectors against the baseline")
        parity = budget.parity(*(side.runs[0].vectors for side in first))
        tally.finish()

        def comparison() -> Comparison:
            each = zip(recipes, engines, sides, first, strict=True)
            before, after = (
                _measurement(model, it, side.runs, warm.runs[0], engine.captures) for it, engine, side, warm in each
            )
            found = changes(*(side.runs for side in sides))
            return Comparison(**about, baseline=before, selection=after, parity=parity, changes=found)

        in_turn(sides, rounds, tally, cancel, on_round=on_partial and (lambda: on_partial(comparison())))
        tally.say("done")
        return comparison()


def _measurement(model: Model, recipe: Recipe, runs: Sequence[Read], warm_up: Read, captures: int) -> Measurement:
    """What the runs of a recipe say; a run counts as one step, whose tokens are those that were read."""
    middle = timing.median_run(runs, lambda run: run.total_s)
    activations = middle.activation_bytes if middle.peak_bytes is None else middle.peak_bytes
    weights = model.encoder.weight_bytes
    memory = dict.fromkeys(MEMORY_KEYS, 0) | {"weights": weights, "activations": activations}
    found = as_measurement(
        model, recipe, Settings(), runs, memory | {"peak": weights + activations},
        prepare_s=warm_up.total_s, captures=captures,
    )  # fmt: skip
    return replace(found, warnings=(SHARED,) * any(run.was_disturbed for run in runs))
