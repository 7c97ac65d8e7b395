"""Chains of dependent launches on a GPU: a kernel that begins early computes what it computes on time."""

from __future__ import annotations

import pytest
import torch

from eet_lab.ops import cuda
from eet_lab.ops.cuda.launching import dependent
from eet_lab.ops.shapes import AttentionShape, Normal, copied
from eet_lab.ops.types import Linear, Norm, fresh

pytestmark = pytest.mark.gpu
STEPS = 60


class Layer:
    """What a decoder layer has up to its attention's projection, with a cache of its own."""

    def __init__(self, shape, seed):
        normal, C = Normal("cuda", torch.float16, seed), shape.H * shape.D
        B, K = len(shape.lengths), max(shape.lengths) + shape.slack
        self.norm = Norm(normal(C) + 1, normal(C), 1e-5)
        self.qkv = Linear(normal((shape.H + 2 * shape.G) * shape.D, C, scale=C**-0.5), None)
        self.project = Linear(normal(C, C, scale=C**-0.5), normal(C))
        self.kv = tuple(normal(B, shape.G, K, shape.D) for _ in range(2))

    def __call__(self, x, attend, wrap):
        qkv = wrap(cuda.norm_linear)(x, self.norm, self.qkv, empty=fresh)
        return wrap(cuda.linear_residual)(attend(qkv, self.kv), self.project, x, empty=fresh)


def generated(shape, wrap):
    """Every step's output and the caches, from a graph that is replayed while its column moves on."""
    layers = [Layer(shape, seed) for seed in range(3)]
    batch = shape.batch("cuda")
    column = torch.tensor([max(shape.lengths) - 1], device="cuda")
    batch = batch._replace(columns=column.expand(len(shape.lengths)))
    mask = torch.zeros(len(shape.lengths), 1, 1, batch.max_kv, dtype=torch.float16, device="cuda")
    start = Normal("cuda", torch.float16, 9)(len(shape.lengths), shape.H * shape.D)
    x = start.clone()

    def attend(qkv, kv):
        if shape.masked:
            return wrap(cuda.masked_attention)(qkv, kv, batch, shape.spec, mask=mask, empty=fresh)
        return wrap(cuda.attention)(qkv, kv, batch, shape.spec, empty=fresh)

    def one_step():
        h = x
        for layer in layers:
            h = layer(h, attend, wrap)
        x.copy_(h / (1 + h.abs().mean()))
        column.add_(1)

    kept = copied(tuple(layer.kv for layer in layers))
    one_step()  # what is compiled or allocated at first use
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step()
    for layer, kv in zip(layers, kept, strict=True):
        for cache, as_before in zip(layer.kv, kv, strict=True):
            cache.copy_(as_before)
    x.copy_(start)
    column.fill_(max(shape.lengths) - 1)
    outputs = []
    for _ in range(STEPS):
        graph.replay()
        outputs.append(x.clone())
    return torch.stack(outputs), *(cache for layer in layers for cache in layer.kv)


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(
    ("lengths", "heads"),
    [
        ((5,), (12, 12, 64)),
        ((1000,), (25, 25, 64)),
        ((300, 17, 1), (8, 2, 128)),
        ((40,) * 9, (4, 4, 40)),
        ((700, 17, 1), (12, 12, 64)),
        ((700, *(1,) * 66), (1, 1, 64)),
    ],
    ids=str,
)
def test_dependent_launches_give_the_same_bits(lengths, heads, page, masked):
    assert_the_same_bits(AttentionShape(lengths, *heads, decode=True, masked=masked, slack=STEPS + 3, page=page))


@pytest.mark.parametrize("lengths", [(130, 1), (700, 17, 1)], ids=str)
@pytest.mark.parametrize("window", [20, 300])
def test_and_so_they_do_with_a_window(lengths, window):
    assert_the_same_bits(AttentionShape(lengths, 12, 12, 64, decode=True, slack=STEPS + 3, window=window))


def assert_the_same_bits(shape):
    plainly, early = generated(shape, lambda op: op), generated(shape, dependent)
    assert plainly[0].isfinite().all()
    for one, other in zip(plainly, early, strict=True):
        assert torch.equal(one, other)
