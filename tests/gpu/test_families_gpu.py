"""Every decoder family over our kernels."""

from __future__ import annotations

import pytest
import torch
import transformers
from families import CONFIGS, GPT2, IDS, SCALINGS, SIZES, WINDOW, prompts

from eet_lab.bench.parity import parity
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.models import load
from eet_lab.texts import as_recipe

pytestmark = pytest.mark.gpu

WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 512}  # heads of 64
MODELS = {
    **{
        name: CONFIGS[name]
        for name in (
            "llama",
            "llama-tied",
            "opt",
            "qwen2",
            "mistral",
            "qwen2-window",
            *(f"llama-{kind}" for kind in SCALINGS),
        )
    },
    "gpt2": ("gpt2", GPT2),
    "mistral-wide": ("mistral", WIDE | {"sliding_window": WINDOW}),
    "llama-wide": ("llama", WIDE | {"tie_word_embeddings": False}),
    "qwen3-wide": ("qwen3", WIDE | {"head_dim": 128}),
    "qwen3-geglu": ("qwen3", SIZES | {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}),
}
RECIPES = ("all", "all,memory_reuse:kv=paged", "all,-cuda_graphs", "fused_kernels", "all,int8_weights")


@pytest.fixture(scope="module")
def models():
    made = {}
    for name, (kind, sizes) in MODELS.items():
        torch.manual_seed(3)
        config = transformers.AutoConfig.for_model(kind, **(sizes | IDS))
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                scale = 0.3 if config.hidden_size < 100 else 0.08
                is_norm = parameter.ndim == 1 and path.endswith("weight")
                parameter.copy_(torch.randn_like(parameter) * scale + is_norm)
        made[name] = model
    return made


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_the_baseline_computes(models, name, dtype, recipe):
    model = load(models[name], device="cuda", dtype=dtype)
    parts = as_recipe(recipe, model.device, model.config).parts
    assert parts.ops.kernels, "or nothing is tested"
    tolerance = 0.2 if "int8" in recipe else 0.0
    found = parity(model.decoder, parts, prompts(), Settings(20), tolerance=tolerance)
    assert found.verdict != "different", found.explanation


@pytest.mark.parametrize("recipe", ["all", "all,-packed_prefill", "all,memory_reuse:kv=paged"])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_whose_pass_is_replayed_get_the_tokens_of_one_that_is_launched(models, name, recipe):
    model = load(models[name], device="cuda", dtype="float16")
    parts = as_recipe(recipe, model.device, model.config).parts
    engine, others = Engine(model.decoder, parts), [[*map(sum, zip(row, row[::-1], strict=True))] for row in prompts()]
    others = [[token % model.config.vocab_size for token in row] for row in others]
    for rows in (prompts(), prompts(), others, prompts()):
        want = Engine(model.decoder, parts).generate(rows, Settings(20)).tokens
        assert engine.generate(rows, Settings(20)).tokens == want
    assert engine.slots.passes._replays.captures == 1


@pytest.mark.parametrize("name", MODELS)
def test_in_fp32_tokens_are_those_of_the_cpu(models, name):
    cpu, gpu = (load(models[name], device=device, dtype="float32") for device in ("cpu", "cuda"))
    expected = Engine(cpu.decoder).generate(prompts(), Settings(20)).tokens
    assert len({token for row in expected for token in row}) > 5
    parts = as_recipe("all", gpu.device, gpu.config).parts
    assert Engine(gpu.decoder, parts).generate(prompts(), Settings(20)).tokens == expected
