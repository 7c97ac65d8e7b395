"""`attn_implementation="eet"`: transformers' own models, without a mask."""

from __future__ import annotations

import copy
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from conftest import make_gpt2

import eet_lab
from eet_lab.errors import ModelError
from eet_lab.models import hf_attention
from eet_lab.ops import attention as reference
from eet_lab.ops import cuda

IDS = dict(bos_token_id=1, eos_token_id=None, pad_token_id=0, vocab_size=97)
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
# Its own norm divides by nothing: random weights would leave what fp16 can hold.
MOBILE = dict(embedding_size=16, true_hidden_size=32, intra_bottleneck_size=32, normalization_type="layer_norm")
WINDOWED = dict(num_hidden_layers=3, local_attention=4, bos_token_id=1, eos_token_id=2)
GROUPED = SIZES | dict(num_key_value_heads=2, max_position_embeddings=128)
DECODERS = {
    "gpt2": lambda: make_gpt2(vocab_size=97, pad_token_id=0, attn_pdrop=0.0),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, **IDS)
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED, **IDS)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=5, **IDS)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GROUPED, head_dim=16, **IDS)),
}
ENCODERS = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**SIZES, vocab_size=97)),
    "distilbert": lambda: hf.DistilBertModel(
        hf.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=97)
    ),
    "mobilebert": lambda: hf.MobileBertModel(  # given queries, keys and values apart, all of one text
        hf.MobileBertConfig(**(SIZES | MOBILE), vocab_size=97)
    ),
    "modernbert": lambda: hf.ModernBertModel(  # its windows are one wider where it tells them to attention
        hf.ModernBertConfig(**(SIZES | WINDOWED), vocab_size=97, pad_token_id=0, cls_token_id=1, sep_token_id=2)
    ),
}
BART = {
    f"{stack}_{name}": size
    for stack in ("encoder", "decoder")
    for name, size in (("attention_heads", 4), ("ffn_dim", 48))
}
MOONSHINE = {
    f"{stack}_{name}": size
    for stack in ("encoder", "decoder")
    for name, size in (("num_attention_heads", 4), ("num_hidden_layers", 2))
}
CROSSED = {
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, max_position_embeddings=64, **BART)
    ),
    "bert": lambda: hf.BertLMHeadModel(
        hf.BertConfig(**SIZES, vocab_size=97, is_decoder=True, add_cross_attention=True)
    ),
    "gpt2": lambda: make_gpt2(
        vocab_size=97, pad_token_id=0, n_embd=32, n_head=4, attn_pdrop=0.0, add_cross_attention=True
    ),
    "moonshine": lambda: hf.MoonshineForConditionalGeneration(  # where there is a mask it calls no attention causal
        hf.MoonshineConfig(vocab_size=97, hidden_size=32, intermediate_size=48, pad_token_id=0, **MOONSHINE)
    ),
    "q-former": lambda: hf.Blip2QFormerModel(  # neither its config nor its modules say that it looks at an image
        hf.Blip2QFormerConfig(**SIZES, vocab_size=97, encoder_hidden_size=32, cross_attention_frequency=1)
    ),
}
LENGTHS = [3, 11, 1, 7]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    eet_lab.register_attention()


def shaken(make):
    """A model whose tokens vary: random weights as transformers draws them say one word for ever."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            parameter.copy_(torch.randn_like(parameter) * 0.3 + scale)
    return model


def padded(side: str, lengths=LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and attention_mask [B,S]."""
    torch.manual_seed(1)
    longest = max(lengths)
    place = torch.arange(longest)
    pads = torch.tensor([[longest - n] for n in lengths])
    real = place >= pads if side == "left" else place < longest - pads
    return torch.randint(2, 97, real.shape) * real, real.long()


