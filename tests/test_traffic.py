"""What Nsight Compute tells of a kernel's reads is taken for the right launch, and held against its case."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._functorch.config
from torch._subclasses import FakeTensorMode

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TABLE = """\
==PROF== Connected to process 1 (/usr/bin/python3)
11 launches
==PROF== Disconnected from process 1
"ID","Process ID","Kernel Name","dram__bytes_read.sum"
"","","","byte"
{}"""


@pytest.fixture
def traffic(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import traffic

    monkeypatch.setattr(traffic.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr("eet_lab.ops.native.build", lambda names, extra_flags: {})
    monkeypatch.setattr(traffic.torch.cuda, "get_device_capability", lambda: (9, 0))
    return traffic


def told(monkeypatch, traffic, rows: list[str], stderr: str = "") -> None:
    """Let ncu print these."""
    lines = "".join(f'"{i}","1","a kernel","{row}"\n' for i, row in enumerate(rows))
    done = SimpleNamespace(stdout=TABLE.format(lines), stderr=stderr, returncode=0)
    monkeypatch.setattr(traffic.subprocess, "run", lambda *args, **how: done)


def test_each_launch_is_held_against_its_case(traffic, monkeypatch):
    told(monkeypatch, traffic, ["0"] * 11)
    declared = {each.name.split(" ")[0]: each.declared for each in traffic.traffic()}
    assert len(declared) == 11 and min(declared.values()) > 5_000_000
    assert declared["linear_residual/t1/n1600/c6400"] > 1.9 * declared["int8_linear_residual/t1/n1600/c6400/int8"]
    told(monkeypatch, traffic, [f"{size * (1 + i % 2):,}" for i, size in enumerate(declared.values())])
    assert [each.is_as_declared for each in traffic.traffic()] == [i % 2 == 0 for i in range(11)]


def test_tensors_of_others_that_have_no_memory_do_no_harm(traffic, monkeypatch):
    with torch._functorch.config.patch(fake_tensor_allow_unsafe_data_ptr_access=False), FakeTensorMode():
        theirs = torch.empty(4)  # noqa: F841  it lives while memory is searched for what a pointer points to
    told(monkeypatch, traffic, ["0"] * 11)
    assert len(list(traffic.traffic())) == 11


def test_counters_that_cannot_be_read_are_no_failure_of_a_kernel(traffic, monkeypatch):
    told(monkeypatch, traffic, ["n/a"] * 11, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")
    with pytest.raises(traffic.NoCounters, match="Run as root"):
        traffic.traffic()
    monkeypatch.setattr(traffic.torch.cuda, "get_device_capability", lambda: (8, 6))
    with pytest.raises(traffic.NoCounters, match=r"as a Hopper GPU has them \(9\.0\), and this one is 8\.6"):
        traffic.traffic()
    monkeypatch.setattr(traffic.shutil, "which", lambda name: None)
    with pytest.raises(traffic.NoCounters, match="Install Nsight Compute"):
        traffic.traffic()


def test_a_launch_that_is_missing_is_a_failure(traffic, monkeypatch):
    told(monkeypatch, traffic, ["1"] * 10)
    with pytest.raises(RuntimeError, match="10 of 11 launches"):
        traffic.traffic()
