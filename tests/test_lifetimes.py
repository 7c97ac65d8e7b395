"""Lifetimes traced on meta tensors are those of a real run, whatever the recipe, the batch and the pass."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from test_paged import LAYOUTS, batch

from eet_lab.engine.engine import Engine
from eet_lab.engine.meta_trace import NoArithmetic, are_alike
from eet_lab.engine.recorded import recorded_lifetimes
from eet_lab.engine.settings import Settings
from eet_lab.memory import POOLS, live_bytes
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.ops.int8 import quantized
from eet_lab.parts import Ops
from eet_lab.parts.trace import covers
from eet_lab.technique import Recipe

RECIPES = [*LAYOUTS, "int8_weights:group=64", "pre_padding,int8_weights"]
RECIPES += [f"{words},memory_reuse".strip(",") for words in LAYOUTS]
RECIPES += [f"{words},memory_reuse:kv=paged".strip(",") for words in LAYOUTS]
SHAPES = ([37, 1, 16, 17], [5], [16, 16], [1, 1, 33], [1])
SETTINGS = (Settings(6), Settings(2, temperature=0.8, top_k=9, top_p=0.9), Settings(1))
OPS = {f.name for f in fields(Ops)} | {"mask"}


def recorded(decoder, parts, prompts, settings):
    """What a real run asked for, and what a meta trace foresaw."""
    engine = Engine(decoder, parts)
    return recorded_lifetimes(engine, prompts, settings), engine.lifetimes(prompts, settings)


@pytest.mark.parametrize("words", RECIPES)
def test_a_meta_trace_foresees_a_real_run(tiny, words):
    """Each recipe with all shapes and all settings; each shape with all settings, under one recipe or another."""
    parts, first = Recipe.parse(words).parts, RECIPES.index(words)
    for number, lengths in enumerate(SHAPES, first):
        settings = SETTINGS[number % len(SETTINGS)]
        real, foreseen = recorded(tiny.decoder, parts, batch(0, lengths), settings)
        assert real.keys() == {"prefill", "decode"} or settings.max_new_tokens == 1
        assert real and all(trace == foreseen[name] for name, trace in real.items()), (lengths, settings)
        assert {life.op for trace in foreseen.values() for life in trace} <= OPS


def test_a_recording_runs_to_the_end_and_leaves_the_engine_alone(tiny):
    """Whatever would stop a row, and however steps are launched; the engine's own memory is not touched."""
    engine = Engine(tiny.decoder, Recipe.parse("pre_padding,memory_reuse").parts)
    engine.generate([[1, 2], [3]], Settings(4))
    held, plans = engine.memory.calls, engine.plans()
    settings = Settings(9, stop=tuple(range(499)))
    assert recorded_lifetimes(engine, [[1, 2, 3]], settings) == engine.lifetimes([[1, 2, 3]], settings)
    assert engine.memory.calls == held and engine.plans() == plans


