"""The workbench in JupyterLab, in a real browser: what a person does, and what a person sees."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(170)]

MAX_SAVED_BYTES = 300_000


def status_has(page: Any, text: str, seconds: float = 60) -> None:
    page.wait_for_function(
        "(text) => document.querySelector('.eet-status')?.innerText.includes(text)", arg=text, timeout=seconds * 1000
    )


def button(page: Any, name: str) -> Any:
    return page.locator(".eet-bench").get_by_role("button", name=name, exact=True)


def draws(page: Any) -> list[int]:
    """How often each chart has been drawn."""
    return page.eval_on_selector_all(".eet-strip", "all => all.map(e => +e.dataset.draws)")


def points(page: Any, chart: int = 0) -> int:
    return page.eval_on_selector_all(".eet-strip", "all => all.map(e => +e.dataset.points)")[chart]


def hovered(page: Any, chart: Any) -> str:
    """What a chart says of the bar under the pointer. Drawn anew it says nothing, until the pointer moves again."""
    for _ in range(10):
        page.mouse.move(0, 0)
        chart.locator(".barlayer .bars .point").nth(3).hover(force=True)
        page.wait_for_timeout(1000)
        if text := chart.locator(".hoverlayer").text_content():
            return text
    return ""


def seconds_to_stop(page: Any) -> float:
    """Ends the run under way."""
    stop = button(page, "Stop")
    stop.click(trial=True)  # waits until it can be clicked
    begun = time.monotonic()
    stop.click()
    status_has(page, "run stopped", 10)
    return time.monotonic() - begun


def thread_names(lab: Any) -> list[str]:
    code = "import threading; print(*sorted(t.name for t in threading.enumerate() if t.name.startswith('eet-')))"
    return lab.execute(code).split()


def cpu_seconds(lab: Any) -> float:
    """What the kernel's process has computed, which others on the machine do not change much."""
    return float(lab.execute("import time; print(time.process_time())"))


@pytest.fixture
def bench(lab: Any) -> Any:
    lab.open("workbench.ipynb")
    lab.run_all()
    lab.page.wait_for_selector(".eet-bench", timeout=60_000)
    status_has(lab.page, "ready")
    yield lab
    assert lab.page.failures == []
    assert lab.page.external == []


def test_toggle_run_stop_compare_reload(bench: Any) -> None:
    page = bench.page
    assert page.locator(".eet-mode").inner_text().startswith("CPU mode: no NVIDIA GPU")
    assert button(page, "CUDA graphs").is_disabled()

    # Toggle: the card follows the kernel's state, not the click.
    button(page, "Mask removal").click()
    page.wait_for_selector(".eet-technique-mask_removal:not(.eet-on)")
    button(page, "Mask removal").click()
    page.wait_for_selector(".eet-technique-mask_removal.eet-on")
    page.wait_for_selector(".eet-technique-packed_prefill.eet-on")  # which went off with it

    # Type: tokens are counted, and the sum with the new ones is checked against the context.
    first = page.locator(".eet-prompt textarea").first
    first.fill("word " * 1500)
    page.wait_for_selector(".eet-sum.eet-over")
    assert button(page, "Compare").is_disabled()
    first.fill("Return the <b>name</b> of")
    page.wait_for_selector(".eet-sum:not(.eet-over)")

    # Run: text and latency arrive while it runs.
    page.get_by_label("New tokens").or_(page.locator(".eet-settings input").first).first.fill("500")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.eet-sum').innerText.includes('500 new')")
    button(page, "Run").click()
    page.wait_for_function("() => +document.querySelector('.eet-strip').dataset.points > 20")
    seen, drawn = points(page), draws(page)[0]
    page.wait_for_function(f"() => +document.querySelector('.eet-strip').dataset.points > {seen + 20}")
    assert draws(page)[0] > drawn
    assert "<b>name</b>" in page.locator(".eet-stream-pane").first.inner_text()

    # Stop: answered in half a second, and the browser driver's own way there and back.
    seconds = seconds_to_stop(page)
    for _ in range(2):  # the best of three: another test may have the cores
        if seconds < 0.9:
            break
        button(page, "Run").click()
        page.wait_for_function("() => !document.querySelector('.eet-status').innerText.includes('stopped')")
        seconds = min(seconds, seconds_to_stop(page))
    assert seconds < 0.9

    # Compare, on the selection as it is.
    page.locator(".eet-settings input").first.fill("64")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.eet-sum').innerText.includes('64 new')")
    begun = cpu_seconds(bench)
    button(page, "Compare").click()
    status_has(page, "compare done")
    assert cpu_seconds(bench) - begun < 20  # of its own time: another test may have the cores
    words = page.locator(".eet-overview").inner_text()
    for wanted in ("TIME TO FIRST TOKEN", "THROUGHPUT", "PEAK MEMORY", "WHAT WATCHING COST"):
        assert wanted in words.upper()
    assert "same output" in words.lower()
    button(page, "Latency").click()
    page.wait_for_selector(".eet-figure .js-plotly-plot .scatterlayer .trace", timeout=20_000)

    # Reload: everything comes back from the kernel, and goes on.
    count = points(page)
    bench.command("docmanager:save")
    page.wait_for_timeout(500)
    page.reload()
    page.wait_for_selector(".eet-bench", timeout=60_000)
    page.wait_for_function(f"() => +document.querySelector('.eet-strip')?.dataset.points >= {count}", timeout=20_000)
    status_has(page, "compare done")
    page.wait_for_selector(".eet-figure .js-plotly-plot .scatterlayer .trace", timeout=20_000)
    button(page, "Run").click()
    status_has(page, "run done")


