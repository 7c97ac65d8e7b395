"""The plain PyTorch decoder that peers capture and compile, run without a graph."""

from __future__ import annotations

from functools import partial

import families
import pytest
import torch

from eet_lab.bench.static_decoder import StaticDecoder, compiled
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings

ROWS = [[5], [7, 8, 9, 10], [3, 1, 4, 1, 5, 9, 2]]


@pytest.mark.parametrize("name", [name for name in families.CONFIGS if name != "llama-dynamic"])
def test_plain_pytorch_says_what_we_say(name):
    """The step that `torch-cuda-graphs` captures, run without a graph; prompts of one length need no mask."""
    decoder = families.ours(name).decoder
    for rows in (families.prompts(), [[5, 7, 2] * 3, [1, 2, 3] * 3]):
        assert plain(decoder, rows, 6) == Engine(decoder).generate(rows, Settings(max_new_tokens=6)).tokens


def test_a_step_is_one_graph_to_the_compiler():
    decoder = families.ours("qwen3").decoder
    assert plain(decoder, ROWS, 4, partial(compiled, backend="aot_eager")) == plain(decoder, ROWS, 4)
    torch.compiler.reset()


def plain(decoder, rows, new_tokens, step_of=lambda batch: batch.step):
    batch = StaticDecoder(decoder, rows, new_tokens)
    step = step_of(batch)
    with torch.inference_mode():
        batch.prefill()
        for _ in range(new_tokens - 1):
            step()
    return tuple(map(tuple, batch.tokens[:, batch.width - 1 :][:, :new_tokens].tolist()))


def test_plain_pytorch_takes_other_prompts_into_the_same_memory(tiny):
    batch, others = StaticDecoder(tiny.decoder, ROWS, 1), [[token + 1 for token in row] for row in ROWS]
    addresses = batch.ids.data_ptr(), batch.num_pad.data_ptr()
    with torch.inference_mode():
        batch.receive(others)
        batch.prefill()
    assert (batch.ids.data_ptr(), batch.num_pad.data_ptr()) == addresses
    want = Engine(tiny.decoder).generate(others, Settings(max_new_tokens=1)).tokens
    assert tuple(map(tuple, batch.token.tolist())) == want
