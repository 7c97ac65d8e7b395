"""Numbers in sentences and tables."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.bench import compare
from eet_lab.bench.measured import Spread, Verdict
from eet_lab.bench.tables import spread
from eet_lab.models import load
from eet_lab.words import counted, plain, signed


@pytest.mark.parametrize(
    ("number", "says"), [(0, "0 prompts"), (1, "1 prompt"), (2, "2 prompts"), (1024, "1,024 prompts")]
)
def test_one_is_singular(number, says):
    assert counted(number, "prompt") == says


@pytest.mark.parametrize(
    ("value", "says"),
    [(57641.3, "57,640"), (41.13, "41.13"), (9999.9, "10,000"), (100.0, "100"), (0.05123, "0.05123"), (0, "0")],
)
def test_numbers_have_four_digits_and_no_exponent(value, says):
    assert plain(value) == says
    assert plain(-value) == (f"-{says}" if value else says)


@pytest.mark.parametrize(
    ("value", "says"), [(-1824.3, "-1,824"), (584.82, "+584.8"), (0.0, "0"), (-0.0, "0"), (-2e-3, "-0.002")]
)
def test_a_difference_has_its_sign_and_no_exponent(value, says):
    assert signed(value) == says


@given(st.floats(1e-6, 1e12))
def test_plain_digits_say_the_number(value):
    assert float(plain(value).replace(",", "")) == float(f"{value:.4g}")


def test_a_range_is_told_where_there_is_one():
    assert spread(Spread(41.13, 41.13, 41.13)) == "41.13"
    assert spread(Spread(40.0, 41.13, 42.5)) == "41.13 (40–42.5)"
    assert spread(Spread(40.0, 57.641, 60.0), 1e3) == "57,640 (40,000–60,000)"


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_table_says_how_many_repeats_there_were_and_what_a_step_must_read(repeats):
    told = compare(
        load("demo", device="cpu"), ["Return"], "memory_reuse", repeats=repeats, max_new_tokens=2, watch=False
    )
    words = told.to_text()
    assert f", {counted(repeats, 'repeat')}" in words
    assert ("a single repeat" in words) is (repeats == 1)
    assert "A decode step of memory_reuse must read at least " in words


def test_a_lossy_output_is_not_called_the_same():
    summary = pytest.importorskip("eet_lab.panels.summary")
    assert set(summary.VERDICTS) == set(get_args(Verdict))
    assert summary.VERDICTS["lossy"][0] == "output: lossy, within its bound"


def test_one_prompt_is_told_as_one():
    editor = pytest.importorskip("eet_lab.panels.prompts_editor")
    assert "1 prompt, 1 token; as one rectangle 0 pads" in editor._sum([1], 4, 64)
    assert "2 prompts, 1 to 3 tokens; as one rectangle 2 pads" in editor._sum([1, 3], 4, 64)
    assert "Longest 3 + 4 new = <b>7</b> of 64" in editor._sum([1, 3], 4, 64)
    assert "new" not in editor._sum([1, 3], -5, 64), "what cannot be asked for has no sum"
