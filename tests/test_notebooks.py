"""Every notebook runs from top to bottom, without a reader and without a network, and stays small when saved."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from warm_kernels import ROUNDS

from eet_lab.technique import known, listed

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
PLOTLY = "application/vnd.plotly.v1+json"
MOST_BYTES = 300_000


@pytest.fixture
def reader_away(monkeypatch, tmp_path, kernels):
    """Predictions answer themselves and exercises fall back to their solutions; proxies that lead nowhere.

    Times are taken twice, which tells no effect from noise: what a notebook says of one is tested with its lesson.
    """
    for name, value in kernels.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(ROUNDS, "2")
    monkeypatch.setenv("EET_LAB_FAST", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")


@pytest.mark.notebook
@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, reader_away):
    from nbmake.nb_run import NotebookRun  # 2 s, which other workers need not spend

    result = NotebookRun(path, default_timeout=100).execute()
    assert result.error is None, result.error.trace
    outputs = [output for cell in result.nb.cells for output in cell.get("outputs", [])]
    assert outputs, "a notebook that shows nothing teaches nothing"
    noise = [output["text"] for output in outputs if output.get("name") == "stderr"]
    assert not noise, "warnings land in front of the reader"
    assert len(json.dumps([output.get("data", {}) for output in outputs])) < MOST_BYTES
    if path.stem != "workbench":
        assert any(PLOTLY in output.get("data", {}) for output in outputs), "its figures show without a kernel"


def test_every_lesson_is_there():
    names = {path.stem for path in NOTEBOOKS}
    assert {"00_start_here", "01_pre_padding", "02_mask_removal", "03_memory_reuse", "04_decode_speed"} <= names
    assert {"05_variable_length_memory", "06_continuous_batching", "07_variable_length_serving"} <= names
    assert "08_fast_training" in names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    text = "".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    targets = [part.split(")")[0].partition("#")[0] for part in text.split("](")[1:]]
    for target in filter(None, targets):
        assert "://" in target or (path.parent / target).exists(), f"{path.name} links to {target}"


def cells(stem: str, kind: str) -> list[str]:
    path = NOTEBOOKS[0].with_name(f"{stem}.ipynb")
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def test_the_glossary_has_a_meaning_for_each_word():
    title, blank, head, rule, *lines = cells("00_start_here", "markdown")[-1].split("\n")
    assert [title, blank, head, rule] == ["## Glossary", "", "| word | meaning |", "|---|---|"]
    rows = [re.fullmatch(r"\| ([^|]+) \| ([^|]+) \|", line) for line in lines]
    assert len(lines) >= 47 and all(rows), "two cells in each line"
    words = [word for row in rows for word in row[1].split(", ")]
    assert len(set(words)) == len(words), "one meaning for each word"
    assert {"pad", "pair", "cannot tell apart"} <= set(words), "words that stand in results"


LESSONS = [path.stem for path in NOTEBOOKS if path.stem[:2] in ("01", "02", "03", "04", "05", "06", "07", "08")]


@pytest.mark.parametrize("stem", LESSONS)
def test_a_lesson_has_what_each_has(stem):
    text, code = "\n".join(cells(stem, "markdown")), "\n".join(cells(stem, "code"))
    assert "(00_start_here.ipynb#Glossary)" in text and "(workbench.ipynb)" in text
    assert "eet_lab.Workbench(recipe=" in cells(stem, "code")[-1], "last: its threads would disturb what is measured"
    assert stem == "01_pre_padding" or stem >= "06" or "**Ladder**" in text, "Compare tells nothing of one of several"
    assert code.count(".check(") in (2, 3) and text.count("## Exercise") == code.count(".check(")


@pytest.mark.parametrize("name", listed())
def test_each_technique_has_a_lesson_that_names_it(name):
    lesson = known(name).lesson
    assert lesson in LESSONS
    assert name in "\n".join([*cells(lesson, "markdown"), *cells(lesson, "code")])
