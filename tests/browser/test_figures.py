"""Figures and charts in JupyterLab, through what a person does to a window: their sizes and their pixels."""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import nbformat
import pytest
from playwright.sync_api import expect

from browser.jupyter_pages import Lab, Server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(170)]

CELLS = (
    """
import ipywidgets as W
from IPython.display import display
from eet_lab.bench import load_result
from eet_lab.figures import plot, theme
from eet_lab.figures.outputs import FigureBox
from eet_lab.figures.live import StripChart
from eet_lab.lessons import Shown
from eet_lab.paths import PACKAGE
one, two = (load_result(PACKAGE / "recorded" / f"h200-{name}-gpt2-xl.json") for name in ("compare", "ladder"))
box = FigureBox()
box.show(plot(two, "waterfall").update_layout(height=260))
chart = StripChart(title="steps", unit="ms", series=[{"name": f"run ({n})", "color": theme.SELECTION} for n in (1, 2)])
chart.push([(0, i / 10, 20.0 + i % 7) for i in range(60)])
chart.snapshot_now()
page = W.VBox([W.HTML(theme.stylesheet()), box, chart]).add_class("eet-bench")
display(page)
""",
    "Shown(plot(one, 'memory'), 'Words under a figure of a lesson.')",
    "plot(one, 'latency').update_layout(height=300)",
)
HEIGHTS = [260, 192, 300]
"""Of the figure in a box, the one in a lesson, and the one that is a cell's own output."""
INNER = 8
"""A figure may be narrower than its place by the padding of an output."""

FIGURES = """() => [...document.querySelectorAll('.js-plotly-plot')].map((e) => {
  const svg = e.querySelector('.main-svg').getBoundingClientRect(), place = e.parentElement;
  const prompt = place.querySelector(':scope > .jp-OutputPrompt');
  const room = place.clientWidth - (prompt?.offsetWidth ?? 0), held = e.getBoundingClientRect().height;
  const bars = e.querySelectorAll('.point, .js-line').length;
  return { width: svg.width, height: svg.height, room, held, bars };
})"""
UNREADABLE = """() => {
  const wrong = [], box = document.querySelector('.eet-figure-box'), place = (e) => e.getBoundingClientRect();
  const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
  for (const figure of document.querySelectorAll('.js-plotly-plot')) {
    const head = figure.querySelector('.gtitle'), title = place(head), bar = place(figure.querySelector('.modebar'));
    if (title.right > bar.left || title.top < place(figure).top) wrong.push(head.textContent);
  }
  const words = [...box.querySelectorAll('.ytick text, .textpoint text, .gtitle, .xtitle, .xtick text')];
  const places = words.map(place), whole = place(box), said = words.map((word) => word.textContent);
  words.forEach((word, i) => {
    if (places[i].right > whole.right + 1 || places[i].left < whole.left - 1) wrong.push(said[i]);
    for (let k = 0; k < i; k++) if (over(places[i], places[k])) wrong.push(`${said[k]} on ${said[i]}`);
  });
  return words.length > 25 ? wrong.join('; ') : 'no words';
}"""
"""Titles cut off or under the toolbar, and words of the waterfall that stand on others or beyond its place."""
SQUEEZED = """() => {
  const figures = [...document.querySelectorAll('.js-plotly-plot .main-svg:first-child')];
  const widths = figures.map((e) => e.getBoundingClientRect().width);
  return widths.every((width) => width < 300) ? '' : `widths ${widths}`; }"""
CHART = """() => { const c = document.querySelector('.eet-strip-canvas');
  return { width: c.width, height: c.height, wide: c.clientWidth, high: c.clientHeight, density: devicePixelRatio };
}"""
HOVERS = """() => [...document.querySelectorAll('.eet-figure-box .hovertext')].map((label) => {
  const [all, words, box, place] = [label, label.querySelector('.nums'), label.querySelector('path'),
    label.closest('.eet-figure')].map((each) => each.getBoundingClientRect());
  const inside = (a, b) => ['left', 'top'].every((side) => b[side] <= a[side] + 1)
    && ['right', 'bottom'].every((side) => a[side] <= b[side] + 1);
  return [label.textContent, inside(words, box) && inside(all, place)]; })"""
