"""Cost tables: what lies between their nodes and beyond them, and files of them."""

from __future__ import annotations

import json
import os
from itertools import pairwise

import pytest
from cost_tables import MADE_UP, TOY_DECODER, TURBO_2060, encoder_cost
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.errors import CostError
from eet_lab.scheduling.cost import DecoderCost, EncoderCost, PassSize
from eet_lab.scheduling.cost_files import EXAMPLES, load_cost, read_cost, save_cost
from eet_lab.scheduling.grid import Axis, Grid
from eet_lab.scheduling.request import Request, Row

TIMES = st.floats(0.01, 1e6)
SMALL = {"lengths": (8, 16), "batches": (1, 2), "times": ((1.0, 2.0), (3.0, 4.0)), "source": MADE_UP}


def test_nodes_are_what_was_measured_and_between_them_it_is_linear():
    table = encoder_cost(lambda length, batch: 1 + length * batch, lengths=(10, 20), batches=(1, 3))
    assert [table.at(length, batch) for length, batch in ((10, 1), (20, 1), (10, 3), (20, 3))] == [11, 21, 31, 61]
    assert table.at(15, 1) == 16 and table.at(10, 2) == 21
    assert table.at(15, 2) == (11 + 21 + 31 + 61) / 4
    assert table.at(1, 1) == table.at(10, 1), "less than the least that was measured costs as much"


def test_beyond_what_was_measured_there_is_no_time():
    with pytest.raises(CostError, match="513 tokens a text, but the table of toy was measured up to 512"):
        TURBO_2060.at(513, 1)
    with pytest.raises(CostError, match="21 texts, but the table of toy was measured up to 20"):
        TURBO_2060.at(8, 21)
    with pytest.raises(CostError, match="17 rows"):
        TOY_DECODER.at(17, 17, 16)


def test_noise_does_not_make_a_larger_pass_quicker():
    noisy = EncoderCost((8, 16), (1, 2), ((5.0, 4.0), (3.0, 4.5)), MADE_UP)
    assert [noisy.at(8, 1), noisy.at(8, 2), noisy.at(16, 1), noisy.at(16, 2)] == [5, 5, 5, 5]
    assert noisy.times == ((5.0, 4.0), (3.0, 4.5)), "what was measured stays"


@given(st.lists(st.lists(TIMES, min_size=4, max_size=4), min_size=3, max_size=3), st.data())
def test_more_never_costs_less(times, data):
    grid = Grid([Axis("a", (1, 5, 9)), Axis("b", (2, 3, 8, 20))], times)
    a, b = (data.draw(st.lists(st.floats(0, most), min_size=2, max_size=2).map(sorted)) for most in (9, 20))
    less, more = grid.at(a[0], b[0]), grid.at(a[1], b[1])
    assert less <= more * (1 + 1e-12)


@given(st.lists(st.integers(1, 512), min_size=1, max_size=20))
def test_a_packed_pass_is_a_rectangle_of_as_much_arithmetic(lengths):
    """Tokens, and pairs that attend to each other: never more than padded, and as much for equal lengths."""
    table = encoder_cost(lambda length, batch: 1 + 0.5 * length * batch + 0.25 * batch * length**2)
    assert table.packed(lengths) <= table.at(max(lengths), len(lengths)) * (1 + 1e-9)
    same = [lengths[0]] * len(lengths)
    assert table.packed(same) == pytest.approx(table.at(same[0], len(same)))


def test_nothing_is_interpolated_from_a_decode_step_to_a_pass_that_reads_prompts():
    assert TOY_DECODER.at(4, 4, 256) == pytest.approx(0.5 + 0.02 + 1e-5 * 1024)
    assert TOY_DECODER.at(5, 4, 256) == pytest.approx(0.5 + 0.3 + 0.025 + 1e-5 * 1024)


