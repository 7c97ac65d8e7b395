"""A lesson in JupyterLab, as a reader goes through it: nothing is revealed before the prediction."""

from __future__ import annotations

import json
import shutil
from typing import Any

import nbformat
import pytest
from playwright.sync_api import expect

from browser.jupyter_pages import NOTEBOOKS, Lab, Server

MAX_SAVED_BYTES = 300_000
"""Of a lesson as JupyterLab saves it by itself, without the state of its widgets; and of one saved with that, less the
pictures that plotly's extension puts beside each figure of a cell, and which the lab cannot keep out."""

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]  # a slow machine has other tests, too


def test_a_prediction_fills_in_the_verdict(lab: Lab, lab_server: Server, page: Any) -> None:
    shutil.copy(NOTEBOOKS / "01_pre_padding.ipynb", lab_server.root)
    page.set_viewport_size({"width": 1250, "height": 9000})  # JupyterLab draws only what would be seen
    lab.open("01_pre_padding.ipynb")
    lab.few_rounds()
    lab.run_all()
    page.locator(".eet-do-run:not([aria-disabled='true'])").wait_for(timeout=120_000)  # the last cell's workbench
    page.get_by_text("Predict first (above)").nth(1).wait_for(state="attached")
    for told in ("if every step took the same time", "× sooner"):
        assert page.get_by_text(told).count() == 0
    page.locator(".eet-prediction input").first.fill("30")
    page.locator(".eet-prediction input").first.press("Tab")
    page.get_by_role("button", name="Reveal", exact=True).click()
    page.get_by_text("if every step took the same time").first.wait_for(timeout=60_000)
    expect(page.get_by_text("Predict first (above)")).to_have_count(0, timeout=60_000)
    page.get_by_text("× sooner").first.wait_for()
    expect(page.get_by_text("Your prediction: 30 times sooner")).to_have_count(1)
    expect(page.get_by_text("Not answered yet")).to_have_count(3)
    page.locator(".js-plotly-plot").nth(5).wait_for(state="attached")
    notebook = lab.save()
    assert "figures.live.StripChart" in str(notebook["metadata"]["widgets"]), "the state of the widgets is there"
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    pictures = [output.get("data", {}).get("image/png", "") for output in outputs]
    saved_bytes = (lab_server.root / "01_pre_padding.ipynb").stat().st_size
    state = json.dumps(notebook["metadata"]["widgets"], indent=1, ensure_ascii=False)
    sizes = saved_bytes - len(state.encode()), saved_bytes - sum(map(len, pictures))
    assert max(sizes) < MAX_SAVED_BYTES, f"{sizes} without widgets' state, and without pictures"
    assert page.failures == [] and page.external == []


def test_a_film_plays_in_the_page(lab: Lab, lab_server: Server, page: Any) -> None:
    lesson = nbformat.read(NOTEBOOKS / "05_variable_length_memory.ipynb", 4)
    number = next(i for i, cell in enumerate(lesson.cells) if cell.source == "lesson.play()")
    lesson.cells = lesson.cells[: number + 1]  # what follows takes half a minute, and its own tests
    nbformat.write(lesson, lab_server.root / "05_variable_length_memory.ipynb")
    page.set_viewport_size({"width": 1250, "height": 9000})
    lab.open("05_variable_length_memory.ipynb")
    lab.run_all()
    film = page.locator(".js-plotly-plot", has_text="request 1, ").first
    film.get_by_text("▶ play").wait_for(timeout=90_000)
    told = film.locator(".slider-label").first
    assert "request 1, " in told.text_content()
    boxes = film.locator(".barlayer path").first.get_attribute("d")
    film.get_by_text("▶ play").click()
    page.wait_for_function(
        "() => Number(/request (\\d+), /.exec(document.querySelector('.slider-label').textContent)[1]) >= 4",
        timeout=20_000,  # a busy page may pass over any one of them
    )
    film.get_by_text("pause").click()
    page.wait_for_timeout(600)
    paused = told.text_content()
    assert film.locator(".barlayer path").first.get_attribute("d") != boxes, "the tensors have moved"
    page.wait_for_timeout(1200)
    assert told.text_content() == paused
    # plotly.js rejects the promise of an animation that is paused, giving no reason.
    assert set(page.failures) <= {"undefined"} and page.external == []
