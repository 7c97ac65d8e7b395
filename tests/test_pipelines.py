"""Pipelines beside those of transformers, with the same words and on the same weights."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from encoders import V, theirs

import eet_lab
from eet_lab.errors import ModelError, PromptError, RecipeError
from eet_lab.models import load
from eet_lab.models.loading import DEMO
from eet_lab.models.token_types import TYPED, TYPED_IN_4
from eet_lab.models.tokenizer import Tokenizer

PLAIN = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11"]
PROMPTS = ["Return a list of", "The", "If the file does not exist,"]
GREEDY = {"max_new_tokens": 8, "do_sample": False}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join([*PLAIN, *(f"w{number}" for number in range(V - len(PLAIN)))]) + "\n")
    return transformers.BertTokenizerFast(str(path))


@pytest.fixture(scope="module")
def both(words):
    """`both(task, name)` are transformers' pipeline and ours on one encoder."""

    def both(task, name):
        tokenizer = copy.copy(words)
        tokenizer.model_input_names = ["input_ids", "attention_mask"]  # DistilBERT takes no token types
        peer = transformers.pipeline(task, theirs(name), tokenizer=tokenizer, device="cpu")
        return peer, eet_lab.pipeline(task, load(theirs(name), device="cpu", tokenizer=words))

    return both


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "demo"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def generating(folder):
    peer = transformers.pipeline("text-generation", str(folder), device="cpu", dtype=torch.float32)
    return peer, eet_lab.pipeline("text-generation", folder, device="cpu", recipe="all")


def same(told, expected):
    """Equal in shape and words, and in numbers up to rounding."""
    if isinstance(expected, float):
        assert told == pytest.approx(expected, rel=1e-3, abs=1e-6)
    elif isinstance(expected, dict):
        assert list(told) == list(expected)
        for name in expected:
            same(told[name], expected[name])
    elif isinstance(expected, list):
        assert isinstance(told, list) and len(told) == len(expected)
        for each in zip(told, expected, strict=True):
            same(*each)
    else:
        assert told == expected


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"return_full_text": False},
        {"return_tensors": True},
        {"max_new_tokens": 24},
        {"max_new_tokens": 24, "stop_sequence": "is"},
        {"max_new_tokens": 24, "stop_sequence": ["list", "file"], "return_full_text": False},
    ],
)
@pytest.mark.parametrize("given", [PROMPTS[0], PROMPTS, PROMPTS[:1]])
def test_text_generation(generating, how, given):
    peer, ours = generating
    same(ours(given, **(GREEDY | how)), peer(given, **(GREEDY | how)))


def test_a_chat(generating):
    peer, ours = generating
    chat = [{"role": "user", "content": "Return a list of"}]
    same(ours(chat, **GREEDY), peer(chat, **GREEDY))
    same(ours([chat, chat], **GREEDY), peer([chat, chat], **GREEDY))
    plain = eet_lab.pipeline("text-generation", load("demo", device="cpu"))
    with pytest.raises(ModelError, match="no chat template"):
        plain(chat)


def test_drawn_texts_repeat_by_their_seed(generating):
    _, ours = generating
    how = {"max_new_tokens": 8, "num_return_sequences": 3, "temperature": 1.0}
    told = ours(PROMPTS[:2], seed=1, **how)
    assert [len(each) for each in told] == [3, 3] and len({each["generated_text"] for each in told[0]}) > 1
    assert told == ours(PROMPTS[:2], seed=1, **how) != ours(PROMPTS[:2], **how)


@pytest.mark.parametrize("name", ["bert-mlm", "distilbert-mlm"])
@pytest.mark.parametrize("how", [{}, {"top_k": 2}, {"targets": ["w7", "w3"]}, {"targets": "w7", "top_k": 9}])
def test_fill_mask(both, name, how):
    peer, ours = both("fill-mask", name)
    one, several = "w1 [MASK] w3", "[MASK] w4 w5 [MASK]"
    for given in (one, several, [one], [one, several, one]):
        same(ours(given, **how), peer(given, **how))


