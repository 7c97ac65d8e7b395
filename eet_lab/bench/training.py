"""Steps of training: time and memory by recipe, and transformers' beside them.

A row of `train:gpt2/b8/s1024`: forward, backward and AdamW's update over 8 rows of 1,024 random tokens, always the same
ones, with nothing clipped. Rows of several lengths are ragged; transformers pads them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch

from eet_lab.bench import timing
from eet_lab.bench.cost import matmul_tflops, train_flops
from eet_lab.bench.measured import Spread
from eet_lab.bench.peers import CAPTURED_BY, TRAIN_MODES, Checked, Sized, norm_of, train_with_hf
from eet_lab.bench.rows import OURS, Row, credited, distinct, named, taken
from eet_lab.bench.run_memory import allocated, with_peak
from eet_lab.bench.timing import Rounds, Series, Tally, check_repeats
from eet_lab.bench.workloads import TrainBatch
from eet_lab.errors import ModelError, PromptError
from eet_lab.models import Model
from eet_lab.models.config import EncoderConfig, Seq2SeqConfig, VisionConfig
from eet_lab.models.decoder import mapped
from eet_lab.models.on_device import on_any_device
from eet_lab.models.weights import random_decoder
from eet_lab.ops.cases import error_budget
from eet_lab.ops.oom import memory_for
from eet_lab.parts import Parts
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.traffic import FIRST_TOKEN
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike
from eet_lab.training import Example, Trainer
from eet_lab.words import plain


class Batch(NamedTuple):
    """A network with a head to train, and always the same examples; tokens are those that it is trained to tell of."""

    network: Any
    examples: Sequence[Example]
    dropout: float
    num_tokens: int
    num_flops: float

    @classmethod
    def of(cls, workload: TrainBatch, model: Model) -> Batch:
        """Rows of random tokens, or images; an encoder-decoder's tokens are those of its answers.

        Errors: PromptError, ModelError.
        """
        network = _with_head(model)
        config, examples = network.config, _examples(workload, network.config, network.device)
        work = Trainer(network).work(examples)
        num_tokens = sum(of_text for of_text, _ in work.sizes)
        return cls(network, examples, workload.dropout, num_tokens, train_flops(config, work))

    def trainer(self, parts: Parts) -> Trainer:
        """A trainer of this network, which clips nothing."""
        drop = self.dropout
        return Trainer(self.network, parts, dropout=drop, attention_dropout=drop, max_grad_norm=None)


def _with_head(model: Model) -> Any:
    """The network, with classes where random weights lack a head; ModelError where a checkpoint does."""
    config = model.config
    if not isinstance(config, EncoderConfig) or "classes" in config.heads:
        return model.network
    if model.kind != "random":
        raise ModelError(f"{model.name} has no classification head to train. Load a checkpoint that was saved with it.")
    labels = ("LABEL_0", "LABEL_1")
    with_classes = replace(config, heads=(*config.heads, "classes"), labels=labels)
    return random_decoder(with_classes, 0, model.network.device, model.network.dtype)


def _examples(workload: TrainBatch, config: Any, device: torch.device) -> list[Example]:
    """Rows of random tokens, of the lengths that are asked for, or images, which are on the device for everybody."""
    if isinstance(config, VisionConfig):
        if workload.low:
            raise PromptError(f"{workload} names lengths, but all images have {config.context} tokens: leave /s out.")
        draw = torch.Generator().manual_seed(0)
        pixels = [torch.randn(config.pixels, generator=draw).to(device) for _ in range(workload.rows)]
        return [Example(labels=number % len(config.labels), pixels=image) for number, image in enumerate(pixels)]
    chosen, lengths = random.Random(0), workload.lengths(config.context)
    ids = [[chosen.randrange(FIRST_TOKEN, config.vocab_size) for _ in range(length)] for length in lengths]
    if isinstance(config, EncoderConfig):
        return [Example(row, number % len(config.labels)) for number, row in enumerate(ids)]
    if isinstance(config, Seq2SeqConfig):
        return [Example(row, row[::-1]) for row in ids]
    return [Example(row) for row in ids]


STEPS = 10
"""Steps of a run. Before the first of them nothing is laid out; a peer's batch is there."""


class TimedSteps(NamedTuple):
    """One run: milliseconds a step, and the most bytes that were allocated, of its own; None on a CPU."""

    step_ms: float
    peak_bytes: int | None


