"""Memory on a GPU: what is foreseen is what happens, what is held suffices, and all of it is given back."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from test_lifetimes import SETTINGS, SHAPES, recorded
from test_memory import PLANNED, drawn
from test_paged import batch
from test_soak import NUM_ENGINES, soaked
from workbench.driving import PROMPTS, ask, do, shown, turn_until

from eet_lab.bench import compare
from eet_lab.bench.fit import forecast_compare
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.models import load, weights
from eet_lab.models.config import Config
from eet_lab.models.decoder import mapped
from eet_lab.technique import Recipe
from eet_lab.workbench import Workbench

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("words", ["all,-cuda_graphs", "", "pre_padding,mask_removal,fused_kernels"])
def test_a_meta_trace_foresees_a_real_run(words):
    sizes = Config(3, 256, 4, 1024, 504, 512)
    for dtype in (torch.float16, torch.float32):
        decoder = weights.random_decoder(sizes, 0, torch.device("cuda"), dtype)
        for lengths in (*SHAPES, [200] * 9, [1] * 20):
            for settings in SETTINGS:
                real, foreseen = recorded(decoder, Recipe.parse(words, "cuda").parts, batch(0, lengths), settings)
                assert all(trace == foreseen[name] for name, trace in real.items()), (lengths, settings)


@pytest.mark.parametrize("recipe", ["", "all", "all,-cuda_graphs", f"{PLANNED}:planner=chunked"])
@pytest.mark.usefixtures("layers_of_any_size")
def test_closing_frees_every_byte(tiny, recipe):
    decoder = mapped(tiny.decoder, lambda tensor: tensor.to("cuda", torch.float16))

    def used() -> int:
        engine = Engine(decoder, Recipe.parse(recipe, "cuda").parts)
        engine.reserve(3, 30, Settings(8))
        engine.generate([[1] * 30, [2] * 3], Settings(8))
        engine.close()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    gc.collect()  # what earlier tests left
    used()  # libraries keep what they take at first
    assert used() == used()


@pytest.mark.parametrize("recipe", ["all", "all,-cuda_graphs"])
def test_after_a_reservation_the_driver_is_not_asked(recipe):
    """Requests of random length, as a server gets them."""
    sizes = Config(4, 768, 12, 3072, 50257, 1024)
    decoder, draw = weights.random_decoder(sizes, 0, torch.device("cuda"), torch.float16), random.Random(4)
    engine = Engine(decoder, Recipe.parse(recipe, "cuda").parts)
    engine.reserve(4, 960, Settings(16))
    for num_rows in (1, 2, 3, 4):  # each number of rows captures graphs of its own
        engine.generate(drawn(draw, num_rows, 960), Settings(16))
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(100):
        engine.generate(drawn(draw, 4, 960), Settings(16))
    assert torch.cuda.memory_stats()["num_device_alloc"] == before


def test_nothing_is_left_behind():
    """The soak of the CPU on a GPU, with kernels and graphs among the recipes."""
    decoder = weights.random_decoder(Config(2, 64, 4, 128, 64, 64), 0, torch.device("cuda"), torch.float16)
    recipes = ["", "all", "all,-cuda_graphs", "all,memory_reuse:planner=chunked", "pre_padding,memory_reuse:kv=paged"]

    def left(num_engines: int) -> int:
        soaked(decoder, recipes, "cuda", num_engines)
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = left(len(recipes) * 3)  # libraries keep what they take at first
    assert left(NUM_ENGINES) == before


@pytest.mark.parametrize("words", ["", "pre_padding,memory_reuse", "all", "all,-cuda_graphs"])
def test_the_peak_is_foreseen_within_a_few_per_cent(words):
    """In torch's own count, beyond what libraries took before."""
    sizes = Config(8, 1024, 16, 4096, 50257, 1024)
    decoder = weights.random_decoder(sizes, 0, torch.device("cuda"), torch.float16)
    recipe, prompts, settings = Recipe.parse(words, "cuda"), batch(0, [800, 300, 31, 500]), Settings(40)
    warm = Engine(decoder, recipe.parts)
    warm.generate(prompts, settings)
    warm.close()
    gc.collect()  # what earlier tests left would go while the peak is taken
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = Engine(decoder, recipe.parts)
    told = engine.forecast(prompts, settings)
    engine.generate(prompts, settings)
    real = decoder.weight_bytes + torch.cuda.max_memory_allocated() - before
    assert told.fits and abs((told.total_bytes - told.workspace_bytes) / real - 1) < 0.05, (str(told), real)
    assert (told.kv_bytes, told.activation_bytes >= engine.activation_bytes) == (engine.kv_bytes, True)


@pytest.mark.parametrize("words", ["pre_padding,memory_reuse", "all", "all,-cuda_graphs"])
def test_a_comparison_takes_what_was_forecast(words):
    """In torch's own count, beyond what libraries took before."""
    model, lengths, settings = load("gpt2", device="cuda"), [500, 300, 31, 300], Settings(24)
    prompts, recipe = batch(0, lengths), Recipe.parse(words, "cuda")
    told = forecast_compare(model, lengths, recipe, settings)
    compare(model, batch(0, [5]), words, repeats=1, watch=False, max_new_tokens=2)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compare(model, prompts, words, repeats=1, watch=False, max_new_tokens=24)
    taken = model.decoder.weight_bytes + torch.cuda.max_memory_allocated() - before
    assert 0.98 * taken <= told.total_bytes - told.workspace_bytes <= 1.4 * taken, (told, taken)


def test_the_tab_tells_how_often_torch_asked_the_driver(tmp_path):
    bench = Workbench("demo", PROMPTS, max_new_tokens=8, folder=tmp_path, device="cuda")
    turn_until(bench, lambda: bench.model is not None)
    try:
        do(bench, ask.compare(), ask.tab("planners"))
        told = str(shown(bench, "answer")["tables"])
        assert "allocation" in told and "frees are not counted" in told, told
    finally:
        bench.close()


@pytest.mark.parametrize("words", ["all", "all,-cuda_graphs", "all,-cuda_graphs,memory_reuse:kv=paged"])
def test_a_steady_step_allocates_nothing(words):
    sizes = Config(3, 256, 4, 1024, 504, 512)
    decoder = weights.random_decoder(sizes, 0, torch.device("cuda"), torch.float16)
    engine, counts = Engine(decoder, Recipe.parse(words, "cuda").parts), []
    engine.reserve(3, 200, Settings(60))
    prompts = batch(0, [200, 30, 7])
    engine.generate(
        prompts,
        Settings(60),
        on_step=lambda event: counts.append(torch.cuda.memory_stats()["allocation.all.allocated"]),
    )
    assert len(set(counts[2:])) == 1