@pytest.mark.parametrize("name", ["bert-classes", "distilbert-classes"])
@pytest.mark.parametrize(
    "how",
    [{}, {"top_k": None}, {"top_k": 1}, {"top_k": 2}, {"function_to_apply": "sigmoid"}, {"function_to_apply": "none"}],
)
def test_text_classification(both, name, how):
    peer, ours = both("text-classification", name)
    pair = {"text": "w1 w2", "text_pair": "w3"}
    for given in (TEXTS[0], TEXTS, TEXTS[:1], *([pair, [pair]] if name == "distilbert-classes" else [])):
        same(ours(given, **how), peer(given, **how))
    long = "w1 " * 60
    same(ours(long, truncation=True, **how), ours("w1 " * 38, **how))
    with pytest.raises(PromptError, match="cut all texts with truncation=True"):
        ours(long, **how)


def test_of_a_pair_that_is_too_long_the_longer_text_is_cut(both, words):
    peer, ours = both("text-classification", "distilbert-classes")
    for text, second in (("w1 " * 60, "w3 w4"), ("w3 w4", "w1 " * 60), ("w2 " * 50, "w1 " * 60)):
        pair = {"text": text, "text_pair": second}
        expected = peer(pair, truncation=True, max_length=ours.model.config.context)
        same(ours(pair, truncation=True), expected)
        told = words(text, second, truncation=True, max_length=40)
        for given in (words, words.backend_tokenizer):
            read = Tokenizer.of(given).read(text, second, most=40)
            assert read == (told["input_ids"], told["token_type_ids"]) and len(read[0]) == 40


@pytest.mark.parametrize(
    ("told", "config"),
    [
        ({"tokenizer_class": "BertTokenizer"}, {}),
        ({"tokenizer_class": "MobileBertTokenizerFast"}, {}),
        ({"tokenizer_class": "DistilBertTokenizer"}, {}),
        ({"tokenizer_class": "TokenizersBackend"}, {}),
        ({"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]}, {}),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {}),
        ({}, {"tokenizer_class": "DistilBertTokenizer"}),
        ({}, {}),
    ],
)
def test_token_types_are_read_where_transformers_reads_them(words, tmp_path, told, config):
    (tmp_path / "tokenizer.json").write_text(words.backend_tokenizer.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **config}))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)("w1 w2", "w3")
    found = Tokenizer.from_folder(tmp_path, "bert").read("w1 w2", "w3")
    assert found == (expected["input_ids"], expected.get("token_type_ids"))


def test_the_classes_that_tell_token_types_are_those_of_transformers():
    is_old = transformers.__version__.startswith("4.")
    for name in (*TYPED, *TYPED_IN_4, "RobertaTokenizer", "DistilBertTokenizer", "MPNetTokenizer", "BartTokenizer"):
        try:
            names = getattr(transformers, name).model_input_names
        except (AttributeError, ImportError):  # this version has no such class, or asks for SentencePiece
            continue
        assert ("token_type_ids" in names) == (name in TYPED or (is_old and name in TYPED_IN_4)), name


@pytest.mark.parametrize("name", ["BertTokenizer", None])
def test_a_tokenizer_of_another_class_tells_no_token_types_in_a_berts_folder(tmp_path, name):
    """RoBERTa's own marks and byte pairs, which its class reads as they are."""
    letters = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "Ġ", "ab"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    transformers.RobertaTokenizerFast(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")).save_pretrained(
        tmp_path / "saved"
    )
    config = {"model_type": "bert", **({"tokenizer_class": name} if name else {})}
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")("ab a", "b")
    found = Tokenizer.from_folder(tmp_path / "saved", "bert").read("ab a", "b")
    assert found == (expected["input_ids"], None) and "token_type_ids" not in expected


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_feature_extraction(both, name):
    peer, ours = both("feature-extraction", name)
    for given in (TEXTS[0], TEXTS, TEXTS[:1]):
        for each, expected in zip(ours(given), peer(given), strict=True):
            np.testing.assert_allclose(each, expected, rtol=1e-3, atol=1e-4)
        for each, expected in zip(ours(given, return_tensors=True), peer(given, return_tensors=True), strict=True):
            torch.testing.assert_close(each, expected, rtol=1e-3, atol=1e-4)
    assert ours("w1 " * 60, truncation=True, return_tensors=True).shape == (1, 40, 32)
    with pytest.raises(PromptError, match="cut all texts with truncation=True"):
        ours("w1 " * 60)


