"""Loading: presets, folders, live models, and every way in which a checkpoint can be damaged."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import make_gpt2
from safetensors.torch import load_file, save_file

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import ModelError, OutOfMemory
from eet_lab.models import PRESETS, checkpoint, load, tokenizer
from eet_lab.models.decoder import tensors
from eet_lab.models.loading import DEMO
from eet_lab.technique import Recipe
from eet_lab.texts import generate


@pytest.fixture
def folder(tmp_path):
    make_gpt2().save_pretrained(tmp_path)
    return tmp_path


def tokens(model):
    return Engine(model.decoder).generate([[3, 1, 4], [1, 5]], Settings(10)).tokens


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_equals_the_live_model(tmp_path, tied):
    live = make_gpt2(tie_word_embeddings=tied)
    live.save_pretrained(tmp_path)
    from_folder, from_live = load(tmp_path, device="cpu"), load(live, device="cpu")
    assert tokens(from_folder) == tokens(from_live) and from_live.name == "GPT2LMHeadModel"
    assert (from_folder.decoder.head.weight is from_folder.decoder.token_embedding) == tied
    assert from_folder.config.num_params == sum(p.numel() for p in live.parameters())


def test_what_torch_compiles_equals_the_model():
    """Of `torch.compile`, which takes seconds to import, and is none of transformers'."""
    live = make_gpt2()
    compiled = load(torch.compile(live), device="cpu")
    assert tokens(compiled) == tokens(load(live, device="cpu")) and compiled.name == "GPT2LMHeadModel"
    assert compiled.config.num_params == sum(p.numel() for p in live.parameters())


def test_shards_are_put_together(tmp_path):
    live = make_gpt2()
    live.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert tokens(load(tmp_path, device="cpu")) == tokens(load(live, device="cpu"))


def test_a_bin_checkpoint_is_read_without_running_code(folder):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    assert tokens(load(folder, device="cpu")) == tokens(load(make_gpt2(), device="cpu"))
    torch.save({"wte.weight": print}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="damaged"):
        load(folder, device="cpu")
    torch.save({7: torch.ones(3)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="tensors without names"):
        load(folder, device="cpu")


@pytest.mark.parametrize("pickled", [False, True])
def test_a_hub_model_comes_with_a_bin_only_where_it_has_no_safetensors(folder, tmp_path_factory, monkeypatch, pickled):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    if pickled:
        (folder / "model.safetensors").unlink()
    cache = tmp_path_factory.mktemp("hub")

    def snapshot_download(name, allow_patterns):
        for path in folder.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, cache)
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    model = load("someone/gpt2", device="cpu")
    assert tokens(model) == tokens(load(make_gpt2(), device="cpu"))
    assert (cache / "pytorch_model.bin").exists() == pickled


def test_an_error_of_the_hub_without_a_message_is_told(monkeypatch):
    def fail(*args, **options):
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match="TimeoutError: no message"):
        load("someone/gpt2", device="cpu")


@pytest.mark.parametrize("tied", [True, False])
def test_a_live_model_can_be_trained_on_without_changing_ours(tied):
    live = make_gpt2(tie_word_embeddings=tied)
    model = load(live, device="cpu")
    before = [tensor.clone() for tensor in tensors(model.decoder)]
    for parameter in live.parameters():
        parameter.data.fill_(7)
    assert all(map(torch.equal, before, tensors(model.decoder)))


@pytest.mark.parametrize("name", ["gpt2", "demo"])
def test_weights_that_do_not_fit_are_told(monkeypatch, name):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 148.00 MiB. GPU 0 has 1 GiB.")

    monkeypatch.setattr(torch, "empty", full)
    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(
        OutOfMemory, match=r"weights of \d+ MiB could not be allocated \(Tried to allocate 148.00 MiB\)"
    ):
        load(name, device="cpu")


