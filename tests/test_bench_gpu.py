"""On a GPU: every recipe passes the check in half precision, also through graphs, and memory is measured."""

from __future__ import annotations

from itertools import combinations

import pytest
from conftest import make_gpt2

from eet_lab.bench import Workload, compare, race
from eet_lab.bench.launches import launches_per_token
from eet_lab.bench.sameness import Witness
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import RecipeError
from eet_lab.models import load
from eet_lab.technique import Recipe, everything

pytestmark = pytest.mark.gpu
ROWS = [[5], [7, 8, 9, 10], [3, 1, 4, 1, 5, 9, 2], []]


def recipes() -> list[Recipe]:
    """Every set of techniques that composes."""
    found = []
    names = everything("cuda").names
    for words in (",".join(chosen) for n in range(len(names) + 1) for chosen in combinations(names, n)):
        try:
            found.append(Recipe.parse(words, "cuda"))
        except RecipeError:
            continue
    return found


@pytest.fixture(scope="module", params=["float16", "bfloat16", "float32"])
def model(request):
    return load(make_gpt2(), device="cuda", dtype=request.param)


def test_every_recipe_says_what_the_baseline_says(model):
    witness = Witness(model.decoder, ROWS, Settings(max_new_tokens=24))
    verdicts = {str(recipe): witness.judge(recipe.parts) for recipe in recipes()}
    assert not {name: found.explanation for name, found in verdicts.items() if found.verdict == "different"}


def test_memory_is_measured_and_adds_up_to_at_least_the_plan(model):
    result = compare(model, ROWS, repeats=2, max_new_tokens=24)
    for m in (result.baseline, result.selection):
        assert m.memory_source == "measured"
        assert m.memory["peak"] >= m.memory["weights"] + m.memory["kv"]
        assert m.memory["activations"] > 0
    assert result.selection.captures > 0


def test_graphs_launch_less(model):
    few, many = (
        launches_per_token(Engine(model.decoder, Recipe.parse(words, "cuda").parts), 4) for words in ("all", "")
    )
    assert few is not None
    assert many is not None
    assert few.launches < 12 < many.launches
    assert 20 < few.kernels < many.kernels


def test_captured_and_compiled_peers_run_beside_us():
    model, names = load(make_gpt2(), device="cuda"), ["eet_lab", "hf-static-compile", "torch-cuda-graphs"]
    rows, remarks = race(model, Workload(model.name, 2, 3, 9, 12), ["all"], names, repeats=2)
    assert [row.provider for row in rows] == names, remarks
    for row in rows:
        assert row.equality == "passed"
        assert row.peak_bytes
        assert row.launches_per_token < row.kernels_per_token
        assert row.predicted_ms > row.floor_ms
