"""Training: every gradient is transformers', whatever the layout, and what is kept is enough to go on to the bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import encoders
import families
import pytest
import torch
from torch.nn.functional import cross_entropy

from eet_lab.errors import Cancelled, ModelError, PromptError, RecipeError, TrainingError
from eet_lab.models import load
from eet_lab.models.decoder import mapped
from eet_lab.models.weights import state_of
from eet_lab.parts import Parts, losses
from eet_lab.parts.optimizers import AdamW, FlatAdamW
from eet_lab.technique import Recipe
from eet_lab.training import IGNORED, Example, Rows, Trainer, TrainSettings

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


def by_names(trainer: Trainer, grads: dict) -> dict:
    """Gradients under the names of a checkpoint."""
    of = {id(parameter): grads[path] for path, parameter in trainer.parameters.items()}
    tree = mapped(trainer.model, lambda tensor: of.get(id(tensor), torch.zeros_like(tensor)))
    return state_of(tree)


def assert_same_gradients(trainer: Trainer, model, loss, found) -> None:
    value, grads = found
    model.zero_grad()
    loss.backward()
    assert value == pytest.approx(loss.item(), rel=2e-5)
    ours, compared = by_names(trainer, grads), 0
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
    for ids, labels, _ in examples:
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


SETTINGS = TrainSettings(lr=3e-3, warmup_steps=2, lr_schedule="cosine", max_steps=9, dropout=0.1, seed=3)


def run(trainer: Trainer, steps: range) -> list[float]:
    return [trainer.step(language()).loss for _ in steps]


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.parameters.values()]


@pytest.mark.parametrize("optimizer", [AdamW, FlatAdamW])
def test_a_run_that_is_resumed_goes_on_to_the_bit(tmp_path, optimizer):
    made = partial(Trainer, families.ours("qwen3").network, parts(RECIPES[3], optimizer=optimizer), settings=SETTINGS)
    whole = made()
    losses_ = run(whole, range(8))
    assert losses_[-1] < losses_[0] and whole.num_steps == 8
    first = made()
    before = run(first, range(5))
    first.save(tmp_path)
    second = made()
    run(second, range(2))
    second.resume(tmp_path)
    assert before + run(second, range(3)) == losses_
    assert all(map(torch.equal, weights(second), weights(whole)))


def test_what_is_trained_is_saved_as_transformers_reads_it(tmp_path):
    """And the model that it began with is as it was."""
    import transformers

    model = families.ours("gpt2")
    before = {path: tensor.clone() for path, tensor in state_of(model.network).items()}
    trainer = Trainer(model.network, lr=1e-2)
    run(trainer, range(3))
    replace(model, network=trainer.trained()).save(tmp_path)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert language_loss(saved, language()).item() == pytest.approx(trainer.evaluate(language()), rel=1e-5)
    assert all(torch.equal(tensor, before[path]) for path, tensor in state_of(model.network).items())


def test_what_the_task_does_not_read_stays_as_it_was():
    network = encoders.ours("bert-pretrained").network
    trainer = Trainer(network, task="masked", lr=1e-2, weight_decay=0.5)
    trainer.step(masked())
    now = trainer.model
    assert torch.equal(now.pooler.weight, network.pooler.weight)
    assert torch.equal(now.next_sentence.weight, network.next_sentence.weight)
    assert not torch.equal(now.mlm_transform.weight, network.mlm_transform.weight)


def test_a_loss_that_is_not_finite_leaves_the_weights_as_they_were():
    trainer = Trainer(families.ours("llama").network, lr=1e-2)
    trainer.step(language())
    kept = weights(trainer)
    name = "layers.1.qkv.weight"
    parameter = trainer.parameters[name]
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter[0] = torch.inf
    with pytest.raises(TrainingError, match=f"Step 1 has a loss of nan .* not finite is the weight {name}"):
        trainer.step(language())
    with torch.no_grad():
        parameter.copy_(before)
    assert trainer.num_steps == 1 and all(map(torch.equal, weights(trainer), kept))
    assert trainer.step(language()).number == 1


def test_stop_leaves_the_weights_as_they_were():
    from threading import Event

    trainer, stop = Trainer(families.ours("gpt2").network), Event()
    stop.set()
    kept = weights(trainer)
    with pytest.raises(Cancelled):
        trainer.step(language(), cancel=stop)
    assert all(map(torch.equal, weights(trainer), kept)) and trainer.step(language()).number == 0


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        ([], "There are no examples"),
        ([Example([1, 2], [IGNORED, 97])], "Example 1 has the label 97, but labels are from 0 to 96, or -100"),
        ([Example([1, 2]), Example([1, 2], [-1, -1])], "Example 2 has the label -1"),
        ([Example([1, 2], [IGNORED, IGNORED])], "None of the 1 examples has a label"),
        ([Example([1])], "None of the 1 examples has a label"),
        ([Example([1, 2], [1])], "one for each of its 2 tokens"),
        ([Example([1, 2], 3)], "one for each of its 2 tokens"),
        ([Example([1, 2], [0.5, 1])], "one for each of its 2 tokens"),
        ([Example([1, 2], ["a", 1])], "one for each of its 2 tokens"),
        ([[1, 2]], r"Example 1 is \[1, 2\], but it must be an Example"),
        ([Example([1] * 65)], "Example 1 has 65 tokens, but the model's context is 64"),
    ],
)
def test_examples_that_cannot_be_learned_from(examples, says):
    with pytest.raises(TrainingError, match=says):
        Trainer(families.ours("gpt2").network).step(examples)


def test_tokens_outside_the_vocabulary():
    with pytest.raises(PromptError, match="97"):
        Trainer(families.ours("gpt2").network).step([Example([1, 97, 2], [IGNORED, IGNORED, 2])])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dropout": 1.0}, "dropout is 1.0, but it must be a number from 0 to less than 1"),
        ({"lr": -0.1}, "lr is -0.1"),
        ({"lr_schedule": "cosinus", "max_steps": 3}, "Did you mean 'cosine'"),
        ({"lr_schedule": "linear"}, "say at which step, max_steps"),
        ({"learning_rate": 0.1}, "There is no setting 'learning_rate'"),
        ({"max_grad_norm": 0}, "max_grad_norm is 0"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"task": "words"}, "task is 'words', but it must be one of language, masked, classes"),
        ({"task": "masked"}, "the model is a decoder"),
    ],
)
def test_settings_that_cannot_be(changes, says):
    with pytest.raises(TrainingError, match=says):
        Trainer(families.ours("gpt2").network, **changes)


def test_models_and_parts_that_cannot_be_trained(tmp_path):
    with pytest.raises(ModelError, match="lacks a masked language modeling head"):
        Trainer(encoders.ours("bert").network)
    with pytest.raises(ModelError, match="give model.network"):
        Trainer(families.ours("gpt2"))
    with pytest.raises(ModelError, match="not on 'meta'"):
        Trainer(load("gpt2", device="meta").network)
    with pytest.raises(RecipeError, match="change kv_cache and memory, which training does not use"):
        Trainer(families.ours("gpt2").network, parts("pre_padding,memory_reuse"))
    with pytest.raises(RecipeError, match="memory_reuse cannot run on this model: it is for models that generate"):
        Recipe.parse("memory_reuse").check("cpu", families.ours("gpt2").config.in_training)


def test_checkpoints_that_cannot_be_read(tmp_path, monkeypatch):
    trainer = Trainer(families.ours("gpt2").network)
    with pytest.raises(TrainingError, match="has no trainer.pt"):
        trainer.resume(tmp_path)
    path = trainer.save(tmp_path)
    with pytest.raises(TrainingError, match="is of another model"):
        Trainer(families.ours("opt").network).resume(tmp_path)
    whole = path.read_bytes()

    def full(state, where):
        where.write_bytes(whole[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingError, match="No space left on device.*as it was"):
        trainer.save(tmp_path)
    assert path.read_bytes() == whole and [each.name for each in tmp_path.iterdir()] == ["trainer.pt"]
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TrainingError, match="cannot be read"):
        trainer.resume(tmp_path)


def test_rows_of_text_are_read_once_an_epoch_and_depend_on_the_step_alone(tmp_path):
    rows = Rows(range(1000), 30, seed=4)
    assert len(rows) == 33
    steps = [rows.batch(step, 4) for step in range(17)]
    firsts = [example.ids[0] for batch in steps for example in batch]
    assert sorted(firsts[:33]) == sorted(firsts[33:66]) == [30 * row for row in range(33)]
    assert firsts[:33] != firsts[33:66] and Rows(range(1000), 30, seed=4).batch(9, 4) == steps[9]
    assert Rows(range(1000), 30, seed=5).batch(0, 4) != steps[0]
    with pytest.raises(TrainingError, match="The text has 5 tokens, but a row has 6"):
        Rows(range(5), 6)


def test_files_of_text(tmp_path):
    model = load("demo", device="cpu")
    (tmp_path / "a.txt").write_text("A text.", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "One."}\n\n{"text": "Two."}\n', encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text('{"text": "One."}\n["Two."]\n', encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert Rows.of_file(model, tmp_path / "a.txt", 2)[0].ids[0] == model.config.eos_id
    ends = Rows.of_file(model, tmp_path / "a.jsonl", 2).ids.tolist().count(model.config.eos_id)
    assert ends == 2
    for name, says in (("bad.jsonl", "Line 2 of"), ("latin.txt", "not UTF-8: byte 3 is 0xe9"), ("no.txt", "No such")):
        with pytest.raises(TrainingError, match=says):
            Rows.of_file(model, tmp_path / name, 2)


def test_the_demo_model_learns_a_text_that_it_did_not_know():
    model = load("demo", device="cpu")
    text = "The queue of the night train to Vienna is a tuple of seven blue lanterns. " * 6
    rows = Rows.of_texts(model, [text], 32)
    trainer = Trainer(model.network, parts(RECIPES[3], loss=CHUNKED, optimizer=FlatAdamW), lr=1e-3)
    before = trainer.evaluate(rows.batch(0, 2))
    for step in range(6):
        told = trainer.step(rows.batch(step, 2))
    assert trainer.evaluate(rows.batch(0, 2)) < before / 2 and told.computed_tokens == told.num_tokens == 64


def test_all_for_training_is_what_trains_and_its_gradients_are_the_baselines():
    config = families.ours("qwen2").config
    recipe = Recipe.parse("all", "cpu", config.in_training)
    assert recipe.names == (*RECIPES[3].split(","), "chunked_cross_entropy", "flat_optimizer")
    assert not {"chunked_cross_entropy", "flat_optimizer"} & {*Recipe.parse("all", "cpu", config).names}
    with pytest.raises(RecipeError, match="flat_optimizer cannot run on this model: it is for training"):
        Recipe.parse("flat_optimizer").check("cpu", config)
    chunked = Recipe.parse("all,chunked_cross_entropy:chunk=3", "cpu", config.in_training).parts
    losses_ = [
        run(Trainer(families.ours("qwen2").network, each, settings=SETTINGS), range(6)) for each in (None, chunked)
    ]
    assert losses_[1] == pytest.approx(losses_[0], rel=1e-4)
