"""What can stand in for an op, and whether it gives what the op's reference gives, checked before any timing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from eet_lab.errors import EETError, first_line
from eet_lab.ops import cuda, reference
from eet_lab.ops.oom import is_out_of_memory
from eet_lab.ops.shapes import AttentionShape, copied
from eet_lab.ops.types import fresh
from eet_lab.words import brief

if TYPE_CHECKING:
    from eet_lab.bench.ops.workload import OpWorkload

Inputs = tuple[Any, ...]


class LeftOut(Exception):
    """A provider that cannot take these sizes; says why."""


class Prepared(NamedTuple):
    """`call` is what is timed; `read` gives its output the rows of the reference's, without pads."""

    call: Callable[[], Any]
    read: Callable[[Any], Tensor] = lambda out: out


def always(given: Any) -> str | None:
    """No reason against: for what runs everywhere, or takes all sizes."""
    return None


@dataclass(frozen=True)
class OpProvider:
    """A way to do some ops. What it leaves out of an op is said in `less`: then its output is not compared.

    `make(shape, inputs)` may lay the inputs out as it likes best: only the call is timed. It raises `LeftOut` for sizes
    that it does not take.
    """

    name: str
    ops: tuple[str, ...]
    make: Callable[[Any, Inputs], Prepared]
    unavailable: Callable[[str], str | None] = always
    less: str = ""
    unfit: Callable[[Any], str | None] = always


NO_ROOM = "not checked: there is no room for the reference in fp64"

EXACT = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
"""SDPA's kernels for the reference; sanitizers object to cuDNN's."""


class Judge:
    """What the op should give, by the reference in fp64, and how far rounding takes the reference itself.

    The budget is that of `Case.check`: twice the reference's own error, and four roundings of the largest number.
    """

    def __init__(self, workload: OpWorkload, device: str, dtype: torch.dtype) -> None:
        self._workload, self._device, self._dtype = workload, device, dtype
        self._exact: Tensor | None = None
        case, inputs = workload.case, workload.shape.inputs(device, dtype, 0)
        plain = getattr(reference, case.op)
        try:
            with sdpa_kernel(EXACT):
                exact = case.call(plain, copied(inputs, torch.float64), fresh)
                low = case.call(plain, copied(inputs), fresh)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return
        real = slice(None)
        if isinstance(workload.shape, AttentionShape):
            batch = inputs[2]
            real = batch.columns >= batch.keys.begin[batch.rows]
        self._exact, low = exact[real], low[real]
        rounding = 4 * torch.finfo(dtype).eps * float(self._exact.abs().max())
        self._budget = 2 * float((low - self._exact).abs().max()) + rounding

    def ours(self) -> str:
        """ "passed", or why not: by the case's own check, which sees more than the output."""
        if self._exact is None:
            return NO_ROOM
        case = self._workload.case
        try:
            with sdpa_kernel(EXACT):
                case.check(getattr(cuda, case.op), self._workload.shape, self._device, self._dtype)
        except EETError as problem:
            return first_line(problem)
        return "passed"

    def verdict(self, prepared: Prepared, less: str = "") -> str:
        """The same for another provider's output; one that does `less` than the op cannot be compared."""
        if less or self._exact is None:
            return f"not compared: {less}" if less else NO_ROOM
        got = prepared.read(prepared.call())
        error = float((got.view(self._exact.shape) - self._exact).abs().max())
        return "passed" if error <= self._budget else f"error {brief(error)}, the budget is {brief(self._budget)}"
