"""Workloads of a single op, under names such as `op:decode_attention/b1/kv1024/h25/d64`.

Sizes are read from the name and checked before any input is made.

T tokens, B rows, N outputs, C channels, V vocabulary, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from eet_lab.bench.ops.providers import ACTS
from eet_lab.bench.workloads import OP, evenly_spaced
from eet_lab.engine.settings import Settings
from eet_lab.errors import PromptError, did_you_mean
from eet_lab.ops.cases import Case
from eet_lab.ops.cuda.tiles import FEW
from eet_lab.ops.cuda.tokens import MOST_BLOCKS
from eet_lab.ops.int8_cases import Int8Shape
from eet_lab.ops.next_token_case import NextTokenShape
from eet_lab.ops.records import ALL_CASES
from eet_lab.ops.row_cases import NormShape, SoftmaxShape
from eet_lab.ops.shapes import AttentionShape, LinearShape, Shape
from eet_lab.ops.token_cases import ChooseShape, EmbedShape, TopKShape

TIMED_CASES = tuple(case for case in ALL_CASES if case.op != "advance")
"""All but the one that moves its state on with each call, in the end beyond its canvas."""


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

        Linears take any `t<tokens>/n<outputs>/c<channels>[/<activation>]`, norm and softmax any `t<rows>/c<numbers>`,
        attention any `b<rows>/kv<keys>/h<heads>[g<KV heads>]/d<head dim>` (`s<tokens>` for a prefill; `16-960` makes
        rows ragged, evenly spaced; `/packed` leaves the pads out), and so on (`FORMS`); other ops the sizes that
        their case lists.
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


LINEAR = re.compile(r"t(?P<T>\d+)/n(?P<N>\d+)/c(?P<C>\d+)(?:/(?P<act>(?!int8)\w+))?")
INT8 = re.compile(LINEAR.pattern + r"/int8(?:g(?P<group>\d+))?")
ROWS = re.compile(r"t(?P<T>\d+)/c(?P<C>\d+)")
ATTENTION = re.compile(
    r"b(?P<B>\d+)/(?:kv|s)(?P<low>\d+)(?:-(?P<high>\d+))?/h(?P<H>\d+)(?:g(?P<G>\d+))?/d(?P<D>\d+)(?P<packed>/packed)?"
)
DRAW = r"(?:/greedy)?(?:/temp(?P<temperature>[^/]*))?(?:/k(?P<top_k>\d+))?"
TOP_P = r"(?:/p(?P<top_p>[^/]*))?"
NEXT_TOKEN = re.compile(r"b(?P<B>\d+)/t(?P<T>\d+)/v(?P<V>\d+)/c(?P<C>\d+)(?P<int8>/int8)?" + DRAW)
CHOOSE = re.compile(r"b(?P<B>\d+)/v(?P<V>\d+)" + DRAW + TOP_P)
TOP_K = re.compile(CHOOSE.pattern + r"/blocks(?P<num_blocks>\d+)")

MOST = 2**31 - 2**16
"""Of any size: kernels count in int32, and a loop over a row must not overflow when it steps past its end."""

MOST_BATCH_ROWS = 65_535
"""Of a grid's second dimension, where attention has its rows."""

MULTIPLE = 8
"""Of channels and head dims: kernels read 16 bytes at a time."""

MOST_HEAD_DIM = 256

LEAST_GROUP = 64
"""Of inputs that share a scale of int8 weights."""

AnyLinear = TypeVar("AnyLinear", bound=LinearShape)
AnyChoice = TypeVar("AnyChoice", bound=ChooseShape)
AnyRows = TypeVar("AnyRows", NormShape, EmbedShape)


class Form(NamedTuple):
    """How the sizes of one kind of op are written, what the letters mean, and what makes a shape of them."""

    pattern: re.Pattern[str]
    letters: str
    make: Callable[[Any, re.Match[str]], Shape]


def read(case: Case, sizes: str) -> Shape:
    """The shape that `sizes` names; PromptError that says which size cannot be, or shows the form."""
    known = {str(shape): shape for shape in case.bench}
    if sizes in known:
        return known[sizes]
    example = case.bench[0] if case.bench else case.shapes[0]
    form = FORMS.get(type(example))
    if form is None:
        hint = f"It is timed at: {', '.join(known)}.{did_you_mean(sizes, known)}"
    elif found := form.pattern.fullmatch(sizes):
        shape = form.make(example, found)
        if str(shape) == sizes:
            return shape
        hint = f"Write {shape}."  # "kv" is a decode's word, "s" a prefill's; 0.80 is 0.8
    else:
        hint = f"Write {form.letters}, for example {example}."
    raise PromptError(f"op:{case.name} has no sizes {sizes!r}. {hint}")


