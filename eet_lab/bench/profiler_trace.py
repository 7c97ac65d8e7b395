"""Reading the trace that torch's profiler exports: Chrome trace events, the same from torch 2.6 to 2.13.

Steps are found by the mark around each, and what belongs to one by time on the host, and by correlation on the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from eet_lab.bench.launches import CALLS, is_work
from eet_lab.bench.timeline import Kind, Lane, Span, covered_us
from eet_lab.errors import MonitorError
from eet_lab.paths import csrc_dir

OURS = re.compile(r"__global__[^;{]*?\b(\w+_kernel)\(")
NAMESPACE = re.compile(r"^(?:void\s+)?((?:\(anonymous namespace\)|\w+)(?:::(?:\(anonymous namespace\)|\w+))*)")
TILE = re.compile(r"(?<![0-9])(\d{2,3}x\d{1,3})(?![0-9])")
LIBRARIES: tuple[tuple[str, Kind, tuple[str, ...]], ...] = (
    ("flash attention", "torch kernel", ("flash_fwd", "fmha", "flash::")),
    ("cublas gemv", "gemm", ("gemv",)),
    ("cublas split-k sum", "gemm", ("splitkreduce",)),
    ("cublas gemm", "gemm", ("gemm", "cublas", "cutlass", "nvjet", "xmma")),
)
"""Words in a kernel's full name, in lower case, and what it is then; the first that fits."""


def kernel_name(full: str, call: str = "") -> tuple[str, Kind]:
    """A kernel's short name and kind; `call` is the call of PyTorch that launched it, where that is known."""
    path = _path(full)
    function = path.rpartition("::")[2]
    if function in our_kernels() and not path.startswith("at::"):
        return function.removesuffix("_kernel"), "own kernel"
    lower = full.lower()
    for name, kind, words in LIBRARIES:
        if any(word in lower for word in words):
            tile = TILE.search(full) if name == "cublas gemm" else None
            return f"{name} {tile[1]}" if tile else name, kind
    if "at::" in full or call:
        return f"torch {call or function.removesuffix('_kernel')}", "torch kernel"
    return function, "other kernel"


def copy_name(full: str) -> str:
    """`Memcpy DtoD (Device -> Device)` as "copy DtoD", `Memset (Device)` as "fill"."""
    words = full.split()
    return "fill" if full.startswith("Memset") else f"copy {words[1]}" if len(words) > 1 else "copy"


def call_name(full: str) -> str:
    """`aten::addmm` as "addmm"."""
    return full.rpartition("::")[2] or full


@cache
def is_work_call(full: str) -> bool:
    """Whether a call of PyTorch by this name computes something; a name that is not known does."""
    packet = getattr(torch.ops.aten, call_name(full), None) if full.startswith("aten::") else None
    return packet is None or is_work(getattr(packet, packet.overloads()[0]))


@cache
def our_kernels() -> frozenset[str]:
    """The names of the kernels in csrc/."""
    return frozenset(name for path in csrc_dir().glob("*.cu") for name in OURS.findall(path.read_text("utf-8")))


def _path(full: str) -> str:
    """The function's name with its namespaces, without return type, template arguments and parameters."""
    found = NAMESPACE.match(full)
    return found[1] if found else full


MARK = "eet_lab step"
OP = "eet_lab op "
PHASE = "eet_lab phase "
"""The names, and what they begin with, of the marks around a step, around each op, and where each phase begins."""

ANNOTATIONS = ("user_annotation", "cpu_op")
RUNTIME = ("cuda_runtime", "cuda_driver")
COPIES = ("gpu_memcpy", "gpu_memset")
DEVICE = ("kernel", *COPIES)
MEMORY = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMem")


@dataclass(frozen=True)
class Event:
    """One complete event; `correlation` is 0 where there is none."""

    cat: str
    name: str
    start: float
    end: float
    correlation: int
    num_bytes: int | None


@dataclass(frozen=True)
class ProfiledStep:
    """What one marked step did, from 0 on. `num_unlaunched` kernels came from launches that were not seen."""

    spans: tuple[Span, ...]
    step_us: float
    num_launches: int
    device_busy_us: float
    num_unlaunched: int


def read_steps(trace: Mapping[str, Any]) -> list[ProfiledStep]:
    """Every marked step of a trace; MonitorError where it has none."""
    events = sorted(_events(trace.get("traceEvents", ())), key=lambda e: (e.start, -e.end))
    marks = [e for e in events if e.name == MARK and e.cat in ANNOTATIONS]
    if not marks:
        raise MonitorError(
            "The trace of torch's profiler holds no step, so there is no timeline. Is another profiler at work "
            "in this process? End it, and try again."
        )
    ends = [*(mark.start for mark in marks[1:]), float("inf")]
    known = {e.correlation for e in events if e.cat in RUNTIME and e.correlation}
    return [_step(events, mark, until, known) for mark, until in zip(marks, ends, strict=True)]


