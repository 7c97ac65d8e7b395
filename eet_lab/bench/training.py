"""Steps of training: time and memory by recipe, with transformers beside it as PyTorch trains it.

A row of `train:gpt2/b8/s1024`: forward, backward and AdamW's update over 8 rows of 1,024 random tokens, always the same
ones, with nothing clipped. Rows of several lengths are ragged; transformers pads them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.bench import timing
from eet_lab.bench.measured import Spread
from eet_lab.bench.rows import OURS, Row, credited, distinct, named, taken
from eet_lab.bench.timing import LeftOut, Rounds, Series, Tally, check_repeats
from eet_lab.bench.workloads import FIRST_TOKEN, TrainBatch
from eet_lab.devices import present
from eet_lab.errors import ModelError, PromptError
from eet_lab.models import Model
from eet_lab.models.config import EncoderConfig, Seq2SeqConfig, VisionConfig
from eet_lab.models.decoder import mapped
from eet_lab.models.families import settings_of
from eet_lab.models.weights import random_decoder, state_of
from eet_lab.ops.oom import memory_for
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike
from eet_lab.threads import cpu_threads
from eet_lab.training import IGNORED, Example, Trainer
from eet_lab.words import plain

STEPS = 5
"""Steps of a run."""
PEERS: dict[str, dict[str, Any]] = {
    "hf-eager": {"attn_implementation": "eager"},
    "hf-sdpa": {"attn_implementation": "sdpa", "fused": True},
    "hf-compile": {"attn_implementation": "sdpa", "fused": True, "compile": "default"},
    "hf-max-autotune": {"attn_implementation": "sdpa", "fused": True, "compile": "max-autotune"},
}
"""transformers: plain; with SDPA and PyTorch's fused AdamW; and compiled besides. In 16 bits by autocast."""


class TimedSteps(NamedTuple):
    """One run: milliseconds a step, and the most bytes that were allocated, of its own; None on a CPU."""

    step_ms: float
    peak_bytes: int | None


class Checked(NamedTuple):
    """The loss of the batch and the norm of its gradient, before any update."""

    loss: float
    grad_norm: float

    def error(self, exact: Checked) -> float:
        """The larger of both relative errors."""
        return max(abs(mine / theirs - 1) for mine, theirs in zip(self, exact, strict=True))


class Sized(NamedTuple):
    """One who trains, once made: its step, what it told of the first batch, and the bytes that it holds."""

    step: Callable[[], Any]
    checked: Checked
    held_bytes: int


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
    providers = named(providers, (OURS, *PEERS), "training")
    network = _with_head(model)
    config = network.config
    chosen, remarks = distinct(recipes, model.device, config.in_training) if OURS in providers else ([], [])
    with cpu_threads(model.device), present(network.device):
        examples = _examples(workload, config, network.device)
        exact, budget = _budget(network, examples)
        make: dict[str, Callable[[], Sized]] = {
            str(recipe): partial(_ours, network, recipe, examples, workload.dropout) for recipe in chosen
        }
        ours = list(make)
        for name in (each for each in providers if each != OURS):
            make[name] = partial(_peer, network, name, examples, workload.dropout)
        tally = Tally(len(make) * (2 + repeats), progress)
        names, made = list[str](), list[Sized]()
        for name, maker in make.items():
            [*there], absent = timing.ready({name: maker}, ours, tally, cancel)
            remarks += absent
            names, made = names + [name] * len(there), made + there
        series = [Series(name, partial(_run, each, model.device)) for name, each in zip(names, made, strict=True)]
        warm = [Series(each.name, each.run) for each in series]
        timing.in_turn(warm, Rounds(1), tally, cancel, doing="warming up")
        timing.in_turn(series, Rounds(repeats), tally, cancel)
    tokens = sum(len(example.read((), config).ids) for example in examples)
    verdicts = [_verdict(each.checked.error(exact), budget) for each in made]
    return [_row(workload, model, *each, tokens) for each in zip(series, verdicts, strict=True)], remarks


def _row(workload: TrainBatch, model: Model, series: Series[TimedSteps], verdict: str, num_tokens: int) -> Row:
    middle = timing.median_run(series.runs, lambda run: run.step_ms)
    return taken(
        model.device,
        workload=str(workload),
        **credited(series.name, PEERS),
        dtype=model.dtype,
        total_ms=Spread.of([run.step_ms for run in series.runs]),
        peak_bytes=middle.peak_bytes,
        equality=verdict,
        tok_s=num_tokens / middle.step_ms * 1e3,
    )


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


def _told(trainer: Trainer, examples: Sequence[Example]) -> Checked:
    loss, grads = trainer.gradients(examples)
    return Checked(loss, _norm(grads.values()))


def _norm(grads: Any) -> float:
    return float(torch.stack([grad.float().norm() for grad in grads]).norm())


