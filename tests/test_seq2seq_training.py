"""Training of encoder-decoders: every gradient is transformers', whatever the layout of the batch."""

from __future__ import annotations

from dataclasses import replace

import families
import pytest
import torch
import transformers
from seq2seqs import CONFIGS, CONTEXT, SOURCES, TARGETS, V, ours, rows, theirs
from test_training import CHUNKED, RECIPES, assert_same_gradients, parts

from eet_lab.errors import PromptError, RecipeError, TrainingError
from eet_lab.models import seq2seq
from eet_lab.models.table import constants
from eet_lab.ops import reference
from eet_lab.ops.types import autograd
from eet_lab.parts import Parts, losses
from eet_lab.parts.attend import Bounds
from eet_lab.parts.batches import end_to_end
from eet_lab.technique import Recipe
from eet_lab.training import IGNORED, Example, Trainer, TrainSettings


def examples() -> list[Example]:
    """Sources and answers of many lengths; some labels are ignored, which the decoder reads as pads."""
    answers = rows(TARGETS, seed=1)
    answers[2] = [IGNORED if place % 3 == 1 else token for place, token in enumerate(answers[2])]
    return [Example(source, answer) for source, answer in zip(rows(), answers, strict=True)]


def their_loss(model) -> torch.Tensor:
    """The loss as transformers takes it, of labels that it shifts itself, with pads on the right."""
    given, longest = examples(), max(TARGETS)
    ids = torch.tensor([[*each.ids, *[1] * (max(SOURCES) - len(each.ids))] for each in given])
    real = torch.tensor([[1] * len(each.ids) + [0] * (max(SOURCES) - len(each.ids)) for each in given])
    labels = torch.tensor([[*each.labels, *[IGNORED] * (longest - len(each.labels))] for each in given])
    return model(ids, attention_mask=real, labels=labels).loss


@pytest.mark.parametrize("recipe", (*RECIPES, f"{RECIPES[3]},batched_cross_attention"))
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_transformers(name, recipe):
    """In every layout of the batch, in passes of few tokens; with logits of a chunk at a time in every second one."""
    loss = losses.whole if recipe in RECIPES[::2] else CHUNKED
    trainer = Trainer(ours(name).network, parts(recipe, loss=loss), batch_tokens=30)
    found = trainer.gradients(examples())
    assert found[1].keys() == trainer.parameters.keys(), "all are trained"
    assert not any(t.requires_grad for t in constants(trainer.model))
    assert_same_gradients(trainer, theirs(name), their_loss(theirs(name)), found)


def test_one_product_makes_the_keys_and_values_of_all_layers():
    network, batched, widths = ours("bart").network, Recipe.parse("batched_cross_attention").parts, []

    def counted(x, norm, w, act=None, *, empty):
        widths.append(len(w.weight))
        return reference.norm_linear(x, norm, w, act, empty=empty)

    ops = replace(batched.train_ops, norm_linear=counted).differentiable(None)
    read = end_to_end(rows())
    found = [
        [*seq2seq.encode(network, ops, Bounds(ops, read, None, empty=autograd), read, part.cross_kv)]
        for part in (Parts(), batched)
    ]
    layers, C = len(network.decoder.layers), network.config.hidden_size
    assert widths.count(2 * C) == layers and widths.count(2 * C * layers) == 1
    for plain, one in zip(*found, strict=True):
        assert one[0].shape == (sum(SOURCES), 4, C // 4) and all(map(torch.allclose, plain, one))


def test_keys_and_values_are_not_batched_where_no_layer_looks_at_an_encoder():
    recipe, gpt2 = Recipe.parse("batched_cross_attention"), families.ours("gpt2")
    with pytest.raises(RecipeError, match="only encoder-decoders have cross attention"):
        recipe.check("cpu", gpt2.config.in_training)
    with pytest.raises(RecipeError, match="change cross_kv, which training this model does not use"):
        Trainer(gpt2.network, recipe.parts)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_dropout_drops_the_same_in_every_layout_and_pass(name):
    found = []
    for recipe, batch_tokens in (("", 100), (RECIPES[1], 25), (RECIPES[2], 100), (RECIPES[3], 25)):
        settings = TrainSettings(dropout=0.2, attention_dropout=0.1, seed=5, batch_tokens=batch_tokens)
        found.append(Trainer(ours(name).network, parts(recipe), settings=settings).gradients(examples()))
    plain = Trainer(ours(name).network, parts("")).gradients(examples())
    for loss, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        for path, grad in grads.items():
            close = {"rtol": 1e-3, "atol": 1e-4 * max(1.0, float(grad.abs().max()))}
            torch.testing.assert_close(grad, found[0][1][path], **close)
    assert abs(plain[0] - found[0][0]) > 1e-4


def test_what_is_trained_is_saved_as_transformers_reads_it(tmp_path):
    model = ours("marian-odd")
    trainer = Trainer(model.network, parts(f"{RECIPES[3]},flat_optimizer", loss=CHUNKED), lr=3e-3)
    before = trainer.evaluate(examples())
    for _ in range(4):
        step = trainer.step(examples())
    assert trainer.evaluate(examples()) < before - 0.3
    assert step.num_tokens == step.computed_tokens == sum(SOURCES) + sum(TARGETS)
    replace(model, network=trainer.trained()).save(tmp_path)
    saved = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    assert torch.equal(saved.final_logits_bias, theirs("marian-odd").final_logits_bias), "it is no parameter"
    assert their_loss(saved).item() == pytest.approx(trainer.evaluate(examples()), rel=1e-4)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ([Example([7], [8, V])], TrainingError, f"Example 1 has the label {V}, but labels are from 0 to {V - 1}"),
        ([Example([7], [8]), Example([7], [-1])], TrainingError, "Example 2 has the label -1"),
        ([Example([7], [8, 2**63])], TrainingError, f"Example 1 has the label {2**63}, but"),
        (
            [Example([7], [IGNORED])],
            TrainingError,
            "^The example has no label to learn from. Give labels other than -100",
        ),
        ([Example([7], [])], TrainingError, "the token ids of an answer"),
        ([Example([7])], TrainingError, "the token ids of an answer, and not None"),
        ([Example([7], [[8]])], TrainingError, "the token ids of an answer"),
        (
            [Example([7], [8] * (CONTEXT + 1))],
            TrainingError,
            f"Example 1 has an answer that is longer than .* {CONTEXT}",
        ),
        ([Example([7] * (CONTEXT + 1), [8])], TrainingError, f"Example 1 has 65 tokens, but .* is {CONTEXT}"),
        ([Example([], [8])], TrainingError, "Example 1 has no tokens"),
        ([Example([V], [8])], PromptError, f"the token {V}"),
    ],
)
def test_examples_that_cannot_be_learned_from(given, error, says):
    with pytest.raises(error, match=says):
        Trainer(ours("bart").network).step(given)


def test_tasks_of_other_models():
    with pytest.raises(TrainingError, match="task is 'language', and the model is an encoder-decoder"):
        Trainer(ours("t5").network, task="language")
