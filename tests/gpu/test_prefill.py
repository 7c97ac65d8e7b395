"""Attention of whole prompts on a GPU: what the cases are too small for, or cannot see."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from eet_lab.ops import cuda
from eet_lab.ops.shapes import AttentionShape, Columns, copied
from eet_lab.ops.types import Span, fresh

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_second_run_gives_the_same_bits(D):
    inputs = AttentionShape((700, 1, 1000, 64), 8, 4, D, packed=True).inputs("cuda", torch.float16, 1)
    first = cuda.attention(*copied(inputs), empty=fresh)
    for _ in range(20):
        assert torch.equal(cuda.attention(*copied(inputs), empty=fresh), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_prompt_of_32k_tokens(dtype):
    S, H, D = 32768, 16, 64
    qkv, kv, step, spec = AttentionShape((S,), H, H, D).inputs("cuda", dtype, 2)
    got = cuda.attention(qkv, kv, step, spec, empty=fresh)
    some = torch.tensor([0, 1, 63, 64, 127, 128, 191, 9999, 20001, S - 129, S - 128, S - 1], device="cuda")
    q, k, v = (x.transpose(0, 1) for x in qkv.view(S, 3, H, D).unbind(1))
    seen = torch.arange(S, device="cuda") <= some[:, None]
    exact, low = (
        scaled_dot_product_attention(q[:, some].to(t), k.to(t), v.to(t), attn_mask=seen).transpose(0, 1).flatten(1)
        for t in (torch.float64, dtype)
    )
    budget = 2 * (low - exact).abs().max() + 4 * torch.finfo(dtype).eps * exact.abs().max()
    assert (got[some] - exact).abs().max() <= budget


@pytest.mark.parametrize("D", [32, 64, 80, 128])
@pytest.mark.parametrize("window", [None, 1, 50, 140, 300])
def test_later_tokens_see_what_the_cache_holds(D, window):
    old, new = 200, 131
    qkv, kv, step, spec = AttentionShape((old + new,), 4, 2, D, window=window).inputs("cuda", torch.float16, 3)
    whole = cuda.attention(qkv, copied(kv), step, spec, empty=fresh)
    part = qkv[:old], step._replace(**{n: getattr(step, n)[:old] for n in ("ids", "positions", "rows", "columns")})
    cuda.attention(part[0], kv, part[1]._replace(spans=(Span(0, old, 0),), count=step.count - new), spec, empty=fresh)
    late = step._replace(**{n: getattr(step, n)[old:] for n in ("ids", "positions", "rows", "columns")})
    late = late._replace(spans=(Span(0, new, 0),), count=step.count - old)
    if window:  # what no later token sees is not read
        kv.keys[:, :, : max(old + 1 - window, 0)] = kv.values[:, :, : max(old + 1 - window, 0)] = torch.nan
    got = cuda.attention(qkv[old:].contiguous(), kv, late, spec, empty=fresh)
    assert (got - whole[old:]).abs().max() <= 4 * torch.finfo(torch.float16).eps * whole.abs().max()


def test_a_cache_of_more_than_two_to_the_31_numbers():
    shape = AttentionShape((130, 64, 200), 16, 16, 64)
    qkv, kv, step, spec = shape.inputs("cuda", torch.float16, 4)
    keys, values = (torch.empty(3, 16, 1 << 20, 64, dtype=torch.float16, device="cuda") for _ in range(2))
    far = cuda.attention(qkv, Columns(keys, values, 16, 64), step, spec, empty=fresh)
    near = cuda.attention(qkv, kv, step, spec, empty=fresh)
    assert torch.equal(far, near)
    real = step.columns >= step.num_pad[step.rows]
    places = step.rows[real], slice(None), step.columns[real]
    assert torch.equal(keys[places], kv.keys[places])
    assert torch.equal(values[places], kv.values[places])
