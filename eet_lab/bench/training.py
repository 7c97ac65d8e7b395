"""Steps of training: time and memory by recipe, and transformers' beside them.

A row of `train:gpt2/b8/s1024`: forward, backward and AdamW's update over 8 rows of 1,024 random tokens, always the same
ones, with nothing clipped. Rows of several lengths are ragged; transformers pads them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.bench import timing
from eet_lab.bench.cost import arithmetic, train_flops
from eet_lab.bench.gradients import Fp32Reference, RelativeErrors, checkpoint_names
from eet_lab.bench.measured import Spread
from eet_lab.bench.peers import check_same, hf_kind, no_bar, right_padded
from eet_lab.bench.rows import OURS, Row, credited, distinct, named, taken
from eet_lab.bench.run_memory import allocated, with_peak
from eet_lab.bench.timing import LeftOut, Rounds, Series, Tally, check_repeats, no_liger
from eet_lab.bench.workloads import TrainBatch
from eet_lab.errors import ModelError, PromptError
from eet_lab.models import Model
from eet_lab.models.config import EncoderConfig, Seq2SeqConfig, VisionConfig
from eet_lab.models.on_device import on_any_device
from eet_lab.models.weights import random_decoder, state_of
from eet_lab.ops.oom import memory_for
from eet_lab.parts import Parts
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.traffic import FIRST_TOKEN
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike
from eet_lab.training import IGNORED, Example, Trainer
from eet_lab.words import counted


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
    head for classes. The loss and the gradient are held against those of plain PyTorch in fp32. Returns rows and
    remarks.
    Errors: RecipeError, PromptError, ModelError, TrainingError, OutOfMemory, Cancelled.
    """
    check_repeats(repeats)
    workload = TrainBatch.of(workload, model)
    providers = named(providers, (OURS, *TRAIN_MODES), "training")
    batch = Batch.of(workload, model)
    network, config, examples = batch.network, batch.network.config, batch.examples
    chosen, remarks = distinct(recipes, model.device, config.in_training) if OURS in providers else ([], [])
    timing.forget_compiled()
    reference = Fp32Reference(network, examples)
    make: dict[str, Callable[[], Sized]] = {str(recipe): partial(_ours, batch, reference, recipe) for recipe in chosen}
    ours = list(make)
    for name in (each for each in providers if each != OURS):
        make[name] = partial(train_with_hf, network, name, examples, workload.dropout, reference)
    tally = Tally(len(make) * (2 + repeats), progress)
    made, absent = timing.ready(make, ours, 1 + repeats, tally, cancel)
    remarks += [*absent, *(each.remark for each in made.values() if each.remark)]
    series = [Series(name, partial(_run, each, model.device)) for name, each in made.items()]
    timing.warm_up(series, tally, cancel)
    timing.in_turn(series, Rounds(repeats), tally, cancel)
    verdicts = [each.errors.verdict(reference.budget) for each in made.values()]
    return [_row(workload, model, *each, batch) for each in zip(series, verdicts, strict=True)], remarks


def _row(workload: TrainBatch, model: Model, series: Series[TimedSteps], verdict: str, batch: Batch) -> Row:
    middle = timing.median_run(series.runs, lambda run: run.step_ms)
    return taken(
        model.device,
        workload=str(workload),
        **credited(series.name, TRAIN_MODES),
        dtype=model.dtype,
        total_ms=Spread.of([run.step_ms for run in series.runs]),
        peak_bytes=middle.peak_bytes,
        equality=verdict,
        tok_s=batch.num_tokens / middle.step_ms * 1e3,
        **arithmetic(batch.num_flops, middle.step_ms, model.device, model.network.dtype),
    )


@memory_for("what a recipe trains")
def _ours(batch: Batch, reference: Fp32Reference, recipe: Recipe) -> Sized:
    errors = reference.errors_of(Trainer(batch.network, recipe.parts), batch.examples)
    before = allocated(batch.network.device.type)
    trainer = batch.trainer(recipe.parts)
    for _ in range(CAPTURED_BY):  # which make all that stays
        trainer.step(batch.examples)
    held = allocated(batch.network.device.type) - before
    return Sized(lambda num: [*trainer.steps(repeat(batch.examples, num))], errors, held)


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


class TrainMode(NamedTuple):
    """How transformers trains: by which attention, with PyTorch's fused AdamW or not, compiled by which mode."""

    attention: str = "sdpa"
    fused: bool = True
    mode: str | None = None
    liger: bool = False


