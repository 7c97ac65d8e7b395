"""Steps of training: time and memory by recipe, transformers' beside them, and two recipes compared.

A row of `train:gpt2/b8/s1024`: forward, backward and AdamW's update over 8 rows of 1,024 random tokens, always the same
ones, with nothing clipped. Rows of several lengths are ragged; transformers pads them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, Literal, NamedTuple

import torch

from eet_lab.bench import timing
from eet_lab.bench.cost import matmul_tflops, train_flops
from eet_lab.bench.measured import Environment, Spread, environment
from eet_lab.bench.paired import Change
from eet_lab.bench.peers import TRAIN_MODES, Checked, Sized, allocated, largest, norm_of, train_with_hf
from eet_lab.bench.rows import OURS, Row, credited, distinct, named, taken
from eet_lab.bench.timing import PAIR_BUDGET_S, Rounds, Series, Tally, check_budget, check_repeats
from eet_lab.bench.workloads import FIRST_TOKEN, TrainBatch
from eet_lab.devices import present
from eet_lab.errors import ModelError, PromptError
from eet_lab.models import Model
from eet_lab.models.config import EncoderConfig, Seq2SeqConfig, VisionConfig
from eet_lab.models.decoder import mapped
from eet_lab.models.weights import random_decoder
from eet_lab.ops.cases import error_budget
from eet_lab.ops.oom import memory_for
from eet_lab.parts import Parts
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike, as_recipe
from eet_lab.threads import cpu_threads
from eet_lab.training import Example, Step, Trainer, TrainSettings
from eet_lab.training.data import Batches
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
    with cpu_threads(model.device), present(network.device):
        exact, budget = budget_of(network, examples)
        make: dict[str, Callable[[], Sized]] = {str(recipe): partial(_ours, batch, recipe) for recipe in chosen}
        ours = list(make)
        for name in (each for each in providers if each != OURS):
            make[name] = partial(train_with_hf, network, name, examples, workload.dropout)
        tally = Tally(len(make) * (2 + repeats), progress)
        names, made = list[str](), list[Sized]()
        for name, maker in make.items():
            [*there], absent = timing.ready({name: maker}, ours, tally, cancel)
            remarks += [*absent, *(each.remark for each in there if each.remark)]
            names, made = names + [name] * len(there), made + there
        series = [Series(name, partial(_run, each, model.device)) for name, each in zip(names, made, strict=True)]
        timing.warm_up(series, tally, cancel)
        timing.in_turn(series, Rounds(repeats), tally, cancel)
        verdicts = [verdict(each.checked.error(exact), budget) for each in made]
        rows = [_row(workload, model, *each, batch) for each in zip(series, verdicts, strict=True)]
    return rows, remarks


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
    before = allocated(batch.network.device)
    trainer = batch.trainer(recipe.parts)
    trainer.step(batch.examples)  # which makes all that stays
    held = allocated(batch.network.device) - before
    return Sized(lambda num: [*trainer.steps(repeat(batch.examples, num))], checked, held)


def _run(made: Sized, device: str) -> TimedSteps:
    """Some steps; each ends with its loss on the host, so that all of the GPU's work is in its time. The host of ours
    lays out the next batch meanwhile; peers are given one that is on the device.
    """

    def work() -> None:
        made.steps(STEPS)
        if device == "cuda":
            torch.cuda.synchronize()

    run, peak = timing.with_peak(lambda: timing.on_host(work), device)
    return TimedSteps(run.seconds / STEPS * 1e3, None if peak is None else peak + made.held_bytes)


BUDGETS = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
"""How far apart two losses of a step may be, as a share: sums in another order grow apart from step to step."""


@dataclass(frozen=True)
class TrainedSide:
    """The steps of one recipe. `peak_bytes`: the most that were allocated in a step, its own; None on a CPU."""

    recipe: str
    steps: tuple[Step, ...]
    peak_bytes: int | None

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of each step."""
        return tuple(step.loss for step in self.steps)


