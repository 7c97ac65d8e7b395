"""`eet-lab lab` as a person meets it: the workbench is there when the page is, and after a reload that nobody saved."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest
from playwright.sync_api import expect
from warm_kernels import ROUNDS

pytestmark = [pytest.mark.browser, pytest.mark.timeout(150)]

BENCH = ".eet-bar, .eet-bench"


@pytest.fixture
def started(tmp_path: Path, kernels: dict[str, str]) -> Iterator[Any]:
    """Starts `eet-lab lab` with these words, in a home of its own; the printed address.

    The app's kernels are forks, which time recipes twice; the notebook's begins with nothing imported, as with users.
    """
    labs = []

    def start(*words: str) -> str:
        folders = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
        env = {**os.environ, **folders, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", ROUNDS: "2"}
        env |= kernels if "--app" in words else {}
        command = [sys.executable, "-m", "eet_lab", "lab", "--no-browser", "--dir", str(tmp_path / "nb"), *words]
        with open(tmp_path / "stderr", "w") as told:
            labs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=told, text=True))
        for line in labs[0].stdout:
            if url := re.search(r"http://127\S+", line):
                return url[0]
        raise AssertionError(f"no address, exit code {labs[0].wait()}")

    start.labs = labs  # type: ignore[attr-defined]
    yield start
    for lab in labs:
        lab.send_signal(signal.SIGTERM)
        lab.communicate(timeout=30)


def button(page: Any, name: str) -> Any:
    """The bar's: the runs have a “Compare ticked” of their own, which may be drawn first."""
    return page.locator(".eet-bar").get_by_role("button", name=name, exact=True)


def until_free(page: Any, name: str, seconds: float) -> None:
    expect(button(page, name)).to_be_enabled(timeout=seconds * 1000)


def test_the_workbench_is_there_without_a_key_and_after_a_reload_in_mid_run(
    started: Any, page: Any, tmp_path: Path
) -> None:
    page.goto(started())
    page.locator(BENCH).first.wait_for(timeout=60_000)
    until_free(page, "Compare", 20)
    assert (tmp_path / "stderr").read_text() == "", "a kernel that warns would stand before the address"
    assert page.locator(".jp-CodeCell .jp-OutputArea-output:visible").count() == 1
    assert not page.get_by_text("eet_lab.Workbench()").is_visible(), "the code is folded"

    # Nobody has clicked yet, so that the focus is wherever JupyterLab put it: X would cut the cell, R make it raw text.
    page.keyboard.press("x")
    page.keyboard.press("c")
    until_free(page, "Stop", 10)
    assert page.locator(".jp-CodeCell").count() == 1
    page.reload()
    page.locator(BENCH).first.wait_for(timeout=60_000)
    until_free(page, "Stop", 10)
    button(page, "Stop").click()
    until_free(page, "Compare", 20)

    # After a restart of the kernel the cell is run by hand, as the text below it says.
    page.locator('[data-command="notebook:restart-kernel"], [title^="Restart the kernel"]').first.click()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    page.get_by_text("The kernel was restarted. Run the cell again").wait_for(timeout=30_000)

    # A page that is reloaded then has no widget to show, and says so in its own words.
    page.reload()
    page.get_by_text("Run its cell again").wait_for(timeout=60_000)
    assert not page.get_by_text("model not found").is_visible()
    page.evaluate("bench => document.querySelectorAll(bench).forEach(each => each.dataset.old = 1)", BENCH)
    page.locator(".jp-CodeCell .jp-Placeholder").first.click()
    page.keyboard.press("Shift+Enter")
    page.locator(", ".join(f"{each}:not([data-old])" for each in BENCH.split(", "))).first.wait_for(timeout=60_000)
    until_free(page, "Compare", 30)

    # Nobody has saved since, so that the notebook comes back with the page of the kernel before.
    button(page, "Compare").click()
    until_free(page, "Stop", 10)
    page.reload()
    page.locator(BENCH).first.wait_for(timeout=60_000)
    until_free(page, "Stop", 10)
    assert page.locator(".eet-bar").count() == 1
    assert not page.get_by_text("Run its cell again").is_visible()
    assert page.failures == []
    assert page.external == []


ITS_END_IS_SEEN = """(title) => {
  const card = document.querySelector('.eet-tech-card.eet-open');
  if (card?.querySelector('h3').textContent !== title) return false; // the one before, until the kernel has answered
  const beyond = card.getBoundingClientRect().bottom - innerHeight;
  if (beyond > 0) document.querySelector('#rendered_cells').scrollTop += beyond;
  const { left, bottom } = card.getBoundingClientRect();
  return card.contains(document.elementFromPoint(left + 20, bottom - 4));
}"""


