"""The workbench in a page of JupyterLab, as tests press its buttons, read it, and wait for it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from playwright.sync_api import Error

RESTYLED = """() => {
  const word = document.querySelector('.eet-stream-head b'), said = word.textContent, taken = [];
  const take = (sheet) => { for (let i = sheet.cssRules.length - 1; i >= 0; i--) {
    const rule = sheet.cssRules[i];
    if (/:has.*eet-|eet-.*:has/.test(rule.selectorText)) { taken.push([sheet, i, rule.cssText]); sheet.deleteRule(i); }
    else if (rule.cssRules) take(rule); } };
  const least = () => Math.min(...Array.from({ length: 12 }, () => {
    const begun = performance.now();
    for (let i = 0; i < 20; i++) { word.textContent = i; word.offsetHeight; }
    return performance.now() - begun; }));
  const whole = least();
  [...document.styleSheets].forEach(take);
  const without = least();
  for (const [sheet, i, text] of taken.reverse()) sheet.insertRule(text, i);
  word.textContent = said;
  if (!taken.length) throw new Error('no rule was taken away');
  return whole / without; }"""
"""How many times longer another word takes to be styled with those rules of ours that have `:has` than without them."""

NOTE_TURNS = """
import eet_lab
controller, turns = eet_lab.Workbench._opened.controller, []
def noted(method):
    def note(*given):
        turns.append(controller._ticks)
        return method(*given)
    return note
controller.stop, controller.background.resume = noted(controller.stop), noted(controller.background.resume)
"""
"""Has the kernel note the turns in which it is told to stop, and in which a run is over. Ten are a second."""


def button(page: Any, name: str) -> Any:
    return page.locator(".eet-bench").get_by_role("button", name=name, exact=True)


def until_ready(page: Any, seconds: float = 120) -> None:
    """Nothing runs, and Run can be pressed."""
    page.wait_for_function(
        "() => document.querySelector('.eet-told-block:not(.eet-busy)')"
        " && document.querySelector('.eet-do-run')?.getAttribute('aria-disabled') !== 'true'",
        timeout=seconds * 1000,
    )


def until_busy(page: Any) -> None:
    page.wait_for_selector(".eet-told-block.eet-busy", timeout=30_000)


def run_again(bench: Any) -> None:
    """Run all cells of a notebook whose workbench stands there, until another stands in its place and is ready."""
    bench.page.evaluate("() => document.querySelectorAll('.eet-bar').forEach((bar) => { bar.dataset.old = 'old'; })")
    bench.run_all()
    bench.page.wait_for_function(
        "() => { const bars = [...document.querySelectorAll('.eet-bar')];"
        " return bars.length && bars.every((bar) => !bar.dataset.old); }",
        timeout=60_000,
    )
    until_ready(bench.page)


def summary(page: Any, fold: str) -> Any:
    return page.locator(".eet-inputs summary", has_text=fold).first


def points(page: Any, chart: int = 0) -> int:
    return page.eval_on_selector_all(".eet-strip", "all => all.map(e => +e.dataset.points)")[chart]


def tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def set_field(page: Any, label: str, value: str) -> None:
    page.get_by_label(label, exact=True).fill(value)
    page.keyboard.press("Enter")


def new_tokens(page: Any, number: int) -> None:
    """Set how many are generated, and wait until the kernel has heard of it."""
    set_field(page, "New tokens", str(number))
    page.wait_for_function(f"() => document.querySelector('.eet-inputs').innerText.includes('{number} new')")


def place(page: Any, selector: str) -> dict[str, float]:
    return page.locator(selector).first.bounding_box()


def hovered(page: Any, chart: Any) -> str:
    """What a chart says of the bar under the pointer. Drawn anew it says nothing, until the pointer moves again."""
    for _ in range(10):
        page.mouse.move(0, 0)
        with suppress(Error):  # drawn anew just now, that bar is gone
            chart.locator(".barlayer .bars .point").nth(3).hover(force=True)
        page.wait_for_timeout(1000)
        if text := chart.locator(".hoverlayer").text_content():
            return text
    return ""
