"""Hostile result files: each is refused with its place, or what it holds can be shown in every way there is."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bench_results import comparison, damage, ladder, run

from eet_lab import codec
from eet_lab.bench import load_result, results
from eet_lab.bench.paired import Change
from eet_lab.bench.results import read_result
from eet_lab.cli import main
from eet_lab.errors import ResultError
from eet_lab.figures.results import plot
from eet_lab.workbench import export
from eet_lab.workbench.history import SHIPPED
from eet_lab.workbench.opened import Opened, as_ids
from eet_lab.workbench.rows import KeptRun, Summary
from eet_lab.workbench.views import answer

Path_ = tuple[str | int, ...]

# As JSON, since Python's own numbers cannot say all of them.
HOSTILE = {
    "none": "null",
    "zero": "0",
    "negative": "-1",
    "tiny": "5e-324",
    "endless": "1e999",
    "long": "1" + "0" * 400,
    "longest": "9" * 5000,
    "not a number": "NaN",
    "true": "true",
    "escape": '"\\u001b]0;owned\\u0007\\u202e\\u009b31m"',
    "page": '"<img src=x onerror=alert(1)>"',
    "half": '"\\ud800"',
    "list": "[]",
    "object": "{}",
    "nested": "[" * 200 + "]" * 200,
}
MARK = "@@hostile@@"


def leaves(value: Any, place: Path_ = ()) -> Iterator[Path_]:
    """The places of all values, containers included; of a long list its ends."""
    if place:
        yield place
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
        items = [*items[:1], *items[1:][-1:]]
    for key, item in items:
        yield from leaves(item, (*place, key))


def mutated(content: Any, places: Iterable[Path_], word: str) -> bytes:
    content = copy.copy(content)
    for place in places:
        inner = content
        for key in place[:-1]:
            inner[key] = inner = copy.copy(inner[key])
        inner[place[-1]] = MARK
    return json.dumps(content).replace(f'"{MARK}"', word).encode()


def accepted(content: Any, places: Iterable[Path_], word: str) -> Any:
    """The result; None where it was refused, in words that can be printed."""
    try:
        return read_result(mutated(content, places, word), "mine.json")[0]
    except ResultError as error:
        said = str(error)
    assert said.startswith("mine.json ") and said.isprintable() and len(said) < 600
    return None


def tell(result: Any) -> None:
    """In words: as tables and pages, as a row of the history, opened, and as a race."""
    text = result.to_text()
    assert not any(c in text for c in "\x1b\x07\u202e\x9b")
    text.encode()
    for page in (result._repr_html_(), export.overview(result), export._texts(result)):
        assert "<img" not in page
        page.encode()
    result.to_frame().to_csv()
    opened = Opened.of(KeptRun(id="x", **vars(Summary.of(result))), result, {})
    words = [answer.words(result, tab["name"]) for tab in answer.tabs(result, True, True)]
    told = answer.tiles(result), answer.headline(result), answer.about(result), answer.table(result), words
    lanes = opened.lanes() if opened.can_race else ()
    setup = opened.setup
    state = setup.bar, opened.banner, setup.state.generation, str(setup.state.recipe()), setup.lengths
    json.dumps((told, lanes, state), allow_nan=False).encode()
    as_ids(result)


def show(result: Any) -> None:
    """In every way there is."""
    tell(result)
    figures = plot(result, "all")
    for fig in figures.values():  # type: ignore[union-attr]
        assert json.loads(fig.to_json())["layout"], "it is drawn"


PAIRED = {"ttft_ms": Change(100.0, 50.0, 0.4, 0.6, 8, middle=0.5), "tokens_per_s": Change(1.0, 2.0, 2.0, 2.0, 0, True)}
BASES = [comparison(watched=None, changes=PAIRED), ladder(), run()]


@pytest.mark.parametrize("result", BASES, ids=["compare", "ladder", "run"])
@pytest.mark.parametrize("name", HOSTILE)
def test_every_value_of_a_file_may_be_hostile(name, result, tmp_path):
    """One by one; figures, which take long, of all at once that may be so together."""
    content, word = json.loads(result.save(tmp_path / "r.json").read_text()), HOSTILE[name]
    together: list[Path_] = []
    for place in leaves(content):
        if (found := accepted(content, [place], word)) is None:
            continue
        tell(found)
        if any(place[: len(other)] == other for other in together):
            continue
        if accepted(content, [*together, place], word):
            together.append(place)
        else:
            show(found)
    show(accepted(content, together, word))


def test_what_was_stopped_at_once_can_be_shown(tmp_path):
    nothing = replace(
        run().measurement, step_ms=(), step_tokens=(), tokens=((), ()), texts=("", ""), ttft_ms=None, total_ms=None,
        tokens_per_s=None,
    )  # fmt: skip
    for number, stopped in enumerate(
        (
            run(measurement=nothing, stopped=True),
            replace(ladder(), rungs=(), left_out=(), partial=True),
            replace(ladder(), rungs=ladder().rungs[:1], left_out=(), partial=True),
        )
    ):
        found = load_result(stopped.save(tmp_path / f"{number}.json"))
        assert found == stopped
        show(found)


@pytest.mark.parametrize("stem", [path.stem for path in sorted(SHIPPED.glob("*.json"))])
def test_a_recording_shows(stem):
    result = load_result(SHIPPED / f"{stem}.json")
    show(result)
    assert plot(result, "all"), "there are figures"


REAL = json.loads((SHIPPED / "h200-compare-demo-int8.json").read_text())


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(leaves(REAL), key=str)), st.sampled_from(sorted(HOSTILE)))
def test_a_real_file_with_a_hostile_value(place, name):
    if found := accepted(REAL, [place], HOSTILE[name]):
        show(found)


@pytest.mark.parametrize(
    ("place", "word", "says"),
    [
        ("baseline.ttft_ms.p50", "1e999", "result.baseline.ttft_ms.p50 is 1e999, but it must be float"),
        ("baseline.prepare_s", "-1", "result.baseline.prepare_s is -1, but it must be float >= 0.0"),
        ("baseline.memory.peak", "1" + "0" * 400, "result.baseline.memory.peak is 10000"),
        ("baseline.memory.kv", "-5", "result.baseline.memory.kv is -5, but it must be int >= 0"),
        ("baseline.total_ms.p20", "0", "result.baseline.total_ms.p20 is 0.0, but it must be at least 1e-06"),
        ("baseline.total_ms", "null", "result.baseline.total_ms is null, but what was measured has a time end to end"),
        ("baseline.total_ms.p20", "1e6", "but p20, p50 and p80 must rise"),
        ("baseline.step_ms", "[]", "result.baseline has 0 step_ms, but 2 step_tokens"),
        ("baseline.step_ms", "[0, 0]", "at least one step must take longer than 0 ms"),
        ("baseline.step_ms", "[1, -1]", r"result.baseline.step_ms\[1\] is -1, but it must be float >= 0"),
        ("baseline.step_ms", "[1, 5e-324]", r"step_ms\[1\] is 5e-324, but it must be 0 or at least 1e-06"),
        ("baseline.step_tokens", "[1, 1]", "step_tokens sums up to 2, but there are 3 tokens"),
        ("baseline.cost.ceiling_gb_per_s", "null", "one of floor_ms and ceiling_gb_per_s"),
        ("parity.verdict", '"maybe"', "is 'maybe', but it must be one of identical, within rounding, lossy, diff"),
        ("environment.device_kind", '"tpu"', "device_kind is 'tpu', but it must be one of cpu, cuda"),
        ("environment.date", '"soon"', "result.environment.date is 'soon', but it must be an ISO 8601 date"),
        ("environment.device", '"\\ud800"', "result.environment.device holds half of a surrogate pair"),
        ("settings.stop", "5", "settings.stop is 5, but it must be a list of token ids"),
        ("settings.seed", "NaN", "result.settings.seed is NaN"),
        ("prompts", '["x"]', "prompts has 1 texts, but there are 2 prompts"),
        ("workload", '"' + "x" * 10_001 + '"', "result.workload is 'xxxx.*of length <= 10000"),
        ("mood", '"good"', "is of a later version: result has 'mood', which this version does not know. Open it with"),
        ("baseline.cost.mood", "1", "result.baseline.cost has 'mood'"),
        ("baseline.memory.\x1b", '"x"', r"result.baseline.memory.\\x1b is 'x'"),
    ],
)
def test_an_error_names_place_value_and_limit(place, word, says, tmp_path):
    content = json.loads(comparison(settings={"seed": 1, "stop": []}).save(tmp_path / "r.json").read_text())
    with pytest.raises(ResultError, match=says):
        read_result(mutated(content, [("result", *place.split("."))], word), "mine.json")


@pytest.mark.parametrize("number", [0, 1])
def test_a_ladder_whose_bytes_do_not_add_up_is_refused(number, tmp_path):
    path = ladder().save(tmp_path / "r.json")
    damage(path, lambda c: c["result"]["rungs"][number].update(delta_bytes=7))
    with pytest.raises(ResultError, match=rf"rungs\[{number}\].delta_bytes is 7, but .* by {-5 * number}"):
        load_result(path)


def test_deep_nesting_and_what_is_cut_short_are_no_results(tmp_path):
    whole = comparison().save(tmp_path / "r.json").read_bytes()
    for content, says in (
        (b"[" * 100_000, "nested too deeply"),
        (b'{"eet_lab_result": 1, "kind": ["run"]}', r"holds a \['run'\]|holds a \[\"run\"\]"),
        (b'{"eet_lab_result": true, "kind": "run"}', "has format true"),
        (b"\xff\xfe{", "not UTF-8"),
        (whole[: len(whole) // 2], "is not JSON"),
    ):
        with pytest.raises(ResultError, match=says):
            read_result(content, "mine.json")


def test_a_file_of_hundreds_of_megabytes_is_not_read(tmp_path):
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(900 * 2**20)
    begun = time.monotonic()
    with pytest.raises(ResultError, match=r"huge.json has 900 MiB, but a saved result has at most 32 MiB"):
        load_result(path)
    assert time.monotonic() - begun < 1


def test_pipes_devices_and_folders_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "endless", Path("/dev/zero"), tmp_path):
        with pytest.raises(ResultError, match="not a regular file"):
            load_result(path)
    link = tmp_path / "link.json"
    link.symlink_to(comparison().save(tmp_path / "r.json"))
    assert load_result(link) == comparison()
    with pytest.raises(ResultError, match="is a link"):
        codec.content_of(link, follow_links=False)


ESCAPE = "\x1b]0;owned\x07\x1b[31m\x9b31m\u202eevil"


@pytest.mark.parametrize("result", [comparison(), ladder(), run()], ids=["compare", "ladder", "run"])
def test_no_escape_sequence_of_a_file_reaches_the_terminal(result, tmp_path, capfd):
    path = result.save(tmp_path / "r.json")
    content = json.loads(path.read_text())
    for place in leaves(content["result"]):
        inner = content["result"]
        for key in place[:-1]:
            inner = inner[key]
        if isinstance(inner[place[-1]], str) and place[-1] not in ("date", "device_kind", "verdict", "memory_source"):
            inner[place[-1]] = f"{ESCAPE}{inner[place[-1]]}\nb"
    path.write_text(json.dumps(content))
    assert main(["compare", "--load", str(path)]) == 0
    printed = capfd.readouterr().out
    assert r"\x1b[31m\x9b31m\u202eevil" in printed
    assert all(c == "\n" or c.isprintable() for c in printed)


def test_no_escape_sequence_of_an_error_reaches_the_terminal(tmp_path, capfd):
    path = comparison().save(tmp_path / f"r{ESCAPE}.json")
    for change in (
        lambda c: c["result"].update({ESCAPE: 1}),
        lambda c: c["result"]["parity"].update(verdict=ESCAPE),
        lambda c: c.update(kind=ESCAPE),
        lambda c: c.update(eet_lab_result=ESCAPE),
    ):
        damage(path, change)
        assert main(["compare", "--load", str(path)]) == 2
        assert all(c == "\n" or c.isprintable() for c in capfd.readouterr().err)


RECORDED = Path(results.__file__).parents[1] / "recorded"
AT_ONCE = """
import os, sys, threading
from eet_lab.bench.results import load_result
sys.setswitchinterval(1e-6)
for _ in range(3):
    if child := os.fork():
        if status := os.waitpid(child, 0)[1]:
            sys.exit(f"ended with {os.waitstatus_to_exitcode(status)}")
        continue
    together = threading.Barrier(6)
    threads = [threading.Thread(target=lambda: (together.wait(), load_result(sys.argv[1]))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)
"""
"""Three processes one after the other, forks of one that has read no result: to import takes longer than to read."""


def test_threads_that_read_their_first_result_together_do_not_end_the_process():
    done = subprocess.run([sys.executable, "-c", AT_ONCE, RECORDED / "h200-compare-demo.json"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()  # without a lock two of four died
