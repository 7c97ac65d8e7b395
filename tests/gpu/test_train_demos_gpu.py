"""Small models that are trained on a GPU, and the ceiling that their steps are held against."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eet_lab.bench.cost import matmul_tflops, mfu
from eet_lab.technique import Recipe
from eet_lab.training.demos import demo_of, train_demo

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["vit-tiny", "translator-tiny", "bert-tiny"])
def test_a_demo_learns_in_bfloat16_below_the_ceiling(name: str) -> None:
    demo = demo_of(name)
    short = replace(demo.in_steps(40), held_out=200, is_whole=False)
    parts = Recipe.parse("all", "cuda", demo.config.in_training).parts
    found = train_demo(short, parts, device="cuda", dtype=torch.bfloat16, evaluate_every=40)
    first, last = (each.loss for each in found.run.evaluations)
    assert last < first - 0.3 and found.model.device == "cuda"
    step = found.run.steps[-1]
    assert matmul_tflops("cuda", torch.bfloat16) > 100 and step.work is not None
    reached = mfu(demo.config.in_training, step.work, step.ms, "cuda")
    assert reached is not None and 0 < reached < 0.5, "of a tiny model"
