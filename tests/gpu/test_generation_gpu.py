"""The engine on a GPU: every recipe against the baseline, graphs, memory, Stop, and running out of memory."""

from __future__ import annotations

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from every_recipe import every_recipe

from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import OutOfMemory
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.parts import launch
from eet_lab.parts.kv_cache import StaticKV
from eet_lab.technique import Recipe, names_in_all

pytestmark = pytest.mark.gpu

LEFT_OUT = {"persistent_layers"}  # it takes 16 bits
NAMES = tuple(name for name in names_in_all() if name not in LEFT_OUT)


def batch(num_rows: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1, 1000) for _ in range(draw.randint(shortest, longest))] for _ in range(num_rows)]


def decoder(dtype: torch.dtype, head_dim: int = 32):
    config = Config(3, 4 * head_dim, 4, 16 * head_dim, 1003, 512)
    model = weights.random_decoder(config, 0, torch.device("cuda"), dtype)
    layers = tuple(layer._replace(qkv=layer.qkv._replace(weight=layer.qkv.weight * 6)) for layer in model.layers)
    return model._replace(layers=layers)


@pytest.fixture(scope="module")
def fp32():
    return decoder(torch.float32)


@pytest.fixture(scope="module")
def fp16():
    return decoder(torch.float16)


@pytest.mark.parametrize("recipe", every_recipe(NAMES))
def test_greedy_tokens_in_fp32_equal_the_baseline(fp32, recipe):
    engine = Engine(fp32, Recipe.parse(recipe).check("cuda").parts)
    for shape in ((5, 1, 70), (1, 20, 20), (3, 1, 1), (33, 2, 40)):
        prompts = batch(*shape)
        want = Engine(fp32).generate(prompts, Settings(24)).tokens
        assert engine.generate(prompts, Settings(24)).tokens == want, shape
        assert engine.generate(prompts, Settings(24)).tokens == want, f"{shape} again"


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("num_rows", [2, 5])
@pytest.mark.usefixtures("layers_of_any_size")
def test_teacher_forced_logits_stay_within_the_budget(dtype, head_dim, num_rows):
    from eet_lab.bench.parity import parity

    model, prompts = decoder(dtype, head_dim), batch(num_rows, 1, 70)
    headline = "pre_padding,mask_removal,memory_reuse"
    for recipe in (headline, "fused_kernels", "all", "all,-mask_removal", "all,-pre_padding"):
        found = parity(model, Recipe.parse(recipe, "cuda").parts, prompts, Settings(16))
        assert found.verdict != "different", f"{recipe}: {found.explanation}"


def test_draws_do_not_depend_on_the_recipe(fp32):
    prompts, settings = batch(5, 1, 40), Settings(16, temperature=0.9, top_k=50, top_p=0.9, seed=7)
    runs = {Engine(fp32, Recipe.parse(r, "cuda").parts).generate(prompts, settings).tokens for r in ("", "all")}
    assert len(runs) == 1


@pytest.mark.parametrize("num_rows", [1, 5, 17])
@pytest.mark.parametrize("how", [{}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}], ids=str)
def test_a_graph_replays_with_another_seed(fp16, num_rows, how):
    prompts, parts = batch(num_rows, 1, 20), Recipe.parse("all", "cuda").parts
    first, other = (Settings(16, temperature=1.0, seed=seed, **how) for seed in (1, 2))
    engine = Engine(fp16, parts)
    before = engine.generate(prompts, first).tokens
    assert (captures := engine.captures)
    replayed = engine.generate(prompts, other).tokens
    assert engine.captures == captures
    assert replayed == Engine(fp16, parts).generate(prompts, other).tokens != before
    assert engine.generate(prompts, first).tokens == before


def test_one_capture_for_each_bucket_and_none_later(fp16):
    engine = Engine(fp16, Recipe.parse("all,cuda_graphs:bucket=32", "cuda").parts)
    for _ in range(2):
        engine.generate([[5] * 20], Settings(80))
        assert engine.captures == 4  # 20 + 80 columns: up to 32, 64, 96 and 99


def test_graphs_outlive_the_workspaces_of_cublas():
    """PyTorch frees them for a compiler, and when some graph ends. Whoever has that memory then keeps its numbers."""
    x, weight = (torch.randn(size, device="cuda", dtype=torch.float16) for size in ((128, 16384), (16384, 128)))
    out = torch.empty(128, 128, device="cuda", dtype=torch.float16)
    with launch.capturing():
        want = torch.mm(x, weight, out=out).clone()  # in parts, whose sums lie in the workspace
    graph, ended = (launch.capture(lambda: torch.mm(x, weight, out=out)) for _ in range(2))
    torch.cuda.synchronize()
    del ended
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.ones(2**power, dtype=torch.int64, device="cuda") for power in (20, 21, 22) for _ in range(24)]
    out.zero_()
    graph.replay()
    assert out.equal(want) and all(part.eq(1).all() for part in others)


