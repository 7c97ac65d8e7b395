"""Checkpoints in several files, and files that lie beside them."""

from __future__ import annotations

import json

import pytest
import torch
from families import ours, theirs
from safetensors.torch import load_file, save_file

from eet_lab.errors import ModelError
from eet_lab.models import load


def test_missing_shards_are_named_at_once(tmp_path):
    theirs("qwen3").save_pretrained(tmp_path, max_shard_size="20KB")
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    gone = names[1:-1]
    for name in gone:
        (tmp_path / name).unlink()
    missing = ", ".join(gone[:3]) + (", ..." if len(gone) > 3 else "")
    with pytest.raises(ModelError) as caught:
        load(tmp_path, device="cpu")
    says = f"names {len(names)} files, of which these are missing: {missing}. Download"
    assert says in str(caught.value) and str(caught.value).count(str(tmp_path)) == 1


def test_an_index_may_name_a_file_that_is_not_there(tmp_path):
    theirs("qwen3").save_pretrained(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "lm_head.weight": "other.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="names 2 files, of which these are missing: other.safetensors. Download"):
        load(tmp_path, device="cpu")


def test_a_file_of_another_program_beside_the_weights_is_not_read(tmp_path):
    """Mistral's own format lies beside transformers' in the same folder, under other names."""
    theirs("qwen3").save_pretrained(tmp_path)
    save_file({"layers.0.attention.wq.weight": torch.ones(4)}, tmp_path / "consolidated.safetensors")
    assert load(tmp_path, device="cpu").config == ours("qwen3").config


def test_shards_of_older_checkpoints_are_named_by_their_index_too(tmp_path):
    theirs("qwen3").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = [f"pytorch_model-{number:05}-of-00002.bin" for number in (1, 2)]
    index = {name: files[number % 2] for number, name in enumerate(state)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    for file in files:
        torch.save({name: state[name] for name in state if index[name] == file}, tmp_path / file)
    assert load(tmp_path, device="cpu").config == ours("qwen3").config
    (tmp_path / files[1]).unlink()
    with pytest.raises(ModelError, match=f"names 2 files, of which these are missing: {files[1]}. Download"):
        load(tmp_path, device="cpu")
