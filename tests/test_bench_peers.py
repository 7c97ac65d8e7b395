"""Workloads, peers, the benchmark of them, the cost model and the rows that come of it."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.bench import Spread, Workload, benchmark, held_out, launches, peers, workloads
from eet_lab.bench import cost as costs
from eet_lab.bench.cost import LaunchCost, predicted_ms, step_cost, step_weight_bytes, streaming_gb_per_s
from eet_lab.bench.launches import StepLaunches, num_kernels
from eet_lab.bench.parity import ParityCheck, reference_logits
from eet_lab.bench.peers import HuggingFace, Timing, make, to_hf
from eet_lab.bench.rows import Row, append, file_name, markdown, newest, read
from eet_lab.bench.static_decoder import left_padded
from eet_lab.bench.workloads import Requests, Stream, Texts
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import Cancelled, OutOfMemory, PromptError, ResultError
from eet_lab.models import load
from eet_lab.models.config import Config
from eet_lab.models.decoder import tensors
from eet_lab.parts import Parts
from eet_lab.parts.attend import Bounds
from eet_lab.technique import Recipe, everything

ROOT = Path(__file__).parents[1]
ROWS = [[5], [7, 8, 9, 10], [3, 1, 4, 1, 5, 9, 2]]


@given(st.sampled_from(["gpt2", "openai-community/gpt2"]), st.integers(1, 64), st.integers(1, 500), st.integers(0, 500))
def test_a_workload_reads_back_from_its_name(model, batch, low, more):
    workload = Workload(model, batch, low, low + more, 7)
    assert Workload.parse(str(workload)) == workload
    lengths = workload.lengths
    assert len(lengths) == batch
    assert lengths[0] == low
    assert list(lengths) == sorted(lengths)
    assert lengths[-1] == (low + more if batch > 1 else low)


@given(st.sampled_from([Requests, Stream, Texts]), st.integers(1, 99), st.integers(1, 99), st.integers(0, 1))
def test_every_kind_of_workload_reads_back_from_its_name(kind, num, low, more):
    workload = kind("a/model", num, low, low + more, *([] if kind is Texts else [7]))
    assert kind.parse(str(workload)) == workload
    assert kind.parse(f" {workload} ") == workload


def test_workloads_are_evenly_spaced_and_repeatable():
    workload = Workload.parse("gpt2/b8/p16-512/n128")
    assert workload.lengths == (16, 87, 158, 229, 299, 370, 441, 512)
    assert workload.prompts(100) == workload.prompts(100)
    assert [len(row) for row in workload.prompts(100)] == list(workload.lengths)


def test_only_prompts_that_are_drawn_are_bounded_in_all():
    """Of prompts that were given the lengths between the ends are not known."""
    given = workloads.describe("tiny", [[1]] * 30_000 + [[1] * 1000], 4)
    assert given == "tiny/b30001/p1-1000/n4"
    with pytest.raises(PromptError, match="30,001 prompts from 1 to 1,000 tokens are 15,015,500 in all, but a"):
        Workload("tiny", 30_001, 1, 1000, 4).prompts(99)
    with pytest.raises(PromptError, match="1 prompt from .* a stream has at most .* Take fewer requests"):
        Stream.parse("tiny/r1/p99999999-99999999/n4")


@pytest.mark.parametrize("text", ["gpt2", "gpt2/b8", "gpt2/b0/p4/n4", "gpt2/b1/p9-4/n4", "gpt2/b1/p4/n0", "/b1/p1/n1x"])
def test_bad_workloads_are_told(text):
    with pytest.raises(PromptError):
        Workload.parse(text)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "n_inner": 80, "activation_function": "relu"}])
def test_the_peer_has_the_same_weights(changes):
    from conftest import make_gpt2

    theirs = make_gpt2(**changes)
    ours = load(theirs, device="cpu").decoder
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        torch.testing.assert_close(to_hf(ours)(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize("name", ["hf-eager", "hf-sdpa"])
@pytest.mark.parametrize("new_tokens", [1, 5])
def test_peers_say_what_we_say_and_take_time(tiny, name, new_tokens):
    [peer], _ = make([name], tiny.decoder, ROWS, Settings(max_new_tokens=new_tokens))
    assert peer.prepare().tokens == peer.time().tokens
    timing = peer.time()
    assert timing.tokens == Engine(tiny.decoder).generate(ROWS, Settings(max_new_tokens=new_tokens)).tokens
    assert 0 < timing.ttft_ms <= timing.total_ms
    assert (timing.tpot_ms is None) == (new_tokens == 1)


def test_laying_out_the_prompts_counts_for_peers_too(tiny, monkeypatch, pass_time):
    [peer], _ = make(["hf-sdpa"], tiny.decoder, ROWS, Settings(max_new_tokens=2))
    peer.prepare()
    monkeypatch.setattr(peers, "left_padded", lambda *given: pass_time(1e4) or left_padded(*given))
    timing = peer.time()
    assert 1e7 < timing.ttft_ms < timing.total_ms


def test_prompts_are_padded_on_the_left():
    ids, attended = left_padded([[5], [7, 8, 9]], torch.device("cpu"))
    assert ids.tolist() == [[0, 0, 5], [7, 8, 9]]
    assert attended.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert ids.dtype == attended.dtype == torch.long


def test_a_timing_is_read_from_its_marks():
    assert Timing.of([2.0, 5.0, 8.0, 9.0], torch.tensor([[1, 2, 3]])) == (2.0, 3.0, 9.0, ((1, 2, 3),))
    assert Timing.of([2.0, 9.0], torch.tensor([[1]])).tpot_ms is None


def test_a_race_without_repeats_is_refused(tiny):
    with pytest.raises(PromptError, match="repeats is 0"):
        benchmark(
            tiny, Workload(tiny.name, 1, 2, 2, 2), repeats=0, progress=lambda *told: pytest.fail(f"began: {told}")
        )


def test_a_race_makes_a_row_for_each_and_says_who_is_missing(tiny, tmp_path):
    workload = Workload(tiny.name, 3, 2, 9, 4)
    wanted = ["eet_lab", "hf-sdpa", "hf-max-autotune", "torch-cuda-graphs"]
    rows, remarks = benchmark(tiny, workload, ["baseline", "all"], wanted, repeats=2)
    assert [(row.provider, row.recipe) for row in rows] == [
        ("eet_lab", "baseline"),
        ("eet_lab", str(everything("cpu"))),
        ("hf-sdpa", ""),
    ]
    assert all(row.equality == "passed" and row.same_tokens for row in rows)
    assert len({row.run for row in rows}) == 1
    assert all(row.share_of_ceiling > 0 for row in rows)
    for row in rows:  # what a peer calls is not known on a CPU
        assert (row.kernels_per_token or 0) > 0 if row.provider == "eet_lab" else row.kernels_per_token is None
    assert "hf-max-autotune is left out: transformers compiles generate on a GPU only" in remarks
    assert "torch-cuda-graphs is left out: CUDA graphs need an NVIDIA GPU" in remarks
    [path] = append(rows, tmp_path)
    assert path.name == "cpu.jsonl"
    assert read(path) == rows


def test_a_peer_that_fails_is_left_out_and_told(tiny, monkeypatch):
    monkeypatch.setattr(HuggingFace, "prepare", lambda self: 1 / 0)
    rows, remarks = benchmark(tiny, Workload(tiny.name, 2, 2, 4, 2), ["all"], ["eet_lab", "hf-sdpa"], repeats=1)
    assert [row.provider for row in rows] == ["eet_lab"]
    assert any("hf-sdpa failed: ZeroDivisionError" in remark for remark in remarks)


def test_what_a_peer_calls_on_a_cpu_is_counted(tiny):
    [row], _ = benchmark(tiny, Workload(tiny.name, 2, 2, 4, 14), providers=["hf-sdpa"], repeats=1)
    assert row.launches_per_token == row.kernels_per_token
    assert 20 < row.launches_per_token < 400
    assert row.predicted_ms > row.floor_ms
    [short], _ = benchmark(tiny, Workload(tiny.name, 2, 2, 4, 4), providers=["hf-sdpa"], repeats=1)
    assert short.launches_per_token is None, "too few steps to take a mean of"


def test_a_peer_whose_weights_do_not_fit_is_left_out_and_told(tiny, monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has 1 GiB.")

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", full)
    workload, named = Workload(tiny.name, 2, 2, 4, 2), ["eet_lab", "hf-eager", "hf-sdpa"]
    rows, remarks = benchmark(tiny, workload, ["all"], named, repeats=1)
    assert [row.provider for row in rows] == ["eet_lab"]
    for name in ("hf-eager", "hf-sdpa"):
        assert any(f"{name} is left out: The GPU's memory is full: the copy of the weights" in each for each in remarks)


def test_an_unknown_provider_is_told(tiny):
    with pytest.raises(PromptError, match="Did you mean 'hf-sdpa'"):
        benchmark(tiny, Workload(tiny.name, 1, 2, 2, 2), ["all"], ["hf-sdp"])


def test_a_step_reads_all_weights_but_the_embeddings_and_every_key(tiny):
    decoder = tiny.decoder
    embeddings = (decoder.token_embedding.numel() + decoder.position_embedding.numel()) * 4  # the head is not tied here
    everything = sum(t.numel() for t in tensors(decoder)) * 4
    assert step_weight_bytes(decoder) == everything - embeddings
    cost = step_cost(decoder, ROWS, 10, Spread(1.0, 2.0, 3.0))
    tokens = sum(len(row) + 5 for row in ROWS)
    assert cost.kv_bytes == tokens * 2 * 3 * 48 * 4
    assert cost.floor_ms == pytest.approx(cost.step_bytes / cost.ceiling_gb_per_s / 1e6, rel=0.05)
    assert cost.gb_per_s == pytest.approx(cost.step_bytes / 2e-3 / 1e9, rel=0.01, abs=1e-3)


def test_a_prediction_is_the_slower_of_the_device_and_its_host(monkeypatch):
    monkeypatch.setattr(costs, "launch_cost", lambda device: LaunchCost(kernel_us=1.0, launch_us=4.0))
    monkeypatch.setattr(costs, "streaming_gb_per_s", lambda device: 4000.0)
    step_bytes = 2_000_000_000  # half a millisecond
    assert predicted_ms(step_bytes, StepLaunches(3, 250), "cuda") == pytest.approx(0.75)
    assert predicted_ms(step_bytes, StepLaunches(250, 250), "cuda") == pytest.approx(1.0)


def test_a_processor_reads_and_calls_in_turn(monkeypatch):
    monkeypatch.setattr(costs, "call_us", lambda: 5.0)
    monkeypatch.setattr(costs, "streaming_gb_per_s", lambda device: 10.0)
    assert predicted_ms(20_000_000, StepLaunches(100, 100), "cpu") == pytest.approx(2 + 0.5)


def test_a_processor_reads_as_fast_as_its_fastest_way_to_read(monkeypatch):
    monkeypatch.setitem(costs.NUM_BYTES, "cpu", 2**20)
    took = {"sum": 4.0, "mv": 2.0}

    def took_ms(work, device):
        return took["mv" if getattr(work, "func", None) is torch.mv else "sum"]

    monkeypatch.setattr(costs, "took_ms", took_ms)
    assert streaming_gb_per_s.__wrapped__("cpu") == pytest.approx(2**20 / 2.0 / 1e6)
    took["mv"] = 8.0
    assert streaming_gb_per_s.__wrapped__("cpu") == pytest.approx(2**20 / 4.0 / 1e6)


@pytest.fixture
def little_held_out(monkeypatch, whole=held_out.held_out):
    """Of the text whose perplexity is told beside a lossy recipe: reading all of it takes 4 s."""
    monkeypatch.setattr(held_out, "held_out", lambda model: whole(model)[:300])


def test_expanding_int8_weights_is_predicted_and_told(monkeypatch, little_held_out):
    monkeypatch.setattr(costs, "call_us", lambda: 0.0)
    monkeypatch.setattr(costs, "streaming_gb_per_s", lambda device: 10.0)
    monkeypatch.setattr(costs, "expansion_ns", lambda: 2.0)
    rows, remarks = benchmark(load("demo", device="cpu"), "demo/b1/p4/n4", ["baseline", "int8_weights"], repeats=1)
    plain, int8 = (row.predicted_ms - row.floor_ms for row in rows)
    assert plain == pytest.approx(0, abs=1e-4)
    num_weights = 4 * 12 * 256**2 + 4096 * 256
    assert int8 == pytest.approx(num_weights * (2.0 / 1e6 + 4 / 10 / 1e6), rel=1e-3)
    [told] = [remark for remark in remarks if "expands int8 weights" in remark]
    assert f"{int8:.3g} ms" in told


def test_calls_are_counted_for_more_lengths_than_a_context_has():
    config = Config(3, 32, 2, 64, 64, 64)
    apart = Recipe.parse("pre_padding,mask_removal").parts  # a call for each number of pads, in each layer
    for parts, each in ((Parts(), 0), (apart, 2)):
        one, many = (num_kernels(parts, tuple(range(1, 1 + num)), config) for num in (1, 90))
        assert many == one + each * config.num_layers * 89


def test_a_lossy_recipe_shows_its_perplexity_or_why_not(tiny, little_held_out):
    workload = Workload(tiny.name, 1, 4, 4, 2)
    _, remarks = benchmark(tiny, workload, ["baseline", "int8_weights"], ["eet_lab"], repeats=1)
    [found] = [remark for remark in remarks if "erplexity" in remark]
    assert re.match(r"int8_weights: Perplexity is not shown: .* came without a tokenizer", found)
    _, remarks = benchmark(load("demo"), Workload("demo", 1, 4, 4, 2), ["int8_weights"], ["eet_lab"], repeats=1)
    [found] = [remark for remark in remarks if "erplexity" in remark]
    assert re.match(r"int8_weights: Perplexity \d+\.\d+ -> \d+\.\d+ \(.*%\) on [\d,]+ tokens of", found)
    assert not any(
        "erplexity" in remark for remark in benchmark(tiny, workload, ["baseline"], ["eet_lab"], repeats=1)[1]
    )


def row(**changes) -> Row:
    spread = Spread(1.0, 2.0, 3.0)
    base = Row(
        "gpt2/b1/p4/n4", "eet_lab", "all", "float16", spread, None, spread, 2**30, 1.0, 2.0, 5.0, "passed", True,
        "abc", "NVIDIA H200", "580", "2.13", "5.23", "c0ffee", "2025-01-02T00:00:00+00:00",
    )  # fmt: skip
    return replace(base, **changes)


def test_files_are_named_by_gpu():
    assert file_name("NVIDIA H200") == "h200.jsonl"
    assert file_name("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb.jsonl"
    assert file_name("Intel(R) Xeon(R) (2 threads)") == "cpu.jsonl"


def test_lines_from_before_a_field_came_can_be_read(tmp_path):
    [path] = append([row()], tmp_path)
    line = json.loads(path.read_text())
    for name in ("ceiling_gb_per_s", "kernels_per_token", "predicted_ms"):
        del line[name]
    path.write_text(json.dumps(line))
    assert read(path) == [row()]


def test_the_share_of_the_ceiling_is_the_floor_over_what_it_took():
    spread = Spread(1.0, 2.0, 3.0)
    assert row().share_of_ceiling is None, "there is no time per token"
    assert row(tpot_ms=spread).share_of_ceiling == 0.5
    assert row(workload="op:norm/t1/c8", total_ms=spread).share_of_ceiling == 0.5
    assert row(tpot_ms=spread, floor_ms=None).share_of_ceiling is None


def test_a_broken_line_is_named(tmp_path):
    [path] = append([row()], tmp_path)
    path.write_text(path.read_text() + '{"workload": 1}\n')
    with pytest.raises(ResultError, match="line 2"):
        read(path)


def test_the_newest_row_of_each_counts():
    rows = [row(), row(provider="hf-sdpa", recipe=""), row(date="2026-01-01")]
    assert [r.date for r in newest(rows)] == ["2026-01-01", row().date]


def test_tables_and_the_newest_row_keep_gpus_and_types_apart():
    slower = row(provider="hf-sdpa", recipe="", total_ms=Spread(4, 5, 6), date="2025-03-04")
    rows = [row(), row(gpu="NVIDIA L4"), row(dtype="float32"), slower]
    assert newest(rows) == rows
    text = markdown(rows)
    assert text.count("**`gpt2/b1/p4/n4`**") == 3
    for heading in ("float16, NVIDIA H200, 2025-01-02 to 2025-03-04", "float16, NVIDIA L4, 2025-01-02", "float32, "):
        assert heading in text
    assert [line.split(" |")[0] for line in text.split("\n\n")[1].splitlines()[2:]] == ["| hf-sdpa", "| all"]


def test_ops_have_a_table_in_microseconds():
    rows = [
        row(workload="op:norm/t1/c8", recipe="", provider=name, peak_bytes=None) for name in ("eet_lab", "torch-norm")
    ]
    text = markdown(rows)
    assert "| eet_lab | 2,000 | 2 | 50 | passed |" in text
    assert "| torch-norm | 2,000 |" in text


def test_launches_are_counted_on_the_whole_batch(tiny, monkeypatch):
    """From 17 rows on another kernel runs: a smaller batch would be counted wrongly."""
    seen = []

    def counted(engine, rows, settings):
        seen.append(len(rows))
        return StepLaunches(settings.max_new_tokens, 40)

    monkeypatch.setattr(launches, "_counted", counted)
    engine = Engine(tiny.decoder)
    engine.model = engine.model._replace(token_embedding=engine.model.token_embedding.to("meta"))
    monkeypatch.setattr(type(engine.model), "device", torch.device("cuda"))
    assert launches.launches_per_token(engine, 17) == StepLaunches(1, 0)
    assert seen == [17, 17]


def test_a_full_gpu_names_what_did_not_fit(tiny, monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has 1 GiB.")

    def check(function, name, what, *args):
        with monkeypatch.context() as patch:
            patch.setattr(function, name, full)
            with pytest.raises(OutOfMemory, match=f"{what}.*Tried to allocate 4.00 GiB"):
                args[0](*args[1:])

    parity_check = (ParityCheck, tiny.decoder, ROWS, Settings(max_new_tokens=2))
    check(torch, "ones", r"a buffer of \d+ MiB", streaming_gb_per_s.__wrapped__, "cpu")
    check(torch, "zeros", r"record of logits \[3 x 3 x 499\]", *parity_check)
    check(Bounds, "__call__", "pass at higher precision", reference_logits, tiny.decoder, ROWS, [[1], [2], [3]], 1)
    check(
        torch,
        "stack",
        "difference of logits",
        ParityCheck._error,
        ParityCheck(*parity_check[1:]),
        torch.ones(3, 2, 499),
    )
    check(torch.nn.Module, "load_state_dict", "copy of the weights", to_hf, tiny.decoder)
    [peer], _ = make(["hf-sdpa"], tiny.decoder, ROWS, Settings(max_new_tokens=2))
    check(type(peer._model), "generate", "a buffer of transformers", peer.time)


def test_stop_before_a_peer_is_prepared_ends_the_race(tiny, monkeypatch):
    stop, prepared = threading.Event(), []
    monkeypatch.setattr(HuggingFace, "prepare", lambda self: prepared.append(self.name) or stop.set())
    with pytest.raises(Cancelled):
        benchmark(tiny, Workload(tiny.name, 2, 2, 4, 2), ["all"], ["hf-eager", "hf-sdpa"], cancel=stop)
    assert prepared == ["hf-eager"]


def test_a_race_tells_how_far_kernels_are_built(tiny, monkeypatch):
    monkeypatch.setattr(Engine, "prepare", lambda self, progress=None, cancel=None: progress and progress(1, 3, "x.cu"))
    told = []
    benchmark(tiny, Workload(tiny.name, 2, 2, 4, 2), ["all"], repeats=1, progress=lambda *args: told.append(args))
    assert (1, 3, "building kernels: x.cu") in told


def test_rows_that_cannot_be_read_are_told(tmp_path):
    with pytest.raises(ResultError, match="absent.jsonl cannot be read"):
        read(tmp_path / "absent.jsonl")


def test_shipped_results_can_be_loaded_and_are_small():
    from eet_lab.bench import load_result

    for path in (ROOT / "eet_lab" / "recorded").glob("*.json"):
        assert load_result(path).environment.recorded, path.name
        assert path.stat().st_size < 300_000, path.name  # a technique is two rungs more, of 14 KB each


def test_committed_rows_can_be_read():
    for path in (ROOT / "benchmarks").glob("*.jsonl"):
        assert all(json.loads(line) for line in path.read_text().splitlines())
        assert read(path)
