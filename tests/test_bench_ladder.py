"""Ladders: how they go, what stays when they are stopped, what a rung brings."""

from __future__ import annotations

import sys
import threading
from typing import ClassVar

import pytest
from test_bench_compare import ROWS

from eet_lab.bench import Ladder, ladder, load_result
from eet_lab.bench.compare import rungs_down, rungs_up
from eet_lab.bench.measure import Subject
from eet_lab.bench.timing import Rounds
from eet_lab.technique import Recipe, Technique


@pytest.mark.parametrize("fits", [True, False])
def test_a_ladder_goes_round_and_back_whether_or_not_all_engines_fit(tiny, monkeypatch, fits):
    """Where they do not, one is alive at a time, and warmed up before each timed run."""
    did: list[tuple[str, str]] = []
    alive: set[str] = set()
    most = 0

    class Told(Subject):
        def prepare(self, progress=None):
            nonlocal most
            did.append(("prepare", self.recipe))
            alive.add(self.recipe)
            most = max(most, len(alive))
            return super().prepare(progress)

        def run(self, on_step=None):
            did.append(("run", self.recipe))
            assert self.recipe in alive
            return super().run(on_step)

        def close(self):
            alive.discard(self.recipe)
            super().close()

    module = sys.modules[ladder.__module__]
    monkeypatch.setattr(module, "Subject", Told)
    monkeypatch.setattr(module, "free_bytes_of", lambda device: 10**9 if fits else 10**4)
    told: list[Ladder] = []
    words, how = "pre_padding,mask_removal", {"repeats": 2, "max_new_tokens": 3}
    found = ladder(tiny, ROWS, words, on_partial=told.append, **how)
    recipes = ["baseline", "pre_padding", words, "mask_removal"]
    runs = [recipe for what, recipe in did if what == "run"]
    assert runs == [*recipes, *reversed(recipes)]
    assert most == (len(recipes) if fits else 1)
    if not fits:
        assert all(did[i - 1] == ("prepare", recipe) for i, (what, recipe) in enumerate(did) if what == "run")
    assert not alive
    assert [rung.change.num_pairs for each in told for rung in each.rungs[1:]] == [1, 1]
    assert [rung.change.num_pairs for rung in (*found.rungs[1:], *found.left_out)] == [2, 2, 2, 2]
    assert found.rungs[0].change is None and found.changes["total_ms"].num_pairs == 2


def test_a_ladder_goes_on_until_each_rung_is_known_of_those_left_out_too(tiny, monkeypatch):
    asked = []

    def told(repeats, budget_s, changes, num_recipes):
        asked.append(changes)
        return Rounds(repeats, budget_s, changes, num_recipes)

    monkeypatch.setattr(sys.modules[ladder.__module__], "Rounds", told)
    found = ladder(tiny, ROWS, "pre_padding,mask_removal", repeats=2, max_new_tokens=3)
    assert len(found.changes) > 1 and len(asked[0]()) == 4 * len(found.changes)


@pytest.mark.parametrize("recipe", ["all", "pre_padding,mask_removal"])
def test_a_stopped_ladder_keeps_what_it_has(tiny, recipe):
    """Of a recipe of two, the one without the other is a rung up too: it is compared with what was not timed."""
    stop = threading.Event()

    def progress(done, total, message):
        if message.startswith("timing pre_padding,mask_removal"):
            stop.set()

    found = ladder(tiny, ROWS, recipe, repeats=1, max_new_tokens=3, progress=progress, cancel=stop)
    assert found.partial and found.left_out == ()
    assert [rung.technique for rung in found.rungs] == ["", "pre_padding"]
    assert "Stopped early" in found.to_text()


def test_a_ladder_stopped_at_once_is_empty_and_can_be_shown(tiny, tmp_path):
    stop = threading.Event()
    stop.set()
    found = ladder(tiny, ROWS, repeats=1, max_new_tokens=3, cancel=stop)
    assert found.partial
    assert found.rungs == ()
    assert found.to_text()
    assert found._repr_html_()
    assert load_result(found.save(tmp_path / "empty.json")) == found


def test_rungs_bring_what_they_require():
    class Needy(Technique):
        name: ClassVar[str] = "needy"
        title: ClassVar[str] = "Needy"
        requires: ClassVar[tuple[str, ...]] = ("memory_reuse",)

        def apply(self, parts):
            return parts

    needed = Recipe.parse("memory_reuse").techniques[0]
    full = Recipe((Needy(), needed))
    object.__setattr__(full, "techniques", (Needy(), needed))  # as if what it requires came later
    assert [(each.name, each.along) for each in rungs_up(full)] == [("", ()), ("needy", ("memory_reuse",))]
    gone = {each.name: each.along for each in rungs_down(Recipe((needed, Needy())))}
    assert gone == {"memory_reuse": ("needy",), "needy": ()}
