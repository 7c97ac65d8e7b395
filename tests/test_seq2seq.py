"""Encoder-decoders of every family beside transformers: logits, checkpoints, and what is refused."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from seq2seqs import CONFIGS, TARGETS, V, ours, rows, theirs

from eet_lab.errors import ModelError
from eet_lab.models import SEQ2SEQ_PRESETS, decoder, load, seq2seq
from eet_lab.models.families import settings_of
from eet_lab.ops.rows import relative_bias
from eet_lab.ops.types import Source, Spec, fresh
from eet_lab.parts import Parts
from eet_lab.parts.attend import Bounds, DenseMask
from eet_lab.parts.batches import end_to_end, left_padded


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name):
    """Of targets of several tokens, so that a wrong bound of cross attention shows; NaN in pads changes nothing."""
    model, ops = ours(name).network, Parts().ops.bind(fresh)
    sources, targets = rows(), rows(TARGETS, seed=1)
    with torch.no_grad():
        pairs = zip(sources, targets, strict=True)
        exact = [theirs(name)(torch.tensor([a]), decoder_input_ids=torch.tensor([b])).logits[0] for a, b in pairs]
        for attend, layout in ((Bounds, end_to_end), (Bounds, left_padded), (DenseMask, left_padded)):
            made, read, batch = partial(attend, ops, empty=fresh), layout(sources), layout(targets)
            kept = tuple(seq2seq.encode(model, ops, made(batch=read, cache=None), read))
            if attend is Bounds:
                real = torch.cat([torch.arange(first, first + count) for first, count in read.spans])
                for part in (part for kv in kept for part in kv):
                    part[~torch.isin(torch.arange(len(part)), real)] = torch.nan
            hidden = seq2seq.forward(model, ops, made(batch=batch, cache=None, source=Source(read, kept)), batch)
            logits = decoder.logits(model, ops, hidden)
            for (first, count), wanted in zip(batch.spans, exact, strict=True):
                close = {"rtol": 1e-4, "atol": 2e-5 * float(wanted.abs().max())}
                torch.testing.assert_close(logits[first : first + count], wanted, **close)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "most"), [(8, 9), (32, 128)])
def test_relative_positions_are_those_of_t5(causal, buckets, most):
    from transformers.models.t5.modeling_t5 import T5Attention

    place = torch.arange(300)
    wanted = T5Attention._relative_position_bucket(place - place[:, None], not causal, buckets, most)
    found = relative_bias(
        torch.arange(buckets)[:, None].float(), Spec(1, 1, 8, causal=causal, max_distance=most), place, place
    )
    assert torch.equal(found[0].long(), wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_goes_in_and_out_to_the_bit(name, tmp_path):
    theirs(name).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    load(tmp_path / "theirs", device="cpu").save(tmp_path / "ours")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    theirs(name).save_pretrained(tmp_path / "whole")
    original = load_file(tmp_path / "whole" / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[each], original[each]) for each in original)
    back = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours")
    state, told = theirs(name).state_dict(), back.state_dict()
    assert told.keys() == state.keys() and all(torch.equal(told[each], state[each]) for each in state)
    assert ours(name).config == load(tmp_path / "ours", device="cpu").config
    kept = theirs(name).generation_config.to_dict()
    kept = {key: value for key, value in kept.items() if key.endswith("token_id") or key == "bad_words_ids"}
    assert kept.items() <= back.generation_config.to_dict().items()


def test_older_checkpoints_hold_copies_and_what_is_computed(tmp_path):
    """And a base model has no prefix, and nothing that is added to logits."""
    for name in ("t5", "marian", "bart"):
        theirs(name).save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
        state, prefix = load_file(path), "" if name == "t5" else "model."
        shared = state[prefix + "shared.weight"]
        for copy in (prefix + "encoder.embed_tokens.weight", prefix + "decoder.embed_tokens.weight", "lm_head.weight"):
            state[copy] = shared.clone()
        if name == "marian":
            state |= {f"model.{stack}.embed_positions.weight": torch.ones(64, 32) for stack in ("encoder", "decoder")}
        if name == "bart":
            del state["final_logits_bias"]
            state = {key.removeprefix("model."): tensor for key, tensor in state.items()}
        save_file(state, path, metadata={"format": "pt"})
        model = load(tmp_path, device="cpu")
        assert model.network.head.weight is model.network.token_embedding
        assert model.config.head_bias == (name == "marian")
        model.save(tmp_path / "again")
        written = load_file(tmp_path / "again" / "model.safetensors").keys()
        assert "lm_head.weight" not in written
        assert ("model.encoder.embed_positions.weight" in written) == (name == "bart")
        state[prefix * (name != "bart") + "encoder.embed_tokens.weight"] += 1
        save_file(state, path, metadata={"format": "pt"})
        with pytest.raises(ModelError, match="encoder.embed_tokens.weight differs from shared.weight"):
            load(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("t5", {"model_type": "longt5"}, r"'longt5' is not supported. Supported: .*T5 \('t5'\), BART .*Marian .*enc"),
        ("bart", {"model_type": "mbart"}, "'mbart' is not supported. Supported: .*as encoder-decoders"),
        ("t5", {"feed_forward_proj": "gated-tanh"}, "'gated-tanh' is not supported; supported: relu, gated-gelu"),
        ("t5", {"num_decoder_layers": 10**7}, "num_decoder_layers is 10,000,000, but it has .*a layer has 13"),
        ("t5", {"relative_attention_num_buckets": 6}, "6 buckets for relative positions up to 9.*damaged"),
        ("t5", {"d_kv": 8}, r"SelfAttention.k.weight with shape \[48, 32\] where .* asks for \[32, 32\]"),
        ("bart", {"encoder_attention_heads": 2}, "an encoder with other heads than the decoder, which is not"),
        ("bart", {"encoder_ffn_dim": 40}, "another FFN width"),
        ("bart", {"encoder_layers": 3}, "lacks 16 tensors .encoder.layers.2"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "a vocabulary for each of its two languages"),
        ("marian", {"decoder_start_token_id": None}, "decoder_start_token_id is missing.*Marian begins with it"),
        ("bart", {"forced_eos_token_id": [2, 3]}, r"forced_eos_token_id is \[2, 3\] in the checkpoint, but one token"),
        ("bart", {"forced_bos_token_id": [2, 3]}, r"forced_bos_token_id is \[2, 3\] in the checkpoint, but one token"),
        ("marian", {"bad_words_ids": 5}, "bad_words_ids or suppress_tokens is no list"),
        ("marian", {"bad_words_ids": [[V]]}, f"has {V}, but token ids are whole numbers from 0 to {V - 1}"),
        ("marian", {"bad_words_ids": [[-1]]}, "has -1, but token ids"),
        ("marian", {"suppress_tokens": ["a", 3]}, "has 'a', but token ids"),
        ("marian", {"suppress_tokens": [1.5]}, "has 1.5, but token ids"),
        ("marian", {"forced_eos_token_id": V}, f"forced_eos_token_id is {V}, but the vocabulary ends at {V - 1}"),
    ],
)
def test_what_a_config_cannot_be_is_told(name, changes, says, tmp_path):
    theirs(name).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=says):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize("start", [None, 0])
def test_an_encoder_alone_is_told(start, tmp_path):
    (config := deepcopy(theirs("t5").config)).decoder_start_token_id = start
    transformers.T5EncoderModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no weights of a decoder: .*Load one that was saved with both"):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize("name", SEQ2SEQ_PRESETS)
def test_presets_have_the_true_size(name):
    told = settings_of(config := SEQ2SEQ_PRESETS[name])
    with torch.device("meta"):
        model = transformers.MarianMTModel(transformers.MarianConfig(**told))
    trained = [p for path, p in model.named_parameters() if "embed_positions" not in path]
    assert sum(p.numel() for p in trained) == config.num_params
    assert load(name, device="meta").config is config


def test_t5_is_in_bfloat16_where_half_precision_is_the_default():
    assert load(theirs("t5"), device="meta").dtype == "bfloat16"
    assert load(theirs("t5"), device="meta", dtype="float16").dtype == load(theirs("bart"), device="meta").dtype
    assert load(theirs("t5"), device="cpu").dtype == "float32"
