"""Compiled plans, and GPUs that are not there."""

from __future__ import annotations

import ctypes
from math import ceil

import pytest
from host_code import compiled

from eet_lab.ops.cuda import linear
from eet_lab.ops.cuda.launching import Limits
from linears.sources import GPUS, INT8_SOURCE, REGISTER_SOURCE, TILE_SOURCE, VECTOR_SOURCE, WGMMA_SOURCE


def _library_of(source: str):
    """A fixture: the plans in a source."""

    @pytest.fixture(scope="module")
    def library(tmp_path_factory):
        return compiled(tmp_path_factory.mktemp("plans"), source)

    return library


library = _library_of(VECTOR_SOURCE)
register_library = _library_of(REGISTER_SOURCE)
tile_library = _library_of(TILE_SOURCE)
int8_library = _library_of(INT8_SOURCE)
wgmma_library = _library_of(WGMMA_SOURCE)


def planned(
    libraries, gpu, T: int, N: int, K: int, normed: bool, gated: bool = False
) -> tuple[int, int, int, int] | None:
    """Bytes of shared memory, stages of the ring, bytes of one, and outputs of a block; None: it is cuBLAS's."""
    kernel = linear.streaming_kernel(T, N, K, 2, normed=normed, gated=gated)
    if kernel is None:
        return None
    assert {"vector_linear": 4, "register_linear": 8, "linear": 16}[kernel] >= T, "its launcher refuses more"
    assert kernel != "register_linear" or ceil(N / linear.num_blocks(N)) <= 64
    library = libraries[kernel]
    library.set_gpu(*gpu)
    unit = 2 if gated else 1
    found, blocks = (ctypes.c_int * 2)(), linear.num_blocks(N // unit)
    num_bytes = library.plan_of(T, N, K, 2 if gated else normed, not normed, blocks, found)
    return num_bytes, *found, ceil(N // unit / blocks) * unit


@pytest.fixture
def plans(library, register_library, tile_library, monkeypatch):
    """A function (gpu, T, N, K, normed, gated=False) that tells what `planned` does."""
    libraries = {"vector_linear": library, "register_linear": register_library, "linear": tile_library}

    def tell(gpu, *sizes):
        monkeypatch.setattr(linear, "gpu", lambda: Limits(*gpu))
        return planned(libraries, gpu, *sizes)

    return tell


@pytest.fixture
def h200(monkeypatch) -> None:
    monkeypatch.setattr(linear, "gpu", lambda: Limits(*GPUS[-1]))
