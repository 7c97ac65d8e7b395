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
CONTRAST = """(button) => {
  const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
  const over = (papers) => { papers.forEach((paper) => { pen.fillStyle = paper; pen.fillRect(0, 0, 1, 1); });
    return [...pen.getImageData(0, 0, 1, 1).data]; };
  const light = (color) => { const [r, g, b] = color.slice(0, 3).map((each) => each / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const papers = ["white"];
  for (let e = button.parentElement; e; e = e.parentElement) papers.splice(1, 0, getComputedStyle(e).backgroundColor);
  const own = getComputedStyle(button), page = over(papers), part = +own.opacity;
  const seen = (colors) => over([...papers, ...colors]).map((each, i) => part * each + (1 - part) * page[i]);
  const [a, b] = [[own.backgroundColor], [own.backgroundColor, own.color]].map((colors) => light(seen(colors)));
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }"""
"""That of a button's words with what is behind them."""


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
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        lab.command("apputils:change-theme", theme=theme)
        page.wait_for_selector(f"body[data-jp-theme-name='{theme}']", state="attached")
        for name in ("Train", "Resume"):
            button = page.get_by_role("button", name=name, exact=True)
            assert button.is_disabled() and (found := button.evaluate(CONTRAST)) >= 4.5, (theme, name, found)
    lab.command("apputils:change-theme", theme="JupyterLab Light")
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_text("Stopped after ").wait_for(timeout=20_000)
    page.locator("button:enabled", has_text="Resume").wait_for(timeout=20_000)
    page.get_by_text("on a CPU").first.wait_for(state="attached")
    assert page.failures == [] and page.external == []
