"""The page's views in a real Chromium, on a mock model: no kernel and no JupyterLab."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from eet_lab.figures.script import compact
from eet_lab.paths import PACKAGE
from eet_lab.workbench.history import in_memory
from eet_lab.workbench.page import DOM, VIEWS
from eet_lab.workbench.views.runs import MOST_UPLOAD_BYTES, packed
from workbench import page_states
from workbench.page_harness import Open, sent, show

pytestmark = pytest.mark.browser

RECORDED = "gpt2-xl, 8 prompts, H200"
"""The name of the recorded runs of GPT-2 XL."""
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
GONE = "The kernel was restarted. Run the cell again (Shift+Enter)"


def spoilt(value: Any) -> Any:
    """The same state with markup in each of its texts."""
    if isinstance(value, dict):
        return {key: spoilt(each) for key, each in value.items()}
    if isinstance(value, list):
        return [spoilt(each) for each in value]
    return value + HOSTILE if isinstance(value, str) else value


@pytest.mark.parametrize("name", ["laddered", "tabled", "failed"])
def test_strings_are_text(opened: Open, name: str) -> None:
    states = spoilt(page_states.ALL[name]())
    states["techniques"]["card"]["lesson"]["href"] = "javascript:window.hacked=1"
    page = opened(states)
    page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    page.wait_for_timeout(100)
    assert page.evaluate("window.hacked") is None
    assert page.locator(".eet-bench :is(img, script)").count() == 0
    assert page.locator('[href^="javascript"]').count() == 0
    for view in ("bar", "techniques", "inputs") + (() if name == "failed" else ("answer", "runs")):
        assert HOSTILE in page.locator(f".eet-{view}").inner_text(), view


def keys_of(value: Any) -> set[str]:
    """Every name in a state."""
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_what_is_sent_is_read() -> None:
    for name, script in VIEWS.items():
        sent = set().union(*(keys_of(make()[name]) for make in page_states.ALL.values()))
        assert [key for key in sorted(sent) if not re.search(rf"\b{key}\b", DOM + script)] == [], name


def test_a_style_that_is_made_small_says_the_same(opened: Open) -> None:
    page = opened(page_states.empty())
    rules = "(text) => { const sheet = new CSSStyleSheet(); sheet.replaceSync(text); return [...sheet.cssRules]"
    rules += ".map((rule) => rule.cssText); }"
    styles = sorted(PACKAGE.rglob("*.css"))
    assert len(styles) == 2
    for path in styles:
        assert page.evaluate(rules, compact(path)) == page.evaluate(rules, path.read_text(encoding="utf-8")), path.name


BARS = """() => [...document.querySelectorAll(".eet-tech")].map((row) => {
  const bar = row.querySelector(".eet-effect-bar"), title = row.querySelector(".eet-tech-title").textContent;
  if (!bar) return [title, null];
  const whole = bar.getBoundingClientRect(), { left, right } = bar.querySelector("i").getBoundingClientRect();
  const zero = whole.left + parseFloat(bar.style.getPropertyValue("--zero")) / 100 * whole.width;
  return [title, [left - zero, right - zero].map(Math.round)];
})"""
"""Where the bar of each technique begins and ends, in px from its zero line."""

CUT = """() => [...document.querySelectorAll(".eet-effect-text")].filter((text) =>
  text.scrollWidth > text.clientWidth + 1 ||
  text.getBoundingClientRect().right > text.closest("li").getBoundingClientRect().right
).map((text) => text.textContent)"""
"""What is written beside the bars and does not fit."""


def test_what_saves_goes_to_the_left_of_zero_and_what_costs_to_the_right(opened: Open) -> None:
    states = page_states.laddered()
    page = opened(states)
    bars = dict(page.evaluate(BARS))
    assert page.evaluate(CUT) == []
    kinds = {row["title"]: row["effect"]["kind"] for row in states["techniques"]["list"] if row["effect"]}
    assert {"good", "bad"} <= set(kinds.values())
    for title, kind in kinds.items():
        left, right = bars[title]
        sides = {"good": left < 0 and right <= 2, "bad": 0 <= left < right, "dim": right - left <= 2}  # any bar: 2 px
        assert sides[kind], (title, bars)


MINE = "compare 1"
"""The run of that name, whose id is another."""

CLICKS = [
    (".eet-do-run", {"view": "bar", "command": "run"}),
    (".eet-do-ladder", {"view": "bar", "command": "ladder"}),
    (".eet-larger", {"view": "bar", "command": "larger_type", "on": True}),
    ("text=Watch GPT-2 XL", {"view": "bar", "command": "replay", "id": page_states.RECORDING}),
    (
        '[aria-label="Mask removal"]',
        {"view": "techniques", "command": "toggle", "name": "mask_removal", "on": False},
    ),
    (".eet-tech-title >> nth=1", {"view": "techniques", "command": "select", "name": "mask_removal"}),
    ("role=tab[name='Peak memory']", {"view": "answer", "command": "tab", "name": "memory"}),
    (".eet-sheet-tools [aria-pressed]", {"view": "answer", "command": "scale", "name": "log", "on": False}),
    ("role=button[name='Export: CSV']", {"view": "answer", "command": "export", "id": "", "format": "csv"}),
    ('[aria-label^="Tick compare 1,"]', {"view": "runs", "command": "tick", "id": MINE, "on": True}),
    (".eet-pin", {"view": "runs", "command": "pin", "id": MINE, "on": True}),
    ('[aria-label^="Open compare 1,"]', {"view": "runs", "command": "open_run", "id": MINE}),
    ('[aria-label^="Replay compare 1,"]', {"view": "runs", "command": "replay", "id": MINE}),
]


def test_a_click_sends_its_command(opened: Open) -> None:
    states = page_states.compared()
    ids = {row["name"]: row["id"] for row in states["runs"]["rows"]}
    page = opened(states)
    page.click("text=Export…")
    for click, command in CLICKS:
        page.click(click)
        assert sent(page) == [command | ({"id": ids[MINE]} if command.get("id") == MINE else {})], click


def test_choices_send_their_own_values(opened: Open) -> None:
    states = page_states.compared()
    states["techniques"]["card"]["knobs"] = page_states.knobs()
    page = opened(states)
    page.select_option('[aria-label="dtype"]', "float16")
    page.get_by_label("KV layout").select_option("32")
    page.get_by_label("LM head").click()
    bucket = page.get_by_label("Bucket")
    bucket.fill("512")
    assert [c["value"] for c in sent(page)] == ["float16", 32, False]  # half a number is nobody's wish
    bucket.press("Enter")
    assert sent(page) == [
        {"view": "techniques", "command": "turn", "name": "memory_reuse", "knob": "bucket", "value": 512}
    ]
    page.wait_for_timeout(1200)
    assert bucket.input_value() == "256"  # the state has not followed: what was refused goes back
    bucket.fill("512")
    bucket.press("Enter")
    assert [c["value"] for c in sent(page)] == [512]  # and may be asked for again
    assert page.get_by_label("LM head").is_checked()


def test_what_is_typed_is_not_overwritten(opened: Open) -> None:
    states = page_states.compared()
    page = opened(states)
    page.click("summary >> text=Prompts")
    prompt = page.locator('[aria-label="Prompt 2"]')
    prompt.focus()
    prompt.evaluate("(node) => node.setSelectionRange(2, 2)")
    page.keyboard.type("great ", delay=20)
    page.wait_for_function("window.sent.at(-1)?.text === 'A great transformer reads'")
    told = sent(page)
    assert all(each["command"] == "edit_prompt" and each["index"] == 1 for each in told)
    assert len(told) < len("great "), "a pause in typing tells of it, not each key"
    states["inputs"]["prompts"]["rows"][1]["text"] = "A gr"  # an answer that comes late
    states["inputs"]["prompts"]["rows"][1]["tokens"] = 77
    show(page, states)
    assert page.locator(".eet-tokens >> nth=1").inner_text() == "77"
    assert prompt.input_value() == "A great transformer reads"
    assert prompt.evaluate("(node) => [document.activeElement === node, node.selectionStart]") == [True, 8]
    page.focus(".eet-do-run")
    page.wait_for_timeout(1200)
    assert prompt.input_value() == "A gr"  # nobody types any more: the state is what counts


def test_several_prompts_are_pasted_line_by_line(opened: Open) -> None:
    page = opened(page_states.compared())
    page.click("summary >> text=Prompts")
    page.click("text=Paste several…")
    page.get_by_label("Several prompts").fill("one\n\n  \ntwo <b>\n")
    page.click("text=Add each line")
    assert sent(page) == [{"view": "inputs", "command": "add_prompts", "lines": ["one", "two <b>"]}]
    assert page.get_by_label("Several prompts").count() == 0


def test_folds_and_scroll_stay_when_the_state_changes(opened: Open) -> None:
    states = page_states.laddered()
    page = opened(states)
    page.click("summary >> text=Generation")
    page.click("summary >> text=How it works")
    page.wait_for_function("document.querySelector('.eet-tech-card').scrollTop > 0")  # the fold has come up
    page.evaluate("document.querySelector('.eet-tech-card').scrollTop = 20")
    states["techniques"]["card"]["knobs"].pop(0)
    states["inputs"]["generation"]["summary"] = "32 new"
    show(page, states)
    assert page.get_by_label("New tokens").is_visible() and page.locator("text=32 new").is_visible()
    assert page.evaluate("document.querySelector('.eet-tech-card').scrollTop") == 20
    source = page.locator("pre.eet-source").inner_text()
    assert source.startswith("@dataclass") and '"""' not in source.split("def ")[0] and "\n    def " in source


