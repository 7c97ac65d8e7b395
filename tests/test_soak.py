"""A thousand requests of random shapes and fifty engines, after which nothing is left behind."""

from __future__ import annotations

import gc
import random

import torch

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.memory import POOLS
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.models.decoder import Decoder
from eet_lab.technique import Recipe

NUM_REQUESTS, NUM_ENGINES = 1000, 50
RECIPES = ["", "memory_reuse:kv=paged", "pre_padding,mask_removal,packed_prefill,memory_reuse"]
RECIPES += [f"pre_padding,memory_reuse:planner={name}" for name in POOLS if name != "optimal"]
RECIPES += ["pre_padding,memory_reuse:planner=chunked:release=idle"]


def soaked(decoder: Decoder, recipes: list[str], device: str, num_engines: int = NUM_ENGINES) -> None:
    """An engine of a random recipe, twenty requests of random shapes, some of them after a reservation; closed."""
    draw = random.Random(0)
    for _ in range(num_engines):
        engine = Engine(decoder, Recipe.parse(draw.choice(recipes), device).parts)
        if draw.random() < 0.3:
            engine.reserve(2, 20, Settings(2))
        for _ in range(NUM_REQUESTS // NUM_ENGINES):
            prompts = [[draw.randrange(60)] * draw.randint(1, 24) for _ in range(draw.randint(1, 3))]
            engine.generate(prompts, Settings(draw.randint(1, 2)))
        engine.close()


def held() -> tuple[int, int]:
    """Bytes and number of all tensors that Python knows."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in found}
    return sum(storages.values()), len(found)


def test_nothing_is_left_behind():
    decoder = weights.random_decoder(Config(1, 8, 1, 16, 61, 64), 0, torch.device("cpu"), torch.float32)
    for recipe in RECIPES:  # what is made once: imports, and torch's own constants
        Engine(decoder, Recipe.parse(recipe).parts).generate([[1]], Settings(2))
    before = held()
    soaked(decoder, RECIPES, "cpu")
    assert held() == before


def test_what_is_left_behind_is_noticed():
    before = held()
    kept = torch.empty(3)
    assert held() == (before[0] + 12, before[1] + 1)
    del kept
    assert held() == before
