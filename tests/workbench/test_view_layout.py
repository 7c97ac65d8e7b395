"""What is in view of the page, at which width, type size and theme; what stays in its place."""

from __future__ import annotations

import itertools

import pytest
from playwright.sync_api import expect

from eet_lab.bench import load_result
from eet_lab.figures.plans import HEAD
from eet_lab.figures.players import Race
from eet_lab.workbench.history import SHIPPED
from eet_lab.workbench.views import answer
from workbench import page_states
from workbench.page_harness import Open, sent, show

pytestmark = pytest.mark.browser

ON_ONE_SCREEN = {"width": 1390, "height": 770}
PLANNED = [["chunked_ascending", "1.148 MiB", "1.556", "6", "1.148 MiB", "0.0528 ms"]]
IN_JUPYTERLAB = {"width": 1272, "height": 731}
"""What JupyterLab leaves of a window of 1440 x 900 with its sidebar folded."""
HIDDEN = """(names) => [...document.querySelectorAll(names)].filter((each) => {
  const place = each.getBoundingClientRect();
  const box = each.closest("td, th, .eet-sheet-head, .eet-tech-card").getBoundingClientRect();
  const inside = place.left >= box.left - 1 && place.right <= box.right + 1;
  return each.scrollWidth > each.clientWidth || !inside || place.top < box.top || place.bottom > box.bottom;
}).map((each) => each.textContent)"""
"""What is cut, or does not lie in its own cell, head or card."""

CUT = """(names) => [...document.querySelectorAll(names)].filter((each) => each.offsetParent && (
  each.scrollWidth > each.clientWidth + 1 || each.scrollHeight > each.clientHeight + 1))
.map((each) => each.textContent)"""
"""What is in the page, and not all of it in view."""
CAPTIONS = ".eet-sheet-told, .eet-recipe, .eet-effects-of, .eet-card-head > *"
CAPTIONS += ", .eet-card-opener, .eet-number-change, .eet-tech-title"

PLACES = [".eet-bar", ".eet-techniques", ".eet-tech-card", ".eet-inputs", ".eet-live", ".eet-numbers"]
PLACES += [".eet-do-run", ".eet-do-compare", ".eet-do-ladder"]
RECTS = """(names) => Object.fromEntries([...names, ".eet-runs"]
    .map((name) => [name, document.querySelector(name).getBoundingClientRect()])
    .map(([name, { x, y, width, height }]) => [name, name === ".eet-runs" ? [x, y] : [x, y, width, height]]))"""


def test_the_headline_leads_to_the_answer(opened: Open) -> None:
    page = opened(page_states.compared(), width=600, height=500)
    page.click(".eet-headline")
    page.wait_for_function("document.querySelector('.eet-answer').getBoundingClientRect().top < 300")
    assert page.evaluate("document.activeElement.textContent") == "Latency"


def test_a_run_that_is_opened_comes_into_view_below_the_bar(opened: Open) -> None:
    page = opened(page_states.laddered(), height=500)
    page.locator(".eet-runs").evaluate("(runs) => runs.scrollIntoView({ block: 'end' })")
    page.click('[aria-label^="Open ladder 1"]')
    below = "document.querySelector('.eet-numbers').getBoundingClientRect().top - "
    below += "document.querySelector('.eet-bar').getBoundingClientRect().bottom"
    page.wait_for_function(f"{below} >= 0 && {below} < 20")
    assert page.locator(".eet-numbers").bounding_box()["y"] < 500, "in the window"