def test_a_run_is_renamed_in_place(opened: Open) -> None:
    states = page_states.laddered()
    ids = {row["name"]: row["id"] for row in states["runs"]["rows"]}
    page = opened(states)
    page.click('[aria-label^="Rename no graphs,"]')
    page.keyboard.type("without graphs")
    page.keyboard.press("Escape")
    assert sent(page) == [] and page.locator(".eet-editor").count() == 0
    page.click('[aria-label^="Rename no graphs,"]')
    page.keyboard.type("without graphs")
    page.keyboard.press("Enter")
    page.click('[aria-label^="Note of before the fix,"][aria-label$=": driver 580, cold"]')
    page.keyboard.press("Delete")
    page.focus(".eet-do-run")  # left, which keeps it
    assert sent(page) == [
        {"view": "runs", "command": "rename", "id": ids["no graphs"], "text": "without graphs"},
        {"view": "runs", "command": "annotate", "id": ids["before the fix"], "text": ""},
    ]
    page.click('[aria-label^="Rename no graphs,"]')
    page.keyboard.press("Delete")
    page.keyboard.press("Enter")
    assert sent(page)[-1]["text"] == "", "which brings back the first name"
    recorded = page.locator(f'[aria-label^="Rename {RECORDED}"] >> nth=0')
    assert recorded.get_attribute("aria-disabled") == "true"


