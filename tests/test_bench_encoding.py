"""Workloads of texts: their names, their rows, and transformers padded beside ours."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch
from encoders import ours
from families import ours as decoder

import eet_lab
from eet_lab.bench import encoding
from eet_lab.bench.encoding import HF, SORTED, ErrorBudget, encode_all
from eet_lab.bench.rows import append, markdown, read
from eet_lab.bench.workloads import DEMO_PROMPTS, Texts, default_prompts
from eet_lab.commands.bench_tables import encode_table
from eet_lab.errors import Cancelled, ModelError, PromptError
from eet_lab.models.decoder import mapped
from eet_lab.models.tokenizer import Tokenizer

WORKLOAD = "encode:any/t20/p1-30"


def test_names_and_workloads_are_inverse():
    for name in ("encode:bert-base/t2048/p5-500", "encode:some/folder/t1/p7"):
        assert str(Texts.parse(name)) == name
    lengths = [*map(len, Texts.parse("encode:bert-base/t2048/p5-500").prompts(50))]
    assert len(lengths) == 2048 and min(lengths) == 5 and max(lengths) == 500 and lengths != sorted(lengths)
    for wrong in (
        "encode:bert-base/t0/p1",
        "encode:bert-base/t2/p9-3",
        "encode:bert-base/t2/p9-0",
        "encode:bert-base/t999999999/p500",
        "encode:bert-base/t2",
        "bert-base/t2/p3",
    ):
        with pytest.raises(PromptError):
            Texts.parse(wrong)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert-mlm"])
def test_ours_and_transformers_encode_the_same(name, tmp_path):
    steps = []
    rows, remarks = encode_all(
        ours(name),
        WORKLOAD,
        ("baseline", "pre_padding", "all"),
        ("eet_lab", HF, SORTED),
        batch_tokens=64,
        repeats=1,
        progress=lambda *a: steps.append(a),
    )
    assert [row.provider for row in rows] == ["eet_lab"] * 3 + [HF, SORTED] and remarks == [] and len(steps) == 10
    assert [row.equality for row in rows] == ["passed"] * 5
    assert all(row.tok_s == pytest.approx(sum(map(len, texts())) / row.total_ms.p50 * 1e3, 0.01) for row in rows)
    [path] = append(rows, tmp_path)
    assert read(path) == rows and "tok/s" in markdown(rows)
    assert "tok/s" in (shown := encode_table(rows)) and SORTED in shown and "passed" in shown


def test_default_texts_that_are_cut_keep_the_token_that_ends_them():
    model = ours("bert")
    marked = Tokenizer(lambda text: [2, *[5] * (len(text) // 3), 3], str, 8)
    rows, most = default_prompts(replace(model, tokenizer=marked)), model.config.context
    assert max(map(len, rows)) == most < len(marked.encode(DEMO_PROMPTS[-1]))
    assert all(row == [2, *[5] * (len(row) - 2), 3] for row in rows)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_recipes_of_an_encoder_are_compared_in_pairs(name, tmp_path):
    steps, partial = [], []
    found = eet_lab.compare(
        ours(name), texts(), "all", repeats=7, batch_tokens=64,
        progress=lambda *told: steps.append(told), on_partial=partial.append,
    )  # fmt: skip
    assert found.workload.startswith("encode:") and found.prompt_lengths == tuple(map(len, texts()))
    assert found.parity.verdict in ("identical", "within rounding") and found.parity.max_error <= found.parity.budget
    assert set(found.changes) == {"total_ms", "tokens_per_s"}
    assert {change.num_pairs for change in found.changes.values()} == {7} and len(partial) == 6
    assert steps[-1][:2] == (17, 17)
    for side in (found.baseline, found.selection):
        assert side.tokens_per_s.p50 == pytest.approx(
            sum(found.prompt_lengths) / side.total_ms.p50 * 1e3, 1e-3
        )  # an odd number of runs
        assert side.memory["peak"] == side.memory["weights"] + side.memory["activations"] > side.memory["weights"]
    assert "throughput" in found.to_text() and "time per output token" not in found.to_text()
    found.save(path := tmp_path / "encoder.json")
    assert eet_lab.load_result(path).to_text() == found.to_text()


def test_an_encoders_comparison_takes_texts_and_tells_what_is_of_no_use():
    assert eet_lab.compare(ours("bert"), repeats=1).workload.startswith("encode:")
    with pytest.raises(PromptError, match="takes no max_new_tokens"):
        eet_lab.compare(ours("bert"), texts(), max_new_tokens=3)
    with pytest.raises(PromptError, match="batch_tokens"):
        eet_lab.compare(ours("bert"), texts(), batch_tokens=-1)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        eet_lab.compare(ours("bert"), texts(), cancel=cancel)


def test_vectors_that_differ_are_told(monkeypatch):
    monkeypatch.setattr(ErrorBudget, "error", lambda self, vectors: float("nan"))
    found = eet_lab.compare(ours("bert"), texts(), "pre_padding", repeats=1)
    assert found.parity.verdict == "different" and found.parity.max_error is None
    drawn = eet_lab.plot(found, "all")
    assert list(drawn) == ["tokens", "memory"], "what it reads is the same in any case, and a run is one step"
    assert drawn["tokens"].layout.title.text == "Tokens read over time" and len(drawn["tokens"].data[0].x) == 2


def texts() -> list[list[int]]:
    return Texts.parse(WORKLOAD).prompts(ours("bert").config.vocab_size)


def test_vectors_that_are_off_do_not_pass():
    encoder = ours("bert").encoder
    budget = ErrorBudget(encoder, texts())
    assert budget.verdict(torch.zeros(20, encoder.config.hidden_size)).startswith("error ")


@pytest.mark.parametrize("lost", [math.inf, math.nan])
def test_nothing_passes_where_the_baseline_overflows(lost, monkeypatch):
    read = encoding._plain
    monkeypatch.setattr(encoding, "_plain", lambda *of: read(*of) + (lost if of[0].dtype == torch.bfloat16 else 0))
    budget = ErrorBudget(mapped(ours("bert").encoder, lambda tensor: tensor.bfloat16()), texts())
    vectors = torch.zeros(20, ours("bert").config.hidden_size)
    assert budget.verdict(vectors).startswith("error ")
    found = budget.parity(vectors + 1, vectors)
    assert found.verdict == "different" and found.budget == 0


def test_what_cannot_be_encoded_is_told():
    with pytest.raises(PromptError, match="no provider 'onnx' of texts"):
        encode_all(ours("bert"), WORKLOAD, "all", "onnx")
    with pytest.raises(PromptError, match="No recipe is given"):
        encode_all(ours("bert"), WORKLOAD, [])
    with pytest.raises(ModelError, match="encoder"):
        encode_all(decoder("llama"), WORKLOAD)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        encode_all(ours("bert"), WORKLOAD, cancel=stop)


def test_a_provider_that_is_named_twice_is_timed_once():
    rows, _ = encode_all(ours("bert"), WORKLOAD, "all", ("hf-sdpa", "eet_lab", "hf-sdpa"), repeats=1)
    assert sorted(row.provider for row in rows) == ["eet_lab", "hf-sdpa"]