def _linear(example: AnyLinear, found: re.Match[str]) -> AnyLinear:
    sizes, act = _numbers(found, "TNC"), found["act"]
    _check_multiple("C", sizes["C"])
    if act not in ACTS:
        raise PromptError(f"The activation is {act!r}, but it must be one of {', '.join(filter(None, ACTS))}.")
    if act and example.residual:
        plain = str(replace(example, **sizes))  # type: ignore[arg-type]
        raise PromptError(f"The activation is {act!r}, but this op adds a residual and has none; give {plain}.")
    return replace(example, **sizes, act=act)  # type: ignore[arg-type]


def _int8(example: Int8Shape, found: re.Match[str]) -> Int8Shape:
    shape = _linear(example, found)
    group = _numbers(found, ("group",)).get("group", 0)
    if group and (group < LEAST_GROUP or group.bit_count() > 1):
        raise PromptError(f"{NAMES['group']} is {group}, but it must be a power of two, at least {LEAST_GROUP}.")
    if group >= shape.C:
        raise PromptError(
            f"{NAMES['group']} is {group}, but an output has {shape.C}: leave g{group} out for one scale."
        )
    return replace(shape, group=group)


def _attention(example: AttentionShape, found: re.Match[str]) -> AttentionShape:
    sizes = _numbers(found, ("B", "low", "high", "H", "G", "D"))
    B, low, H, D = (sizes[name] for name in ("B", "low", "H", "D"))
    high, G = sizes.get("high", low), sizes.get("G", H)
    if B > MOST_BATCH_ROWS:
        raise PromptError(f"b (rows) is {B:,}, but it must be from 1 to {MOST_BATCH_ROWS:,}; give fewer rows.")
    if high < low:
        raise PromptError(f"Rows from {low} to {high} tokens: the second must not be the smaller.")
    if H % G:
        raise PromptError(f"h (heads) is {H}, but it must be a multiple of g (KV heads), which is {G}.")
    if D > MOST_HEAD_DIM:
        raise PromptError(f"d (head dim) is {D}, but kernels need at most {MOST_HEAD_DIM}, a multiple of {MULTIPLE}.")
    _check_multiple("D", D)
    lengths = evenly_spaced(low, high, B)
    return replace(example, lengths=lengths, H=H, G=G, D=D, packed=bool(found["packed"]), slack=0)


def _rows(example: AnyRows, found: re.Match[str]) -> AnyRows:
    sizes = _numbers(found, "TC")
    _check_multiple("C", sizes["C"])
    return replace(example, **sizes)  # type: ignore[arg-type]


def _softmax(example: SoftmaxShape, found: re.Match[str]) -> SoftmaxShape:
    return replace(example, **_numbers(found, "TC"))


def _next_token(example: NextTokenShape, found: re.Match[str]) -> NextTokenShape:
    sizes = _numbers(found, "BTVC")
    _check_multiple("C", sizes["C"])
    if sizes["T"] < sizes["B"]:
        raise PromptError(f"t (tokens) is {sizes['T']}, but each of {sizes['B']} rows has one at least.")
    draw = _draw(found, sizes["V"])
    shape = replace(example, **sizes)  # type: ignore[arg-type]
    return replace(shape, int8=bool(found["int8"]), temperature=draw.temperature, top_k=draw.top_k)


def _choose(example: AnyChoice, found: re.Match[str]) -> AnyChoice:
    sizes = _numbers(found, "BV")
    draw = _draw(found, sizes["V"])
    return replace(example, **sizes, temperature=draw.temperature, top_k=draw.top_k, top_p=draw.top_p)


