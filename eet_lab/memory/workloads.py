"""What others' systems ask for, request by request: TurboTransformers' BERT and EET's GPT-2.

T tokens, C channels. All sizes are in bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from eet_lab.memory.lifetimes import Lifetime


class Request(NamedTuple):
    """What one request asks for, and its length in tokens."""

    length: int
    lifetimes: tuple[Lifetime, ...]


Workload = tuple[Request, ...]


def turbo_figure() -> Workload:
    """Figure 6 of TurboTransformers' paper: a request of 200 tokens, then one of 240."""
    return tuple(bert_layer(length) for length in (200, 240))


def turbo_artifact() -> Workload:
    """The allocators' comparison in the paper's artifact: 50 requests of 5 to 250 tokens, the same in each run."""
    return tuple(bert_layer(length) for length in drawn(50, 250))


def drawn(count: int, longest: int) -> list[int]:
    """The lengths that TurboTransformers' scripts draw after `random.seed(0)`."""
    draw = random.Random(0)
    return [draw.randint(5, longest) for _ in range(count)]


def bert_layer(length: int) -> Request:
    """One layer of BERT base in fp32, as TurboTransformers writes it down by hand; all layers share its plan.

    It has one head, where BERT base has twelve, and charges `self_out`, a tensor [T, C], the size of the attention
    scores.
    """
    T, C = length, 768
    x, scores = 4 * T * C, 4 * T * T
    records = (
        ("qkv", 2, 3, 3 * x),
        ("q", 3, 4, x),
        ("k", 3, 4, x),
        ("v", 3, 5, x),
        ("scores", 4, 5, scores),
        ("context", 5, 6, x),
        ("self_out", 6, 7, scores),
        ("attention_out", 7, 10, x),
        ("intermediate", 9, 10, 4 * x),
        ("layer_output", 2, 11, x),
    )
    return Request(T, tuple(Lifetime(name, num_bytes, first, last) for name, first, last, num_bytes in records))


def eet_sweep(lengths: Iterable[int] = range(32, 1025, 32), num_layers: int = 12) -> Workload:
    """Prompts of these lengths, one after the other, through EET's GPT-2 small: 4 rows, fp16, up to 1024 tokens."""
    return tuple(eet_request(length, num_layers=num_layers) for length in lengths)


def eet_request(
    length: int, rows: int = 4, channels: int = 768, heads: int = 12, longest: int = 1024, num_layers: int = 12
) -> Request:
    """What EET asks for to read a prompt and to decode a token, in fp16; what its ops write to are its caches.

    It asks for scores as wide as the longest prompt, and for feed-forward buffers and caches for all of it, whatever
    the prompt's length.
    """
    asked = _Asked()
    token, whole = 2 * rows * channels, 2 * rows * longest * channels
    asked.get("emb_cache", whole)
    for layer in range(num_layers):
        _eet_prefill_attention(asked, length * token, 2 * rows * heads * length * longest)
        _eet_layer_outputs(asked, whole, "decoder_out_cache" if layer else "emb_cache")
    asked.free("decoder_out_cache")
    asked.get("emb_cache", whole)
    for layer in range(num_layers):
        _eet_decode_attention(asked, token)
        _eet_layer_outputs(asked, whole, "decoder_out_cache" if layer else "emb_cache")
    asked.free("decoder_out_cache")
    return Request(length, tuple(asked.lifetimes))


def _eet_prefill_attention(asked: _Asked, x: int, scores: int) -> None:
    asked.get("qkv", 3 * x)
    asked.get("layernorm", x)
    asked.free("layernorm")
    for name in "qkv":
        asked.get(name, x)
    asked.free("qkv")
    asked.get("scores", scores)
    asked.free("q", "k")
    asked.get("mixed", x)
    asked.free("scores", "v")
    asked.get("context", x)
    asked.free("mixed")


def _eet_decode_attention(asked: _Asked, x: int) -> None:
    asked.get("qkv", 3 * x)
    asked.get("layernorm", x)
    asked.free("layernorm")
    asked.get("context", x)
    asked.free("qkv")


def _eet_layer_outputs(asked: _Asked, whole: int, layer_input: str) -> None:
    asked.get("self_mask_attn_cache", whole)
    asked.free("context", layer_input)
    asked.get("ffn_inner", 4 * whole)
    asked.get("ffn_layernorm", whole)
    asked.free("ffn_layernorm")
    asked.get("decoder_out_cache", whole)
    asked.free("ffn_inner", "self_mask_attn_cache")


class _Asked:
    """Turns gets and frees, by name, into lifetimes."""

    def __init__(self) -> None:
        self.lifetimes: list[Lifetime] = []
        self._alive: dict[str, int] = {}

    def get(self, name: str, num_bytes: int) -> None:
        self._alive[name] = now = len(self.lifetimes)
        self.lifetimes.append(Lifetime(name, num_bytes, now, now))

    def free(self, *names: str) -> None:
        """They were still in use at the last get."""
        for name in names:
            first = self._alive.pop(name)
            self.lifetimes[first] = replace(self.lifetimes[first], last=len(self.lifetimes) - 1)
