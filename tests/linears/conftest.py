"""Compiled checks of plans, and GPUs that are not there."""

from __future__ import annotations

import ctypes
from math import ceil

import pytest
from filelock import FileLock
from host_code import compiled, in_namespaces

from eet_lab.ops.cuda import choice, linear, plan
from eet_lab.ops.cuda.launching import Limits
from linears import sources
from linears.sources import GPUS


@pytest.fixture(scope="session")
def checks(tmp_path_factory, worker_id) -> ctypes.CDLL:
    """Those of all kernels; what one worker has compiled the others load."""
    if worker_id == "master":  # there are no others
        return compiled(tmp_path_factory.mktemp("plans"), in_namespaces(sources.CHECKS))
    shared = tmp_path_factory.getbasetemp().parent / "plans"
    with FileLock(f"{shared}.lock"):
        if not (shared / "made").exists():
            shared.mkdir(exist_ok=True)
            compiled(shared, in_namespaces(sources.CHECKS))
            (shared / "made").touch()
    return ctypes.CDLL(str(shared / "host.so"))


@pytest.fixture
def accepts(checks):
    """A function (kernel, product, numbers, grouped=False): whether its launcher takes this plan."""

    def ask(kernel: str, product: plan.Product, numbers, grouped: bool = False) -> bool:
        T, N, K, itemsize, blocks, normed, residual, gated = map(int, product)
        told = (ctypes.c_int * 8)(*numbers)
        return bool(
            getattr(checks, f"accepts_{kernel}")(T, N, K, itemsize, blocks, normed, residual, gated, int(grouped), told)
        )

    return ask


@pytest.fixture
def plans(monkeypatch):
    """A function (gpu, T, N, K, normed, gated=False): shared memory of the kernel that takes it, stages of the ring,
    bytes of one, and outputs of a block; None: it is cuBLAS's. None is multiplied in tiles.
    """

    def tell(gpu, T: int, N: int, K: int, normed: bool, gated: bool = False):
        monkeypatch.setattr(linear, "gpu", lambda: Limits(*gpu, is_hopper=False))
        kernel = linear.streaming_kernel(T, N, K, 2, normed=normed, gated=gated)
        if kernel is None:
            return None
        assert {"vector_linear": 4, "register_linear": 8, "linear": 16}[kernel] >= T, "its launcher refuses more"
        assert kernel != "register_linear" or ceil(N / linear.num_blocks(N)) <= 64
        product = choice.product_of(T, N, K, 2, Limits(*gpu), normed=normed, residual=not normed, gated=gated)
        make = {"vector_linear": plan.vector, "register_linear": plan.register, "linear": plan.tiles}[kernel]
        found, ring = make(product, gpu[0])
        return found.shared_bytes, ring.num_stages, ring.stage_bytes, product.outputs

    return tell


@pytest.fixture
def h200(monkeypatch) -> None:
    monkeypatch.setattr(linear, "gpu", lambda: Limits(*GPUS[-1]))


@pytest.fixture
def no_tiles(monkeypatch) -> None:
    """Of a GPU as large as an H200, which does not multiply in tiles."""
    monkeypatch.setattr(linear, "gpu", lambda: Limits(*GPUS[-1], is_hopper=False))
