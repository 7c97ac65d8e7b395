"""Words of the page that must be whole: at the widths and heights that screens have."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

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


@pytest.mark.parametrize("width", [657, 772, 848, 884])  # 884 and 772: a window of 900 px, and JupyterLab's of 1,000
def test_a_technique_says_why_it_is_off_and_how_exact_it_is(opened: Open, width: int) -> None:
    states = page_states.laddered()
    rows = states["techniques"]["list"]
    rows[-1] |= {"effect": None, "blocked": "CUDA kernels need an NVIDIA GPU", "blocked_short": "needs an NVIDIA GPU"}
    rows[0]["effect"] |= {"text": "cannot tell apart", "kind": "dim"}
    page = opened(states, width=width, height=656)
    assert page.get_by_text("needs an NVIDIA GPU", exact=True).is_visible()
    assert page.locator(".eet-numerics:visible").count() == len(rows)
    shown = ".eet-numerics, .eet-effect-text, .eet-effect-words"
    assert page.evaluate(CUT, f"{shown}, .eet-tech-title") == []
    assert page.evaluate(TOUCHING, shown) == []


def test_a_closed_card_promises_no_knobs_that_are_in_view(opened: Open) -> None:
    page = opened(page_states.compared(), width=2526, height=1400)
    more = page.locator(".eet-card-more")
    assert page.locator(".eet-tech-card select").last.is_visible()
    expect(more.locator("span")).to_be_hidden()
    assert more.inner_text() == "more ▾"
    page.set_viewport_size({"width": 1406, "height": 786})
    expect(more.locator("span")).to_be_visible()
    assert more.inner_text() == "knobs and more ▾"


TOUCHING = """(shown) => [...document.querySelectorAll(".eet-tech")].flatMap((row) => {
  const place = (each) => {
    const range = document.createRange();
    range.selectNodeContents(each);
    return range.getBoundingClientRect();
  };
  const words = [...row.querySelectorAll(`.eet-tech-title, ${shown}`)].filter((each) => each.textContent).map(place);
  const touches = (each, last) => each.top < last.bottom - 5 && each.left - last.right < 4;
  return words.slice(1).filter((each, i) => touches(each, words[i])).map(() => row.textContent);
})"""
"""Techniques of whose words two have no room between them."""


def test_a_knob_that_does_not_fit_is_marked_where_it_is_typed_and_in_the_list(opened: Open) -> None:
    states, why = page_states.compared(), "Bucket is 8, but it must be a whole number from 16 to 4096."
    *others, bucket = page_states.knobs()
    states["techniques"]["card"]["knobs"] = [*others, bucket | {"value": 8, "wrong": why}]
    chosen = next(each for each in states["techniques"]["list"] if each["name"] == "memory_reuse")
    chosen["wrong"] = why
    page = opened(states)
    assert page.get_by_text("Bucket is 8", exact=True).get_attribute("title") == why
    field = page.get_by_label("Bucket")
    expect(field).to_have_value("8")
    expect(field).to_have_accessible_description(why)
    assert field.get_attribute("aria-invalid") == "true"
    assert page.locator("[aria-invalid]").count() == 1


@pytest.mark.parametrize("large", [False, True])
def test_the_headline_is_whole(opened: Open, large: bool) -> None:
    states = page_states.compared()
    parts = states["bar"]["headline"]["parts"]
    parts[:2] = [
        {"text": "first token 12.3 × later", "kind": "bad"},
        {"text": "per token 1.12 × faster", "kind": "good"},
        {"text": "end to end 1.32 × slower", "kind": "bad"},
    ]
    assert [part["text"].split()[0] for part in parts] == ["first", "per", "end", "memory", "same"]
    page = opened(states, large=large)
    for width in (500, 720, 900, 1000, 1256, 1410, 1920):
        page.set_viewport_size({"width": width, "height": 800})
        told = "(told) => [told.scrollHeight - told.clientHeight, told.scrollWidth - told.clientWidth]"
        assert page.locator(".eet-told-block").evaluate(told) == [0, 0], width


LINES = """() => [...document.querySelectorAll(".eet-tech")].map((row) => {
  const lines = (each) => {
    const style = getComputedStyle(each);
    return each.offsetHeight - parseFloat(style.paddingTop) - parseFloat(style.paddingBottom);
  };
  const [title, words] = [".eet-tech-title", ".eet-effect-words"].map((name) => row.querySelector(name));
  const below = words.offsetTop > title.offsetTop + 6;
  return row.clientHeight - lines(words) - (below ? lines(title) : 0);
})"""
"""What room each technique's row has beside its lines, px."""


@pytest.mark.parametrize("width", [1406, 848, 772])
def test_each_technique_stands_apart_and_names_what_it_needs(opened: Open, width: int) -> None:
    page = opened(page_states.empty(), width=width, height=786)
    assert min(page.evaluate(LINES)) >= 1.5
    needed = page.locator(".eet-needed")
    assert [each.strip() for each in needed.all_inner_texts()] == [
        "Pre-padding, Mask removal",
        "Memory reuse, Packed prefill",
    ]
    assert page.evaluate(CUT, ".eet-tech:has(.eet-needed) .eet-effect-words") == [], "the check mark is whole"
