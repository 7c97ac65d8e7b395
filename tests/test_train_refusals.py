"""What cannot be trained, or resumed, is told before any work."""

from __future__ import annotations

import copy
import math
import os
from io import FileIO
from types import SimpleNamespace

import encoders
import families
import numpy as np
import pytest
import seq2seqs
import torch
import transformers
from test_training import parts

from eet_lab.errors import ModelError, PromptError, RecipeError, TrainingError
from eet_lab.models import load
from eet_lab.models.families import settings_of
from eet_lab.technique import Recipe
from eet_lab.training import IGNORED, Example, Examples, Rows, Trainer, train
from eet_lab.training.loss_scale import LossScale
from eet_lab.training.settings import TrainSettings


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        ([], "There are no examples"),
        (None, "examples is None, but it must be a list, such as \\[Example"),
        (iter([Example([1, 2])]), "examples is <.*>, but it must be a list"),
        (torch.tensor(3), r"examples is tensor\(3\), but it must be a list"),
        (torch.ones(2, 2), r"Example 1 is tensor\(.*, but it must be an Example"),
        ([Example([1, 2], [IGNORED, 97])], "Example 1 has the label 97, but labels are from 0 to 96, or -100"),
        ([Example([1, 2]), Example([1, 2], [-1, -1])], "Example 2 has the label -1"),
        ([Example([1, 2], [1, 2**70])], f"Example 1 has the label {2**70}, but labels are from 0 to 96"),
        ([Example([1, 2], [1, 2**63])], f"Example 1 has the label {2**63}, but labels are from 0 to 96"),
        ([Example([1, 2], [IGNORED, -(2**70)])], f"Example 1 has the label -{2**70}, but"),
        (
            [Example([1, 2], [IGNORED, IGNORED])],
            "The example has no label to learn from. Give .*, or labels other than -100",
        ),
        ([Example([1])], "The example has no label to learn from. Give a text of two tokens at least, or labels"),
        ([Example([1])] * 2, "None of the 2 examples has a label to learn from"),
        ([Example([1, 2], [1])], "one for each of its 2 tokens"),
        ([Example([1, 2], 3)], "one for each of its 2 tokens"),
        ([Example([1, 2], [0.5, 1])], r"whole numbers, one for each of its 2 tokens, and not \[0.5, 1\]"),
        ([Example([1, 2], ["a", 1])], "one for each of its 2 tokens"),
        ([[1, 2]], r"Example 1 is \[1, 2\], but it must be an Example"),
        ([Example(None)], "Example 1 has the ids None, but they must be token ids"),
        ([Example([1] * 65)], "Example 1 has 65 tokens, but the model's context is 64"),
    ],
)
def test_examples_that_cannot_be_learned_from(examples, says):
    with pytest.raises(TrainingError, match=says):
        Trainer(families.ours("gpt2").network).step(examples)


@pytest.mark.parametrize("batches", [None, 3])
def test_batches_that_are_none(batches):
    trainer = Trainer(families.ours("gpt2").network)
    for work in (lambda: next(trainer.steps(batches)), lambda: trainer.reserve(batches)):
        with pytest.raises(TrainingError, match=f"batches is {batches}, but it must be lists of examples"):
            work()


def test_a_batch_that_is_larger_than_what_was_reserved():
    """By the tokens of a pass, or by its longest text; the batch before it has had its step."""
    labels = [IGNORED, 3, IGNORED, IGNORED]
    small, packed = [Example([5, 6, 7, 8], labels)] * 3, Recipe.parse("pre_padding,mask_removal,packed_prefill").parts
    trainer = Trainer(families.ours("gpt2").network, packed, batch_tokens=16)
    trainer.reserve([small, [Example([5] * 5, [*labels, IGNORED])]])
    trainer.reserve([])
    trainer.reserve([small[:1]])
    for larger, says in (
        (small * 2, "A pass over 4 examples has 16 tokens, but Trainer.reserve has taken memory for at most 12. Give"),
        ([Example([5] * 6, [*labels, IGNORED, IGNORED])], "1 example has a text of 6 tokens, but .* at most 5"),
    ):
        steps, before = trainer.steps([small, larger]), trainer.num_steps
        assert next(steps).number == before
        kept = [parameter.detach().clone() for parameter in trainer.parameters.values()]
        for refused in (lambda steps=steps: next(steps), lambda larger=larger: trainer.gradients(larger)):
            with pytest.raises(TrainingError, match=says):
                refused()
        assert all(map(torch.equal, kept, trainer.parameters.values()))
        assert trainer.evaluate(larger) > 0  # which keeps nothing for a backward pass
        trainer.reserve([larger])
        assert trainer.step(larger).number == before + 1


