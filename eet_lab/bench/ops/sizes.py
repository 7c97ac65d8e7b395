"""Sizes of an op, read from its workload's name and checked before any input is made.

T tokens, B rows, N outputs, C channels, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from eet_lab.bench.ops.plain import ACTS
from eet_lab.bench.workloads import evenly_spaced
from eet_lab.errors import PromptError, did_you_mean
from eet_lab.ops.cases import Case
from eet_lab.ops.row_cases import NormShape, SoftmaxShape
from eet_lab.ops.shapes import AttentionShape, LinearShape, Shape

LINEAR = re.compile(r"t(?P<T>\d+)/n(?P<N>\d+)/c(?P<C>\d+)(?:/(?P<act>\w+))?")
ROWS = re.compile(r"t(?P<T>\d+)/c(?P<C>\d+)")
ATTENTION = re.compile(
    r"b(?P<B>\d+)/(?:kv|s)(?P<low>\d+)(?:-(?P<high>\d+))?/h(?P<H>\d+)(?:g(?P<G>\d+))?/d(?P<D>\d+)(?P<packed>/packed)?"
)

MOST = 2**31 - 2**16
"""Of any size: kernels count in int32, and a loop over a row must not overflow when it steps past its end."""

MOST_BATCH_ROWS = 65_535
"""Of a grid's second dimension, where attention has its rows."""

MULTIPLE = 8
"""Of channels and head dims: kernels read 16 bytes at a time."""

MOST_HEAD_DIM = 256


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
    if form is not None and (found := form.pattern.fullmatch(sizes)):
        shape = form.make(example, found)
        if str(shape) == sizes:  # "kv" is a decode's word, "s" a prefill's
            return shape
    near = did_you_mean(sizes, known)
    means = f"Write {form.letters}, for example {example}." if form else f"It is timed at: {', '.join(known)}."
    raise PromptError(f"op:{case.name} has no sizes {sizes!r}. {means}{near if str(example) not in near else ''}")


def _linear(example: LinearShape, found: re.Match[str]) -> LinearShape:
    sizes, act = _numbers(found, "TNC"), found["act"]
    _check_multiple("C", sizes["C"])
    if act not in ACTS:
        raise PromptError(f"The activation is {act!r}, but it must be one of {', '.join(filter(None, ACTS))}.")
    if act and example.residual:
        plain = f"t{sizes['T']}/n{sizes['N']}/c{sizes['C']}"
        raise PromptError(f"The activation is {act!r}, but this op adds a residual and has none; give {plain}.")
    return replace(example, **sizes, act=act)  # type: ignore[arg-type]


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


def _norm(example: NormShape, found: re.Match[str]) -> NormShape:
    sizes = _numbers(found, "TC")
    _check_multiple("C", sizes["C"])
    return replace(example, **sizes)  # type: ignore[arg-type]


def _softmax(example: SoftmaxShape, found: re.Match[str]) -> SoftmaxShape:
    return replace(example, **_numbers(found, "TC"))


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
}


def _numbers(found: re.Match[str], names: Sequence[str]) -> dict[str, int]:
    """The sizes that are given, each from 1 to what kernels count to."""
    numbers = {name: found[name] for name in names if found[name] is not None}
    for name, digits in numbers.items():
        if len(digits) > len(str(MOST)) or not 1 <= int(digits) <= MOST:
            raise PromptError(f"{NAMES[name]} is {digits[:20]}, but it must be a whole number from 1 to {MOST:,}.")
    return {name: int(digits) for name, digits in numbers.items()}


def _check_multiple(name: str, size: int) -> None:
    if rest := size % MULTIPLE:
        down, up = size - rest, size - rest + MULTIPLE
        near = f"{down} or {up}" if down else str(up)
        raise PromptError(f"{NAMES[name]} is {size}, but kernels need a multiple of {MULTIPLE}; try {near}.")


FORMS: Mapping[type, Form] = {
    LinearShape: Form(LINEAR, "t<tokens>/n<outputs>/c<channels>[/<activation>]", _linear),
    AttentionShape: Form(
        ATTENTION, "b<rows>/kv<tokens>/h<heads>[g<KV heads>]/d<head dim> (s<tokens> for a prefill)", _attention
    ),
    NormShape: Form(ROWS, "t<tokens>/c<channels>", _norm),
    SoftmaxShape: Form(ROWS, "t<rows>/c<numbers a row>", _softmax),
}
"""Others, int8 linears among them, are timed at the sizes that their cases list."""
