"""Cases of the ops between layers and tokens: embedding, the choice of a token, and the step of the state.

T tokens, B rows, C channels, V vocabulary, S columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from eet_lab.naming import TEXT, Form
from eet_lab.ops import reference
from eet_lab.ops.cases import Case, CaseFailed
from eet_lab.ops.next_token_case import NEXT_TOKEN, asked, check_tokens
from eet_lab.ops.shapes import NamedShape, Normal, Shape, copied
from eet_lab.ops.types import Empty, Sampling, TokenBuffer, fresh

MASS_ROUNDING = 1e-5  # of a sum of fp32 chances: a token this close to the top-p's end may be in or out


@dataclass(frozen=True)
class EmbedShape(NamedShape):
    """T tokens of a vocabulary of V, and S positions."""

    form = Form("t<T tokens>/c<C channels>")

    T: int
    C: int
    V: int = 1000
    S: int = 100  # 0: there are no position embeddings

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What embed takes."""
        normal = Normal(device, dtype, seed)
        most = self.V, self.S or 100
        ids, positions = (torch.randint(n, (self.T,), generator=normal.source).to(device) for n in most)
        return ids, positions, normal(self.V, self.C), normal(self.S, self.C) if self.S else None

    def read_bytes(self, itemsize: int) -> int:
        """A row out for each token, and where it comes from; each row of the tables that some token has, once."""
        num_rows = self.T + _num_distinct(self.T, self.V) + _num_distinct(self.T, self.S)
        return num_rows * self.C * itemsize + self.T * 16

    def held_bytes(self, itemsize: int) -> int:
        """The same with the whole tables."""
        return (self.T + self.V + self.S) * self.C * itemsize + self.T * 16


def _num_distinct(count: int, n: int) -> int:
    """Of so many numbers drawn below n: about as many as are expected."""
    return round(n * (1 - (1 - 1 / n) ** count)) if n else 0


@dataclass(frozen=True)
class ChooseShape(NamedShape):
    """Logits [B,V] of a normal distribution that is `spread` wide, and how to choose among them.

    `mixed`: rows ask for that, and for less of it, in turn.
    """

    form = Form(
        "b<B rows>/v<V vocabulary>[/greedy][/temp<temperature temperature>][/k<top_k top-k>][/p<top_p top-p>]{/mixed}",
        temperature=TEXT,
        top_p=TEXT,
    )

    B: int
    V: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    spread: float = 3.0
    mixed: bool = False

    def named(self) -> Mapping[str, Any]:
        """A top-p of 1 is not named, nor is the usual spread."""
        top_p, spread = self.top_p if self.top_p < 1 else None, f"{self.spread:g}" if self.spread != 3 else None
        return {**vars(self), "greedy": not (self.temperature or self.top_k or top_p), "top_p": top_p, "spread": spread}

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What choose takes."""
        logits = Normal(device, dtype, seed)(self.B, self.V, scale=self.spread)
        positions = torch.arange(self.B, device=device) * 7 + seed
        keys = reference.noise_keys(seed * 2**33 + 11, self.B, device)
        return logits, positions, self.sampling(keys)

    def sampling(self, noise: Tensor) -> Sampling:
        """What rows with these noise keys [B] ask for."""
        limits = asked(len(noise), self.temperature, self.top_k, self.top_p, self.mixed)
        return Sampling.of(noise, limits, self.V)

    def read_bytes(self, itemsize: int) -> int:
        """All logits once."""
        return self.B * (self.V * itemsize + 16)


@dataclass(frozen=True)
class TopKShape(ChooseShape):
    """The same, with the largest of each of so many blocks of tokens beside them, as an LM head leaves them.

    `clumped`: the first tokens tend to be the largest, as the frequent ones of a tokenizer.
    """

    form = ChooseShape.form.plus("/blocks<num_blocks of the head>{/spread<spread>}{/clumped}", spread=TEXT)

    temperature: float = 1.0
    top_k: int = 50
    num_blocks: int = 132
    clumped: bool = False

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """What choose_top_k takes."""
        logits, positions, sampling = super().inputs(device, dtype, seed)
        if self.clumped:
            logits -= self.spread / 2 * (torch.arange(self.V, device=device) / 50).log1p()
        rows = torch.arange(self.B, device=device)
        return logits, block_maxima(logits, self.num_blocks), rows, positions, sampling

    def read_bytes(self, itemsize: int) -> int:
        """All logits once, and the blocks' largest."""
        return super().read_bytes(itemsize) + self.B * (self.num_blocks * 8 + 8)


