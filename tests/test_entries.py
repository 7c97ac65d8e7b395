"""What comes in at each door of the library, checked there: no error of Python's own, and nothing done before."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_gpt2

import eet_lab
from eet_lab.bench import benchmark, perplexity
from eet_lab.bench.workloads import Workload
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import EETError, ModelError, PromptError
from eet_lab.technique import Recipe


@pytest.mark.parametrize(
    "work",
    [
        lambda model: eet_lab.compare(model, ["a"]),
        lambda model: eet_lab.ladder(model, ["a"]),
        lambda model: eet_lab.generate(model, ["a"]),
        lambda model: benchmark(model, Workload.parse("demo/b1/p2/n2"), ["all"]),
        lambda model: perplexity(model, ""),
    ],
    ids=["compare", "ladder", "generate", "race", "perplexity"],
)
@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("demo", r"model is 'demo', but it must be a loaded model: eet_lab\.load\('demo'\)"),
        (Path("here"), r"eet_lab\.load\(PosixPath\('here'\)\)"),
        (make_gpt2(), r"model is a GPT2LMHeadModel, but it must be a loaded model: eet_lab\.load\(model\)"),
        (None, r"model is None, but it must be a loaded model, such as eet_lab\.load\('demo'\)"),
    ],
    ids=["name", "path", "live", "nothing"],
)
def test_a_model_is_loaded_first(work, model, says):
    with pytest.raises(ModelError, match=says):
        work(model)


def test_a_decoder_is_no_model(tiny):
    with pytest.raises(ModelError, match=r"model is a Decoder, but it must be the loaded model that it is part of"):
        eet_lab.generate(tiny.decoder, [[1]])


def test_an_engine_takes_a_decoder_and_parts(tiny):
    with pytest.raises(ModelError, match=r"Engine takes a Decoder, not a Model: give it model\.decoder"):
        Engine(tiny)
    with pytest.raises(
        ModelError, match=r"Engine takes a Decoder, not 'demo': give it eet_lab\.load\('demo'\)\.decoder"
    ):
        Engine("demo")
    with pytest.raises(ModelError, match=r"not None: give it eet_lab\.load\('demo'\)\.decoder"):
        Engine(None)
    with pytest.raises(EETError, match=r"Engine takes Parts, not a Recipe: give it recipe\.parts"):
        Engine(tiny.decoder, Recipe())
    with pytest.raises(EETError, match=r"Engine takes Parts, not 'all': give it Recipe\.parse\('all'\)\.parts"):
        Engine(tiny.decoder, "all")


@pytest.mark.parametrize(
    "work",
    [
        lambda engine, settings: engine.generate([[1]], settings),
        lambda engine, settings: engine.reserve(1, 2, settings),
        lambda engine, settings: engine.forecast([[1]], settings),
        lambda engine, settings: engine.lifetimes([[1]], settings),
    ],
    ids=["generate", "reserve", "forecast", "lifetimes"],
)
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_new_tokens": 2}, r"settings is \{'max_new_tokens': 2\}, but .* Settings\(\*\*settings\)"),
        ({}, r"settings is \{\}, but"),
        (5, r"settings is 5, but it must be Settings, such as Settings\(max_new_tokens=64\)"),
    ],
)
def test_settings_are_settings(tiny, work, settings, says):
    with pytest.raises(PromptError, match=says):
        work(Engine(tiny.decoder), settings)


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([1, 2, 3], r"Prompt 1 is 1, .* a list of token ids; a single prompt is a list in a list: \[\[1, 2, 3\]\]"),
        (5, "prompts is 5, but it must be a list of lists of token ids"),
        ("text", r"prompts is text, 'text'; an engine takes tokens: \[model.encode\(text\)\]"),
        ([b"ab"], "Prompt 1 is b'ab', but it must be a list of token ids"),
        (torch.tensor([[1, 2]]), r"prompts is a Tensor, .* list of lists of token ids, such as its tolist\(\)"),
        (np.array([[1, 2], [3, 4]]), r"prompts is an ndarray, .* such as its tolist\(\)"),
        ([torch.tensor([1, 2])], r"Prompt 1 is a Tensor, .* list of token ids, such as its tolist\(\)"),
        ([[np.int64(3)]], r"Prompt 1 holds np.int64\(3\), but token ids are ints; an array's tolist\(\) gives them"),
        ([[1.0]], r"Prompt 1 holds 1\.0, but token ids are ints"),
        ([[True]], r"Prompt 1 holds True, but token ids are ints"),
        ([["a"]], r"Prompt 1 holds 'a', but token ids are ints"),
    ],
)
def test_prompts_are_lists_of_lists(tiny, prompts, says):
    with pytest.raises(PromptError, match=says):
        Engine(tiny.decoder).generate(prompts)


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([1, 2, 3], r"A prompt is 1, .* a list of token ids; a single prompt of ids is \[\[1, 2, 3\]\]"),
        (b"abc", "prompts is b'abc', but it must be a text"),
        ([b"abc"], "A prompt is b'abc', but it must be a text"),
        (["ab\ud800c"], r"A prompt holds '\\ud800' after 2 characters, half of a surrogate pair, .*errors='replace'"),
    ],
)
def test_what_a_model_cannot_read_is_said(prompts, says):
    with pytest.raises(PromptError, match=says):
        eet_lab.generate(eet_lab.load("demo", device="cpu"), prompts)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"stop": 5}, r"stop is 5, but it must be token ids in a tuple: \(5,\)"),
        ({"stop": None}, r"stop is None, but it must be token ids in a tuple: \(\) for none"),
        ({"temperature": 10**400}, "temperature is 1000.*, but it must be 0"),
        ({"temperature": 10**5000}, "temperature is a number of 16610 bits, but it must be 0"),
        ({"top_p": -(10**400)}, "top_p is -1000.*, but it must be above 0"),
        ({"max_new_tokens": 10**5000}, "max_new_tokens is a number of 16610 bits"),
        ({"top_k": 2**31}, "top_k is 2147483648, but it must be 0"),
        ({"seed": "x"}, "seed is 'x', but it must be a whole number from 0"),
        ({"seed": 10**5000}, "seed is a number of 16610 bits"),
        ({"stop": (10**5000,)}, "stop holds a number of 16610 bits"),
        ({"stop": (2**70,)}, "stop holds 1180591620717411303424"),
    ],
)
def test_no_setting_is_too_strange_to_be_told(settings, says):
    with pytest.raises(PromptError, match=says):
        Settings(**settings)


@pytest.mark.parametrize(
    ("forced", "says"),
    [
        ([[7] * 3], "forced has 1 row for 2 prompts; give each prompt a row"),
        ([[7] * 3] * 3, "forced has 3 rows for 2 prompts"),
        ([], "forced has 0 rows for 2 prompts"),
        ([[7] * 3, [7] * 2], "Row 2 of forced has 2 tokens, but max_new_tokens is 3; give as many"),
        ([[7] * 4, [7] * 3], "Row 1 of forced has 4 tokens, but max_new_tokens is 3"),
        ([[7] * 3, []], "Row 2 of forced has 0 tokens"),
        ([[7] * 3, [7, 7, 499]], "Row 2 of forced holds the token 499, but the model's vocabulary ends at 498"),
        ([[7] * 3, [7, -1, 7]], "Row 2 of forced holds the token -1"),
        ([[7] * 3, [7, 7.0, 7]], "Row 2 of forced holds 7.0, but token ids are ints"),
        ([7, 7, 7], "Row 1 of forced is 7, but it must be a list of token ids"),
        (7, "forced is 7, but it must be a list of lists of token ids"),
    ],
)
def test_what_is_forced_is_checked_as_prompts_are(tiny, forced, says):
    with pytest.raises(PromptError, match=says):
        Engine(tiny.decoder).generate([[1], [2]], Settings(3), forced=forced)


@pytest.mark.parametrize("seed", ["x", -1, 2.5, True, 2**62, pytest.param(10**5000, id="huge")])
@pytest.mark.parametrize("model", ["gpt2", "demo"])
def test_a_seed_of_weights_is_a_whole_number(model, seed):
    with pytest.raises(ModelError, match=f"seed is .*, but it must be a whole number from 0 to {2**62 - 1:,}"):
        eet_lab.load(model, device="meta", seed=seed)


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_gpt2().save_pretrained(tmp_path / "mine" / "model")
    for name in ("~/mine/model", Path("~/mine/model"), os.path.join("~", "mine", "model")):
        loaded = eet_lab.load(name, device="cpu")
        assert (loaded.kind, loaded.name, loaded.label) == ("folder", "model", str(tmp_path / "mine" / "model"))
    for name in ("~/not-there", "~nobody-of-that-name/model"):
        with pytest.raises(ModelError, match=f"no folder '{name}'"):
            eet_lab.load(name, device="cpu")
