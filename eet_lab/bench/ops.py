"""benchmark_op: one op at one size, ours beside others, in one process, timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from eet_lab.bench import timing
from eet_lab.bench.cost import TIMES, arithmetic, beyond_caches, last_cache_bytes, predicted_ms, streaming_gb_per_s
from eet_lab.bench.fit import check_op_fit
from eet_lab.bench.launches import StepLaunches, counting
from eet_lab.bench.measured import Spread
from eet_lab.bench.op_providers import Prepared, names_for, provider_of
from eet_lab.bench.op_workloads import OpWorkload
from eet_lab.bench.rows import OURS, Row, taken
from eet_lab.bench.run_memory import with_peak
from eet_lab.bench.timing import SHARED, Rounds, Series, Tally, Timed
from eet_lab.bench.train_ops import TrainCase
from eet_lab.devices import checked_device, kind_of, present
from eet_lab.errors import EETError, PromptError, did_you_mean, first_line
from eet_lab.models.loading import checked_dtype
from eet_lab.ops import cuda, native
from eet_lab.ops.cases import error_budget
from eet_lab.ops.oom import is_out_of_memory, memory_for
from eet_lab.ops.shapes import AttentionShape, copied
from eet_lab.ops.types import fresh
from eet_lab.progress import Cancel, Progress
from eet_lab.threads import cpu_threads
from eet_lab.words import brief

NO_ROOM = "not checked: there is no room for the reference in fp64"

EXACT = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
"""SDPA's kernels for the reference; sanitizers object to cuDNN's."""


class Judge:
    """What the op should give, by the reference in fp64, and how far rounding takes the reference itself.

    The budget is that of `Case.check`.
    """

    def __init__(self, workload: OpWorkload, device: str, dtype: torch.dtype) -> None:
        self._workload, self._device, self._dtype = workload, device, dtype
        self._exact: tuple[Tensor, ...] | None = None
        case, inputs = workload.case, workload.shape.inputs(device, dtype, 0)
        plain = case.reference
        try:
            with sdpa_kernel(EXACT):
                exact = _each(case.call(plain, copied(inputs, torch.float64), fresh))
                low = _each(case.call(plain, copied(inputs), fresh))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return
        real: Any = ...
        if isinstance(workload.shape, AttentionShape):
            batch = inputs[2]
            real = batch.columns >= batch.keys.begin[batch.rows]
        self._exact = tuple(each[real] for each in exact)
        self._budgets = [
            error_budget(float((rounded[real] - each).abs().max()), float(each.abs().max()), dtype)
            for rounded, each in zip(low, self._exact, strict=True)
        ]

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
        got = _each(prepared.read(prepared.call()))
        for mine, exact, budget in zip(got, self._exact, self._budgets, strict=True):
            error = float((mine.view(exact.shape) - exact).abs().max())
            if not error <= budget:  # NaN is not
                return f"error {brief(error)}, the budget is {brief(budget)}"
        return "passed"


def _each(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors of an output."""
    return (output,) if isinstance(output, Tensor) else output


ROTATED_BYTES = {"cuda": 256 << 20, "cpu": beyond_caches(64 << 20, last_cache_bytes())}
"""Each call of a region reads a copy of its own; where all have so much together, all read from memory. Several times
the last cache, as far as a machine has the memory for that (`cost.MOST_BYTES`).
"""

MOST_COPIES = 48
"""A copy may hold far more than a call reads: `embed` a whole table, FlashInfer's wrapper a workspace of 128 MiB."""