def block_maxima(logits: Tensor, num_blocks: int) -> Tensor:
    """Where each block of tokens has its largest, [B,V] -> [B,num_blocks] int64; the first blocks may be one longer.

    As unsigned numbers these have the order of the logits, and their lower half is 2**32 - 1 minus the token.
    """
    parts = [part.max(-1) for part in (logits.float() + 0).tensor_split(num_blocks, -1)]
    begin = torch.tensor([len(part) for part in torch.arange(logits.shape[-1]).tensor_split(num_blocks)]).cumsum(0)
    begin = begin.roll(1).index_fill(0, torch.tensor([0]), 0).to(logits.device)
    bits = torch.stack([part.values for part in parts], -1).view(torch.int32).long()
    tokens = torch.stack([part.indices for part in parts], -1) + begin
    ordered = torch.where(bits < 0, ~bits, bits | 1 << 31) & 0xFFFFFFFF
    return ordered << 32 | 0xFFFFFFFF - tokens


@dataclass(frozen=True)
class AdvanceShape(Shape):
    """B rows of S columns: some still stand in their prompts, some are done, some were not read."""

    B: int
    S: int = 40

    def __str__(self) -> str:
        return f"b{self.B}/s{self.S}"

    def inputs(self, device: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
        """A token buffer, the tokens of a pass and how many each row read; it lies in memory as the engine's does."""
        source, middle = torch.Generator().manual_seed(seed), self.S // 2

        def draw(high: int, *shape: int) -> Tensor:
            return torch.randint(high, shape, generator=source)

        tokens, columns = draw(50257, self.S, self.B).t(), draw(middle, self.B)
        buffer = TokenBuffer(
            tokens=tokens,
            end=columns + draw(6, self.B),
            limit=columns + draw(8, self.B),
            columns=columns,
            ids=tokens.gather(1, columns[:, None])[:, 0],
            positions=draw(middle, self.B),
            log=draw(50257, 4, self.B + 3),
            num_passes=draw(9, 1),
        )
        count = draw(4, self.B)
        there = TokenBuffer(*(part.to(device) for part in buffer))
        first = there._replace(log=there.log[:, : self.B])  # there are more slots than this pass is of
        return first, draw(50257, self.B).to(device), count.to(device)

    def read_bytes(self, itemsize: int) -> int:
        """Thirteen numbers of 8 bytes a row, read or written."""
        return self.B * 13 * 8


@dataclass(frozen=True)
class ChooseCase(Case):
    """A choice is right when no token that certainly stays beats it by more than rounding; an arg-max is one number."""

    def call(self, op: Callable[..., Tensor], inputs: tuple[Any, ...], empty: Empty) -> Tensor:
        """The reference's plainest choice asks for no memory."""
        return op(*inputs) if op is reference.choose else op(*inputs, empty=empty)

    def compared(
        self, shape: Any, dtype: torch.dtype, inputs: tuple[Any, ...], mine: tuple[Any, ...], got: Tensor
    ) -> tuple[float, float]:
        """How far the token is beaten, by the reference's rules in fp64, and what rounding explains."""
        check_tokens(self, shape, got)
        if not shape.B:
            return 0.0, 0.0
        logits, *_, positions, sampling = inputs
        wrong = int((got != logits.argmax(-1))[sampling.temperature == 0].sum())
        if sampling.greedy or wrong:
            return float(wrong), 0.0
        value, certain, possible = judged(logits, positions, sampling)
        chosen = got[:, None]
        behind = value.masked_fill(~certain, -torch.inf).amax(-1, keepdim=True) - value.gather(-1, chosen)
        error = float(behind.masked_fill(~possible.gather(-1, chosen), torch.inf).amax())
        return error, 4 * torch.finfo(torch.float32).eps * float(value.abs().amax())


def judged(logits: Tensor, positions: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Three fp64 tensors [B,V]: score plus noise; tokens that certainly stay in top-k and top-p; those that may."""
    V, is_drawn = logits.shape[-1], (sampling.temperature > 0)[:, None]
    top_k, top_p = (
        torch.where(is_drawn, part[:, None], limit) for part, limit in zip(sampling[3:], (0, 1), strict=True)
    )
    scores = logits.double() * torch.where(is_drawn, 1 / sampling.temperature.double()[:, None], 1)
    value = torch.where(is_drawn, scores + reference.gumbel(sampling.noise, positions, V), scores)
    ordered = scores.sort(-1, descending=True).values
    last = ordered.gather(-1, torch.where(top_k > 0, top_k - 1, V - 1).clamp(max=V - 1))
    rounding = 4 * torch.finfo(torch.float32).eps * last.abs()  # two fp32 scores may become one
    certain, possible = scores >= last, scores >= last - rounding
    scores = scores.masked_fill(~certain, -torch.inf)
    ordered, order = scores.sort(-1, descending=True)
    mass = torch.cat([torch.zeros_like(ordered[:, :1]), ordered.softmax(-1).cumsum(-1)], -1)
    above = mass.gather(-1, torch.searchsorted(-ordered, -scores))  # of the tokens that are larger
    is_cut = top_p < 1
    certain &= (above < top_p - MASS_ROUNDING) | ~is_cut
    possible &= (above < top_p + MASS_ROUNDING) | ~is_cut
    certain.scatter_(-1, order[:, :1], True)
    return value, certain, possible


@dataclass(frozen=True)
class AdvanceCase(Case):
    """A step of the state is right to the last bit."""

    def call(self, op: Callable[..., Any], inputs: tuple[Any, ...], empty: Empty) -> Tensor:
        """The token buffer after the step."""
        op(*inputs, empty=empty)
        return inputs[0].tokens

    def compared(
        self, shape: Any, dtype: torch.dtype, inputs: tuple[Any, ...], mine: tuple[Any, ...], got: Tensor
    ) -> tuple[float, float]:
        """No numbers may differ from the reference's."""
        want = copied(inputs)
        self.call(reference.advance, want, fresh)
        for name, found, expected in zip(TokenBuffer._fields, mine[0], want[0], strict=True):
            if wrong := int((found != expected).sum()):
                raise CaseFailed(f"{self.name}/{shape}: {wrong} of {found.numel()} numbers of {name} differ.")
        return 0.0, 0.0


HOW: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 200, "top_p": 0.6},
)