def edit(folder, change):
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda s: s.pop("transformer.h.1.mlp.c_fc.weight"), "lacks 1 tensor .h.1.mlp.c_fc.weight"),
        (
            lambda s: s.update({"transformer.h.9.ln_1.weight": torch.ones(48)}),
            "no place for .h.9.ln_1.weight",
        ),
        (
            lambda s: s.update({"transformer.ln_f.bias": torch.ones(47)}),
            r"ln_f.bias with shape \[47\].*asks for \[48\]",
        ),
        (lambda s: s.update({"transformer.ln_f.bias": torch.ones(48, dtype=torch.int8)}), "ln_f.bias.*int8"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(folder, change, says):
    edit(folder, change)
    with pytest.raises(ModelError, match=says):
        load(folder, device="cpu")


def test_old_mask_buffers_are_not_weights(folder):
    edit(
        folder,
        lambda s: s.update(
            {
                "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8),
                "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
            }
        ),
    )
    assert tokens(load(folder, device="cpu")) == tokens(load(make_gpt2(), device="cpu"))


@pytest.mark.parametrize(
    "damage, says",
    [
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
            "damaged or incomplete",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b"not a safetensors file"), "damaged or incomplete"),
        (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read.*Download or save"),
        (lambda f: _set(f, n_layer=4), "lacks 12 tensors.*Is it complete"),
        (lambda f: _set(f, n_layer=2), "has 12 that a GPT-2 has no place for.*choose another model"),
        (lambda f: _set(f, model_type="bloom"), "'bloom' is not supported. Supported: GPT-2 .*Llama"),
        (lambda f: _set(f, activation_function="swish"), "activation 'swish'"),
        (lambda f: _set(f, n_head=5), "n_head = 5 does not divide"),
        (lambda f: _set(f, n_layer=None), "n_layer is None"),
        (lambda f: _set(f, n_head=0), "n_head is 0"),
        (lambda f: _set(f, n_head=-4), "n_head is -4"),
        (lambda f: _set(f, n_inner=True), "n_inner is True"),
        (lambda f: _set(f, activation_function=["gelu"]), r"activation \['gelu'\] is not supported"),
        (lambda f: _set(f, layer_norm_epsilon=float("nan")), "layer_norm_epsilon is nan"),
        (lambda f: _set(f, layer_norm_epsilon="small"), "layer_norm_epsilon is 'small'"),
        (lambda f: _set(f, layer_norm_epsilon=10**400), "layer_norm_epsilon is 1000"),
        (lambda f: _set(f, bos_token_id="a"), "bos_token_id is 'a'"),
        (lambda f: _set(f, eos_token_id=[]), r"eos_token_id is \[\]"),
        (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": [0, "a"]}'), "id is .0, 'a'"),
        (lambda f: (f / "config.json").write_text("[]"), r"config.json holds '\[\]', not an object"),
        (lambda f: (f / "config.json").write_text("[" * 10**6), "config.json cannot be read.*Download or save"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.*cannot be read"),
    ],
)
def test_a_damaged_folder_is_explained(folder, damage, says):
    damage(folder)
    with pytest.raises(ModelError, match=says):
        load(folder, device="cpu")


def _become(path: Path, kind: str) -> None:
    """Put a pipe, a device or a folder in the place of a file."""
    path.unlink(missing_ok=True)
    {"pipe": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"])
def test_only_regular_files_are_read(folder, name, kind):
    _become(folder / name, kind)
    with pytest.raises(ModelError, match=rf"{name} is not a regular file.*Download or save the model again"):
        load(folder, device="cpu")


@pytest.mark.timeout(20)
def test_both_files_of_an_older_tokenizer_must_be_regular(folder):
    (folder / "vocab.json").write_text("{}")
    _become(folder / "merges.txt", "pipe")
    with pytest.raises(ModelError, match="merges.txt is not a regular file"):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    "name, home, limit",
    [
        ("config.json", checkpoint, "MAX_JSON_BYTES"),
        ("model.safetensors.index.json", checkpoint, "MAX_JSON_BYTES"),
        ("tokenizer.json", tokenizer, "MAX_BYTES"),
    ],
)
def test_a_file_that_is_too_large_is_not_read(folder, name, home, limit, monkeypatch):
    monkeypatch.setattr(home, limit, 4096)
    (folder / name).touch()
    os.truncate(folder / name, 5000)
    with pytest.raises(ModelError, match=rf"{name} has 4.883 KiB, but at most 4 KiB are read. Download or save"):
        load(folder, device="cpu")


@pytest.mark.parametrize("name", ["/etc/passwd", "../model.safetensors", "a/b.safetensors", "..", "", "a\0b"])
def test_shards_lie_beside_their_index(folder, name):
    shutil.copy(folder / "model.safetensors", folder.parent / "model.safetensors")  # what "../" would reach
    index = {"weight_map": {"transformer.wte.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="names the file|not a regular file|cannot be read"):
        load(folder, device="cpu")


@pytest.mark.timeout(20)
def test_a_number_of_layers_that_no_file_has_is_told_at_once(folder):
    _set(folder, n_layer=10**7)
    with pytest.raises(ModelError, match=r"n_layer is 10,000,000, but it has 40 tensors.*a layer has 12"):
        load(folder, device="cpu")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["h.1.mlp.c_fc.weight", "ln_f.bias", "wte.weight", "h.2.attn.c_attn.bias"])
def test_weights_that_are_not_finite_are_named(folder, name, bad):
    edit(folder, lambda state: state[f"transformer.{name}"].view(-1)[5:7].fill_(bad))
    says = rf"{name} has 2 of [\d,]+ values that are NaN or infinite.*Download or save"
    with pytest.raises(ModelError, match=says):
        load(folder, device="cpu")
    with pytest.raises(ModelError, match=says):
        load(folder, device="cpu", dtype="bfloat16")
    live = make_gpt2()
    dict(live.named_parameters())[f"transformer.{name}"].data.view(-1)[5:7] = bad
    with pytest.raises(ModelError, match=says):
        load(live, device="cpu")
    assert load(folder, device="meta").config.num_layers == 3, "shapes alone have no values"


def test_an_untied_head_is_looked_at_too():
    live = make_gpt2(tie_word_embeddings=False)
    live.lm_head.weight.data[3, 3] = float("nan")
    with pytest.raises(ModelError, match="lm_head.weight has 1 of"):
        load(live, device="cpu")


def test_weights_that_a_dtype_cannot_hold_name_one_that_can(folder):
    edit(folder, lambda state: state["transformer.h.0.mlp.c_fc.bias"][1:2].fill_(7e4))
    with pytest.raises(
        ModelError, match=r"h.0.mlp.c_fc.bias has values up to 70,000, and torch.float16 ends at 65,504.*bfloat16"
    ):
        load(folder, device="cpu", dtype="float16")
    assert load(folder, device="cpu", dtype="bfloat16").dtype == "bfloat16"


def _set(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "name, says",
    [
        ("gpt2-xxl", "Did you mean 'gpt2-xl'"),
        ("", "name is empty. Give one of demo, gpt2"),
        ("./nowhere", "no folder './nowhere'"),
        ("openai-community/gpt2", "could not be fetched.*network"),
        (__file__, "is a file, .* Give one, or the name of a model: 'demo'"),
        (42, "takes a name, a folder or a transformers model, not int"),
    ],
)
def test_unknown_models_are_explained(name, says):
    with pytest.raises(ModelError, match=says):
        load(name, device="cpu")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("home", ["", "~"])
def test_a_file_of_a_model_is_told_to_be_loaded_by_its_folder(folder, name, home, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    given, named = (f"~/{name}", "~") if home else (folder / name, folder)
    with pytest.raises(ModelError, match="is a file, but a model is loaded from its whole folder") as told:
        load(given, device="cpu")
    assert str(told.value).startswith(str(given)) and str(told.value).endswith(f"Give the folder: {str(named)!r}.")
    load(named, device="cpu")


def test_device_and_dtype_are_checked():
    with pytest.raises(ModelError, match="'float8'.*float32"):
        load("gpt2", device="cpu", dtype="float8")
    with pytest.raises(ModelError, match="'tpu'"):
        load("gpt2", device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="no NVIDIA GPU.*device='cpu'"):
            load("gpt2", device="cuda")


def test_presets_have_their_true_size_and_say_they_are_random():
    model = load("gpt2", device="cpu")
    assert model.config.num_params == 124_439_808 == sum(t.numel() for t in _once(model))
    assert "random" in model.label
    assert PRESETS["gpt2-xl"].num_params == 1_557_611_200
    assert model.decoder.weight_bytes == 4 * model.config.num_params
    assert model.decode([5, 50_000]).endswith("⟨50000⟩")


def test_random_weights_are_repeatable():
    a, b, c = (load("gpt2", device="cpu", dtype="bfloat16", seed=s).decoder.layers[3].fc_1.weight for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def _once(model):
    return {t.data_ptr(): t for t in tensors(model.decoder)}.values()


def test_the_end_of_a_text_is_shown_but_not_returned():
    model = load("demo", device="cpu")
    end = model.config.eos_id
    assert model.decode([end]) == "<|endoftext|>"
    output = generate(model, ["Return True if"], "baseline", max_new_tokens=80)
    assert output.run.finish == ("stop",)
    assert output.run.tokens[0][-1] == end
    assert "endoftext" not in output.texts[0]


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [([0, 296], None, (0, 296)), (0, [296, 0, -1], (296, 0)), ([0, 296], 0, (0,)), (0, 296, (296,)), (296, 0, (0,))],
)
def test_a_text_ends_at_every_token_at_which_transformers_ends_it(config, generation, ends, tmp_path):
    """Those of generation_config.json where it names any, else those of config.json."""
    folder = shutil.copytree(DEMO, tmp_path / "demo")
    _set(folder, eos_token_id=config)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model, live = load(folder, device="cpu"), load(peer, device="cpu")
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "generation_config.json").write_text('{"eos_token_id": [3]}')  # of what lay there before
    for name, each in (("saved", model), ("live", live)):
        each.save(tmp_path / name)
    models = [model, live, *(load(tmp_path / name, device="cpu") for name in ("saved", "live"))]
    first = config[0] if isinstance(config, list) else config
    assert {each.config.eos_id for each in models} == {first}, "what training ends texts with"
    for text in ("def main", "Return a list of", "Raise an exception if"):
        ids = model.encode(text)
        told = peer.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, pad_token_id=0)
        expected = tuple(told[0, len(ids) :].tolist())
        for each in models:
            assert each.config.ends in (ends, ends[::-1])
            assert generate(each, [ids], max_new_tokens=20).run.tokens == (expected,)


def test_shapes_without_data_tell_what_they_need_and_do_not_run(tmp_path):
    shapes = load("gpt2-xl", device="meta")
    assert (shapes.device, shapes.dtype) == ("meta", "float16")
    engine = Engine(shapes.decoder, Recipe.parse("pre_padding,memory_reuse").parts)
    told = engine.forecast([[1] * 100] * 4, Settings(max_new_tokens=20), free_bytes=2**33)
    assert told.fits and told.weight_bytes == shapes.decoder.weight_bytes > 3e9
    assert len(engine.lifetimes([[1, 2, 3]])["prefill"]) > 48
    with pytest.raises(ModelError, match="no data.*'cpu' or 'cuda'"):
        engine.generate([[1, 2, 3]])
    assert load("demo", device="meta", dtype="float32").decoder.weight_bytes == load("demo").decoder.weight_bytes
