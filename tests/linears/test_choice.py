"""Which kernel takes a product."""

from __future__ import annotations

import pytest
import torch

from eet_lab.ops.cuda import choice, linear
from eet_lab.ops.cuda.launching import Limits
from linears.sources import GPUS


@pytest.mark.parametrize(
    ("T", "H", "products", "head"),
    [
        (1, 768, "vector vector vector vector", "linear"),
        (16, 1280, "tiles tiles tiles tiles", "linear"),
        (1, 1600, "vector vector vector vector", "linear"),
        (3, 1600, "vector vector vector vector", "linear"),
        (8, 1600, "register register register register", "linear"),
        (12, 1600, "tiles tiles tiles tiles", "linear"),
        (16, 1600, "tiles tiles tiles tiles", "linear"),
        (4, 2048, "vector register vector register", "linear"),
        (3, 4096, "linear vector linear register", "linear"),
        (8, 4096, "linear register linear register", "linear"),
        (9, 4096, "tiles tiles tiles tiles", "linear"),
        (1, 5120, "linear vector linear register", "vector"),
        (16, 5120, "tiles tiles tiles tiles", "linear"),
        (1, 8192, "linear vector vector register", "vector"),
        (9, 8192, "tiles tiles tiles tiles", "linear"),
        (1, 12288, "vector vector vector vector", "vector"),
        (4, 12288, "vector vector vector cublas", "vector"),
        (8, 12288, "cublas cublas cublas cublas", "cublas"),
        (1, 12296, "cublas vector cublas cublas", "linear"),
        (1, 16384, "cublas vector cublas cublas", "linear"),
        (17, 1600, "tiles tiles tiles tiles", "tiles"),
    ],
)
def test_a_product_has_the_kernel_that_measurements_gave_it(h200, T, H, products, head):
    """QKV, projection, FC1 and FC2 of a layer, and the head, in 16 bits on an H200."""
    sizes = (3 * H, H, True), (H, H, False), (4 * H, H, True), (H, 4 * H, False)
    found = [linear.streaming_kernel(T, N, C, 2, normed=normed) for N, C, normed in sizes]
    found.append(linear.streaming_kernel(T, 50257, H, 2, normed=True, gathered=True))
    rest = "tiles" if linear.takes_tiles(T, torch.empty(0, dtype=torch.float16)) else "cublas"
    assert [(kernel or rest).removesuffix("_linear") for kernel in found] == [*products.split(), head]


@pytest.mark.parametrize(
    ("T", "H", "products"),
    [
        (16, 1280, "linear linear linear linear"),
        (16, 1600, "linear linear linear cublas"),
        (9, 4096, "cublas linear cublas cublas"),
        (16, 5120, "cublas cublas cublas cublas"),
    ],
)
def test_what_tiles_would_take_is_streamed_elsewhere(no_tiles, T, H, products):
    sizes = (3 * H, H, True), (H, H, False), (4 * H, H, True), (H, 4 * H, False)
    found = [linear.streaming_kernel(T, N, C, 2, normed=normed) for N, C, normed in sizes]
    assert [(kernel or "cublas").removesuffix("_linear") for kernel in found] == products.split()


def test_gates_and_heads_of_nine_to_sixteen_tokens_are_streamed(h200):
    """A gate in tiles takes a launch of its own, and Llama-1b is slower with it (LOG)."""
    assert linear.streaming_kernel(16, 16384, 2048, 2, normed=True, gated=True) == "linear"
    assert linear.streaming_kernel(16, 50257, 2048, 2, normed=True, gathered=True) == "linear"
    assert linear.streaming_kernel(16, 4096, 2048, 4, normed=True) == "linear", "in fp32 there are no tiles"


def test_blocks_of_many_weights_are_a_range(h200):
    """Of 132 multiprocessors and 4,096 channels: 280 KB of weights a block are 35 outputs, 3 MB are 384."""
    found = [linear.streaming_kernel(2, 132 * outputs, 4096, 2, normed=True) for outputs in (34, 35, 383, 384)]
    assert found == ["vector_linear", "linear", "linear", "vector_linear"]
    assert linear.streaming_kernel(2, 132 * 35, 4096, 2, normed=False) == "vector_linear"
    assert linear.streaming_kernel(2, 132 * 35, 4096, 4, normed=True) == "linear", "in fp32 there is no other"