def test_a_run_that_is_refused_leaves_no_checkpoint_folder(tmp_path):
    """By what was held out, or by the first step."""
    rows, long = [Example([5, 6, 7])] * 2, [Example([5] * 65)]
    for trained, held_out in ((rows, long), (long, rows)):
        trainer = Trainer(families.ours("gpt2").network)
        with pytest.raises(TrainingError, match="Example 1 has 65 tokens"):
            train(trainer, Examples(trained), max_steps=2, batch_rows=1, held_out=held_out, folder=tmp_path / "a" / "b")
        assert not (tmp_path / "a").exists()


def test_a_class_is_not_ignored():
    for label in (IGNORED, 2**63, 2**70):
        says = f"Example 2 has the label {label}, but labels are from 0 to 2. An example without a class must be left"
        with pytest.raises(TrainingError, match=says):
            Trainer(encoders.ours("bert-classes").network).step([Example([5, 6], 2), Example([5, 6], label)])


@pytest.mark.parametrize("labels", [None, 1])
def test_an_image_is_told_what_the_model_takes(labels):
    image, says = (
        Example(pixels=torch.zeros(3, 8, 8), labels=labels),
        r"is an image, but the model \({}\) learns from texts",
    )
    for model in (families.ours("gpt2"), encoders.ours("bert-classes"), seq2seqs.ours("t5")):
        with pytest.raises(TrainingError, match="Example 1 " + says.format(model.config.family)):
            Trainer(model.network).step([image])


def test_a_class_is_a_whole_number_of_any_kind():
    trainer = Trainer(encoders.ours("bert-classes").network)
    found = [trainer.gradients([Example([5, 6], label)])[0] for label in (1, np.int64(1), torch.tensor(1))]
    assert found[0] == found[1] == found[2]
    for wrong in (True, 1.0, np.float32(1), [1], "1", None):
        with pytest.raises(TrainingError, match="it must be the number of a class, and not"):
            trainer.step([Example([5, 6], wrong)])


def test_tokens_outside_the_vocabulary():
    with pytest.raises(PromptError, match="97"):
        Trainer(families.ours("gpt2").network).step([Example([1, 97, 2], [IGNORED, IGNORED, 2])])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dropout": 1.0}, "dropout is 1.0, but it must be a number from 0 to less than 1"),
        ({"lr": -0.1}, "lr is -0.1"),
        ({"optimizer": "sdg"}, "optimizer is 'sdg', but it must be one of adamw, sgd. Did you mean 'sgd'"),
        ({"optimizer": ["sgd"]}, r"optimizer is \['sgd'\], but it must be one of adamw, sgd"),
        ({"momentum": 0.0, "nesterov": True}, "nesterov looks ahead"),
        ({"lr_schedule": "cosinus", "max_steps": 3}, "Did you mean 'cosine'"),
        ({"warmup_steps": 100, "max_steps": 10}, r"whole number from 0 to 10 \(max_steps\)"),
        ({"lr_schedule": "linear"}, "say at which step, max_steps"),
        ({"betas": [0.9]}, r"betas is \[0.9\], but it must be two numbers"),
        ({"learning_rate": 0.1}, "There is no setting 'learning_rate'. Here it is 'lr'"),
        ({"gradient_accumulation_steps": 0}, "Gradients add up by themselves, .*over 'batch_tokens'"),
        ({"weight_decy": 0.1}, "Did you mean 'weight_decay'"),
        ({"max_grad_norm": 0}, "max_grad_norm is 0"),
        ({"batch_tokens": 0}, "batch_tokens is 0"),
        ({"init_scale": 0.0}, "init_scale is 0.0, but it must be a number of"),
        ({"task": "words"}, "task is 'words', but it must be one of language, masked, classes"),
        ({"task": "masked"}, "the model is a decoder"),
    ],
)
def test_settings_that_cannot_be(changes, says):
    with pytest.raises(TrainingError, match=says):
        Trainer(families.ours("gpt2").network, **changes)


