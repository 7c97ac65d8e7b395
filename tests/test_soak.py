"""Hundreds of requests of random shapes and many engines, after which nothing is left behind."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import encoders
import families
import pytest
import torch

from eet_lab.collector import no_collection
from eet_lab.engine import tasks
from eet_lab.engine.encode import EncoderEngine
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.memory import POOLS
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.models.decoder import Decoder
from eet_lab.parts.parts import Parts
from eet_lab.technique import Recipe
from eet_lab.training import Example, Trainer

NUM_REQUESTS, NUM_ENGINES = 400, 40
RECIPES = ["", "memory_reuse:kv=paged", "pre_padding,mask_removal,packed_prefill,memory_reuse"]
RECIPES += [f"pre_padding,memory_reuse:planner={name}" for name in POOLS if name != "optimal"]
RECIPES += ["pre_padding,memory_reuse:planner=chunked:release=idle"]
PACKED = "pre_padding,mask_removal,packed_prefill"


def soaked(decoder: Decoder, recipes: list[str], device: str, num_engines: int = NUM_ENGINES) -> None:
    """An engine of a random recipe, requests of random shapes, some of them after a reservation; closed."""
    draw = random.Random(0)
    for _ in range(num_engines):
        engine = Engine(decoder, Recipe.parse(draw.choice(recipes), device).parts)
        if draw.random() < 0.3:
            engine.reserve(2, 20, Settings(2))
        for _ in range(NUM_REQUESTS // NUM_ENGINES):
            prompts = [[draw.randrange(60)] * draw.randint(1, 24) for _ in range(draw.randint(1, 3))]
            engine.generate(prompts, Settings(draw.randint(1, 2)))
        engine.close()


def alive() -> list[torch.Tensor]:
    """All tensors that Python knows, those that wait for the collector, too."""
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def held() -> tuple[int, int]:
    """Bytes and number of all tensors that Python knows."""
    gc.collect()
    found = alive()
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


def generation(parts: Parts) -> Callable[[], object]:
    engine = Engine(families.ours("gpt2").decoder, parts)
    return lambda: engine.generate(families.prompts(), Settings(4, temperature=1.0))


def joins(parts: Parts) -> Callable[[], object]:
    engine = Engine(families.ours("llama").decoder, parts)

    def run() -> None:
        requests = [engine.add(prompt, Settings(4)) for prompt in families.prompts()]
        while not all(each.done for each in requests):
            engine.step()

    return run


def reading(parts: Parts) -> Callable[[], object]:
    engine = EncoderEngine(encoders.ours("bert").encoder, parts)
    return lambda: engine.read(encoders.texts(), tasks.CLS)


def training(parts: Parts) -> Callable[[], object]:
    trainer = Trainer(families.ours("gpt2").network, parts)
    return lambda: trainer.step([Example([5, 6, 7]), Example([8, 9])])


@pytest.mark.parametrize(
    ("work", "recipe"),
    [
        (generation, ""),
        (generation, f"{PACKED},memory_reuse"),
        (joins, f"{PACKED},memory_reuse,continuous_batching"),
        (reading, ""),
        (reading, f"{PACKED},memory_reuse"),
        (training, PACKED),
    ],
)
def test_no_tensor_waits_for_the_collector(work, recipe):
    """Servers let it run rarely: what waits for it holds a GPU's memory."""
    run = work(Recipe.parse(recipe).parts)
    for _ in range(2):
        run()
    with no_collection():
        before = len(alive())
        for _ in range(3):
            run()
        assert len(alive()) == before