def test_two_threads_capture_on_one_gpu(fp16):
    parts, lists = Recipe.parse("all", "cuda").parts, [batch(3, 1, 40, seed=seed) for seed in range(8)]
    want = [Engine(fp16, parts).generate(rows, Settings(12)).tokens for rows in lists]

    def generated(order):
        engine = Engine(fp16, parts)
        engine.reserve(3, 40, Settings(12))
        return [[engine.generate(lists[number], Settings(12)).tokens for _ in range(3)] for number in order]

    with ThreadPoolExecutor(2) as pool:
        orders = range(8), [7, 2, 5, 0, 3, 6, 1, 4]
        for order, found in zip(orders, pool.map(generated, orders), strict=True):
            assert found == [[want[number]] * 3 for number in order]


def test_dead_slots_graphs_do_not_end_a_capture(fp16):
    parts = Recipe.parse("memory_reuse,cuda_graphs:bucket=32").parts
    rows, settings, before = batch(2, 5, 40), Settings(40), gc.get_threshold()
    expected = Engine(fp16, parts).generate(rows, settings).tokens

    def layers(*args):
        if torch.cuda.is_current_stream_capturing():
            gc.set_threshold(1)
            assert [[] for _ in range(100)]  # enough for the collector to come, if it is on
        return parts.layers(*args)

    gc.collect()
    gc.set_threshold(1_000_000)  # until then the graphs of the dead stay
    try:
        dead = Engine(fp16, parts)
        dead.generate(rows, settings)
        dead.itself = dead
        del dead
        assert Engine(fp16, replace(parts, layers=layers)).generate(rows, settings).tokens == expected
    finally:
        gc.set_threshold(*before)


def test_a_captured_step_allocates_nothing(fp16):
    engine, counts = Engine(fp16, Recipe.parse("all", "cuda").parts), []
    engine.generate([[5] * 20], Settings(40))
    engine.generate(
        [[5] * 20], Settings(40), on_step=lambda e: counts.append(torch.cuda.memory_stats()["allocation.all.allocated"])
    )
    assert len(set(counts[2:])) == 1


def test_nan_in_the_pads_changes_nothing(fp16):
    class Poisoned(StaticKV):
        def layer(self, number, batch):
            keys, values = super().layer(number, batch)
            if not torch.cuda.is_current_stream_capturing() and not keys.is_meta:
                for row, begin in enumerate(batch.keys.begin.tolist()):
                    keys[row, :, :begin] = values[row, :, :begin] = float("nan")
            return keys, values

    for recipe in ("pre_padding,mask_removal,memory_reuse", "all,-packed_prefill"):
        parts, prompts = Recipe.parse(recipe, "cuda").parts, batch(5, 1, 70)
        clean = Engine(fp16, parts).generate(prompts, Settings(12)).tokens
        assert Engine(fp16, replace(parts, kv_cache=Poisoned)).generate(prompts, Settings(12)).tokens == clean


@pytest.mark.parametrize("recipe", ["", "all"])
def test_stop_ends_a_run_and_the_next_one_is_right(fp32, recipe):
    engine, cancel, prompts = Engine(fp32, Recipe.parse(recipe, "cuda").parts), threading.Event(), batch(3, 4, 9)
    want = engine.generate(prompts, Settings(200)).tokens
    run = engine.generate(prompts, Settings(200), cancel=cancel, on_step=lambda e: e.index == 30 and cancel.set())
    assert run.cancelled
    assert 20 < len(run.tokens[0]) < 60
    cancel.clear()
    assert engine.generate(prompts, Settings(200), cancel=cancel).tokens == want


def test_closing_frees_to_the_byte(fp16):
    warm = Engine(fp16, Recipe.parse("all", "cuda").parts)
    for _ in range(3):  # libraries keep their workspaces, those of captured passes too
        warm.generate(batch(8, 9, 60), Settings(4))
    warm.close()
    torch.cuda.synchronize()
    gc.collect()  # what earlier tests left; from here on nothing may need the collector
    before = torch.cuda.memory_allocated()
    engine = Engine(fp16, Recipe.parse("all", "cuda").parts)
    for _ in range(3):
        engine.generate(batch(8, 9, 60), Settings(40))
    assert torch.cuda.memory_allocated() > before
    engine.close()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_out_of_memory_names_the_buffer_and_frees_the_rest(fp16):
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()  # what earlier tests left would be freed meanwhile
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**25) / total)
    try:
        engine = Engine(fp16, Recipe.parse("pre_padding", "cuda").parts)
        before = torch.cuda.memory_allocated()
        with pytest.raises(OutOfMemory, match=r"could not be allocated .*(MiB|GiB)"):
            engine.generate(batch(256, 400, 400), Settings(4))
        assert torch.cuda.memory_allocated() == before
        assert engine.generate([[1, 2]], Settings(4)).num_tokens == 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