def test_the_size_of_a_pass_counts_pads_and_the_columns_of_rows_that_decode():
    reading, decoding = Request((0,) * 7, 3), Request((0,) * 9, 3)
    reading.pad = 2
    size = PassSize.of([Row(reading, 0, 0, 7, True), Row(decoding, 1, 10, 1, True)])
    assert size == PassSize(rows=2, decoded=1, prompt_tokens=7, pads=2, columns=11)
    assert TOY_DECODER.pass_ms(size) == TOY_DECODER.at(10, 2, 11)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lengths": (16, 8)}, "The axis 'tokens a text' has 8 after 16. Sort its numbers"),
        ({"lengths": ()}, "at least one must have been measured"),
        ({"batches": (1, 2, 3)}, "2 times along the axis 'texts', but the axis has 3 nodes"),
        ({"times": ((1.0, 2.0),)}, "1 time along the axis 'tokens a text', but the axis has 2 nodes"),
        ({"times": ((1.0, float("nan")), (1.0, 1.0))}, "a time of nan ms"),
        ({"times": ((1.0, 0.0), (1.0, 1.0))}, "a time of 0.0 ms"),
        ({"times": (1.0, 2.0)}, "has 1.0 along the axis 'texts'"),
        ({"batches": (1, 2.5)}, "texts is 2.5"),
    ],
)
def test_a_table_that_cannot_be_is_refused(change, says):
    with pytest.raises(CostError, match=says):
        EncoderCost(**SMALL | change)


@pytest.mark.parametrize("table", [TURBO_2060, TOY_DECODER], ids=["encoder", "decoder"])
def test_files_are_read_as_they_were_written(table, tmp_path):
    path = save_cost(table, tmp_path / "table.json")
    assert load_cost(path) == table
    assert load_cost(str(path)).source == MADE_UP


def whole(**changes) -> dict:
    table = {"lengths": [8, 16], "batches": [1, 2], "times": [[1.0, 2.0], [3.0, 4.0]], "source": None}
    source = {name: "x" for name in ("model", "recipe", "device", "dtype", "torch", "eet_lab")}
    table["source"] = source | {"commit": None, "date": "2026-01-01T00:00:00Z"}
    return {"eet_lab_cost": 1, "kind": "encoder", "table": table | changes}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no cost table: it is not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1, 2]", "is JSON, but no cost table"),
        (json.dumps(whole() | {"eet_lab_cost": 2}).encode(), "has format 2"),
        (json.dumps(whole() | {"eet_lab_cost": True}).encode(), "has format true"),
        (json.dumps(whole() | {"kind": "gpu"}).encode(), "a table of 'gpu'; known kinds are encoder, decoder"),
        (json.dumps(whole() | {"table": None}).encode(), "damaged"),
        (json.dumps(whole(lengths=[16, 8])).encode(), "Sort its numbers"),
        (json.dumps(whole(lengths=[-8, 8])).encode(), r"table.lengths\[0\] is -8"),
        (json.dumps(whole(times=[[1.0, 2.0], [3.0]])).encode(), "1 time along the axis 'texts'"),
        (json.dumps(whole(times=[[1.0, 2.0], [3.0, "4"]])).encode(), "is '4', but it must be"),
        (json.dumps(whole(times=[[1.0, 2.0], [3.0, -4.0]])).encode(), "is -4.0, but it must be"),
        (json.dumps(whole(times=[[1.0, 2.0], [3.0, float("nan")]])).encode(), "NaN"),
        (json.dumps(whole(times=[[1.0, 2.0], [3.0, 0.0]])).encode(), "a time of 0.0 ms"),
        (json.dumps(whole(color="red")).encode(), "which this version does not know"),
        (json.dumps(whole()).replace("2026-01", "soon").encode(), "date"),
    ],
)
def test_a_hostile_file_is_told_in_a_sentence(content, says):
    with pytest.raises(CostError, match=says) as told:
        read_cost(content, "t.json")
    assert str(told.value).startswith("t.json") and len(str(told.value)) < 400


def test_what_cannot_be_read_is_told(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for name, says in (("pipe.json", "not a regular file"), ("none.json", "No such file"), (".", "no example")):
        with pytest.raises(CostError, match=says):
            load_cost(tmp_path / name if name.endswith("json") else name)
    with pytest.raises(CostError, match="Did you mean 'demo-cpu'"):
        load_cost("demo_cpu")
    with pytest.raises(CostError, match="cannot be written"):
        save_cost(TURBO_2060, tmp_path / "no" / "where.json")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.json")), ids=lambda path: path.stem)
def test_the_examples_say_what_they_are(path):
    table = load_cost(path.stem)
    assert isinstance(table, EncoderCost if "bert" in path.stem else DecoderCost)
    assert "not on your machine" in table.source.note and table.source.commit and "thread" in table.source.device
    flat = [axis for axis in (getattr(table, "lengths", ()), getattr(table, "extras", ()))]
    assert all(low < high for axis in flat for low, high in pairwise(axis))


def test_there_are_examples_for_both_kinds():
    assert {load_cost(path.stem).kind for path in EXAMPLES.glob("*.json")} == {"encoder", "decoder"}
