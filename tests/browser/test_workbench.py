"""The workbench in JupyterLab, in a real browser: what a person does, and what a person sees."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import expect

from browser.bench_page import (
    NOTE_TURNS,
    RESTYLED,
    button,
    hovered,
    new_tokens,
    place,
    points,
    run_again,
    set_field,
    summary,
    tab,
    until_busy,
    until_ready,
)

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

MAX_SAVED_BYTES = 300_000
WINDOW = {"width": 1440, "height": 900}
THREADS = ["eet-background", "eet-engine", "eet-sampler", "eet-ui"]
FIGURE = ".eet-stage .eet-figure .js-plotly-plot"

CUT_CHARTS = """() => [...document.querySelectorAll('.eet-strip')].filter((e) => e.offsetParent).flatMap((chart) => {
  const place = chart.getBoundingClientRect(), title = chart.querySelector('.eet-strip-title');
  const cut = [...chart.querySelectorAll('.eet-strip-legend > span')].filter((each) => {
    const { right, bottom } = each.getBoundingClientRect(); return right > place.right || bottom > place.bottom; });
  const low = chart.querySelector('canvas').clientHeight < 30 ? [chart] : [];
  if (title.scrollWidth > title.clientWidth) cut.push(title);
  return [...cut, ...low].map((each) => each.innerText); })"""
"""Names and values that do not fit into their chart, and charts that they leave no room."""
WHOLE_LEGEND = """() => {
  const [plot, legend, scrollbar] = ['.main-svg', '.legend .bg', '.legend .scrollbar'].map((name) =>
    document.querySelector(`.eet-stage ${name}`).getBoundingClientRect());
  return legend.height > 100 && plot.top <= legend.top && legend.bottom <= plot.bottom && !scrollbar.height; }"""
FILLS = """() => {
  const stage = document.querySelector('.eet-stage'), plot = stage.querySelector('.eet-figure .main-svg');
  return Math.abs(stage.clientHeight - 12 - plot.getBoundingClientRect().height) <= 2; }"""
"""The figure is as high as its stage."""
PAUSED_BETWEEN = """() => {
  const over = document.querySelectorAll('.eet-lane-over').length;
  if (over > 1) throw new Error('the slow lane was over before the race could be paused');
  const pause = [...document.querySelectorAll('.eet-race button')].find((each) => each.textContent === 'Pause');
  if (over === 1) pause.click();
  return over === 1; }"""
"""Pauses the race once the fast lane is over: in the page, since on a busy machine a click from here comes too late."""
COLUMNS = "() => new Set([...document.querySelectorAll('.eet-stream-pane')].map((pane) => pane.offsetLeft)).size"
TOP_LINES = """() => [...document.querySelectorAll('.eet-stream-body')].map((body) => {
  const line = parseFloat(getComputedStyle(body).lineHeight);
  return [body.scrollTop, body.scrollTop % line, line]; })"""
"""How far each prompt's text is scrolled, how much of that cuts a line, and a line's height."""
LOOKS_SELDOM = """(() => { const wait = window.setTimeout;
  window.setTimeout = (call, ms, ...given) => wait(call, ms === 100 ? 6000 : ms, ...given); })()"""
"""An output looks for its widget every 100 ms for two seconds: what comes since its last look is not shown."""
UNCHANGED = "() => !window.jupyterapp.shell.currentWidget.context.model.dirty"
ANSWER_BELOW = """() => { const [answer, live] = ['.eet-answer', '.eet-live'].map((name) =>
  document.querySelector(name).getBoundingClientRect().top); return answer - live; }"""
"""How far the answer stands below the live charts, wherever the page is scrolled."""


@pytest.fixture
def bench(lab: Any) -> Any:
    lab.page.set_viewport_size(WINDOW)
    lab.open("workbench.ipynb")
    lab.run_all()
    lab.page.wait_for_selector(".eet-bar", timeout=60_000)
    until_ready(lab.page)
    yield lab
    # anywidget says so of a model whose kernel was closed while the page still made it, as at the end of a test before.
    assert [each for each in lab.page.failures if each != "[anywidget] Failed to initialize model."] == []
    assert lab.page.external == []


def test_choose_run_stop_compare_and_reload(bench: Any) -> None:
    page = bench.page
    assert "CPU mode: no NVIDIA GPU" in page.locator(".eet-bar").inner_text()

    # All choices are in the first view, and a card that opens moves none of them.
    page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    page.wait_for_function("() => document.querySelector('.eet-bench').clientWidth > 1200")
    expect(page.locator(".eet-inputs")).to_contain_text("Run fits", timeout=60_000)
    inputs, screen = place(page, ".eet-inputs"), place(page, ".jp-WindowedPanel-outer")
    assert inputs["y"] + inputs["height"] <= screen["y"] + screen["height"]
    page.locator(".eet-tech-title", has_text="Continuous batching").click()
    expect(page.locator(".eet-tech-card")).to_contain_text("Continuous batching")
    assert place(page, ".eet-inputs") == inputs
    page.keyboard.press("Escape")
    page.evaluate("() => window.jupyterapp.shell.expandLeft()")

    # Choose: the switch follows the kernel's state, not the click.
    switch = page.get_by_role("switch", name="Mask removal")
    other = page.get_by_role("switch", name="Packed prefill")
    switch.click()
    page.wait_for_selector('[role="switch"][data-name="packed_prefill"][aria-checked="false"]')
    switch.click()
    page.wait_for_selector('[role="switch"][data-name="packed_prefill"][aria-checked="true"]')
    assert other.get_attribute("aria-checked") == "true", "which went off with it"
    assert page.get_by_role("switch", name="CUDA graphs").get_attribute("aria-disabled") == "true"

    # Type: tokens are counted, and the sum with the new ones is checked against the context.
    summary(page, "Prompts").click()
    first = page.locator(".eet-inputs textarea").first
    first.fill("word " * 1500)
    page.wait_for_function("() => document.querySelector('.eet-inputs').innerText.includes('too long')")
    expect(button(page, "Compare")).to_have_attribute("aria-disabled", "true")
    first.fill("Return the <b>name</b> of")
    page.wait_for_function("() => !document.querySelector('.eet-inputs').innerText.includes('too long')")

    # Run: text and latency arrive while it runs, where the answer will stand.
    summary(page, "Generation").click()
    new_tokens(page, 900)  # as many as there is room for: a page may come late to its Stop
    top = page.evaluate(ANSWER_BELOW)
    button(page, "Run").click()
    page.wait_for_function("() => +document.querySelector('.eet-strip').dataset.points > 20", timeout=60_000)
    seen = points(page)
    page.wait_for_function(f"() => +document.querySelector('.eet-strip').dataset.points > {seen + 20}")
    assert "<b>name</b>" in page.locator(".eet-stream-pane").first.inner_text()
    assert page.evaluate(COLUMNS) == 2, "four prompts: two and two"
    page.wait_for_function(f"() => ({TOP_LINES})().some(([top]) => top > 40)", timeout=30_000)
    for _, cut, line in page.evaluate(TOP_LINES):
        assert min(cut, line - cut) < 1, "the line under a pane's head is whole"
    assert abs(page.evaluate(ANSWER_BELOW) - top) < 2, "nothing jumps when a run begins"

    # Stop: half a second is five of the kernel's turns. They take longer where another test has the cores, but are as
    # many. Before them the page is free to tell of the click: a token gives new styles to little.
    bench.execute(NOTE_TURNS)
    button(page, "Stop").click()
    until_ready(page, 10)
    told, over = bench.execute("print(*turns)").split()
    assert int(over) - int(told) < 5
    expect(page.locator(".eet-told-block")).to_contain_text("Run was stopped")
    assert page.evaluate(RESTYLED) < 10

    # Compare: the answer is in view, and told alike in the bar and in the tiles.
    new_tokens(page, 24)
    page.locator(".eet-bar").scroll_into_view_if_needed()
    button(page, "Compare").click()
    until_busy(page)
    until_ready(page, 200)
    headline = page.locator(".eet-headline").inner_text()
    assert "first token" in headline and "same" in headline
    tiles = page.locator(".eet-number").all_inner_texts()
    assert [text.split("\n")[0] for text in tiles] == [
        "Time to first token", "Time per token", "Peak memory", "Same output?",
    ]  # fmt: skip
    sooner = headline.split("first token")[1].split("·")[0].strip(" :\n")
    assert sooner in tiles[0]
    page.wait_for_selector(FIGURE, timeout=60_000)
    assert place(page, ".eet-number")["y"] + place(page, ".eet-number")["height"] < 900, "in view without scrolling"

    # Reload, without saving: everything comes back from the kernel, and goes on.
    count = points(page)
    page.reload()
    page.wait_for_selector(".eet-bar", timeout=60_000)
    page.wait_for_function(f"() => +document.querySelector('.eet-strip')?.dataset.points >= {count}", timeout=60_000)
    expect(page.locator(".eet-headline")).to_have_text(headline, use_inner_text=True)
    page.wait_for_selector(FIGURE, timeout=60_000)

    # The keyboard does the same, and JupyterLab's own keys stay out of it.
    until_ready(page)
    page.locator(".eet-headline").focus()
    page.keyboard.press("c")  # a run of 24 tokens may be over before it is seen
    until_busy(page)
    page.keyboard.press("Escape")
    until_ready(page, 20)


def shown_again_though_given_up(bench: Any) -> None:
    page = bench.page
    bench.command("docmanager:save")
    page.wait_for_function(UNCHANGED)
    page.add_init_script(LOOKS_SELDOM)
    with page.expect_console_message(lambda said: "widget model not found" in said.text, timeout=60_000):
        page.reload()
    page.wait_for_selector(".eet-bar", timeout=20_000)
    assert page.locator(".eet-bar").count() == 1
    assert not page.get_by_text("Run its cell again").is_visible()
    assert page.evaluate(UNCHANGED), "a notebook that nobody changed is not asked to be saved"
    until_ready(page)
    run_again(bench)


def kept_runs_outlive_the_cell_and_the_kernel(bench: Any) -> None:
    page = bench.page
    new_tokens(page, 8)
    rows = "document.querySelectorAll('.eet-runs-table tbody tr').length"
    kept = page.evaluate(rows) + 1
    button(page, "Run").click()
    page.wait_for_function(f"() => {rows} === {kept}", timeout=60_000)
    until_ready(page)
    with page.expect_download(timeout=60_000) as found:
        button(page, "Export…").click()
        button(page, "Export: JSON").click()
    assert re.fullmatch(r"Run-\d+-\d{4}-\d\d-\d\d\.json", found.value.suggested_filename)
    assert "eet_lab_result" in json.loads(found.value.path().read_bytes())
    assert bench.threads() == THREADS
    run_again(bench)
    assert bench.threads() == THREADS, "the first workbench is closed"
    assert page.locator(".eet-bar").count() == 1
    page.wait_for_function(f"() => {rows} === {kept}", timeout=60_000)

    # A restart of the kernel: one line says what to do, what is shown stays, and the cell brings the runs back.
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
    page.get_by_text("The kernel was restarted").wait_for(timeout=60_000)
    assert page.evaluate(rows) == kept
    run_again(bench)
    expect(page.get_by_text("The kernel was restarted")).to_have_count(0, timeout=30_000)
    page.wait_for_function(f"() => {rows} === {kept}", timeout=60_000)
    top = side(".eet-bar", "top")
    page.wait_for_function(f"() => 0 <= {top} && {top} < 900", timeout=10_000)  # in view
    bench.execute("import eet_lab; eet_lab.Workbench._opened.close()")
    assert bench.threads() == []


def test_the_recorded_h200_races_a_technique_from_a_cell_appears_and_a_page_comes_back(bench: Any) -> None:
    """One page for all: loading it takes longer than each."""
    races_on_one_clock(bench.page)
    until_ready(bench.page)
    a_technique_appears(bench)
    shown_again_though_given_up(bench)


def races_on_one_clock(page: Any) -> None:
    button(page, "Watch GPT-2 XL on a recorded H200").click()
    page.wait_for_function("() => document.querySelector('.eet-race')?.dataset.playing === 'true'", timeout=60_000)
    page.wait_for_function(PAUSED_BETWEEN, timeout=60_000)
    page.wait_for_selector('.eet-race[data-playing="false"]')
    slow, fast = page.locator(".eet-lane").all()
    assert "✓" in fast.inner_text() and "✓" not in slow.inner_text(), "the slow lane is still on its way"
    expect(page.locator(".eet-bar")).to_contain_text("kept run")
    switch = page.get_by_role("switch", name="CUDA graphs")  # its own switches
    expect(switch).to_have_attribute("aria-checked", "true")
    now = float(page.locator(".eet-race").get_attribute("data-now"))
    page.wait_for_timeout(300)
    assert float(page.locator(".eet-race").get_attribute("data-now")) == now
    lines = "all => all.map(e => e.clientHeight / parseFloat(getComputedStyle(e).lineHeight))"
    assert min(page.locator(".eet-lane-text").evaluate_all(lines)) >= 3, "texts can be read"
    assert page.locator(".eet-stage").evaluate("e => e.scrollHeight - e.clientHeight") <= 0, "all of them"
    page.get_by_label("Time in the race").fill("1000")
    expect(slow).to_contain_text("✓")
    page.get_by_label("Time in the race").fill("0")
    expect(page.locator(".eet-lane-over")).to_have_count(0)
    button(page, "10 ×").click()
    expect(button(page, "10 ×")).to_have_attribute("aria-pressed", "true")

    # Its timeline was recorded with it, and fills the stage. In larger type and narrow windows charts keep their words.
    tab(page, "Timeline")
    page.wait_for_selector(f"{FIGURE} .barlayer .trace", timeout=60_000)
    button(page, "own width").click()
    page.wait_for_function(f"() => document.querySelector('{FIGURE} .x2title')?.textContent.includes('whole width')")
    page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    for size in ((1440, 900), (500, 800), (2560, 1300)):
        page.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
        for _ in range(2):  # in larger type, and back
            button(page, "Larger type").click()
            page.wait_for_function(f"() => ({CUT_CHARTS})().length === 0", timeout=10_000)
            page.wait_for_function(FILLS, timeout=10_000)
    button(page, "Back to my model").click()
    page.wait_for_function("() => !document.querySelector('.eet-bar').innerText.includes('kept run')")


def test_memory_is_foreseen_drawn_and_small_when_saved_and_runs_are_kept(bench: Any) -> None:
    foreseen_before_a_run_and_drawn_after_it(bench.page)
    small_even_with_widget_state(bench)
    bench.page.evaluate("() => { window.jupyterapp.shell.currentWidget.content.widgets[0].outputsScrolled = false; }")
    bench.page.set_viewport_size(WINDOW)
    kept_runs_outlive_the_cell_and_the_kernel(bench)


def small_even_with_widget_state(bench: Any) -> None:
    page = bench.page
    bench.few_rounds()
    new_tokens(page, 8)
    button(page, "Compare").click()
    until_busy(page)
    until_ready(page, 200)
    tab(page, "Where memory lay")
    page.wait_for_selector(f"{FIGURE} .barlayer .trace", timeout=60_000)

    # JupyterLab's "scroll output", which one click beside the page would set and a notebook keeps, leaves it whole.
    assert not page.locator(".jp-OutputArea-promptOverlay").first.is_visible()
    page.evaluate("() => { window.jupyterapp.shell.currentWidget.content.widgets[0].outputsScrolled = true; }")
    page.locator(".jp-mod-outputsScrolled .eet-bench").wait_for()
    outputs = ".jp-mod-outputsScrolled .jp-Cell-outputArea"
    # Nothing lies over what follows, nor is there an empty prompt above in a narrow window.
    page.wait_for_function(f"() => {side(outputs, 'bottom')} >= {side('.eet-runs', 'bottom')}", timeout=10_000)
    page.set_viewport_size({"width": 500, "height": 800})
    page.wait_for_function(f"() => document.querySelector('{outputs}').clientWidth < 500")
    page.wait_for_function(f"() => {side('.eet-bench', 'top')} - {side(outputs, 'top')} < 10", timeout=10_000)
    notebook = bench.save()
    widgets = notebook["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    assert len(widgets) > 10, "the state of the widgets is there"
    saved = bench.server.root / "workbench.ipynb"
    assert saved.stat().st_size < MAX_SAVED_BYTES


def side(name: str, which: str) -> str:
    """Where a side of the first such element is, for a script in the page."""
    return f"document.querySelector('{name}').getBoundingClientRect().{which}"


def foreseen_before_a_run_and_drawn_after_it(page: Any) -> None:
    inputs = page.locator(".eet-inputs")
    page.wait_for_function("() => document.querySelector('.eet-inputs').innerText.includes('Run fits')", timeout=60_000)
    summary(page, "Memory").click()
    expect(inputs).to_contain_text("Compare fits too", use_inner_text=True)
    summary(page, "Generation").click()
    set_field(page, "New tokens", "200")
    button(page, "Run").click()
    until_busy(page)
    until_ready(page)
    page.wait_for_function("() => document.querySelector('.eet-inputs').innerText.includes('Held in the last run')")

    tab(page, "Where memory lay")
    strip = page.locator(FIGURE).first
    strip.locator(".barlayer .bars .point").first.wait_for(timeout=60_000)
    for _ in range(2):  # in larger type, and back
        button(page, "Larger type").click()
        page.wait_for_function(f"() => ({FILLS})() && ({WHOLE_LEGEND})()", timeout=10_000)
    expect(strip.locator(".gtitle")).to_contain_text("(the lower bound)")
    title = strip.locator(".gtitle").text_content()

    # Another planner, another pass: the strip follows.
    planner = page.get_by_label("Placed by", exact=True)
    listed = "() => document.querySelectorAll('.eet-answer select')[2]?.options.length > 3"
    page.wait_for_function(listed, timeout=60_000)
    planner.select_option("no_reuse")
    page.wait_for_function(changed("gtitle"), arg=title, timeout=60_000)
    title = strip.locator(".gtitle").text_content()
    assert "× the lower bound" in title
    page.get_by_label("Pass", exact=True).select_option("decode")
    page.wait_for_function(changed("gtitle"), arg=title, timeout=60_000)

    # Hovering over a rectangle names the tensor.
    assert "from address" in hovered(page, strip)


def changed(part: str) -> str:
    """Whether a part of the first strip has another text than before."""
    return (
        f"(before) => {{ const part = document.querySelector('.eet-stage .eet-figure .{part}');"
        " return part && part.textContent && part.textContent !== before; }"
    )


def a_technique_appears(bench: Any) -> None:
    bench.execute(
        "from dataclasses import dataclass\n"
        "import eet_lab\n"
        "@eet_lab.register\n"
        "@dataclass(frozen=True)\n"
        "class Mine(eet_lab.Technique):\n"
        "    'A technique of my own.'\n"
        "    name = 'mine'\n"
        "    title = 'My own'\n"
        "    def apply(self, parts):\n"
        "        return parts\n"
    )
    switch = bench.page.get_by_role("switch", name="My own")
    switch.wait_for(timeout=10_000)
    switch.click()
    bench.page.wait_for_selector('[role="switch"][data-name="mine"][aria-checked="true"]')
    expect(bench.page.locator(".eet-techniques")).to_contain_text("A technique of my own.", use_inner_text=True)
