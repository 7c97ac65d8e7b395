"""The page by keyboard: what keys do, where they are text, where the focus stays."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from eet_lab.technique import listed
from eet_lab.workbench.choices import State
from eet_lab.workbench.views.chosen import techniques_state
from workbench import page_states
from workbench.page_harness import Open, sent, show

pytestmark = pytest.mark.browser


def test_keys_act_inside_the_bench_only(opened: Open) -> None:
    page = opened(page_states.compared())
    page.evaluate("window.passed = []; document.addEventListener('keydown', (e) => window.passed.push(e.key))")
    page.keyboard.press("c")  # nothing in the bench has the focus
    assert sent(page) == []
    page.evaluate("window.passed.splice(0)")
    page.click(".eet-number >> nth=0")  # no control, and yet inside
    for key in ("r", "c", "l", "d", "x"):
        page.keyboard.press(key)
    assert [c["command"] for c in sent(page)] == ["run", "compare", "ladder"]
    assert page.evaluate("window.passed") == []  # JupyterLab would cut the cell
    for key in ("Control+c", "Control+s", "Shift+Enter", "Escape"):
        page.keyboard.press(key)
    assert sent(page) == []  # Escape: nothing runs
    assert page.evaluate("window.passed.filter((key) => key !== 'Control' && key !== 'Shift')") == ["c", "s", "Enter"]
    show(page, page_states.busy())
    page.keyboard.press("r")
    page.keyboard.press("Escape")
    assert [c["command"] for c in sent(page)] == ["stop"]


def test_keys_are_text_where_text_is_typed(opened: Open) -> None:
    page = opened(page_states.compared())
    page.click("summary >> text=Prompts")
    page.locator('[aria-label="Prompt 2"]').focus()
    page.keyboard.type("crl")
    assert {c["command"] for c in sent(page)} <= {"edit_prompt"}
    page.focus('[aria-label="dtype"]')
    sent(page)
    page.keyboard.press("r")
    assert sent(page) == []


def test_a_whole_number_that_a_float_would_round_is_told_as_its_digits(opened: Open) -> None:
    page = opened(page_states.compared())
    page.click("summary >> text=Generation")
    for text, value in (("9" * 24, "9" * 24), ("12", 12)):
        page.get_by_label("Seed").fill(text)
        page.get_by_label("Seed").press("Enter")
        assert [each["value"] for each in sent(page)] == [value]


def test_the_way_to_kept_runs_goes_there(opened: Open) -> None:
    page = opened(page_states.empty(), height=500)
    page.get_by_role("button", name="open a run below").press("Enter")
    page.wait_for_function("document.querySelector('.eet-runs').getBoundingClientRect().top < 400")
    assert page.evaluate("document.activeElement.className") == "eet-scroll" and sent(page) == []


def test_escape_dismisses_an_error(opened: Open) -> None:
    page = opened(page_states.failed())
    assert page.locator("[role=alert]").inner_text().startswith("×\nPrompt error")
    page.focus(".eet-do-run")
    page.keyboard.press("Escape")
    assert sent(page) == [{"view": "bar", "command": "dismiss_error"}]


def test_a_pressed_button_keeps_its_focus_while_it_is_off(opened: Open) -> None:
    page = opened(page_states.compared())
    page.focus(".eet-do-compare")
    page.keyboard.press("Enter")
    show(page, page_states.busy())
    assert page.evaluate("document.activeElement.textContent") == "Compare"
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert [c["command"] for c in sent(page)] == ["compare", "stop"]


def test_arrows_move_through_the_list_and_space_toggles(opened: Open) -> None:
    states = page_states.compared()
    blocked, names = "dependent_launch", [row["name"] for row in states["techniques"]["list"]]
    below = names[: names.index(blocked) : -1]
    page = opened(states)
    page.focus('[role=switch][tabindex="0"]')
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Space")
    assert [(c["command"], c["name"]) for c in sent(page)] == [("select", "mask_removal"), ("toggle", "mask_removal")]
    page.keyboard.press("End")
    for _ in below:
        page.keyboard.press("ArrowUp")
    page.keyboard.press("Space")
    assert [(c["command"], c["name"]) for c in sent(page)] == [("select", name) for name in (*below, blocked)]
    switch = page.locator(f'[data-name="{blocked}"]')
    assert switch.get_attribute("aria-disabled") == "true" and "NVIDIA GPU" in switch.get_attribute("title")


def test_arrows_move_through_the_tabs(opened: Open) -> None:
    states = page_states.laddered()
    _, second, *_, last = states["answer"]["tabs"]
    page = opened(states)
    page.focus("[role=tab][aria-selected=true]")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    assert [c["name"] for c in sent(page)] == [last["name"], second["name"]]  # of what is selected, and has not changed
    assert page.evaluate("document.activeElement.textContent") == second["title"]


COLUMNS = "[...document.querySelectorAll('.eet-runs thead tr > *')].map((head) => head.getBoundingClientRect().width)"


def in_sight(page: Any, name: str) -> bool:
    """Whether it is within the list of runs."""
    place, around = page.locator(name).bounding_box(), page.locator(".eet-scroll").bounding_box()
    ends = [
        (each[at], each[at] + each[side]) for at, side in (("x", "width"), ("y", "height")) for each in (around, place)
    ]
    return all(
        first[0] <= then[0] and then[1] <= first[1] + 1 for first, then in zip(ends[::2], ends[1::2], strict=True)
    )


@pytest.mark.parametrize("width, large", [(1270, False), (1255, True), (484, False), (484, True)])
def test_what_a_row_opens_stands_below_it(opened: Open, width: int, large: bool) -> None:
    """In sight, wherever the list was scrolled to; no column becomes wider, and the focus goes there and back."""
    page = opened(page_states.laddered(), width=width, large=large)
    columns = page.evaluate(COLUMNS)
    for more in (page.locator('[aria-label^="More for "]').last, page.locator('[aria-label^="More for no graphs"]')):
        more.press("Enter")
        assert more.get_attribute("aria-expanded") == "true" and page.evaluate(COLUMNS) == columns
        assert in_sight(page, ".eet-run-more div")
    page.locator('[aria-label^="Delete no graphs"]').press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "No"
    assert in_sight(page, "text=Delete?") and page.evaluate(COLUMNS) == columns
    page.keyboard.press("Escape")
    assert page.locator(".eet-run-more").count() == 0 and sent(page) == []
    assert page.evaluate("document.activeElement.textContent") == "…"


CUT_LINES = """() => {
  const card = document.querySelector(".eet-tech-card"), box = card.getBoundingClientRect(), cut = [];
  const texts = document.createTreeWalker(card, NodeFilter.SHOW_TEXT), range = document.createRange();
  for (let text; (text = texts.nextNode());) {
    if (text.parentNode.closest("details") && !text.parentNode.closest("summary")) continue;
    range.selectNodeContents(text);
    for (const line of range.getClientRects())
      if (line.left < box.right && line.top < box.bottom && line.bottom > box.bottom) cut.push(text.data.slice(0, 30));
  }
  return cut;
}"""
"""Texts of which a line stands partly below the card's edge."""


def test_a_card_that_is_closed_cuts_no_line(opened: Open) -> None:
    page, state = opened(page_states.compared()), State(device="cpu")
    for width, large in ((466, False), (1406, False), (1406, True), (2526, False)):
        page.set_viewport_size({"width": width, "height": 786})
        page.evaluate("on => document.querySelector('.eet-bench').classList.toggle('eet-large', on)", large)
        for name in listed():
            show(page, {"techniques": techniques_state(state, name, {}, "", "all", read_only=False)})
            assert page.evaluate(CUT_LINES) == [], (width, large, name)
    show(page, {"techniques": techniques_state(state, "memory_reuse", {}, "", "all", read_only=False)})
    page.set_viewport_size({"width": 1406, "height": 786})
    expect(page.locator(".eet-card-more")).to_have_text("knobs and more ▾")
    expect(page.locator(".eet-card-more")).to_be_visible()
    page.locator(".eet-tech-card select").last.focus()
    expect(page.locator(".eet-tech-card.eet-open")).to_be_visible()
    expect(page.locator(".eet-card-more")).not_to_be_visible()
    assert page.evaluate("document.querySelector('.eet-tech-card').scrollLeft") == 0
