"""Attention of whole prompts on a GPU: what the cases are too small for, or cannot see."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from eet_lab.models.decoder import mapped
from eet_lab.ops import cuda, reference
from eet_lab.ops.shapes import AttentionShape, Normal, copied
from eet_lab.ops.types import Batch, Spec, fresh
from eet_lab.parts.batches import make_batch

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
    qkv, kv, batch, spec = AttentionShape((S,), H, H, D).inputs("cuda", dtype, 2)
    got = cuda.attention(qkv, kv, batch, spec, empty=fresh)
    some = torch.tensor([0, 1, 63, 64, 127, 128, 191, 9999, 20001, S - 129, S - 128, S - 1], device="cuda")
    q, k, v = (x.transpose(0, 1) for x in qkv.view(S, 3, H, D).unbind(1))
    seen = torch.arange(S, device="cuda") <= some[:, None]
    exact, low = (
        scaled_dot_product_attention(q[:, some].to(t), k.to(t), v.to(t), attn_mask=seen).transpose(0, 1).flatten(1)
        for t in (torch.float64, dtype)
    )
    budget = 2 * (low - exact).abs().max() + 4 * torch.finfo(dtype).eps * exact.abs().max()
    assert (got[some] - exact).abs().max() <= budget


def part_of(batch: Batch, begin: int, end: int) -> Batch:
    """The pass that reads tokens begin .. end - 1 of its only row."""
    tokens = {name: getattr(batch, name)[begin:end] for name in ("ids", "positions", "rows", "columns")}
    count = end - begin
    keys = batch.keys._replace(spans=((0, end),))
    counts = {"count": torch.full_like(batch.count, count), "last": torch.full_like(batch.last, count - 1)}
    return batch._replace(**tokens, **counts, keys=keys, max_q=count, spans=((0, count),))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("apart", [0, 300])
def test_new_prompts_of_rows_that_end_in_columns_of_their_own(D, apart):
    """Prompts that join: each begins in column 0 of its slot, and one of the slots reads nothing."""
    lengths = (300, 0, 129, 515)
    num, kv_columns = len(lengths), 515 + apart
    normal = Normal("cuda", torch.float16, 5)
    qkv = normal(sum(lengths), 8 * D)
    spec = Spec(4, 2, D)
    keys = torch.zeros(num, 2, kv_columns, D, dtype=torch.float16, device="cuda")
    counts = [length for length in lengths if length]
    rows = [row for row, length in enumerate(lengths) if length]
    batch = mapped(make_batch(counts, rows=rows, num_rows=num), lambda part: part.cuda())
    whole = [torch.zeros_like(keys) for _ in range(2)]  # of which the pass sees the columns that it needs
    mine = tuple(part[:, :, :515] for part in whole)
    theirs = tuple(part.clone() for part in mine)
    got = cuda.attention(qkv.clone(), mine, batch, spec, empty=fresh)
    want = reference.attention(qkv.clone(), theirs, batch, spec, empty=fresh)
    assert not any(part[:, :, 515:].any() or part[1].any() for part in whole), "it wrote outside of its rows"
    assert (got - want).abs().max() <= 8 * torch.finfo(torch.float16).eps * want.abs().max()
    for row, length in enumerate(lengths):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a[row, :, :length], b[row, :, :length])


@pytest.mark.parametrize("D", [32, 64, 80, 128])
@pytest.mark.parametrize("window", [None, 1, 50, 140, 300])
def test_later_tokens_see_what_the_cache_holds(D, window):
    old, new = 200, 131
    qkv, kv, batch, spec = AttentionShape((old + new,), 4, 2, D, window=window).inputs("cuda", torch.float16, 3)
    whole = cuda.attention(qkv, copied(kv), batch, spec, empty=fresh)
    early, late = part_of(batch, 0, old), part_of(batch, old, old + new)
    cuda.attention(qkv[:old], kv, early, spec, empty=fresh)
    if window:  # what no later token sees is not read
        for part in kv:
            part[:, :, : max(old + 1 - window, 0)] = torch.nan
    got = cuda.attention(qkv[old:].contiguous(), kv, late, spec, empty=fresh)
    assert (got - whole[old:]).abs().max() <= 4 * torch.finfo(torch.float16).eps * whole.abs().max()


def test_a_cache_of_more_than_two_to_the_31_numbers():
    shape = AttentionShape((130, 64, 200), 16, 16, 64)
    qkv, kv, batch, spec = shape.inputs("cuda", torch.float16, 4)
    keys, values = (torch.empty(3, 16, 1 << 20, 64, dtype=torch.float16, device="cuda") for _ in range(2))
    far = cuda.attention(qkv, (keys[:, :, :200], values[:, :, :200]), batch, spec, empty=fresh)
    near = cuda.attention(qkv, kv, batch, spec, empty=fresh)
    assert torch.equal(far, near)
    real = batch.columns >= batch.keys.begin[batch.rows]
    places = batch.rows[real], slice(None), batch.columns[real]
    assert torch.equal(keys[places], kv[0][places])
    assert torch.equal(values[places], kv[1][places])


KINDS = [(torch.float16, 64, None), (torch.float32, 64, None), (torch.bfloat16, 32, None), (torch.float16, 128, 20)]


@pytest.mark.parametrize(("dtype", "D", "window"), KINDS, ids=str)
@pytest.mark.parametrize("starts", [(0, 0), (0, 40)], ids=["all new", "beside a row that goes on"])
@pytest.mark.parametrize("page", [None, 64])
def test_idle_tokens_are_no_rows_and_their_output_is_0(dtype, D, window, starts, page):
    """Whatever they are: a block of attention loads them beside the last tokens of a row."""
    H, counts = 4, (70, 3 if not starts[1] else 1)
    normal, spec = Normal("cuda", dtype, 7), Spec(H, H, D, window=window)
    shape = (2, H, 128, D) if page is None else (5, H, page, D)
    keys, values = (normal(*shape) for _ in range(2))
    table = None if page is None else torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device="cuda")
    qkv, found = normal(sum(counts), 3 * H * D), []
    for idle in (0, 55):
        batch = mapped(make_batch(counts, starts=starts, size=sum(counts) + idle), lambda tensor: tensor.cuda())
        batch = batch._replace(keys=batch.keys._replace(table=table))
        read = torch.cat([qkv, torch.full_like(qkv[:1], torch.nan).expand(idle, -1)])
        kv = keys.clone(), values.clone()
        found.append((cuda.attention(read, kv, batch, spec, empty=fresh), *kv))
    (alone, *stored), (filled, *others) = found
    assert torch.equal(filled[: sum(counts)], alone) and not filled[sum(counts) :].any()
    assert all(map(torch.equal, stored, others))
