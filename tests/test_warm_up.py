"""A decoder is warm before it is served: a pass of each size that a GPU computes has been run."""

from __future__ import annotations

import pytest
import torch
from test_continuous import batches_of, recipe

from eet_lab.engine import slots
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.engine.stream import AHEAD
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.ops.cuda import linear
from eet_lab.ops.fits import FEW
from eet_lab.serving.profile_passes import DECODE_STEPS
from eet_lab.serving.warm_up import warm_up_decoder
from eet_lab.technique import Recipe

CASES = [("static", "rows=64:budget=4096", 90), ("paged", "rows=4:budget=500:chunk=100", 100), ("paged", "rows=2", 40)]


@pytest.mark.parametrize(("store", "policy", "columns"), CASES)
@pytest.mark.parametrize("more", ["", ",prefix_caching"])
def test_a_pass_of_each_of_few_sizes_is_run_before_others_come(store, policy, columns, more, monkeypatch):
    if more and store == "static":
        pytest.skip("it shares pages")
    parts = Recipe.parse(recipe(store, policy) + more).parts
    decoder = weights.random_decoder(Config(1, 8, 1, 16, 61, 256), 0, torch.device("cpu"), torch.float32)
    engine = Engine(decoder, parts)
    engine.reserve(parts.schedule.max_rows, columns - 2, Settings(2))
    engine.add([1], Settings(1))
    tokens = range(1, min(parts.schedule.most_tokens(columns), parts.schedule.max_rows * (columns - 1)) + 1)
    assert [*map(engine.slots.pass_size, tokens)] == [*tokens], "a CPU has no use for sizes"
    engine.slots.has_sizes = True
    sizes = [*map(engine.slots.pass_size, tokens)]
    assert all(0 <= size - few <= max(min(few, 63), 7, few / 16) for few, size in zip(tokens, sizes, strict=True))
    read = batches_of(monkeypatch)
    warm_up_decoder(engine)
    run = {len(batch.rows) for batch in read}
    assert run <= {*sizes} and len({*sizes}) < 60
    # Where pages are scarce, not all rows have room for prompts that fill their slots.
    assert {*sizes} - run <= ({max(sizes)} if store == "paged" else set())


def test_what_passes_are_told_apart_by():
    assert linear.MOST_TILE_TOKENS <= slots.FEW_TOKENS and FEW <= slots.FEW_TOKENS
    assert DECODE_STEPS <= AHEAD, "a host that waits would be told as one that works"
