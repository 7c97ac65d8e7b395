"""How far a recipe's decode steps are from fp32, on text that a trained model knows how to continue.

A row of `accuracy:demo/b16/p64/n64`: 16 pieces of held-out text, of 64 tokens each, are prompts; the 64 tokens that
follow each of them are forced on the decode steps, so that all are asked the same (teacher forcing). `kl` is the mean
Kullback-Leibler divergence of the next token's distribution from that of fp32, `nll` the mean negative log-likelihood
of the text's own token; both are nats.

B pieces, N tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, nll_loss

from eet_lab.bench import timing
from eet_lab.bench.benchmark import check_is_of, distinct
from eet_lab.bench.logits import LogitsRecorder, reference_logits
from eet_lab.bench.peers import to_hf
from eet_lab.bench.perplexity import held_out, why_not
from eet_lab.bench.providers import OURS, named
from eet_lab.bench.rows import Row, taken
from eet_lab.bench.workloads import ACCURACY, Workload
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings, checked_prompts
from eet_lab.errors import Cancelled, ModelError, PromptError
from eet_lab.models import Model
from eet_lab.models.decoder import Decoder
from eet_lab.models.on_device import on_its_device
from eet_lab.ops.oom import memory_for
from eet_lab.ops.reference import noise_keys
from eet_lab.parts import Parts
from eet_lab.progress import Cancel, Progress
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike
from eet_lab.words import plain

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
    def of(cls, model: Model, workload: Workload) -> Pieces:
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
    workload = Workload.parse(workload.removeprefix(ACCURACY)) if isinstance(workload, str) else workload
    check_is_of(workload, model)
    providers = named(providers, (OURS, HF), "accuracy")
    chosen, remarks = distinct(recipes, model.device, model.config) if OURS in providers else ([], [])
    pieces, decoder = Pieces.of(model, workload), model.decoder
    checked_prompts(pieces.prompts, Settings(workload.new_tokens), model.config)
    names: list[Recipe | str] = [Recipe(), *(recipe for recipe in chosen if recipe != Recipe())]
    names += [HF] if HF in providers else []
    precise = reference_logits(decoder, pieces.prompts, pieces.following, workload.new_tokens, cancel)
    found: dict[str, Distance] = {}
    for done, each in enumerate(names):
        timing.check(cancel)
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
    keys = noise_keys(0, len(prompts), decoder.device)
    recorder = LogitsRecorder(decoder, [len(row) for row in prompts], len(following[0]), keys)
    with closing(Engine(decoder, parts, recorder)) as engine:
        run = engine.generate(prompts, Settings(len(following[0])), forced=following, cancel=cancel)
    if run.cancelled:
        raise Cancelled("The check of the output was stopped.")
    return recorder.taken()


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


def _row(workload: Workload, name: str, model: Model, found: Distance, bound: float) -> Row:
    is_within = found.kl <= bound  # NaN is not
    return taken(
        model.device,
        workload=ACCURACY + str(workload),
        provider=HF if name == HF else OURS,
        recipe="" if name == HF else name,
        dtype=model.dtype,
        equality="passed" if is_within else f"KL {plain(found.kl)}, its bound is {plain(bound)}",
        kl=found.kl,
        nll=found.nll,
    )