def test_running_the_cell_again_leaves_one_bench_and_no_old_thread(bench: Any) -> None:
    page = bench.page
    assert thread_names(bench) == ["eet-aside", "eet-engine", "eet-sampler", "eet-ui"]
    bench.run_all()
    page.wait_for_timeout(500)
    status_has(page, "ready")
    assert thread_names(bench) == ["eet-aside", "eet-engine", "eet-sampler", "eet-ui"]
    assert page.locator(".eet-bench").count() == 1
    bench.execute("import eet_lab.panels.workbench as w; w._open.close()")
    assert thread_names(bench) == []


def test_a_saved_notebook_is_small_even_with_widget_state(bench: Any) -> None:
    page = bench.page
    button(page, "Compare").click()
    status_has(page, "compare done")
    button(page, "Memory").click()
    page.wait_for_selector(".eet-figure .js-plotly-plot .barlayer .trace", timeout=20_000)
    state = page.evaluate(
        """async () => {
            const panel = window.jupyterapp.shell.currentWidget;
            await window.jupyterapp.commands.execute('@jupyter-widgets/jupyterlab-manager:saveWidgetState');
            await panel.context.save();
            return JSON.stringify(panel.context.model.toJSON());
        }"""
    )
    notebook = json.loads(state)
    widgets = notebook["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    assert len(widgets) > 50, "the state of the widgets is there"
    saved = bench.server.root / "workbench.ipynb"
    assert len(state) < MAX_SAVED_BYTES
    assert saved.stat().st_size < MAX_SAVED_BYTES


def test_memory_is_foreseen_before_a_run_and_drawn_after_it(bench: Any) -> None:
    page = bench.page
    page.wait_for_selector(".eet-told.eet-good:not(.eet-stale)", timeout=20_000)
    assert "Run fits" in page.locator(".eet-told").inner_text()
    assert "Compare fits too" in page.locator(".eet-told-compare").inner_text()
    before = page.locator(".eet-told").inner_text()
    page.locator(".eet-settings input").first.fill("200")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "(before) => { const told = document.querySelector('.eet-told'); return told && !told.matches('.eet-stale')"
        " && told.innerText !== before; }",
        arg=before,
        timeout=20_000,
    )
    button(page, "Run").click()
    status_has(page, "run done")
    assert "rest of this process" in page.locator(".eet-stack").nth(1).inner_text()

    button(page, "Memory").click()
    strip = page.locator(".eet-packing .js-plotly-plot").first
    strip.locator(".barlayer .bars .point").first.wait_for(timeout=20_000)
    page.locator(".eet-memory td", has_text="eet_repaired").first.wait_for(timeout=20_000)
    title = strip.locator(".gtitle").text_content()
    assert "which is the lower bound" in title

    # Another planner, another pass: the strip follows.
    page.locator(".eet-memory select").select_option("no_reuse")
    page.wait_for_function(changed("gtitle"), arg=title, timeout=20_000)
    assert "× the lower bound" in strip.locator(".gtitle").text_content()
    title = strip.locator(".gtitle").text_content()
    button(page, "decode").click()
    page.wait_for_function(changed("gtitle"), arg=title, timeout=20_000)

    # Hovering over a rectangle names the tensor.
    assert "from address" in hovered(page, strip)


def changed(part: str) -> str:
    """Whether a part of the first strip has another text than before."""
    return (
        f"(before) => {{ const part = document.querySelector('.eet-packing .{part}');"
        " return part && part.textContent && part.textContent !== before; }"
    )


def test_a_technique_from_a_cell_appears(bench: Any) -> None:
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
    card = bench.page.locator(".eet-technique-mine")
    card.wait_for(timeout=10_000)
    assert "A technique of my own." in card.inner_text()
    button(bench.page, "My own").click()
    bench.page.wait_for_selector(".eet-technique-mine.eet-on")