def test_a_recipe_is_used(words):
    model = load(theirs("bert"), device="cpu", tokenizer=words)
    plain, packed = (eet_lab.pipeline("feature-extraction", model, recipe=recipe) for recipe in ("", "all"))
    for each, other in zip(plain(TEXTS), packed(TEXTS), strict=True):
        np.testing.assert_allclose(each, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("task", "words", "how", "error", "said"),
    [
        ("text-generation", "a", {"stop_sequence": [""]}, PromptError, "none empty"),
        ("text-generation", "a", {"do_sample": False, "num_return_sequences": 2}, PromptError, "do_sample"),
        ("text-generation", "a", {"do_sample": "no"}, PromptError, "do_sample is 'no', but it must be True or False"),
        ("text-generation", "a", {"return_full_text": 0}, PromptError, "return_full_text is 0"),
        ("text-generation", "a", {"temperature": 0}, PromptError, "temperature is 0.*do_sample=False"),
        ("text-generation", "a", {"max_new_tokens": 5000}, PromptError, "context"),
        ("text-generation", 5, {}, PromptError, "5"),
        ("text-generation", "a", {"top_k": None}, PromptError, "top_k is None, but it must be a whole number from 0"),
        ("text-generation", "a", {"top_k": "5"}, PromptError, "top_k is '5'"),
        ("text-generation", "a", {"stop_sequence": 5}, PromptError, "stop_sequence is 5, but it must be a text or"),
        (["text-generation"], "a", {}, PromptError, "task is .'text-generation'., but it must be one of"),
        (
            "text-generation",
            "a",
            {"num_beams": 4},
            PromptError,
            "no option 'num_beams': there is no beam search.*top_p",
        ),
        ("text-generation", "a", {"max_length": 9}, PromptError, "'max_length': max_new_tokens says how many"),
        ("text-generation", "a", {"batch_size": 9}, PromptError, "'batch_size': texts that are given together"),
        ("text-generation", "a", {"temperatur": 1}, PromptError, "Did you mean 'temperature'"),
        ("text-generations", "a", {}, PromptError, "Did you mean 'text-generation'"),
        ("fill-mask", "a", {}, ModelError, "decoder"),
        ("feature-extraction", "a", {}, ModelError, "decoder"),
    ],
)
def test_what_cannot_be(generating, task, words, how, error, said):
    with pytest.raises(error, match=said):
        eet_lab.pipeline(task, generating[1].model)(words, **how)


def test_a_loaded_model_is_not_loaded_again(generating):
    with pytest.raises(PromptError, match="model is loaded already, so that device would do nothing; give it to load"):
        eet_lab.pipeline("text-generation", generating[1].model, device="cuda:7", dtpe="x")


def test_the_options_of_loading():
    assert eet_lab.pipeline("text-generation", device=-1).model.device == "cpu", "transformers' number for it"
    with pytest.raises(ModelError, match="device is 'cuda:9'"):
        eet_lab.pipeline("text-generation", device=9)
    how = {"device": "cpu", "torch_dtype": "float16"}
    assert eet_lab.pipeline("text-generation", **how).model.dtype == "float16", "as transformers called it"
    for wrong in ({"dtpe": "x"}, {**how, "dtype": "float32"}):
        with pytest.raises(PromptError, match="This pipeline has no option '.*': The options are device, dtype, "):
            eet_lab.pipeline("text-generation", **wrong)


def test_a_recipe_that_cannot_be_is_told_at_once(generating):
    with pytest.raises(RecipeError, match="no technique 'memory_resue'"):
        eet_lab.pipeline("text-generation", generating[1].model, recipe="memory_resue")


def test_what_an_encoder_cannot(both):
    _, ours = both("fill-mask", "bert-mlm")
    with pytest.raises(PromptError, match="no word of the vocabulary"):
        ours("w1 [MASK]", targets="nothing")
    with pytest.raises(PromptError, match="has no"):
        ours("w1")
    with pytest.raises(ModelError, match="encoder"):
        eet_lab.pipeline("text-generation", ours.model)
    with pytest.raises(ModelError, match="lacks"):
        eet_lab.pipeline("text-classification", ours.model)
    with pytest.raises(ModelError, match="lacks"):
        eet_lab.pipeline("fill-mask", load(theirs("bert"), device="cpu"))
    _, ours = both("text-classification", "bert-classes")
    with pytest.raises(PromptError, match="function_to_apply is 'softmin'.*Did you mean 'softmax'"):
        ours("w1", function_to_apply="softmin")
    with pytest.raises(PromptError, match="function_to_apply is .'softmax'.; there are"):
        ours("w1", function_to_apply=["softmax"])
    with pytest.raises(PromptError, match="'text_pair'"):
        ours({"text": "w1", "second": "w2"})