def test_a_meta_trace_that_is_wrong_is_noticed(tiny):
    """The test above can fail: here an op asks for more when it has data."""
    from eet_lab.ops import reference

    def careless(ids, positions, words, places, *, empty):
        if not ids.is_meta:
            empty("more", (3,), words)
        return reference.embed(ids, positions, words, places, empty=empty)

    parts = replace(Recipe.parse("pre_padding").parts, ops=Ops(embed=careless))
    real, foreseen = recorded(tiny.decoder, parts, [[1, 2]], Settings(3))
    assert real["prefill"] != foreseen["prefill"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_made_without_pytorch_has_its_shapes_and_types(dtype):
    def results(device):
        long = torch.ones(3, dtype=torch.long, device=device)
        x, y = torch.ones(2, 1, 5, dtype=dtype, device=device), torch.ones(3, 1, dtype=dtype, device=device)
        yield from (x + y, x - 1, 2 * x, x.float() * y, long % 2, long // 2, long + 1.5, x < y, x == 0, y >= 0.5)
        yield from (
            1 / x,
            2 / long,
            long >> 1,
            long ^ long,
            long[:, None] ^ long,
            x.masked_fill(x > 0, 1.0),
            x.clamp(max=2),
        )
        yield from (x.softmax(-1), x.cumsum(-1), long.cumsum(0))
        yield from (torch.softmax(x, -1, torch.float64), x.softmax(-1, torch.float64))
        yield from ((x > 0) & (y > 0), (x > 0) | (y <= 1), torch.where(x > 0, y, -1.0), torch.where(long != 1, long, 0))
        yield from (
            torch.empty_like(x),
            torch.nn.functional.rms_norm(x, (5,)),
            x.argmax(-1),
            x.gather(2, long.view(1, 1, 3)),
        )
        yield from (y.new_zeros(2, 3), y.new_zeros((2,), dtype=torch.int32), torch.arange(4, device=device))
        yield from (
            torch.arange(2, 9, device=device),
            torch.cat((x, x), -1),
            torch.cat([y, y]),
            torch.cat((y, y), dim=1),
        )
        yield from (torch.nn.functional.layer_norm(y, (1,)), x.cos(), torch.sin(y), torch.ones_like(long))
        yield from (y[long % 3], y[long % 3, None], x[long % 2, long % 1], y[1:, long % 1])

    real = list(results("cpu"))
    with NoArithmetic():
        made = list(results("meta"))
        for shapes in ([2], [3]), ([2, 3], [2, 1, 2]), ([4, 1], [0, 3]):
            with pytest.raises(RuntimeError, match="do not broadcast"):
                torch.add(*(torch.empty(shape, device="meta") for shape in shapes))
        assert (torch.empty(1, 0, device="meta") + torch.empty(4, 1, device="meta")).shape == (4, 0)
    assert [(each.shape, each.dtype) for each in made] == [(each.shape, each.dtype) for each in real]


IMPORTS = """
import sys, eet_lab
from eet_lab.bench import fit, launches

def without_the_compiler(what):
    assert not {"torch._dynamo", "sympy"} & set(sys.modules), what

model = eet_lab.load("demo", device="cpu")
engine = eet_lab.Engine(model.decoder, eet_lab.Recipe.parse("all,continuous_batching", "cpu").parts)
for how in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5, "top_p": 0.5}, {"logprobs": 2}):
    request = engine.add([1, 2, 3], eet_lab.Settings(2, **how))
    while not request.done:
        engine.step()
    without_the_compiler(how)
settings = eet_lab.Settings(2, temperature=0.6)
eet_lab.compare(model, [[1, 2], [3]], "all", repeats=1, **vars(settings))
without_the_compiler("a comparison")
fit.forecasts(model, eet_lab.Recipe.parse("all", "cpu"), [2, 1], settings)
without_the_compiler("its forecast")
for recipe in ("", "all", "all,continuous_batching"):
    for preset in ("gpt2", "llama-1b"):
        parts = eet_lab.Recipe.parse(recipe, "cuda").parts
        launches.num_kernels(parts, [20, 7], launches.PRESETS[preset])
        without_the_compiler(f"the kernels of {recipe} on a GPU")
"""


def test_what_is_first_of_its_kind_does_not_wait_for_pytorchs_compiler():
    """Its import takes two seconds or more, in which a server's other requests would wait, too, and so does a page."""
    run = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_a_model_without_data_is_traced_too():
    """GPT-2 XL's shape takes no memory: only its lifetimes are known."""
    xl = weights.random_decoder(Config(48, 1600, 25, 6400, 50257, 1024), 0, torch.device("meta"), torch.float16)
    engine = Engine(xl, Recipe.parse("pre_padding,mask_removal,memory_reuse").parts)
    found = engine.lifetimes([[1] * 128] * 2, Settings(128))
    assert len(found["prefill"]) == len(found["decode"]) > 48 * 5
    norms = [life for life in found["prefill"] if life.name == "normed"]
    assert {(life.num_bytes, life.op) for life in norms} == {
        (2 * 128 * 1600 * 2, "norm_linear"),
        (2 * 1600 * 2, "next_token"),
    }


@pytest.mark.parametrize("words", ["pre_padding", "pre_padding,mask_removal,packed_prefill,fused_kernels"])
def test_a_layer_carries_nothing_but_its_residual(words):
    """When a norm begins, what the ops before it made for each other is gone: its memory is free for the next."""
    xl = weights.random_decoder(Config(4, 1600, 25, 6400, 50257, 1024), 0, torch.device("meta"), torch.float16)
    engine = Engine(xl, Recipe.parse(words, "cuda").parts)
    for name, trace in engine.lifetimes(batch(0, [128, 30]), Settings(8)).items():
        ops = [life.op for life in sorted(trace, key=lambda life: life.first)]
        begins = [k for k in range(1, len(ops)) if ops[k] == "norm_linear" != ops[k - 1]]
        assert len(begins) > 4
        for k in begins:
            left = [life.name for life in trace if life.first < k <= life.last and life.op != "mask"]
            assert left in (["embedded"], ["residual"], []), (name, k, left)


def test_a_few_layers_tell_what_all_of_them_ask_for():
    """The outline's peak is the whole pass's; layers that differ are all looked at."""
    deep = weights.random_decoder(Config(9, 48, 3, 96, 499, 128), 0, torch.device("cpu"), torch.float32)
    for words in ("", "pre_padding,mask_removal"):
        engine = Engine(deep, Recipe.parse(words).parts)
        for traced_pass in engine.tracer.request([30, 9], Settings(7)).passes.values():
            whole, outline = traced_pass.lifetimes(), traced_pass.outlined()
            assert len(outline) < len(whole) / 2.5
            assert max(live_bytes(outline)) == max(live_bytes(whole))
    *others, last = deep.layers
    whole, scale = quantized(last.fc_1.weight)
    odd = deep._replace(layers=(*others, last._replace(fc_1=last.fc_1._replace(weight=whole, scale=scale))))
    assert are_alike(deep) and not are_alike(odd)
    found = Engine(odd).tracer.request([2], Settings(3)).passes
    assert found["prefill"].outlined() == found["prefill"].lifetimes()


def test_offsets_of_a_larger_request_serve_a_smaller_one_alone(tiny):
    engine = Engine(tiny.decoder, Recipe.parse("pre_padding").parts)
    small, large = (engine.lifetimes(batch(0, lengths), Settings(5))["prefill"] for lengths in ([9, 30], [31, 30, 2]))
    assert covers(large, small) and covers(large, large) and not covers(small, large)
    assert not covers(large, small[1:]) and not covers(large, (replace(small[0], name="other"), *small[1:]))


@pytest.mark.parametrize("planner", POOLS)
def test_every_pool_runs_what_was_traced(tiny, planner):
    """The EET pool as it was among them: our names are none of its caches'."""
    engine = Engine(tiny.decoder, Recipe.parse(f"pre_padding,memory_reuse:planner={planner}").parts)
    plain = Engine(tiny.decoder, Recipe.parse("pre_padding").parts)
    for lengths in SHAPES:
        prompts = batch(2, lengths)
        assert engine.generate(prompts, Settings(6)).tokens == plain.generate(prompts, Settings(6)).tokens
        foreseen = engine.lifetimes(prompts, Settings(6))
        assert {name: plan.lifetimes for name, plan in engine.plans().items()} == foreseen
        assert engine.memory.held_bytes == sum(chunk.num_bytes for chunk in engine.plans()["decode"].chunks)