@on_any_device
def train_all(
    model: Model,
    workload: TrainBatch | str,
    recipes: RecipeLike | Sequence[RecipeLike] = ("all",),
    providers: Sequence[str] | str = (OURS,),
    *,
    repeats: int = 5,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> tuple[list[Row], list[str]]:
    """Train with each recipe and peer in turn, `repeats` runs of some steps each, after a run that warms up.

    Decoders learn each next token, encoders classes, and encoder-decoders answers; a shape with random weights gets a
    head for classes. The loss and the norm of the gradient are held against those of plain PyTorch in fp32. Returns
    rows and remarks.
    Errors: RecipeError, PromptError, ModelError, TrainingError, OutOfMemory, Cancelled.
    """
    check_repeats(repeats)
    workload = TrainBatch.of(workload, model)
    providers = named(providers, (OURS, *TRAIN_MODES), "training")
    batch = Batch.of(workload, model)
    network, config, examples = batch.network, batch.network.config, batch.examples
    chosen, remarks = distinct(recipes, model.device, config.in_training) if OURS in providers else ([], [])
    timing.forget_compiled()
    exact, budget = budget_of(network, examples)
    make: dict[str, Callable[[], Sized]] = {str(recipe): partial(_ours, batch, recipe) for recipe in chosen}
    ours = list(make)
    for name in (each for each in providers if each != OURS):
        make[name] = partial(train_with_hf, network, name, examples, workload.dropout)
    tally = Tally(len(make) * (2 + repeats), progress)
    made, absent = timing.ready(make, ours, tally, cancel)
    remarks += [*absent, *(each.remark for each in made.values() if each.remark)]
    series = [Series(name, partial(_run, each, model.device)) for name, each in made.items()]
    timing.warm_up(series, tally, cancel)
    timing.in_turn(series, Rounds(repeats), tally, cancel)
    verdicts = [verdict(each.checked.error(exact), budget) for each in made.values()]
    return [_row(workload, model, *each, batch) for each in zip(series, verdicts, strict=True)], remarks


def _row(workload: TrainBatch, model: Model, series: Series[TimedSteps], verdict: str, batch: Batch) -> Row:
    middle = timing.median_run(series.runs, lambda run: run.step_ms)
    ceiling = matmul_tflops(model.device, model.network.dtype)
    return taken(
        model.device,
        workload=str(workload),
        **credited(series.name, TRAIN_MODES),
        dtype=model.dtype,
        total_ms=Spread.of([run.step_ms for run in series.runs]),
        peak_bytes=middle.peak_bytes,
        equality=verdict,
        tok_s=batch.num_tokens / middle.step_ms * 1e3,
        mfu=round(batch.num_flops / middle.step_ms / ceiling / 1e9, 4),
        ceiling_tflops=round(ceiling, 2),
    )


def checked_of(trainer: Trainer, examples: Sequence[Example]) -> Checked:
    loss, grads = trainer.gradients(examples)
    return Checked(loss, norm_of(grads.values()))


def budget_of(network: Any, examples: Sequence[Example]) -> tuple[Checked, float]:
    """What plain PyTorch tells in fp32, and how far others may be: twice as far as it is in the model's own dtype."""
    exact = checked_of(Trainer(mapped(network, lambda t: t.float())), examples)
    low = exact if network.dtype == torch.float32 else checked_of(Trainer(network), examples)
    return exact, error_budget(low.error(exact), 1.0, torch.float32, 1024)  # errors are relative


def verdict(off: float, most: float) -> str:
    return "passed" if off <= most < math.inf else f"loss or gradient off by {plain(off)}, the budget is {plain(most)}"


@memory_for("what a recipe trains")
def _ours(batch: Batch, recipe: Recipe) -> Sized:
    checked = checked_of(Trainer(batch.network, recipe.parts), batch.examples)
    before = allocated(batch.network.device.type)
    trainer = batch.trainer(recipe.parts)
    for _ in range(CAPTURED_BY):  # which make all that stays
        trainer.step(batch.examples)
    held = allocated(batch.network.device.type) - before
    return Sized(lambda num: [*trainer.steps(repeat(batch.examples, num))], checked, held)


def _run(made: Sized, device: str) -> TimedSteps:
    """Some steps; each ends with its loss on the host, so that all of the GPU's work is in its time. The host of ours
    lays out the next batch meanwhile; peers are given one that is on the device.
    """

    def work() -> None:
        made.steps(STEPS)
        if device == "cuda":
            torch.cuda.synchronize()

    run, peak = with_peak(lambda: timing.on_host(work), device)
    return TimedSteps(run.seconds / STEPS * 1e3, None if peak is None else peak + made.held_bytes)
