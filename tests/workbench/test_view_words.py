"""Words of the page that must be whole: at the widths and heights that screens have."""

from __future__ import annotations

import pytest

from eet_lab.bench import load_result
from eet_lab.workbench.history import SHIPPED
from eet_lab.workbench.views import answer
from workbench import page_states
from workbench.page_harness import Open
from workbench.test_view_layout import CUT, IN_JUPYTERLAB

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("size", [IN_JUPYTERLAB, {"width": 848, "height": 740}])
def test_why_a_file_cannot_be_read_is_whole(opened: Open, size: dict[str, int]) -> None:
    states = page_states.laddered()
    why = "is a link, and only regular files are read. Copy the file that it points to."
    states["runs"]["rows"][0] |= {"id": "x", "name": "20261128-150000-000000-compare.json", "problem": why}
    page = opened(states, **size)
    assert page.evaluate(CUT, ".eet-problem") == [] and why in page.locator(".eet-problem").first.inner_text()


@pytest.mark.parametrize("size", [IN_JUPYTERLAB, {"width": 846, "height": 740}, {"width": 500, "height": 740}])
def test_the_check_of_an_output_is_explained_in_whole(opened: Open, size: dict[str, int]) -> None:
    states = page_states.compared()
    words = answer.words(load_result(SHIPPED / "h200-compare-gpt2-xl.json"), "parity")
    states["answer"] |= {"tab": "parity", "figure": True, "tables": [], "words": words}
    page = opened(states, **size)
    assert page.locator(".eet-sheet-words").inner_text().endswith("by a stated bound.")
    assert page.evaluate(CUT, ".eet-sheet-words") == []