"""What each hover of the figure in a box says, and whether its box holds the words and all of it is in the figure."""
TWO_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""A busy machine may leave out frames, and a chart is drawn in the frame after the one that tells it of a size."""
DRAWN_IN_A_SIZE_THAT_NOBODY_TELLS = """() => new Promise((done) => requestAnimationFrame(async () => {
  const canvas = document.querySelector('.eet-strip-canvas');
  requestAnimationFrame(() => { canvas.style.maxWidth = '300px'; });
  document.body.classList.toggle('eet-looked-at');
  await Promise.resolve();
  requestAnimationFrame(() => { const drawn = canvas.width; canvas.style.maxWidth = ''; done(drawn); }); }))"""
"""A theme's sheet goes and the next one comes: a ResizeObserver that looks after them both sees no other size."""
POINTS_DRAWN = """() => {
  const strips = [...document.querySelectorAll('.eet-strip')], canvas = strips[0]?.querySelector('canvas');
  if (strips.length === 1 && +strips[0].dataset.points >= 60) return '';
  const kernel = window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status;
  const size = [canvas?.clientWidth, canvas?.clientHeight];
  return JSON.stringify({ strips: strips.map((e) => ({ ...e.dataset })), size, hidden: document.hidden, kernel }); }"""
DIFFERING = """async ([one, other]) => {
  const read = async (data) => {
    const bitmap = await createImageBitmap(await (await fetch('data:image/png;base64,' + data)).blob());
    const canvas = new OffscreenCanvas(bitmap.width, bitmap.height), pen = canvas.getContext('2d');
    pen.drawImage(bitmap, 0, 0);
    return pen.getImageData(0, 0, bitmap.width, bitmap.height); };
  const [a, b] = [await read(one), await read(other)];
  if (a.width !== b.width || a.height !== b.height) return 1;
  let count = 0;
  for (let i = 0; i < a.data.length; i += 4)
    count += [0, 1, 2].some((k) => Math.abs(a.data[i + k] - b.data[i + k]) > 24);
  return count / (a.data.length / 4); }"""


@pytest.fixture
def figures(lab: Lab, lab_server: Server, page: Any) -> Lab:
    """A notebook with a figure in a box, one in a lesson, one as a cell's output, and a strip chart."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab_server.root / "figures.ipynb")
    page.set_viewport_size({"width": 1440, "height": 1600})
    lab.open("figures.ipynb")
    page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Light' })")
    lab.run_all()
    page.wait_for_function("() => document.querySelectorAll('.js-plotly-plot').length >= 3", timeout=60_000)
    page.wait_for_selector(".eet-strip[data-draws]")
    settled(page, lambda page: page.evaluate(POINTS_DRAWN))
    settled(page, fits)
    return lab


def fits(page: Any) -> str:
    """What is wrong with the figures' sizes; "" where nothing is."""
    found = page.evaluate(FIGURES)
    for figure, height in itertools.zip_longest(found, HEIGHTS):
        if figure is None or height is None:
            return f"{len(found)} figures"
        if abs(figure["height"] - height) > 2 or figure["held"] < height - 2:
            return f"height {figure}, should be {height}"
        if not figure["room"] - INNER <= figure["width"] <= figure["room"] + 1:
            return f"width {figure}"
        if not figure["bars"]:
            return f"empty {figure}"
    chart = page.evaluate(CHART)
    for side, seen in (("width", "wide"), ("height", "high")):
        if abs(chart[side] - chart[seen] * chart["density"]) > 1 or chart[seen] < 100:
            return f"chart {chart}"
    return ""


def settled(page: Any, wrong: Callable[[Any], str], seconds: float = 60) -> None:
    """Wait until nothing is wrong, and stays so for a while: plotly.js draws again some time after each event."""
    deadline, right = time.monotonic() + seconds, 0
    while True:
        page.evaluate(TWO_FRAMES)
        told = wrong(page)
        right = 0 if told else right + 1
        assert time.monotonic() < deadline, told
        if right == 4:
            return
        page.wait_for_timeout(150)


def look_alike(page: Any, before: dict[str, str], seconds: float = 20) -> None:
    """Wait until all places look as they did: a busy machine may show what is drawn some frames later."""
    deadline = time.monotonic() + seconds
    for which in before:
        while differing(page, before, which) >= 0.005:
            assert time.monotonic() < deadline, which
            page.wait_for_timeout(150)


def differing(page: Any, before: dict[str, str], which: str = ".eet-strip-canvas") -> float:
    """The share of a place's pixels that are others than before."""
    return page.evaluate(DIFFERING, [before[which], shot(page, which)])


