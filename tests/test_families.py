"""Every family beside transformers: tokens, logits, perplexity; and which techniques take it."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import seq2seqs
import torch
import transformers
from every_recipe import every_recipe, needs, with_every_store
from families import CONFIGS, KINDS, NEW, WINDOW, V, expected, ours, prompts, theirs
from test_captures import emulated

from eet_lab.bench import compare
from eet_lab.bench.held_out import perplexity
from eet_lab.bench.parity import reference_logits
from eet_lab.bench.peers import to_hf
from eet_lab.commands.arguments import tell_unfit
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import RecipeError
from eet_lab.models import PRESETS, load
from eet_lab.models.config import Config
from eet_lab.models.families import FAMILIES, settings_of
from eet_lab.models.weights import random_decoder
from eet_lab.ops import cuda, reference
from eet_lab.ops.shapes import AttentionShape
from eet_lab.ops.types import Spec, fresh
from eet_lab.technique import Recipe, known, obstacle, registry, unfit
from eet_lab.texts import as_recipe

TECHNIQUES = registry()
RECIPES = with_every_store(
    every_recipe([*(name for name in TECHNIQUES if TECHNIQUES[name].headline), "packed_prefill"])
)


def said(name: str, recipe: Recipe) -> list[tuple[int, ...]]:
    told = Engine(ours(name).decoder, recipe.parts).generate(prompts(), Settings(NEW))
    return [tuple(row) for row in told.tokens]


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_equal_those_of_transformers(name):
    assert len({token for row in expected(name) for token in row}) > 8, "it says always the same: that proves little"
    assert said(name, Recipe()) == expected(name)


@pytest.mark.parametrize("name", KINDS)
def test_every_recipe_says_the_same(name):
    """The other models take each technique with what it needs, below."""
    for words in RECIPES:
        assert said(name, Recipe.parse(words)) == expected(name), words


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name):
    """Teacher-forced, at higher precision than the model's own."""
    rows, tokens = prompts(), expected(name)
    got = reference_logits(ours(name).decoder, rows, tokens, NEW)
    for row, new, logits in zip(rows, tokens, got, strict=True):
        with torch.no_grad():
            exact = theirs(name)(torch.tensor([[*row, *new[:-1]]])).logits[0, len(row) - 1 :]
        torch.testing.assert_close(logits.float(), exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


@pytest.mark.parametrize("name", CONFIGS)
def test_perplexity_is_that_of_transformers(name):
    draw = random.Random(1)
    ids = [draw.randrange(1, V) for _ in range(40)]
    with torch.no_grad():
        loss = theirs(name)(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    for words in ("", "pre_padding,mask_removal,memory_reuse"):
        assert perplexity(ours(name), words, ids).value == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_peer_that_is_timed_beside_ours_says_the_same(name):
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        assert torch.equal(to_hf(ours(name).decoder)(ids).logits, theirs(name)(ids).logits)


@pytest.mark.parametrize("name", ["llama-yarn", "mistral", "qwen3"])
def test_captured_steps_say_the_same(name):
    """What CUDA graphs replay: a `max_kv` that is rounded up, and tensors that must not move."""
    parts, counts = emulated(Recipe.parse("pre_padding,mask_removal,memory_reuse").parts)
    engine = Engine(ours(name).decoder, parts)
    told = engine.generate(prompts(), Settings(NEW))
    assert [tuple(row) for row in told.tokens] == expected(name) and counts["replays"] > 5


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_technique_keeps_the_tokens_of_every_family_or_says_why_it_cannot_run(name, technique):
    """A lossy one stays within its bound."""
    model, recipe = ours(name), Recipe(tuple(TECHNIQUES[each]() for each in needs(technique)))
    if reason := obstacle(TECHNIQUES[technique](), "cpu", model.config):
        assert len(reason.split()) > 2
        with pytest.raises(RecipeError, match=f"cannot run on .*Leave .*{technique}.* out"):
            as_recipe(recipe, "cpu", model.config)
    elif recipe.lossy:
        result = compare(model, prompts(), recipe, repeats=1, max_new_tokens=4, watch=False)
        assert result.parity.verdict == "lossy", result.parity
    else:
        assert said(name, recipe) == expected(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_a_tokens_keys_and_values_are_counted(name):
    model, config = ours(name), ours(name).config
    assert config.num_params == sum(p.numel() for p in theirs(name).parameters())
    engine = Engine(model.decoder, Recipe.parse("pre_padding,memory_reuse").parts)
    engine.generate([[1, 2, 3]], Settings(5))
    assert engine.kv_bytes == 8 * config.kv_bytes_per_token(4)
    assert hash(config) == hash(ours(name).config) and len({config.spec, config.spec}) == 1


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in ("gpt2-medium", "l16-h1024", "l24-h2048")])
def test_presets_have_the_shapes_of_transformers(name):
    told = settings_of(PRESETS[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(told.pop("model_type"), **told)
        )
    assert PRESETS[name].num_params == sum(p.numel() for p in model.parameters())
    assert FAMILIES[PRESETS[name].family].config(settings_of(PRESETS[name])) == PRESETS[name]
    shapes = load(name, device="meta", dtype="bfloat16")
    assert "random weights" in shapes.label and shapes.config.num_params * 2 <= shapes.decoder.weight_bytes + 512


def test_frequencies_stay_in_fp32_in_any_dtype():
    half = load(theirs("llama-yarn"), device="cpu", dtype="bfloat16").decoder
    assert half.token_embedding.dtype == torch.bfloat16
    assert torch.equal(half.inv_freq, theirs("llama-yarn").model.rotary_emb.inv_freq)
    assert half.config.spec.rope_factor == theirs("llama-yarn").model.rotary_emb.attention_scaling != 1


def test_frequencies_are_those_of_transformers_to_the_bit():
    for name in CONFIGS:
        if (inv_freq := ours(name).decoder.inv_freq) is not None:
            assert torch.equal(inv_freq, theirs(name).model.rotary_emb.inv_freq), name


def test_attention_looks_at_nothing_outside_of_a_window():
    """NaN in columns that are behind the window changes nothing once they are read no more."""
    shape = AttentionShape((20, 9), 4, 2, 8, decode=True)
    qkv, kv, batch, spec = shape.inputs("cpu", torch.float32, 0)
    spec = spec._replace(window=WINDOW)
    out = reference.attention(qkv, kv, batch, spec, empty=fresh)
    mask = reference.dense_mask(batch, spec, qkv, empty=fresh)
    assert (mask == 0).sum().item() == 2 * WINDOW
    torch.testing.assert_close(reference.masked_attention(qkv, kv, batch, spec, mask=mask, empty=fresh), out)
    for part in kv:
        part[:, :, : 20 - WINDOW] = torch.nan
    assert torch.equal(reference.attention(qkv, kv, batch, spec, empty=fresh), out)


def test_attention_that_is_not_causal_sees_what_comes_after_a_query():
    shape = AttentionShape((20, 9), 4, 2, 8)
    qkv, kv, batch, spec = shape.inputs("cpu", torch.float32, 0)
    spec = spec._replace(causal=False, scale=0.3)
    mask = reference.dense_mask(batch, spec, qkv, empty=fresh)
    real = batch.columns >= batch.keys.begin[batch.rows]
    out = reference.attention(qkv, kv, batch, spec, empty=fresh)
    masked = reference.masked_attention(qkv, kv, batch, spec, mask=mask, empty=fresh)
    torch.testing.assert_close(masked[real], out[real])
    assert not torch.allclose(out[real], reference.attention(qkv, kv, batch, shape.spec, empty=fresh)[real])


# --- kernels


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As if there were a Hopper GPU."""
    monkeypatch.setattr("eet_lab.ops.native.available", lambda device: None if device == "cuda" else "no GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def test_techniques_whose_kernels_do_not_take_a_model_are_left_out_and_refused(on_a_gpu):
    taken = [ours(name).config for name in ("gpt2", "llama", "mistral", "qwen2-window")]
    gpt2, qwen3 = taken[0], ours("qwen3").config
    left_out = unfit("cuda", qwen3)
    assert set(left_out) == {"fused_kernels", "persistent_layers", "fused_sampling", "dependent_launch"}
    assert "these have 12" in left_out["fused_kernels"]
    assert "needs fused_kernels, and" in left_out["dependent_launch"]
    assert not any(unfit("cuda", each) for each in taken) and not unfit("cpu", qwen3)
    assert Recipe.parse("all", "cuda", qwen3).names == tuple(
        name for name in Recipe.parse("all", "cuda", gpt2).names if name not in left_out
    )
    assert not unfit("cuda", PRESETS["opt-1.3b"]), "learned positions, ReLU: as GPT-2 has them"
    with pytest.raises(
        RecipeError, match="fused_kernels cannot run on this model: the attention kernels take heads of"
    ):
        as_recipe("fused_kernels", "cuda", qwen3)
    assert as_recipe("pre_padding,fused_kernels", "cuda", gpt2).names == ("pre_padding", "fused_kernels")
    assert "these have 12" in cuda.attention.unfit(Config(1, 24, 2, 48, V, 8))
    for spec, told in (
        (Spec(4, 2, 8, causal=False, window=6), "window of tokens that"),
        (Spec(4, 2, 8, scale=-1.0), "scale"),
        (Spec(4, 2, 8, max_distance=128), "bias of relative positions"),
    ):
        assert told in cuda.attention.unfit(SimpleNamespace(spec=spec))
    for wide, told in ((Config(1, 36, 4, 96, V, 8), "has 36"), (Config(1, 32, 4, 100, V, 8), "have 100 inside")):
        assert told in cuda.norm_linear.unfit(wide) and told in cuda.linear_residual.unfit(wide)
    assert obstacle(known("mask_removal")(), "cuda", qwen3) is None


def test_the_command_line_says_what_all_leaves_out(on_a_gpu, capsys):
    model = SimpleNamespace(device="cuda", config=ours("qwen3").config)
    tell_unfit(model, "pre_padding,fused_kernels")
    assert capsys.readouterr().err == ""
    tell_unfit(model, "all,-mask_removal")
    assert "fused_kernels is left out for this model: the attention kernels take" in capsys.readouterr().err
    tell_unfit(SimpleNamespace(device="cpu", config=seq2seqs.ours("t5").config), "all")
    assert "continuous_batching" not in capsys.readouterr().err, "it is never in all"


def test_an_engine_refuses_parts_that_cannot_run_its_model():
    parts = Recipe.parse("fused_kernels").parts
    with pytest.raises(RecipeError, match="cannot run this model: .* Use plain ops"):
        Engine(ours("qwen3").decoder, parts)
    Engine(random_decoder(PRESETS["opt-1.3b"], 0, torch.device("meta"), torch.float16), parts)


def test_the_page_greys_what_a_model_cannot_do(on_a_gpu):
    from eet_lab.workbench.choices import State

    state = State(device="cuda")
    state.choose(Recipe.parse("all", "cuda"))
    state.fit_to(ours("qwen3").config)
    assert "these have 12" in state.blocked("fused_kernels")
    assert "fused_kernels" not in state.recipe().names and "mask_removal" in state.recipe().names
    state.fit_to(ours("gpt2").config)
    assert state.recipe() == Recipe.parse("all", "cuda") and state.blocked("fused_kernels") is None