def test_nothing_is_deleted_by_one_click(opened: Open) -> None:
    states = page_states.laddered()
    ids = {row["name"]: row["id"] for row in states["runs"]["rows"]}
    page = opened(states)
    page.click('[aria-label^="More for no graphs,"]')
    page.click('[aria-label^="Delete no graphs,"]')
    page.click("role=button[name='No']")
    assert sent(page) == []
    page.click('[aria-label^="More for no graphs,"]')
    page.click('[aria-label^="Delete no graphs,"]')
    page.click('[aria-label^="Yes, delete no graphs,"]')
    assert sent(page) == [{"view": "runs", "command": "delete", "id": ids["no graphs"]}]
    page.click(f'[aria-label^="More for {RECORDED}"] >> nth=0')
    assert page.locator(f'[aria-label^="Delete {RECORDED}"]').count() == 0


def test_a_file_is_sent_unless_it_is_too_large(opened: Open, tmp_path: Path) -> None:
    states = page_states.compared()
    page = opened(states)
    files = page.locator("input[type=file]")
    files.set_input_files({"name": "a.json", "mimeType": "application/json", "buffer": b'{"a": 1}'})
    page.wait_for_function("window.sent.length")
    assert sent(page) == [{"view": "runs", "command": "upload", "name": "a.json", "content": "eyJhIjogMX0="}]
    with (tmp_path / "b.json").open("wb") as large:
        large.truncate(MOST_UPLOAD_BYTES + 1)
    files.set_input_files(tmp_path / "b.json")
    page.wait_for_selector("text=b.json has more than 7 MiB")
    assert sent(page) == []
    show(page, {"runs": states["runs"] | {"ticked": []}})
    assert page.locator("text=b.json has").count() == 1, "nothing else has been said since"
    show(page, {"runs": states["runs"] | {"said": "Exported: c.json"}})
    assert page.locator(".eet-runs .eet-said").inner_text() == "Exported: c.json"