LOOKS = """() => {
  const bar = getComputedStyle(document.querySelector('.eet-bar')), theme = document.body.dataset.jpThemeLight;
  const red = (color) => +/[0-9]+/.exec(color)[0];
  return { theme, ink: red(bar.color), paper: red(bar.backgroundColor) };
}"""


def test_the_app_shows_no_code_and_compares(started: Any, page: Any) -> None:
    """Voila shows the notebook's widget: what is sent to it arrives, and what it draws is drawn."""
    pytest.importorskip("voila", reason="voila is not installed: pip install voila")
    page.answered_from_outside = []
    page.on("requestfinished", lambda request: note_outside(page, request.url))
    page.on("request", lambda request: note_outside(page, request.url))
    page.emulate_media(color_scheme="dark")
    page.goto(started("--app"))
    page.locator(BENCH).first.wait_for(timeout=90_000)
    until_free(page, "Compare", 30)
    looks = page.evaluate(LOOKS)
    page.emulate_media(color_scheme="light")
    assert looks["theme"] == "false" and looks["ink"] > 150 > 100 > looks["paper"], "the system's theme is dark"
    page.wait_for_selector("body[data-jp-theme-light=true]", state="attached")
    looks = page.evaluate(LOOKS)
    assert looks["ink"] < 100 < 150 < looks["paper"], "and is followed to the light one"
    [before] = kernels_of(page.url)

    # A reload would end what runs, so the page asks; who stays has lost nothing.
    button(page, "Compare").click()
    until_free(page, "Stop", 10)
    with page.expect_event("dialog") as asked:
        page.once("dialog", lambda dialog: dialog.dismiss())
        page.evaluate("() => { setTimeout(() => location.reload()); }")
    assert asked.value.type == "beforeunload"
    until_free(page, "Stop", 10)
    button(page, "Stop").click()
    until_free(page, "Compare", 20)
    assert kernels_of(page.url) == {before}

    button(page, "Compare").click()
    until_free(page, "Stop", 10)
    page.once("dialog", lambda dialog: dialog.accept())
    page.reload()
    page.locator(BENCH).first.wait_for(timeout=90_000)
    until_free(page, "Compare", 30)
    assert before not in kernels_of(page.url), "a page that is left keeps no kernel, nor its model"
    assert page.locator(".jp-CodeCell .jp-InputArea").filter(has_text="eet_lab.Workbench").count() == 0
    with urllib.request.urlopen(page.url.split("?")[0], timeout=20) as answer:
        assert "/login?" in answer.url, "without the token"
    page.locator(".eet-inputs summary", has_text="Generation").first.click()
    page.get_by_label("New tokens", exact=True).fill("32")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.eet-inputs').innerText.includes('32 new')")
    button(page, "Compare").click()
    page.wait_for_selector(".eet-told-block:not(.eet-busy) .eet-headline", timeout=150_000)
    page.wait_for_function("() => +document.querySelector('.eet-strip').dataset.points > 50")
    page.get_by_role("tab", name="Latency", exact=True).click()
    page.wait_for_selector(".eet-figure .js-plotly-plot .scatterlayer .trace", timeout=20_000)
    assert page.answered_from_outside == []
    assert not page.get_by_text("Shift+Enter").is_visible(), "there is no cell to run"
    assert page.locator("a[href*=ipynb]").count() == 0, "it would hide a lesson's code, too"
    page.set_viewport_size({"width": 1440, "height": 700})
    title = page.locator(".eet-tech-title").last
    title.click()
    page.wait_for_function(ITS_END_IS_SEEN, arg=title.inner_text())  # it lies over what stands below
    page.locator(".eet-runs").evaluate("(runs) => runs.scrollIntoView({ block: 'end' })")
    page.wait_for_function("() => document.querySelector('#rendered_cells').scrollTop > 20")
    assert page.locator(".eet-bar").bounding_box()["y"] <= 0, "nothing shows above it"

    # What was found stays when the server ends, and so does the way to another.
    headline = page.locator(".eet-headline").inner_text()
    started.labs[0].send_signal(signal.SIGINT)
    page.get_by_role("alert").filter(has_text="eet-lab lab --app").wait_for(timeout=30_000)
    started.labs[0].communicate(timeout=30)
    page.wait_for_timeout(1000)
    assert page.locator(".eet-headline").inner_text() == headline
    assert page.locator(".eet-figure .js-plotly-plot").first.is_visible()
    assert page.failures == []


def kernels_of(url: str) -> set[str]:
    """The kernels that the server of a page runs."""
    with urllib.request.urlopen(urljoin(url, f"/api/kernels?{urlsplit(url).query}"), timeout=20) as answer:
        return {kernel["id"] for kernel in json.load(answer)}


def note_outside(page: Any, url: str) -> None:
    if url.startswith("http") and "//127.0.0.1" not in url:
        page.answered_from_outside.append(url)
