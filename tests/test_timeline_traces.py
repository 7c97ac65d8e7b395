"""What is read out of a profiler's trace."""

from __future__ import annotations

import pytest
from gpu_traces import ADD, ATTENTION, GEMM, LINEAR, Trace, eager, graphed, of_kind

from eet_lab.bench.profiler_trace import copy_name, is_work_call, kernel_name, our_kernels, read_steps
from eet_lab.errors import MonitorError


def test_a_baselines_kernels_come_from_launches_within_ops():
    steps = read_steps(eager(2).content())
    assert len(steps) == 3
    step = steps[1]
    launches, kernels = of_kind(step, "launch"), [span for span in step.spans if span.lane == "device"]
    assert step.num_launches == len(launches) == len(kernels) == 2 * 3 * 4 + 2
    assert step.num_unlaunched == 0
    assert not of_kind(step, "call") and not of_kind(step, "wait"), (
        "launches stand for calls; the wait is after the step"
    )
    assert launches[1].name == "layer_norm" and launches[1].full == "cudaLaunchKernel in aten::layer_norm"
    assert [k.name for k in kernels[:6]] == ["fill", "torch layer_norm", "cublas gemm 64x8", "copy DtoD", "torch cat",
                                             "torch layer_norm"]  # fmt: skip
    assert kernels[-1].name == "vector_linear" and kernels[-1].kind == "own kernel" and kernels[-1].op == "advance"
    for kernel in kernels:
        launch = step.spans[kernel.launch]
        assert launch.kind == "launch" and launch.op == kernel.op and kernel.start_us >= launch.end_us
    assert step.device_busy_us == pytest.approx(1 + 6 * (3 + 9 + 2 + 2.5) + 2, abs=0.1)
    assert step.step_us >= kernels[-1].end_us
    assert kernels[3].num_bytes == 2048


def test_a_graph_is_one_launch_and_overlapping_kernels_count_once():
    step = read_steps(graphed(4).content())[0]
    [launch] = of_kind(step, "launch")
    assert (launch.name, launch.full, step.num_launches) == ("CUDA graph", "cudaGraphLaunch", 1)
    kernels = of_kind(step, "own kernel")
    assert [k.name for k in kernels[:3]] == ["vector_linear", "decode", "vector_linear"]
    assert {k.launch for k in kernels} == {step.spans.index(launch)}
    assert sum(k.dur_us for k in kernels) - step.device_busy_us == pytest.approx(4 * 0.5, abs=0.01)
    assert step.step_us == pytest.approx(max(k.end_us for k in kernels))


def test_kernels_without_a_known_launch_are_kept_in_their_step_and_counted():
    trace = graphed(1).content()
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["name"] != "cudaGraphLaunch"]
    for step in read_steps(trace):
        assert len(of_kind(step, "own kernel")) == step.num_unlaunched == 3
        assert step.num_launches == 0


def test_other_versions_forms_are_read_alike():
    """Numbers as text, events without a duration or arguments, and the driver's launch within the runtime's."""
    trace = eager(1).content()
    expected = read_steps(trace)
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and "correlation" in event.get("args", {}):
            event["ts"], event["args"]["correlation"] = str(event["ts"]), str(event["args"]["correlation"])
    launches = [e for e in trace["traceEvents"] if e.get("cat") == "cuda_runtime" and "Launch" in e["name"]]
    inner = [e | {"cat": "cuda_driver", "name": "cuLaunchKernel", "ts": float(e["ts"]) + 1, "dur": 1} for e in launches]
    odd = [{"ph": "X", "name": "no time"}, {"ph": "X", "cat": "cpu_op", "name": "x", "ts": None}, 7, {"ph": "f"}]
    odd += [{"ph": "X", "cat": "kernel", "name": "no args", "ts": 1.0}]
    trace["traceEvents"] += inner + odd
    assert read_steps(trace) == expected


@pytest.mark.parametrize("trace", [{}, {"traceEvents": []}, Trace().content()])
def test_a_trace_without_a_step_is_refused(trace):
    with pytest.raises(MonitorError, match="holds no step"):
        read_steps(trace)


@pytest.mark.parametrize(
    ("full", "call", "name", "kind"),
    [
        (LINEAR, "", "vector_linear", "own kernel"),
        (ATTENTION, "", "decode", "own kernel"),
        (GEMM, "addmm", "cublas gemm 64x8", "gemm"),
        ("ampere_fp16_s16816gemm_fp16_64x64_ldg8_f2f_stages_64x5_tn", "mm", "cublas gemm 64x64", "gemm"),
        ("void gemv2T_kernel_val<int, int, __half, __half>(Params<int>, float)", "mm", "cublas gemv", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>(Params<float>)", "", "cublas split-k sum", "gemm"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64> >(Params)", "",
         "flash attention", "torch kernel"),
        (ADD, "add", "torch add", "torch kernel"),
        (ADD, "", "torch vectorized_elementwise", "torch kernel"),
        ("void at::native::(anonymous namespace)::softmax_kernel<float>(float*)", "", "torch softmax", "torch kernel"),
        ("triton_poi_fused_add_0", "", "triton_poi_fused_add_0", "other kernel"),
        ("", "", "", "other kernel"),
    ],
)  # fmt: skip
def test_kernels_have_names_that_a_reader_knows(full, call, name, kind):
    assert kernel_name(full, call) == (name, kind)


def test_our_kernels_are_those_of_csrc():
    assert {"linear_kernel", "decode_kernel", "vector_layer_kernel", "choose_best_kernel"} <= our_kernels()


def test_copies_and_calls_have_short_names():
    assert [copy_name(full) for full in ("Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "Memcpy")] == [
        "copy HtoD", "fill", "copy",
    ]  # fmt: skip
    work = {"aten::addmm": True, "aten::view": False, "aten::new_empty": False, "aten::select": False, "mine::op": True}
    assert {name: is_work_call(name) for name in work} == work
