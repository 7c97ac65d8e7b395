"""Heads that a config calls tied to the word embeddings, and that checkpoints have under a name of their own."""

from __future__ import annotations

import json
from copy import deepcopy

import encoders
import families
import pytest
import torch
import transformers
from families import V
from safetensors.torch import load_file, save_file

from eet_lab.models import load

HEAD = "lm_head.weight"
NAMES = {"bert-mlm": "cls.predictions.decoder", "roberta-mlm": "lm_head.decoder", "distilbert-mlm": "vocab_projector"}
DECODERS = ("gpt2", "opt", "llama-tied", "qwen3")
PROMPT = [5, 3, 11, 7]


def with_another_head(name: str):
    """A live model whose config says tied."""
    model = deepcopy((encoders if name in NAMES else families).theirs(name))
    model.config.tie_word_embeddings = True
    torch.manual_seed(5)
    model.get_output_embeddings().weight = torch.nn.Parameter(torch.randn(V, 32) * 0.3)
    return model


def written(model, folder, name: str):
    """Its checkpoint, with both tensors, as others than transformers write it."""
    model.save_pretrained(folder)
    key = f"{NAMES[name]}.weight" if name in NAMES else HEAD
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {key: model.get_output_embeddings().weight.detach().clone()}, folder / "model.safetensors")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"tie_word_embeddings": True}))
    return folder


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]


def is_near(folder, expected: torch.Tensor, kind) -> bool:
    """Whether transformers reads the same from a checkpoint, whose config it believes."""
    told = json.loads((folder / "config.json").read_text())
    assert told["tie_word_embeddings"] is False
    return torch.allclose(logits_of(kind.from_pretrained(folder).eval()), expected, atol=1e-5)


@pytest.mark.parametrize("name", [*DECODERS, *NAMES])
def test_a_head_that_differs_is_its_own(name, tmp_path):
    theirs = with_another_head(name)
    expected = logits_of(theirs)
    kind = transformers.AutoModelForMaskedLM if name in NAMES else transformers.AutoModelForCausalLM
    folder = written(theirs, tmp_path / "theirs", name)
    for model in (load(theirs, device="cpu"), load(folder, device="cpu")):
        assert not model.config.tied_head
        assert torch.equal(model.network.head.weight, theirs.get_output_embeddings().weight)
        model.save(tmp_path / "ours")
        assert is_near(tmp_path / "ours", expected, kind)
    if name in DECODERS:
        read = kind.from_pretrained(folder).eval()
        assert torch.allclose(logits_of(read), expected, atol=1e-5), "so transformers reads"


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "bert-mlm"])
def test_a_copy_of_the_embeddings_is_no_head_of_its_own(name, tmp_path):
    theirs = (encoders if name in NAMES else families).theirs(name)
    model = load(written(theirs, tmp_path, name), device="cpu")
    assert model.config.tied_head and model.settings["tie_word_embeddings"] is True


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "bert-mlm"])
def test_a_tied_head_may_be_there_in_place_of_the_embeddings(name, tmp_path):
    theirs = (encoders if name in NAMES else families).theirs(name)
    path = written(theirs, tmp_path, name) / "model.safetensors"
    tensors = load_file(path)
    gone = next(
        each for each in tensors if each.endswith(("wte.weight", "embed_tokens.weight", "word_embeddings.weight"))
    )
    save_file({each: tensor for each, tensor in tensors.items() if each != gone}, path)
    model = load(tmp_path, device="cpu")
    assert model.config.tied_head
    assert torch.equal(model.network.token_embedding, theirs.get_input_embeddings().weight)


def test_berts_head_reads_its_own_bias_where_two_differ(tmp_path):
    """Of its two names the linear's counts, as in transformers."""
    theirs = encoders.theirs("bert-mlm")
    path = written(theirs, tmp_path, "bert-mlm") / "model.safetensors"
    own = torch.arange(float(V))
    save_file(load_file(path) | {"cls.predictions.decoder.bias": own}, path)
    expected = logits_of(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval())
    model = load(tmp_path, device="cpu")
    assert torch.equal(model.encoder.head.bias, own)
    model.save(tmp_path / "ours")
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.allclose(logits_of(again), expected, atol=1e-5)