MIXED: tuple[dict[str, Any], ...] = tuple(how | {"mixed": True} for how in HOW[1:])


TOP_K: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 1},
    {"top_k": 131, "temperature": 0.8},
    {"top_p": 0.9, "temperature": 0.7},
    {"top_k": 7, "top_p": 0.3, "temperature": 1.3},
)


def _top_k(sizes: tuple[tuple[int, int], ...], **more: Any) -> tuple[Shape, ...]:
    return tuple(TopKShape(B, V, **how, **more) for (B, V), how in product(sizes, TOP_K))


def _choices(sizes: tuple[tuple[int, int], ...], **more: Any) -> tuple[Shape, ...]:
    return tuple(ChooseShape(B, V, **how, **more) for (B, V), how in product(sizes, HOW))


TOKEN_CASES = (
    Case(
        "embed",
        "embed",
        (*(EmbedShape(T, C) for T, C in ((1, 768), (0, 64), (5, 8), (37, 1600), (3, 12288))), EmbedShape(5, 1600, S=0)),
        tuple(EmbedShape(T, C) for T, C in ((1, 768), (8, 1600), (4096, 1600))),
    ),
    ChooseCase(
        "choose",
        "choose",
        (
            *_choices(((1, 499), (3, 4096), (17, 50257), (300, 1001), (2, 7))),
            *_choices(((2, 5000),), spread=0.0),  # all tokens tie
            *_choices(((2, 5000),), spread=40.0),  # one token has nearly all chances
            *(ChooseShape(B, V, **how) for (B, V), how in product(((9, 499), (17, 50257), (2, 7)), MIXED)),
            ChooseShape(2, 151936, 1.0, top_k=151935, top_p=0.99),
            ChooseShape(4, 1000, 1.0, top_k=1, top_p=1e-9),
            ChooseShape(0, 100),
        ),
        _choices(((1, 50257), (8, 50257), (64, 50257), (1, 151936))),
    ),
    ChooseCase(
        "choose_top_k",
        "choose_top_k",
        (
            *_top_k(((1, 499), (3, 4096), (16, 50257))),
            *_top_k(((2, 9000),), clumped=True),
            # All tokens tie: more than a list has room for, more than can be put in order, and not.
            *_top_k(((2, 5000), (2, 1500), (2, 300)), spread=0.0),
            # A whole cluster, its lists short, long and too long.
            *(TopKShape(1, 50257, top_k=k, clumped=clumped) for k in (50, 131) for clumped in (False, True)),
            TopKShape(1, 151936, top_p=0.9),
            # Rows without a top-k, or with one of more than there are blocks, beside such as have a smaller one.
            *(
                TopKShape(B, V, 0.8, k, p, mixed=True)
                for B, V in ((7, 499), (16, 50257))
                for k, p in ((50, 1), (9, 0.7))
            ),
            *(TopKShape(B, 4096, 1.0, top_k=k, top_p=0.9) for B, k in ((3, 133), (2, 4096), (1, 0))),
            *_top_k(((2, 5000),), spread=40.0),
            TopKShape(3, 1000, top_k=3, num_blocks=3),
            TopKShape(3, 1000, top_k=8, top_p=0.5, num_blocks=8, clumped=True),
            TopKShape(1, 2000, top_k=400, num_blocks=512),
            TopKShape(1, 151936, top_k=512, num_blocks=512),
            # Sums that rounding brings to the end too late.
            TopKShape(2, 5000, top_k=131, top_p=1 - 2**-24, spread=0.01),
            TopKShape(2, 7, top_k=5, num_blocks=7),
            TopKShape(0, 1000),
        ),
        (
            *(TopKShape(B, V, **how) for B, V in ((1, 50257), (8, 50257), (1, 151936)) for how in (TOP_K[0], TOP_K[3])),
            *(TopKShape(B, 50257, clumped=True) for B in (1, 8)),
        ),
    ),
    NEXT_TOKEN,
    AdvanceCase(
        "advance",
        "advance",
        tuple(AdvanceShape(B) for B in (1, 5, 33, 2000)),
        tuple(AdvanceShape(B) for B in (1, 64)),
    ),
)
