"""Checkpoints of every family, in and out to the bit, and what is refused."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from pathlib import Path
from platform import node

import pytest
import torch
import transformers
from conftest import make_gpt2
from families import CONFIGS, CONTEXT, V, ours, theirs
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import ModelError, OutOfMemory, PromptError
from eet_lab.models import PRESETS, load
from eet_lab.models.config import Config
from eet_lab.models.decoder import tensors
from eet_lab.models.families import TITLES, settings_of
from eet_lab.training import Example, Trainer


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_goes_in_and_out_to_the_bit(name, tmp_path):
    theirs(name).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1, "in shards"
    load(tmp_path / "theirs", device="cpu").save(tmp_path / "ours")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    load(tmp_path / "theirs", device="cpu").save(tmp_path / "theirs")
    assert [each.name for each in (tmp_path / "theirs").glob("model*")] == ["model.safetensors"], "in place of shards"
    theirs(name).save_pretrained(tmp_path / "whole")
    original = load_file(tmp_path / "whole" / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[each], original[each]) for each in original)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    state = theirs(name).state_dict()
    assert back.keys() == state.keys() and all(torch.equal(back[each], state[each]) for each in state)
    assert ours(name).config == load(tmp_path / "ours", device="cpu").config


def test_a_model_of_random_weights_can_be_saved_and_goes_on_the_same(tmp_path, monkeypatch):
    small = Config(2, 32, 4, 48, V, CONTEXT, **_llama())
    monkeypatch.setitem(PRESETS, "smoke", small)
    model = load("smoke", device="cpu", dtype="bfloat16")
    model.save(tmp_path)
    again = load(tmp_path, device="cpu", dtype="bfloat16")
    assert all(map(torch.equal, tensors(model.decoder), tensors(again.decoder)))
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16


def _llama():
    preset = PRESETS["llama-1b"]
    names = ("act", "biases", "family", "rope")
    return {name: getattr(preset, name) for name in names} | {"num_kv_heads": 2}


def test_older_configs_tell_rope_in_their_own_way(tmp_path):
    name = "llama-llama3"
    theirs(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    told = json.loads(path.read_text())
    rope = told.pop("rope_parameters")
    scaling = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": rope.pop("rope_type")}}
    path.write_text(json.dumps(told | scaling))
    assert load(tmp_path, device="cpu").config == ours(name).config


@pytest.mark.parametrize("told", [{"rope_type": "linear", "factor": 4.0}, {"type": "su", "factor": 2.0}])
def test_rope_scaling_counts_beside_rope_parameters(told, tmp_path):
    """As in transformers, which writes the one and once wrote the other."""
    theirs("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_scaling": told}))
    if "type" in told:
        with pytest.raises(ModelError, match="The rope type 'su' is not supported"):
            load(tmp_path, device="cpu")
        return
    rope, peer = load(tmp_path, device="cpu").config.rope, transformers.AutoConfig.from_pretrained(tmp_path)
    assert (rope.kind, dict(rope.numbers)) == ("linear", {"factor": 4.0})
    assert (peer.rope_parameters["rope_type"], peer.rope_parameters["factor"]) == ("linear", 4.0)


def test_a_folder_with_the_name_of_a_preset_is_not_passed_over(tmp_path, monkeypatch):
    """A checkpoint that git cloned from the hub has such a folder."""
    monkeypatch.chdir(tmp_path)
    theirs("gpt2").save_pretrained("gpt2")
    with pytest.raises(ModelError, match=r"'gpt2' is a preset .* Write './gpt2' for the folder"):
        load("gpt2", device="meta")
    for folder in ("./gpt2", Path("gpt2"), tmp_path / "gpt2"):
        assert load(folder, device="cpu").config == ours("gpt2").config
    assert load("gpt2-medium", device="meta").kind == "random"
    with pytest.raises(ModelError, match=r"There is no folder '\./gpt3'\. Give"):
        load("./gpt3", device="cpu")


def test_two_that_save_in_one_folder_write_the_same_whole_file(tmp_path, monkeypatch):
    """As the ranks of one training do, which all call `Model.save`."""
    saved = []

    def while_another_saves(tensors, path, metadata):
        save_file(tensors, path, metadata)
        saved.append(path)
        if len(saved) == 1:
            ours("gpt2").save(tmp_path)

    monkeypatch.setattr("safetensors.torch.save_file", while_another_saves)
    ours("gpt2").save(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(load(tmp_path, device="cpu").decoder.head.weight, ours("gpt2").decoder.head.weight)


def test_what_a_killed_writer_left_goes_and_what_one_writes_stays(tmp_path, monkeypatch):
    parts = []

    def write(tensors, path, metadata):
        save_file(tensors, path, metadata)
        parts.append(path.parent)
        if len(parts) == 1:  # another saves there meanwhile
            ours("gpt2").save(tmp_path)
            assert path.exists() and not parts[1].exists()

    monkeypatch.setattr("safetensors.torch.save_file", write)
    ours("gpt2").save(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    parts[0].mkdir()  # as it is where its writer is killed
    (parts[0] / "model.safetensors").write_text("half")
    of_another = tmp_path / parts[0].name.replace(node(), f"{node()}-2")  # a machine whose locks may not be seen here
    of_another.mkdir()
    ours("gpt2").save(tmp_path)
    names = ["config.json", "model.safetensors", of_another.name]
    assert sorted(each.name for each in tmp_path.iterdir()) == names


@pytest.mark.parametrize("kind", ["gpt2", "demo"])
def test_a_tokenizer_that_was_given_is_saved_in_place_of_the_checkpoints_own(kind, tmp_path):
    if kind != "demo":  # without one
        theirs(kind).save_pretrained(tmp_path / kind)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}))
    model = load("demo" if kind == "demo" else tmp_path / kind, device="cpu", tokenizer=words)
    assert model.encode("b") == [1]
    model.save(tmp_path / "copy")
    assert load(tmp_path / "copy", device="cpu").encode("b") == [1]
    others = {path.name for path in (tmp_path / "copy").iterdir()} - {"config.json", "model.safetensors"}
    assert others == {"tokenizer.json", "generation_config.json"}


def test_a_tokenizer_and_what_it_was_called_go_along(tmp_path):
    load("demo", device="cpu").save(tmp_path / "copy")
    again = load(tmp_path / "copy", device="cpu")
    assert again.encode("def main") == load("demo", device="cpu").encode("def main") != []
    assert (tmp_path / "copy" / "generation_config.json").exists()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ModelError, match="cannot be saved in .*file.*Choose another folder"):
        again.save(blocked)
    with pytest.raises(ModelError, match="shapes and no data"):
        load("gpt2", device="meta").save(tmp_path / "none")


def test_an_older_tokenizer_begins_texts_as_it_was_told(tmp_path):
    theirs("opt").save_pretrained(tmp_path)
    letters = {letter: i for i, letter in enumerate(["<pad>", "</s>", "a", "b"])}
    (tmp_path / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    assert load(tmp_path, device="cpu").encode("ab") == [2, 3]
    for word in ("</s>", {"content": "</s>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "bos_token": word}))
        model = load(tmp_path, device="cpu")
        assert model.encode("ab") == [1, 2, 3] and model.encode("") == []


def test_weights_without_room_are_told_before_they_are_made(monkeypatch):
    monkeypatch.setattr("eet_lab.models.weights.free_bytes_of", lambda device: 2**30)
    with pytest.raises(OutOfMemory, match="no room for weights of 30633 MiB: 1024 MiB are free. .*half precision"):
        load("llama-8b", device="cpu")


def test_what_is_saved_has_the_dtype_that_was_loaded(tmp_path):
    """On a CPU float32 unless one is asked for: to the bit it is then in the checkpoint's own."""
    deepcopy(theirs("llama")).to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    original = load_file(tmp_path / "theirs" / "model.safetensors")
    for dtype, kind in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        load(tmp_path / "theirs", device="cpu", dtype=dtype).save(tmp_path / "ours")
        written = load_file(tmp_path / "ours" / "model.safetensors")
        assert {tensor.dtype for tensor in written.values()} == {kind}
        assert all(torch.equal(written[name], tensor.to(kind)) for name, tensor in original.items())


