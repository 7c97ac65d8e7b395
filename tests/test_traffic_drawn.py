"""Traffic that is drawn, and traffic that was recorded."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.errors import TrafficError
from eet_lab.scheduling.trace import read_trace
from eet_lab.scheduling.traffic import Drawn, Gamma, LogNormal, Traffic, Uniform, make_traffic, read_lengths


def test_the_same_seed_is_the_same_traffic_and_another_rate_only_moves_it():
    first, again, faster, other = (
        make_traffic(500, Gamma(rate, 2.0), LogNormal(40, 0.8), Uniform(1, 9), seed)
        for rate, seed in ((5, 3), (5, 3), (50, 3), (5, 4))
    )
    for name in ("arrival_ms", "lengths", "new_tokens"):
        assert (getattr(first, name) == getattr(again, name)).all()
        assert (getattr(first, name) != getattr(other, name)).any()
    assert (first.lengths == faster.lengths).all() and (first.new_tokens == faster.new_tokens).all()
    assert first.arrival_ms == pytest.approx(10 * faster.arrival_ms)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_their_mean_and_their_spread(cv):
    gaps = np.diff(make_traffic(200_000, Gamma(20, cv), Uniform(1, 1)).arrival_ms)
    assert gaps.mean() == pytest.approx(50, rel=0.05) and (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_lengths_have_their_distributions():
    uniform = make_traffic(100_000, Gamma(1), Uniform(5, 500)).lengths
    assert (uniform.min(), uniform.max()) == (5, 500) and uniform.mean() == pytest.approx(252.5, rel=0.01)
    skewed = make_traffic(100_000, Gamma(1), LogNormal(40, 0.8, 512)).lengths
    assert np.median(skewed) == pytest.approx(40, abs=1) and skewed.min() >= 1 and skewed.max() == 512
    seen = make_traffic(1000, Gamma(1), Drawn((3, 3, 900))).lengths
    assert set(seen.tolist()) == {3, 900} and (seen == 3).mean() == pytest.approx(2 / 3, abs=0.05)


def test_lengths_in_words(tmp_path):
    (tmp_path / "lengths.txt").write_text("7\n9\n\n30\n")
    assert read_lengths("128") == Uniform(128, 128) and read_lengths("5-500") == Uniform(5, 500)
    assert read_lengths("lognormal:40:0.8", 512) == LogNormal(40, 0.8, 512)
    assert read_lengths(str(tmp_path / "lengths.txt")) == Drawn((7, 9, 30), "lengths.txt")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("500-5", "the longest length is 5, but it must be a whole number from 500"),
        ("0", "the shortest length is 0"),
        ("5-", "'5-' is neither a length such as 128, nor a range such as 5-500"),
        ("-5", "'-5' is neither"),
        ("9" * 30, "the shortest length is 9"),
        ("lognormal:40", "write lognormal:MEDIAN:SIGMA"),
        ("lognormal:nan:1", "the median length is nan"),
        ("lognormal:40:-1", "sigma is -1.0"),
        ("nowhere.txt", "nor a file"),
        ("a\0b", "nor a file"),
        (".", "not a regular file"),
    ],
)
def test_words_that_are_no_lengths(words, says):
    with pytest.raises(TrafficError, match=says):
        read_lengths(words)


@pytest.mark.parametrize("text", ["0\n3\n", "5\n-3\n", "5\n3.5\n", "5\nx\n", "5\n99999999999\n", "5\n" + "9" * 5000])
def test_a_file_of_lengths_is_checked(text, tmp_path):
    (tmp_path / "lengths.txt").write_text(text)
    with pytest.raises(TrafficError, match=r"lengths.txt has '.*' as number [12], but each must be a whole"):
        read_lengths(str(tmp_path / "lengths.txt"))
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(TrafficError, match="no lengths to draw from"):
        read_lengths(str(tmp_path / "empty.txt"))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Gamma(0),
        lambda: Gamma(float("nan")),
        lambda: Gamma(-2),
        lambda: Gamma(1, -1),
        lambda: Gamma(1, float("inf")),
        lambda: make_traffic(0, Gamma(1), Uniform(1, 2)),
        lambda: make_traffic(10**9, Gamma(1), Uniform(1, 2)),
        lambda: make_traffic(10, Gamma(1), Uniform(1, 2), seed=-1),
    ],
)
def test_traffic_that_cannot_be(wrong):
    with pytest.raises(TrafficError, match="but it must be"):
        wrong()


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (([], [], []), r"the shapes \(0,\), \(0,\), \(0,\), but .* at least one request"),
        (([0.0], [1, 2], [1]), "of one length"),
        (([1.0, 0.5], [1, 1], [1, 1]), r"arrival_ms\[1\] is 0.5, but .* in order"),
        (([-1.0], [1], [1]), r"arrival_ms\[0\] is -1.0, but .* from 0 on"),
        (([float("nan")], [1], [1]), r"arrival_ms\[0\] is nan, but .* finite"),
        (([0.0], [0], [1]), r"lengths\[0\] is 0, but it must be a whole number from 1 to"),
        (([0.0], [1], [-1]), r"new_tokens\[0\] is -1, but it must be a whole number from 1 to"),
        (([0.0, 1.0], [4.0, 4.5], [1, 1]), r"lengths\[1\] is 4.5, but it must be a whole number"),
        (([0.0, 1.0], [4, 4], [float("nan"), 1]), r"new_tokens\[0\] is nan, but it must be a whole number"),
        (([0.0], [float("inf")], [1]), r"lengths\[0\] is inf, but it must be a whole number"),
        (([0.0], ["4"], [1]), r"lengths is .*'4'.*, but it must be an array of numbers"),
        (([0.0], [True], [1]), "but it must be an array of numbers"),
        (([0.0], [[1, 2], [3]], [1]), "but it must be an array of numbers"),
    ],
)
def test_traffic_of_one_s_own_is_checked(columns, says):
    with pytest.raises(TrafficError, match=says):
        Traffic(*columns)


def test_lists_become_arrays_of_traffic():
    found = Traffic([0, 1.5], [4, 4.0], (1, 2))
    assert found.rate == pytest.approx(1e3 / 1.5) and found.lengths.tolist() == [4, 4] and found.new_tokens.sum() == 3
    assert found.lengths.dtype == found.new_tokens.dtype == np.int64


def trace(tmp_path, text: str | bytes):
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_trace(path)


@pytest.mark.parametrize(
    "text",
    [
        "0,5,2\n0.5,7,1\n0.25,9,3\n",
        "\ufefftime,length,new_tokens\r\n0,5,2\r\n\r\n0.5,7,1\r\n0.25,9,3",
        "new_tokens, Time ,length\n2,0,5\n1,0.5,7\n3,0.25,9\n",
        '{"time": 0, "length": 5, "new_tokens": 2}\n{"length": 7, "time": 0.5}\n\n'
        '{"time": 0.25, "length": 9, "new_tokens": 3}\n',
    ],
)
def test_a_trace_is_read_in_the_order_of_its_times(text, tmp_path):
    found = trace(tmp_path, text)
    assert found.arrival_ms.tolist() == [0, 250, 500]
    assert found.lengths.tolist() == [5, 9, 7] and found.new_tokens.tolist() == [2, 3, 1]
    assert found.name == "trace.csv"


def test_answers_are_of_one_token_where_a_trace_does_not_say(tmp_path):
    assert trace(tmp_path, "0,5\n1,6\n").new_tokens.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no request"),
        (" \n\n", "holds no request"),
        ("time,length\n", "holds no request"),
        ("when,length\n0,5\n", "line 1: the columns are 'when,length', but they must be"),
        ("0,5\n-1,5\n", "line 2: time is -1, but it must be 0 to 1e9 seconds"),
        ("0,5\n\n1,0\n", "line 3: length is 0, but it must be 1 to"),
        ("0,-5\n", "line 1: length is -5"),
        ("0,5.5\n", "line 1: length is 5.5"),
        ("0,5,0\n", "line 1: new_tokens is 0"),
        ("0,1e300\n", "line 1: length is 1e\\+300"),
        ("0,5\nnan,5\n", "line 2: time is nan"),
        ("0,5\ninf,5\n", "line 2: time is inf"),
        ("0,5\n1\n", "line 2: there are 1 fields instead of 2 or 3"),
        ("0,5\n1,x\n", "line 2: there is no number in '1,x'"),
        ("0,5\n1,5,2,9\n", "line 2: there are 4 fields"),
        ("time,length\n0,5,1\n", "line 2: there are 3 fields instead of 2"),
        ('{"time": 0}\n', 'line 1: there is no object with "time", "length"'),
        ('{"time": 0, "length": 5}\n[0, 5]\n', "line 2: there is no object"),
        ('{"time": 0, "length": "5"}\n', "line 1: there is a value that is no number"),
        ('{"time": 0, "length": true}\n', "line 1: there is a value that is no number"),
        ('{"time": 0, "length": 5, "user": 1}\n', "line 1: there is no object"),
        ('{"time": 0, "length": 5\n', "line 1: there is no JSON"),
        ('{"time": 0, "length": NaN}\n', "line 1: length is nan"),
        ('{"time": 0, "length": ' + "9" * 400 + "}\n", "line 1: there is a number or an object that is too large"),
        (
            '{"time": 0, "length": 5}\n{"time": 0, "length": ' + "9" * 5000 + "}\n",
            r"line 2: a number has more than 4,300 digits.* fewer\.$",
        ),
        (b"0,5\n\xff\xfe\n", "not UTF-8 text"),
        ("0,5\n1,\x1b[31m\n", "line 2: there is no number"),
    ],
)
def test_a_damaged_trace_is_told_by_its_line(text, says, tmp_path):
    with pytest.raises(TrafficError, match=says) as told:
        trace(tmp_path, text)
    assert "\x1b" not in str(told.value) and len(str(told.value)) < 400


def test_what_is_no_file_is_told(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, says in (("pipe", "not a regular file"), ("none", "No such file"), ("", "a folder")):
        with pytest.raises(TrafficError, match=says):
            read_trace(tmp_path / name)


def test_a_million_lines_are_quick(tmp_path):
    """About 2 s on a core of 2026."""
    path = tmp_path / "long.csv"
    path.write_text("\n".join(f"{number / 100},{number % 500 + 1},{number % 7 + 1}" for number in range(1_000_000)))
    start = time.thread_time()
    found = read_trace(path)
    assert time.thread_time() - start < 15
    assert len(found) == 1_000_000 and found.rate == pytest.approx(100)


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_raise(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("trace") / "trace"
    path.write_bytes(content)
    with suppress(TrafficError):
        assert len(read_trace(path)) >= 1
