"""Does a recipe compute what the baseline computes? The check that stands before every timing.

B rows, T tokens of a pass, N generated tokens that are checked, C channels, V vocabulary. Margins are in units of the
logits, so that they can be held against what rounding does to those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eet_lab.bench.measured import Parity, Verdict
from eet_lab.engine.engine import Engine
from eet_lab.engine.generation import StepEvent
from eet_lab.engine.settings import Settings
from eet_lab.engine.tasks import next_tokens
from eet_lab.errors import Cancelled
from eet_lab.models.decoder import Decoder, forward, logits, mapped, op_by_op
from eet_lab.ops import reference
from eet_lab.ops.cases import error_budget
from eet_lab.ops.oom import memory_for
from eet_lab.ops.reference import gumbel, noise_keys
from eet_lab.ops.types import KV, Batch, Empty, Extras, Linear, Norm, Sampling, Spec, fresh
from eet_lab.parts import Ops, Parts
from eet_lab.parts.attend import Bounds
from eet_lab.parts.batches import left_padded
from eet_lab.progress import Cancel, raise_if_cancelled
from eet_lab.words import brief, counted

Rows = Sequence[Sequence[int]]

MOST_LOGITS = 4096
"""Rows times tokens whose logits are compared; beyond it only the first tokens of each row are, to bound memory."""


READING = "reading what the baseline says"
SAID = 8
"""How often a run tells how far it is."""


def parity(model: Decoder, parts: Parts, rows: Rows, settings: Settings, *, tolerance: float = 0.0) -> Parity:
    """Judge `parts` against the baseline on prompts `rows` (token ids); see `ParityCheck` for how.

    Errors: those of `Engine.generate`.
    """
    return ParityCheck(model, rows, settings).judge(parts, tolerance=tolerance)


class ParityCheck:
    """What the baseline answers on one workload: its tokens, and how far rounding alone takes its logits.

    A recipe runs with the baseline's tokens forced on it, so that logits stay comparable where a free run parts from
    the baseline. Both are held against a reference in higher precision (fp64 for fp32, fp32 for fp16 and bf16). The
    budget is twice the baseline's own error plus 4 eps of the largest logit: what another order of the same sums
    explains. Two logits that are each off by the budget can swap places if they lie within twice of it, so a free run
    may part from the baseline there and nowhere else: its token must lie within that margin of the reference's choice.
    Where the baseline itself overflows there is nothing to judge by, and everything is called different.

    A recipe that changes the weights is held to two things: with its own weights it computes what plain PyTorch
    computes with them, checked as above; and its logits are off from the baseline's by no more than it states.
    """

    def __init__(
        self,
        model: Decoder,
        rows: Rows,
        settings: Settings,
        baseline: Parts | None = None,
        cancel: Cancel | None = None,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.model, self.rows, self.cancel = model, [list(row) or [model.config.bos_id] for row in rows], cancel
        self.settings = replace(settings, stop=())  # every row to its full length, so that all can be compared
        self.num_checked = num_checked(settings, len(rows))
        self._baseline = baseline or Parts()
        self.tokens, logits = self._recorded(self._baseline, say=say)
        self._weighed = Engine(model, Parts(weights=self._baseline.weights)).model
        say(f"{READING}, at higher precision")
        self._reference = reference_logits(self._weighed, self.rows, self.tokens, self.num_checked, cancel)
        self._own_error = self._error(logits)
        self._largest = self._reference.abs().max().item()
        budget = error_budget(self._own_error, self._largest, model.dtype)
        self.sound = math.isfinite(budget)
        self.budget = budget if self.sound else 0.0

    @property
    def recorded_bytes(self) -> int:
        """Bytes of the logits that are recorded of a recipe while it is judged."""
        return len(self.rows) * (self.num_checked + 1) * len(self.model.head.weight) * self.model.dtype.itemsize

    def judge(self, parts: Parts, tokens: Rows | None = None, tolerance: float = 0.0) -> Parity:
        """Run a recipe's parts and compare. `tokens`: those of a free run, if there was one already.

        `tolerance`: how far a recipe with other weights may be off, as a share of the largest logit.
        """
        error = self._own_error
        if parts == self._baseline:
            tokens = tokens or self.tokens
        else:
            tokens = tokens or self._recorded(parts)[0]
            error = self._error(self._recorded(parts, forced=self.tokens)[1])
        firsts, margins = self.first_differences(tokens)
        budget = self.budget
        if parts.weights == self._baseline.weights:
            verdict, explanation = self._verdict(firsts, margins, error)
        else:
            budget += tolerance * self._largest if self.sound else 0.0
            verdict, explanation = self._lossy_verdict(parts, tokens, firsts, error, budget)
        same = not any(first is not None for first in firsts)
        known_error = error if math.isfinite(error) else None
        return Parity(same, firsts, margins, known_error, budget, verdict, explanation)

    def _lossy_verdict(
        self, parts: Parts, tokens: Rows, firsts: Sequence[int | None], error: float, budget: float
    ) -> tuple[Verdict, str]:
        """Of a recipe with other weights than the baseline's."""
        plain = Parts(weights=parts.weights)
        own = ParityCheck(self.model, self.rows, self.settings, plain, self.cancel).judge(parts, tokens)
        if own.verdict == "different":
            return "different", f"It is not what plain PyTorch computes with its weights: {own.explanation}"
        if not self.sound:
            return "different", self._overflow
        parted = [first for first in firsts if first is not None]
        told = _num_parted(firsts) + (f", the first at new token {min(parted) + 1}" if parted else "")
        told += f"; logits are off by up to {brief(error, 2)}, its stated bound is {brief(budget, 2)}"
        computed = "What it computes with its weights is what plain PyTorch computes with them, up to rounding."
        return ("lossy", f"{told}. {computed}") if error <= budget else ("different", f"Beyond its bound: {told}.")

    def first_differences(self, tokens: Rows) -> tuple[tuple[int | None, ...], tuple[float | None, ...]]:
        """Where each row's tokens part from the baseline's, and its token's margin there; None if nowhere."""
        firsts = tuple(_first_difference(a, b) for a, b in zip(self.tokens, tokens, strict=True))
        parted = enumerate(zip(firsts, tokens, strict=True))
        return firsts, tuple(
            self._margin(row, first, new[first]) if first is not None and self.sound else None
            for row, (first, new) in parted
        )

    def doubt(self, firsts: Sequence[int | None], margins: Sequence[float | None]) -> str | None:
        """Why these tokens cannot be what the baseline computes, or None."""
        if not self.sound:
            return self._overflow
        for row, (first, margin) in enumerate(zip(firsts, margins, strict=True)):
            if first is not None and margin is not None and not margin <= 2 * self.budget:
                return (
                    f"Prompt {row + 1} parts at new token {first + 1}, where its choice is {brief(margin, 2)} below "
                    f"the best, which is no near-tie: {self._allowed}."
                )
        return None

    @property
    def _overflow(self) -> str:
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"The baseline's own logits overflow in {dtype}, so that nothing can be held against them."

    @property
    def _allowed(self) -> str:
        return f"rounding explains up to {brief(self.budget, 2)}"

    def _recorded(
        self, parts: Parts, forced: Rows | None = None, say: Callable[[str], None] = lambda message: None
    ) -> tuple[tuple[tuple[int, ...], ...], Tensor]:
        """Tokens and logits [B,N,V] of a run; `say` is told how far it is."""

        def on_step(event: StepEvent) -> None:
            if event.index % max(1, event.num_steps // SAID) == 0:
                say(f"{READING}, step {event.index + 1} of {event.num_steps}")

        say(f"{READING}, {counted(len(self.rows), 'prompt')}")
        asked = self.rows, self.settings, self.num_checked
        return recorded(self.model, parts, *asked, forced=forced, cancel=self.cancel, on_step=on_step)

    @memory_for("the difference of logits")
    def _error(self, logits: Tensor) -> float:
        """The largest difference from the reference; infinite where there is a NaN."""
        # Row by row, so that only one row is widened at a time; torch's max, unlike Python's, lets a NaN through.
        rows = zip(logits, self._reference, strict=True)
        worst = torch.stack([(row.to(precise.dtype) - precise).abs().max() for row, precise in rows]).max().item()
        return worst if worst == worst else float("inf")

    def _margin(self, row: int, index: int, token: int) -> float:
        """How far `token` lies below what the reference chooses there."""
        logits = self._precise(row, index)
        if self.settings.temperature == 0:
            return greedy_margin(logits, token)
        noise = noise_at(self.settings.seed, row, len(self.rows[row]) + index - 1, logits)
        return drawn_margin(logits, token, noise, self.settings, 2 * self.budget)

    def _precise(self, row: int, index: int) -> Tensor:
        """The reference's logits [V] for one token; beyond N in a pass of their own."""
        if index < self.num_checked:
            return self._reference[row, index]
        read = [*self.rows[row], *self.tokens[row][:index]]
        return reference_logits(self._weighed, [read], [[]], 1)[0, 0]

    def _verdict(
        self, firsts: Sequence[int | None], margins: Sequence[float | None], error: float
    ) -> tuple[Verdict, str]:
        parted = [(row, first) for row, first in enumerate(firsts) if first is not None]
        doubt = self.doubt(firsts, margins)
        if self.sound and error > self.budget:
            size = f"by {brief(error, 2)}" if math.isfinite(error) else "without limit (NaN)"
            same = _num_parted(firsts) if parted else "the chosen tokens still agree"
            return "different", f"Its logits are off {size}, where {self._allowed}; {same}."
        if doubt is not None:
            return "different", doubt
        known = f"logits differ by at most {brief(error, 2)} from the precise ones, and {self._allowed}"
        if parted:
            row, first = parted[0]
            return "within rounding", (
                f"{_num_parted(firsts)}, the first at new token {first + 1} of prompt {row + 1}, at a near-tie of "
                f"{brief(margins[row] or 0.0, 2)}; {known}."
            )
        num_tokens = sum(map(len, self.tokens))
        agree = f"All {num_tokens:,} tokens agree" if num_tokens != 1 else "The only token agrees"
        return "identical", f"{agree}; {known}."


def num_checked(settings: Settings, num_rows: int) -> int:
    """N, of each row: all that are generated, unless there are very many."""
    return min(settings.max_new_tokens, max(1, MOST_LOGITS // num_rows))


def _num_parted(firsts: Sequence[int | None]) -> str:
    """How many prompts part. In words they and their tokens count from 1, in results from 0."""
    parted = sum(first is not None for first in firsts)
    return f"{parted} of {counted(len(firsts), 'prompt')} {'parts' if parted == 1 else 'part'}"


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """None where one is the beginning of the other: a row may have met its stop token."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


@memory_for("the pass at higher precision that recipes are held against")
@torch.inference_mode()
def reference_logits(model: Decoder, rows: Rows, tokens: Rows, num_tokens: int, cancel: Cancel | None = None) -> Tensor:
    """The logits [B,N,V] that choose each of the first N tokens, in one pass at higher precision.

    Weights are widened layer by layer as they are used, so that no second copy of the model is needed. `cancel` ends
    the pass at the next linear layer: Cancelled.
    """
    high = torch.float64 if model.dtype == torch.float32 else torch.float32

    def wide(w: Any) -> Any:
        raise_if_cancelled(cancel, "The check of the output")
        return mapped(w, lambda tensor: tensor.to(high))

    def embed(
        ids: Tensor, positions: Tensor, token_emb: Tensor, position_emb: Tensor | None, *, empty: Empty
    ) -> Tensor:
        x = token_emb[ids].to(high)
        return x if position_emb is None else x + position_emb[positions].to(high)

    def norm_linear(x: Tensor, norm_w: Norm | None, w: Linear, act: str | None = None, *, empty: Empty) -> Tensor:
        return reference.norm_linear(x, wide(norm_w), wide(w), act, empty=empty)

    def linear_residual(x: Tensor, w: Linear, residual: Tensor, *, empty: Empty) -> Tensor:
        return reference.linear_residual(x, wide(w), residual, empty=empty)

    def attention(qkv: Tensor, kv: KV | None, batch: Batch, spec: Spec, extras: Extras, *, empty: Empty) -> Tensor:
        extras = Extras(wide(extras.q_norm), wide(extras.k_norm), extras.inv_freq)
        return reference.attention(qkv, kv, batch, spec, extras, empty=empty)

    read = [[*row, *new[: num_tokens - 1]] for row, new in zip(rows, tokens, strict=True)]
    batch = mapped(left_padded(read), lambda part: part.to(model.device))
    ops = Ops(embed=embed, norm_linear=norm_linear, linear_residual=linear_residual, attention=attention).bind(fresh)
    hidden = forward(model, ops, Bounds(ops, batch, None, empty=fresh), batch, op_by_op)
    newest = hidden.view(len(rows), -1, hidden.shape[1])[:, -num_tokens:]
    return logits(model, ops, newest.flatten(0, 1)).view(len(rows), num_tokens, -1)


def greedy_margin(logits: Tensor, token: int) -> float:
    """How far below the best token `token` lies; logits [V]."""
    return (logits.max() - logits[token]).item()


def drawn_margin(logits: Tensor, token: int, noise: Tensor, settings: Settings, slack: float) -> float:
    """How far `token` lies below the token that a draw must take: logits [V], Gumbel noise [V].

    Two logits may move against each other by `slack`. Tokens that this lets in or out of the top-k or the top-p are
    nobody's mistake: `token` has to beat those only that stay in, and must be able to be in itself.
    """
    T = settings.temperature
    scores = logits / T
    value = scores + noise
    possible, certain = _kept(scores, settings, slack / T)
    if not possible[token]:
        return greedy_margin(logits, token)  # above the slack, or it could have been in
    rounding = 2.0**-22 * value.abs().max()  # the op adds the noise in fp32
    best = value[certain].max() if certain.any() else value[token]
    return max((best - value[token] - rounding).item() * T, 0.0)


def noise_at(seed: int, row: int, position: int, like: Tensor) -> Tensor:
    """The Gumbel noise [V] of one draw, as the ops make it; `like` [V] tells the device."""
    key = noise_keys(seed, row + 1, like.device)[row:]
    return gumbel(key, torch.tensor([position], device=like.device), len(like))[0]


def _kept(scores: Tensor, settings: Settings, slack: float) -> tuple[Tensor, Tensor]:
    """Tokens [V] that top-k and top-p may keep, and those that they must, where scores may move by `slack`."""
    V, k, p = len(scores), settings.top_k, settings.top_p
    possible = certain = torch.ones_like(scores, dtype=torch.bool)
    inside = scores
    if 0 < k < V:
        first = scores.topk(k + 1).values
        possible, certain = scores >= first[k - 1] - slack, scores > first[k] + slack
        inside = scores.masked_fill(scores < first[k - 1], -torch.inf)
    if p < 1:
        ordered = inside.sort(descending=True).values
        mass = torch.cat([ordered.new_zeros(1), ordered.softmax(-1).cumsum(-1)])
        least = mass[torch.searchsorted(-ordered, -(scores + slack))]  # of the tokens that are above in any case
        most = mass[torch.searchsorted(-ordered, -(scores - slack), right=True)] - inside.softmax(-1)
        # A share P moves by P (1 - P) <= 1/4 of what its log odds move; twice: tokens at the top-k's end come and go.
        moved = slack / 2
        possible, certain = possible & (least - moved < p), certain & (most + moved < p)
    return possible, certain


def recorded(
    model: Decoder, parts: Parts, rows: Rows, settings: Settings, num_tokens: int, **how: Any
) -> tuple[tuple[tuple[int, ...], ...], Tensor]:
    """The tokens of a run, and the logits [B,N,V] of the first N of each row. `how` is what `Engine.generate` takes.

    Errors: those of `Engine.generate`, and Cancelled.
    """
    keys = noise_keys(settings.seed, len(rows), model.device)
    recorder = LogitsRecorder(model, [len(row) for row in rows], num_tokens, keys)
    with closing(Engine(model, parts, recorder)) as engine:
        run = engine.generate(rows, settings, **how)
    logits = recorder.taken()
    if run.cancelled:
        raise Cancelled("The check of the output was stopped.")
    return run.tokens, logits


class LogitsRecorder:
    """A task that keeps the logits of the first N generated tokens, and lets the recipe choose.

    Where they go is computed on the device from a token's position, so that a replayed graph records as well. The key
    of a slot's noise tells which prompt it has now, if any: `keys` [B] are the prompts' own.
    """

    def __init__(self, model: Decoder, lengths: Sequence[int], num_tokens: int, keys: Tensor) -> None:
        B, V = len(lengths), len(model.head.weight)
        self._num_tokens, self._keys = num_tokens, keys
        self._lengths = torch.tensor(lengths, device=model.device)
        with memory_for(f"the record of logits [{B} x {num_tokens + 1} x {V}]"):
            self._kept = torch.zeros(B, num_tokens + 1, V, device=model.device, dtype=model.dtype)

    def taken(self) -> Tensor:
        """[B,N,V], given away: the engine that ran with this is a cycle, and would keep them until it is collected."""
        kept, self._kept = self._kept, self._kept.new_empty(0)
        return kept[:, : self._num_tokens]  # the slot after N took what came before and after

    def __call__(self, model: Decoder, ops: Ops, hidden: Tensor, batch: Batch, sampling: Sampling) -> Tensor:
        newest = logits(model, ops, hidden.index_select(0, batch.last))
        if not hidden.is_meta:
            row, is_there = self._rows(batch, sampling)
            index = batch.positions.index_select(0, batch.last) + 1 - self._lengths[row]
            is_asked = is_there & (index >= 0) & (index < self._num_tokens)
            self._kept[row, index.masked_fill(~is_asked, self._num_tokens)] = newest
        return next_tokens(model, ops, hidden, batch, sampling)

    def _rows(self, batch: Batch, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Which prompt each row of the pass has, and whether it has one."""
        owns = (sampling.noise[:, None] == self._keys) & (batch.count > 0)[:, None]
        return owns.int().argmax(1), owns.any(1)
