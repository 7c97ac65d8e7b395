"""Training: every gradient is transformers', whatever the layout of the batch."""

from __future__ import annotations

from dataclasses import replace

import encoders
import families
import pytest
import torch
from torch.nn.functional import cross_entropy

from eet_lab.bench.gradients import by_checkpoint_names
from eet_lab.parts import Parts, losses
from eet_lab.technique import Recipe
from eet_lab.training import IGNORED, Example, Trainer, TrainSettings

RECIPES = ("", "pre_padding", "pre_padding,mask_removal", "pre_padding,mask_removal,packed_prefill")
CHUNKED = losses.Chunked(5)
DECODERS = [name for name in families.CONFIGS if not name.startswith("llama-") or name in ("llama-tied", "llama-yarn")]


def parts(recipe: str, **changes) -> Parts:
    return replace(Recipe.parse(recipe).parts, **changes)


def language() -> list[Example]:
    """Texts of many lengths; of one, the first half is no label."""
    rows = families.prompts()
    half = [IGNORED] * 7 + rows[4][7:]
    return [Example(row, half if number == 4 else None) for number, row in enumerate(rows) if len(row) > 1]


def assert_same_gradients(trainer: Trainer, model, loss, found) -> None:
    value, grads = found
    model.zero_grad()
    loss.backward()
    assert value == pytest.approx(loss.item(), rel=2e-5)
    ours, compared = by_checkpoint_names(trainer, grads), 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None and name.endswith(("predictions.bias", "lm_head.bias")):
            continue  # one tensor by its meaning, of which transformers keeps two and reads one
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if name in ours:
            compared += 1
            assert torch.allclose(ours[name], wanted, rtol=2e-4, atol=2e-5 * max(1.0, float(wanted.abs().max()))), name
    assert compared >= len(list(model.parameters())) - 2


def language_loss(model, examples) -> torch.Tensor:
    total, num = 0.0, 0
    for example in examples:
        ids = torch.tensor([example.ids])
        labels = ids if example.labels is None else torch.tensor([example.labels])
        logits = model(ids).logits[0, :-1]
        total = total + cross_entropy(logits.float(), labels[0, 1:], reduction="sum", ignore_index=IGNORED)
        num += int((labels[0, 1:] != IGNORED).sum())
    return total / num


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoders_gradients_are_those_of_transformers(name, recipe):
    """In every layout of the batch, in passes of few tokens; with logits of a chunk at a time in every second one."""
    examples, model = language(), families.theirs(name)
    loss = losses.whole if recipe in RECIPES[::2] else CHUNKED
    trainer = Trainer(families.ours(name).network, parts(recipe, loss=loss), batch_tokens=25)
    assert_same_gradients(trainer, model, language_loss(model, examples), trainer.gradients(examples))


def masked() -> list[Example]:
    found = []
    for row in encoders.rows():
        labels = [token if place % 3 == 1 else IGNORED for place, token in enumerate(row)]
        ids = [encoders.MASK if label != IGNORED else token for token, label in zip(row, labels, strict=True)]
        found.append(Example(ids, labels))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", encoders.WITH_MLM)
def test_an_encoders_gradients_of_masked_words_are_those_of_transformers(name, recipe):
    examples, model = masked(), encoders.theirs(name)
    loss = CHUNKED if recipe in RECIPES[::2] else losses.whole
    trainer = Trainer(encoders.ours(name).network, parts(recipe, loss=loss), task="masked", batch_tokens=60)
    total, num = 0.0, 0
    for ids, labels, *_ in examples:
        said = model(torch.tensor([ids]))
        logits = said.logits if hasattr(said, "logits") else said.prediction_logits
        total = total + cross_entropy(logits[0].float(), torch.tensor(labels), reduction="sum", ignore_index=IGNORED)
        num += sum(label != IGNORED for label in labels)
    assert_same_gradients(trainer, model, total / num, trainer.gradients(examples))


@pytest.mark.parametrize("recipe", RECIPES[1::2])
@pytest.mark.parametrize("name", encoders.WITH_CLASSES)
def test_an_encoders_gradients_of_classes_are_those_of_transformers(name, recipe):
    rows, model = encoders.rows(), encoders.theirs(name)
    trainer = Trainer(encoders.ours(name).network, parts(recipe, loss=CHUNKED), batch_tokens=60)
    examples = [Example(row, number % encoders.LABELS) for number, row in enumerate(rows)]
    logits = torch.cat([model(torch.tensor([row])).logits for row in rows])
    wanted = cross_entropy(logits, torch.tensor([example.labels for example in examples]))
    assert_same_gradients(trainer, model, wanted, trainer.gradients(examples))


@pytest.mark.parametrize("name", encoders.WITH_TOKEN_CLASSES)
def test_an_encoders_gradients_of_classes_of_tokens_are_those_of_transformers(name):
    rows, model = encoders.rows(), encoders.theirs(name)
    trainer = Trainer(encoders.ours(name).network, parts(RECIPES[3]), batch_tokens=60)
    examples = [
        Example(row, [IGNORED if place % 4 == 3 else token % 3 for place, token in enumerate(row)]) for row in rows
    ]
    logits = torch.cat([model(torch.tensor([row])).logits[0] for row in rows])
    labels = torch.cat([torch.tensor(example.labels) for example in examples])
    wanted = cross_entropy(logits, labels, ignore_index=IGNORED)
    assert_same_gradients(trainer, model, wanted, trainer.gradients(examples))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "bert-mlm"])
def test_dropout_drops_the_same_in_every_layout_and_pass(name):
    """The noise belongs to a token of an example, so the gradients of a batch are the same however it is laid out."""
    if name in families.CONFIGS:
        network, examples = families.ours(name).network, language()
    else:
        network, examples = encoders.ours(name).network, masked()
    found = []
    for recipe, batch_tokens in (("", 100), (RECIPES[1], 25), (RECIPES[2], 100), (RECIPES[3], 25)):
        settings = TrainSettings(dropout=0.2, attention_dropout=0.1, seed=5, batch_tokens=batch_tokens)
        trainer = Trainer(network, parts(recipe), settings=settings)
        found.append(trainer.gradients(examples))
    plain = Trainer(network, parts("")).gradients(examples)
    other = Trainer(network, parts(""), dropout=0.2, attention_dropout=0.1, seed=6).gradients(examples)
    for loss, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        for path, grad in grads.items():
            assert torch.allclose(grad, found[0][1][path], rtol=1e-3, atol=1e-4), path
    assert abs(plain[0] - found[0][0]) > 1e-4 and abs(other[0] - found[0][0]) > 1e-4


def test_label_smoothing_is_pytorchs():
    examples, model = language()[:2], families.theirs("gpt2")
    trainer = Trainer(families.ours("gpt2").network, parts("", loss=CHUNKED), label_smoothing=0.1)
    logits = torch.cat([model(torch.tensor([example.ids])).logits[0, :-1] for example in examples])
    labels = torch.cat([torch.tensor(example.ids[1:]) for example in examples])
    wanted = cross_entropy(logits, labels, label_smoothing=0.1)
    assert trainer.gradients(examples)[0] == pytest.approx(wanted.item(), rel=1e-5)
    assert trainer.evaluate(examples) == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-5)
