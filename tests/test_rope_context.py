"""Contexts that rope scalings lengthen: what is computed beyond the original one, and where it ends."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from families import SIZES, V

import eet_lab
from eet_lab.errors import PromptError
from eet_lab.models import load
from eet_lab.models.families import family_of, settings_of

OWN, NEW = 32, 10
LENGTHS = (70, 3, 41)
CASES = [
    ("linear", {"factor": 4.0}, OWN, 4 * OWN),
    ("linear", {"factor": 2.6}, OWN, 83),
    ("linear", {"factor": 0.5}, OWN, OWN),
    ("yarn", {"factor": 4.0}, OWN, 4 * OWN),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": OWN}, 40, 4 * OWN),
    ("yarn", {"factor": 2.0, "original_max_position_embeddings": OWN}, 100, 100),
    (
        "llama3",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": OWN,
        },
        100,
        100,
    ),
    ("dynamic", {"factor": 4.0}, OWN, OWN),
    ("default", {}, OWN, OWN),
]


def theirs(kind: str, numbers: dict, positions: int, family: str = "llama"):
    sizes = SIZES | {"max_position_embeddings": positions, "tie_word_embeddings": False}
    rope = {"rope_type": kind, "rope_theta": 100.0, **numbers}
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(family, **sizes, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and path.endswith("weight")
            parameter.copy_(torch.randn_like(parameter) * 0.3 + is_norm)
    return model


@pytest.mark.parametrize(("kind", "numbers", "positions", "context"), CASES)
def test_scalings_lengthen_the_context_as_in_vllm(kind, numbers, positions, context):
    config = load(theirs(kind, numbers, positions), device="cpu").config
    assert config.context == context
    settings = settings_of(config)
    assert family_of(settings).config(settings).context == context, "as it is saved, too"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("recipe", ["", "all", "all,memory_reuse:kv=paged,continuous_batching"])
@pytest.mark.parametrize("case", [0, 3, 4])
def test_ragged_prompts_beyond_the_original_context_are_read_as_by_transformers(case, recipe, family):
    kind, numbers, positions, _ = CASES[case]
    reference = theirs(kind, numbers, positions, family)
    draw = random.Random(1)
    prompts = [[draw.randrange(1, V) for _ in range(length)] for length in LENGTHS]
    model = load(reference, device="cpu")
    run = eet_lab.generate(model, prompts, recipe, max_new_tokens=NEW, stop_at_eos=False).run
    for prompt, new in zip(prompts, run.tokens, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + list(new)]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits[range(NEW), list(new)]
        assert torch.all(logits.amax(-1) - chosen < 1e-4)


def test_an_error_tells_that_dynamic_scaling_ends_at_its_context():
    model = load(theirs("dynamic", {"factor": 4.0}, OWN), device="cpu")
    with pytest.raises(PromptError, match=r"context of 32 tokens \(rope scaling 'dynamic' is not run beyond.*\)\. Ask"):
        eet_lab.generate(model, [[1] * 20], max_new_tokens=20)
