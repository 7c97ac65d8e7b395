"""Checkpoints of encoders with every head, in and out to the bit; their tokenizers; and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from encoders import CONFIGS, SIZES, WITH_TOKEN_CLASSES, ours, texts, theirs, told
from safetensors.torch import load_file, save_file

from eet_lab.engine import tasks
from eet_lab.engine.encode import EncoderEngine
from eet_lab.errors import ModelError
from eet_lab.models import ENCODER_PRESETS, load
from eet_lab.models.decoder import tensors
from eet_lab.models.tokenizer import Tokenizer

TIED = [name for name in CONFIGS if "untied" not in name]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_goes_in_and_out_to_the_bit(name, tmp_path):
    theirs(name).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1, "in shards"
    load(tmp_path / "theirs", device="cpu").save(tmp_path / "ours")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    theirs(name).save_pretrained(tmp_path / "whole")
    original = load_file(tmp_path / "whole" / "model.safetensors")
    twins = {each for each in written if each.endswith("decoder.bias")}
    assert written.keys() - twins == original.keys() - twins and original.keys() <= written.keys()
    assert all(torch.equal(written[each], original[each]) for each in original)
    back = type(theirs(name)).from_pretrained(tmp_path / "ours").state_dict()
    state = theirs(name).state_dict()
    assert back.keys() == state.keys() and all(torch.equal(back[each], state[each]) for each in state)
    again = load(tmp_path / "ours", device="cpu")
    assert ours(name).config == again.config
    assert all(map(torch.equal, tensors(again.encoder), tensors(ours(name).encoder)))


@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_goes_in_and_out_to_the_bit(name, tmp_path):
    load(theirs(name), device="cpu", dtype="bfloat16").save(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    load(tmp_path, device="cpu", dtype="bfloat16").save(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert written.keys() == again.keys() and all(torch.equal(again[each], written[each]) for each in written)


def test_heads_are_told_apart_by_their_tensors():
    heads = {name: ours(name).config.heads for name in CONFIGS}
    assert heads["bert"] == heads["roberta"] == ("pooler",)
    assert heads["distilbert"] == ()
    assert heads["bert-mlm"] == heads["roberta-untied"] == heads["distilbert-mlm"] == ("mlm",)
    assert heads["bert-pretrained"] == ("pooler", "mlm", "next_sentence")
    assert heads["bert-classes"] == ("pooler", "classes") and heads["roberta-classes"] == ("classes",)
    assert all(heads[name] == ("token_classes",) for name in WITH_TOKEN_CLASSES)


def test_token_classes_beside_a_pooler_that_they_do_not_read(tmp_path):
    """As checkpoints from before transformers 4 have them: config.json tells what the head is for."""

    pooler = {"bert.pooler.dense.weight": torch.ones(32, 32), "bert.pooler.dense.bias": torch.ones(32)}
    again = load(_changed("bert-token-classes", tmp_path, lambda state: state | pooler), device="cpu")
    assert again.config.heads == ("pooler", "token_classes")
    again.save(tmp_path / "again")
    assert "bert.pooler.dense.bias" in load_file(tmp_path / "again" / "model.safetensors")


def _changed(name, tmp_path, change):
    """The checkpoint with other tensors."""
    theirs(name).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return tmp_path


def test_older_names_are_read(tmp_path):
    """TensorFlow's names of norms, buffers, and a copy of the tied head."""

    def aged(state):
        older = {
            each.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
            for each, tensor in state.items()
        }
        buffers = {"bert.embeddings.position_ids": torch.arange(40)[None]}
        copies = {
            "cls.predictions.decoder.weight": state["bert.embeddings.word_embeddings.weight"].clone(),
            "cls.predictions.decoder.bias": state["cls.predictions.bias"].clone(),
        }
        return older | buffers | copies

    folder = _changed("bert-pretrained", tmp_path, aged)
    assert any("gamma" in each for each in load_file(folder / "model.safetensors"))
    assert all(map(torch.equal, tensors(load(folder, device="cpu").encoder), tensors(ours("bert-pretrained").encoder)))


@pytest.mark.parametrize("name", ["bert-untied", "roberta-untied"])
@pytest.mark.parametrize("gone", ["decoder.bias", "bias"])
def test_a_bias_with_two_names_may_be_there_under_one(name, gone, tmp_path):
    """transformers 4 writes one name of a head that is not tied, 5 both."""
    head = {"bert-untied": "cls.predictions.", "roberta-untied": "lm_head."}[name]

    def without(state):
        twins = {head + each: state[head + "bias"].clone() for each in ("bias", "decoder.bias") if each != gone}
        return {each: tensor for each, tensor in state.items() if each != head + gone} | twins

    folder = _changed(name, tmp_path, without)
    assert all(map(torch.equal, tensors(load(folder, device="cpu").encoder), tensors(ours(name).encoder)))


def test_names_may_have_the_prefix_of_the_whole_model_or_not(tmp_path):
    for number, (name, prefix) in enumerate(
        (("bert", "bert."), ("roberta", "roberta."), ("distilbert", "distilbert."))
    ):
        folder = _changed(
            name, tmp_path / str(number), lambda state, prefix=prefix: {prefix + each: t for each, t in state.items()}
        )
        assert all(map(torch.equal, tensors(load(folder, device="cpu").encoder), tensors(ours(name).encoder)))


