"""What an engine refuses before any work, and how it tells of a memory that is full."""

from __future__ import annotations

import re

import pytest
import torch
from test_engine import batch

from eet_lab.engine import forecast
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import OutOfMemory, PromptError
from eet_lab.technique import Recipe


@pytest.mark.parametrize(
    "prompts, settings, says",
    [
        ([], {}, "no prompts"),
        ([[1] * 120], {"max_new_tokens": 20}, "context of 128 tokens"),
        ([[1, 499]], {}, "token 499"),
        ([[1, -1]], {}, "token -1"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(tiny, prompts, settings, says):
    with pytest.raises(PromptError, match=says):
        Engine(tiny.decoder).generate(prompts, Settings(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": -3},
        {"max_new_tokens": 2.5},
        {"temperature": float("nan")},
        {"temperature": -1},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"seed": -1},
        {"seed": 2**62},
        {"stop": (-4,)},
    ],
)
def test_bad_settings_name_the_value_and_the_limit(settings):
    ((name, value),) = settings.items()
    with pytest.raises(PromptError, match=name) as caught:
        Settings(**settings)
    assert str(value[0] if isinstance(value, tuple) else value) in str(caught.value)


def test_an_unknown_setting_is_named():
    with pytest.raises(PromptError, match="no setting 'max_new_token'.*Did you mean 'max_new_tokens'"):
        Settings.of(max_new_token=3)


def test_prompts_count_from_1_in_what_is_said_of_them(tiny):
    with pytest.raises(PromptError, match="Prompt 1 holds the token 9999"):
        Engine(tiny.decoder).generate([[9999], [1]], Settings(1))


def test_the_remedy_for_too_many_tokens_suits_all_prompts(tiny):
    context = tiny.config.context
    prompts = [[1] * length for length in (3, 56, 7)]
    with pytest.raises(PromptError, match=rf"Prompt 2 has 56 tokens.*at most {context - 56} new tokens"):
        Engine(tiny.decoder).generate(prompts, Settings(context))
    with pytest.raises(PromptError, match=r"Shorten the prompt\.$"):
        Engine(tiny.decoder).generate([[1] * context], Settings(1))


@pytest.mark.parametrize("free_bytes", [2**40, 100_000])
def test_out_of_memory_names_the_buffer_and_frees_the_rest(tiny, monkeypatch, free_bytes):
    """And tells what would fit, unless what did not would."""
    monkeypatch.setattr(forecast, "free_bytes_of", lambda device: free_bytes)
    engine = Engine(tiny.decoder, Recipe.parse("all").parts)
    original = engine.memory.empty

    def full(name, shape, like, dtype=None, *, op):
        if name == "activated" and not like.is_meta:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 1 GiB."
            )
        return original(name, shape, like, dtype, op=op)

    engine.memory.empty = full
    with pytest.raises(OutOfMemory, match=r"activated.*3.00 GiB.*Use fewer") as caught:
        engine.generate(batch(20, 30, 50), Settings(4))
    assert ("of this shape" in str(caught.value)) is (free_bytes == 100_000)
    assert engine._slots is None and engine.activation_bytes == 0
    assert engine.generate([[1, 2]], Settings(4)).num_tokens == 4


def test_of_two_engines_on_a_gpu_with_room_for_one_the_other_says_who_may_hold_it(tiny, monkeypatch):
    """And runs once the first is closed."""
    first, second = (Engine(tiny.decoder, Recipe.parse("all").parts) for _ in range(2))
    rows, new = batch(20, 30, 50), Settings(40)
    total = int(1.5 * first.forecast(rows, new, 0).run_bytes)

    def free(device=None) -> int:
        return total - sum(engine.kv_bytes + engine.activation_bytes for engine in (first, second))

    def opened(num_pad, capacity, ends, original=second.cache.open):
        if first.kv_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
        original(num_pad, capacity, ends)

    monkeypatch.setattr(forecast, "free_bytes_of", free)
    monkeypatch.setattr(second.cache, "open", opened)
    told = first.generate(rows, new)
    assert first.forecast(rows, new, total + tiny.decoder.weight_bytes).fits
    others = r"Another engine may hold memory.*close\(\)"
    with pytest.raises(OutOfMemory, match=rf"KV cache.*{others}.*Would fit"):
        second.generate(rows, new)
    with pytest.raises(OutOfMemory, match=others):
        second.reserve(40, 60, new)
    assert not second.forecast(rows, new).fits and re.search(others, second.forecast(rows, new).remedy)
    first.close()
    assert second.forecast(rows, new).fits and second.generate(rows, new).tokens == told.tokens