@pytest.mark.parametrize("width, large", [(1270, False), (1255, True), (484, True)])
def test_why_runs_cannot_be_kept_can_be_read(opened: Open, width: int, large: bool) -> None:
    states = page_states.compared()
    why = "Runs cannot be kept in eet-lab-results: /srv/notebooks/of-the-course is read-only, or not yours to write to."
    states["runs"]["warning"] = f"{why} {in_memory()}"
    said = opened(states, width=width, large=large).locator(".eet-runs .eet-said")
    assert said.inner_text() == f"{why} {in_memory()}"
    assert said.evaluate("(said) => said.scrollHeight - said.clientHeight") <= 0


def test_why_a_file_cannot_be_read_is_whole_where_there_is_little_room(opened: Open) -> None:
    states = page_states.laddered()
    why = "is not a saved result: it is not JSON (Unterminated string starting at: line 1 column 2)"
    states["runs"]["rows"][0] |= {"id": "cut", "name": "cut.json", "problem": why}
    page = opened(states, width=500)
    reason, tools = (
        page.locator(f".eet-runs tbody {name}").first for name in (".eet-problem", ".eet-row-tools > span")
    )
    assert reason.evaluate("(reason) => reason.scrollWidth - reason.clientWidth") <= 0
    place, beside = reason.bounding_box(), tools.bounding_box()
    assert place["x"] + place["width"] <= beside["x"] < 500


def test_a_file_that_is_exported_is_saved_by_the_browser_once(opened: Open) -> None:
    page = opened(page_states.compared())
    content = list(packed(b"a,b\n1,2\n" * 1000) or b"")
    tell = """([number, content]) => models.runs.tell(
        {kind: "file", name: "x.csv", number}, [new DataView(new Uint8Array(content).buffer)])"""
    with page.expect_download() as found:
        page.evaluate(tell, [1, content])
    assert found.value.suggested_filename == "x.csv"
    assert Path(found.value.path()).read_bytes() == b"a,b\n1,2\n" * 1000
    with page.expect_download() as found:
        page.evaluate(tell, [1, []])
        page.evaluate(tell, [2, content])
    assert found.value.suggested_filename == "x.csv"


def test_runs_cannot_be_measured_while_something_runs(opened: Open) -> None:
    states = page_states.laddered()
    assert "cannot run here" in states["runs"]["why_not"], "those are of a GPU"
    states["runs"] |= {"can_measure": True, "why_not": ""}
    page = opened(states)
    page.click("text=Measure again")
    show(page, {"runs": states["runs"] | {"can_measure": False}})
    assert page.get_by_role("button", name="Measure again").get_attribute("aria-disabled") == "true"
    page.click("text=Compare ticked")
    assert [c["command"] for c in sent(page)] == ["measure_ticked", "compare_ticked"]


def test_older_runs_are_shown_on_demand(opened: Open) -> None:
    states = page_states.laddered()
    states["runs"]["more"] = 12
    page = opened(states)
    page.click("role=button[name='Show older (12)']")
    assert sent(page) == [{"view": "runs", "command": "show_older"}]
    show(page, {"runs": states["runs"] | {"more": 0}})
    assert page.locator("text=Show older").count() == 0


