"""Lesson 8, fast training: what is a training step made of, and which of it can be left out?

N tokens with a label, C channels, V words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ipywidgets as W
import plotly.graph_objects as go
import torch
from IPython.display import display

from eet_lab.bench.fusion import FusionMap, PhaseWork, fusion_map, phases_of
from eet_lab.bench.rows import TRAIN, Row
from eet_lab.bench.timeline_steps import NO_KERNELS, PHASES
from eet_lab.bench.train_compare import TrainComparison, compare_training
from eet_lab.bench.training import Batch
from eet_lab.bench.workloads import TrainBatch
from eet_lab.codec import decode
from eet_lab.devices import checked_device
from eet_lab.figures import plot, theme
from eet_lab.figures.fusion import COLORS, LAUNCHES
from eet_lab.lessons import recorded
from eet_lab.lessons.pre_padding import padded_share
from eet_lab.lessons.prediction import Prediction, after_prediction
from eet_lab.lessons.show import Shown, here, table, there
from eet_lab.models import Model
from eet_lab.models.config import PRESETS
from eet_lab.technique import Recipe, obstacle, registry
from eet_lab.techniques import ChunkedCrossEntropy
from eet_lab.texts import generate
from eet_lab.training import Example, Examples, Trainer
from eet_lab.training.data import read_texts
from eet_lab.training.demos import BUNDLED, Demo, TrainedDemo, demo_of, train_demo
from eet_lab.words import MiB, brief, counted, ms_words, percent, plain

NUM_TEXTS, LONGEST = 12, 96
BASE, PACKED = "pre_padding", "pre_padding,mask_removal,packed_prefill"
CHUNK = ChunkedCrossEntropy().chunk
FORWARD, BACKWARD, UPDATE = PHASES
STEPS = 3
"""Steps whose median time is told."""
PROMPTS = ("The built-in function", "If the object", "A class is")


def untrained(device: str | None = None) -> Model:
    """The model that the lesson trains, with random weights, and the demo model's tokenizer."""
    demo, device, dtype = _demo(device)
    return demo.model(device, dtype)


def _demo(device: str | None) -> tuple[Demo, str, torch.dtype]:
    device = checked_device(device)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    return demo_of(_demo_name(device)), device, dtype


def _demo_name(device: str) -> str:
    return "gpt2-mini" if device.startswith("cuda") else "gpt2-tiny"


@cache
def texts(model: Model) -> Examples:
    """Documents of very different lengths, the longest cut."""
    found = (model.encode(text)[:LONGEST] for text in read_texts(BUNDLED))
    return Examples([Example(ids) for ids in found if len(ids) > 1][:NUM_TEXTS])


def lengths(model: Model) -> list[int]:
    """Tokens of each."""
    return [len(example.ids) for example in texts(model)]


def step_parts(model: Model, recipe: str) -> dict[str, PhaseWork]:
    """What each part of a step over the texts does, and takes."""
    parts = Recipe.parse(recipe, model.device, model.config.in_training).parts
    batch = Batch(model.network, [*texts(model)], 0.0, sum(lengths(model)), 0.0)
    return phases_of(batch, parts, model.device, STEPS)


def anatomy(model: Model) -> Shown:
    """Time, launches and bytes of the three parts of a step."""
    parts, tensors = step_parts(model, BASE), len(Trainer(model.network).parameters)
    return Shown(
        here(model),
        _shares(parts, f"A step of {len(texts(model))} texts, by its parts", LAUNCHES[model.device]),
        *unseen(parts),
        "All texts are padded to the longest. The forward pass computes the loss, the backward pass the gradient of "
        "each weight, and the update moves the weights. Backward computes two products for each of forward, one for "
        "the weights and one for what came in, so a large model's takes twice as long. A small model's takes less, as "
        "calls that are no products, such as the loss, do not double. The update computes almost nothing: "
        f"it reads and writes every weight, its gradient and two moments, of {tensors} tensors, one after the other. "
        "On a GPU each call is a launch, which costs the host some microseconds however small it is.",
    )


def unseen(parts: Mapping[str, PhaseWork]) -> list[str]:
    """That launches are left out, where none was seen."""
    return [] if any(part.launches for part in parts.values()) else [f"{NO_KERNELS}, so launches are left out."]