def misread(page: Any, name: str) -> str:
    """What the hover says, if that is not of this bar or does not fit."""
    told = page.evaluate(HOVERS)
    right = len(told) == 1 and told[0][0].startswith(name) and told[0][1]
    return "" if right else f"{name}: {told}"


def shot(page: Any, which: str) -> str:
    page.mouse.move(2, 2)  # the toolbar comes up under the pointer
    return base64.b64encode(page.locator(which).first.screenshot()).decode()


def colors(page: Any) -> dict[str, str]:
    """Of the page's text, of the figure's, and of its title's."""
    return page.evaluate(
        """() => { const box = document.querySelector('.eet-figure-box');
            const of = (e) => getComputedStyle(e).fill;
            const probe = document.body.appendChild(document.createElement('span'));
            probe.style.color = 'var(--jp-ui-font-color1)';
            const page = getComputedStyle(probe).color; probe.remove();
            return { page, tick: of(box.querySelector('.xtick text')), title: of(box.querySelector('.gtitle')) }; }"""
    )


PLACES = (".eet-figure-box .js-plotly-plot", ".eet-strip-canvas", ".jp-OutputArea-child > .jp-RenderedPlotly >> nth=-1")


def test_figures_keep_their_size_pixels_and_colors(figures: Lab, page: Any) -> None:
    """In any window, then in larger type, in another theme and on another screen: one kernel draws them for all."""
    keep_their_size_and_pixels(figures, page)
    grow_with_the_type(figures, page)
    follow_the_theme_and_the_screen(page)


def keep_their_size_and_pixels(figures: Lab, page: Any) -> None:
    before = {which: shot(page, which) for which in PLACES}

    # The window becomes lower, higher, narrower, wider.
    for width, height in ((1440, 1550), (1440, 1600), (1430, 1600), (1000, 1500), (1900, 1700)):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_function(f"() => innerWidth === {width} && innerHeight === {height}")
        settled(page, fits)
    page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    page.set_viewport_size({"width": 500, "height": 1600})
    settled(page, lambda page: page.evaluate(UNREADABLE))
    # The notebook is left hardly any room: in less than its margins plotly.js would fail, for good.
    page.evaluate("() => window.jupyterapp.shell.expandLeft()")
    settled(page, lambda page: page.evaluate(SQUEEZED))
    page.set_viewport_size({"width": 1440, "height": 1600})
    settled(page, fits)
    look_alike(page, before)

    # The page around it becomes narrower and nothing tells plotly.js; hidden, and shown again in another window.
    page.add_style_tag(content=".eet-narrow .eet-bench { max-width: 640px; }")
    page.evaluate("() => document.body.classList.add('eet-narrow')")
    settled(page, fits)
    page.evaluate("() => document.body.classList.remove('eet-narrow')")
    settled(page, fits)
    figures.execute("page.layout.display = 'none'")
    page.wait_for_function("() => document.querySelector('.eet-strip-canvas').clientWidth === 0")
    page.set_viewport_size({"width": 1200, "height": 1600})
    page.wait_for_timeout(300)
    figures.execute("page.layout.display = ''")
    settled(page, fits)
    page.set_viewport_size({"width": 1440, "height": 1600})
    settled(page, fits)

    # Another tab of JupyterLab in front, and back.
    figures.command("launcher:create")
    page.wait_for_selector(".jp-Launcher")
    page.set_viewport_size({"width": 1300, "height": 1600})
    page.wait_for_timeout(300)
    figures.command("docmanager:open", path="figures.ipynb")
    settled(page, fits)
    page.set_viewport_size({"width": 1440, "height": 1600})
    settled(page, fits)