def _budget(network: Any, examples: Sequence[Example]) -> tuple[Checked, float]:
    """What plain PyTorch tells in fp32, and how far others may be: twice as far as it is in the model's own dtype."""
    exact = _told(Trainer(mapped(network, lambda t: t.float())), examples)
    low = exact if network.dtype == torch.float32 else _told(Trainer(network), examples)
    return exact, 2 * low.error(exact) + 1024 * torch.finfo(torch.float32).eps


def _verdict(off: float, most: float) -> str:
    return "passed" if off <= most else f"loss or gradient off by {plain(off)}, the budget is {plain(most)}"


@memory_for("what a recipe trains")
def _ours(network: Any, recipe: Recipe, examples: Sequence[Example], dropout: float) -> Sized:
    checked = _told(Trainer(network, recipe.parts), examples)
    before = _allocated(network.device)
    trainer = Trainer(network, recipe.parts, dropout=dropout, attention_dropout=dropout, max_grad_norm=None)
    trainer.step(examples)  # which makes all that stays
    return Sized(partial(trainer.step, examples), checked, _allocated(network.device) - before)


@memory_for("what transformers trains")
def _peer(network: Any, name: str, examples: Sequence[Example], dropout: float) -> Sized:
    """transformers' model with the same weights in fp32, which autocast multiplies in the model's own dtype."""
    how, device = dict(PEERS[name]), network.device
    mode, fused = how.pop("compile", None), how.pop("fused", False)
    if mode == "max-autotune" and device.type != "cuda":
        raise LeftOut("max-autotune needs an NVIDIA GPU")
    before = _allocated(device)
    model, batch = _to_hf(network, dropout, **how), _padded(examples, network.config, device)
    half = network.dtype != torch.float32
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused and device.type == "cuda")
    run = torch.compile(model, mode=None if mode == "default" else mode) if mode else model

    def loss() -> Tensor:
        with torch.autocast(device.type, network.dtype) if half else nullcontext():
            return run(**batch).loss

    def step() -> float:
        found = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(found.detach())

    model.eval()  # dropout is off
    found = loss()
    found.backward()
    checked = Checked(float(found.detach()), _norm(p.grad for p in model.parameters() if p.grad is not None))
    del found
    optimizer.zero_grad(set_to_none=True)
    model.train()
    step()
    return Sized(step, checked, _allocated(device) - before)


def _to_hf(network: Any, dropout: float, **how: Any) -> Any:
    import transformers

    told = settings_of(network.config)
    config = transformers.AutoConfig.for_model(told.pop("model_type"), **told)
    for name in [name for name in vars(config) if "drop" in name and isinstance(getattr(config, name), float)]:
        setattr(config, name, dropout)
    kind = getattr(transformers, told["architectures"][0])
    state = {name: tensor.to(torch.float32, copy=True) for name, tensor in state_of(network).items()}
    # It knows checkpoints' names of weights, which are not those of a live model in all versions.
    model, loading = kind.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True, **how
    )
    if untold := [*loading["missing_keys"], *loading["unexpected_keys"]]:
        raise ModelError(f"transformers has no such model: {', '.join(untold)} are in one of both only.")
    model = model.to(network.device)
    return model


def _padded(examples: Sequence[Example], config: Any, device: torch.device) -> dict[str, Tensor]:
    """The batch as transformers reads it."""
    if isinstance(config, VisionConfig):
        pixels = torch.stack([example.pixels for example in examples if example.pixels is not None])
        return {"pixel_values": pixels.to(device), "labels": torch.tensor([e.labels for e in examples], device=device)}
    longest = max(len(example.ids) for example in examples)
    ids = torch.tensor([[*e.ids, *[0] * (longest - len(e.ids))] for e in examples], device=device)
    lengths = torch.tensor([len(e.ids) for e in examples], device=device)
    real = torch.arange(longest, device=device) < lengths[:, None]
    batch = {"input_ids": ids} if bool(real.all()) else {"input_ids": ids, "attention_mask": real.long()}
    if isinstance(config, EncoderConfig):
        return batch | {"labels": torch.tensor([e.labels for e in examples], device=device)}
    if isinstance(config, Seq2SeqConfig):
        answers = [[*e.labels, *[IGNORED] * (longest - len(e.ids))] for e in examples]  # type: ignore[misc]
        return batch | {"labels": torch.tensor(answers, device=device)}
    return batch | {"labels": torch.where(real, ids, IGNORED)}


def _run(made: Sized, device: str) -> TimedSteps:
    """Some steps; each ends with its loss on the host, so that all of the GPU's work is in its time."""
    on_gpu = device == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def work() -> None:
        for _ in range(STEPS):
            made.step()
        if on_gpu:
            torch.cuda.synchronize()

    ms = timing.on_host(work).seconds / STEPS * 1e3
    return TimedSteps(ms, torch.cuda.max_memory_allocated() - before + made.held_bytes if on_gpu else None)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
