"""The serving view in JupyterLab: a film plays by itself, results stay, and a cell that is run again closes the old."""

from __future__ import annotations

import re
from typing import Any

import nbformat
import pytest
from playwright.sync_api import expect

from browser.jupyter_pages import Lab, Server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(150)]

CELL = """
import eet_lab
view = eet_lab.ServingView("bert-base-cpu", lengths="5-250", requests=80)
view
"""
INKED = """() => [...document.querySelectorAll('.eet-film-canvas')].map((canvas) => {
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height * 0.5).data;
  let blue = 0;
  for (let i = 0; i < data.length; i += 4) blue += data[i + 2] > 200 && data[i] < 100 && data[i + 3] > 200;
  return blue;
})"""


def test_a_film_of_two_policies_plays_in_the_page(lab: Lab, lab_server: Server, page: Any) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab_server.root / "serving.ipynb")
    page.set_viewport_size({"width": 1440, "height": 1800})
    lab.open("serving.ipynb")
    lab.run_all()
    simulate = page.get_by_role("button", name="Simulate", exact=True)
    simulate.wait_for(timeout=60_000)
    assert page.locator(".eet-film-lane").count() == 0
    simulate.click()
    page.locator(".eet-film[data-playing=true]").wait_for(timeout=20_000)
    expect(page.locator(".eet-film-name")).to_have_text(["Naive padding", "Dynamic program"])
    page.get_by_role("button", name="100 ×", exact=True).click()
    page.locator(".eet-film[data-playing=false]").wait_for(timeout=30_000)
    stats = page.locator(".eet-film-stats").all_text_contents()
    assert all(told.startswith("0 wait · 80 of 80 done · p50 ") for told in stats), stats
    page.wait_for_function(f"() => Math.min(...({INKED})()) > 500")  # boxes are drawn in both lanes
    tokens = page.evaluate(INKED)
    page.get_by_role("button", name="Rows", exact=True).click()
    page.wait_for_function(f"(tokens) => ({INKED})().join() !== tokens.join()", arg=tokens)
    expect(page.locator(".js-plotly-plot")).to_have_count(1, timeout=20_000)

    # What it says is what was simulated.
    p50 = lab.execute("print([round(run.percentiles['e2e_ms']['p50']) for run in view.results.values()])")
    shown = [int(told.partition("p50 ")[2].partition(" ms")[0].replace(",", "")) for told in stats]
    assert p50 == str(shown)

    # Pause, and scrub.
    page.get_by_role("button", name="1 ×", exact=True).click()  # at 100 × it may be over before it is paused
    page.get_by_role("button", name="From the start", exact=True).click()
    page.get_by_role("button", name="Pause", exact=True).click()
    assert float(page.locator(".eet-film").get_attribute("data-now")) < 80_000
    expect(page.locator(".eet-player-at")).to_have_text(re.compile(r"^[\d.]+ s of [\d.]+ s$"))  # in one unit
    slider = page.get_by_role("slider", name="Time in the traffic")
    slider.fill("500")
    expect(page.locator(".eet-film-stats").first).to_contain_text("of 80 done")

    # In larger type its buttons, fields and tables grow with the words, none of which is cut.
    page.add_style_tag(content=".eet-large { --eet-scale: 1.35; }")
    parts = page.locator(".jupyter-button, .eet-help, .widget-text input, .eet-result td").filter(visible=True)
    sizes = parts.evaluate_all("all => all.map((e) => parseFloat(getComputedStyle(e).fontSize))")
    page.locator(".eet-bench").first.evaluate("(bench) => bench.classList.add('eet-large')")
    larger = parts.evaluate_all("all => all.map((e) => parseFloat(getComputedStyle(e).fontSize))")
    assert len(sizes) > 10 and all(now > 1.25 * was for was, now in zip(sizes, larger, strict=True))
    cut = "all => all.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.innerText)"
    assert page.locator(".jupyter-button").filter(visible=True).evaluate_all(cut) == []
    page.set_viewport_size({"width": 500, "height": 1800})  # where what is too wide scrolls in its own place
    beyond = "document.querySelector('.eet-result').getBoundingClientRect().right <= innerWidth"
    page.wait_for_function(f"() => innerWidth === 500 && {beyond}", timeout=10_000)
    page.set_viewport_size({"width": 1440, "height": 1800})
    page.locator(".eet-bench").first.evaluate("(bench) => bench.classList.remove('eet-large')")

    # The cell is run again: one view, and the threads of one.
    lab.run_all()
    page.wait_for_function("() => document.querySelectorAll('.eet-film-lane').length === 0", timeout=20_000)
    names = "print([t.name for t in __import__('threading').enumerate()].count('eet-ui'))"
    assert lab.execute(names) == "1"
    page.get_by_role("button", name="Simulate", exact=True).click()
    page.locator(".eet-film[data-playing=true]").wait_for(timeout=20_000)
    page.get_by_role("button", name="Stop", exact=True).click()
    page.wait_for_function("() => document.querySelectorAll('.eet-film-lane').length === 0", timeout=20_000)
    assert page.failures == [] and page.external == []