def test_betas_may_be_a_list():
    assert TrainSettings(betas=[0.9, 0.98]) == TrainSettings(betas=(0.9, 0.98))


def test_one_class_has_nothing_to_choose_between():
    """Transformers trains regression then, by another loss."""
    config = transformers.BertConfig(**encoders.SIZES, num_labels=1)
    with pytest.raises(ModelError, match="has one class, .*for regression.* Load one with two classes at least"):
        Trainer(load(transformers.BertForSequenceClassification(config), device="cpu").network)


def test_a_text_has_one_class_in_training():
    """Transformers takes the mean of each class's own binary cross entropy for several labels."""
    for kind, is_trained in (
        ("multi_label_classification", False),
        ("regression", False),
        ("single_label_classification", True),
    ):
        config = transformers.BertConfig(**encoders.SIZES, num_labels=3, problem_type=kind)
        model = load(transformers.BertForSequenceClassification(config), device="cpu")
        assert settings_of(model.config)["problem_type"] == kind
        if is_trained:
            assert Trainer(model.network).step([Example([5, 6], 2)]).loss > 0
            continue
        says = f"problem_type is '{kind}' in this checkpoint's config, .* one class an example: .*'single_label_class"
        with pytest.raises(ModelError, match=says):
            Trainer(model.network)


def test_texts_without_labels_are_told_how_words_are_masked():
    bert = Trainer(encoders.ours("bert-mlm").network)
    with pytest.raises(TrainingError, match=r"there are none\. eet_lab\.training\.masked\(model, rows\) masks words"):
        bert.step([Example([5, 6, 7])])


def test_models_and_parts_that_cannot_be_trained(tmp_path):
    with pytest.raises(ModelError, match="lacks a masked language modeling head"):
        Trainer(encoders.ours("bert").network)
    with pytest.raises(ModelError, match="give model.network"):
        Trainer(families.ours("gpt2"))
    with pytest.raises(ModelError, match="not on 'meta'"):
        Trainer(load("gpt2", device="meta").network)
    for given in ("all", Recipe.parse("pre_padding")):
        with pytest.raises(RecipeError, match="Trainer takes Parts, not .* give it .*parts"):
            Trainer(families.ours("gpt2").network, given)
    with pytest.raises(TrainingError, match="settings is .*must be TrainSettings"):
        Trainer(families.ours("gpt2").network, settings={"lr": 0.1})
    with pytest.raises(RecipeError, match="change kv_cache and memory, which training this model does not use"):
        Trainer(families.ours("gpt2").network, parts("pre_padding,memory_reuse"))
    with pytest.raises(
        RecipeError, match="memory_reuse cannot run on this model: it is for inference alone, and this is training"
    ):
        Recipe.parse("memory_reuse").check("cpu", families.ours("gpt2").config.in_training)


