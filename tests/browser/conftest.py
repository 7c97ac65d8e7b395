"""JupyterLab and Voila on this machine, in a real Chromium, away from the user's own settings."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from chromium import FLAGS
from conftest import CHROMIUM

from browser.jupyter_pages import NOTEBOOKS, Lab, Server


@pytest.fixture(scope="session")
def lab_server(tmp_path_factory: pytest.TempPathFactory, kernels: dict[str, str]) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("notebooks")
    for path in NOTEBOOKS.glob("workbench.ipynb"):
        shutil.copy(path, root)
    app = ["jupyterlab", "--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port_retries=0"]
    app += [f"--ServerApp.root_dir={root}", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url="]
    app += ["--LabApp.extension_manager=readonly", "--ServerApp.terminals_enabled=False"]
    server = Server(app, root, tmp_path_factory.mktemp("jupyter"), "/api/status", kernels)
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser(playwright: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    profile = str(tmp_path_factory.mktemp("profile"))
    size = {"width": 1400, "height": 1000}
    context = playwright.chromium.launch_persistent_context(
        profile, executable_path=CHROMIUM, args=FLAGS, headless=True, viewport=size
    )
    yield context
    context.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that notes its errors, and every request that leaves this machine."""
    page = browser.new_page()
    page.failures, page.external = [], []
    page.on("pageerror", lambda error: page.failures.append(str(error)))
    page.on("request", lambda request: _note_external(page, request.url))
    yield page
    page.close()


@pytest.fixture
def lab(page: Any, lab_server: Server) -> Iterator[Lab]:
    lab = Lab(page, lab_server)
    yield lab
    lab.close_kernels()


def _note_external(page: Any, url: str) -> None:
    if url.startswith(("http:", "https:", "ws:", "wss:")) and "//127.0.0.1" not in url:
        page.external.append(url)
