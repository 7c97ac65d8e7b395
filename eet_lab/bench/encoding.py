"""An encoder over many texts: how many tokens a second, ours by recipe, and transformers' beside it.

A row of `encode:bert-base/t2048/p5-500`: 2,048 texts of random lengths from 5 to 500 tokens, drawn with seed 0, in
order of arrival, from lists of token ids to the mean of each text's last hidden states on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from eet_lab.bench import timing
from eet_lab.bench.benchmark import check_is_of, distinct
from eet_lab.bench.measured import Spread
from eet_lab.bench.peers.huggingface import encoder_to_hf
from eet_lab.bench.providers import OURS, named
from eet_lab.bench.rows import Row, taken
from eet_lab.bench.timing import Rounds, Series, Tally
from eet_lab.bench.workloads import Texts
from eet_lab.engine.encode import EncoderEngine
from eet_lab.engine.tasks import MEAN
from eet_lab.models import Model
from eet_lab.models.decoder import mapped
from eet_lab.models.encoder import Encoder
from eet_lab.models.on_device import on_its_encoders_device
from eet_lab.ops.oom import memory_for
from eet_lab.parts import Parts
from eet_lab.parts.passes import Batching, Text
from eet_lab.progress import Cancel, Progress
from eet_lab.texts import RecipeLike
from eet_lab.words import plain

HF, SORTED = "hf-sdpa", "hf-sdpa-sorted"
"""transformers, padded: batches in order of arrival, and of texts that were sorted by their length before."""
PEER_BATCH = 128
"""Texts of a batch of transformers; its fastest of 1, 32 and 128 on an H200."""
CHECKED = 16
"""Texts whose vectors are checked before anything is timed: the longest and the shortest."""


class Read(NamedTuple):
    """One run: seconds in all, the vectors [N,C] on the host, and the most bytes beyond what was there before.

    `activation_bytes` are those that an engine of ours asked for; 0 for others.
    """

    total_s: float
    vectors: Tensor
    peak_bytes: int | None
    activation_bytes: int
    was_disturbed: bool


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
    """Encode all texts with each recipe and peer in turn, `repeats` times, after a run of each that warms up.

    `batch_tokens` is what a pass of ours reads. The vectors of some texts are held against those of the baseline in
    fp32, within an error budget that the baseline's own error sets. Returns rows and remarks.
    Errors: RecipeError, PromptError, ModelError, OutOfMemory, Cancelled.
    """
    timing.check_repeats(repeats)
    texts = Texts.parse(texts) if isinstance(texts, str) else texts
    check_is_of(texts, model)
    providers = named(providers, (OURS, HF, SORTED), "texts")
    chosen, remarks = distinct(recipes, model.device, model.config) if OURS in providers else ([], [])
    rows, encoder = texts.prompts(model.config.vocab_size), model.encoder
    budget = ErrorBudget(encoder, rows)
    series: list[Series[Read]] = []
    with ExitStack() as open_engines:
        for recipe in chosen:
            engine = open_engines.enter_context(closing(EncoderEngine(encoder, recipe.parts)))
            series.append(Series(str(recipe), partial(encoded, engine, rows, Batching(batch_tokens), cancel)))
        peers = [name for name in providers if name != OURS]
        hf = encoder_to_hf(encoder) if peers else None
        for name in peers:
            series.append(Series(name, partial(encoded_by_hf, hf, rows, name == SORTED)))
        tally = Tally((1 + repeats) * len(series), progress)
        timing.warmed_up(series, tally, cancel)
        timing.in_turn(series, Rounds(repeats), tally, cancel)
    total = sum(map(len, rows))
    return [_row(texts, each.name, model, total, each.runs, budget) for each in series], remarks


def encoded(
    engine: EncoderEngine, rows: Sequence[Sequence[int]], batching: Batching, cancel: Cancel | None = None
) -> Read:
    """All texts by an engine of ours."""

    def work() -> tuple[Tensor, int]:
        run = engine.read([Text(row) for row in rows], MEAN, batching, cancel=cancel)
        return cast(Tensor, run.values), run.activation_bytes

    return _timed(work, engine.model.device, engine.memory.held_bytes)


def encoded_by_hf(model: Any, rows: Sequence[Sequence[int]], is_sorted: bool) -> Read:
    """The same by transformers: padded on the right, a batch after the other."""

    @memory_for("a buffer of transformers")
    @torch.inference_mode()
    def work() -> tuple[Tensor, int]:
        order = sorted(range(len(rows)), key=lambda number: len(rows[number])) if is_sorted else [*range(len(rows))]
        vectors = torch.empty(len(rows), model.config.hidden_size)
        for at in range(0, len(order), PEER_BATCH):
            numbers = order[at : at + PEER_BATCH]
            longest = max(len(rows[number]) for number in numbers)
            ids = torch.tensor([[*rows[number], *[0] * (longest - len(rows[number]))] for number in numbers])
            lengths = torch.tensor([len(rows[number]) for number in numbers])
            real = (torch.arange(longest) < lengths[:, None]).long().to(model.device)
            hidden = model(ids.to(model.device), attention_mask=real)[0]
            mean = (hidden * real[:, :, None]).sum(1) / real.sum(1, keepdim=True)
            vectors[numbers] = mean.float().cpu()
        return vectors, 0

    return _timed(work, model.device)


def _timed(work: Callable[[], tuple[Tensor, int]], device: torch.device, held_bytes: int = 0) -> Read:
    """A run that ends with its vectors on the host, so that all of the GPU's work is in its time.

    `held_bytes`: what an earlier run left allocated, which counts for this one too.
    """
    before = None
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device) - held_bytes
        torch.cuda.reset_peak_memory_stats(device)
    run = timing.on_host(work)
    peak = None if before is None else torch.cuda.max_memory_allocated(device) - before
    return Read(run.seconds, run.value[0], peak, run.value[1], device.type == "cpu" and run.was_disturbed)


class ErrorBudget:
    """How far vectors may be from the baseline's in fp32: twice as far as the baseline's own in the model's dtype.

    For an fp32 model these are the same, and what remains is rounding in another order.
    """

    def __init__(self, encoder: Encoder, rows: Sequence[Sequence[int]]) -> None:
        order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
        self._numbers = sorted({*order[: CHECKED // 2], *order[-CHECKED // 2 :]})
        some = [rows[number] for number in self._numbers]
        self._precise = _plain(mapped(encoder, lambda tensor: tensor.float()), some)
        low = _plain(encoder, some) if encoder.dtype != torch.float32 else self._precise
        largest = float(self._precise.abs().max())
        self.most = 2 * float((low - self._precise).abs().max()) + 64 * torch.finfo(torch.float32).eps * largest

    def verdict(self, vectors: Tensor) -> str:
        """ "passed", or their largest error beside the budget."""
        off = self.error(vectors)
        return "passed" if off <= self.most else f"error {plain(off)}, the budget is {plain(self.most)}"

    def error(self, vectors: Tensor) -> float:
        """The largest difference from the baseline in fp32."""
        return float((vectors[self._numbers] - self._precise).abs().max())


def _plain(encoder: Encoder, rows: Sequence[Sequence[int]]) -> Tensor:
    with closing(EncoderEngine(encoder, Parts())) as engine:
        return cast(Tensor, engine.read([Text(row) for row in rows], MEAN).values)


def _row(texts: Texts, name: str, model: Model, num_tokens: int, runs: Sequence[Read], budget: ErrorBudget) -> Row:
    is_peer = name in (HF, SORTED)
    middle = timing.median_run(runs, lambda run: run.total_s)
    return taken(
        model.device,
        workload=str(texts),
        provider=name if is_peer else OURS,
        recipe="" if is_peer else name,
        dtype=model.dtype,
        total_ms=Spread.of([run.total_s * 1e3 for run in runs]),
        peak_bytes=middle.peak_bytes,
        equality=budget.verdict(middle.vectors),
        tok_s=num_tokens / middle.total_s,
    )