@pytest.mark.parametrize("switch", ["scale_attn_weights", "scale_attn_by_inverse_layer_idx"])
def test_gpt2_with_scaled_scores_is_saved_as_one_that_says_the_same(switch, tmp_path):
    live = make_gpt2(**{switch: switch != "scale_attn_weights"})
    model = load(live, device="cpu")
    model.save(tmp_path)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    with torch.no_grad():
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(again(ids).logits, live(ids).logits, rtol=1e-4, atol=1e-4)


# --- what does not fit


def _folder(name, tmp_path, **changes):
    theirs(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return tmp_path


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    "name, changes, says",
    [
        ("llama", {"model_type": "bloom"}, r"'bloom' is not supported. Supported: GPT-2 .*OPT.*Llama.*Qwen3"),
        ("llama", {"model_type": ["llama"]}, "is not supported. Supported: GPT-2"),
        (
            "llama",
            {"rope_parameters": LONG},
            "'longrope' is not supported; supported: default, linear, dynamic, llama3, yarn. Use a model",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn"}},
            "factor is None.*'yarn' needs rope_theta.*Mend config",
        ),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": -1}}, "factor is -1 .*positive number"),
        ("llama", {"rope_parameters": "linear"}, "rope_parameters is 'linear', but .*Mend config"),
        ("llama", {"rope_parameters": None, "rope_scaling": ["linear", 2]}, r"rope_scaling is \['linear', 2\], but"),
        *(("llama", {"rope_parameters": none}, f"rope_parameters is {none!r}, but") for none in (0, False, "")),
        ("llama", {"rope_parameters": None, "rope_scaling": []}, r"rope_scaling is \[\], but"),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": {"a": 2}}},
            r"factor is \{'a': 2\} in .*positive number",
        ),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"full_attention": LONG}},
            "rope_scaling differ by layer.*full_attention",
        ),
        ("llama", {"rope_parameters": {"rope_type": ["linear"]}}, r"rope type \['linear'\] is not supported"),
        ("llama", {"rope_parameters": {"full_attention": LONG}}, "rope_parameters differ by layer.*full_attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rotated in part.*Use a",
        ),
        (
            "llama",
            {"num_hidden_layers": 10**7},
            "num_hidden_layers is 10,000,000, but it has 30 tensors.*a layer has 9",
        ),
        ("llama", {"num_hidden_layers": 2}, "has 9 that a Llama has no place for"),
        ("llama", {"num_key_value_heads": 3}, "4 heads of 8 and 3 KV heads"),
        ("llama", {"hidden_act": "relu"}, r"activation 'relu' is not supported; supported: silu.*\. Choose .*, or run"),
        ("llama", {"rms_norm_eps": 0}, "rms_norm_eps is 0, but .* Llama's is 1e-06"),
        (
            "llama",
            {"intermediate_size": None},
            "intermediate_size is None.*Llama needs num_hidden_layers, .* and max_pos",
        ),
        ("llama", {"attention_bias": True}, "lacks 12 tensors .layers.0.self_attn.k_proj.bias"),
        (
            "llama",
            {"intermediate_size": 40},
            r"layers.0.mlp.gate_proj.weight with shape \[48, 32\] where .* asks for \[40, 32\]",
        ),
        ("qwen3", {"model_type": "llama"}, "has 6 that a Llama has no place for .layers.0.self_attn.k_norm.weight"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": None},
            "2 of 3 layers have a window",
        ),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim = 16.*not supported"),
        ("opt", {"do_layer_norm_before": False}, "norms after the residual"),
        ("opt", {"ffn_dim": 47}, r"fc1.weight with shape \[48, 32\]"),
        ("opt", {"num_attention_heads": 5}, "num_attention_heads = 5 does not divide"),
        ("opt", {"num_hidden_layers": 2}, "has 16 that an OPT has no place for"),
    ],
)
def test_what_a_config_cannot_be_is_told(name, changes, says, tmp_path):
    with pytest.raises(ModelError, match=says):
        load(_folder(name, tmp_path, **changes), device="cpu")