def _shares(parts: Mapping[str, PhaseWork], title: str, calls: str) -> go.Figure:
    rows: dict[str, tuple[list[float], Callable[[float], str]]] = {
        "time": ([part.ms for part in parts.values()], ms_words),
        calls: ([part.launches for part in parts.values()], lambda n: f"{n:,.0f}"),
        "bytes in and out": ([part.num_bytes / MiB for part in parts.values()], lambda n: f"{brief(n)} MiB"),
    }
    rows = {name: (values, words) for name, (values, words) in rows.items() if any(values)}
    fig = theme.figure(title, height=210, barmode="stack", bargap=0.35)
    for place, name in enumerate(parts):
        of_row = [values[place] / sum(values) for values, _ in rows.values()]
        told = [words(values[place]) for values, words in rows.values()]
        fig.add_bar(
            y=[*rows], x=[round(100 * each, 2) for each in of_row], orientation="h", name=name, customdata=told,
            text=[word if share > 0.07 else "" for word, share in zip(told, of_row, strict=True)],
            marker_color=COLORS[name], **theme.inside(COLORS[name]),
            hovertemplate="%{y}: " + name + " %{customdata}, %{x:.0f} %<extra></extra>",
        )  # fmt: skip
    fig.update_layout(legend={"traceorder": "normal"})
    fig.update_xaxes(title="% of the step", range=[0, 100])
    return fig.update_yaxes(autorange="reversed")


def predict(model: Model) -> Prediction:
    """What share of a batch is pads? Reveals the count, and no time."""
    sizes = lengths(model)
    return Prediction(
        f"{len(sizes)} texts of {min(sizes)} to {max(sizes)} tokens share a step. Padded to the longest, how many "
        "percent of the tokens that are computed are pads?",
        reveal=f"{percent(padded_share(sizes))}: of {len(sizes) * max(sizes):,} tokens, {sum(sizes):,} are real. A pad "
        "is computed by every linear layer, forward and backward, and teaches nothing.",
        number=(0, 100),
        unit="%",
    )


@after_prediction
def packing(guess: Prediction, model: Model) -> Shown:
    """The texts padded and end to end, and steps of both in turn."""
    found = compare_training(
        model, texts(model), PACKED, baseline=f"{BASE},mask_removal", batch_rows=NUM_TEXTS, repeats=6
    )
    return Shown(_layouts(lengths(model)), here(model), _compared(found, ("padded", "packed")), _said(found, model))


def _layouts(sizes: list[int]) -> go.Figure:
    """Texts as rows with pads, and below them the same in one row."""
    fig = theme.figure("The same texts padded, and packed", height=300, barmode="stack", bargap=0.15)
    names = [f"text {number}" for number in range(1, len(sizes) + 1)]
    fig.add_bar(y=names, x=sizes, orientation="h", name="real", marker_color=theme.SELECTION, hoverinfo="x")
    fig.add_bar(
        y=names, x=[max(sizes) - n for n in sizes], orientation="h", name="pads", hoverinfo="x",
        marker=theme.hatched(theme.BASELINE, theme.GRID),
    )  # fmt: skip
    fig.add_bar(
        y=["packed"] * len(sizes), x=sizes, orientation="h", base=[0, *accumulate(sizes[:-1])], showlegend=False,
        text=names, textposition="none", hovertemplate="%{text}: %{customdata} tokens<extra></extra>",
        customdata=sizes, marker={"color": theme.SELECTION, "line": {"color": "white", "width": 1}}, width=0.8,
    )  # fmt: skip
    fig.update_layout(legend={"traceorder": "normal"})
    fig.update_xaxes(title="tokens")
    return fig.update_yaxes(autorange="reversed", tickfont={"size": 10})


def _compared(found: TrainComparison, names: tuple[str, str]) -> Any:
    sides, change = (found.baseline, found.selection), found.change
    times = ("–", "–") if change is None else (ms_words(change.before), ms_words(change.after))
    rows = [
        [name, ms, f"{side.steps[-1].computed_tokens:,}", f"{side.losses[-1]:.4f}"]
        for name, ms, side in zip(names, times, sides, strict=True)
    ]
    return table(["", "a step", "tokens computed", "loss of the last step"], rows)


def _said(found: TrainComparison, model: Model) -> str:
    change = f"A step: {found.change.words('ms')}. " if found.change else ""
    return (
        f"{change}Same loss curve? {found.verdict}. {found.explanation} Packed, texts lie end to end, and attention is "
        f"told where each begins (cu_seqlens). {percent(padded_share(lengths(model)))} of the tokens go; the update is "
        "the same, and on a CPU attention takes a call for each text, so the time falls by less."
    )


