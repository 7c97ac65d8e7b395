"""The arithmetic of a training step by formula: what torch counts of it, less what a text does not see."""

from __future__ import annotations

from typing import Any

import encoders
import families
import pytest
import seq2seqs
import torch
from torch.utils.flop_counter import FlopCounterMode

from eet_lab.bench import cost
from eet_lab.bench.cost import arithmetic, mfu, train_flops
from eet_lab.training import Example, Trainer
from eet_lab.training.demos import demo_of

LENGTH, SOURCE = 11, 7


def networks() -> dict[str, tuple[Any, Example]]:
    ids = [*range(5, 5 + LENGTH)]
    vit = demo_of("vit-tiny").model().network
    return {
        "gpt2": (families.ours("gpt2").network, Example(ids)),
        "llama": (families.ours("llama").network, Example(ids)),  # gated, with fewer heads of keys
        "bert": (encoders.ours("bert-mlm").network, Example(ids, ids)),
        "bart": (seq2seqs.ours("bart").network, Example(ids[:SOURCE], ids)),
        "vit": (vit, Example(labels=3, pixels=torch.ones(vit.config.pixels))),
    }


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "bart", "vit"])
def test_flops_are_those_that_torch_counts(name: str) -> None:
    network, example = networks()[name]
    trainer = Trainer(network)
    with FlopCounterMode(display=False) as counter:
        step = trainer.step([example])
    counted, config = counter.get_total_flops(), trainer.config
    assert step.work is not None
    if config.spec.causal:  # plain attention computes what the mask hides as well
        hidden = LENGTH * (LENGTH - 1) / 2
        counted -= 3 * 4 * config.num_layers * config.num_heads * config.head_dim * hidden
    if name == "vit":  # no gradient of pixels; the class token is no patch
        P = 16 * 4 * config.hidden_size
        counted += 2 * P + 3 * 2 * (4 * config.hidden_size)
    assert train_flops(config, step.work) == pytest.approx(counted, rel=1e-6)


def test_without_a_ceiling_there_is_no_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    network, example = networks()["gpt2"]
    work = Trainer(network).step([example, example]).work
    assert work is not None and mfu(network.config, work, 5.0, "cpu") is None
    flops = train_flops(network.config, work)
    monkeypatch.setattr(cost, "matmul_tflops", lambda device, dtype: 1e-9 * flops)
    assert mfu(network.config, work, 2.0, "cuda") == pytest.approx(0.5)


def test_a_rows_arithmetic_is_a_share_of_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """5e12 operations in 20 ms are 250 TFLOP/s."""
    monkeypatch.setattr(cost, "matmul_tflops", lambda device, dtype: {torch.bfloat16: 1000.0}[dtype])
    assert arithmetic(5e12, 20.0, "cuda", torch.bfloat16) == {"mfu": 0.25, "ceiling_tflops": 1000.0}
    assert arithmetic(0, 20.0, "cpu", torch.float32) == {}, "where only bytes count no ceiling is measured"