def test_a_kernel_that_is_gone_is_told_and_results_stay(opened: Open) -> None:
    states = page_states.compared()
    page = opened(states)
    page.evaluate("gone()")
    page.wait_for_selector("text=The kernel was restarted")
    assert page.locator("[role=alert]").count() == 1 and GONE in page.locator("[role=alert]").inner_text()
    assert page.locator(".eet-view :is(button, input, select, textarea):enabled").count() == 0
    assert page.get_by_text(states["answer"]["tiles"][0]["change"]["text"]).first.is_visible()
    assert page.locator("text=compare 1").first.is_visible()
    icons = "[...document.querySelectorAll('.widget-box')].map((box) => getComputedStyle(box, '::before').content)"
    assert set(page.evaluate(icons)) == {"none"}
    page.focus(".eet-bench")
    page.keyboard.press("c")
    assert sent(page) == []


def test_a_connection_that_is_lost_is_told_with_what_helps_there(opened: Open) -> None:
    page = opened(page_states.compared())
    page.evaluate("kernel.connectionStatusChanged.emit('connecting')")
    page.wait_for_timeout(500)
    assert page.locator("[role=alert]").count() == 0, "it may come back at once"
    alert = page.wait_for_selector("[role=alert]")
    assert "lost its kernel" in alert.inner_text() and "Run the cell again" in alert.inner_text()
    assert page.locator(".eet-view :is(button, input, select, textarea):enabled").count() == 0
    page.evaluate("kernel.connectionStatusChanged.emit('connected')")
    page.wait_for_selector("[role=alert]", state="detached")
    assert page.locator(".eet-do-run:enabled").count() == 1

    assert page.locator(".eet-card-head a").inner_text() == "lesson 03"
    page.evaluate("document.body.dataset.voila = 'voila'")  # no cell is shown there
    page.evaluate("kernel.statusChanged.emit('autorestarting'); kernel.connectionStatusChanged.emit('connected')")
    told = page.wait_for_selector("[role=alert]").inner_text()
    assert "Reload the page" in told and "eet-lab lab --app" in told and "Shift+Enter" not in told
    assert page.locator(".eet-card-head a").count() == 0, "an app would hide the lesson's code"
    assert "eet-lab lab --notebook 03_memory_reuse" in page.locator(".eet-tech-card").inner_text()
    assert "cell" not in page.locator(".eet-said").get_attribute("title")

    show(page, page_states.busy())
    assert page.locator(".eet-status-text").inner_text() == "This run has ended with its kernel."
    assert not page.locator(".eet-share").is_visible() and not page.locator(".eet-left-line").is_visible()


def test_progress_grows_without_a_layout(opened: Open) -> None:
    """A width that grows is laid out in each frame of a run, on the cores that it runs on."""
    states = page_states.busy()
    page = opened(states)
    whole = page.locator(".eet-share").bounding_box()
    states["bar"]["share"] = 0.75
    done = "document.querySelector('.eet-share i')"
    moving = f"(states) => {{ show(states); return {done}.getAnimations().map((each) => each.transitionProperty); }}"
    assert page.evaluate(moving, states) == ["transform"]
    page.wait_for_function(f"Math.abs({done}.getBoundingClientRect().right - {whole['x'] + 0.75 * whole['width']}) < 1")


AGAIN = """async () => {
  const bench = document.querySelector(".eet-bench"), el = document.querySelector(".eet-bar");
  ends.bar();
  for (const each of document.querySelectorAll(".widget-box")) each.classList.remove("jupyter-widgets-disconnected");
  window.scrollTo(0, document.body.scrollHeight);
  await new Promise((f) => setTimeout(f, 100));
  ends.bar = modules.bar.render({ model: models.bar, el });
  await new Promise((f) => setTimeout(f, 300));
  return Math.round(bench.getBoundingClientRect().top);
}"""
"""Takes the bar down and puts up another, with the page scrolled to its end; where the bench's top is then."""


def test_a_bench_that_comes_back_after_a_restart_is_scrolled_to(opened: Open) -> None:
    page = opened(page_states.compared())
    page.evaluate("document.body.style.paddingBottom = '3000px'")
    assert page.evaluate(AGAIN) < -500, "a bench that is drawn again while its kernel lives scrolls nothing"
    page.evaluate("gone()")
    page.wait_for_selector("text=The kernel was restarted")
    assert page.evaluate(AGAIN) == 0
    assert page.evaluate(AGAIN) < -500, "once"
