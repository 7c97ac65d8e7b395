"""Norms and softmax: their cases, what is refused, and the knob that interleaves rows."""

from __future__ import annotations

import pytest
import torch
from every_shape import every_shape

from eet_lab.errors import KernelError, RecipeError
from eet_lab.ops import cuda, reference
from eet_lab.ops.cases import CaseFailed
from eet_lab.ops.row_cases import ROW_CASES
from eet_lab.ops.types import Linear, Norm, fresh
from eet_lab.technique import Recipe


@every_shape(ROW_CASES)
def test_the_reference_in_fp32_is_within_the_budget(case, shape):
    case.check(getattr(reference, case.op), shape, "cpu", torch.float32)


@pytest.mark.parametrize("case", ROW_CASES, ids=lambda case: case.name)
def test_every_case_fails_an_op_that_is_a_little_wrong(case):
    def wrong(*args, **kwargs):
        return getattr(reference, case.op)(*args, **kwargs).mul_(1 + 1e-3)

    with pytest.raises(CaseFailed, match="error"):
        case.check(wrong, case.shapes[-1], "cpu", torch.float32)


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_what_is_not_supported_is_said():
    x, w = meta(4, 16), Norm(meta(16), meta(16), 1e-5)
    with pytest.raises(KernelError, match="rows is 3, but kernels reduce 1, 2, 4 rows"):
        cuda.norm(x, w, empty=fresh, rows=3)
    with pytest.raises(KernelError, match="12 channels"):
        cuda.norm(meta(4, 12), w, empty=fresh)
    with pytest.raises(KernelError, match=r"the norm's bias is \(8,\)"):
        cuda.norm(x, w._replace(bias=meta(8)), empty=fresh)
    for strange in (meta(16), meta(4, 32)[:, ::2], meta(4, 16, dtype=torch.float64)):
        with pytest.raises(KernelError, match=r"kernels need \[T,C\]"):
            cuda.softmax(strange, empty=fresh)


def test_a_knob_of_fused_kernels_reaches_the_norm_of_a_long_pass(monkeypatch):
    import eet_lab.ops.cuda.linear as linear

    asked = []
    monkeypatch.setattr(linear, "norm", lambda x, w, *, empty, rows, dependent: asked.append(rows) or x)
    x, norm = meta(64, 16), Norm(meta(16), meta(16), 1e-5)
    for words in ("fused_kernels", "fused_kernels:norm_rows=4"):
        ops = Recipe.parse(words, "cuda").parts.ops
        ops.norm_linear(x, norm, Linear(meta(8, 16), None), empty=fresh)
        assert ops == Recipe.parse(words, "cuda").parts.ops
        assert "norm" in ops.kernels
    assert asked == [1, 4]
    with pytest.raises(RecipeError, match="norm_rows is 3, but it must be one of 1, 2, 4"):
        Recipe.parse("fused_kernels:norm_rows=3")