def logits(model: Model) -> Shown:
    """What logits of a step take, whole and in chunks, and whether gradients are the same."""
    vocabularies = {"this model": model.config.vocab_size, "GPT-2": PRESETS["gpt2"].vocab_size}
    vocabularies["Llama 3"] = PRESETS["llama-8b"].vocab_size
    num_tokens = 8 * 1024
    rows = [
        [f"{name}, {words:,} words", *(f"{4 * tokens * words / MiB:,.0f} MiB" for tokens in (num_tokens, CHUNK))]
        for name, words in vocabularies.items()
    ]
    examples, config = [*texts(model)], model.config.in_training
    (whole, before), (chunked, after) = (
        Trainer(model.network, Recipe.parse(recipe, model.device, config).parts).gradients(examples)
        for recipe in (BASE, f"{BASE},chunked_cross_entropy:chunk=64")
    )
    error = max(float((before[path] - after[path]).norm() / before[path].norm().clamp_min(1e-12)) for path in before)
    return Shown(
        table(["8 texts of 1,024 tokens", "logits in fp32, whole", f"{CHUNK:,} tokens at a time"], rows),
        "The head makes a number for each token and each word. The gradient of the logits is as large again, and "
        "without a technique both are there at once, the largest tensors of the step by far.",
        f"`chunked_cross_entropy` makes the logits of some tokens, takes their loss and their gradient, and forgets "
        f"them. Nothing is computed twice. Here, with chunks of 64 tokens: loss {whole:.6f} whole and {chunked:.6f} in "
        f"chunks, and no gradient is further from the other than {plain(error)} of its norm.",
    )


def flat(model: Model) -> Shown:
    """The update of each tensor, and of one buffer."""
    plain, buffered = (step_parts(model, recipe)[UPDATE] for recipe in (BASE, f"{BASE},flat_optimizer"))
    named = {"each tensor": plain, "flat": buffered}
    rows = [[name, f"{part.launches:,}" if part.launches else "–", ms_words(part.ms)] for name, part in named.items()]
    return Shown(
        here(model),
        table(["update of", LAUNCHES[model.device], "time"], rows),
        *unseen(named),
        "`flat_optimizer` lays all weights into one buffer, and their gradients and moments into others of the same "
        "layout; a layer's weights are views of it. The formula is the same, and so is each number. The calls no "
        "longer grow with the number of tensors. The bytes stay, so what is saved is the host's time: on a GPU that "
        "is most of the update of a small model.",
    )


def fusions(model: Model) -> Shown:
    """What each technique that can run here does to each part of the step, and to the step."""
    sizes = lengths(model)
    named = replace(model, name=_demo_name(model.device))  # its own is a sentence
    found = fusion_map(named, TrainBatch(named.name, NUM_TEXTS, min(sizes), max(sizes)))
    return Shown(
        here(model),
        plot(found, "fusion"),
        f"Each technique has two bars: above, pale, the step without it; below, with it. The batch is {NUM_TEXTS} rows "
        f"of random tokens, {min(sizes)} to {max(sizes)} long. Beside the bars stands how many times as fast the part "
        "of the step became that gained most, and how many times as fast the whole step: a part that was a tenth of "
        "the step can take away no more than a tenth of it (Amdahl's law). Counts and bytes are exact. Times are "
        "measured, a step of each in turn; a question mark, or “no gain to tell”, stands for what cannot be told from "
        "noise. On a CPU that can be all of them.",
    )


def on_a_gpu(model: Model) -> Shown:
    """What is trained with on a GPU: which techniques there are, what was recorded, and what is measured here."""
    config = model.config.in_training
    kinds = [technique() for technique in registry().values() if "train" in technique.stages]
    why = {each.title: obstacle(each, model.device, config) for each in kinds}
    lines = [[title, reason.rstrip(".") if reason else "runs here"] for title, reason in why.items()]
    shown: list[Any] = [table(["technique of training", "here"], lines)]
    if model.device == "cuda":
        found = compare_training(model, texts(model), "all", batch_rows=NUM_TEXTS)
        shown += [here(model), _compared(found, ("no technique", "all"))]
    rows = recorded_rows()
    times = [[row.workload, recorded.who(row), ms_words(ms)] for ms, row in rows]
    shown += [there([row for _, row in rows]), table(["workload", "who", "a step"], times)]
    if model.device != "cuda":
        shown += recorded_fusions()
    return Shown(
        *shown,
        "On a GPU a small model's step is bound by launches: the host hands over hundreds of kernels, most of which "
        "run for some microseconds. Kernels of our own compute what lies between two matrix products in one launch, "
        "forward and backward. Two CUDA graphs, of a pass and of the update, replay all launches of a step. Large "
        "models gain less, since their products take most of the time.",
    )


