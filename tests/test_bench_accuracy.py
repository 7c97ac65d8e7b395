"""How far recipes are from fp32 on a trained model's own text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eet_lab.bench import held_out
from eet_lab.bench.held_out import distance, measure_accuracy
from eet_lab.bench.rows import append, markdown, read
from eet_lab.commands.bench_tables import accuracy_table
from eet_lab.errors import ModelError, PromptError
from eet_lab.models import load
from eet_lab.parts import Parts

WORKLOAD = "accuracy:demo/b4/p24/n12"


@pytest.fixture(scope="module")
def demo():
    return load("demo", device="cpu", dtype="bfloat16")


def test_recipes_and_transformers_are_within_the_rounding_of_bf16_and_int8_is_not(demo, tmp_path):
    recipes = ("all", "all,continuous_batching:rows=2:chunk=8:budget=16", "int8_weights")
    rows, remarks = measure_accuracy(demo, WORKLOAD, recipes, ("eet_lab", "hf-sdpa"))
    assert rows[0].recipe == "baseline" and rows[-1].provider == "hf-sdpa" and remarks == []
    *within, lossy, hf = rows
    assert all(row.equality == "passed" and 0 < row.kl < 1e-3 for row in (*within, hf))
    assert lossy.kl > 2 * rows[0].kl and "its bound is" in lossy.equality
    assert max(row.nll for row in rows) - min(row.nll for row in rows) < 0.05
    assert 2 < rows[0].nll < 6, "it is the demo model's own text"
    [path] = append(rows, tmp_path)
    assert read(path) == rows and "NLL" in markdown(rows) and "hf-sdpa" in accuracy_table(rows)


def test_the_distance_is_that_of_the_definition():
    draw = torch.Generator().manual_seed(0)
    precise, got = (torch.randn(2, 3, 7, generator=draw) for _ in range(2))
    p, q = precise.double().softmax(-1), got.double().softmax(-1)
    found = distance(precise, got, [[1, 2, 3], [4, 5, 6]])
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()))
    chosen = q.gather(-1, torch.tensor([[1, 2, 3], [4, 5, 6]])[..., None])
    assert found.nll == pytest.approx(float(-chosen.log().mean()))
    assert distance(precise, precise, [[1] * 3] * 2).kl == 0


@pytest.mark.parametrize(
    ("workload", "says"),
    [
        ("demo/b1/p600/n600", "context"),
        ("demo/b4/p2-9/n4", "of one length"),
        ("demo/b4000/p60/n60", "held-out text, but there are"),
        ("demo", "form"),
    ],
)
def test_what_cannot_be_asked_is_told(demo, workload, says):
    with pytest.raises(PromptError, match=says.replace("form", "is no workload")):
        measure_accuracy(demo, workload)


def test_a_small_error_is_no_rounding_in_fp32(monkeypatch):
    demo = load("demo", device="cpu")
    [baseline] = measure_accuracy(demo, WORKLOAD, "baseline")[0]
    assert baseline.equality == "passed" and baseline.kl < 1e-10
    by_steps = held_out.by_steps
    monkeypatch.setattr(
        held_out, "by_steps", lambda decoder, parts, *more: by_steps(decoder, parts, *more) + (parts != Parts()) * OFF
    )
    [_, off] = measure_accuracy(demo, WORKLOAD, "all")[0]
    assert off.equality.startswith("KL")


OFF = torch.randn(4096, generator=torch.Generator().manual_seed(0))[None, None] * 1e-3


def test_what_is_not_a_number_is_told_and_loses_no_row(monkeypatch, tmp_path):
    monkeypatch.setattr(held_out, "by_steps", lambda *given: torch.full((4, 12, 4096), torch.nan))
    [row] = measure_accuracy(load("demo", device="cpu"), WORKLOAD, "baseline")[0]
    assert row.equality == "KL is not finite: logits are NaN or infinite" and "NLL" in accuracy_table([row])
    [path] = append([row, replace(row, kl=1.0, nll=2.0)], tmp_path)
    lost, kept = read(path)
    assert (lost.kl, lost.nll, kept.kl, kept.nll) == (None, None, 1.0, 2.0) and "NLL" in markdown([lost])


def test_random_weights_have_no_accuracy(tiny):
    with pytest.raises(ModelError, match="no accuracy to tell"):
        measure_accuracy(tiny, f"{tiny.name}/b1/p2/n2")
