"""The case of a step's last op: norm, LM head and choice in one call. T tokens, B rows, C channels, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eet_lab.naming import TEXT, Form
from eet_lab.ops import reference
from eet_lab.ops.cases import Case, CaseFailed, error_budget
from eet_lab.ops.cuda.linear import takes_few
from eet_lab.ops.int8 import quantized
from eet_lab.ops.shapes import LinearShape, NamedShape, Normal, copied
from eet_lab.ops.types import Batch, Linear, Norm, Sampling, fresh


@dataclass(frozen=True)
class NextTokenShape(NamedShape):
    """B rows, each with its newest among T tokens, and the arg-max of V logits, or a draw.

    `mixed`: rows ask for that, and for less of it, in turn.
    """

    form = Form(
        "b<B rows>/t<T tokens>/v<V vocabulary>/c<C channels>"
        "[/int8]{/rms}{/tied}{/greedy}[/temp<temperature temperature>][/k<top_k top-k>]{/mixed}",
        temperature=TEXT,
    )

    B: int
    T: int
    V: int
    C: int
    int8: bool = False
    rms: bool = False
    tied: bool = False  # every C-th token has one and the same weight, 1: their logits are equal in any order of sums
    temperature: float = 0.0
    top_k: int = 0
    mixed: bool = False

    def named(self) -> Mapping[str, Any]:
        """Greedy is not named."""
        return {**vars(self), "greedy": None}

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What next_token takes: rows are as long as each other, or nearly, and have no pads."""
        normal = Normal(device, dtype, seed)
        x, weight = normal(self.T, self.C) + 1, normal(self.V, self.C, scale=self.C**-0.5)
        if self.tied:
            weight = torch.eye(self.C, device=device, dtype=dtype).repeat(-(-self.V // self.C), 1)[: self.V].clone()
        norm = Norm(normal(self.C) + 1, None if self.rms else normal(self.C), 1e-5)
        head = Linear(weight, None)
        if self.int8:
            whole, scale = quantized(weight)
            head = Linear(whole, None, scale)
        limits = asked(self.B, self.temperature, self.top_k, 1.0, self.mixed)
        sampling = Sampling.of(reference.noise_keys(seed, self.B, device), limits, self.V)
        return x, self.batch(device), norm, head, sampling

    def batch(self, device: str) -> Batch:
        """What the op reads of one: where the newest tokens are, and which place each token has."""
        end = (torch.arange(self.B, device=device) + 1) * self.T // max(self.B, 1)
        count = end.diff(prepend=end[:1] * 0)
        token, max_q = torch.arange(self.T, device=device), int(count.max()) if self.B else 0
        nothing = Batch(*[None] * 10)  # type: ignore[arg-type]
        return nothing._replace(positions=token, rows=token, last=end - 1, first=end - count, count=count, max_q=max_q)

    def read_bytes(self, itemsize: int) -> int:
        """The head, its scales and activations, and, where they are written, the logits out and in again; each once."""
        head, logits = self.V * self.C * itemsize, self.B * self.V * itemsize
        moved = LinearShape(self.B, self.V, self.C).read_bytes(itemsize) + self.B * 16
        moved += logits if self.writes_logits(itemsize) else -logits
        return moved - head + self.V * (self.C + 4) if self.int8 else moved

    def writes_logits(self, itemsize: int) -> bool:
        """Whether the choice needs more of them than the largest of parts, or the head is one that leaves no such."""
        if self.temperature and (self.top_k or self.int8):
            return True
        x = torch.empty(self.B, self.C, dtype=torch.float16 if itemsize == 2 else torch.float32, device="meta")
        weight = torch.empty(self.V, self.C, device="meta")
        return not takes_few(self.B, x, Linear(weight, None, weight if self.int8 else None), gathered=True)


@dataclass(frozen=True)
class NextTokenCase(Case):
    """An arg-max is right when rounding explains by how much another token beats it, and the lowest of those that tie.

    Every logit may be as far off as `Case.check` lets a linear's output be, so that two of them part by twice that. A
    draw is right when this explains by how much a token beats it that certainly is one of the top-k, score and noise
    taken together, and how far below these it stands.
    """

    def compared(
        self, shape: Any, dtype: torch.dtype, inputs: tuple[Any, ...], mine: tuple[Any, ...], got: Tensor
    ) -> tuple[float, float]:
        """How far a chosen token is beaten, by the reference's logits in fp64, and what rounding explains."""
        check_tokens(self, shape, got)
        if not shape.B:
            return 0.0, 0.0
        if shape.tied and bool((got[inputs[4].temperature == 0] >= shape.C).any()):
            raise CaseFailed(f"{self.name}/{shape}: {got.tolist()} are not the lowest of the tokens that tie.")
        exact = reference.newest_logits(*copied(inputs[:4], torch.float64), empty=fresh)
        low = reference.newest_logits(*copied(inputs[:4]), empty=fresh)
        lost = float((low.double() - exact).abs().max())
        budget = 2 * error_budget(lost, float(exact.abs().max()), dtype)
        return float(beaten(exact, got, inputs[1], inputs[4], budget).amax()), budget


def check_tokens(case: Case, shape: Any, got: Tensor) -> None:
    """CaseFailed for what is no token of the vocabulary in each row."""
    if got.shape != (shape.B,) or got.dtype != torch.int64 or not bool(((got >= 0) & (got < shape.V)).all()):
        raise CaseFailed(f"{case.name}/{shape}: {tuple(got.shape)} {got.dtype} is no token of {shape.V} a row.")


def asked(num_rows: int, T: float, k: int, p: float, mixed: bool) -> list[tuple[float, int, float]]:
    """A temperature, top-k and top-p for each row. Mixed rows have all of these limits, some of them, or none; or a
    temperature of 0, whatever the limits are; or a top-k of all tokens.
    """
    turn = [(T, k, p)]
    if mixed:
        turn += [(0.0, 0, 1.0), (T, 0, 1.0), (T, k, 1.0), (0.0, k, p), (T, 2**31 - 1, p), (T, 0, p)]
    return [turn[row % len(turn)] for row in range(num_rows)]


def beaten(exact: Tensor, got: Tensor, batch: Batch, sampling: Sampling, slack: float) -> Tensor:
    """The margin, in logits, by which each row's token is beaten: exact logits [B,V] in fp64, tokens [B] -> [B].

    Two logits may differ by `slack`: tokens that lie so far above the end of the top-k are certainly in it.
    """
    V, mine, temperature = exact.shape[-1], got[:, None], sampling.temperature[:, None].double()
    positions = batch.positions.index_select(0, batch.last)
    noisy = exact + temperature * reference.gumbel(sampling.noise, positions, V)
    top_k = sampling.top_k[:, None]
    is_cut = (temperature > 0) & (top_k > 0) & (top_k < V)
    end = exact.sort(-1, descending=True).values.gather(-1, torch.where(is_cut, top_k - 1, 0))
    certain, below = (exact > end + slack) | ~is_cut, (end - exact.gather(-1, mine)).masked_fill(~is_cut, 0)
    rivals = noisy.masked_fill(~certain, -torch.inf).amax(-1)
    return torch.maximum(rivals - noisy.gather(-1, mine)[:, 0], below[:, 0])


NEXT_TOKEN = NextTokenCase(
    "next_token",
    "next_token",
    (
        NextTokenShape(1, 1, 499, 64),
        NextTokenShape(3, 3, 1001, 72),
        NextTokenShape(2, 9, 499, 64),  # the newest of more tokens
        NextTokenShape(4, 4, 1003, 64, tied=True),
        NextTokenShape(5, 43, 1003, 64, tied=True),
        NextTokenShape(8, 8, 515, 200, rms=True),
        NextTokenShape(16, 16, 1001, 72),
        NextTokenShape(17, 17, 1003, 64, tied=True),  # too many rows to choose among as they end: logits are written
        NextTokenShape(65, 65, 403, 64, tied=True),
        NextTokenShape(20, 67, 499, 64),
        NextTokenShape(1, 1, 7, 8),  # fewer tokens than blocks
        NextTokenShape(0, 0, 100, 64),
        NextTokenShape(1, 1, 1003, 64, int8=True, tied=True),
        NextTokenShape(5, 43, 515, 208, int8=True),
        NextTokenShape(2, 5, 331, 200, int8=True),  # C is no multiple of 16: expanded, however few the rows are
        NextTokenShape(17, 17, 515, 64, int8=True),
        NextTokenShape(2, 2, 50257, 768),
        NextTokenShape(2, 2, 3003, 96),  # on two multiprocessors a head of as many weights a block
        # Draws from all tokens, in the head of every kernel; from the top-k, where it takes part and where it does not.
        *(NextTokenShape(B, T, V, 64, temperature=0.8) for B, T, V in ((1, 1, 499), (3, 7, 1001), (5, 43, 515))),
        NextTokenShape(16, 16, 1001, 72, temperature=1.3),
        NextTokenShape(2, 2, 3003, 96, temperature=0.8),
        NextTokenShape(1, 1, 50257, 768, temperature=0.8),
        NextTokenShape(2, 5, 1003, 64, int8=True, temperature=0.8),
        NextTokenShape(5, 5, 1003, 64, int8=True, top_k=20, temperature=0.8),
        NextTokenShape(1, 1, 499, 64, top_k=50, temperature=0.8),
        NextTokenShape(3, 7, 1003, 64, tied=True, top_k=9, temperature=1.0),
        NextTokenShape(6, 6, 1001, 72, top_k=132, temperature=1.3),
        NextTokenShape(4, 9, 1001, 72, top_k=133, temperature=1.3),
        NextTokenShape(1, 1, 7, 8, top_k=3, temperature=1.0),
        NextTokenShape(20, 67, 499, 64, top_k=10, temperature=1.0),
        NextTokenShape(8, 8, 50257, 768, top_k=50, temperature=0.8),
        # Rows that ask for different things, in every kernel; some have no limit, or a top-k of more than all blocks.
        *(
            NextTokenShape(B, T, V, C, top_k=k, temperature=0.8, mixed=True)
            for B, T, V, C in ((3, 7, 1003, 64), (7, 7, 1001, 72), (16, 43, 515, 72), (20, 20, 499, 64))
            for k in (0, 9)
        ),
        NextTokenShape(7, 7, 1003, 64, tied=True, top_k=133, temperature=1.3, mixed=True),
        *(NextTokenShape(7, 9, 1003, 64, int8=True, top_k=k, temperature=0.8, mixed=True) for k in (0, 20)),
    ),
    (
        NextTokenShape(1, 1, 50257, 1600),
        NextTokenShape(8, 8, 50257, 1600),
        *(NextTokenShape(B, B, 50257, 768, temperature=0.8) for B in (1, 8)),
        *(NextTokenShape(B, B, 50257, 768, temperature=0.8, top_k=50) for B in (1, 8)),
    ),
    launches=2,
)