@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", ""])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_decoder_with_another_head_or_without_one_is_told(name, kind, tmp_path):
    (config := deepcopy(theirs(name).config)).tie_word_embeddings = False
    model = getattr(transformers, f"AutoModel{kind}").from_config(config)
    model.save_pretrained(tmp_path)
    for given, source in ((model, type(model).__name__), (tmp_path, str(tmp_path))):
        with pytest.raises(ModelError, match=f"a {TITLES[name]} runs here as a causal language model.* Load") as told:
            load(given, device="cpu")
        assert str(told.value).startswith(f"{source} has {'another head (' if kind else 'no head for the next token'}")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"model_type": "mamba"},
            "^The architecture 'mamba' is not supported. Supported: .* as encoder-decoders. Choose one of these, or "
            "run this one with transformers.$",
        ),
        ({"model_type": None}, r"^The config names no architecture \(model_type\). Supported: GPT-2.* one of these.$"),
    ],
)
def test_an_architecture_is_not_taken_for_one_that_is_spelt_like_it(changes, says, tmp_path):
    theirs("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=says):
        load(tmp_path, device="cpu")


def test_a_live_model_without_data_is_refused():
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has shapes and no data.*'meta'"):
        load(deepcopy(theirs("qwen3")).to("meta"), device="cpu")


@pytest.mark.parametrize(
    "name, extra", [("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"), ("opt", "model.decoder.version")]
)
def test_old_buffers_are_no_weights(name, extra, tmp_path):
    theirs(name).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {extra: torch.ones(4)}, path, metadata={"format": "pt"})
    assert load(tmp_path, device="cpu").config == ours(name).config


