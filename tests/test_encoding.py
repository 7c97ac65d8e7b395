"""encode, classify and fill_mask: what comes in at these doors, and what transformers' pipelines say."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import make_gpt2
from encoders import CONFIGS, V, ours, theirs

import eet_lab
from eet_lab.cli import main
from eet_lab.errors import Cancelled, ModelError, PromptError, RecipeError
from eet_lab.models import load

PLAIN = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*PLAIN, *(f"w{number}" for number in range(V - len(PLAIN)))]
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", ""]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join(WORDS) + "\n")
    return transformers.BertTokenizerFast(str(path))


@pytest.fixture(scope="module")
def with_words(tokenizer):
    """A model by its name, with a tokenizer."""
    return lambda name: load(theirs(name), device="cpu", tokenizer=tokenizer)


def pipeline(task, name, tokenizer, **keywords):
    """transformers' own; DistilBERT takes no token types."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return transformers.pipeline(task, theirs(name), tokenizer=tokenizer, device="cpu", **keywords)


def exact(name, tokenizer, *texts):
    with torch.no_grad():
        return theirs(name)(**tokenizer(*texts, return_tensors="pt"), output_hidden_states=True)


@pytest.mark.parametrize("recipe", ["", "all"])
def test_encode(with_words, tokenizer, recipe):
    model = with_words("bert")
    mean, cls = (eet_lab.encode(model, TEXTS, recipe, pool=pool) for pool in ("mean", "cls"))
    hidden = eet_lab.encode(model, TEXTS, recipe, pool=None)
    assert mean.vectors.shape == cls.vectors.shape == (4, 32) and mean.vectors.dtype == torch.float32
    assert mean.run.num_tokens == 3 + 1 + 7 + 0 + 4 * 2, "with the special tokens, also around an empty text"
    assert str(mean.recipe) == ("baseline" if not recipe else "pre_padding,mask_removal,memory_reuse,packed_prefill")
    for number, text in enumerate(TEXTS):
        told = exact("bert", tokenizer, text)
        torch.testing.assert_close(mean.vectors[number], told.last_hidden_state[0].mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(cls.vectors[number], told.pooler_output[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(hidden.vectors[number], told.last_hidden_state[0], rtol=1e-4, atol=1e-4)
    assert hidden.run.tokens_per_s > 0


@pytest.mark.parametrize("pool", ["mean", "cls", None])
def test_something_can_be_trained_on_embeddings(with_words, pool):
    vectors = eet_lab.encode(with_words("bert"), TEXTS, pool=pool).vectors
    layer = torch.nn.Linear(32, 1)
    layer(vectors[0]).sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def test_one_text_a_pair_and_token_ids_are_texts(with_words, tokenizer):
    model = with_words("bert")
    ids = tokenizer("w1 w2")["input_ids"]
    one = eet_lab.encode(model, "w1 w2").vectors
    assert one.shape == (1, 32)
    torch.testing.assert_close(eet_lab.encode(model, [ids]).vectors, one)
    pair = eet_lab.encode(model, [("w1 w2", "w3"), "w4"]).vectors[0]
    told = exact("bert", tokenizer, "w1 w2", "w3").last_hidden_state[0].mean(0)
    torch.testing.assert_close(pair, told, rtol=1e-4, atol=1e-5)
    roberta = eet_lab.encode(with_words("roberta"), [("w1", "w3")])
    assert roberta.run.num_tokens == 5, "its tokens are of one type, whatever a tokenizer says"
    assert eet_lab.encode(model, []).vectors.shape == (0, 32)


@pytest.mark.parametrize("name", ["bert-classes", "distilbert-classes"])
def test_classify_says_what_a_pipeline_says(with_words, tokenizer, name):
    pipe = pipeline("text-classification", name, tokenizer, top_k=None)
    told = eet_lab.classify(with_words(name), TEXTS[:3], batch_tokens=20)
    for label, scores, expected in zip(told.labels, told.scores, pipe(TEXTS[:3]), strict=True):
        by_name = {each["label"]: each["score"] for each in expected}
        assert label == expected[0]["label"] and told.names == ("bad", "fair", "good")
        assert [by_name[each] for each in told.names] == pytest.approx(scores.tolist(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("kind", "make"), [("regression", lambda x: x), ("multi_label_classification", torch.sigmoid)])
def test_scores_are_as_the_problem_has_them(tokenizer, kind, make):
    """By the config, which training reads too."""
    peer = copy.deepcopy(theirs("bert-classes"))
    peer.config.problem_type = kind
    told = eet_lab.classify(replace(load(peer, device="cpu", tokenizer=tokenizer), settings=None), TEXTS)
    assert torch.equal(told.scores, make(told.logits)) and told.logits.shape == (4, 3)


@pytest.mark.parametrize("name", ["bert-mlm", "distilbert-mlm"])
def test_fill_mask_says_what_a_pipeline_says(with_words, tokenizer, name):
    masked = ["w1 [MASK] w3", "[MASK] w4 w5 [MASK]"]
    pipe = pipeline("fill-mask", name, tokenizer, top_k=3)
    told = eet_lab.fill_mask(with_words(name), masked, top_k=3)
    assert [len(places) for places in told.words] == [1, 2] and all(len(best) == 3 for best in told.words[1])
    for places, expected in zip(told.words, (([pipe(masked[0])]), pipe(masked[1])), strict=True):
        for best, each in zip(places, expected, strict=True):
            assert [guess.token for guess in best] == [one["token"] for one in each]
            assert [guess.word for guess in best] == [one["token_str"] for one in each]
            assert [guess.score for guess in best] == pytest.approx([one["score"] for one in each], rel=1e-3)
    assert len(eet_lab.fill_mask(with_words(name), masked[0], top_k=10**6).words[0][0]) == V


def test_progress_and_cancel(with_words):
    seen, stop = [], threading.Event()
    eet_lab.encode(with_words("bert"), TEXTS, "", progress=lambda *told: seen.append(told))
    assert seen == [(done, 4, "texts") for done in range(1, 5)]
    stop.set()
    with pytest.raises(Cancelled):
        eet_lab.encode(with_words("bert"), TEXTS, cancel=stop)


# --- errors


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (5, "texts is 5, but it must be a text, or a list of texts"),
        (b"ab", "texts is b'ab'"),
        ([1, 2], r"A prompt is 1, .* a list of token ids"),
        ([("a", 1)], "Text 1 holds 'a', but token ids are ints"),
        (["ab\ud800"], "half of a surrogate pair"),
        ([[]], "Text 1 has no tokens"),
        (["w1 " * 60], "Text 1 has 62 tokens, but this encoder reads at most 40.*truncate=True"),
    ],
)
def test_what_is_no_text_is_told(with_words, texts, says):
    with pytest.raises(PromptError, match=says):
        eet_lab.encode(with_words("bert"), texts)


@pytest.mark.parametrize(
    ("keywords", "error", "says"),
    [
        ({"pool": "max"}, PromptError, "pool is 'max', but it must be 'mean', 'cls' or None"),
        ({"pool": ["mean"]}, PromptError, "pool is .'mean'., but it must be"),
        ({"pool": "meen"}, PromptError, "Did you mean 'mean'"),
        ({"batch_token": 8}, PromptError, "no keyword 'batch_token'. Did you mean 'batch_tokens'"),
        ({"batch_tokens": "8"}, PromptError, "batch_tokens is '8', but it must be a whole number from 1"),
        ({"recipe": "fused_kernels"}, RecipeError, "fused_kernels cannot run on cpu"),
        (
            {"recipe": "int8_weights"},
            RecipeError,
            "int8_weights cannot run on this model: it is for decoders",
        ),
    ],
)
def test_keywords_are_checked(with_words, keywords, error, says):
    with pytest.raises(error, match=says):
        eet_lab.encode(with_words("bert"), "w1", **keywords)


def test_a_masked_word_that_is_cut_off_is_told(with_words):
    """Another text's word would be guessed in its place."""
    texts = ["w1 " * 60 + "[MASK]", "w2 [MASK] w3"]
    with pytest.raises(PromptError, match="Text 1 is cut to 40 tokens, and the one at place 61.*is gone"):
        eet_lab.fill_mask(with_words("bert-mlm"), texts, truncate=True)
    assert len(eet_lab.fill_mask(with_words("bert-mlm"), texts[1:], truncate=True).words) == 1


def test_fill_mask_wants_a_mask(with_words):
    with pytest.raises(PromptError, match=r"Text 2 has no \[MASK\]; write it"):
        eet_lab.fill_mask(with_words("bert-mlm"), ["[MASK]", "w1"])
    with pytest.raises(PromptError, match=r"Text 1 has no \[MASK\]; write it"):
        eet_lab.fill_mask(with_words("roberta-mlm"), "w1")  # whose tokenizer has BERT's word
    with pytest.raises(ModelError, match="no tokenizer with the word"):
        eet_lab.fill_mask(ours("bert-mlm"), [[1, 2]])
    with pytest.raises(PromptError, match="top_k is 0"):
        eet_lab.fill_mask(with_words("bert-mlm"), "[MASK]", top_k=0)
    with pytest.raises(ModelError, match="lacks a masked language modeling head: it has a pooler"):
        eet_lab.fill_mask(with_words("bert"), "[MASK]")
    with pytest.raises(ModelError, match="came without a tokenizer; give texts as lists"):
        eet_lab.encode(ours("bert"), "w1")


WORK = [
    lambda model: eet_lab.generate(model, [[1]]),
    lambda model: eet_lab.ladder(model, [[1]]),
    lambda model: model.decoder,
]


@pytest.mark.parametrize("work", WORK, ids=["generate", "ladder", "decoder"])
def test_an_encoder_generates_nothing(work):
    with pytest.raises(ModelError, match=r"BertModel is an encoder \(bert\): .* Use eet_lab.encode, .* such as 'demo'"):
        work(ours("bert"))


@pytest.mark.parametrize("work", [eet_lab.encode, eet_lab.classify, eet_lab.fill_mask])
def test_a_decoder_encodes_nothing(work, tiny):
    with pytest.raises(ModelError, match=r"is a decoder \(gpt2\): .* Use eet_lab.generate, or load .* 'bert-base'"):
        work(tiny, "a")
    with pytest.raises(ModelError, match=r"model is 'bert-base', but it must be a loaded model"):
        work("bert-base", "a")
    with pytest.raises(ModelError, match="model is an Encoder, but it must be the loaded model"):
        work(ours("bert").encoder, "a")
    with pytest.raises(ModelError, match="eet_lab.load"):
        work(make_gpt2(), "a")


@pytest.mark.parametrize("command", [["generate", "a"], ["compare"], ["bench", "{}/b1/p2/n2"]])
def test_commands_say_that_a_model_is_an_encoder(command, tmp_path, capsys, monkeypatch):
    theirs("bert").save_pretrained(tmp_path / "my-bert")
    monkeypatch.chdir(tmp_path)
    model = ["--model", "my-bert"] if command[0] != "bench" else []
    words = [word.format("my-bert") for word in command]
    assert main([*words, *model, "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert "my-bert is an encoder (bert): it reads whole texts" in told
    assert "to time it, eet_lab.compare in Python or `eet-lab bench encode:my-bert/t64/p5-500`" in told


def test_the_page_says_that_a_model_is_an_encoder():
    from eet_lab.workbench.engine_thread import Feed
    from eet_lab.workbench.jobs import load_model

    feed = Feed.__new__(Feed)
    feed.progress = lambda *told: None
    with pytest.raises(ModelError, match="is an encoder"):
        load_model(theirs("bert"), "cpu", None, feed, threading.Event())


def test_every_configuration_is_some_encoder():
    assert {ours(name).config.stage for name in CONFIGS} == {"encode"}
