"""The tests that meet transformers, once more with the oldest version that pyproject.toml allows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OVERLAY = Path(sys.prefix) / "oldest"
"""tools/oldest.py puts it there: transformers and what it asks for in other versions than the environment's."""

MEET = {
    "test_hf_attention.py": "llama or mistral or qwen3 or refused or remedy",
    "test_models.py": "live or folder_equals or shards or bin or not_finite or untied",
    "test_demo_model.py": "not loses_nothing",
    "test_bench_peers.py": "same_weights or laying_out or called or row_for_each or calls_on_a_cpu or full_gpu",
    "test_bench_parity.py": "transformers",
    "test_perplexity.py": "transformers",
    "test_engine.py": "variants_of_gpt2",
    "test_batches.py": "packed_tokens_equal",
    "test_families.py": "of_transformers or peer",
    "test_family_checkpoints.py": "to_the_bit or random_weights",
    "test_encoders.py": "of_transformers and baseline or says_the_same or counted",
    "test_encoder_checkpoints.py": "to_the_bit or names or preset or taken or pieces",
    "test_encoding.py": "encode or pipeline",
}
"""The tests of each file that call transformers."""
TOLD = "import sys, pytest, transformers; print(transformers.__version__); sys.exit(pytest.main())"
"""Pytest as a program that tells first with which transformers: to ask in a process of its own takes 6 s."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_with_the_oldest_transformers():
    if not (OVERLAY / "versions").exists():
        pytest.skip("python tools/oldest.py installs it")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(OVERLAY), str(ROOT)])}
    words = [sys.executable, "-c", TOLD, "-q", "-p", "no:cacheprovider", "-k", chosen()]
    done = subprocess.run([*words, *(ROOT / "tests" / name for name in MEET)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert done.stdout.startswith("4.56."), "this is what is tested here"
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 50


def chosen() -> str:
    return " or ".join(f"({name.removesuffix('.py')} and ({words}))" for name, words in MEET.items())
