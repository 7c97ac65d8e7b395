"""The cases themselves: they pass what is right, and fail what is not."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from every_shape import every_shape

from eet_lab.ops import reference
from eet_lab.ops.cases import CASES, CaseFailed
from eet_lab.ops.cross_cases import CROSS_CASES
from eet_lab.ops.encoder_cases import ENCODER_CASES, PLAIN_ENCODER_CASES
from eet_lab.ops.records import ALL_CASES, OPS
from eet_lab.ops.shapes import AttentionShape, LinearShape
from eet_lab.ops.token_cases import EmbedShape
from eet_lab.parts import Ops

PLAIN = (*CASES, *ENCODER_CASES, *PLAIN_ENCODER_CASES, *CROSS_CASES)
SMALL = 1_000_000  # bytes that a shape may read, so that the CPU is not kept busy


@every_shape(PLAIN, SMALL)
def test_the_reference_in_fp32_is_within_the_budget(case, shape):
    if case.op == "attention" and getattr(shape, "slack", 0):
        pytest.skip("plain PyTorch multiplies hidden values by 0, and 0 * NaN is NaN")
    case.check(getattr(reference, case.op), shape, "cpu", torch.float32)


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_every_case_fails_an_op_that_is_a_little_wrong(case):
    shape = next(s for s in case.shapes if s.read_bytes(4) <= SMALL and not getattr(s, "slack", 0))

    def wrong(*args, **kwargs):
        return getattr(reference, case.op)(*args, **kwargs).mul_(1 + 1e-3)

    with pytest.raises(CaseFailed, match="error"):
        case.check(wrong, shape, "cpu", torch.float32)


def case_of(name):
    return next(case for case in CASES if case.name == name)


def test_an_unwritten_output_is_noticed():
    def lazy(x, norm_w, w, act, *, empty):
        return empty("linear", (len(x), len(w.weight)), x)

    with pytest.raises(CaseFailed, match="error nan"):
        case_of("norm_linear").check(lazy, LinearShape(2, 8, 8), "cpu", torch.float32)


@pytest.mark.parametrize("overrun", [-1, 1])
def test_a_write_beside_the_output_is_noticed(overrun):
    def clumsy(x, norm_w, w, act, *, empty):
        out = reference.norm_linear(x, norm_w, w, act, empty=empty)
        out.untyped_storage()[512 - 1 if overrun < 0 else 512 + out.nbytes] = 0
        return out

    with pytest.raises(CaseFailed, match="outside of its buffer"):
        case_of("norm_linear").check(clumsy, LinearShape(2, 8, 8), "cpu", torch.float32)


def test_attention_that_looks_at_pads_is_noticed():
    def nosy(qkv, kv, batch, spec, *, empty):
        out = reference.attention(qkv, kv, batch, spec, empty=empty)
        return out + 0 * kv[0][:, :, 0].sum()

    with pytest.raises(CaseFailed):
        case_of("decode_attention").check(nosy, AttentionShape((3, 5), 2, 2, 8, decode=True), "cpu", torch.float32)


def test_a_cache_that_is_not_written_is_noticed():
    def forgetful(qkv, kv, batch, spec, *, empty):
        return reference.attention(qkv, (kv[0].clone(), kv[1]), batch, spec, empty=empty)

    with pytest.raises(CaseFailed, match="cache does not hold"):
        case_of("decode_attention").check(forgetful, AttentionShape((5,), 2, 2, 8, decode=True), "cpu", torch.float32)


@pytest.mark.parametrize("packed", [False, True])
def test_steps_are_what_the_engine_makes(packed):
    from eet_lab.parts.batches import left_padded

    batch = AttentionShape((3, 1, 4), 2, 2, 8, packed=packed).batch("cpu")
    made = left_padded([[0] * 3, [0], [0] * 4])
    if not packed:
        assert all(torch.equal(a, b) for a, b in zip(batch[1:7], made[1:7], strict=True))
        assert batch.spans == made.spans
    assert batch.count.tolist() == made.count.tolist() == [3, 1, 4]
    assert (batch.keys.begin.tolist(), batch.keys.spans) == (made.keys.begin.tolist(), made.keys.spans)
    assert batch.spans[1] == (3 if packed else 7, 1) and (batch.max_q, batch.max_kv) == (4, 4)


def test_bytes_are_counted_once():
    assert LinearShape(1, 10, 20).read_bytes(2) == 2 * (200 + 20 + 10)
    assert EmbedShape(3, 8).read_bytes(2) == 3 * (2 * 3 * 8 + 16)
    assert EmbedShape(2000, 8).read_bytes(2) == 2 * 8 * (2000 + 865 + 100) + 2000 * 16, "tokens share words and places"
    assert EmbedShape(1, 8).held_bytes(2) == 2 * 8 * (1 + 1000 + 100) + 16
    assert AttentionShape((5,), 4, 2, 8, decode=True).read_bytes(2) == 2 * 8 * (2 * 2 * 5 + 2 * (4 + 2))
    windowed = AttentionShape((5, 9), 4, 2, 8, decode=True, window=6)
    assert windowed.read_bytes(2) == 2 * 8 * (2 * 2 * (5 + 6) + 2 * (4 + 2) * 2)


def test_every_op_that_models_call_has_a_record():
    assert list(OPS) and set(OPS) == {f.name for f in fields(Ops)}
    for name, op in OPS.items():
        assert callable(op.reference) and op.cases, name
        assert (op.launches is None) == (not any(case in ALL_CASES for case in op.cases)), name
