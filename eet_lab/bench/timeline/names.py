"""What a reader knows kernels and calls by: our own by their name, those of libraries by what they do."""

from __future__ import annotations

import re
from functools import cache

import torch

from eet_lab.bench.launches import is_work
from eet_lab.bench.timeline.spans import Kind
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
