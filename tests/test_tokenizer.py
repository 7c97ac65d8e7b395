"""Tokenizers that a model cannot use: of another vocabulary, or none at all."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from families import V, theirs

from eet_lab.errors import ModelError, PromptError
from eet_lab.models import load
from eet_lab.models.loading import DEMO, demo_tokenizer
from eet_lab.models.tokenizer import Tokenizer

OTHERS = f"has 4,096 tokens, but the model's vocabulary has {V}.*another model.*tokenizer="


@pytest.fixture
def with_the_demos(tmp_path):
    """A checkpoint with the tokenizer of another model beside its weights."""
    theirs("gpt2").save_pretrained(tmp_path)
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    return tmp_path


def test_a_tokenizer_of_another_vocabulary_is_refused_when_loading(with_the_demos):
    with pytest.raises(ModelError, match=OTHERS):
        load(theirs("gpt2"), device="cpu", tokenizer=demo_tokenizer())
    with pytest.raises(ModelError, match=OTHERS):
        load(with_the_demos, device="cpu")


def test_the_right_tokenizer_can_be_given_instead_of_a_wrong_one(with_the_demos):
    small = small_tokenizer()
    assert load(with_the_demos, device="cpu", tokenizer=small).encode("ab") == [1, 2]


def test_a_vocabulary_may_be_padded():
    """Rows beyond the tokenizer's words are padding, which many checkpoints have."""
    small = small_tokenizer()
    assert small.get_vocab_size() < V
    model = load(theirs("gpt2"), device="cpu", tokenizer=small)
    assert model.encode("ba") == [2, 1] and model.decode([1, V - 1]) == f"a⟨{V - 1}⟩"


@pytest.mark.parametrize("wrong", [5, "nope", b"nope", object(), str])
def test_what_is_no_tokenizer_is_told(wrong):
    with pytest.raises(ModelError, match="tokenizer is .*, but it must be .*AutoTokenizer"):
        load(theirs("gpt2"), device="cpu", tokenizer=wrong)


def small_tokenizer():
    """Of the `tokenizers` library, with three words."""
    from tokenizers import Tokenizer, models

    return Tokenizer(models.BPE({"<unk>": 0, "a": 1, "b": 2}, []))


def test_padding_and_truncation_that_a_tokenizer_has_set_are_not_used(tmp_path):
    """As in transformers; the tokenizer itself, which is its owner's, keeps them."""
    theirs("gpt2").save_pretrained(tmp_path)
    small = small_tokenizer()
    small.enable_padding(length=8)
    small.enable_truncation(4)
    small.save(str(tmp_path / "tokenizer.json"))
    for model in (load(tmp_path, device="cpu"), load(theirs("gpt2"), device="cpu", tokenizer=small)):
        assert model.encode("ab") == [1, 2] and model.encode("ab" * 5) == [1, 2] * 5
        assert model.tokenizer.marks == [] and model.tokenizer.read("ab", "b")[0] == [1, 2, 2]
        assert model.tokenizer.written().read().encode("ab") == [1, 2]
    assert small.encode("ab" * 5).ids == [1, 2, 1, 2, 0, 0, 0, 0]


def test_a_tokenizer_that_pads_and_cannot_be_copied_is_told():
    from tokenizers import pre_tokenizers

    class Ours:
        def pre_tokenize(self, text):
            pass

    small = small_tokenizer()
    small.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Ours())
    small.enable_padding(length=8)
    with pytest.raises(ModelError, match=r"pads or truncates.*no_padding\(\) and no_truncation\(\)"):
        Tokenizer.of(small)


@pytest.mark.parametrize("has_tokenizer", [True, False])
@pytest.mark.parametrize(
    "wrong", ["a", b"a", 5, 1.5, None, [1.5], ["a"], [None], [True], [[1]], torch.ones(1, 2, dtype=int)]
)
def test_what_are_no_token_ids_are_told_when_decoding(wrong, has_tokenizer):
    model = load(theirs("gpt2"), device="cpu", tokenizer=small_tokenizer() if has_tokenizer else None)
    with pytest.raises(PromptError, match=r"ids is .*, but it must be a list of token ids.*: \[1, 2\]"):
        model.decode(wrong)


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_token_ids_below_0_are_told_when_decoding(has_tokenizer):
    model = load(theirs("gpt2"), device="cpu", tokenizer=small_tokenizer() if has_tokenizer else None)
    with pytest.raises(PromptError, match="ids holds -100, but token ids begin at 0. Leave out"):
        model.decode([1, -1, -100])


@pytest.mark.parametrize("ids", [(1, 2), range(1, 3), torch.tensor([1, 2]), np.array([1, 2])])
def test_token_ids_may_lie_in_anything(ids):
    tokenizer = Tokenizer.of(small_tokenizer())
    assert tokenizer.decode(ids) == tokenizer.decode([1, 2]) and tokenizer.decode(ids[:0]) == ""


def test_bytes_of_a_token_have_its_space_and_half_characters():
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models

    vocab = {"\u2581Hi": 0, "there": 1, "<0xF0>": 2, "<0x9F>": 3, "<0x0A>": 4}
    fast = Fast(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    llama = Tokenizer.of(fast)
    assert [llama.bytes_of(token) for token in range(6)] == [b" Hi", b"there", b"\xf0", b"\x9f", b"\n", "⟨5⟩".encode()]
    assert Tokenizer(None, lambda ids, skip_special_tokens: "a", 9).bytes_of(3) == b"a", "no words are known"