def test_weights_of_several_types_are_made_one(tmp_path):
    theirs("qwen3").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = {name: tensor.half() if "proj" in name else tensor for name, tensor in load_file(path).items()}
    save_file(state, path, metadata={"format": "pt"})
    assert {tensor.dtype for tensor in tensors(load(tmp_path, device="cpu").decoder)} == {torch.float32}


def test_names_may_come_without_the_prefix_of_the_whole_model(tmp_path):
    """As base models are saved, and old OPT checkpoints."""
    for name, prefix in (("gpt2", "transformer."), ("opt", "model."), ("qwen3", "model.")):
        theirs(name).save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
        save_file({each.removeprefix(prefix): tensor for each, tensor in load_file(path).items()}, path)
        assert all(map(torch.equal, tensors(load(tmp_path, device="cpu").decoder), tensors(ours(name).decoder)))


def test_values_that_are_not_finite_are_named_as_the_checkpoint_has_them():
    live = theirs("llama-tied")
    weight = live.model.layers[1].mlp.up_proj.weight
    before = weight.data[3, 3].item()
    try:
        weight.data[3, 3] = math.inf
        with pytest.raises(ModelError, match="layers.1.mlp.up_proj.weight has 1 of"):
            load(live, device="cpu")
    finally:
        weight.data[3, 3] = before


def test_a_request_longer_than_the_context_is_refused():
    with pytest.raises(PromptError, match=f"context of {CONTEXT}"):
        Engine(ours("llama-dynamic").decoder).generate([[1] * 60], Settings(5))


def test_only_an_empty_prompt_needs_a_bos_that_the_vocabulary_has(tmp_path):
    """Transformers' default for a GPT-2 is 50,256, of however small a vocabulary; it trains such a model, too."""
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=60, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    )
    model = load(theirs, device="cpu")
    assert Trainer(model.network).step([Example([1, 2, 3])]).loss > 0
    engine = Engine(model.decoder)
    assert len(engine.generate([[1, 2]], Settings(max_new_tokens=2)).tokens[0]) == 2
    with pytest.raises(
        PromptError, match="Prompt 2 is empty.*bos_token_id is 50,256 .*vocabulary ends at 59. Give the"
    ):
        engine.generate([[1, 2], []], Settings(max_new_tokens=2))
    model.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["bos_token_id"] == 50256
    assert load(tmp_path, device="cpu").config == model.config and settings_of(model.config)["bos_token_id"] == 50256
