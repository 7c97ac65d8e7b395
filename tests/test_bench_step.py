"""What a decode step launches and reads: told from the cases, held against the code that launches, then a profiler."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from opened import opened
from torch.utils._python_dispatch import TorchDispatchMode

from eet_lab.bench.cost import step_cost
from eet_lab.bench.launches import Call, decode_calls, launches_per_token, num_kernels, num_launches
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.models import weights
from eet_lab.models.config import PRESETS, Config
from eet_lab.ops import native
from eet_lab.parts import Parts
from eet_lab.technique import Recipe, names_in_all

FUSED = "pre_padding,mask_removal,memory_reuse,fused_kernels"
ALL = ",".join(names_in_all())
EAGER = ",".join(name for name in ALL.split(",") if name != "cuda_graphs")
INT8 = "mask_removal,int8_weights"
SMALL = Config(3, 64, 2, 256, 504, 128)


def parts(words: str) -> Parts:
    return Recipe.parse(words, "cuda").parts


def num_bytes(calls: tuple[Call, ...]) -> int:
    return sum(call.read_bytes for call in calls)


# A step's launches are numbers in this file on purpose: whoever adds one has to change them, and to say why.
@pytest.mark.parametrize(
    ("model", "batch", "num_layers", "launches"), [("gpt2", 1, 12, 64), ("gpt2", 8, 12, 64), ("gpt2-xl", 8, 48, 244)]
)
def test_everything_on_is_five_launches_a_layer_and_four_beside(model, batch, num_layers, launches):
    calls = decode_calls(PRESETS[model], parts(ALL), batch, 256)
    assert num_launches(calls) == launches == 5 * num_layers + 4
    names = [call.op for call in calls]
    layer = ["norm_linear", "attention", "linear_residual", "norm_linear", "linear_residual"]
    assert names == ["embed", *layer * num_layers, "next_token", "advance"]


@pytest.mark.parametrize("batch", [1, 2])
def test_one_or_two_rows_of_a_large_model_are_two_launches_a_layer_and_five_beside(batch):
    calls = decode_calls(PRESETS["gpt2-xl"], parts(ALL), batch, 256)
    assert num_launches(calls) == 101 == 2 * 48 + 5
    names = [call.op for call in calls]
    assert names == ["embed", "norm_linear", *["attention", "fused_layer"] * 48, "next_token", "advance"]


def test_plain_pytorch_decides_for_itself():
    calls = decode_calls(PRESETS["gpt2"], parts(FUSED), 1, 256)
    assert num_launches(calls) is None
    assert [call.op for call in calls if call.launches is None] == ["embed", "next_token", "advance"]
    masked = decode_calls(PRESETS["gpt2"], parts("fused_kernels"), 1, 256)
    assert "torch" in [call.op for call in masked], "a mask is built between the ops"
    assert all(call.launches is None for call in decode_calls(SMALL, Parts(), 2, 9))


# GB that a step moves, at 256 columns.
@pytest.mark.parametrize(
    ("model", "words", "batch", "billions"),
    [
        ("gpt2", ALL, 1, 0.2569),
        ("gpt2", ALL, 8, 0.3259),
        ("gpt2-xl", ALL, 1, 3.1920),
        ("gpt2-xl", ALL, 8, 3.7662),
        ("gpt2-xl", INT8, 1, 1.6400),
    ],
)
def test_bytes_of_a_step(model, words, batch, billions):
    calls = decode_calls(PRESETS[model], parts(words), batch, 256)
    assert num_bytes(calls) / 1e9 == pytest.approx(billions, abs=1e-4)


@pytest.mark.parametrize("words", ["", ALL, INT8])
def test_bytes_are_the_cost_models_and_activations(words):
    """The floor counts weights and KV; the ops move little beside."""
    model = weights.random_decoder(SMALL, 0, torch.device("cpu"), torch.float16)
    engine, batch, context = Engine(model, parts(words)), 2, 101
    cost = step_cost(engine.model, [[0] * (context - 1)] * batch, 2, None)
    moved = num_bytes(decode_calls(SMALL, parts(words), batch, context))
    small = (
        engine.model.norm.weight.nbytes * 8 * len(engine.model.layers) * 2
    )  # norms and biases, which no shape counts
    assert cost.step_bytes - small <= moved <= cost.step_bytes * 1.15


def test_a_step_that_reads_more_columns_moves_more_bytes():
    short, long = (num_bytes(decode_calls(SMALL, parts(ALL), 2, context)) for context in (50, 51))
    assert long - short == 2 * SMALL.kv_bytes_per_token(2)


class Torch(TorchDispatchMode):
    """PyTorch's own work: what is neither a view nor new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and not function.__name__.startswith(("empty", "new_empty", "detach")):
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch):
    """The ops over kernels, on a CPU: their launchers do nothing but note their names."""
    names: list[str] = []

    class Library:
        path = "fake"

        def __getattr__(self, name):
            def launch(**arguments):
                if "stream" in arguments:  # else it tells of the GPU
                    names.append(name)

            return launch

    library = Library()
    monkeypatch.setattr(native, "loaded", lambda kernel: library)
    monkeypatch.setattr(native, "prepare", lambda *args, **keywords: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return names


def decoded(parts: Parts, batch: int, launched: list[str], dtype: torch.dtype = torch.float16) -> list[str]:
    """Runs a decode step of a small model as the engine does; what PyTorch did in it. `launched` holds the rest."""
    engine = Engine(weights.random_decoder(SMALL, 0, torch.device("cpu"), dtype), parts)
    draw = random.Random(0)
    slots = opened(engine, [[draw.randrange(500) for _ in range(20)] for _ in range(batch)], Settings(4))
    with torch.inference_mode():
        slots.step()
        slots.step()  # the first launch of all makes what stays
        launched.clear()
        with Torch() as torchs:
            slots.step()
    return torchs.names


@pytest.mark.parametrize(("batch", "launches"), [(1, 2 * 3 + 5), (8, 5 * 3 + 4)])
@pytest.mark.usefixtures("layers_of_any_size")
def test_the_step_launches_what_its_cases_declare(launched, batch, launches):
    """The very code that runs on a GPU: it fails when a launch, or a call of PyTorch, is added anywhere in a step."""
    assert decoded(parts(EAGER), batch, launched) == []
    assert len(launched) == num_launches(decode_calls(SMALL, parts(EAGER), batch, 24)) == launches, launched


@pytest.fixture
def tiles(monkeypatch):
    """As if products in tiles were taken."""
    monkeypatch.setattr(import_module("eet_lab.ops.cuda.linear"), "MOST_TILE_TOKENS", 64)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("words", [EAGER, f"{EAGER},int8_weights"])
@pytest.mark.parametrize("batch", [17, 64, 65])
def test_more_rows_than_norms_are_streamed_with_launch_more(launched, words, batch):
    """Up to 64 rows are multiplied in tiles, with our norm before. More by cuBLAS, with our residual after; the head's
    logits are written.
    """
    torchs = decoded(parts(words), batch, launched)
    expanded = launched.count("eet_dequantize")
    products = ["addmm.out", "mm.out", "_addmm_activation.out", "mm.out"]  # of a layer; the head has no bias
    of_cublas = [*products * 3, "mm.out"] if batch > 64 else []
    assert torchs == of_cublas and expanded == ("int8" in words) * (4 * 3 + 1)
    assert launched.count("eet_wgmma_linear") == 4 * 3 + 1 - len(of_cublas)
    calls = decode_calls(SMALL, parts(words), batch, 24)
    declared = num_launches(calls)
    apart = 1 if batch > 64 else 0  # the residual
    assert len(launched) + len(torchs) == declared == (2 + 1 + 1 + apart + 2 + 1 + apart) * 3 + 5 + expanded
    assert num_kernels(parts(words), (22,) * batch, SMALL) == declared


@pytest.mark.parametrize("batch", [3, 17])
def test_attention_in_float32_writes_its_cache_in_a_launch_of_its_own(launched, batch):
    torchs = decoded(parts(EAGER), batch, launched, torch.float32)
    assert launched.count("eet_append") == 3
    calls = decode_calls(SMALL, parts(EAGER), batch, 24, torch.float32)
    declared = num_launches(calls)
    assert len(launched) + len(torchs) == declared == num_kernels(parts(EAGER), (22,) * batch, SMALL, torch.float32)


WIDE = Config(2, 4096, 32, 16384, 50257, 1024)


@pytest.mark.parametrize(
    ("config", "rows", "launches"),
    [(PRESETS["gpt2-xl"], 8, 244), (PRESETS["gpt2-xl"], 9, 340), (WIDE, 8, 14), (WIDE, 9, 18)],
)
@pytest.mark.usefixtures("tiles")
def test_products_of_nine_rows_and_more_are_multiplied_in_tiles(config, rows, launches):
    """Two of a layer then have a norm apart."""
    assert num_launches(decode_calls(config, parts(ALL), rows, 64)) == launches
    assert num_kernels(parts(ALL), (62,) * rows, config) == launches


def test_an_added_launch_is_noticed(launched):
    """The test above can fail: here an op launches once more than its case declares, and one calls PyTorch."""
    plain = parts(EAGER)

    def clumsy(x, w, residual, **keywords):
        native.loaded("linear").eet_norm(stream=0)
        return plain.ops.linear_residual(x, w, residual.clone(), **keywords)

    names = decoded(replace(plain, ops=replace(plain.ops, linear_residual=clumsy)), 3, launched)
    assert names == ["clone.default"] * 6
    assert len(launched) == 5 * 3 + 4 + 6


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("model", ["gpt2", "gpt2-xl"])
def test_the_profiler_counts_as_many_kernels(model, batch):
    config = Config(
        3, *[getattr(PRESETS[model], name) for name in ("hidden_size", "num_heads", "ffn_size")], 50257, 1024
    )
    decoder = weights.random_decoder(config, 0, torch.device("cuda"), torch.float16)
    counted = launches_per_token(Engine(decoder, parts(ALL)), batch)
    to_host = counted.launches - 1  # beside the graph: tokens on their way to the host
    assert counted.kernels - to_host == num_launches(decode_calls(config, parts(ALL), batch, 64))
