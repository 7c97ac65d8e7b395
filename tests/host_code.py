"""The host's part of csrc/, such as the plan of a launch, in a library that a test calls."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

from eet_lab.ops.native import toolchain
from eet_lab.paths import csrc_dir

UNUSED_KERNELS = ["-gencode=arch=compute_90a,code=compute_90a", "-Xcicc=-O0"]
"""Nobody launches them: no machine code is made of them, which takes most of the time."""


def in_namespaces(texts: dict[str, str]) -> str:
    """One text of several that include sources of csrc/, by namespace: headers, most of the time, are read once."""
    files = sorted(csrc_dir().rglob("*.cu*"))
    system = {line for file in files for line in re.findall(r"^#include <.+>", file.read_text(), re.MULTILINE)}
    ours = [f'#include "{file.relative_to(csrc_dir())}"' for file in files if file.suffix == ".cuh"]
    each = [f"namespace {name} {{\n{text}\n}}" for name, text in texts.items()]
    return "\n".join([*sorted(system), *ours, *each])


def compiled(folder: Path, text: str) -> ctypes.CDLL:
    """C++ that includes sources of csrc/."""
    source, made = folder / "host.cu", folder / "host.so"
    source.write_text(text)
    flags = ["-std=c++17", "-shared", "-Xcompiler=-fPIC", f"-I{csrc_dir()}", *UNUSED_KERNELS]
    subprocess.run([str(toolchain.find_nvcc()), *flags, "-o", made, source], check=True, capture_output=True)
    return ctypes.CDLL(str(made))