def test_a_preset_can_be_saved(tmp_path, monkeypatch):
    small = replace(
        ENCODER_PRESETS["bert-base"], num_layers=2, hidden_size=48, num_heads=4, num_kv_heads=4, head_dim=12
    )
    monkeypatch.setitem(ENCODER_PRESETS, "bert-base", small)
    model = load("bert-base", device="cpu")
    model.save(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(again).__name__ == "BertModel"
    with torch.no_grad():
        exact = again(torch.tensor([texts()[1].ids])).pooler_output[0]
    got = EncoderEngine(model.encoder).read(texts()[1:2], tasks.CLS).values[0]
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


# --- what does not fit


def _folder(name, tmp_path, **changes):
    theirs(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        (
            "bert",
            {"model_type": "electra"},
            r"'electra' is not supported. Supported: GPT-2 .*; BERT \('bert'\), RoBERTa .*as encoders",
        ),
        ("bert", {"is_decoder": True}, r"causal attention \(is_decoder = true\), which is not supported"),
        ("bert", {"add_cross_attention": True}, "cross-attention, which is not supported"),
        ("bert", {"position_embedding_type": "relative_key"}, "relative_key positions .*not supported"),
        ("bert", {"hidden_act": "silu"}, "activation 'silu' is not supported; supported: gelu, gelu_new"),
        ("bert", {"num_attention_heads": 5}, "num_attention_heads = 5 does not divide"),
        ("bert", {"num_hidden_layers": 2}, "has 16 that a BERT has no place for"),
        ("bert", {"num_hidden_layers": 10**7}, "num_hidden_layers is 10,000,000"),
        (
            "bert",
            {"intermediate_size": 40},
            r"intermediate.dense.weight with shape \[48, 32\] where .* asks for \[40, 32\]",
        ),
        ("bert", {"type_vocab_size": 3}, r"token_type_embeddings.weight with shape \[2, 32\]"),
        ("bert", {"type_vocab_size": "2"}, "type_vocab_size is '2' .*, but it must be a whole number"),
        ("bert-classes", {"id2label": {"0": "a", "2": "b"}}, "id2label is .* must name the classes 0, 1 and so on"),
        ("bert-classes", {"id2label": ["a"]}, "id2label is"),
        ("bert-classes", {"id2label": {"0": "a"}}, r"classifier.weight with shape \[3, 32\] where .* \[1, 32\]"),
        ("roberta", {"pad_token_id": 41}, r"max_position_embeddings is 42, but positions begin at 42 \(pad_token_id"),
        ("distilbert", {"n_layers": 2}, "has 16 that a DistilBERT has no place for"),
        ("distilbert", {"dim": None}, "dim is None .*DistilBERT needs n_layers, dim, n_heads"),
    ],
)
def test_what_a_config_cannot_be_is_told(name, changes, says, tmp_path):
    with pytest.raises(ModelError, match=says):
        load(_folder(name, tmp_path, **changes), device="cpu")


@pytest.mark.parametrize(
    ("auto", "kind", "says"),
    [
        ("AutoModelForMultipleChoice", "roberta", r"classifier.weight with shape \[1, 32\] where .* \[2, 32\]"),
        (
            "AutoModelForQuestionAnswering",
            "bert",
            "no place for .qa_outputs.bias, qa_outputs.weight.*a masked language modeling head",
        ),
    ],
)
def test_other_heads_are_refused(auto, kind, says):
    _, sizes, _ = CONFIGS[kind]
    model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **sizes))
    with pytest.raises(ModelError, match=says):
        load(model, device="cpu")


def test_classes_without_names_get_those_of_transformers():
    model = transformers.AutoModelForSequenceClassification.from_config(
        transformers.AutoConfig.for_model("bert", **SIZES)
    )
    assert load(model, device="cpu").config.labels == ("LABEL_0", "LABEL_1")


# --- tokenizers

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text", "##s", "is", "read", "é", "e", ",", "!", "中"]
SAYS = ("A texts is read!", "Text, a", "", "é 中 x")


@pytest.mark.parametrize("lower", [True, False])
def test_word_pieces_of_an_older_checkpoint_are_read(lower, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    read = Tokenizer.from_folder(tmp_path, "bert")
    exact = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"), do_lower_case=lower)
    for text in SAYS:
        assert read.read(text)[0] == exact(text)["input_ids"], text
    ids, types = read.read("a text", "is read")
    told = exact("a text", "is read")
    assert (ids, types) == (told["input_ids"], told["token_type_ids"]) and 1 in types
    assert read.id_of("[MASK]") == 4 and read.read("a [MASK]")[0] == [2, 5, 4, 3] and read.id_of("nonsense") is None


def test_byte_pairs_of_an_older_roberta_are_read(tmp_path):
    letters = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "Ġ", "ab"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    read = Tokenizer.from_folder(tmp_path, "roberta")
    assert read.read("ab a")[0] == [0, 8, 7, 5, 2] and read.read("")[0] == [0, 2]
    assert read.read("a <mask>")[0] == [0, 5, 4, 2] and read.id_of("<mask>") == 4
    assert read.read("a", "b")[0] == [0, 5, 2, 2, 6, 2]
    assert Tokenizer.from_folder(tmp_path, "gpt2").read("ab")[0] == [8]


def test_a_tokenizer_of_transformers_is_taken(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    live = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    taken = Tokenizer.of(live)
    assert taken.read("a text", "is") == ([2, 5, 6, 3, 8, 3], [0, 0, 0, 0, 1, 1]) and taken.id_of("[MASK]") == 4
    live.save_pretrained(tmp_path / "saved")
    assert Tokenizer.from_folder(tmp_path / "saved", "bert").read("a text", "is") == taken.read("a text", "is")


def test_a_tokenizer_goes_along(tmp_path):
    theirs("bert").save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    load(tmp_path, device="cpu").save(tmp_path / "copy")
    assert load(tmp_path / "copy", device="cpu").encode("a text") == [2, 5, 6, 3]
    assert told("bert", [2, 5, 6, 3]).last_hidden_state.shape == (1, 4, 32)
