"""Ops timed alone: the providers' outputs against the reference, and the benchmark of them."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_op_names import workload
from torch.utils._python_dispatch import _get_current_dispatch_mode

from eet_lab.bench import cost as costs
from eet_lab.bench import ops as op_benchmark
from eet_lab.bench.cost import MOST_BYTES, beyond_caches, last_cache_bytes, streaming_gb_per_s
from eet_lab.bench.launches import StepLaunches
from eet_lab.bench.op_providers import PROVIDERS, OpProvider, Prepared, _paged, names_for, piece
from eet_lab.bench.ops import Judge, benchmark_op
from eet_lab.bench.rows import append, read
from eet_lab.bench.timing import SHARED
from eet_lab.cli import main
from eet_lab.commands.bench_tables import op_tables
from eet_lab.errors import Cancelled, PromptError
from eet_lab.ops import reference
from eet_lab.ops.int8_cases import Int8Shape

TEXTS = (
    "op:embed/t3/c24",
    "op:decode_attention/b2/kv33/h4/d32",
    "op:decode_attention/b3/kv5-33/h4g2/d32",
    "op:prefill_attention/b2/s17/h4/d32",
    "op:prefill_attention/b3/s5-33/h4g2/d32",
    "op:prefill_attention/b3/s5-33/h4/d32/packed",
    "op:norm_linear/t2/n96/c64/gelu_tanh",
    "op:linear_residual/t2/n96/c64",
    "op:norm/t5/c64",
    "op:softmax/t5/c33",
)


TRAINED = (
    "op:norm_backward/t9/c64",
    "op:norm_backward/t9/c64/rms",
    "op:cross_entropy/t9/v50",
    "op:linear_cross_entropy/t9/c16/v50",
    "op:attention_backward/b2/s9/h2/d8",
    "op:adamw/n1M",
)


@pytest.mark.parametrize("text", TRAINED)
def test_gradients_and_updates_are_those_of_the_reference(text, monkeypatch):
    monkeypatch.setattr("eet_lab.bench.timing.REGION_MS", 5.0)
    monkeypatch.setitem(op_benchmark.ROTATED_BYTES, "cpu", 1 << 8)
    found = workload(text)
    assert str(found) == text
    rows, remarks = benchmark_op(found, device="cpu", repeats=1)
    here = {"eet_lab", "torch-eager"}
    if "linear_cross_entropy" in text and hasattr(torch.nn.functional, "linear_cross_entropy"):
        here.add("torch-linear-cross-entropy")
    assert here <= {row.provider for row in rows} and {row.equality for row in rows} == {"passed"}
    assert not [remark for remark in remarks if "failed" in remark]
    assert bool(found.shape.num_flops()) == all(row.mfu is not None for row in rows) == ("MFU" in op_tables(rows))


@pytest.mark.parametrize("output", [0, 1, 2])
def test_each_wrong_gradient_is_told(output):
    found = workload("op:norm_backward/t900/c64")  # the gradients of its weights are far larger than those of its rows
    judge, inputs = Judge(found, "cpu", torch.float32), found.shape.inputs("cpu", torch.float32, 0)
    prepared = PROVIDERS["torch-eager"].make(found.shape, inputs)
    wrong = prepared._replace(read=lambda out: [each * (1 + 1e-3 * (i == output)) for i, each in enumerate(out)])
    assert judge.verdict(prepared) == "passed" and judge.verdict(wrong).startswith("error ")


def test_a_piece_is_found_where_a_technique_has_put_it():
    def fused(x):
        return x

    def composed(x, *, norm=fused):
        return x

    assert piece(reference.next_token, "norm_linear") is reference.norm_linear
    assert piece(composed, "norm") is fused
    assert piece(partial(composed, norm=reference.norm), "norm") is reference.norm
    assert piece(reference.choose, "norm") is reference.norm


def test_repeats_that_cannot_be_are_told_before_any_work():
    with pytest.raises(PromptError, match="repeats is -3, but it must be a whole number from 1 to 10,000"):
        benchmark_op(workload(TEXTS[0]), device="cpu", repeats=-3, progress=lambda *told: pytest.fail(f"began: {told}"))


def test_regions_of_who_is_left_out_are_not_counted(monkeypatch):
    def fails_but_once(self, name, *given, made=op_benchmark.PreparedOp.__init__):
        names.append(name)
        if names[1:]:
            raise ValueError("cannot")
        made(self, name, *given)

    names, told = [], []
    monkeypatch.setattr(op_benchmark.PreparedOp, "__init__", fails_but_once)

    def progress(done, total, message):
        told.append((total - done, message))

    rows, remarks = benchmark_op(workload(TEXTS[7]), device="cpu", repeats=3, progress=progress)
    assert len(rows) == 1 and any("cannot" in remark for remark in remarks)
    assert told[-1] == (1, f"timing {names[0]}, 3 of 3")


def test_what_was_faster_than_memory_is_remarked_upon(monkeypatch):
    monkeypatch.setattr(op_benchmark, "streaming_gb_per_s", lambda device: 1e-3)
    rows, remarks = benchmark_op(workload(TEXTS[0]), device="cpu", repeats=1)
    assert all(row.share_of_ceiling > 1 for row in rows)
    found = [remark for remark in remarks if "stayed in a cache, so the floor does not hold" in remark]
    assert [remark.split()[0] for remark in found] == [row.provider for row in rows]


def test_a_cache_is_named_only_where_the_copies_could_be_in_one(monkeypatch):
    monkeypatch.setattr(op_benchmark, "streaming_gb_per_s", lambda device: 1e-3)
    monkeypatch.setitem(op_benchmark.ROTATED_BYTES, "cpu", 0)
    monkeypatch.setattr(op_benchmark, "last_cache_bytes", lambda: 2**40)
    _, remarks = benchmark_op(workload(TEXTS[0]), device="cpu", repeats=1)
    assert not any("are beyond the caches" in remark for remark in remarks)
    monkeypatch.setattr(op_benchmark, "last_cache_bytes", lambda: None)
    _, remarks = benchmark_op(workload(TEXTS[0]), device="cpu", repeats=1)
    assert not any("stayed in a cache" in remark for remark in remarks)
    assert any(f"MB of {TEXTS[0]} are beyond the caches, so the read that sets the" in remark for remark in remarks)


def test_the_cpus_caches_are_read_where_linux_tells_them(tmp_path):
    assert last_cache_bytes(tmp_path) is None
    for index, (kind, size) in enumerate([("Data", "48K"), ("Instruction", "9G"), ("Unified", "2M"), ("Unified", "x")]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "type").write_text(f"{kind}\n")
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_cache_bytes(tmp_path) == 2 * 2**20
    assert beyond_caches(2**20, None) == 2**20
    assert beyond_caches(2**20, 2**21) == 2**23
    assert beyond_caches(2**20, 2**40) == MOST_BYTES


def test_an_op_tells_that_the_processor_was_shared(monkeypatch):
    monkeypatch.setattr("eet_lab.bench.timing.UNDISTURBED", 2.0)  # more than there can be
    rows, remarks = benchmark_op(workload("op:norm/t5/c64"), device="cpu", repeats=1)
    for row in rows:
        assert f"{row.provider}: the processor was shared: other programs kept this one waiting." in remarks


@pytest.mark.parametrize(
    "sizes", ["next_token/b2/t7/v99/c24/temp1/k5", "choose/b2/v99/temp1/p0.25", "choose_top_k/b2/v99/temp1/k9/blocks33"]
)
def test_choices_of_any_size_are_timed(sizes):
    [row], _ = benchmark_op(workload(f"op:{sizes}"), device="cpu", repeats=1)
    assert row.equality == "not compared: it is the reference"
    assert row.total_ms.p50 > 0


@pytest.mark.parametrize("text", TEXTS)
def test_others_give_what_the_reference_gives(text):
    found = workload(text)
    rows, remarks = benchmark_op(found, device="cpu", repeats=1)
    remarks = [remark for remark in remarks if SHARED not in remark]  # that is up to what else runs here
    if refused := [remark for remark in remarks if "SDPA's kernel does not take these sizes" in remark]:
        pytest.skip(f"torch {torch.__version__}: {refused[0]}")
    assert rows
    assert all(row.equality == "passed" or row.equality.startswith("not compared: the product") for row in rows)
    assert all(row.gb_per_s > 0 and row.floor_ms > 0 for row in rows)
    assert len(rows) + len(remarks) == len(names_for(found.case)) + 1
    assert remarks[-1].startswith(f"{found} is small: its 48 copies"), "the one that is about none of them"
    assert any(remark.startswith("eet_lab is left out: CUDA kernels need an NVIDIA GPU") for remark in remarks)


def test_a_wrong_output_is_told():
    found = workload("op:linear_residual/t2/n96/c64")
    judge = Judge(found, "cpu", torch.float32)
    prepared = PROVIDERS["torch-linear-add"].make(found.shape, found.shape.inputs("cpu", torch.float32, 0))
    assert judge.verdict(prepared) == "passed"
    assert judge.verdict(prepared._replace(read=lambda out: out * 1.001)).startswith("error ")
    assert judge.verdict(prepared._replace(read=lambda out: out * torch.nan)).startswith("error ")


@pytest.mark.parametrize("name", ["int8_norm_linear", "int8_linear_residual"])
def test_where_nobody_can_run_it_is_told_before_any_input_is_made(name, monkeypatch, capsys):
    monkeypatch.setattr(Int8Shape, "inputs", lambda *args: pytest.fail("inputs were made"))
    assert main(["bench", f"op:{name}", "--device", "cpu"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "torch-linear is left out: PyTorch's linear takes no int8 weights" in line
    assert ".;" not in line
    assert line.endswith(".")
    assert not line.endswith("..")


def test_pages_hold_every_row_from_a_page_of_its_own():
    rows = tuple(torch.arange(1, n + 1.0).view(n, 1, 1).expand(n, 2, 3) for n in (5, 16, 17))
    pages = _paged(rows)
    assert pages.shape == (4, 16, 2, 3)
    assert [page[:, 0, 0].count_nonzero().item() for page in pages] == [5, 16, 16, 1]


def test_one_that_fails_is_left_out_and_told(monkeypatch):
    broken = OpProvider("torch-norm-linear", ("norm_linear",), lambda shape, inputs: 1 / 0)
    monkeypatch.setitem(PROVIDERS, "torch-norm-linear", broken)
    rows, remarks = benchmark_op(workload("op:norm_linear/t1/n16/c8"), device="cpu", repeats=1)
    assert [row.provider for row in rows] == ["torch-linear"]
    assert "torch-norm-linear failed: ZeroDivisionError: division by zero" in remarks
    rows, remarks = benchmark_op(workload("op:norm_linear/t1/n16/c8"), ["torch-norm-linear"], device="cpu", repeats=1)
    assert (rows, len(remarks)) == ([], 1), "where nothing was timed no rate is doubted"


def test_what_fails_while_it_is_counted_leaves_no_counter_behind():
    with pytest.raises(ZeroDivisionError):
        op_benchmark._counted(Prepared(lambda: 1 / 0), "cpu")
    assert _get_current_dispatch_mode() is None


def test_what_a_blind_profiler_counts_is_not_believed(monkeypatch):
    class Blind:
        start = staticmethod(lambda: None)
        stop = staticmethod(lambda: StepLaunches(3, 0))

    monkeypatch.setattr(op_benchmark, "counting", lambda device: nullcontext(Blind))
    assert op_benchmark._counted(Prepared(lambda: None), "cuda") is None
    monkeypatch.setattr(Blind, "stop", staticmethod(lambda: StepLaunches(3, 2)))
    assert op_benchmark._counted(Prepared(lambda: None), "cuda") == (0, 2), "in a graph"
    assert op_benchmark._counted(Prepared(lambda: None), "cpu") == (3, 2)


def test_copies_that_a_cache_may_hold_are_told(monkeypatch):
    told = "% of ceiling"
    monkeypatch.setitem(op_benchmark.ROTATED_BYTES, "cpu", 1 << 30)
    rows, remarks = benchmark_op(workload("op:norm/t1/c8"), device="cpu", repeats=1)
    assert rows and sum(told in remark for remark in remarks) == 1
    assert any("48 copies" in remark and told in remark for remark in remarks)
    monkeypatch.setitem(op_benchmark.ROTATED_BYTES, "cpu", 1 << 8)
    assert not [each for each in benchmark_op(workload("op:norm/t1/c8"), device="cpu", repeats=1)[1] if told in each]


def test_who_does_not_do_an_op_is_told():
    with pytest.raises(PromptError, match="'torch-varlen' does not do norm_linear"):
        benchmark_op(workload("op:norm_linear/t1/n16/c8"), ["torch-varlen"], device="cpu")


def test_a_stop_ends_it():
    class Stop:
        def is_set(self):
            return True

    with pytest.raises(Cancelled):
        benchmark_op(workload("op:norm_linear/t1/n16/c8"), device="cpu", cancel=Stop())


def test_the_command_prints_and_appends(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(op_benchmark.ROTATED_BYTES, "cpu", 1 << 16)
    words = ["--device", "cpu", "--repeats", "1", "--append", str(tmp_path)]
    assert main(["bench", "op:decode_attention/b1/kv64/h4/d32", *words]) == 0
    out = capsys.readouterr().out
    assert "torch-sdpa-flash" in out
    assert "flashinfer is left out: FlashInfer needs an NVIDIA GPU" in out
    [row] = read(tmp_path / "cpu.jsonl")
    assert (row.workload, row.provider) == ("op:decode_attention/b1/kv64/h4/d32", "torch-sdpa-flash")
    assert append([row], tmp_path / "again")
    assert main(["bench", "op:norm_linear/t1/n16/c8", "--recipe", "all"]) == 2
    assert "an op has no recipe" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("text", TRAINED)
def test_all_gradients_are_those_of_the_reference_in_bf16(text):
    rows, remarks = benchmark_op(workload(text), device="cuda", dtype="bfloat16", repeats=1)
    wrong = [(row.provider, row.equality) for row in rows if row.equality != "passed" and row.provider != "liger"]
    assert not wrong and rows[0].provider == "eet_lab" and rows[0].peak_bytes > 0
    assert not [remark for remark in remarks if "failed" in remark], remarks


@pytest.mark.gpu
@pytest.mark.parametrize("text", TEXTS)
def test_all_give_what_the_reference_gives_in_fp16(text):
    rows, remarks = benchmark_op(workload(text), device="cuda", repeats=1)
    wrong = [
        (row.provider, row.equality) for row in rows if row.equality != "passed" and "compared" not in row.equality
    ]
    assert not wrong
    assert rows[0].provider == "eet_lab", remarks
    assert not [remark for remark in remarks if "failed" in remark]


@pytest.mark.parametrize(("free", "asked"), [(2**36, 2**32), (2**29, 200 * 2**20), (2**27, 2**26)])
def test_a_nearly_full_gpu_is_read_beyond_its_cache_where_there_is_room(free, asked, monkeypatch):
    sizes = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50 * 2**20))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**37))
    monkeypatch.setattr(torch, "ones", lambda num, device: sizes.append(4 * num) or torch.empty(1))
    monkeypatch.setattr(costs, "took_ms", lambda work, device: 1.0)
    streaming_gb_per_s.__wrapped__("cuda")
    assert sizes == [asked]
