"""Workloads of a single op, under names such as `op:decode_attention/b1/kv1024/h25/d64`.

Sizes are read from the name and checked before any input is made.

T tokens, B rows, N outputs, C channels, V vocabulary, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from eet_lab.bench.static_decoder import ACTS
from eet_lab.bench.train_ops import TRAIN_CASES
from eet_lab.engine.settings import Settings
from eet_lab.errors import PromptError, did_you_mean
from eet_lab.naming import Form
from eet_lab.ops.cases import Case
from eet_lab.ops.cuda.tokens import MOST_BLOCKS
from eet_lab.ops.fits import FEW
from eet_lab.ops.int8_cases import Int8Shape
from eet_lab.ops.next_token_case import NextTokenShape
from eet_lab.ops.records import ALL_CASES
from eet_lab.ops.row_cases import NormShape, SoftmaxShape
from eet_lab.ops.shapes import AttentionShape, LinearShape, NamedShape, Shape
from eet_lab.ops.token_cases import ChooseShape, EmbedShape, TopKShape

OP = "op:"
"""How their names begin."""

TIMED_CASES = (*(case for case in ALL_CASES if case.op != "advance"), *TRAIN_CASES)
"""All but the one that moves its state on with each call, in the end beyond its token buffer; and those of training."""


@dataclass(frozen=True)
class OpWorkload:
    """A case of the tests, and the sizes to time it at."""

    case: Case
    shape: Shape

    def __str__(self) -> str:
        return f"{OP}{self.case.name}/{self.shape}"

    @classmethod
    def parse(cls, text: str) -> tuple[OpWorkload, ...]:
        """One from its whole name; all that a case lists from `op:<case>` alone. PromptError that shows the form.

        The `form` of a shape says how its sizes are written; where `16-960` makes rows ragged, they are evenly spaced.
        Ops whose shapes have none take the sizes that their case lists.
        """
        name, _, sizes = text.strip().removeprefix(OP).partition("/")
        cases = {case.name: case for case in TIMED_CASES}
        if not text.startswith(OP) or name not in cases:
            hint = did_you_mean(name, cases).replace("'", f"'{OP}", 1)
            raise PromptError(f"There is no {text!r}.{hint} There are op:{', op:'.join(cases)}.")
        case = cases[name]
        if not sizes:
            return tuple(cls(case, shape) for shape in case.bench)
        return (cls(case, read(case, sizes)),)


def evenly_spaced(low: int, high: int, num: int) -> tuple[int, ...]:
    """`num` lengths from `low` to `high`, both among them."""
    return tuple(round(low + (high - low) * i / max(num - 1, 1)) for i in range(num))


MOST = 2**31 - 2**16
"""The most of any size: kernels count in int32, and a loop over a row must not overflow when it steps past its end."""

MOST_BATCH_ROWS = 65_535
"""The most rows of attention, which are the second dimension of its grid."""

MULTIPLE = 8
"""The divisor of channels and head dims: kernels read 16 bytes at a time."""

MOST_HEAD_DIM = 256

LEAST_GROUP = 64
"""The fewest inputs that share a scale of int8 weights."""

AnyChoice = TypeVar("AnyChoice", bound=ChooseShape)
AnyLinear = TypeVar("AnyLinear", bound=LinearShape)
AnyRows = TypeVar("AnyRows", NormShape, EmbedShape)


class Given(dict[str, Any]):
    """What a name gives of each field of its form; PromptError for a size that no op takes."""

    def __init__(self, form: Form, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._form = form
        for name, size in self.items():
            if isinstance(size, int) and not 1 <= size <= MOST:
                raise self.refused(name, f"it must be a whole number from 1 to {MOST:,}.")

    def refused(self, name: str, why: str) -> PromptError:
        """The error for one field."""
        return PromptError(f"{self.label(name)} is {'not given' if self[name] is None else self[name]}, but {why}")

    def label(self, name: str) -> str:
        """What the form calls it."""
        return self._form.label(name)

    def check_multiple(self, name: str) -> None:
        """PromptError where kernels cannot read 16 bytes at a time."""
        if rest := self[name] % MULTIPLE:
            down, up = self[name] - rest, self[name] - rest + MULTIPLE
            near = f"{down} or {up}" if down else str(up)
            raise self.refused(name, f"kernels need a multiple of {MULTIPLE}; try {near}.")

    def real(self, name: str, default: float) -> float:
        """A field that is no whole number."""
        if (text := self.get(name)) is None:
            return default
        try:
            return float(text)
        except ValueError:
            told = f"{text[:20]!r}, but it must be a number such as 0.8."
            raise PromptError(f"{self.label(name)} is {told}") from None

    def of(self, names: str) -> dict[str, Any]:
        """The fields of these letters."""
        return {name: self[name] for name in names}


def read(case: Case, sizes: str) -> Shape:
    """The shape that `sizes` names; PromptError that says which size cannot be, or shows the form."""
    known = {str(shape): shape for shape in case.bench}
    if sizes in known:
        return known[sizes]
    example = case.bench[0] if case.bench else case.shapes[0]
    make = MAKERS.get(type(example))
    if make is None or not isinstance(example, NamedShape):
        hint = f"It is timed at: {', '.join(known)}.{did_you_mean(sizes, known)}"
    elif values := example.form.read(sizes):
        shape = make(example, Given(example.form, values))
        if str(shape) == sizes:
            return shape
        hint = f"Write {shape}."  # "kv" is a decode's word, "s" a prefill's; 0.80 is 0.8
    else:
        hint = f"Write {example.form}, for example {example}."
    raise PromptError(f"op:{case.name} has no sizes {sizes!r}. {hint}")


def _linear(example: AnyLinear, given: Given) -> AnyLinear:
    shape, act = replace(example, **given.of("TNC")), given["act"]
    given.check_multiple("C")
    if act not in ACTS:
        raise PromptError(f"The activation is {act!r}, but it must be one of {', '.join(filter(None, ACTS))}.")
    if act and example.residual:
        raise PromptError(f"The activation is {act!r}, but this op adds a residual and has none; give {shape}.")
    return replace(shape, act=act)


def _int8(example: Int8Shape, given: Given) -> Int8Shape:
    shape, group = _linear(example, given), given["group"] or 0
    if group and (group < LEAST_GROUP or group.bit_count() > 1):
        raise given.refused("group", f"it must be a power of two, at least {LEAST_GROUP}.")
    if group >= shape.C:
        raise given.refused("group", f"an output has {shape.C}: leave g{group} out for one scale.")
    return replace(shape, group=group)


def _attention(example: AttentionShape, given: Given) -> AttentionShape:
    B, low, H, D = (given[name] for name in ("B", "low", "H", "D"))
    high, G = given["high"] or low, given["G"] or H
    if B > MOST_BATCH_ROWS:
        raise PromptError(f"b (rows) is {B:,}, but it must be from 1 to {MOST_BATCH_ROWS:,}; give fewer rows.")
    if high < low:
        raise PromptError(f"Rows from {low} to {high} tokens: the second must not be the smaller.")
    if H % G:
        raise given.refused("H", f"it must be a multiple of {given.label('G')}, which is {G}.")
    if D > MOST_HEAD_DIM:
        raise given.refused("D", f"kernels need at most {MOST_HEAD_DIM}, a multiple of {MULTIPLE}.")
    given.check_multiple("D")
    lengths = evenly_spaced(low, high, B)
    return replace(example, lengths=lengths, H=H, G=G, D=D, packed=bool(given["packed"]), slack=0)


def _rows(example: AnyRows, given: Given) -> AnyRows:
    given.check_multiple("C")
    return replace(example, **given.of("TC"))


def _softmax(example: SoftmaxShape, given: Given) -> SoftmaxShape:
    return replace(example, **given.of("TC"))


def _sizes(example: Any, given: Given) -> Any:
    """Sizes of training, all of which the name has."""
    for name in ("C", "D"):
        if name in given:
            given.check_multiple(name)
    return replace(example, **{name: value for name, value in given.items() if value is not None})


def _next_token(example: NextTokenShape, given: Given) -> NextTokenShape:
    given.check_multiple("C")
    if given["T"] < given["B"]:
        raise given.refused("T", f"each of {given['B']} rows has one at least.")
    draw = _draw(given)
    shape = replace(example, **given.of("BTVC"), int8=bool(given["int8"]))
    return replace(shape, temperature=draw.temperature, top_k=draw.top_k)


def _choose(example: AnyChoice, given: Given) -> AnyChoice:
    draw = _draw(given)
    return replace(example, **given.of("BV"), temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p)


def _top_k(example: TopKShape, given: Given) -> TopKShape:
    shape, num_blocks = _choose(example, given), given["num_blocks"]
    if shape.B > FEW:
        raise given.refused("B", f"this op takes at most {FEW}; op:choose takes more.")
    if num_blocks > min(shape.V, MOST_BLOCKS):
        most = f"at most {MOST_BLOCKS}, and no more than {given.label('V')}, {shape.V}"
        raise PromptError(f"blocks is {num_blocks}, but it must be {most}.")
    if not 0 < shape.top_k <= num_blocks:
        raise given.refused("top_k", f"it must be from 1 to the number of blocks, {num_blocks}.")
    return replace(shape, num_blocks=num_blocks, clumped=False)


def _draw(given: Given) -> Settings:
    """The temperature, top-k and top-p that are given; PromptError as for a request, or where they do nothing."""
    draw = Settings.of(
        temperature=given.real("temperature", 0.0), top_p=given.real("top_p", 1.0), top_k=given["top_k"] or 0
    )
    if draw.top_k >= given["V"]:
        raise given.refused("top_k", f"it must be less than {given.label('V')}, {given['V']}.")
    if not draw.temperature and (draw.top_k or draw.top_p < 1):
        raise PromptError("k and p do nothing without a temperature; give one, for example temp1.")
    return draw


MAKERS: Mapping[type, Callable[[Any, Given], Shape]] = {
    LinearShape: _linear,
    Int8Shape: _int8,
    AttentionShape: _attention,
    NormShape: _rows,
    SoftmaxShape: _softmax,
    EmbedShape: _rows,
    NextTokenShape: _next_token,
    ChooseShape: _choose,
    TopKShape: _top_k,
    **{type(case.bench[0]): _sizes for case in TRAIN_CASES},
}
"""What makes a shape of a case's example and the sizes that are given; other ops have those that their cases list."""