def benchmark_op(
    workload: OpWorkload,
    providers: Sequence[str] = (),
    *,
    device: str | torch.device | None = None,
    dtype: str | None = None,
    repeats: int = 5,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> tuple[list[Row], list[str]]:
    """Time an op by each provider (none named: all that do this op), A B, B A, ..., in regions of 100 ms.

    Returns a row for each, its time in `total_ms`, and remarks: who is left out and why. Each output is checked first.
    Errors: PromptError, ModelError (device, dtype), OutOfMemory, Cancelled.
    """
    timing.check_repeats(repeats)
    there = checked_device(device)
    where = kind_of(there)
    with present(there), cpu_threads(where):
        kind = checked_dtype(dtype, where)
        names, absent = _available(workload, _chosen(workload, providers), where)
        if not names:
            return [], absent
        size = workload.shape.read_bytes(kind.itemsize)
        num_copies = min(MOST_COPIES, -(-ROTATED_BYTES[where] // size) + 1)
        check_op_fit(workload, where, kind, num_copies)
        timing.forget_compiled()
        tally = Tally(2 + len(names) * (1 + repeats), progress)
        with memory_for(f"a buffer of {workload}", remedy="Give smaller sizes, or half precision."):
            entries, remarks = _prepared(workload, names, num_copies, where, kind, repeats, tally, cancel)
            series = [Series(entry.name, entry.time) for entry in entries]
            timing.in_turn(series, Rounds(repeats), tally, cancel)
            shared = {"workload": str(workload), "dtype": str(kind).removeprefix("torch.")}
            each = zip(entries, series, strict=True)
            rows = [taken(where, **shared, **entry.figures(its.runs, size, kind)) for entry, its in each]
    disturbed = [f"{entry.name}: {SHARED}." for entry in entries if entry.was_disturbed]
    return rows, [*absent, *remarks, *disturbed, *_doubts(rows, workload, where, num_copies, size)]


def _doubts(rows: Sequence[Row], workload: OpWorkload, device: str, num_copies: int, size: int) -> Iterator[str]:
    """Remarks on rows whose GB/s may be that of a cache, not of memory."""
    for row in rows:
        if (row.share_of_ceiling or 0) > 1:
            why = _why_faster(workload, device, num_copies, size)
            yield f"{row.provider} was faster than a streaming read: {why}"
    if rows and num_copies * size < ROTATED_BYTES[device]:
        yield (
            f"{workload} is small: its {num_copies} copies have {brief(num_copies * size / 1e6)} MB together, which a "
            "cache may hold, so its GB/s and % of ceiling need not be those of memory."
        )


def _why_faster(workload: OpWorkload, device: str, num_copies: int, size: int) -> str:
    """Why an op was faster than the streaming read that sets the ceiling.

    Its inputs may have stayed in a cache. On a CPU the ceiling may also be too low: on some, neither way to read that
    is tried is the fastest.
    """
    beyond = max(ROTATED_BYTES[device], TIMES * (last_cache_bytes() or 0))
    if device == "cuda" or num_copies * size < beyond:
        return f"its {num_copies} copies of the inputs stayed in a cache, so the floor does not hold."
    return (
        f"the {num_copies * size / 1e6:,.0f} MB of {workload} are beyond the caches, so the read that sets the ceiling "
        "was the slower one, and the floor is too high."
    )


def _available(workload: OpWorkload, names: Sequence[str], device: str) -> tuple[list[str], list[str]]:
    """The providers that can run here at these sizes, and why the others cannot."""

    def reason(name: str) -> str | None:
        provider = provider_of(name, workload.case)
        if provider is None:
            return native.available(device)
        return provider.unavailable(device) or provider.unfit(workload.shape)

    return timing.split({name: reason(name) for name in names})


def _prepared(
    workload: OpWorkload,
    names: Sequence[str],
    num_copies: int,
    device: str,
    dtype: torch.dtype,
    repeats: int,
    tally: Tally,
    cancel: Cancel | None,
) -> tuple[list[PreparedOp], list[str]]:
    """The providers that are ready, and why the others are not. Ours raises where it fails; others are left out."""
    tally.say(f"making inputs of {workload}")
    inputs = workload.shape.inputs(device, dtype, 0)
    copies = [inputs, *(copied(inputs) for _ in range(num_copies - 1))]
    tally.finish()
    tally.say("asking the reference in fp64")
    judge = Judge(workload, device, dtype)
    tally.finish()
    makers = {name: partial(PreparedOp, name, workload, copies, judge, device, tally.building) for name in names}
    made, remarks = timing.ready(makers, (OURS,), repeats, tally, cancel)
    return [*made.values()], remarks


class PreparedOp:
    """One provider, prepared on every copy of the inputs and checked on the first."""

    def __init__(
        self,
        name: str,
        workload: OpWorkload,
        copies: Sequence[tuple],
        judge: Judge,
        device: str,
        building: Progress,
    ) -> None:
        self.name, self._device, self._flops = name, device, workload.shape.num_flops()
        provider = provider_of(name, workload.case)
        make = _ours(workload, building) if provider is None else partial(provider.make, workload.shape)
        prepared = [make(inputs) for inputs in copies]
        self._equality = judge.ours() if provider is None else judge.verdict(prepared[0], provider.less)
        case, is_training = workload.case, isinstance(workload.case, TrainCase)
        in_graph = not isinstance(case, TrainCase) or case.is_captured
        self._launches = _counted(prepared[0], device, in_graph)
        self._peak_bytes = with_peak(prepared[0].call, device)[1] if is_training else None
        self._timed = Timed([each.call for each in prepared], device, in_graph)
        self.was_disturbed = False

    def time(self) -> float:
        """Milliseconds a call, over one region."""
        timed = timing.on_host(self._timed.ms)
        self.was_disturbed |= self._device == "cpu" and timed.was_disturbed
        return timed.value

    def figures(self, runs: Sequence[float], size: int, dtype: torch.dtype) -> dict[str, Any]:
        """What a row holds of these runs; `size` bytes have to be moved."""
        in_us = Spread.of([ms * 1e3 for ms in runs])
        assert in_us is not None
        total_ms = Spread(*(round(us / 1e3, 7) for us in (in_us.p20, in_us.p50, in_us.p80)))
        ceiling, inside = streaming_gb_per_s(self._device), self._launches
        return {
            "provider": self.name,
            "recipe": "",
            "total_ms": total_ms,
            "floor_ms": round(size / ceiling / 1e6, 6),
            "gb_per_s": round(size / total_ms.p50 / 1e6, 3),
            "ceiling_gb_per_s": round(ceiling, 2),
            "kernels_per_token": inside and inside.kernels,
            "predicted_ms": inside and predicted_ms(size, inside, self._device),
            "peak_bytes": self._peak_bytes,
            "equality": self._equality,
            **arithmetic(self._flops, total_ms.p50, self._device, dtype),
        }


def _ours(workload: OpWorkload, building: Progress) -> Callable[[tuple], Prepared]:
    """Our kernels' call for one copy of the inputs."""
    case = workload.case
    op = getattr(cuda, case.op)
    native.prepare(op.kernels, progress=building)

    def prepared(inputs: tuple) -> Prepared:
        own = copied(inputs)  # what it writes over, such as a residual, others read
        return Prepared(lambda: case.call(op, own, fresh))

    return prepared


def _chosen(workload: OpWorkload, providers: Sequence[str]) -> Sequence[str]:
    known = names_for(workload.case)
    for name in providers:
        if name not in known:
            hint = did_you_mean(name, known)
            raise PromptError(f"{name!r} does not do {workload.case.op}.{hint} Those that do: {', '.join(known)}.")
    return providers or known


def _counted(prepared: Prepared, device: str, in_graph: bool = True) -> StepLaunches | None:
    """What a call launches, on a GPU in a graph, so that none is the host's; None where that cannot be seen."""
    with counting(device) as counter:
        counter.start()
        prepared.call()
        found = counter.stop()
    if not all(found):
        return None
    return found._replace(launches=0) if device == "cuda" and in_graph else found
