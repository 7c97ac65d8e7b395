"""Memory on a GPU: what is foreseen is what happens, what is held suffices, and all of it is given back."""

from __future__ import annotations

import random

import pytest
import torch
from test_lifetimes import SETTINGS, SHAPES, recorded
from test_memory import PLANNED, drawn
from test_paged import batch

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.models.decoder import mapped
from eet_lab.technique import Recipe

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("words", ["all,-cuda_graphs", "", "pre_padding,mask_removal,fused_kernels"])
def test_a_rehearsal_foresees_a_real_run(words):
    sizes = Config(3, 256, 4, 1024, 504, 512)
    for dtype in (torch.float16, torch.float32):
        decoder = weights.random_decoder(sizes, 0, torch.device("cuda"), dtype)
        for lengths in (*SHAPES, [200] * 9, [1] * 20):
            for settings in SETTINGS:
                real, foreseen = recorded(decoder, Recipe.parse(words, "cuda").parts, batch(0, lengths), settings)
                assert all(trace == foreseen[name] for name, trace in real.items()), (lengths, settings)


@pytest.mark.parametrize("recipe", ["", "all", "all,-cuda_graphs", f"{PLANNED}:planner=chunked"])
def test_closing_frees_every_byte(tiny, recipe):
    decoder = mapped(tiny.decoder, lambda tensor: tensor.to("cuda", torch.float16))

    def used() -> int:
        engine = Engine(decoder, Recipe.parse(recipe, "cuda").parts)
        engine.reserve(3, 30, Settings(8))
        engine.generate([[1] * 30, [2] * 3], Settings(8))
        engine.close()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

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
