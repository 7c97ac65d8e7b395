"""Workloads of a single op, under names such as `op:decode_attention/b1/kv1024/h25/d64`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eet_lab.bench.workloads import evenly_spaced
from eet_lab.errors import PromptError, did_you_mean
from eet_lab.ops.all_cases import ALL_CASES
from eet_lab.ops.cases import Case
from eet_lab.ops.row_cases import NormShape, SoftmaxShape
from eet_lab.ops.shapes import AttentionShape, LinearShape, Shape

PREFIX = "op:"
TIMED_CASES = tuple(case for case in ALL_CASES if case.op != "advance")
"""All but the one that moves its state on with each call, in the end beyond its canvas."""

LINEAR = re.compile(r"t(?P<T>\d+)/n(?P<N>\d+)/c(?P<C>\d+)(?:/(?P<act>\w+))?")
ROWS = re.compile(r"t(?P<T>\d+)/c(?P<C>\d+)")
ATTENTION = re.compile(
    r"b(?P<B>\d+)/(?:kv|s)(?P<low>\d+)(?:-(?P<high>\d+))?/h(?P<H>\d+)(?:g(?P<G>\d+))?/d(?P<D>\d+)(?P<packed>/packed)?"
)


@dataclass(frozen=True)
class OpWorkload:
    """A case of the tests, and the sizes to time it at."""

    case: Case
    shape: Shape

    def __str__(self) -> str:
        return f"{PREFIX}{self.case.name}/{self.shape}"

    @classmethod
    def parse(cls, text: str) -> tuple[OpWorkload, ...]:
        """One from its whole name; all that a case lists from `op:<case>` alone. PromptError that shows the form.

        Linears take any `t<tokens>/n<outputs>/c<channels>[/<activation>]`, norm and softmax any `t<rows>/c<numbers>`,
        attention any
        `b<rows>/kv<keys>/h<heads>[g<KV heads>]/d<head dim>` (`s<tokens>` for a prefill; `16-960` makes rows ragged,
        evenly spaced; `/packed` leaves the pads out); other ops the sizes that their case lists.
        """
        name, _, sizes = text.strip().removeprefix(PREFIX).partition("/")
        cases = {case.name: case for case in TIMED_CASES}
        if not text.startswith(PREFIX) or name not in cases:
            raise PromptError(f"There is no {text!r}.{did_you_mean(name, cases)} There are op:{', op:'.join(cases)}.")
        case = cases[name]
        if not sizes:
            return tuple(cls(case, shape) for shape in case.bench)
        return (cls(case, _shape(case, sizes)),)


def _shape(case: Case, sizes: str) -> Shape:
    known = {str(shape): shape for shape in case.bench}
    if sizes in known:
        return known[sizes]
    example = case.bench[0] if case.bench else case.shapes[0]
    for kind, pattern, make in KINDS:
        if isinstance(example, kind) and (found := pattern.fullmatch(sizes)):
            shape = make(example, found)
            if str(shape) == sizes:  # "kv" is a decode's word, "s" a prefill's
                return shape
    raise PromptError(f"op:{case.name} has no sizes {sizes!r}.{did_you_mean(sizes, known)} Try {example}.")


def _linear(example: LinearShape, found: re.Match[str]) -> LinearShape:
    sizes = {name: int(found[name]) for name in "TNC"}
    return replace(example, **sizes, act=found["act"])  # type: ignore[arg-type]


def _attention(example: AttentionShape, found: re.Match[str]) -> AttentionShape:
    B, low, high, H, G, D = (int(found[name] or 0) for name in ("B", "low", "high", "H", "G", "D"))
    lengths = evenly_spaced(low, high or low, B)
    return replace(example, lengths=lengths, H=H, G=G or H, D=D, packed=bool(found["packed"]), slack=0)


def _rows(example: NormShape | SoftmaxShape, found: re.Match[str]) -> NormShape | SoftmaxShape:
    return replace(example, T=int(found["T"]), C=int(found["C"]))


KINDS: Sequence[tuple[Any, re.Pattern[str], Callable[[Any, re.Match[str]], Shape]]] = (
    (LinearShape, LINEAR, _linear),
    (AttentionShape, ATTENTION, _attention),
    (NormShape, ROWS, _rows),
    (SoftmaxShape, ROWS, _rows),
)
