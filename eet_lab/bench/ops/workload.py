"""Workloads of a single op, under names such as `op:decode_attention/b1/kv1024/h25/d64`."""

from __future__ import annotations

from dataclasses import dataclass

from eet_lab.bench.ops.sizes import read
from eet_lab.errors import PromptError, did_you_mean
from eet_lab.ops.cases import Case
from eet_lab.ops.records import ALL_CASES
from eet_lab.ops.shapes import Shape

PREFIX = "op:"
TIMED_CASES = tuple(case for case in ALL_CASES if case.op != "advance")
"""All but the one that moves its state on with each call, in the end beyond its canvas."""


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
        attention any `b<rows>/kv<keys>/h<heads>[g<KV heads>]/d<head dim>` (`s<tokens>` for a prefill; `16-960` makes
        rows ragged, evenly spaced; `/packed` leaves the pads out), and so on (`sizes.FORMS`); other ops the sizes that
        their case lists.
        """
        name, _, sizes = text.strip().removeprefix(PREFIX).partition("/")
        cases = {case.name: case for case in TIMED_CASES}
        if not text.startswith(PREFIX) or name not in cases:
            hint = did_you_mean(name, cases).replace("'", f"'{PREFIX}", 1)
            raise PromptError(f"There is no {text!r}.{hint} There are op:{', op:'.join(cases)}.")
        case = cases[name]
        if not sizes:
            return tuple(cls(case, shape) for shape in case.bench)
        return (cls(case, read(case, sizes)),)
