"""Empty prompts start from BOS: that of the checkpoint, and none where it has none."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from families import SIZES, theirs

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import PromptError
from eet_lab.models import load
from eet_lab.models.families import settings_of

FEW = Settings(max_new_tokens=3)


@pytest.fixture
def without_bos(tmp_path):
    """A checkpoint whose config says that there is none."""
    theirs("llama").save_pretrained(tmp_path)
    _write(tmp_path / "config.json", bos_token_id=None)
    _write(tmp_path / "generation_config.json", bos_token_id=None)
    return tmp_path


def test_an_empty_prompt_is_refused_where_there_is_no_bos(without_bos):
    """As by transformers, which has nothing to read then."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(without_bos)
    with pytest.raises(ValueError, match="bos_token_id"):
        reference.generate(max_new_tokens=3)
    model = load(without_bos, device="cpu")
    engine = Engine(model.decoder)
    with pytest.raises(PromptError, match="Prompt 2 is empty.*bos_token_id is missing in.*Give the prompt a token"):
        engine.generate([[5], []], FEW)
    assert len(engine.generate([[5]], FEW).tokens[0]) == 3
    assert settings_of(model.config)["bos_token_id"] is None


def test_the_bos_of_the_generation_config_comes_first(without_bos):
    _write(without_bos / "generation_config.json", bos_token_id=4)
    reference = transformers.AutoModelForCausalLM.from_pretrained(without_bos)
    expected = reference.generate(max_new_tokens=3, do_sample=False)[0].tolist()
    model = load(without_bos, device="cpu")
    assert [4, *Engine(model.decoder).generate([[]], FEW).tokens[0]] == expected


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "mistral", "qwen2", "qwen3"])
def test_a_config_that_does_not_say_has_the_bos_of_its_class(name, tmp_path):
    theirs(name).save_pretrained(tmp_path)
    for file in ("config.json", "generation_config.json"):
        told = json.loads((tmp_path / file).read_text())
        told.pop("bos_token_id", None)
        (tmp_path / file).write_text(json.dumps(told))
    expected = transformers.AutoConfig.from_pretrained(tmp_path).bos_token_id
    assert load(tmp_path, device="cpu").config.bos_token_id == expected


def test_a_live_model_without_bos_is_told_as_well():
    torch.manual_seed(0)
    live = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"bos_token_id": None}))
    with pytest.raises(PromptError, match="Prompt 1 is empty"):
        Engine(load(live, device="cpu").decoder).generate([[]], FEW)


def _write(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
