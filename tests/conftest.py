"""Small models made in the test: real Hugging Face GPT-2s with random weights, too small to mean anything.

xdist's controller reads this file before it starts its workers, so what takes seconds to import is imported in use.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
from warm_kernels import warm_kernels

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

    from eet_lab.models import Model

# jsonschema does without, as in `eet_lab.lab.child`: its grammar of addresses takes 2 s, and no notebook has one.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

GPU_TESTS = Path(__file__).parent / "gpu"
CHROMIUM = os.environ.get("EET_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")

# A deadline would say how busy the machine is, not whether the code is right.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """Collections of garbage go through what tests make, not through all modules, and are rare: 0.4 s less for each
    comparison, and a twentieth of all tests' time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that need a GPU are not imported where none of them runs: a quarter less for each worker to collect."""
    return True if collection_path == GPU_TESTS and config.getoption("markexpr") == "not gpu" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests take long come first, or one worker would end with them while the other has nothing to do."""
    long = ("tests/browser/", "tests/workbench/", "tests/test_machine_code.py", "tests/test_notebooks.py")
    items.sort(key=lambda item: not item.nodeid.startswith(long))


def make_gpt2(**changes) -> GPT2LMHeadModel:
    """A GPT-2 whose weights are large enough that its arg-max is not a coin toss."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = dict(vocab_size=499, n_positions=128, n_embd=48, n_layer=3, n_head=3, initializer_range=0.15)
    ids = dict(bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**(sizes | ids | changes))).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.fixture(scope="module")
def playwright() -> Iterator[Any]:
    """The one Playwright of this process. While it lives, its event loop is the thread's: no other may run there."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    if not CHROMIUM:
        pytest.skip("no Chromium here: apt-get install chromium, or set EET_CHROMIUM")
    with api.sync_playwright() as driver:
        yield driver


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons take two rounds, not six: too few to tell an effect."""
    from eet_lab.bench import timing

    monkeypatch.setattr(timing, "LEAST_PAIRS", 2)
    monkeypatch.setattr(timing, "MOST_ROUNDS", 2)


@pytest.fixture(scope="session")
def kernels(tmp_path_factory) -> Iterator[dict[str, str]]:
    """The environment of a Jupyter program whose kernels start with what takes seconds to import."""
    with warm_kernels(tmp_path_factory.mktemp("kernels")) as environment:
        yield environment


@pytest.fixture
def layers_of_any_size(monkeypatch) -> None:
    """`persistent_layers` takes models that are too small to gain by it."""
    monkeypatch.setattr("eet_lab.ops.cuda.layer.LEAST_BYTES", 0)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices run faster on one thread, and tests beside each other don't fight for cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Techniques that the test registers, as a learner would in a cell, are gone afterwards."""
    from eet_lab.technique import _REGISTRY

    before = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(before)


@pytest.fixture
def pass_time(monkeypatch) -> Callable[[float], None]:
    """`pass_time(seconds)` sets `time.perf_counter` forward: a wait that costs nothing, as long as a test may want."""
    passed, inner = [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: inner() + passed[0])

    def pass_time(seconds: float) -> None:
        passed[0] += seconds

    return pass_time


@pytest.fixture(scope="session")
def hf_model() -> GPT2LMHeadModel:
    return make_gpt2(tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tiny(hf_model) -> Model:
    """The same model as EET Lab loads it, on the CPU in fp32."""
    from eet_lab.models import load

    return load(hf_model, device="cpu")