def grow_with_the_type(figures: Lab, page: Any) -> None:
    before = {which: shot(page, which) for which in PLACES}
    high = "(all) => all.map((e) => e.getBoundingClientRect().height)"
    words = ".eet-figure-box .gtitle, .eet-figure-box .ytick text"
    normal = page.eval_on_selector_all(words, high)
    page.add_style_tag(content=".eet-large { --eet-scale: 1.5; }")
    page.evaluate("() => document.querySelector('.eet-bench').classList.add('eet-large')")
    box, held = ".eet-figure-box .js-plotly-plot", ".eet-figure-box .eet-figure"
    page.wait_for_function(
        f"() => {{ const place = (e) => document.querySelector(e).getBoundingClientRect();"
        f" const a = place('{box} .main-svg'), b = place('{held}');"
        " return Math.abs(b.height - 390) < 2 && Math.abs(a.height - 390) < 3 && Math.abs(a.width - b.width) < 4; }"
    )
    assert len(normal) > 2
    grown = "(all, normal) => all.length === normal.length && all.map((e) => e.getBoundingClientRect().height)"
    grown += ".every((high, i) => Math.abs(high / normal[i] - 1.5) < 0.1)"
    settled(page, lambda page: "" if page.eval_on_selector_all(words, grown, normal) else f"not 1.5 times {normal}")
    settled(page, lambda page: "" if differing(page, before) > 0.005 else "the chart's own words did not grow")
    # What a hover says is of the bar under the pointer, and the words fit into their boxes.
    figures.execute("box.show(plot(one, 'memory').update_layout(height=260))")
    page.wait_for_function(f"() => document.querySelectorAll('{box} .barlayer .point').length > 4")
    for at, name in enumerate(("weights", "weights", "KV cache", "KV cache")):
        page.mouse.move(2, 2)
        page.wait_for_function(f"() => ({HOVERS})().length === 0", timeout=20_000)
        page.locator(f"{box} .barlayer .point").nth(at).hover(force=True)
        settled(page, partial(misread, name=name), seconds=20)
    page.mouse.move(2, 2)
    figures.execute("box.show(plot(two, 'waterfall').update_layout(height=260))")
    page.evaluate("() => document.querySelector('.eet-bench').classList.remove('eet-large')")
    settled(page, fits)
    look_alike(page, before)


def follow_the_theme_and_the_screen(page: Any) -> None:
    before = {which: shot(page, which) for which in PLACES}

    # The dark theme and back: text follows at once, and so does what is drawn on a canvas.
    light = colors(page)
    assert light["tick"] == light["title"] == light["page"]
    page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Dark' })")
    page.wait_for_selector("body[data-jp-theme-light=false]", state="attached")
    settled(page, fits)
    dark = colors(page)
    assert dark["tick"] == dark["title"] == dark["page"] != light["page"]
    settled(page, lambda page: "" if differing(page, before) > 0.5 else "the same paper")
    page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Light' })")
    page.wait_for_selector("body[data-jp-theme-light=true]", state="attached")
    settled(page, fits)
    look_alike(page, before)

    assert page.evaluate(DRAWN_IN_A_SIZE_THAT_NOBODY_TELLS) == 300
    settled(page, fits)
    look_alike(page, before)

    # The window goes to a screen of twice the density, and back. (The driver sets the density without an event, as some
    # browsers do; the width that is new the first time would tell of it.)
    session = page.context.new_cdp_session(page)
    for width, density in ((1400, 2), (1400, 1), (1440, 1)):
        size = {"width": width, "height": 1600, "mobile": False, "deviceScaleFactor": density}
        session.send("Emulation.setDeviceMetricsOverride", size)
        page.wait_for_function(f"() => devicePixelRatio === {density} && innerWidth === {width}")
        settled(page, fits)

    # The toolbar stands beside the plot and the words, and sends nothing anywhere.
    page.locator(".eet-figure-box .js-plotly-plot").hover()
    covered = page.evaluate(
        """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap((e) => {
            const bar = e.querySelector('.modebar').getBoundingClientRect();
            return [...e.querySelectorAll('.main-svg text, .plotbg, .nsewdrag')].filter((part) => {
                const it = part.getBoundingClientRect();
                return it.width && it.right > bar.left + 1 && it.left < bar.right
                  && it.top < bar.bottom && it.bottom > bar.top; })
              .map((part) => part.textContent || part.className.baseVal); })"""
    )
    assert covered == []
    names = page.eval_on_selector_all(".modebar-btn", "all => all.map(e => e.dataset.title)")
    assert names and not [name for name in names if "loud" in name]

    # In little room a name of the strip chart keeps what tells it from the other.
    page.locator(".eet-strip").evaluate("(chart) => { chart.style.maxWidth = '200px'; }")
    expect(page.locator(".eet-strip-legend b").first).not_to_contain_text("ms", use_inner_text=True)
    assert "run (1)" in page.locator(".eet-strip-legend").inner_text()

    # The switch of the strip chart's axis says what it is and how it stands.
    switch = page.get_by_role("button", name="logarithmic axis of steps")
    expect(switch).to_have_attribute("aria-pressed", "false")
    switch.press("Enter")
    expect(switch).to_have_attribute("aria-pressed", "true")
    assert page.failures == [] and page.external == []