def recorded_fusions() -> list[Any]:
    """The fusion map of GPT-2, as a GPU took it."""
    found = decode(FusionMap, recorded.kept("h100-fusion-gpt2"))
    none, full = found.rungs[0], found.rungs[-1]
    launches, moved = (
        [sum(getattr(work, what) for work in rung.work.values()) for rung in (none, full)]
        for what in ("launches", "num_bytes")
    )
    return [
        there(f"{found.environment.origin}. {found.workload}, bfloat16"),
        plot(found, "fusion"),
        f"From none to all, a step goes from {launches[0]:,} to {launches[1]:,} launches, from {brief(moved[0] / 1e9)} "
        f"to {brief(moved[1] / 1e9)} GB that are moved, and from {ms_words(none.step_ms.p50)} to "
        f"{ms_words(full.step_ms.p50)}. Most of the gain is launches: this GPU waited for its host. So the update in "
        "one launch gains much, and so do captured steps, of which the parts, launched one by one, tell nothing. "
        "Chunks alone make the loss slower and save memory; the fused loss takes the time back. Fused norms, "
        "activations and residuals save time of the GPU, which such a step does not wait for.",
    ]


def recorded_rows() -> list[tuple[float, Row]]:
    """Milliseconds of training steps on one H200, by workload and the fastest first."""
    rows = (row for row in recorded.all_newest() if row.workload.startswith(TRAIN) and "/ranks" not in row.workload)
    timed = ((row.total_ms.p50, row) for row in rows if row.total_ms)
    return sorted(timed, key=lambda pair: (pair[1].workload, pair[0]))


def train(device: str | None = None) -> TrainedDemo:
    """Train the lesson's model on this machine's own documentation, and say how far it is."""
    demo, device, dtype = _demo(device)
    line = W.HTML("Reading Python’s documentation …")
    display(line)

    def progress(done: int, total: int, words: str) -> None:
        if done % 10 == 0 or done == total:
            line.value = f"Step {done:,} of {total:,}, {words}"

    parts = Recipe.parse("all", device.partition(":")[0], demo.config.in_training).parts
    return train_demo(demo, parts, device=device, dtype=dtype, progress=progress)


def learned(found: TrainedDemo) -> Shown:
    """The loss of each step and of held-out text, and the same prompts before and after."""
    steps, held_out = found.run.steps, found.run.evaluations
    fig = theme.figure("Loss, nats a token", height=320)
    fig.add_scatter(
        x=[step.number + 1 for step in steps], y=theme.rounded(found.run.losses), name="training",
        line={"color": theme.BASELINE, "width": 1.2},
    )  # fmt: skip
    fig.add_scatter(
        x=[each.num_steps for each in held_out], y=theme.rounded(each.loss for each in held_out), name="held-out text",
        mode="lines+markers", line={"color": theme.SELECTION, "width": 2.5},
    )  # fmt: skip
    fig.update_xaxes(title="step")
    num_tokens = sum(step.num_tokens for step in steps)
    return Shown(
        here(found.model),
        fig,
        f"{found.model.config.num_params:,} weights read {num_tokens:,} tokens in {counted(len(steps), 'step')} and "
        f"{brief(found.seconds)} s. On text that it never read, the loss fell from {held_out[0].loss:.2f} (random "
        f"guesses among {found.model.config.vocab_size:,} words: {math.log(found.model.config.vocab_size):.2f}) to "
        f"{held_out[-1].loss:.2f}: it takes the right word for {percent(found.right)} of all places. Where the two "
        "lines part, the model learns what it read by heart.",
    )


def written(model: Model, found: TrainedDemo) -> Shown:
    """The same prompts, continued before and after the training."""
    how: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.7, "top_k": 40}
    before, after = (generate(each, PROMPTS, **how).texts for each in (model, found.model))
    both = zip(PROMPTS, before, after, strict=True)
    rows = [[prompt, *(" ".join(text.split()) for text in each)] for prompt, *each in both]
    return Shown(table(["prompt", "untrained", "trained"], rows))


def saved(found: TrainedDemo) -> str:
    """The model as a checkpoint in a temporary folder, which transformers reads, too."""
    folder = Path(mkdtemp(prefix="eet-lab-")) / "trained-gpt2"
    replace(found.model, name=folder.name).save(folder)
    return str(folder)
