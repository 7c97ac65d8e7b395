"""All sources of csrc/ compile, for an H100 and for an A100, and no kernel spills registers."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from machine_code import CHECKED, MACHINE_CODE, unchecked, write_down
from test_native import needs_nvcc

from eet_lab.errors import KernelBuildError
from eet_lab.ops import native
from eet_lab.ops.native.build import source
from eet_lab.ops.native.launchers import signatures
from eet_lab.paths import csrc_dir

HALF = "    case kFloat16: return launch(__half());\n"
WIDE = """
#include <cuda_runtime.h>
__global__ void __launch_bounds__(1024, 2) wide(float* x) {  // 32 registers for 64 numbers
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = x[i * 1024 + threadIdx.x];
  for (int round = 0; round < int(x[0]); ++round) {
#pragma unroll
    for (int i = 0; i < 64; ++i) a[i] = a[i] * a[(i + 7) % 64] + x[i];
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) x[i * 1024 + threadIdx.x] = a[i];
}
"""


def test_every_source_has_its_launchers():
    for name in native.all_names():
        launchers = signatures(source(name).read_text())
        assert launchers, f"{name}.cu defines no launcher"
        assert all(launcher.startswith("eet_") for launcher in launchers)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ["90a", "80"])
def test_every_source_compiles_without_spills(arch, tmp_path, monkeypatch):
    """For an A100 without float16, in half of the time: its kernels take at most two more registers than bfloat16's.

    What `CHECKED` has is left out, and what compiles is written down there.
    """
    folder = csrc_dir()
    if arch == "80":
        folder = shutil.copytree(folder, tmp_path / "csrc")
        launch = folder / "eet" / "launch.cuh"
        whole = launch.read_text()
        launch.write_text(whole.replace(HALF, ""))
        assert launch.read_text() != whole
        monkeypatch.setenv("NVCC_PREPEND_FLAGS", f"-I{folder}")  # its headers, before those that all builds look at
    now, new = unchecked(arch, native.all_names(), folder)
    native.build([folder / f"{name}.cu" for name in new], arch=arch, extra_flags=MACHINE_CODE)
    if new:
        write_down(CHECKED, arch, now)


@needs_nvcc
def test_a_spill_would_be_noticed(tmp_path):
    (tmp_path / "wide.cu").write_text(WIDE)
    with pytest.raises(KernelBuildError, match="[Ss]pill|local memory"):
        native.build([tmp_path / "wide.cu"], arch="80", extra_flags=MACHINE_CODE)


def test_processes_that_write_down_at_once_lose_nothing(tmp_path, monkeypatch):
    """Each writes its own architecture, between what the other reads and what it writes if nothing keeps it out."""
    file, meet, read = tmp_path / "compiled.txt", threading.Barrier(2), Path.read_text
    file.write_text("80 linear old\n90a linear old\n")

    def read_together(path):
        text = read(path)
        with suppress(threading.BrokenBarrierError):
            meet.wait(0.2)
        return text

    monkeypatch.setattr(Path, "read_text", read_together)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda arch: write_down(file, arch, [f"{arch} linear new"]), ("80", "90a")))
    assert read(file) == "80 linear new\n90a linear new\n"
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
