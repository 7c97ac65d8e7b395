"""The bundled demo model: its size, what it learned, and that its card tells the truth."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "eet_lab" / "models" / "demo"
MAX_PARAMETERS, MAX_BYTES = 4_800_000, 10_000_000
# Written for this test in the manner of the corpus, so it is in no split.
UNSEEN = """\
Return a new list containing the names of all the files in the given directory.

If the directory does not exist, an OSError is raised. The optional argument encoding is the name of the
encoding used to decode the names; the default value is None, which means that the names are returned as bytes.
"""


@pytest.fixture(scope="module")
def offline() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def model(offline: None) -> Any:
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(offline: None) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def training() -> dict[str, Any]:
    return json.loads((DEMO / "training.json").read_text())


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"train_demo_{name}", ROOT / "tools" / "train_demo" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stays_small(model: Any, training: dict[str, Any]) -> None:
    assert model.num_parameters() == training["num_parameters"] <= MAX_PARAMETERS
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= MAX_BYTES


def test_checkpoint_is_plain_gpt2(model: Any, tokenizer: Any) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["activation_function"] == "gelu_new"
    assert config["tie_word_embeddings"] is True
    assert config["n_embd"] // config["n_head"] % 16 == 0
    assert config["bos_token_id"] == config["eos_token_id"] == tokenizer.eos_token_id == tokenizer.bos_token_id
    assert len(tokenizer) == config["vocab_size"] == model.get_output_embeddings().weight.shape[0]
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_loses_nothing(text: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_both_tokenizer_loaders_agree(tokenizer: Any) -> None:
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    assert tokenizer(UNSEEN)["input_ids"] == plain.encode(UNSEEN).ids
    assert len(plain.encode(UNSEEN).ids) < len(UNSEEN) / 3


@torch.no_grad()
def test_has_learned_the_manner_of_documentation(model: Any, tokenizer: Any) -> None:
    ids = tokenizer(UNSEEN, return_tensors="pt")["input_ids"]
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    loss, loss_shuffled = (model(tokens, labels=tokens).loss.item() for tokens in (ids, shuffled))
    assert loss < 0.55 * math.log(model.config.vocab_size)
    assert loss < loss_shuffled - 1.5  # word order matters to it, not only word frequency


def test_losses_are_those_of_a_model_that_did_not_only_memorize(training: dict[str, Any]) -> None:
    loss = training["loss"]
    assert loss["train"] < loss["test"] < 0.5 * math.log(4096)
    assert min(point["validation_loss"] for point in training["curve"]) == pytest.approx(loss["validation"], abs=0.01)


def test_ends_documents_and_continues_prompts(model: Any, tokenizer: Any, training: dict[str, Any]) -> None:
    for row in training["samples"]:
        assert row["greedy"].startswith(row["prompt"])
        assert len(row["greedy"]) > len(row["prompt"]) + 10
        inputs = tokenizer(row["prompt"], return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert row["greedy"].startswith(tokenizer.decode(tokens[0], skip_special_tokens=True))


def test_card_is_rendered_from_the_training_record(training: dict[str, Any]) -> None:
    card = load_tool("card")
    config = json.loads((DEMO / "config.json").read_text())
    assert (DEMO / "README.md").read_text(encoding="utf-8") == card.render(training, config)
    assert f"{math.exp(training['loss']['test']):.1f}" in card.render(training, config)


@pytest.mark.parametrize(
    ("module", "family"),
    [("decimal", "decimal"), ("_pydecimal", "decimal"), ("test.test_decimal", "decimal"), ("email.header", "email")],
)
def test_related_modules_fall_into_one_split(module: str, family: str) -> None:
    corpus = load_tool("corpus")
    assert corpus.family(module) == family
    assert corpus.split_of(module) == corpus.split_of(family)


def test_held_out_splits_repeat_no_long_line_of_the_training_text() -> None:
    corpus = load_tool("corpus")
    line = "This sentence is surely longer than forty characters."
    names = {name: next(f"m{i}" for i in range(999) if corpus.split_of(f"m{i}") == name) for name in ("train", "test")}
    fresh = corpus.Document(names["test"], "Another sentence, which no other module has in it.")
    copied = corpus.Document(names["test"], f"{line}\nAnd more.")
    splits = corpus.split([corpus.Document(names["train"], line), fresh, copied], [])
    assert splits["test"] == [fresh]