def _step(events: Sequence[Event], mark: Event, until: float, known: set[int]) -> ProfiledStep:
    """The step within `mark`; what the device does without a known launch is its own until the next step begins."""
    host = [e for e in events if mark.start <= e.start and e.end <= mark.end and e is not mark]
    spans, launched = _host_spans(host, mark.start)
    device = [
        e
        for e in events
        if e.cat in DEVICE
        and (e.correlation in launched or (e.correlation not in known and mark.start <= e.start < until))
    ]
    kernels = [_device_span(e, mark.start, spans, launched) for e in device]
    spans += kernels
    step_us = max([mark.end - mark.start, *(span.end_us for span in spans)])
    starts = [(e.name.removeprefix(PHASE), e.start - mark.start) for e in host if e.name.startswith(PHASE)]
    return ProfiledStep(
        spans=(*spans, *_phases(starts, spans, step_us)),
        step_us=step_us,
        num_launches=sum(span.kind in ("launch", "call") for span in spans),
        device_busy_us=covered_us(kernels),
        num_unlaunched=sum(kernel.launch is None for kernel in kernels),
    )


def _phases(starts: Sequence[tuple[str, float]], spans: Sequence[Span], step_us: float) -> Iterable[Span]:
    """A phase lasts until the next one begins; on the device, from its first kernel to the end of its last."""
    ends = [*(start for _, start in starts), step_us][1:]
    for (name, start), end in zip(starts, ends, strict=True):
        yield _phase("host", name, start, end)
        launched = [s for s in spans if s.launch is not None and start <= spans[s.launch].start_us < end]
        if launched:
            yield _phase("device", name, min(s.start_us for s in launched), max(s.end_us for s in launched))


def _phase(lane: Lane, name: str, start_us: float, end_us: float) -> Span:
    return Span(lane, "phase", name, name, start_us, end_us - start_us)


def _host_spans(events: Iterable[Event], zero: float) -> tuple[list[Span], dict[int, int]]:
    """Ops, calls and launches in order, and the place of each launch by its correlation.

    A call is the outermost of PyTorch's, as its dispatcher counts them; on a GPU, launches stand for calls.
    """
    events = list(events)
    on_gpu = any(e.cat in RUNTIME and e.name.startswith(CALLS) for e in events)
    spans, launched = list[Span](), dict[int, int]()
    op, call = "", ""
    op_until = call_until = zero
    for e in events:
        if e.start >= op_until:
            op = ""
        if e.start >= call_until:
            call = ""
        if e.cat in ANNOTATIONS and e.name.startswith(OP):
            op, op_until = e.name.removeprefix(OP), e.end
            spans.append(_host_span(e, zero, "op", op, op, op))
        elif e.cat == "cpu_op" and not call and not _is_wrapper(e.name):
            call, call_until = e.name, e.end
            if not on_gpu and is_work_call(e.name):
                spans.append(_host_span(e, zero, "call", call_name(call), call, op))
        elif e.cat in RUNTIME and (kind := _runtime_kind(e.name)):
            if kind == "launch" and e.correlation:
                if e.correlation in launched:  # the driver's call within the runtime's
                    continue
                launched[e.correlation] = len(spans)
            inside = f"{e.name} in {call}" if call else e.name
            spans.append(_host_span(e, zero, kind, _launch_name(e.name, call, op), inside, op))
    return spans, launched


def _is_wrapper(name: str) -> bool:
    """Whether a call of PyTorch is a step of its backward pass, or a function of Python's, around others."""
    return "::" not in name or name.startswith(("autograd::", "torch::autograd::"))


def _host_span(e: Event, zero: float, kind: Kind, name: str, full: str, op: str) -> Span:
    return Span("host", kind, name, full, e.start - zero, e.end - e.start, op)


def _device_span(e: Event, zero: float, host: Sequence[Span], launched: Mapping[int, int]) -> Span:
    launch = launched.get(e.correlation)
    origin = host[launch] if launch is not None else None
    call = origin.full.partition(" in ")[2] if origin else ""
    kind: Kind = "copy"
    if e.cat in COPIES:
        name = copy_name(e.name)
    else:
        name, kind = kernel_name(e.name, call_name(call))
    op = origin.op if origin else ""
    return Span("device", kind, name, e.name, e.start - zero, e.end - e.start, op, e.num_bytes, launch)


def _runtime_kind(name: str) -> Kind | None:
    """None for what only asks the runtime something."""
    if name.startswith(CALLS):
        return "launch"
    if "Synchronize" in name:
        return "wait"
    return "memory" if name.startswith(MEMORY) else None


def _launch_name(name: str, call: str, op: str) -> str:
    return "CUDA graph" if name.startswith("cudaGraphLaunch") else call_name(call) or op or name


def _events(raw: Iterable[Any]) -> Iterable[Event]:
    """The complete events that have a place in time."""
    for e in raw:
        if not isinstance(e, Mapping) or e.get("ph") != "X":
            continue
        try:
            start, dur = float(e["ts"]), float(e.get("dur", 0))
        except (KeyError, TypeError, ValueError):
            continue
        args = e.get("args")
        args = args if isinstance(args, Mapping) else {}
        yield Event(
            str(e.get("cat", "")), str(e.get("name", "")), start, start + max(dur, 0.0),
            _whole(args.get("correlation")) or 0, _whole(args.get("bytes")),
        )  # fmt: skip


def _whole(value: Any) -> int | None:
    """Numbers come as numbers or as text, by torch's version."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return None