TRAIN_MODES = {
    "hf-eager": TrainMode("eager", fused=False),
    "hf-sdpa": TrainMode(),
    "hf-liger": TrainMode(liger=True),
    "hf-compile": TrainMode(mode="default"),
    "hf-reduce-overhead": TrainMode(mode="reduce-overhead"),
    "hf-max-autotune": TrainMode(mode="max-autotune"),
}
"""transformers: plain; with SDPA and PyTorch's fused AdamW; and compiled, or with Liger's kernels, besides. In 16 bits
by autocast.
"""
CAPTURED_BY = 3
"""Steps after which all memory is there that later ones need: graphs are captured in one of them."""
GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes that replay CUDA graphs."""


class Sized(NamedTuple):
    """One who trains, once made: so many of its steps, the errors of its first one, and the bytes that it holds."""

    steps: Callable[[int], Any]
    errors: RelativeErrors
    held_bytes: int
    remark: str = ""


@memory_for("what transformers trains")
def train_with_hf(
    network: Any, name: str, examples: Sequence[Example], dropout: float, reference: Fp32Reference
) -> Sized:
    """transformers' model with the same weights in fp32, which autocast multiplies in the model's own dtype.

    Compiled are its forward and its backward pass, for this batch's shape alone.
    """
    how, device = TRAIN_MODES[name], network.device
    if how.mode in GRAPHS and device.type != "cuda":
        raise LeftOut(f"{how.mode} needs an NVIDIA GPU")
    if how.liger and (why := no_liger(device.type)):
        raise LeftOut(why)
    before = allocated(device.type)
    model = _to_hf_in_training(network, dropout, attn_implementation=how.attention)
    names = checkpoint_names(model, state_of(network))
    batch = _padded(examples, network.config, device)
    patched = _with_liger(model) if how.liger else nullcontext
    half = network.dtype != torch.float32
    optimizer = torch.optim.AdamW(model.parameters(), fused=how.fused and device.type == "cuda")
    run = _compiled(model, how.mode) if how.mode else model

    def loss(read: Callable[..., Any]) -> Tensor:
        if how.mode in GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        with patched(), torch.autocast(device.type, network.dtype) if half else nullcontext():
            return read(**batch).loss

    def step() -> float:
        found = loss(run)
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(found.detach())

    # Noise cannot be compared: what drops numbers is checked without, and then need not be compiled for it.
    model.train(not dropout)
    found = loss(model if dropout else run)
    found.backward()
    own = ((name, parameter.grad) for name, parameter in model.named_parameters())
    grads = {names[name]: grad for name, grad in own if grad is not None and name in names}
    errors = reference.errors(float(found.detach()), grads)
    del found, grads
    optimizer.zero_grad(set_to_none=True)
    model.train()
    for _ in range(CAPTURED_BY):
        step()
    held, remark = allocated(device.type) - before, _in_parts(name) if how.mode else ""
    return Sized(lambda num: [step() for _ in range(num)], errors, held, remark)


def _compiled(model: Any, mode: str) -> Any:
    """The model, to be compiled for one shape."""
    torch._dynamo.utils.counters.clear()
    return torch.compile(model, mode=None if mode == "default" else mode, dynamic=False)


def _in_parts(name: str) -> str:
    """What was not compiled as one graph; nothing where all was. LeftOut where PyTorch compiled nothing."""
    counters = torch._dynamo.utils.counters
    if not counters["stats"]["unique_graphs"]:
        raise LeftOut("PyTorch compiled nothing of it")
    breaks = counters["graph_break"]
    if not breaks:
        return ""
    num, why = counted(sum(breaks.values()), "graph break"), next(iter(breaks)).partition("\n")[0]
    return f"{name} was not compiled as a whole: {num}, {why}."


def _with_liger(model: Any) -> Callable[[], AbstractContextManager[None]]:
    """Give a model of transformers Liger's kernels, as Liger does; what it makes has to surround the model's calls.

    Liger also replaces functions of transformers' module, for all models: they are put back, and are there within.
    """
    known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    kind = model.config.model_type
    if kind not in known:
        raise LeftOut(f"Liger has no kernels for {kind} models")
    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    known[kind](model=model)
    theirs = {name: value for name, value in names.items() if name in before and before[name] is not value}
    names.update({name: before[name] for name in theirs})
    return partial(_replaced, names, theirs)


@contextmanager
def _replaced(names: dict[str, Any], others: Mapping[str, Any]) -> Iterator[None]:
    """Some of a module's names stand for others."""
    own = {name: names[name] for name in others}
    names.update(others)
    try:
        yield
    finally:
        names.update(own)


def _to_hf_in_training(network: Any, dropout: float, **how: Any) -> Any:
    kind, config = hf_kind(network)
    for name in [name for name in vars(config) if "drop" in name and isinstance(getattr(config, name), float)]:
        setattr(config, name, dropout)
    state = {name: tensor.to(torch.float32, copy=True) for name, tensor in state_of(network).items()}
    # It knows checkpoints' names of weights, which are not those of a live model in all versions.
    with no_bar():
        model, loading = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True, **how
        )
    check_same("model", [*loading["missing_keys"], *loading["unexpected_keys"]])
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # its default, without the warning at which a compiler would part the graph
    return model.to(network.device)


def _padded(examples: Sequence[Example], config: Any, device: torch.device) -> dict[str, Tensor]:
    """The batch as transformers reads it."""
    if isinstance(config, VisionConfig):
        pixels = torch.stack([example.pixels for example in examples if example.pixels is not None])
        return {"pixel_values": pixels.to(device), "labels": torch.tensor([e.labels for e in examples], device=device)}
    ids, real = right_padded([example.ids for example in examples], device)
    batch = {"input_ids": ids} if bool(real.all()) else {"input_ids": ids, "attention_mask": real.long()}
    if isinstance(config, EncoderConfig):
        return batch | {"labels": torch.tensor([e.labels for e in examples], device=device)}
    if isinstance(config, Seq2SeqConfig):
        answers = [[*e.labels, *[IGNORED] * (ids.shape[1] - len(e.ids))] for e in examples]  # type: ignore[misc]
        return batch | {"labels": torch.tensor(answers, device=device)}
    return batch | {"labels": torch.where(real, ids, IGNORED)}