def with_attention(model, name: str):
    model.set_attn_implementation(name)
    return model


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", DECODERS)
def test_ragged_prompts_go_on_as_with_sdpa(family, cache):
    model, (ids, mask) = shaken(DECODERS[family]), padded("left")
    how = dict(max_new_tokens=12, do_sample=False, cache_implementation=None if cache == "dynamic" else "static")
    found = [
        with_attention(model, name).generate(input_ids=ids, attention_mask=mask, **how)[:, ids.shape[1] :]
        for name in ("sdpa", "eet")
    ]
    assert len(set(found[0].flatten().tolist())) > 5, "tokens that are all the same would prove nothing"
    assert torch.equal(*found)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_states_of_real_tokens_are_those_of_sdpa(family, side):
    model, (ids, mask) = shaken((DECODERS | ENCODERS)[family]), padded(side)
    found = []
    for name in ("sdpa", "eet"):
        with torch.no_grad():
            out = with_attention(model, name)(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        found.append(out.hidden_states[-1][mask.bool()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_pads_are_never_read(family, monkeypatch):
    """NaN in them changes nothing: a mask that multiplies by zero would."""
    model, (ids, mask) = with_attention(shaken((DECODERS | ENCODERS)[family]), "eet"), padded("left")
    states = model.get_input_embeddings()(ids).detach()
    poisoned = states.masked_fill(~mask.bool()[..., None], torch.nan)
    found = []
    for embeds in (states, poisoned):
        with torch.no_grad():
            out = model(inputs_embeds=embeds, attention_mask=mask, output_hidden_states=True)
        found.append(out.hidden_states[-1][mask.bool()])
    assert found[0].isfinite().all() and torch.equal(*found)


def test_no_mask_at_all_means_no_pads():
    for family in ("llama", "bert"):
        model, (ids, _) = shaken((DECODERS | ENCODERS)[family]), padded("left", [9, 9])
        found = [with_attention(model, name)(input_ids=ids)[0].detach() for name in ("sdpa", "eet")]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", DECODERS)
def test_columns_of_a_static_cache_that_nobody_has_written_are_no_keys(family):
    """Without a mask, which would tell them."""
    model, (ids, _) = shaken(DECODERS[family]), padded("left", [9, 9])
    found = []
    for name in ("sdpa", "eet"):
        model, read, logits = with_attention(model, name), ids, []
        cache = hf.StaticCache(config=model.config, max_cache_len=20)
        with torch.no_grad():
            for _ in range(6):
                logits.append(model(read, past_key_values=cache, use_cache=True).logits[:, -1])
                read = logits[-1].argmax(-1, keepdim=True)
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_queries", [5, 11, 16])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", CROSSED)
def test_queries_look_at_another_text_as_with_sdpa(family, side, num_queries):
    """Pads of the source are no pads of those that look at it, which may be fewer, as many or more."""
    model, (ids, mask) = shaken(CROSSED[family]), padded(side)
    targets = torch.randint(2, 97, (len(LENGTHS), num_queries))
    states = torch.randn(*ids.shape, 32)
    how = {"bart": dict(input_ids=ids, attention_mask=mask, decoder_input_ids=targets)}
    how["moonshine"] = dict(input_values=torch.randn(len(LENGTHS), 4000), decoder_input_ids=targets)
    how["bert"] = how["gpt2"] = dict(input_ids=targets, encoder_hidden_states=states, encoder_attention_mask=mask)
    embeds = torch.randn(*targets.shape, 32)
    how["q-former"] = dict(query_embeds=embeds, encoder_hidden_states=states, encoder_attention_mask=mask)
    found = []
    for name in ("sdpa", "eet"):
        with torch.no_grad():
            found.append(with_attention(model, name)(**how[family])[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    if family == "bart":
        for cache in (None, "static"):
            how = dict(max_new_tokens=num_queries, do_sample=False, cache_implementation=cache)
            answers = [
                with_attention(model, name).generate(input_ids=ids, attention_mask=mask, **how)
                for name in ("sdpa", "eet")
            ]
            assert torch.equal(*answers)


def test_a_model_that_asks_for_no_mask_is_refused():
    """As GPT-2's of transformers 4.56 does: its pads would be read, and nothing would say so."""
    x = torch.ones(1, 2, 3, 8)
    with pytest.raises(ModelError, match="Linear of transformers .* does not ask AttentionMaskInterface.*sdpa"):
        hf.AttentionInterface()["eet"](torch.nn.Linear(1, 1), x, x, x, None)


OWN = {
    "gptj": ("GPTJAttention", hf.GPTJForCausalLM, dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=8)),
    "falcon": ("FalconAttention", hf.FalconForCausalLM, SIZES),
    "bloom": ("BloomAttention", hf.BloomForCausalLM, dict(hidden_size=32, n_layer=2, n_head=4)),
    "mpnet": ("MPNetSelfAttention", hf.MPNetModel, SIZES),
}
"""Models that ask for a mask and then attend by themselves: one row's mask [1,K], added to scores, hides nothing."""


@pytest.mark.parametrize("name", OWN)
def test_attention_of_a_models_own_never_reads_the_mask(name):
    module, kind, sizes = OWN[name]
    if hf.__version__ < "5":
        pytest.skip("this transformers makes such models' masks in another way")
    model = kind(kind.config_class(**sizes, **IDS)).eval()
    ids = torch.randint(2, 97, (1, 7))
    model.config._attn_implementation = "eet"  # as `from_pretrained` does, where it takes the name
    with pytest.raises(ModelError, match=f"{module} of transformers .* attends by itself.* Leave attn_implementation "):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))


def test_a_mask_goes_to_another_device_with_its_bounds():
    mask = hf_attention.real_tokens(2, kv_length=3, attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]))
    for moved in (mask.to("meta"), mask.detach(), mask.contiguous(), copy.copy(mask)):
        assert moved.bounds == mask.bounds == ([1, 0], [3, 3]) and moved.sight is None and moved.shape == (2, 3)


