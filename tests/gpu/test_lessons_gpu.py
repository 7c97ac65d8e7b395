"""Lessons on a GPU, cell by cell as a reader runs them."""

from __future__ import annotations

import json
import time

import pytest

from eet_lab.paths import notebooks_dir

pytestmark = pytest.mark.gpu


def seconds_of_cells(name: str) -> dict[str, float]:
    """How long each cell of code took; an error in one of them is raised."""
    from IPython.core.interactiveshell import InteractiveShell

    shell, took = InteractiveShell(), dict[str, float]()
    for cell in json.loads((notebooks_dir() / f"{name}.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            begin = time.perf_counter()
            shell.run_cell("".join(cell["source"])).raise_error()
            took[cell["source"][-1]] = time.perf_counter() - begin
    return took


def test_the_lesson_trains_a_model_in_under_a_minute(capsys):
    took = seconds_of_cells("08_fast_training")
    with capsys.disabled():
        print("\n" + "\n".join(f"{seconds:6.1f} s  {words}" for words, seconds in took.items()))
    assert took["trained = lesson.train()"] < 60
