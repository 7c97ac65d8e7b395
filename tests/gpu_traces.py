"""Traces in the form that torch's profiler exports on a GPU, made by hand: no GPU is needed to read them."""

from __future__ import annotations

from typing import Any

from eet_lab.bench.profiler_trace import MARK, OP, ProfiledStep
from eet_lab.bench.timeline import Span, Timeline

ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::Half>, std::array<char*, 3ul>)"
)
GEMM = "nvjet_hsh_64x8_64x16_4x1_v_bz_TNT"
LINEAR = (
    "void (anonymous namespace)::vector_linear_kernel<__half, 1, true>((anonymous namespace)::VectorArgs<__half>, int)"
)
ATTENTION = "void (anonymous namespace)::decode_kernel<__half, 64>((anonymous namespace)::DecodeArgs<__half>)"
HOST, DEVICE = {"pid": 4242, "tid": 4242}, {"pid": 0, "tid": 7}


class Trace:
    """A trace that grows; `now` is the host's clock and `free` when the device has nothing left to do, in us."""

    def __init__(self, start: float = 4544127550110.692) -> None:
        self.now = self.free = start
        self.correlation = 900
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "ts": start, **HOST, "args": {"name": "python"}},
            {"ph": "M", "name": "process_labels", "ts": start, "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
            {"ph": "X", "cat": "Trace", "ts": start, "dur": 9e6, "pid": "Spans", "tid": "PyTorch Profiler",
             "name": "PyTorch Profiler (0)", "args": {"Op count": 0}},
            {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "ts": start, **HOST, "args": {}},
        ]  # fmt: skip

    def host(self, cat: str, name: str, start: float, end: float, **args: Any) -> None:
        """An event of the host."""
        self.events.append({"ph": "X", "cat": cat, "name": name, **HOST, "ts": start, "dur": end - start, "args": args})

    def launch(self, *kernels: tuple[str, float], call: str = "cudaLaunchKernel", us: float = 4.0) -> None:
        """The host hands something over; the device runs its kernels, (name, us) each, as soon as it can."""
        self.correlation += 1
        number = self.correlation
        self.host("cuda_runtime", call, self.now, self.now + us, cbid=211, correlation=number)
        self.events.append({"ph": "s", "id": number, **HOST, "ts": self.now, "cat": "ac2g", "name": "ac2g"})
        self.free = max(self.free, self.now + us + 2)
        for name, took in kernels:
            cat = "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
            args = {"device": 0, "context": 1, "stream": 7, "correlation": number, "External id": 3}
            args |= {"grid": [1, 1, 1], "block": [128, 1, 1]} if cat == "kernel" else {"bytes": 2048}
            self.events.append(
                {"ph": "X", "cat": cat, "name": name, **DEVICE, "ts": self.free, "dur": took, "args": args}
            )
            self.free += took
        self.now += us

    def call(self, name: str, *kernels: tuple[str, float], python_us: float = 8.0, inside: str = "") -> None:
        """A call of PyTorch, perhaps over another one, that launches each of its kernels."""
        start = self.now
        self.now += python_us / 2
        inner = self.now
        for kernel in kernels:
            self.launch(kernel)
        if inside:
            self.host("cpu_op", inside, inner, self.now)
        self.now += python_us / 2
        self.host("cpu_op", name, start, self.now, **{"External id": 3, "Ev Idx": 5})

    def op(self, name: str, *calls: Any) -> None:
        """An op of the engine: `calls` are run within it."""
        start = self.now
        self.now += 3
        for call in calls:
            call()
        self.host("user_annotation", OP + name, start, self.now)
        self.events.append(
            {"ph": "X", "cat": "gpu_user_annotation", "name": OP + name, **DEVICE, "ts": start, "dur": 9}
        )

    def step(self, *parts: Any) -> None:
        """A step on its own, which is waited for."""
        self.now = max(self.now, self.free) + 20
        start = self.now
        for part in parts:
            part()
        self.host("user_annotation", MARK, start, self.now)
        end = max(self.now, self.free) + 5
        self.host("cuda_runtime", "cudaDeviceSynchronize", self.now + 1, end, cbid=165, correlation=0)
        self.now = end

    def content(self) -> dict[str, Any]:
        """What the file holds."""
        return {"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": list(self.events)}


def eager(num_layers: int, scale: float = 1.0) -> Trace:
    """Three steps of a baseline: Python launches everything, and cuBLAS multiplies."""
    trace = Trace()
    ms = {"python_us": 9 * scale}

    def layer() -> None:
        for op in ("norm_linear", "attention", "linear_residual"):
            trace.op(
                op,
                lambda: trace.call("aten::layer_norm", (ADD, 3.0), inside="aten::native_layer_norm", **ms),
                lambda: trace.call("aten::addmm", (GEMM, 9.0), **ms),
                lambda: trace.call("aten::cat", ("Memcpy DtoD (Device -> Device)", 2.0), (ADD, 2.5), **ms),
            )

    for _ in range(3):
        trace.step(
            lambda: trace.call("aten::zero_", ("Memset (Device)", 1.0)),
            *[layer] * num_layers,
            lambda: trace.op("advance", lambda: trace.launch((LINEAR, 2.0), call="cudaLaunchKernelExC")),
        )
    return trace


def graphed(num_layers: int) -> Trace:
    """Three steps of one launch each; attention overlaps the linear before it by half a microsecond."""
    trace = Trace()
    for _ in range(3):
        kernels = [(LINEAR, 6.0), (ATTENTION, 4.0), (LINEAR, 5.0)] * num_layers
        trace.step(lambda kernels=kernels: trace.launch(*kernels, call="cudaGraphLaunch", us=11))
        late = [e for e in trace.events if e["name"] == ATTENTION][-num_layers:]
        for event in late:
            event["ts"] -= 0.5
            event["dur"] += 0.5
    return trace


def of_kind(timeline: Timeline | ProfiledStep, kind: str) -> list[Span]:
    return [span for span in timeline.spans if span.kind == kind]