class OfOneText(torch.nn.Module):
    def forward(self, hidden_states, attention_mask): ...


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"module": hf.models.bart.modeling_bart.BartAttention}, "BartAttention takes .* it may look at another text"),
        ({"window": 4}, "a window of tokens that see what comes after them"),
        ({"shape": (1, 2, 3, 12)}, "heads of a multiple of 8, at most 256, and these have 12"),
        ({"dtype": torch.float64}, "do not take torch.float64"),
        ({"stride": (72, 36, 12, 1)}, r"lie apart by \(72, 36, 12, 1\)"),
        ({"missing": "nvcc is missing"}, "nvcc is missing"),
        ({}, None),
    ],
)
def test_what_kernels_do_not_take_on_a_gpu_is_told_once(change, says, monkeypatch):
    monkeypatch.setattr(hf_attention, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(hf_attention.native, "available", lambda device: change.get("missing"))
    monkeypatch.setattr(hf_attention, "_by_kernel", lambda *given: "by kernel")
    hf_attention.WARNED.clear()
    kind = change.get("module", OfOneText)
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    x = torch.ones(change.get("shape", (1, 2, 3, 8)), dtype=change.get("dtype", torch.float32))
    keys = x.new_ones(72).as_strided(x.shape, change.get("stride", x.stride()))
    mask = hf_attention.real_tokens(1, kv_length=3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        how = {"is_causal": False, "sliding_window": change.get("window")}
        out = [hf_attention.attention(module, x, keys, keys, mask, **how)[0] for _ in range(2)]
        assert hf_attention.attention(module, x.requires_grad_(), keys, keys, mask, **how)[0].shape[1] == 3
    if says is None:
        assert out == ["by kernel"] * 2 and not found
    else:
        assert len(found) == 1 and re.search(says, str(found[0].message)) and torch.equal(*out)


def test_sequences_that_grow_are_one_reason(monkeypatch):
    monkeypatch.setattr(hf_attention, "_is_on_gpu", lambda tensor: True)
    hf_attention.WARNED.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for length in (8, 9, 10):
            x = torch.ones(1, 2, length, 8, dtype=torch.float64)
            mask = hf_attention.real_tokens(1, kv_length=length)
            hf_attention.attention(OfOneText(), x, x, x, mask, is_causal=False)
    assert len(found) == 1


def test_gradients_are_those_of_sdpa():
    model, (ids, mask) = shaken(DECODERS["llama"]), padded("right")
    labels = ids.masked_fill(mask == 0, -100)
    found = []
    for name in ("sdpa", "eet"):
        model.zero_grad()
        with_attention(model, name)(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_what_it_cannot_do_is_told_with_a_remedy():
    model, (ids, mask) = with_attention(shaken(DECODERS["llama"]), "eet"), padded("left")
    holes = mask.clone()
    holes[1, 5] = 0
    with pytest.raises(ModelError, match="Row 1 .* pads between its tokens.*sdpa"):
        model(input_ids=ids, attention_mask=holes)
    with pytest.raises(ModelError, match=r"a mask of its own \[4, 1, 11, 11\].* real tokens \[B,K\].*sdpa"):
        model(input_ids=ids, attention_mask=torch.zeros(4, 1, 11, 11))
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ModelError, match="takes no dropout.*sdpa"):
        model.train()(input_ids=ids, attention_mask=mask)
    packed = torch.cat((torch.arange(6), torch.arange(5)))[None]
    with pytest.raises(ModelError, match="hides keys in a way .*position_ids that begin again .*sdpa"):
        model.eval()(input_ids=ids[1:2], position_ids=packed, use_cache=False)


def test_what_sdpa_cannot_do_either_is_left_to_eager():
    torch.manual_seed(0)
    config = hf.Gemma2Config(**GROUPED, head_dim=8, attn_logit_softcapping=50.0, **IDS)
    model, (ids, mask) = with_attention(hf.Gemma2ForCausalLM(config).eval(), "eet"), padded("left")
    with pytest.raises(ModelError, match="takes no softcap.*eager"):
        model(input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sdpa", "transformers has another attention of this name"),
        ("eager", "transformers has another attention of this name"),
        ("flash_attention_2", "transformers has another attention of this name"),
        ("", "must be a word"),
        (3, "must be a word"),
    ],
)
def test_an_attention_of_another_name_stays(name, says):
    before = dict(hf.AttentionInterface())
    with pytest.raises(ModelError, match=says):
        eet_lab.register_attention(name)
    assert dict(hf.AttentionInterface()) == before
    eet_lab.register_attention()  # again


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen3", "bert", "distilbert", "mobilebert"])
def test_kernels_are_handed_what_the_op_wants(family, side, monkeypatch):
    """The kernels' reference in their place. A kernel reads a tensor number by number from its first."""
    unfit = cuda.attention.unfit

    def attention(qkv, cache, step, spec, *, empty):
        assert not unfit(SimpleNamespace(spec=spec))
        assert all(x.is_contiguous() for x in (qkv, *step) if isinstance(x, torch.Tensor))
        return reference.attention(qkv, cache, step, spec, empty=empty)

    attention.unfit = unfit
    monkeypatch.setattr(hf_attention.cuda, "attention", attention)
    monkeypatch.setattr(hf_attention, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(hf_attention.native, "available", lambda device: None)
    monkeypatch.setattr(hf_attention, "_by_torch", None)
    test_states_of_real_tokens_are_those_of_sdpa(family, side)
    if side == "left" and family in DECODERS:
        test_ragged_prompts_go_on_as_with_sdpa(family, "dynamic")
