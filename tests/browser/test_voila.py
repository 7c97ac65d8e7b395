"""The workbench in Voila, without a notebook around it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from browser.jupyter_pages import NOTEBOOKS, Server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(150)]


@pytest.fixture
def voila(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("voila", reason="voila is not installed: pip install voila")
    root = tmp_path_factory.mktemp("voila")
    shutil.copy(NOTEBOOKS / "workbench.ipynb", root)
    app = ["voila", "workbench.ipynb", "--Voila.ip=127.0.0.1", "--show_tracebacks=True"]
    server = Server(app, root, tmp_path_factory.mktemp("voila-home"), "/api/status")
    yield server
    server.close()


def test_the_workbench_runs_in_voila(voila: Server, page: Any) -> None:
    page.route(lambda url: "//127.0.0.1" not in url, lambda route: route.abort())  # as if there were no network
    page.goto(f"{voila.base}/?token={voila.token}")
    page.wait_for_selector(".eet-bench", timeout=90_000)
    page.wait_for_selector(".eet-do-run:not([aria-disabled='true'])", timeout=60_000)
    page.locator(".eet-inputs summary", has_text="Generation").first.click()
    page.get_by_label("New tokens", exact=True).fill("32")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.eet-inputs').innerText.includes('32 new')")
    page.locator(".eet-bench").get_by_role("button", name="Compare", exact=True).click()
    page.wait_for_selector(".eet-told-block:not(.eet-busy) .eet-headline", timeout=150_000)
    assert page.eval_on_selector(".eet-strip", "e => +e.dataset.points") > 50
    page.get_by_role("tab", name="Latency", exact=True).click()
    page.wait_for_selector(".eet-figure .js-plotly-plot .scatterlayer .trace", timeout=20_000)
    assert page.failures == []
