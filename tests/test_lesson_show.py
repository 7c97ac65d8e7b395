"""What lessons show beside figures: tables, sources, styles."""

from __future__ import annotations

import re

from eet_lab.figures import theme
from eet_lab.lessons import (
    Shown,
    memory_exercises,
    source,
    start,
)
from eet_lab.lessons.show import note, table
from eet_lab.parts import attend, batches
from eet_lab.technique import Recipe
from eet_lab.techniques import PrePadding


def test_parts_table_marks_what_changed():
    [shown] = start.parts_table("pre_padding", "memory_reuse").things
    assert (
        "aligned=True" in shown.data
        and "★ StaticKV" in shown.data
        and "★ padded" in shown.data
        and shown.data.count("★") == 4
    )


def test_parts_table_marks_ops_that_changed_whatever_they_are_called():
    """Kernels have the names of what they replace, and ops of training those of the others."""
    served, trained = (
        start.parts_table(Recipe.parse(name, "cuda")).things[0].data for name in ("fused_kernels", "fused_norms")
    )
    assert all(f">ops.{op}</td>" in served for op in ("attention", "norm_linear")) and "train_ops" not in served
    assert ">★ norm_linear(norm_rows=1)<" in served and "0x" not in served + trained
    assert ">train_ops.norm_linear</td>" in trained and ">ops." not in trained


def test_tables_escape_and_align():
    html = table(["a", "b"], [["<x>", "1"], ["y", "-2.5 ms"]]).data
    assert "<x>" not in html and html.count("eet-number") == 3 + 1 * html.count(".eet-number")


def test_backticks_are_code_and_the_rest_is_text():
    [caption] = Shown("`num_pad` < 3, a lone ` too").outputs()
    assert "<code>num_pad</code> &lt; 3, a lone ` too" in caption.data
    assert "`" not in source(batches.make_batch)._repr_html_().partition("<pre")[0]


def test_what_is_shown_brings_the_style_that_it_needs_and_no_more():
    fig, caption = Shown(theme.figure("a figure"), "words").outputs()
    assert fig.layout.title.text == "a figure"
    assert ".eet-caption{" in caption.data and caption.data.count("{") == 1
    [good] = Shown(note("Right.", "good")).outputs()
    assert ".eet-say{" in good.data and ".eet-say.eet-good{" in good.data and "eet-caption" not in good.data
    html = source("pre_padding")._repr_html_()
    assert html.count("<style>") == 1 and ".eet-source pre{" in html and "eet-say" not in html
    assert '<span class="k">class</span>' in html, "which JupyterLab colours"
    assert source("pre_padding")._repr_latex_() is None


def test_source_shows_methods_without_their_indent():
    assert source(PrePadding.apply).data.startswith("def apply(")
    assert source("pre_padding").data == source(PrePadding()).data


def test_a_docstring_is_folded_away_and_not_lost():
    shown = source("pre_padding")
    summary = PrePadding().card.split("\n")[0]
    assert shown.doc == PrePadding().card and summary not in shown.data
    assert shown.data.startswith("@dataclass(frozen=True)\nclass PrePadding(Technique):\n    name: ClassVar")
    html = shown._repr_html_()
    assert html.index("<details>") < html.index(summary) < html.index("</details>") < html.index("apply")
    bare = source(memory_exercises.times_grown)
    assert "<details>" not in bare._repr_html_() and bare.doc.startswith("A request") and bare.data.count("\n") == 2

    def run_on():
        """What goes on over
        a line, and ends. The rest of it.

        More.
        """
        return 1

    assert "<summary>What goes on over a line, and ends.</summary><pre>The rest of it.\n\nMore." in (
        source(run_on)._repr_html_()
    )
    for part in (attend.DenseMask, attend.Bounds):
        assert re.search(r"<summary>[^<]*\.</summary>", source(part)._repr_html_())

    def nothing_else():
        """All there is."""

    assert "All there is" in source(nothing_else).data