@dataclass(frozen=True)
class TrainComparison:
    """Two recipes that took the same steps in turn. `change` is that of the milliseconds a step.

    `max_error` is the largest relative difference of two losses of a step, and `budget` what it may be.
    """

    environment: Environment
    baseline: TrainedSide
    selection: TrainedSide
    change: Change | None
    max_error: float
    budget: float

    @property
    def verdict(self) -> Literal["identical", "within rounding", "different"]:
        """Whether the loss curves are the same."""
        if self.baseline.losses == self.selection.losses:
            return "identical"
        return "within rounding" if self.max_error <= self.budget else "different"

    @property
    def explanation(self) -> str:
        """The same in words."""
        if self.verdict == "identical":
            return "The losses of all steps are the same to the bit."
        if self.max_error == math.inf:
            return "The loss of a step is not finite."
        return f"Losses of a step are at most {plain(self.max_error)} apart, as a share; the budget is {self.budget}."


def compare_training(
    model: Model,
    rows: Batches,
    recipe: RecipeLike = "all",
    *,
    baseline: RecipeLike = "",
    batch_rows: int = 8,
    task: str | None = None,
    settings: TrainSettings | None = None,
    repeats: int | None = None,
    budget_s: float = PAIR_BUDGET_S,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    on_partial: Callable[[TrainComparison], None] | None = None,
) -> TrainComparison:
    """Train two copies of a model by `baseline` and by `recipe`, a step of each in turn, on the same rows.

    The first two steps of each warm up, and are not timed; their losses are compared, too. `repeats` steps are timed;
    None: until the interval of the paired difference is narrow, or `budget_s` is spent. Errors: those of `Trainer`.
    """
    check_repeats(repeats)
    check_budget(budget_s)
    recipes = [as_recipe(each, model.device, model.config.in_training) for each in (baseline, recipe)]
    with cpu_threads(model.device), present(model.network.device):
        sides = [_Side(model, each, rows, batch_rows, task, settings, cancel) for each in recipes]

        def change() -> Change | None:
            before, after = ([step.ms for step in side.series.runs] for side in sides)
            return Change.of(before, after)

        def comparison() -> TrainComparison:
            before, after = (side.trained() for side in sides)
            error = largest(abs(b / a - 1) for a, b in zip(before.losses, after.losses, strict=False))
            return TrainComparison(environment(model), before, after, change(), error, BUDGETS[model.network.dtype])

        rounds = Rounds(repeats, budget_s, lambda: [found] if (found := change()) else [])
        tally = Tally(2 * (WARM + rounds.expected), progress)
        timing.in_turn([side.warming for side in sides], Rounds(WARM), tally, cancel, doing="warming up")
        tell = None if on_partial is None else lambda: on_partial(comparison())
        timing.in_turn([side.series for side in sides], rounds, tally, cancel, on_round=tell)
        return comparison()


WARM = 2
"""Steps before those that are timed: the optimizer's state is made in the first."""


class _Side:
    """A recipe, its trainer, and the steps that it has taken."""

    def __init__(
        self, model: Model, recipe: Recipe, rows: Batches, batch_rows: int, task: str | None,
        settings: TrainSettings | None, cancel: Cancel | None,
    ) -> None:  # fmt: skip
        self._on_gpu, self._rows, self._batch_rows, self._cancel = model.device == "cuda", rows, batch_rows, cancel
        before = self._allocated()
        self._trainer = Trainer(model.network, recipe.parts, task=task, settings=settings)
        self._recipe, self._held, self._peak = str(recipe), self._allocated() - before, 0
        self.warming, self.series = Series(self._recipe, self._step), Series(self._recipe, self._step)

    def _step(self) -> Step:
        before, batch = self._allocated(), self._rows.batch(self._trainer.num_steps, self._batch_rows)
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        run = timing.on_host(lambda: self._done(batch))
        step = replace(run.value, ms=run.seconds * 1e3)
        if self._on_gpu:
            # What this side holds stays between its steps, and the other side's is there before and after.
            self._held += self._allocated() - before
            self._peak = max(self._peak, torch.cuda.max_memory_allocated() - self._allocated() + self._held)
        return step

    def _done(self, batch: Sequence[Example]) -> Step:
        """A step, once the GPU has updated the weights: the other side's would wait for it."""
        step = self._trainer.step(batch, self._cancel)
        if self._on_gpu:
            torch.cuda.synchronize()
        return step

    def trained(self) -> TrainedSide:
        """What its steps were by now."""
        return TrainedSide(self._recipe, (*self.warming.runs, *self.series.runs), self._peak if self._on_gpu else None)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._on_gpu else 0
