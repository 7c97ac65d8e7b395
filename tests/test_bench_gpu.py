"""On a GPU: every recipe passes the check in half precision, also through graphs, and memory is measured."""

from __future__ import annotations

import pytest
from conftest import make_gpt2
from every_recipe import every_recipe

from eet_lab.bench import Workload, benchmark, compare
from eet_lab.bench.launches import decode_calls, launches_per_token, num_launches
from eet_lab.bench.parity import ParityCheck
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.models import load
from eet_lab.parts import Parts
from eet_lab.technique import Recipe, everything

pytestmark = pytest.mark.gpu
ROWS = [[5], [7, 8, 9, 10], [3, 1, 4, 1, 5, 9, 2], []]


@pytest.fixture(scope="module", params=["float16", "bfloat16", "float32"])
def model(request):
    return load(make_gpt2(), device="cuda", dtype=request.param)


def test_every_recipe_says_what_the_baseline_says(model):
    parity_check = ParityCheck(model.decoder, ROWS, Settings(max_new_tokens=24))
    verdicts = {
        words: parity_check.judge(Recipe.parse(words).parts) for words in every_recipe(everything("cuda").names)
    }
    assert not {name: found.explanation for name, found in verdicts.items() if found.verdict == "different"}


def test_memory_is_measured_and_adds_up_to_at_least_the_plan(model):
    result = compare(model, ROWS, repeats=2, max_new_tokens=24)
    for m in (result.baseline, result.selection):
        assert m.memory_source == "measured"
        assert m.memory["peak"] >= m.memory["weights"] + m.memory["kv"]
        assert m.memory["activations"] > 0
    assert result.selection.captures > 0


def test_graphs_launch_less(model):
    config, parts = model.config, Recipe.parse("all", "cuda").parts
    few, many = (launches_per_token(Engine(model.decoder, each), 4) for each in (parts, Parts()))
    assert few is not None
    assert many is not None
    # Cases declare what 16-bit types launch; in float32, attention writes its cache in a launch of its own.
    declared = num_launches(decode_calls(config, parts, 4, 20)) + config.num_layers * (model.dtype == "float32")
    to_host = few.launches - 1  # beside the graph: tokens on their way to the host
    assert few.kernels - to_host == declared
    assert few.launches < declared < many.launches
    assert few.kernels < many.kernels


def test_captured_and_compiled_peers_run_beside_us():
    model, names = load(make_gpt2(), device="cuda"), ["eet_lab", "hf-static-compile", "torch-cuda-graphs"]
    rows, remarks = benchmark(model, Workload(model.name, 2, 3, 9, 12), ["all"], names, repeats=2)
    assert [row.provider for row in rows] == names, remarks
    for row in rows:
        assert row.equality == "passed"
        assert row.peak_bytes
        assert row.launches_per_token < row.kernels_per_token
        assert row.predicted_ms > row.floor_ms