def test_captions_and_progress_are_whole(opened: Open) -> None:
    laddered, running = page_states.laddered(), page_states.busy()
    why = "Activations take 0.73 MiB more: a pass over whole prompts is wider than one over single tokens."
    laddered["answer"]["note"] = {"text": f"{why} Ladder shows which technique costs it.", "kind": "plain"}
    laddered["techniques"]["card"] |= {"title": "Packed prefill", "lesson": {"label": "lesson 02", "href": "02"}}
    row = next(each for each in laddered["techniques"]["list"] if each["name"] == laddered["techniques"]["selected"])
    row["needs"] = "needs Pre-padding, Mask removal"
    facts = "1.56 B parameters · 48 layers · 1,600 wide · context 1,024 · bfloat16 on cuda:0"
    laddered["bar"] |= {"facts": facts, "badge": {"text": "random weights: for timing", "kind": "warn"}}
    laddered["bar"]["against"] = laddered["techniques"]["recipe"] = "all - mask removal - packed prefill"
    running["bar"]["status"]["text"] = "measuring with the live view paused: baseline"
    page = opened(laddered)
    below = "(all) => all.map((each) => each.getBoundingClientRect().bottom)"
    for width, large in itertools.product((1420, 1281, 836, 400), (False, True)):  # JupyterLab's of 1440, 1000, 500
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate("(on) => document.querySelector('.eet-bench').classList.toggle('eet-large', on)", large)
        show(page, laddered)
        assert page.evaluate(CUT, f"{CAPTIONS}, .eet-about, .eet-banner, .eet-under") == [], (width, large)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, large
        page.evaluate("document.querySelector('.eet-card-opener').click()")
        assert page.evaluate(CUT, ".eet-card-head > *") == [], (width, large)
        show(page, running)
        [told], [progress] = (page.locator(name).evaluate_all(below) for name in (".eet-told-block", ".eet-share"))
        assert progress <= told and page.locator(".eet-share").is_visible(), (width, large)


