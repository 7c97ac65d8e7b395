"""The page by keyboard: what keys do, where they are text, where the focus stays."""

from __future__ import annotations

import pytest

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
