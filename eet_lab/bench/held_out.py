"""Held-out text: how well a recipe's weights predict it, and how far its decode steps are from fp32 on it.

`perplexity` reads a text whole. A row of `accuracy:demo/b16/p64/n64` forces it on decode steps: 16 pieces of 64 tokens
are prompts, and the 64 tokens that follow each are forced, so that all are asked the same (teacher forcing). `kl` is
the mean Kullback-Leibler divergence of the next token's distribution from that of fp32, `nll` the mean negative
log-likelihood of the text's own token; both are nats.

B rows, S tokens of a window, T tokens of a pass, N forced tokens of a row, C channels, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, nll_loss

from eet_lab.bench.measured import Perplexity
from eet_lab.bench.parity import recorded, reference_logits
from eet_lab.bench.peers import to_hf
from eet_lab.bench.rows import ACCURACY, OURS, Row, credited, distinct, named, taken
from eet_lab.bench.workloads import HeldOut, Workload
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings, checked_prompts
from eet_lab.errors import Cancelled, ModelError, PromptError
from eet_lab.models import Model
from eet_lab.models.decoder import Decoder, logits
from eet_lab.models.loading import DEMO
from eet_lab.models.on_device import on_its_device
from eet_lab.ops.oom import memory_for
from eet_lab.ops.types import Batch, Sampling, fresh
from eet_lab.parts import Ops, Parts
from eet_lab.progress import Cancel, Progress, raise_if_cancelled
from eet_lab.scheduling import LEFT_PADDED
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike, as_recipe
from eet_lab.words import counted, plain

HELD_OUT = "held-out documentation of Python"
"""What the demo model never saw in training; other models may have."""

WINDOW = 1024
BATCH = 4  # windows that are read at once
CHUNK = 512  # tokens whose logits [CHUNK,V] exist at once


class Window(NamedTuple):
    """A piece of a text, of which the tokens from `first` on are scored; those before them are context."""

    ids: list[int]
    first: int


@on_its_device
def perplexity(
    model: Model,
    recipe: RecipeLike = "",
    text: str | Sequence[int] | None = None,
    *,
    window: int | None = None,
    stride: int | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Perplexity:
    """Read a text (or its token ids; default: held-out text that ships with the demo model) and score every token.

    The text is cut into windows of `window` tokens (default: the model's context, at most 1,024) that begin `stride`
    tokens apart (default: `window`, so that they do not overlap). Of each window the tokens that no window before it
    scored are scored, given all that stand before them in the window. Windows are read whole, by the parallel pass of
    the recipe's own ops and weights, whatever it does with prompts.

    Errors: ModelError for random weights, and for text without a tokenizer; PromptError; RecipeError; Cancelled.
    """
    if why := why_not(model, text):
        raise ModelError(f"There is no perplexity to tell: {why}.")
    name = HELD_OUT if text is None else "a given text"
    ids = held_out(model) if text is None else model.encode(text if isinstance(text, str) else list(text))
    window = min(model.config.context, WINDOW) if window is None else window
    cut = list(windows(ids, *_checked(ids, window, window if stride is None else stride, model)))
    parts = as_recipe(recipe, model.device, model.config).parts
    scorer = Scorer(parts.ops, model.decoder.device)
    with closing(Engine(model.decoder, replace(parts, schedule=LEFT_PADDED), scorer)) as engine:
        engine.prepare(progress, cancel)
        for start in range(0, len(cut), BATCH):
            batch = cut[start : start + BATCH]
            if progress is not None:
                progress(start, len(cut), f"reading {name}")
            scorer.expect(batch)
            run = engine.generate([each.ids[:-1] for each in batch], Settings(max_new_tokens=1), cancel=cancel)
            if run.cancelled:
                raise Cancelled("Reading the text was stopped.")
    num_tokens = sum(len(each.ids) - each.first for each in cut)
    return Perplexity(scorer.nats.item() / num_tokens, num_tokens, name)


def held_out_perplexity(model: Model, recipe: Recipe, cancel: Cancel | None) -> Perplexity:
    """The same for the default text, as a result keeps it: where there is none to tell, it holds the reason."""
    why = why_not(model)
    return Perplexity(None, 0, HELD_OUT, why) if why else perplexity(model, recipe, cancel=cancel)


def why_not(model: Model, text: str | Sequence[int] | None = None) -> str | None:
    """Why the model's perplexity would say nothing, or cannot be had; None where it can."""
    if model.kind == "random":
        return f"the weights of {model.name} are random, so that no text is likelier than another"
    if model.tokenizer is None and (text is None or isinstance(text, str)):
        return f"{model.name} came without a tokenizer, and the text has to be read as its tokens"
    return None


def held_out(model: Model) -> list[int]:
    """The bundled held-out documents as the model's tokens, each after its end-of-text token where it has one."""
    with (DEMO / "heldout.jsonl").open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    end = [] if model.config.eos_id is None else [model.config.eos_id]
    return [token for text in texts for token in (*end, *model.encode(text))]


def windows(ids: Sequence[int], window: int, stride: int) -> Iterator[Window]:
    """Windows that together score every token once, but for those that begin a window and have nothing before them."""
    scored = 0
    for begin in range(0, len(ids) - 1, stride):
        end = min(begin + window, len(ids))
        if end > scored:
            yield Window(list(ids[begin:end]), max(scored - begin, 1))
            scored = end


def _checked(ids: Sequence[int], window: int, stride: int, model: Model) -> tuple[int, int]:
    """Window and stride; PromptError for what cannot be read."""
    if len(ids) < 2:
        has = counted(len(ids), "token")
        raise PromptError(f"The text has {has}, but the first one is only context: give at least two.")
    if not 2 <= window <= model.config.context:
        raise PromptError(f"window is {window}, but it must be from 2 to the model's context, {model.config.context}.")
    if not 1 <= stride <= window:
        raise PromptError(f"stride is {stride}, but it must be from 1 to the window, {window}, to leave no gap.")
    return window, stride


class Scorer:
    """A task that chooses nothing, and adds up how surprising the text's own next tokens are.

    Its logits have memory of their own: no meta trace knows how many tokens of a pass are scored.
    """

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self._ops = ops.bind(fresh)
        self._expected = torch.empty(0)
        self.nats = torch.zeros((), dtype=torch.float64, device=device)

    def expect(self, batch: Sequence[Window]) -> None:
        """What follows each position of the next pass's rows, [B,S]; -1 where it is not scored."""
        longest = max(len(each.ids) for each in batch)
        expected = torch.full((len(batch), longest), -1)
        for row, (ids, first) in enumerate(batch):
            expected[row, first - 1 : len(ids) - 1] = torch.tensor(ids[first:])
        self._expected = expected.to(self.nats.device)

    def __call__(self, model: Decoder, ops: Ops, hidden: Tensor, batch: Batch, sampling: Sampling) -> Tensor:
        if not hidden.is_meta:
            expected = self._expected[batch.rows, batch.positions]
            scored = ((expected >= 0) & (batch.columns >= batch.keys.begin[batch.rows])).nonzero()[:, 0]
            for chosen in scored.split(CHUNK):
                found = logits(model, self._ops, hidden[chosen])
                self.nats += cross_entropy(found.float(), expected[chosen], reduction="sum")
        return torch.zeros_like(batch.last)


HF = "hf-sdpa"


class Distance(NamedTuple):
    """Means over all tokens, in nats."""

    kl: float
    nll: float


class Pieces(NamedTuple):
    """Prompts, and the tokens that the text goes on with."""

    prompts: list[list[int]]
    following: list[list[int]]

    @classmethod
    def of(cls, model: Model, workload: HeldOut) -> Pieces:
        """Evenly spaced pieces of the held-out text. Errors: ModelError for a model that knows no text; PromptError."""
        if why := why_not(model):
            raise ModelError(f"There is no accuracy to tell: {why}.")
        ids, length = held_out(model), workload.low + workload.new_tokens
        if workload.low != workload.high:
            raise PromptError(f"{workload}: pieces of text are of one length. Write p{workload.high}.")
        if workload.batch * length > len(ids):
            raise PromptError(
                f"{workload} asks for {workload.batch * length:,} tokens of held-out text, but there are {len(ids):,}. "
                "Take fewer rows, or shorter ones."
            )
        begins = [number * len(ids) // workload.batch for number in range(workload.batch)]
        pieces = [ids[begin : begin + length] for begin in begins]
        return cls([each[: workload.low] for each in pieces], [each[workload.low :] for each in pieces])


@on_its_device
def measure_accuracy(
    model: Model,
    workload: Workload | str,
    recipes: RecipeLike | Sequence[RecipeLike] = ("all",),
    providers: Sequence[str] | str = (OURS,),
    *,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> tuple[list[Row], list[str]]:
    """Each recipe's distance from fp32, and transformers': is its KL at most twice that of plain PyTorch?

    The baseline is measured in any case, since it sets the bound, to which what fp32 itself may lose is added. Returns
    rows and remarks. Errors: ModelError for random weights; RecipeError, PromptError, OutOfMemory, Cancelled.
    """
    workload = HeldOut.of(ACCURACY + str(workload).strip().removeprefix(ACCURACY), model)
    providers = named(providers, (OURS, HF), "accuracy")
    chosen, remarks = distinct(recipes, model.device, model.config) if OURS in providers else ([], [])
    pieces, decoder = Pieces.of(model, workload), model.decoder
    checked_prompts(pieces.prompts, Settings(workload.new_tokens), model.config)
    names: list[Recipe | str] = [Recipe(), *(recipe for recipe in chosen if recipe != Recipe())]
    names += [HF] if HF in providers else []
    precise = reference_logits(decoder, pieces.prompts, pieces.following, workload.new_tokens, cancel)
    found: dict[str, Distance] = {}
    for done, each in enumerate(names):
        raise_if_cancelled(cancel, "The benchmark")
        if progress is not None:
            progress(done, len(names), str(each) or "baseline")
        got = by_hf(decoder, pieces) if isinstance(each, str) else by_steps(decoder, each.parts, pieces, cancel)
        found[str(each)] = distance(precise, got, pieces.following)
    ulps = 4 * torch.finfo(torch.float32).eps * float(precise.abs().max())  # what fp32 itself may lose
    bound = 2 * found[str(Recipe())].kl + ulps**2
    return [_row(workload, name, model, each, bound) for name, each in found.items()], remarks


def by_steps(decoder: Decoder, parts: Parts, pieces: Pieces, cancel: Cancel | None = None) -> Tensor:
    """The logits [B,N,V] of an engine's passes, with what follows forced on them."""
    prompts, following = pieces
    num = len(following[0])
    return recorded(decoder, parts, prompts, Settings(num), num, forced=following, cancel=cancel)[1]


@memory_for("transformers' logits")
@torch.inference_mode()
def by_hf(decoder: Decoder, pieces: Pieces) -> Tensor:
    """The same of transformers, in one pass."""
    model: Any = to_hf(decoder)
    model.set_attn_implementation("sdpa")
    rows = [[*row, *new] for row, new in zip(*pieces, strict=True)]
    first = len(pieces.prompts[0]) - 1
    return model(torch.tensor(rows, device=decoder.device)).logits[:, first:-1]


def distance(precise: Tensor, got: Tensor, following: Sequence[Sequence[int]]) -> Distance:
    """The distance of logits [B,N,V] from those at higher precision. One row at a time is converted to fp64."""
    kl = nll = 0.0
    for exact, row, tokens in zip(precise, got, following, strict=True):
        wanted, said = (log_softmax(each.double(), -1) for each in (exact, row))
        kl += float(kl_div(said, wanted, reduction="sum", log_target=True))
        nll += float(nll_loss(said, torch.tensor(tokens, device=said.device), reduction="sum"))
    num_tokens = sum(map(len, following))
    return Distance(max(kl / num_tokens, 0.0), nll / num_tokens)


def _row(workload: HeldOut, name: str, model: Model, found: Distance, bound: float) -> Row:
    told = f"KL {plain(found.kl)}, its bound is {plain(bound)}"
    told = told if math.isfinite(found.kl) else "KL is not finite: logits are NaN or infinite"
    return taken(
        model.device,
        workload=str(workload),
        **credited(name, (HF,)),
        dtype=model.dtype,
        equality="passed" if found.kl <= bound else told,  # NaN is not
        kl=found.kl,
        nll=found.nll,
    )
