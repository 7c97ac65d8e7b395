"""transformers' Trainer makes the same steps with our optimizer and losses, given through its own arguments."""

from __future__ import annotations

import pytest
import torch
from conftest import make_gpt2
from transformers import Trainer, TrainingArguments

import eet_lab
from eet_lab.losses import IGNORED, CausalLMLoss

pytest.importorskip("accelerate", reason="transformers' Trainer needs it: pip install accelerate")

EPS = 1e-5
"""Large beside gradients that are zero but for rounding, as those of keys' biases."""


def rows() -> list[dict]:
    """Twelve rows of twenty tokens, of which some are no labels."""
    ids = torch.randint(499, (12, 20), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[3, 8:] = labels[7, :15] = IGNORED
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def trained(folder, **pieces) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of five steps of four rows in two passes, that of an evaluation, and the weights after them."""
    args = TrainingArguments(
        folder, max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=3e-3,
        weight_decay=0.1, adam_epsilon=EPS, warmup_steps=2, max_grad_norm=0.5, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, seed=7,
    )  # fmt: skip
    model = make_gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    made = {name: piece(model) if name == "compute_loss_func" else piece for name, piece in pieces.items()}
    trainer = Trainer(model, args, train_dataset=rows(), eval_dataset=rows()[:4], **made)
    trainer.train()
    told = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*told, trainer.evaluate()["eval_loss"]], [p.detach() for p in model.parameters()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("alone"))


def chunked(model):
    model.config.output_hidden_states = True
    return CausalLMLoss(model.lm_head, chunk=8)


@pytest.mark.parametrize("loss", [lambda model: CausalLMLoss(), chunked], ids=["in place", "chunked"])
def test_a_flat_optimizer_and_a_loss_of_ours_make_its_steps(alone, tmp_path, loss):
    flat = (eet_lab.FlatAdamW, {"lr": 3e-3, "eps": EPS})
    losses, weights = trained(tmp_path, optimizer_cls_and_kwargs=flat, compute_loss_func=loss)
    assert len(losses) == 6 and losses == pytest.approx(alone[0], rel=1e-5)
    for ours, its in zip(weights, alone[1], strict=True):
        assert torch.allclose(ours, its, rtol=1e-4, atol=1e-5)