def changed(kept, name, how):
    kept[name] = how(kept[name])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda all, states: states[0].update(step="x"),
            "Tensor 0 .* has the step 'x', but it must be a number",
        ),
        (lambda all, states: states[1].update(step=math.nan), "Tensor 1 .* has the step nan"),
        (lambda all, states: states[0].update(exp_avg=0.5), "Tensor 0 .* has the exp_avg 0.5, but it must be a dense"),
        (lambda all, states: changed(states[0], "exp_avg", torch.Tensor.long), "Tensor 0 .* must be a dense"),
        (lambda all, states: changed(states[0], "exp_avg", torch.Tensor.to_sparse), "Tensor 0 .* must be a dense"),
        (lambda all, states: changed(states[39], "exp_avg", lambda t: t[..., :1]), "Tensor 39 .* another shape"),
        (lambda all, states: states[0]["exp_avg"][1].fill_(math.nan), "exp_avg of token_embedding .* nan, .* finite"),
        (lambda all, states: states[0]["exp_avg"][1].fill_(-math.inf), "exp_avg of token_embedding .* -inf, .* finite"),
        (lambda all, states: states[0]["exp_avg_sq"][1].fill_(math.inf), "exp_avg_sq of token_embedding .* inf, .* 0"),
        (lambda all, states: states[0]["exp_avg_sq"][1].fill_(-1), "exp_avg_sq of token_embedding .* -1.0, .* 0"),
        (lambda all, states: states.update({999: states.pop(0)}), "state of tensor 999, but this optimizer has 40"),
        (lambda all, states: states.pop(0), r"lacks what it keeps of 1 tensor, token_embedding: it is damaged"),
        (lambda all, states: states[0].clear(), "lacks what it keeps of 1 tensor, token_embedding: it is damaged"),
        (lambda all, states: states[0].pop("step"), "lacks what it keeps of 1 tensor, token_embedding: it is damaged"),
        (lambda all, states: states.clear(), r"of 40 tensors, token_embedding, .*, \.\.\.: it is damaged"),
        (lambda all, states: states[0].update({(1, 2): states[0]["exp_avg"]}), "state of another kind of optimizer"),
        (lambda all, states: all["weights"].update({3: torch.ones(3)}), "of another model, in 1 tensor: 3"),
        (lambda all, states: all.update(format=torch.ones(2)), "cannot be read .*format"),
        (lambda all, states: all.update(num_steps=2**31), "cannot be read .*number of steps"),
        (lambda all, states: all.update(num_steps=True), "cannot be read .*number of steps"),
        (lambda all, states: states.update({0: [1]}), "no state of each tensor"),
        (lambda all, states: all["optimizer"].update(state=[]), "no state of each tensor"),
        (lambda all, states: all["optimizer"].update(param_groups=[3]), "no groups of tensors"),
        (lambda all, states: all["optimizer"]["param_groups"][0].pop("params"), "no groups of tensors"),
        (lambda all, states: all.update(optimizer=["state", "param_groups"]), "no state of each tensor"),
        (lambda all, states: changed(all["weights"], "token_embedding", torch.Tensor.to_sparse), "token_embedding is "),
        (lambda all, states: changed(all["weights"], "token_embedding", torch.Tensor.long), "token_embedding is "),
    ],
)
def test_a_damaged_checkpoint_leaves_all_as_it_was(damage, says, tmp_path):
    trainer, other = (Trainer(families.ours("gpt2").network, lr=lr) for lr in (1e-2, 1e-3))
    for each in (trainer, other):
        each.step([Example([1, 2, 3])])
    path = trainer.save(tmp_path)
    state = torch.load(path, weights_only=True)
    damage(state, state["optimizer"]["state"])
    torch.save(state, path)
    kept = copy.deepcopy(other._state())
    with pytest.raises(TrainingError, match=says):
        other.resume(tmp_path)
    for what in ("num_steps", "weights", "optimizer"):
        torch.testing.assert_close(other._state()[what], kept[what], rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [{"scale": math.inf}, {"scale": 0.0}, {"num_finite": math.inf}, {"scale": "x"}])
def test_a_damaged_loss_scale_leaves_it_as_it_was(wrong):
    own = LossScale(8.0, growth_interval=4)
    with pytest.raises(TrainingError, match="loss scale cannot be read"):
        own.load_state_dict({"scale": 2.0, "num_finite": 1} | wrong)
    assert own == LossScale(8.0, growth_interval=4)


