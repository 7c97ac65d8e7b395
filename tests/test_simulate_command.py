"""`eet-lab simulate` as it is typed."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import count, pairwise

import pytest
from cost_tables import MADE_UP, TOY_DECODER, TURBO_2060

from eet_lab.cli import main
from eet_lab.errors import Cancelled
from eet_lab.progress import Clock
from eet_lab.scheduling.cost import DecoderCost
from eet_lab.scheduling.cost_files import load_cost, save_cost
from eet_lab.scheduling.policies import POLICIES


@pytest.fixture
def encoder(tmp_path):
    return str(save_cost(TURBO_2060, tmp_path / "encoder.json"))


@pytest.fixture
def decoder(tmp_path):
    return str(save_cost(TOY_DECODER, tmp_path / "decoder.json"))


def lines_of(out: str) -> dict[str, list[str]]:
    """The cells of each policy's line, by its name."""
    cells = [line.split() for line in out.splitlines()]
    return {name: row for row in cells if row and (name := row[0].partition(":")[0]) in POLICIES}


def test_all_policies_on_one_traffic(decoder, capsys):
    words = ["simulate", "--table", decoder, "--requests", "100", "--new-tokens", "1-20"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert set(lines_of(out)) == set(POLICIES)
    assert "TTFT ms p50 / p95 / p99" in out and "Simulated with times of toy, baseline, - on no device" in out
    assert "100 requests, Poisson, " in out
    for rate, is_told in (("0.01", False), ("1000", True)):
        assert main([*words, "--rate", rate, "--policy", "no_batching"]) == 0
        assert ("Busy near 100 % (no_batching): more came" in capsys.readouterr().out) == is_told
    assert main(words) == 0
    assert capsys.readouterr().out == out, "the same seed, the same table"
    assert main(["simulate", "--table", decoder, "--requests", "1", "--new-tokens", "5-20"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 request, Poisson") and "\n1 request came. Simulated" in out and "Busy near" not in out
    assert "answers 5 to 20 tokens (uniform)" in out


def test_progress_within_a_policy_is_told_with_the_time_left(decoder, monkeypatch, capsys):
    """In lines of a percent or more: they may go to a file."""
    seconds = count()
    monkeypatch.setattr(Clock.__init__, "__defaults__", (lambda: next(seconds),))
    words = ["--policy", "continuous_batching", "--policy", "no_batching", "--rate", "1000", "--lengths", "5"]
    assert main(["simulate", "--table", decoder, "--requests", "6000", "--new-tokens", "4", *words]) == 0
    told = [
        re.fullmatch(r"\[(\d+)/6000\] requests by (.*), policy (\d) of 2(, about .* left)?", line)
        for line in capsys.readouterr().err.splitlines()
    ]
    assert all(told)
    for number, title in (("1", "Continuous batching"), ("2", "No batching")):
        mine = [each for each in told if each[3] == number]
        done = [int(each[1]) for each in mine]
        assert {each[2] for each in mine} == {title} and done[0] == 0 and done[-1] > 5000
        assert all(after - before >= 60 for before, after in pairwise(done[1:])) and len(mine) <= 101
        assert not mine[0][4] and mine[-1][4]


def test_an_encoder_has_no_first_token(encoder, capsys):
    words = ["--rate", "120", "--lengths", "5-500", "--requests", "3000", "--limit", "100"]
    assert main(["simulate", "--table", encoder, *words]) == 0
    out = capsys.readouterr().out
    rows = lines_of(out)
    assert set(rows) == {name for name, kind in POLICIES.items() if "encode" in kind.stages}
    assert "TTFT" not in out and "within 100 ms, /s" in out
    good = {name: float(row[-1]) for name, row in rows.items()}
    assert good["naive_padding"] < good["no_batching"] < good["dynamic_program"] < good["token_budget"]


def test_chunked_prompts_beside_whole_ones_at_a_load(capsys):
    """Chunks bring the slowest first tokens earlier, and hold up no answer for long."""
    whole, chunked = "continuous_batching:chunk=2033", "continuous_batching:chunk=256:budget=256"
    traffic = ["--load", "0.7", "--lengths", "1-600", "--new-tokens", "16-64", "--requests", "800"]
    assert main(["simulate", *traffic, "--policy", whole, "--policy", chunked]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("continuous_batching")]
    capacities = [float(row[1]) for row in rows]
    assert capacities[0] == pytest.approx(capacities[1], rel=0.02), "both had served all that came"
    (ttft, tpot), (chunked_ttft, chunked_tpot) = ([float(row[at].replace(",", "")) for at in (10, 15)] for row in rows)
    assert chunked_ttft < 0.97 * ttft and chunked_tpot < 0.97 * tpot


def test_policies_in_words_and_a_trace(encoder, tmp_path, capsys):
    (tmp_path / "trace.csv").write_text("time,length\n0,30\n0.001,40\n0.5,512\n")
    lazy = "dynamic_program:trigger=lazy:wait_ms=3.0:max_rows=4"
    words = ["--trace", str(tmp_path / "trace.csv"), "--policy", lazy, "--policy", "no_batching"]
    assert main(["simulate", "--table", encoder, *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("trace.csv\n") and lazy in out and set(lines_of(out)) == {"dynamic_program", "no_batching"}


def test_default_policies_beyond_the_table_are_left_out_with_their_reason(tmp_path, capsys):
    """Ten tokens a pass are enough for prompts in chunks, and for nobody who reads them whole."""
    table = DecoderCost((0, 1, 9), (1, 4), (16, 256), [[[1.0, 2.0]] * 2] * 3, MADE_UP)
    path = str(save_cost(table, tmp_path / "small.json"))
    words = ["--lengths", "50-100", "--new-tokens", "5", "--requests", "50", "--rate", "9"]
    assert main(["simulate", "--table", path, *words]) == 0
    out = capsys.readouterr().out
    assert set(lines_of(out.split("Simulated with")[0])) == {"continuous_batching"}
    assert "no_batching is left out: A pass has" in out and "was measured up to 9" in out
    assert main(["simulate", "--table", path, *words, "--policy", "no_batching"]) == 2


def test_what_is_asked_for_beyond_the_table_is_an_error(encoder, capsys):
    assert main(["simulate", "--table", encoder, "--lengths", "600", "--rate", "1"]) == 2
    assert "measured up to 512" in capsys.readouterr().err
    words = ["--policy", "naive_padding:max_rows=21", "--rate", "9999", "--lengths", "9"]
    assert main(["simulate", "--table", encoder, *words]) == 2
    assert "21 texts, but the table of toy was measured up to 20" in capsys.readouterr().err


def test_a_model_is_measured_and_its_table_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("eet_lab.serving.profile.profile", lambda *given, **how: TOY_DECODER)
    words = ["--model", "demo", "--device", "cpu", "--save", str(tmp_path / "mine.json"), "--requests", "20"]
    assert main(["simulate", *words]) == 0
    assert "saved to" in capsys.readouterr().out and load_cost(tmp_path / "mine.json") == TOY_DECODER


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--trace", "nowhere.csv"], "nowhere.csv cannot be read"),
        (["--policy", "dynamic"], "Did you mean 'dynamic_program'"),
        (["--policy", "naive_padding:max_rows=0"], "max_rows is 0"),
        (["--lengths", "5-1"], "the longest length is 1"),
        (["--lengths", "9999"], "was measured up to"),
        (["--rate", "0"], "rate is 0.0"),
        (["--recipe", "pre_padding"], "add continuous_batching"),
    ],
)
def test_what_is_refused_is_refused_before_a_model_is_measured(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("eet_lab.serving.profile.profile", lambda *given, **how: pytest.fail("it was measured"))
    saved = tmp_path / "mine.json"
    assert main(["simulate", "--model", "demo", "--device", "cpu", "--save", str(saved), *words]) == 2
    assert says in capsys.readouterr().err and not saved.exists()


@pytest.mark.parametrize("words", [["--trace", "nowhere.csv"], ["--policy", "dynamic"]])
def test_a_trace_and_policies_are_read_before_a_model_is(words, monkeypatch):
    monkeypatch.setattr("eet_lab.models.load", lambda *given, **how: pytest.fail("it was loaded"))
    assert main(["simulate", "--model", "demo", *words]) == 2


def test_a_table_is_saved_before_it_is_used(tmp_path, monkeypatch, capsys):
    """It took a while to measure, and what fails afterwards does not take it away."""

    def stopped(*given, **how):
        raise Cancelled("The simulation was stopped.")

    monkeypatch.setattr("eet_lab.serving.profile.profile", lambda *given, **how: TOY_DECODER)
    monkeypatch.setattr("eet_lab.scheduling.simulator.simulate_traffic", stopped)
    saved = tmp_path / "mine.json"
    words = ["--save", str(saved), "--requests", "20", "--rate", "9", "--policy", "no_batching"]
    assert main(["simulate", "--model", "demo", "--device", "cpu", *words]) != 0
    assert load_cost(saved) == TOY_DECODER and f"saved to {saved}" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_has_a_card(name, capsys):
    assert main(["simulate", "--card", name]) == 0
    out = capsys.readouterr().out
    assert POLICIES[name].title in out and all(f"{name}:{knob}=" in out for knob in POLICIES[name]().knobs)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policy", "dynamic"], "Did you mean 'dynamic_program'"),
        (["--policy", "naive_padding:max_rows=0"], "max_rows is 0"),
        (["--card", "nobody"], "There is no policy 'nobody'"),
        (["--table", "h200"], "There is no example 'h200'; there are bert-base-cpu, demo-cpu"),
        (["--table", "no/where.json"], "cannot be read"),
        (["--trace", "nowhere.csv"], "nowhere.csv cannot be read"),
        (["--trace", "x.csv", "--rate", "4"], "--rate draws requests, but --trace gives them"),
        (["--trace", "x.csv", "--new-tokens", "4"], "--new-tokens draws"),
        (["--load", "nan"], "--load is nan"),
        (["--load", "0.7", "--rate", "4"], "--load says how many requests come"),
        (["--rate", "0"], "rate is 0.0"),
        (["--rate", "nan"], "rate is nan"),
        (["--cv", "-1"], "cv is -1.0"),
        (["--requests", "0"], "requests is 0"),
        (["--requests", "999999999999"], "requests is 999999999999"),
        (["--seed", "-1"], "seed is -1"),
        (["--lengths", "5-1"], "the longest length is 1"),
        (["--limit", "nan"], "--limit is nan"),
        (["--recipe", "all"], "--recipe is for measuring a table. Add --model"),
        (["--model", "demo", "--table", "demo-cpu"], "Leave one of them out"),
        (["--save", "no/where.json"], "no/where.json cannot be written"),
        (["--table", "bert-base-cpu", "--new-tokens", "50"], "--new-tokens is for answers, but the table is of an enc"),
        (["--table", "bert-base-cpu", "--policy", "continuous_batching"], "not for an encoder"),
    ],
)
def test_bad_input_is_one_line_on_stderr(words, says, capsys):
    assert main(["simulate", *words]) == 2
    streams = capsys.readouterr()
    assert says in streams.err and streams.err.count("\n") == 1 and streams.out == ""


def test_it_needs_no_torch(decoder):
    code = f"""
import sys
from eet_lab.cli import main
from eet_lab.progress import Clock
main(["simulate", "--table", {decoder!r}, "--requests", "20"])
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
