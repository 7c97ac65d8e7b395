"""A workbench on a tiny model, and results to show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chromium import FLAGS
from conftest import CHROMIUM

from eet_lab.bench import Comparison, Ladder
from eet_lab.workbench import Workbench
from eet_lab.workbench.engine_thread import EngineThread
from eet_lab.workbench.threads import Background
from workbench.driving import PROMPTS, threads, turn_until
from workbench.page_harness import Open, html
from workbench.page_states import States


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are waited for as long as they need at the end, where a busy machine holds up what they are doing."""
    for kind in (Background, EngineThread):
        monkeypatch.setattr(kind, "PATIENCE_S", 60.0)


@pytest.fixture
def foresees() -> bool:
    """Whether `bench` forecasts its runs, which takes as much processor time as they do: where a test looks at it."""
    return False


@pytest.fixture
def bench(hf_model: Any, tmp_path: Any, foresees: bool) -> Iterator[Workbench]:
    """A workbench on a tiny live model, with all recordings listed, whose controller the test turns itself."""
    workbench = Workbench(hf_model, PROMPTS, max_new_tokens=8, folder=tmp_path / "results", device="cpu")
    try:
        if not foresees:
            workbench.controller.fits.look = lambda *choices: None  # type: ignore[method-assign]
        history = workbench.controller.results.history
        turn_until(workbench, lambda: workbench.model is not None and not history.unread())
        yield workbench
    finally:
        workbench.close()
    assert threads() == []


@pytest.fixture
def background() -> Iterator[Background]:
    background = Background()
    yield background
    background.close()
    assert not background._thread.is_alive()


@pytest.fixture(scope="module")
def comparison(tiny: Any) -> Comparison:
    from eet_lab.bench import compare

    rows = [[5, 6, 7], [8, 9, 10, 11, 12, 13]]
    return compare(tiny, rows, "pre_padding,mask_removal,memory_reuse", repeats=2, max_new_tokens=6)


@pytest.fixture(scope="module")
def climbed(tiny: Any) -> Ladder:
    from eet_lab.bench import ladder

    return ladder(tiny, [[5, 6, 7], [8, 9]], "pre_padding,mask_removal,memory_reuse", repeats=2, max_new_tokens=6)


@pytest.fixture(scope="module")
def chromium(playwright: Any) -> Iterator[Any]:
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, headless=True)
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def window(chromium: Any) -> Iterator[Any]:
    """One page for all tests of a file: another takes as long to start as what is shown in it."""
    page = chromium.new_page()
    page.set_default_timeout(5000)
    page.failures = []
    page.on("pageerror", lambda error: page.failures.append(str(error)))
    yield page
    page.close()


@pytest.fixture
def opened(window: Any) -> Iterator[Open]:
    """Opens a page with these states, in place of the one before; at the end it must have met no error."""
    window.failures.clear()

    def opening(states: States, width: int = 1406, height: int = 786, theme: str = "light", large: bool = False) -> Any:
        window.goto("about:blank")  # nothing that a test left in the window, nor where it was scrolled to
        window.set_viewport_size({"width": width, "height": height})
        window.mouse.move(0, 0)
        window.set_content(html(states, theme, large))
        window.wait_for_selector("body[data-ready]")
        return window

    yield opening
    assert window.failures == []
