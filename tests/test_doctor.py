"""The doctor: one test for each way in which a machine can be ill."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from eet_lab import limits
from eet_lab.doctor import Check, diagnose, gpu, machine, notebook, pins, software, to_html, to_text
from eet_lab.errors import KernelBuildError, MonitorError, SetupError
from eet_lab.monitor.nvml import Driver, Gpu
from eet_lab.ops.native import toolchain
from eet_lab.paths import cache_dir

H200 = Gpu("NVIDIA H200", (9, 0))
DRIVER = Driver("580.1", (13, 0), (H200,))


def test_diagnose_covers_everything_once_and_leaves_this_machine_usable():
    checks = diagnose()
    names = [check.name for check in checks]
    assert names == [
        "Python", "packages", "versions", "GPU", "torch", "nvcc", "C++ compiler", "ninja", "ipykernel", "environments",
        "lab extensions", "disk", "cache",
    ]  # fmt: skip
    assert not [check for check in checks if check.status == "fail" and not check.remedy]


def needed() -> list[str]:
    """The distributions that the project requires."""
    return [Requirement(line).name for line in metadata.requires("eet-lab") or [] if "extra ==" not in line]


@pytest.fixture
def hide(monkeypatch):
    """`hide(distribution)` makes it, its modules and its version look as if it were not installed."""
    version, modules = metadata.version, metadata.packages_distributions()

    def hide(name: str) -> None:
        def not_there(asked: str) -> str:
            if canonicalize_name(asked) == canonicalize_name(name):
                raise metadata.PackageNotFoundError(asked)
            return version(asked)

        monkeypatch.setattr(metadata, "version", not_there)
        for module, owners in modules.items():
            if canonicalize_name(name) in map(canonicalize_name, owners):
                inside = [known for known in sys.modules if known.partition(".")[0] == module]
                for known in {module, *inside}:
                    monkeypatch.setitem(sys.modules, known, None)

    return hide


@pytest.mark.parametrize("name", needed())
def test_the_doctor_works_without_any_package_and_says_how_to_install_it(hide, monkeypatch, name):
    for module in [known for known in sys.modules if known.startswith("eet_lab.doctor.")]:
        if module != "eet_lab.doctor.check":
            monkeypatch.delitem(sys.modules, module)  # as in a new process, where importing them may fail
    hide(name)
    checks = diagnose()
    remedies = [check.remedy for check in checks if check.status == "fail"]
    asked = [word for remedy in remedies for word in remedy.replace('"', " ").split()]
    assert any(word.startswith(name) for word in asked), checks
    assert all("pip install" in remedy for remedy in remedies)
    assert to_text(checks)


def test_a_package_that_is_broken_is_one_row(monkeypatch):
    def broken() -> list[Check]:
        raise OSError("libcudart.so.13: cannot open shared object file")

    [row] = software.guarded("GPU", broken)
    assert (row.name, row.status) == ("GPU", "fail")
    assert "libcudart.so.13" in row.found
    assert "pip install" in row.remedy


def test_versions_that_were_not_tried_are_a_note(monkeypatch, tmp_path):
    own = tmp_path / "constraints.txt"
    own.write_text(f"# why\nnumpy==1.0\nno-such-package==3\npytest=={metadata.version('pytest')}  # why\ntorch==1.0\n")
    monkeypatch.setattr(pins, "constraints_file", lambda: own)
    check = pins.check_pins()
    assert check.status == "note"
    assert f"1 of 2 are not the tried ones: numpy {metadata.version('numpy')} (tried 1.0)" == check.found
    assert check.remedy == f'{sys.executable} -m pip install "numpy==1.0"'


def test_python_range(monkeypatch):
    assert software.check_python().status == "ok"
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    assert software.check_python().status == "fail"
    monkeypatch.setattr(sys, "version_info", (3, 15, 0))
    assert software.check_python().status == "warn"


def test_packages_names_what_is_missing_or_out_of_range(monkeypatch):
    requires = ["numpy", "plotly>=99", "no-such-package>=2", "pytest; extra == 'test'", "torch>=2.6"]
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    check = software.check_packages()
    assert check.status == "fail"
    assert "no-such-package is missing" in check.found
    assert "plotly is" in check.found
    assert "numpy" not in check.found
    assert check.remedy == f'{sys.executable} -m pip install "plotly>=99" "no-such-package>=2"'


def test_a_local_version_of_torch_is_in_range(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch>=2.6"])
    monkeypatch.setattr(metadata, "version", lambda name: "2.6.0+cu124")
    assert software.check_packages().status == "ok"


def test_no_gpu_is_a_note_and_breaks_nothing(monkeypatch):
    def none_here():
        raise MonitorError("NVML is not usable: NVML Shared Library Not Found")

    monkeypatch.setattr(gpu, "find_driver", none_here)
    monkeypatch.setattr(toolchain, "find_nvcc", _raises(KernelBuildError("nvcc is missing")))
    rows = {check.name: check for check in gpu.inspect_gpu()}
    assert rows["GPU"].status == "note"
    assert "CPU mode" in rows["GPU"].found
    assert rows["nvcc"].status == "note"
    assert "CPU mode" in to_text(list(rows.values()))


def test_missing_nvcc_with_a_gpu_fails_and_says_what_to_type(monkeypatch):
    monkeypatch.setattr(gpu, "find_driver", lambda: DRIVER)
    monkeypatch.setattr(toolchain, "find_nvcc", _raises(KernelBuildError("nvcc is missing")))
    monkeypatch.setattr(toolchain, "host_compiler", _raises(KernelBuildError("no g++")))
    rows = {check.name: check for check in gpu.inspect_gpu()}
    assert rows["nvcc"].status == "fail"
    assert rows["nvcc"].remedy.endswith("[cuda]'") and "-m pip install -c" in rows["nvcc"].remedy
    assert rows["C++ compiler"].status == "fail"
    assert rows["ninja"].status == "ok"


@pytest.mark.parametrize(("version", "status"), [("12.8.1", "ok"), ("13.2.0", "ok"), ("14.0.1", "fail")])
def test_nvcc_against_the_drivers_cuda(version, status):
    assert gpu.compare_nvcc(Check("nvcc", "ok", f"{version} at /x/nvcc"), DRIVER).status == status


def test_the_kernels_and_the_doctor_ask_for_the_same(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    old = Driver("580.1", (13, 0), (Gpu("Tesla T4", (7, 5)),))
    why = limits.gpu_too_old((7, 5))
    assert why in toolchain.available("cuda")
    assert why in gpu.check_gpu(old, "").found
    assert limits.gpu_too_old((8, 0)) is None

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name, found in {"find_nvcc": "/x", "nvcc_version": "14.0.1", "ninja": "/x", "host_compiler": "/x"}.items():
        monkeypatch.setattr(toolchain, name, lambda *args, found=found: found)
    monkeypatch.setattr(toolchain, "_driver_major", lambda: 13)
    row = gpu.compare_nvcc(Check("nvcc", "ok", "14.0.1 at /x/nvcc"), DRIVER)
    assert limits.nvcc_too_new("14.0.1", 13) in row.found
    assert toolchain.available("cuda") == f"{limits.nvcc_too_new('14.0.1', 13)}. {row.remedy}."
    monkeypatch.setattr(toolchain, "_driver_major", lambda: 14)
    assert toolchain.available("cuda") is None


@pytest.mark.parametrize(
    ("built_for", "sees_gpu", "status"),
    [
        ("13.0", True, "ok"),
        ("12.4", True, "ok"),
        ("14.0", False, "fail"),
        (None, False, "fail"),
        ("13.0", False, "fail"),
    ],
)
def test_torch_against_the_driver(monkeypatch, built_for, sees_gpu, status):
    import torch

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    check = gpu.check_torch(DRIVER)
    assert check.status == status
    assert bool(check.remedy) == (status == "fail")


def test_torch_newer_than_the_tried_one_or_the_drivers_cuda_is_a_warning(monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check = gpu.check_torch(DRIVER)
    assert (check.status, bool(check.remedy)) == ("warn", True)
    assert "newer than the driver's CUDA 13.0" in check.found

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    tried = pins.pinned()["torch"]
    for version, status in {"2.6.0+cu124": "ok", f"{tried}+cpu": "ok", "2.99.0": "warn"}.items():
        monkeypatch.setattr(torch, "__version__", version)
        for driver in (DRIVER, None):
            check = gpu.check_torch(driver)
            assert check.status == status
            assert (f'"torch=={tried}"' in check.remedy) == (status == "warn")


def test_a_hidden_gpu_is_not_a_broken_one(monkeypatch):
    import torch

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.check_torch(DRIVER).status == "warn"


def test_an_old_gpu_is_named():
    old = Driver("580.1", (13, 0), (Gpu("Tesla T4", (7, 5)),))
    assert gpu.check_gpu(DRIVER, "").status == "ok"
    assert gpu.check_gpu(old, "").status == "warn"


def test_broken_ipykernel(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "7.0.0")
    check = notebook.check_kernel()
    assert check.status == "fail"
    assert "ipykernel" in check.remedy


def test_outside_a_kernel_the_server_is_ours(monkeypatch):
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    prefix, front_end = notebook.find_server()
    assert notebook.check_environments(prefix, front_end).status == "ok"


def test_a_server_from_another_environment_is_found_by_its_process(monkeypatch, tmp_path):
    python = tmp_path / "other" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    code, pipes = (
        "import sys; print(1, flush=True); sys.stdin.read()",
        {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE},
    )
    server = subprocess.Popen([python, "-c", code], **pipes)
    try:
        assert server.stdout.readline(), "it runs, and is no longer a copy of this process"
        monkeypatch.setenv("JPY_PARENT_PID", str(server.pid))
        monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
        for name in ("VSCODE_PID", "VSCODE_CWD"):
            monkeypatch.delenv(name, raising=False)
        prefix, front_end = notebook.find_server()
    finally:
        server.communicate()
    assert prefix == tmp_path / "other"
    check = notebook.check_environments(prefix, front_end)
    assert check.status == "warn"
    assert str(python) in check.remedy
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("jupyter_core.paths.SYSTEM_JUPYTER_PATH", [])
    lacking = notebook.check_extensions(prefix, front_end)
    assert lacking.status == "fail"
    assert str(python) in lacking.remedy
    assert "anywidget" in lacking.found


def test_front_ends_with_their_own_widget_manager_are_notes(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    prefix, front_end = notebook.find_server()
    assert (prefix, front_end) == (None, "Colab")
    assert notebook.check_environments(prefix, front_end).status == "note"
    assert notebook.check_extensions(prefix, front_end).status == "note"


@pytest.mark.parametrize(("free", "status"), [(10**11, "ok"), (10**9, "warn"), (10**7, "fail")])
def test_disk(monkeypatch, free, status):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert machine.check_disk().status == status


def test_cache_is_made_private(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "eet-lab").mkdir(mode=0o777)
    os.chmod(tmp_path / "eet-lab", 0o777)
    assert stat.S_IMODE(cache_dir().stat().st_mode) == 0o700
    assert machine.check_cache().status == "ok"


def test_cache_that_cannot_be_made_is_an_error_with_a_remedy(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SetupError, match="XDG_CACHE_HOME"):
        cache_dir()
    assert machine.check_cache().status == "fail"


def test_cache_of_another_user_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 123456)
    with pytest.raises(SetupError, match="belongs to user"):
        cache_dir()


def test_text_keeps_commands_whole_and_sums_up():
    checks = [Check("a", "ok", "fine"), Check("long name", "fail", "word " * 40, "pip install " + "x" * 100)]
    text = to_text(checks, width=60)
    assert "-> pip install " + "x" * 100 in text
    assert text.endswith("1 of 2 checks failed: do what stands behind ->")
    assert max(len(line) for line in text.splitlines() if "->" not in line) <= 60
    assert "\x1b" not in text
    assert "\x1b" in to_text(checks, color=True)


def test_html_escapes_what_was_found():
    page = to_html([Check("a<b", "warn", "<script>", "x && y")])
    assert "<script>" not in page
    assert "a&lt;b" in page
    assert "x &amp;&amp; y" in page


def test_import_of_the_doctor_is_cheap():
    code = "import sys, eet_lab.doctor; assert 'torch' not in sys.modules and 'psutil' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _raises(error: Exception):
    def call(*args: object) -> Path:
        raise error

    return call