SMALL_PRINT = """(names) => [...document.querySelectorAll(names)].filter((each) => each.textContent).map((each) => {
  const luminance = (color) => {
    const pen = new OffscreenCanvas(1, 1).getContext("2d");
    pen.fillStyle = color;
    pen.fillRect(0, 0, 1, 1);
    const parts = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((c) => c / 255);
    const [r, g, b] = parts.map((c) => (c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  let paper = each;
  while (getComputedStyle(paper).backgroundColor === "rgba(0, 0, 0, 0)") paper = paper.parentElement;
  const style = getComputedStyle(each), colors = [style.color, getComputedStyle(paper).backgroundColor];
  const [low, high] = colors.map(luminance).sort((a, b) => a - b), row = each.closest("li, section");
  const fits = each.scrollHeight <= each.clientHeight + 1 && each.offsetHeight <= row.clientHeight;
  return [each.textContent, parseFloat(style.fontSize), (high + .05) / (low + .05), fits || style.display === "inline"];
})"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_techniques_need_and_bring_can_be_read(opened: Open, theme: str) -> None:
    """Of 12 px, with a contrast of 4.5, and whole in its own line of the list, at 1440 x 900."""
    states = page_states.laddered()
    rows = states["techniques"]["list"][-4:]
    for row, why in zip(rows, ("", "", "", "CUDA kernels need an NVIDIA GPU"), strict=True):
        row |= {"effect": None, "blocked": why, "blocked_short": why and "needs an NVIDIA GPU"}
        row["needs"] = "needs Memory reuse, Packed prefill"
    rows[0]["lacks"] = True
    apart = {"text": "cannot tell apart", "kind": "dim", "detail": "per token faster"}
    states["techniques"]["list"][0]["effect"] |= apart
    page = opened(states, width=IN_JUPYTERLAB["width"] + 16, height=IN_JUPYTERLAB["height"] + 8, theme=theme)
    names = ".eet-tech :is(.eet-effect-words, .eet-effect-text, .eet-numerics), .eet-knob-row small"
    found = page.evaluate(SMALL_PRINT, f"{names}, .eet-card-head span")
    assert {"needs an NVIDIA GPU", row["needs"], f"{row['needs']}\u00a0✓"} <= {text for text, *_ in found}
    assert [each for each in found if each[1] < 12 or each[2] < 4.5 or not each[3]] == []


# 1255: what a scrollbar leaves of JupyterLab's 1,270 px at 1440 x 900
@pytest.mark.parametrize(
    "width, large", [(1270, False), (1390, False), (2400, False), (1270, True), (1255, True), (732, False)]
)
def test_all_of_a_run_is_in_view_and_nothing_covers_it(opened: Open, width: int, large: bool) -> None:
    states = page_states.laddered()
    named = {"name": "My <b>ladder</b>", "note": "noisy box, a second one reading & more"}
    states["runs"]["rows"][0] |= {"recipe": "all - mask removal - packed prefill against all", **named}
    states["runs"]["rows"][1]["about"] = f"gpt2-xl, 8 prompts, on {'Accelerator' * 12}"
    page = opened(states, width=width, large=large)  # 1270: JupyterLab at 1440 px
    assert page.locator(".eet-scroll").evaluate("(list) => list.scrollWidth - list.clientWidth") <= 0
    assert page.evaluate(HIDDEN, ".eet-name, .eet-run-recipe, .eet-note-text, .eet-name-more > :first-child") == []


@pytest.mark.parametrize(
    "width, large", [(1270, False), (1390, False), (2400, False), (1255, True), (732, False), (400, True)]
)
def test_a_table_is_not_cut(opened: Open, width: int, large: bool) -> None:
    """In a narrow window it goes on to the right: by a key, and behind a shadow that says so."""
    states = page_states.tabled()
    states["answer"]["tables"] += [answer.table(load_result(SHIPPED / "h200-compare-demo.json"))]
    states["answer"]["tables"] += [{"head": HEAD, "rows": PLANNED, "notes": []}]
    body = opened(states, width=width, large=large).locator(".eet-sheet-body")
    more = body.evaluate("(body) => body.scrollWidth - body.clientWidth")
    assert more <= 0 or width < 800
    if more > 0:
        body.press("ArrowRight")
        body.page.wait_for_function("document.querySelector('.eet-sheet-body').scrollLeft > 0")
        assert "gradient" in body.evaluate("(body) => getComputedStyle(body).backgroundImage")


@pytest.mark.parametrize("width, large", [(1270, False), (1270, True), (732, False)])
def test_a_file_that_cannot_be_read_is_one_line(opened: Open, width: int, large: bool) -> None:
    states = page_states.laddered()
    whole = states["runs"]["rows"][0]
    why = f"is not a saved result: it is not JSON ({'Unterminated string. ' * 20})"
    cut = whole | {"id": "cut", "name": "cut.json", "label": "cut.json", "problem": why, "kind": "", "recipe": ""}
    states["runs"]["rows"].insert(1, cut)
    page = opened(states, width=width, large=large)
    rows = page.locator(".eet-runs tbody tr")
    assert rows.nth(1).bounding_box()["height"] <= rows.nth(0).bounding_box()["height"]
    assert page.locator(".eet-scroll").evaluate("(list) => list.scrollWidth - list.clientWidth") <= 0
    assert rows.nth(1).locator("button, input").all_inner_texts() == ["Export", "Delete"]
    rows.nth(1).locator("text=Export").click()
    assert sent(page) == [{"view": "runs", "command": "export", "id": "cut", "format": "json"}]
    rows.nth(1).locator("text=Delete").click()
    assert rows.nth(2).locator("text=Yes").is_visible() and sent(page) == []


@pytest.mark.parametrize("width", [440, 848, 1288])
def test_a_tile_shows_all_of_its_interval(opened: Open, width: int) -> None:
    states = page_states.compared()
    states["answer"]["tiles"][0]["change"] = {"text": "cannot tell apart (0.31 to 3.97 × faster)", "kind": "dim"}
    page = opened(states, width=width)
    below = "(all) => all.map((each) => each.getBoundingClientRect().bottom)"
    ends = page.locator(".eet-number-change").evaluate_all(below)
    assert all(end < tile for end, tile in zip(ends, page.locator(".eet-number").evaluate_all(below), strict=True))


@pytest.mark.parametrize("width, large", [(1270, False), (846, False), (500, False), (1270, True)])
def test_every_tab_is_in_sight(opened: Open, width: int, large: bool) -> None:
    states = page_states.compared()
    states["answer"]["tabs"] = [{"name": name, "title": title} for name, title in answer.TITLES.items()]
    page = opened(states, width=width, large=large)
    assert page.evaluate(HIDDEN, ".eet-tab-row button") == []
    tools = page.locator(".eet-sheet-tools").bounding_box()
    assert page.get_by_role("tab").last.bounding_box()["y"] < tools["y"] and tools["x"] + tools["width"] < width


@pytest.mark.parametrize("width, height, large", [(846, 740, False), (1270, 640, True)])
def test_the_answer_is_in_view_where_there_is_less_room(opened: Open, width: int, height: int, large: bool) -> None:
    page = opened(page_states.compared(), width=width, height=height, large=large)
    assert page.locator(".eet-numbers").bounding_box()["y"] > 0
    assert page.locator(".eet-stage").bounding_box()["y"] < height, "the top of the figure"


def test_what_a_card_unfolds_is_in_view(opened: Open) -> None:
    page = opened(page_states.compared())
    page.click(".eet-tech-title >> text=Memory reuse")
    assert page.evaluate(HIDDEN, ".eet-tech-card small, .eet-tech-card summary") == [], "help of knobs"
    page.click("summary >> text=How it works")
    page.wait_for_function("document.querySelector('.eet-tech-card').scrollTop > 0")
    assert page.evaluate(HIDDEN, ".eet-tech-card summary, .eet-tech-card summary + p") == []


def test_a_view_that_ends_hears_no_more(opened: Open) -> None:
    page = opened(page_states.compared())
    page.evaluate("ends.bar()")
    page.focus(".eet-do-run")
    page.keyboard.press("c")
    page.evaluate("(states) => show({ bar: states.bar })", page_states.busy())
    assert sent(page) == [] and page.locator("text=Measuring pair").count() == 0


@pytest.mark.parametrize("large", [False, True])
def test_no_width_scrolls_sideways(opened: Open, large: bool) -> None:
    page = opened(page_states.laddered(), large=large)
    for name in ("laddered", "failed", "tabled", "busy"):
        show(page, page_states.ALL[name]())
        page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        for width in (500, 900, 1440, 2560):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (name, width)


@pytest.mark.parametrize("width, large", [(1406, False), (1406, True), (1000, False), (500, False)])
def test_nothing_moves_when_a_run_starts_or_ends(opened: Open, width: int, large: bool) -> None:
    page = opened(page_states.empty(), width=width, large=large)
    before = page.evaluate(RECTS, PLACES)
    starting = page_states.busy()
    starting["answer"] = page_states.empty()["answer"] | {"mode": "running"}
    stopped = page_states.compared()
    stopped["bar"]["headline"], stopped["bar"]["status"] = None, {"text": "Stopped. " * 30, "kind": "warn"}
    noted = page_states.compared()
    noted["answer"]["note"] = {"text": "A remark. " * 40, "kind": "warn"}
    later = {"forecast": page_states.forecast(), "starting": starting, "busy": page_states.busy()}
    later |= {"compared": page_states.compared(), "stopped": stopped, "noted": noted, "failed": page_states.failed()}
    for name, states in later.items():
        show(page, states)
        assert page.evaluate(RECTS, PLACES) == before, name


def test_all_of_it_is_on_one_screen(opened: Open) -> None:
    width, height = ON_ONE_SCREEN["width"] + 16, ON_ONE_SCREEN["height"] + 16  # the harness's margin
    page = opened(page_states.laddered(), width=width, height=height)
    for name in (".eet-tech >> nth=9", ".eet-live", ".eet-numbers", ".eet-stage", ".eet-runs tbody tr >> nth=1"):
        box = page.locator(name).bounding_box()
        assert box["y"] + box["height"] <= height, name


@pytest.mark.parametrize("width", [IN_JUPYTERLAB["width"], 1020])  # its sidebar is folded, or open
def test_all_choices_are_in_view_in_jupyterlab(opened: Open, width: int) -> None:
    height = IN_JUPYTERLAB["height"] + 8  # the harness's margin
    page = opened(page_states.compared(), width=width + 16, height=height)
    for name in (".eet-inputs", ".eet-stage"):
        box = page.locator(name).bounding_box()
        assert box["y"] + box["height"] <= height, name


@pytest.mark.parametrize("width, large", [(1288, False), (1288, True), (2400, False), (732, False)])
def test_a_card_opens_without_moving_its_neighbours(opened: Open, width: int, large: bool) -> None:
    states, places = page_states.compared(), [".eet-techniques", ".eet-inputs", ".eet-live", ".eet-numbers"]
    page = opened(states, width=width, height=1800, large=large)  # nothing is scrolled to
    before, knobs = page.evaluate(RECTS, places), states["techniques"]["card"]["knobs"]
    for shown in ([], knobs, [each | {"name": f"{each['name']}{i}"} for i in range(3) for each in knobs]):
        states["techniques"]["card"]["knobs"] = shown
        show(page, states)
        assert page.evaluate(RECTS, places) == before, len(shown)
        page.click(".eet-tech-title >> text=Memory reuse")
        assert page.evaluate(RECTS, places) == before, len(shown)
        page.click("summary >> text=How it works")
        assert page.evaluate(RECTS, places) == before, len(shown)
        page.click("summary >> text=How it works")
        page.keyboard.press("Escape")


# What JupyterLab leaves of a window of 1000 x 800, and of 1440 x 900 for larger type.
@pytest.mark.parametrize(
    "width, height, large, stage", [(848, 656, False, 60), (848, 656, True, 0), (1288, 755, True, 90)]
)
def test_charts_and_answer_share_the_first_view(opened: Open, width: int, height: int, large: bool, stage: int) -> None:
    page = opened(page_states.busy(), width=width, height=height, large=large)
    for states in (page_states.busy(), page_states.compared()):
        show(page, states)
        for name in (".eet-live", ".eet-numbers"):
            box = page.locator(name).bounding_box()
            assert box["y"] + box["height"] <= height, name
        assert page.locator(".eet-stage").bounding_box()["y"] <= height - stage


def test_a_card_of_one_column_covers_what_it_does_not_move(opened: Open) -> None:
    page = opened(page_states.laddered(), width=848, height=656)
    places = page.evaluate(RECTS, [".eet-live", ".eet-numbers"])
    card = page.locator(".eet-tech-card")
    expect(card).to_be_hidden()
    expect(page.locator(".eet-numerics:visible")).to_have_count(page.locator(".eet-tech").count())
    assert page.evaluate(CUT, ".eet-fold-line, .eet-numerics, .eet-tech-title") == []
    page.click(".eet-tech-title >> text=Memory reuse")
    expect(card).to_be_visible()
    assert page.evaluate(RECTS, [".eet-live", ".eet-numbers"]) == places
    card.locator("select").first.focus()
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    page.focus('[role=switch][tabindex="0"]')
    page.keyboard.press("Shift+Tab")  # for a keyboard, what opens it comes before the switches
    page.keyboard.press("Enter")
    expect(card).to_be_visible()
    page.click(".eet-do-compare")
    expect(card).to_be_hidden()


@pytest.mark.parametrize("width, large", [(1406, False), (1288, True), (848, False), (732, False)])
def test_what_a_run_brings_comes_into_view(opened: Open, width: int, large: bool) -> None:
    page = opened(page_states.compared(), width=width, height=500, large=large)
    page.locator(".eet-runs").evaluate("(runs) => runs.scrollIntoView({ block: 'end' })")
    page.click(".eet-do-compare")
    below = "document.querySelector('.eet-live').getBoundingClientRect().top - "
    below += "document.querySelector('.eet-bar').getBoundingClientRect().bottom"
    page.wait_for_function(f"{below} >= 0 && {below} < 20")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(opened: Open, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = opened(page_states.empty(), theme=theme)
    options = {"resultTypes": ["violations"]}
    if theme == "dark":  # colors are all that is different there
        options["runOnly"] = ["color-contrast"]
    for name in ("empty", "busy", "tabled", "gone"):
        if name == "gone":
            page.evaluate("gone()")
        else:
            show(page, page_states.ALL[name]())
        page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        found = axe.Axe().run(page, options=options).response["violations"]
        serious = [(v["id"], [n["html"] for n in v["nodes"]]) for v in found if v["impact"] in ("serious", "critical")]
        assert serious == [], name


RACE = """async ([css, source, race]) => {
  const style = document.createElement("style"), el = document.createElement("div");
  style.textContent = css;
  document.head.append(style);
  const stage = document.querySelector(".eet-stage");
  stage.classList.add("eet-for-race");
  stage.replaceChildren(el);
  const module = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  module.default.render({ model: { get: () => race, on() {}, off() {} }, el });
}"""

LINES = "(all) => all.map((each) => each.clientHeight / parseFloat(getComputedStyle(each).lineHeight))"


def test_lanes_stay_in_line_and_take_larger_type(opened: Open) -> None:
    lanes = [
        {"name": name, "color": "gray", "ends_ms": [9000], "tokens": [512], "pieces": [[0, 0, "word " * 200]]}
        for name in ("all", "all - persistent layers + int8 weights")
    ]
    page = opened(page_states.compared(), width=1270)
    page.evaluate(RACE, [Race._css, Race._esm, {"prompts": ["a"] * 8, "lanes": lanes, "begin": False}])
    places = "(all) => all.map((each) => [each.getBoundingClientRect().y, each.getBoundingClientRect().height])"
    sizes = []
    for width, large in ((1270, False), (1270, True), (846, False), (732, False)):
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate("(on) => document.querySelector('.eet-bench').classList.toggle('eet-large', on)", large)
        for name in (".eet-lane-track", ".eet-lane-count", ".eet-lane-texts"):
            first, second = page.locator(name).evaluate_all(places)
            assert first == pytest.approx(second), (name, width, large)
        assert min(page.locator(".eet-lane-text").evaluate_all(LINES)) >= 3, "lines of each prompt"
        assert page.locator(".eet-stage").evaluate("(e) => e.scrollHeight - e.clientHeight") <= 0
        names = ".eet-lane-count", ".eet-player-title"
        sizes += [page.locator(name).first.bounding_box()["height"] for name in names]
    assert sizes[2] == pytest.approx(1.35 * sizes[0], rel=0.1) and sizes[3] == pytest.approx(1.35 * sizes[1], rel=0.1)


def test_a_race_that_ran_unseen_is_at_the_end_of_its_texts(opened: Open) -> None:
    lane = {"name": "", "color": "gray", "ends_ms": [1], "tokens": [1], "pieces": [[0, 0, "word<|endoftext|>" * 200]]}
    page = opened(page_states.compared(), width=1270)
    page.evaluate("document.querySelector('.eet-stage').style.display = 'none'")
    page.evaluate(RACE, [Race._css, Race._esm, {"prompts": ["asked"], "lanes": [lane], "begin": True}])
    page.wait_for_function("document.querySelector('.eet-lane-said').textContent")
    page.evaluate("document.querySelector('.eet-stage').style.display = ''")
    end = "({ scrollTop, scrollHeight, clientHeight }) => scrollHeight - clientHeight - scrollTop"
    page.wait_for_function(f"({end})(document.querySelector('.eet-lane-text')) < 2")
    assert page.locator(".eet-lane-text").evaluate("(text) => text.scrollTop") > 0
    assert page.locator(".eet-lane-said small").all_text_contents() == [" [end of text] "] * 200
    assert page.locator(".eet-lane-count").text_content() == "1 of 1 token"
