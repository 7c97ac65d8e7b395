"""One launch from attention to attention, on a GPU: right, repeatable, and never waiting for what cannot come."""

from __future__ import annotations

import pytest
import torch

from eet_lab.errors import KernelError
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.ops import cuda
from eet_lab.ops.cuda import layer
from eet_lab.ops.layer_cases import LAYER_CASES, LayerShape
from eet_lab.ops.shapes import copied
from eet_lab.ops.types import fresh
from gpu.launches import launches_of, replayed

pytestmark = pytest.mark.gpu
[CASE] = LAYER_CASES


@pytest.mark.parametrize("shape", CASE.shapes, ids=str)
def test_within_the_budget(shape):
    for dtype in CASE.dtypes:
        CASE.check(cuda.fused_layer, shape, "cuda", dtype)


@pytest.mark.parametrize("shape", CASE.shapes, ids=str)
def test_every_launch_gives_the_same_bits(shape):
    """As the first of a process, as one of many, and after launches of other sizes in between."""
    inputs, other = (s.inputs("cuda", torch.float16, 1) for s in (shape, CASE.shapes[0]))
    first = CASE.call(cuda.fused_layer, copied(inputs), fresh)
    for _ in range(50):
        CASE.call(cuda.fused_layer, copied(other), fresh)
        assert torch.equal(CASE.call(cuda.fused_layer, copied(inputs), fresh), first)


@pytest.mark.parametrize("num_launches", [1, 2, 7])
def test_graphs_of_any_number_of_launches_repeat(num_launches):
    """The halves of the exchange change places with each launch, also where a graph has an odd number of them."""
    attended, x, *rest = LayerShape(2, 768, 3072).inputs("cuda", torch.float16, 2)
    expected = x.clone()
    for _ in range(num_launches):
        expected, _ = cuda.fused_layer(attended, expected, *rest, empty=fresh)
    mine = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_launches):
            cuda.fused_layer(attended, mine, *rest, empty=fresh)
    for _ in range(100):
        mine.copy_(x)
        graph.replay()
        assert torch.equal(mine, expected)


def test_a_nan_passes_and_nobody_waits_for_it():
    attended, x, *rest = LayerShape(2, 768, 3072).inputs("cuda", torch.float16, 3)
    attended[0, 5], x[1, 7] = torch.nan, torch.inf
    got, qkv = cuda.fused_layer(attended, x, *rest, empty=fresh)
    assert got.isnan().all() and qkv.isnan().all()
    again = CASE.call(cuda.fused_layer, LayerShape(2, 768, 3072).inputs("cuda", torch.float16, 3), fresh)
    assert again.isfinite().all()


def test_it_is_one_launch():
    inputs = CASE.bench[0].inputs("cuda", torch.float16, 0)
    assert len(launches_of(lambda: cuda.fused_layer(*inputs, empty=fresh))) == CASE.launches == 1


@pytest.mark.parametrize("T", [1, 2])
def test_what_is_said_to_fit_does_and_nothing_else(T, monkeypatch):
    """The launcher knows what a block has to hold, and refuses a plan without the room."""
    plan = layer.Plan(64, 8, layer.FEWEST_STAGES, layer.gpu().shared_bytes)
    for C in (8, 64, 1000, 1600, 2048, 2560, 3200, 4096, 5120, 6144, 8192):
        config = Config(1, C, 1, 4 * C, 8, 8)
        one = weights.random_decoder(config, 0, torch.device("cuda"), torch.float16).layers[0]
        inputs = [torch.zeros(T, C, device="cuda", dtype=torch.float16) for _ in range(2)]
        if layer.plan(T, layer._sizes(one), 4, layer.gpu()):
            cuda.fused_layer(*inputs, one, one, "gelu", empty=fresh)
            torch.cuda.synchronize()
            continue
        with monkeypatch.context() as patched:
            patched.setattr(layer, "plan", lambda *sizes: plan)
            patched.setattr(layer, "_planned", lambda *sizes: plan._asdict())
            patched.setattr(layer, "_copies", lambda *sizes: 1)
            with pytest.raises(KernelError, match="eet_vector_layer failed"):
                cuda.fused_layer(*inputs, one, one, "gelu", empty=fresh)


def test_the_first_launch_cannot_be_captured():
    inputs = LayerShape(1, 136, 544).inputs("cuda", torch.float16, 0)
    with pytest.raises(KernelError, match="cannot be captured.*Run the step once"):
        replayed(lambda: cuda.fused_layer(*inputs, empty=fresh))
    torch.cuda.synchronize()
    cuda.fused_layer(*inputs, empty=fresh)
    replayed(lambda: cuda.fused_layer(*inputs, empty=fresh))
