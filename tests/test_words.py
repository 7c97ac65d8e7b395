"""Numbers in sentences and tables."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.bench import compare
from eet_lab.bench.measured import Spread, Verdict
from eet_lab.bench.tables import spread
from eet_lab.figures.script import script
from eet_lab.models import load
from eet_lab.paths import PACKAGE
from eet_lab.words import (
    KiB,
    MiB,
    amount,
    amounts,
    brief,
    counted,
    mib,
    ms_words,
    params_words,
    percent,
    plain,
    signed,
    signed_mib,
    times,
)


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


@given(st.floats(1e-4, 1e12))
def test_plain_digits_say_the_number(value):
    assert float(plain(value).replace(",", "")) == float(f"{value:.4g}")


@given(st.floats(1e-3, 1e12))
def test_brief_digits_say_the_number_to_three_digits(value):
    said = brief(value).replace(",", "")
    assert float(said) == (round(value) if value >= 1000 else float(f"{value:.3g}"))
    assert len(said.replace(".", "").lstrip("0")) >= 3 or float(said) == pytest.approx(value, rel=1e-9)


def test_a_range_is_told_where_there_is_one():
    assert spread(Spread(41.13, 41.13, 41.13)) == "41.13"
    assert spread(Spread(40.0, 41.13, 42.5)) == "41.13 (40 to 42.5)"
    assert spread(Spread(40.0, 57.641, 60.0), 1e3) == "57,640 (40,000 to 60,000)"


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
    answer = pytest.importorskip("eet_lab.workbench.views.answer")
    assert set(answer.VERDICTS) == set(get_args(Verdict))
    assert answer.VERDICTS["lossy"][1] == "output lossy, within its bound"


def test_one_prompt_is_told_as_one():
    inputs = pytest.importorskip("eet_lab.workbench.views.chosen")
    assert inputs._told([1]) == "1, 1 token, 0 pads to equal length"
    assert inputs._told([1, 3]) == "2, 1 to 3 tokens, 2 pads to equal length"


BRIEF = {
    3413.53: "3,414", 1130.4: "1,130", 26.94: "26.9", 1.472: "1.47", 0.03118: "0.0312", 100.0: "100", 99.96: "100",
    999.7: "1,000", 0.0: "0", -3361.47: "-3,361", -0.182: "-0.182", 2.0: "2", 1e9: "1,000,000,000", 1e-4: "0.0001",
    1e-7: "1 × 10⁻⁷", -7.84e-6: "-7.84 × 10⁻⁶", 2.5e-12: "2.5 × 10⁻¹²",
    28.97: "29.0", 29.0: "29", 0.09003: "0.0900", 0.09: "0.09", 0.1 + 0.2: "0.3", -3.301: "-3.30", 9.999: "10.0",
    math.inf: "–", math.nan: "–",
}  # fmt: skip


@pytest.mark.parametrize(("value", "says"), BRIEF.items())
def test_a_label_has_three_digits_and_all_before_the_point(value, says):
    assert brief(value) == says


def test_the_page_writes_numbers_as_python_does():
    if shutil.which("node") is None:
        pytest.skip("no node here: apt-get install nodejs")
    values = [value for value in BRIEF if math.isfinite(value)] + [57641.3, 41.13, 9999.9, 0.05123, 12.5, 1234567.8]
    say = f"console.log(JSON.stringify({json.dumps(values)}.map((v) => [plain(v), brief(v)])))"
    say = script("Words", module=say)
    said = json.loads(subprocess.run(["node", "-e", say], capture_output=True, check=True, timeout=60).stdout)
    assert said == [[plain(value), brief(value)] for value in values]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (params_words(1_557_611_200), "1.56 B"),
        (params_words(124_439_808), "124 M"),
        (params_words(999_900), "1.00 M"),
        (params_words(512), "512"),
        (ms_words(1130), "1,130 ms"),
        (ms_words(1.0312), "1.03 ms"),
        (times(21.06), "21.1 ×"),
        (times(0.98), "0.98 ×"),
        (percent(0.3527), "35 %"),
        (percent(0.0042), "0.42 %"),
        (percent(1.204), "120 %"),
        (signed(-3361.47, 3), "-3,361"),
        (signed(7.8e-6), "+7.8 × 10⁻⁶"),
        (mib(3455.3 * MiB), "3,455.3 MiB"),
        (mib(8), "8 bytes"),
        (amount(3463.2 * MiB), "3,463 MiB"),
        (amount(38 * KiB), "38 KiB"),
        (amounts(76 * KiB, 38 * KiB, 0), ["0.0742 MiB", "0.0371 MiB", "0 MiB"]),
        (amounts(38 * KiB, 500), ["38 KiB", "0.488 KiB"]),
        (amounts(1000, 1), ["1,000 bytes", "1 byte"]),
        (signed_mib(1024.46 * MiB), "+1,024.5"),
        (signed_mib(-8), "-8 bytes"),
        (signed_mib(8), "+8 bytes"),
        (signed_mib(0), "0"),
    ],
)
def test_counts_times_and_shares_have_one_form(words, says):
    assert words == says


FORMATS = re.compile(r":[^{}\"':]*\.\d+[geE]\}|:[geE]\}|\.toExponential\(\)[^.]|\.toPrecision\(\d\)[^)]|\.\d[geE]'")
FOR_CODE = ("words.py",)
ELSEWHERE = ("ops/",)
"""Cases: their names and failures are for developers."""


def test_no_number_that_a_reader_sees_can_have_an_exponent():
    """`.3g` writes 1130 as 1.13e+03: numbers for readers are made by `eet_lab.words`."""
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted((*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.js")))
        if path.name not in FOR_CODE and not path.relative_to(PACKAGE).as_posix().startswith(ELSEWHERE)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FORMATS.search(line) and not line.strip().endswith("# no reader sees it") and "float(f" not in line
    ]
    assert found == []
