"""What every test that launches kernels needs: a GPU, and the kernels."""

from __future__ import annotations

import pytest
import torch

from eet_lab.ops import native


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """All kernels, built once: no test waits for a build, and none builds while it captures."""
    if problem := native.available("cuda"):
        pytest.skip(problem)
    native.prepare(native.all_names())


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each type that the kernels take."""
    return request.param
