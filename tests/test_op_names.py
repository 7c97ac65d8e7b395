"""The names of ops to be timed: sizes are read back from them, and what cannot be is told."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.bench.op_workloads import TIMED_CASES, OpWorkload
from eet_lab.cli import main
from eet_lab.errors import PromptError

CPU = torch.device("cpu")


def workload(text: str) -> OpWorkload:
    [found] = OpWorkload.parse(text)
    return found


@given(st.integers(1, 9), st.integers(1, 99), st.integers(0, 99), st.sampled_from([1, 2, 4]), st.booleans())
def test_attention_of_any_size_reads_back_from_its_name(batch, low, more, groups, decode):
    span = f"{low}-{low + more}" if more and batch > 1 else str(low)
    heads = "h4" if groups == 4 else f"h4g{groups}"
    text = f"op:{'decode' if decode else 'prefill'}_attention/b{batch}/{'kv' if decode else 's'}{span}/{heads}/d32"
    found = workload(text)
    assert str(found) == text
    assert (min(found.shape.lengths), len(found.shape.lengths)) == (low, batch)


COUNT, EIGHTS = st.integers(1, 5000), st.integers(40, 600).map(lambda number: 8 * number)


LINEAR = {"T": COUNT, "N": COUNT, "C": EIGHTS, "act": st.sampled_from([None, "relu", "gelu"])}


DRAW = {"temperature": st.floats(0.01, 9).map(lambda t: float(f"{t:g}")), "top_k": st.integers(0, 40)}


CHOOSE = {"B": st.integers(1, 16), "V": st.integers(99, 5000), **DRAW, "top_p": st.sampled_from([0.25, 0.9, 1.0])}


SHAPES = {
    "norm_linear": LINEAR,
    "linear_residual": LINEAR | {"act": st.none()},
    "int8_norm_linear": LINEAR | {"group": st.sampled_from([0, 64, 256])},
    "norm": {"T": COUNT, "C": EIGHTS},
    "softmax": {"T": COUNT, "C": COUNT},
    "norm_backward": {"T": COUNT, "C": EIGHTS, "rms": st.booleans()},
    "cross_entropy": {"T": COUNT, "V": COUNT},
    "linear_cross_entropy": {"T": COUNT, "C": EIGHTS, "V": COUNT},
    "attention_backward": {"B": COUNT, "S": COUNT, "H": COUNT, "D": EIGHTS},
    "adamw": {"millions": COUNT},
    "embed": {"T": COUNT, "C": EIGHTS},
    "next_token": {"B": st.integers(1, 9), "T": st.integers(9, 99), "V": CHOOSE["V"], "C": EIGHTS, **DRAW}
    | {"int8": st.booleans(), "rms": st.just(False)},
    "choose": CHOOSE,
    "choose_top_k": CHOOSE
    | {"top_k": st.integers(1, 40), "num_blocks": st.integers(40, 99), "clumped": st.just(False)},
}


@pytest.mark.parametrize("name", SHAPES)
@given(st.data())
def test_shapes_of_any_size_read_back_from_their_names(name, data):
    [case] = (case for case in TIMED_CASES if case.name == name)
    shape = replace(case.bench[0], **data.draw(st.fixed_dictionaries(SHAPES[name])))
    [found] = OpWorkload.parse(f"op:{name}/{shape}")
    assert found == OpWorkload(case, shape)


def test_linears_of_any_size_and_listed_sizes_read_back():
    for text in (
        "op:norm_linear/t3/n11/c24/relu",
        "op:linear_residual/t3/n11/c24",
        "op:norm/t3/c24",
        "op:softmax/t1/c7",
        "op:embed/t3/c24",
        "op:int8_norm_linear/t3/n11/c24/int8",
        "op:int8_norm_linear/t3/n11/c256/relu/int8g64",
        "op:int8_linear_residual/t3/n11/c256/int8g128",
        "op:next_token/b2/t7/v99/c24",
        "op:next_token/b2/t7/v99/c24/int8/temp0.8/k5",
        "op:choose/b2/v99/greedy",
        "op:choose/b2/v99/temp1/k5/p0.25",
        "op:choose_top_k/b16/v99/temp0.5/k20/p0.9/blocks33",
    ):
        assert str(workload(text)) == text
    for case in TIMED_CASES:
        listed = OpWorkload.parse(f"op:{case.name}")
        assert tuple(each.shape for each in listed) == case.bench
        assert [workload(str(each)) for each in listed] == list(listed)


@pytest.mark.parametrize("text", ["op:attend", "op:decode_attention/b2", "op:decode_attention/b2/s5/h4/d64", "gpt2/b1"])
def test_bad_names_are_told(text):
    with pytest.raises(PromptError):
        OpWorkload.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("op:norm/t4/c0", r"c \(channels\) is 0, .* from 1 to "),
        ("op:norm/t4/c12", r"c \(channels\) is 12, .* multiple of 8; try 8 or 16"),
        ("op:norm_linear/t1/n1/c1", "multiple of 8; try 8"),
        ("op:norm_linear/t0/n1/c8", r"t \(tokens\) is 0"),
        ("op:norm_linear/t1/n1/c8/swish", "'swish', but it must be one of gelu_tanh, gelu, relu"),
        ("op:linear_residual/t1/n64/c64/gelu_tanh", "'gelu_tanh', but this op adds a residual .* give t1/n64/c64"),
        ("op:softmax/t1/c99999999999999999999999", r"c \(channels\) is 9.* to 2,147,418,112"),
        ("op:softmax/t1/c2147450000", r"c \(channels\) is 2147450000, .* to 2,147,418,112"),
        ("op:decode_attention/b0/kv0/h1/d64", r"b \(rows\) is 0"),
        ("op:decode_attention/b99999999/kv1/h1/d64", "b .rows. is 99,999,999, .* from 1 to 65,535"),
        ("op:decode_attention/b1/kv0/h1/d64", r"kv or s \(tokens a row\) is 0"),
        ("op:decode_attention/b2/kv9-3/h1/d64", "from 9 to 3"),
        ("op:decode_attention/b1/kv16/h3g2/d64", r"h \(heads\) is 3, .* multiple of g \(KV heads\), which is 2"),
        ("op:decode_attention/b1/kv16/h3g0/d64", r"g \(KV heads\) is 0"),
        ("op:decode_attention/b1/kv16/h1/d60", "d .head dim. is 60, .* multiple of 8; try 56 or 64"),
        ("op:decode_attention/b1/kv16/h1/d300", "is 300, but kernels need at most 256"),
        ("op:decode_attention/b1/kv16/h1/d264", "is 264, but kernels need at most 256, a multiple of 8."),
        ("op:norm/t4", "Write t<tokens>/c<channels>, for example t64/c1600"),
        ("op:fused_layer/t3/c8", "It is timed at: t1/c1600/f6400"),
        ("op:int8_norm_linear/t3/n8/c8", "Write .*/int8.*, for example t1/n4800/c1600/int8"),
        ("op:int8_linear_residual/t1/n64/c64/relu/int8", "this op adds a residual .* give t1/n64/c64/int8"),
        ("op:int8_norm_linear/t3/n8/c64/int8g48", "is 48, but it must be a power of two, at least 64"),
        ("op:int8_norm_linear/t3/n8/c64/int8g64", "is 64, but an output has 64: leave g64 out"),
        (f"op:int8_norm_linear/t3/n8/c64/int8g{'9' * 5000}", "int8g .* from 1 to 2,147,418,112"),
        (f"op:choose/b1/v9/temp1/k{'9' * 5000}", "k .top-k. is 99.* from 1 to 2,147,418,112"),
        (f"op:choose/b1/v9/temp{'9' * 5000}", "temperature is inf"),
        ("op:choose/b1/v9/temp1/k0", "k .top-k. is 0"),
        ("op:choose/b1/v9/temp1/k9", "k .top-k. is 9, but it must be less than v .vocabulary., 9"),
        ("op:choose/b1/v9/temp0.80/p1.0", "has no sizes 'b1/v9/temp0.80/p1.0'. Write b1/v9/temp0.8.$"),
        ("op:choose/b1/v9/temp-1", "temperature is -1.0, but it must be 0 .greedy. or from 0.0001"),
        ("op:choose/b1/v9/tempnan/k3", "temperature is nan, but"),
        ("op:choose/b1/v9/tempx", "temp .temperature. is 'x', but it must be a number such as 0.8"),
        ("op:choose/b1/v9/temp1/p", "p .top-p. is '', but it must be a number"),
        ("op:next_token/b1/t1/v9/c8/greedy", "Write b1/t1/v9/c8.$"),
        ("op:choose/b1/v9/temp0", "Write b1/v9/greedy.$"),
        ("op:decode_attention/b2/s5/h4/d64", "Write b2/kv5/h4/d64.$"),
        ("op:next_token/b3/t2/v9/c8", "t .tokens. is 2, but each of 3 rows has one"),
        ("op:next_token/b3/t3/v9/c9", "c .channels. is 9, .* try 8 or 16"),
        ("op:next_token/b3/t3/v9/c8/k5", "without a temperature; give one, for example temp1"),
        ("op:choose/b1/v9/temp0.00001", "temperature is 1e-05, but it must be 0"),
        ("op:choose/b1/v9/temp1/p1.5", "top_p is 1.5, but it must be above 0 and at most 1"),
        ("op:choose/b1/v0/greedy", "v .vocabulary. is 0, .* from 1"),
        ("op:choose_top_k/b17/v99/temp1/k5/blocks9", "b .rows. is 17, but this op takes at most 16; op:choose"),
        ("op:choose_top_k/b1/v99/temp1/k5/blocks100", "blocks is 100, .* at most 512, .* v .vocabulary., 99"),
        ("op:choose_top_k/b1/v99/temp1/k10/blocks9", "k .top-k. is 10, .* from 1 to the number of blocks, 9"),
        ("op:choose_top_k/b1/v99/temp1/blocks9", "k .top-k. is not given, .* from 1 to the number of blocks, 9"),
    ],
)
def test_sizes_that_cannot_be_are_told(text, says, capsys):
    assert main(["bench", text, "--device", "cpu"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(says, line)


@pytest.mark.parametrize(
    "text",
    [
        "op:norm/t99999999/c99999992",
        "op:embed/t1/c99999992",
        "op:norm_linear/t1/n2000000000/c80000",
        "op:decode_attention/b60000/kv2000000/h64/d128",
    ],
)
def test_inputs_beyond_memory_are_told_before_they_are_made(text, capsys):
    assert main(["bench", text, "--device", "cpu"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"{text} needs about [\d,.]+ GiB, but this machine has [\d,.]+ GiB free\. Give smaller", last)


def test_a_suggestion_is_made_once():
    with pytest.raises(PromptError) as told:
        OpWorkload.parse("op:norm/cabc")
    assert str(told.value).count("t64/c1600") == 1