def test_blocks_of_few_outputs_have_smaller_stages(no_tiles):
    """Of 16 tokens with 5,120 inputs a block has room for two stages of 13 outputs, and not of 14."""
    found = [linear.streaming_kernel(16, N, 5120, 2, normed=False) for N in (132 * 13 - 4, 132 * 14)]
    assert found == ["linear", None]


def test_many_tokens_with_a_wide_norm_are_for_cublas(no_tiles):
    """But not their head, which chooses words as it ends."""
    of = [(8, 3592), (9, 3584), (9, 3592)]
    assert [linear.streaming_kernel(T, 3 * C, C, 2, normed=True) for T, C in of] == ["linear", "linear", None]
    assert linear.streaming_kernel(9, 3 * 3592, 3592, 2, normed=True, gathered=True) == "linear"


def test_rows_that_lie_apart_stay_out_of_registers(h200):
    of_five = [linear.streaming_kernel(5, 500, 64, 2, normed=True, gathered=gathered) for gathered in (False, True)]
    assert of_five == ["register_linear", "linear"]


def test_inputs_are_as_many_as_were_measured(h200):
    for K, N, kernel in ((49_152, 8, "register_linear"), (49_160, 8, None), (49_160, 9, "linear")):
        assert linear.streaming_kernel(1, N, K, 2, normed=False) == kernel


def test_vectors_are_streamed_where_only_their_kernel_has_room(monkeypatch):
    monkeypatch.setattr(linear, "gpu", lambda: Limits(*GPUS[0]))
    assert linear.streaming_kernel(1, 84 * 50, 4096, 2, normed=True) == "linear"
    assert linear.streaming_kernel(2, 84 * 50, 4096, 2, normed=True) == "vector_linear"


H200 = Limits(*GPUS[-1], is_hopper=True)


def told(T, N, K, normed=False, on=H200):
    """What register_linear is told of a product."""
    kernel, sizes = choice.streamed(T, N, K, 2, normed, False, False, not normed, 0, on, "register_linear")
    assert kernel == "register_linear"
    return sizes


def test_two_blocks_divide_the_inputs_where_activations_are_many():
    assert told(8, 1600, 6400)["divided"] and told(8, 1600, 6400)["num_blocks"] == 66
    assert told(6, 2048, 8192)["divided"]
    assert not told(5, 2048, 16384)["divided"] and not told(3, 4096, 16384)["divided"], "none was measured"
    assert not told(4, 2048, 8192)["divided"], "it loses there (LOG)"
    assert not told(8, 768, 3072)["divided"], "it loses there (LOG)"
    assert not told(8, 1600, 6400, on=Limits(*GPUS[-1], is_hopper=False))["divided"], "only Hopper has clusters"
    assert not told(8, 1600, 6408)["divided"], "a copy is 16 bytes"
    assert not told(8, 8192, 8192)["divided"], "two blocks would have more than 64 outputs"
    assert not told(8, 6400, 1600, normed=True)["divided"], "a norm needs all inputs"
    assert not told(8, 33, 6400, on=Limits(GPUS[-1][0], 33, True))["divided"], "a block is left over"


def test_rings_are_paced_where_all_wide_products_of_a_layer_are_its():
    def shares(T, C):
        """Stages that the ring of each of a layer's products asks for at a time, and all that it has."""
        layer = ((3 * C, C, True), (C, C, False), (4 * C, C, True), (C, 4 * C, False))
        sizes = [told(T, *product) for product in layer]
        return [its["at_once"] for its in sizes], [its["num_stages"] for its in sizes]

    assert shares(8, 1600) == ([1, 2, 1, 2], [4, 2, 3, 8]), "the projection's ring holds all"
    for T, C in ((6, 1600), (7, 1600), (8, 768), (8, 1024), (8, 1280)):
        assert len({*map(tuple, shares(T, C))}) == 1, "no second product of an FFN is divided"
    few = Limits(GPUS[-1][0], 78, True)
    qkv = told(8, 4800, 1600, normed=True, on=few)
    assert qkv["at_once"] == qkv["num_stages"], "the FFN's first product has too many outputs of a block"
    wide = told(8, 2048, 8192)
    assert wide["divided"] and wide["at_once"] == wide["num_stages"], "norms of 2,048 channels are another kernel's"
