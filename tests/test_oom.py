"""A full memory becomes an error that says whose, how much, and what to do."""

from __future__ import annotations

import pytest
import torch

from eet_lab.errors import OutOfMemory
from eet_lab.ops.oom import memory_for


def test_the_cpus_full_memory_is_told_as_a_gpus_is():
    says = r"This machine's memory is full: the record could not be allocated \(Tried to allocate 1,048,576\.00 GiB\)"
    freed = []
    with pytest.raises(OutOfMemory, match=f"{says}.*Use fewer"), memory_for("the record", free=lambda: freed.append(1)):
        torch.empty(1 << 50, dtype=torch.uint8)
    assert freed


def test_a_remedy_that_fails_does_not_hide_the_error():
    def remedy() -> str:
        raise ZeroDivisionError

    with pytest.raises(OutOfMemory, match="the record.*Use fewer or shorter"), memory_for("the record", remedy=remedy):
        torch.empty(1 << 50, dtype=torch.uint8)


@pytest.mark.parametrize(
    "says",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "eet_norm failed: out of memory (CUDA error 2) (T=1). Leave the technique out that launches it.",
    ],
)
def test_a_library_that_finds_no_memory_is_told_as_torch_is(says):
    with (
        pytest.raises(OutOfMemory, match=r"The GPU's .*record could not be allocated \([^.]*\). What was begun"),
        memory_for("the record"),
    ):
        raise RuntimeError(says)


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="no memory of that kind"), memory_for("the record"):
        raise RuntimeError("no memory of that kind")
