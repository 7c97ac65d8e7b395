"""Notebooks are committed clean and thin: text, short cells, and no results."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
MAX_LINES = 12


def committed(path: Path) -> str:
    """A notebook as git has it: a reader who saved theirs with outputs has broken nothing."""
    shown = subprocess.run(
        ["git", "show", f":notebooks/{path.name}"], cwd=path.parent, capture_output=True, check=False
    )
    return shown.stdout.decode() if shown.returncode == 0 else path.read_text(encoding="utf-8")


def faults(notebook: dict) -> list[str]:
    """What keeps a notebook from being committed."""
    import nbformat  # it takes 2 s

    found = []
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        found.append(f"not a valid notebook: {error.message}")
    if "widgets" in notebook["metadata"]:
        found.append("widget state is saved in it")
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        found.append("its kernel is not python3")
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        if cell["outputs"]:
            found.append(f"cell {number} has outputs")
        if cell["execution_count"] is not None:
            found.append(f"cell {number} has an execution count")
        if "execution" in cell["metadata"]:
            found.append(f"cell {number} has execution times")
        if (num_lines := len("".join(cell["source"]).strip().splitlines())) > MAX_LINES:
            found.append(f"cell {number} has {num_lines} lines, at most {MAX_LINES}: move code into the package")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_clean(path):
    text = committed(path)
    assert len(text) < 100_000
    assert not faults(json.loads(text))


def code_cell(**changes) -> dict:
    cell = dict(cell_type="code", id="a", metadata={}, source=["1 + 1"], outputs=[], execution_count=None)
    return cell | changes


def book(cell: dict, **metadata) -> dict:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    return dict(cells=[cell], metadata=kernel | metadata, nbformat=4, nbformat_minor=5)


OUTPUT = dict(output_type="stream", name="stdout", text=["2"])


@pytest.mark.parametrize(
    ("notebook", "fault"),
    [
        (book(code_cell()), None),
        (book(code_cell(source=["x\n"] * 12)), None),
        (book(code_cell(source=["x\n"] * 13)), "13 lines"),
        (book(code_cell(outputs=[OUTPUT])), "outputs"),
        (book(code_cell(execution_count=3)), "execution count"),
        (book(code_cell(metadata={"execution": {}})), "execution times"),
        (book(code_cell(), widgets={"application/vnd.jupyter.widget-state+json": {"state": {}}}), "widget state"),
        (book(code_cell(), kernelspec={"name": "venv", "display_name": "venv"}), "kernel"),
        (book(code_cell(nonsense=1)), "valid notebook"),
    ],
)
def test_the_check_itself(notebook, fault):
    found = faults(notebook)
    assert (not found) if fault is None else any(fault in line for line in found)