def _top_k(example: TopKShape, found: re.Match[str]) -> TopKShape:
    shape = _choose(example, found)
    num_blocks = _numbers(found, ("num_blocks",))["num_blocks"]
    if shape.B > FEW:
        raise PromptError(f"b (rows) is {shape.B}, but this op takes at most {FEW}; op:choose takes more.")
    if num_blocks > min(shape.V, MOST_BLOCKS):
        most = f"at most {MOST_BLOCKS}, and no more than v (vocabulary), {shape.V}"
        raise PromptError(f"blocks is {num_blocks}, but it must be {most}.")
    if not 0 < shape.top_k <= num_blocks:
        told = shape.top_k or "not given"
        raise PromptError(f"{NAMES['top_k']} is {told}, but it must be from 1 to the number of blocks, {num_blocks}.")
    return replace(shape, num_blocks=num_blocks, clumped=False)


def _draw(found: re.Match[str], vocab_size: int) -> Settings:
    """The temperature, top-k and top-p that are given; PromptError as for a request, or where they do nothing."""
    given = {name: _real(name, text) for name, text in found.groupdict().items() if name in REALS and text is not None}
    draw = Settings.of(**given, **_numbers(found, ("top_k",)))
    if draw.top_k >= vocab_size:
        raise PromptError(f"{NAMES['top_k']} is {draw.top_k}, but it must be less than {NAMES['V']}, {vocab_size}.")
    if not draw.temperature and (draw.top_k or draw.top_p < 1):
        raise PromptError("k and p do nothing without a temperature; give one, for example temp1.")
    return draw


NAMES: Mapping[str, str] = {
    "T": "t (tokens)",
    "N": "n (outputs)",
    "C": "c (channels)",
    "B": "b (rows)",
    "low": "kv or s (tokens a row)",
    "high": "kv or s (tokens a row)",
    "H": "h (heads)",
    "G": "g (KV heads)",
    "D": "d (head dim)",
    "V": "v (vocabulary)",
    "num_blocks": "blocks",
    "top_k": "k (top-k)",
    "group": "int8g (inputs that share a scale)",
}


def _numbers(found: re.Match[str], names: Sequence[str]) -> dict[str, int]:
    """The sizes that are given, each from 1 to what kernels count to."""
    numbers = {name: found[name] for name in names if found[name] is not None}
    for name, digits in numbers.items():
        if len(digits) > len(str(MOST)) or not 1 <= int(digits) <= MOST:
            raise PromptError(f"{NAMES[name]} is {digits[:20]}, but it must be a whole number from 1 to {MOST:,}.")
    return {name: int(digits) for name, digits in numbers.items()}


def _real(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PromptError(f"{REALS[name]} is {text[:20]!r}, but it must be a number such as 0.8.") from None


def _check_multiple(name: str, size: int) -> None:
    if rest := size % MULTIPLE:
        down, up = size - rest, size - rest + MULTIPLE
        near = f"{down} or {up}" if down else str(up)
        raise PromptError(f"{NAMES[name]} is {size}, but kernels need a multiple of {MULTIPLE}; try {near}.")


REALS: Mapping[str, str] = {"temperature": "temp (temperature)", "top_p": "p (top-p)"}


FORMS: Mapping[type, Form] = {
    LinearShape: Form(LINEAR, "t<tokens>/n<outputs>/c<channels>[/<activation>]", _linear),
    Int8Shape: Form(INT8, "t<tokens>/n<outputs>/c<channels>[/<activation>]/int8[g<inputs that share a scale>]", _int8),
    AttentionShape: Form(
        ATTENTION, "b<rows>/kv<tokens>/h<heads>[g<KV heads>]/d<head dim> (s<tokens> for a prefill)", _attention
    ),
    NormShape: Form(ROWS, "t<tokens>/c<channels>", _rows),
    SoftmaxShape: Form(ROWS, "t<rows>/c<numbers a row>", _softmax),
    EmbedShape: Form(ROWS, "t<tokens>/c<channels>", _rows),
    NextTokenShape: Form(
        NEXT_TOKEN,
        "b<rows>/t<tokens of all rows>/v<vocabulary>/c<channels>[/int8][/temp<temperature>][/k<top-k>]",
        _next_token,
    ),
    ChooseShape: Form(
        CHOOSE, "b<rows>/v<vocabulary>/greedy or b<rows>/v<vocabulary>/temp<temperature>[/k<top-k>][/p<top-p>]", _choose
    ),
    TopKShape: Form(TOP_K, "b<rows>/v<vocabulary>/temp<temperature>/k<top-k>[/p<top-p>]/blocks<of the head>", _top_k),
}
"""Others are timed at the sizes that their cases list."""
