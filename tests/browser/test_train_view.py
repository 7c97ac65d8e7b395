"""The training panel in JupyterLab: lines grow as it trains, and the kernel answers meanwhile."""

from __future__ import annotations

from typing import Any

import nbformat
import pytest

from browser.jupyter_pages import Lab, Server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(150)]

CELL = """
import eet_lab
view = eet_lab.TrainView("demo", steps=500, batch_rows=1, row_tokens=64, folder="run")
view
"""


def test_a_model_learns_in_the_page(lab: Lab, lab_server: Server, page: Any) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab_server.root / "training.ipynb")
    page.set_viewport_size({"width": 1440, "height": 900})
    lab.open("training.ipynb")
    lab.run_all()
    page.get_by_role("button", name="Train", exact=True).click(timeout=60_000)
    page.wait_for_function("() => +document.querySelector('.eet-strip').dataset.points > 4", timeout=40_000)
    assert lab.execute("print(view.busy)") == "True", "the kernel is not blocked"
    assert page.get_by_role("button", name="Resume", exact=True).is_disabled()
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_text("Stopped after ").wait_for(timeout=20_000)
    page.locator("button:enabled", has_text="Resume").wait_for(timeout=20_000)
    page.get_by_text("on a CPU").first.wait_for(state="attached")
    assert page.failures == [] and page.external == []