def test_checkpoints_that_cannot_be_read(tmp_path, monkeypatch):
    trainer = Trainer(families.ours("gpt2").network)
    with pytest.raises(TrainingError, match="has no trainer.pt"):
        trainer.resume(tmp_path)
    path = trainer.save(tmp_path)
    with pytest.raises(TrainingError, match="is of another model, .* Take a checkpoint of this one"):
        Trainer(families.ours("opt").network).resume(tmp_path)
    whole = path.read_bytes()
    other = Trainer(families.ours("gpt2").network, optimizer="sgd")
    kept = {name: weight.detach().clone() for name, weight in other.parameters.items()}
    trainer.step([Example([1, 2, 3])])
    moved = trainer.save(tmp_path / "moved").parent
    with pytest.raises(TrainingError, match="another kind of optimizer.* Go on with the one that it was saved with"):
        other.resume(moved)
    assert all(torch.equal(kept[name], weight) for name, weight in other.parameters.items())
    state = torch.load(moved / "trainer.pt", weights_only=True)
    damaged = {"lacks the optimizer's state": {"optimizer": {}}, "number of steps is -4": {"num_steps": -4}}
    for says, wrong in damaged.items():
        torch.save(state | wrong, moved / "trainer.pt")
        with pytest.raises(TrainingError, match=f"cannot be read .*{says}"):
            other.resume(moved)
    assert other.num_steps == 0

    def no_memory(*args, **how):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", no_memory)
        with pytest.raises(TrainingError, match="memory is full .*Make room there, and resume"):
            other.resume(moved)

    save = torch.save

    def full(state, where):  # the file is opened by `write`, and torch writes to a disk without room
        with open("/dev/full", "wb") as no_room:
            save(state, no_room)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(TrainingError, match="No space left on device.*as it was"):
            trainer.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "open", lambda *_: FileIO("/dev/full", "w"))
        with pytest.raises(TrainingError, match=r"\(.*No space left on device\). It takes .*, where .* are free"):
            trainer.save(tmp_path)
    assert path.read_bytes() == whole and [each.name for each in tmp_path.glob("trainer*")] == ["trainer.pt"]

    def of_torch(state, where):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", of_torch)
    takes = r"It takes [\d.]+ [KM]iB, where .* are free. Choose another folder"
    with pytest.raises(TrainingError, match=rf"unexpected pos 64 vs 0\). {takes}"):
        trainer.save(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(TrainingError, match=rf"\(the disk is full\). {takes}"):
        trainer.save(tmp_path)


def test_a_file_that_was_cut_short_is_told_to_be_damaged_and_what_to_do(tmp_path):
    trainer = Trainer(families.ours("gpt2").network)
    path = trainer.save(tmp_path)
    whole = path.read_bytes()
    for wrong in (b"", whole[:1], whole[:100], whole[: len(whole) // 2], whole[:-1], b"hello world", b"e", b"{}"):
        path.write_bytes(wrong)
        with pytest.raises(TrainingError, match=r"^.*/trainer.pt cannot be read \(it is damaged: of its ") as told:
            trainer.resume(tmp_path)
        assert "it was cut short, or is another file). Resume from an older checkpoint; where there is" in str(
            told.value
        )
    for place in range(len(whole) // 4, len(whole) // 2, len(whole) // 16):  # among the weights' numbers
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(TrainingError, match=r"\(it is damaged: its part \S+ is not what was written\). Res"):
            trainer.resume(tmp_path)
    torch.serialization.set_crc32_options(False)
    try:
        trainer.save(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    trainer.resume(tmp_path)
    for content, says in (
        ([1], "it holds a list, not what"),
        ({"weights": {}}, "it lacks optimizer, num_steps, format"),
    ):
        torch.save(content, path)
        with pytest.raises(TrainingError, match=rf"trainer.pt cannot be read \(it is damaged: {says}"):
            trainer.resume(tmp_path)
    (tmp_path / "trainer.previous.pt").write_bytes(whole)
    with pytest.raises(
        TrainingError, match="The one before it is trainer.previous.pt, in the same folder: rename that"
    ):
        trainer.resume(tmp_path)


def test_what_is_no_file_or_no_folder_is_told_and_never_waited_for(tmp_path):
    trainer = Trainer(families.ours("gpt2").network)
    path = tmp_path / "trainer.pt"
    for make in (path.mkdir, lambda: os.mkfifo(path)):
        make()
        with pytest.raises(TrainingError, match="trainer.pt is not a regular file.* Take an older checkpoint"):
            trainer.resume(tmp_path)
        if path.is_dir():
            with pytest.raises(TrainingError, match="cannot be saved in .*Is a directory"):
                trainer.save(tmp_path)
            path.rmdir()
    os.mkfifo(tmp_path / "trainer.pt.part")
    assert trainer.save(tmp_path).is_file()
    for work in (trainer.save, trainer.resume, lambda folder: train(trainer, Rows([1] * 9, 3), folder=folder, **ONE)):
        for wrong, says in ((3, "folder is 3, but it must be a path"), ("a\0b", "null byte")):
            with pytest.raises(TrainingError, match=says):
                work(wrong)
    with pytest.raises(ModelError, match="folder is '', but it must be a path"):  # which would be the current one
        load("demo", device="cpu").save("")
    with pytest.raises(ModelError, match="folder is None, but it must be a path"):
        families.ours("gpt2").save(None)


ONE = {"max_steps": 1, "batch_rows": 1}
