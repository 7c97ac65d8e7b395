"""Dependent launch on a GPU: the same tokens, logits and KV cache as without it, to the bit, over many steps."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from eet_lab.bench.parity import LogitsRecorder
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.models.decoder import Decoder
from eet_lab.ops.reference import noise_keys
from eet_lab.parts import Parts
from eet_lab.technique import Recipe
from eet_lab.techniques import DependentLaunch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("layers_of_any_size")]

NEEDED = "memory_reuse,fused_kernels"
GRAPHS = "cuda_graphs:bucket=32"  # several captures in a run
RECIPES = {
    "least": NEEDED,
    "graphs": f"{NEEDED},{GRAPHS}",
    "sampling": f"mask_removal,{NEEDED},fused_sampling",
    "sampling-graphs": f"mask_removal,{NEEDED},fused_sampling,{GRAPHS}",
    "masked": f"pre_padding,{NEEDED},fused_sampling,{GRAPHS}",
    "torch-between": f"pre_padding,mask_removal,packed_prefill,{NEEDED},{GRAPHS}",
    "all": f"pre_padding,mask_removal,packed_prefill,{NEEDED},fused_sampling,{GRAPHS}",
    "layers": f"pre_padding,mask_removal,packed_prefill,{NEEDED},persistent_layers,fused_sampling,{GRAPHS}",
    "layers-apart": f"mask_removal,{NEEDED},persistent_layers",
    "int8": f"pre_padding,mask_removal,packed_prefill,{NEEDED},fused_sampling,{GRAPHS},int8_weights",
}
BATCHES = {  # rows, shortest and longest prompt
    "one": (1, 40, 40),
    "two": (2, 1, 60),
    "single-tokens": (3, 1, 1),  # a prefill of one token a row takes the kernel of decoding
    "ragged": (8, 1, 90),
    "long": (4, 200, 330),  # keys and values come in a stream
    "many": (33, 2, 40),  # too many for the kernel that streams weights: norms of ours and cuBLAS in turn
}
SETTINGS = {"greedy": Settings(96), "sampled": Settings(96, temperature=0.9, top_k=50, top_p=0.9, seed=7)}
RUNS = 2


@pytest.fixture(scope="module", autouse=True)
def new_enough():
    if problem := DependentLaunch().unavailable("cuda"):
        pytest.skip(problem)


@pytest.fixture(scope="module", params=["small", "wide"])
def model(request) -> Decoder:
    """So small that kernels leave multiprocessors idle, or as wide as GPT-2."""
    config = {"small": Config(2, 64, 2, 96, 503, 512), "wide": Config(6, 768, 12, 3072, 50257, 512)}[request.param]
    made = weights.random_decoder(config, 0, torch.device("cuda"), torch.float16)
    layers = tuple(layer._replace(qkv=layer.qkv._replace(weight=layer.qkv.weight * 6)) for layer in made.layers)
    return made._replace(layers=layers)


def prompts(num_rows: int, shortest: int, longest: int) -> list[list[int]]:
    draw = random.Random(num_rows)
    return [[draw.randrange(1, 500) for _ in range(draw.randint(shortest, longest))] for _ in range(num_rows)]


def both(words: str) -> tuple[Parts, Parts]:
    """Without it and with it."""
    recipe = Recipe.parse(words)
    return recipe.parts, Recipe((*recipe, DependentLaunch())).check("cuda").parts


def caches(engine: Engine) -> list[torch.Tensor]:
    """What every layer of every step left: keys and values of all columns."""
    return [part.clone() for part in (engine.cache.keys, engine.cache.values)]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_and_cache_are_the_same_to_the_bit(model, recipe, batch, settings):
    rows, (plain, early) = prompts(*BATCHES[batch]), both(RECIPES[recipe])
    engine = Engine(model, plain)
    tokens = engine.generate(rows, SETTINGS[settings]).tokens
    kept = caches(engine)
    assert all(cache.isfinite().all() for cache in kept)
    assert sum(map(len, tokens)) == 96 * len(rows)
    engine = Engine(model, early)
    for run in range(RUNS):  # from the second on in the same memory, where the run before left its numbers
        assert engine.generate(rows, SETTINGS[settings]).tokens == tokens, f"run {run}"
        different = [i // 2 for i, pair in enumerate(zip(caches(engine), kept, strict=True)) if not torch.equal(*pair)]
        assert not different, f"run {run}: the caches of layers {different}"


@pytest.mark.parametrize("batch", ["one", "ragged", "long"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_logits_are_the_same_to_the_bit(model, recipe, batch):
    rows = prompts(*BATCHES[batch])
    found = []
    for parts in both(RECIPES[recipe]):
        recorder = LogitsRecorder(model, [len(row) for row in rows], 64, noise_keys(0, len(rows), model.device))
        Engine(model, parts, recorder).generate(rows, Settings(64))
        found.append(recorder.taken())
    plainly, early = found
    assert plainly.isfinite().all() and (plainly.abs().amax((0, 2)) > 0).all(), "each step left its logits"
    assert torch.equal(plainly, early)


@pytest.mark.parametrize("recipe", ["sampling-graphs", "all", "layers", "int8"])
def test_long_runs_of_many_steps_stay_the_same(model, recipe):
    """A run up to the model's context, again and again: 1,500 steps in which nothing but the GPU sets the pace."""
    plain, early = both(RECIPES[recipe].replace(":bucket=32", ""))
    rows, settings = [[7, 8, 9]], Settings(250)
    tokens = Engine(model, plain).generate(rows, settings).tokens
    engine = Engine(model, early)
    assert all(engine.generate(rows, settings).tokens == tokens for _ in range(6))


def test_a_batch_of_another_shape_between_two_changes_nothing(model):
    plain, early = both(RECIPES["all"])
    first, second = prompts(2, 5, 30), prompts(5, 1, 60)
    one, other = Engine(model, plain), Engine(model, early)
    for rows in (first, second, first):
        assert other.generate(rows, Settings(64)).tokens == one.generate(rows, Settings(64)).tokens


def test_stop_and_go_on(model):
    """A run that is broken off leaves kernels on their way; the next one in the same memory must not see them."""
    _, early = both(RECIPES["all"])
    engine, cancel, rows = Engine(model, early), threading.Event(), prompts(3, 4, 9)
    want = engine.generate(rows, Settings(96)).tokens
    for last in (3, 20, 50):
        engine.generate(
            rows, Settings(96), cancel=cancel, on_step=lambda e, last=last: e.index == last and cancel.set()
        )
        cancel.clear()
        assert engine.generate(rows, Settings(96), cancel=cancel).tokens == want
