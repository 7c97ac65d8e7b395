"""Workloads of requests: their names, their rows, and transformers' own continuous batching beside ours."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from families import ours

from eet_lab.bench import serving
from eet_lab.bench.rows import append, read
from eet_lab.bench.serving import HF, HF_SERVE, HTTP, HTTP_CACHED, Asked, ServingRun, serve_all, served_by_hf
from eet_lab.bench.workloads import Requests
from eet_lab.commands.bench_tables import serve_table
from eet_lab.errors import Cancelled, PromptError, RecipeError, SetupError
from eet_lab.scheduling.served import percentiles
from eet_lab.serving.handle import ServerHandle

RECIPE = "all,continuous_batching:rows=3:chunk=8:budget=16"


def test_names_and_workloads_are_inverse():
    for name in (
        "serve:llama-1b/r256/p100-1024/n512/all",
        "serve:llama-1b/r256/p100-1024/n100-1024/all",
        "serve:llama-1b/r128/p1056-1280/shared1024/n32-64/all",
        "serve:some/folder/r1/p7/n1/all",
    ):
        assert str(Requests.parse(name)) == name
    lengths = [*map(len, Requests.parse("serve:demo/r500/p100-1024/n1/all").prompts(50))]
    assert len(lengths) == 500 and 100 <= min(lengths) < 110 and 1010 < max(lengths) <= 1024
    answers = Requests.parse("serve:demo/r500/p1/n100-1024/all").new_lengths()
    assert len(answers) == 500 and 100 <= min(answers) < 110 and 1010 < max(answers) <= 1024
    assert {*Requests.parse("serve:demo/r9/p1/n7/all").new_lengths()} == {7}
    alike, apart = (Requests.parse(f"serve:demo/r9/p8-12{shared}/n1/all").prompts(500) for shared in ("/shared7", ""))
    assert [prompt[7:] for prompt in alike] == [prompt[7:] for prompt in apart]
    assert [prompt[:7] for prompt in alike] == [apart[0][:7]] * 9 and len({*map(tuple, alike)}) == 9
    for wrong in (
        "serve:demo/r2/p8-12/shared8/n1/all",
        "serve:demo/r2/p8-12/shared0/n1/all",
        "serve:demo/r2/p8-12/shared/n1/all",
        "serve:demo/r2/p8-12/n1/shared7/all",
        "serve:demo/r2/p1/n9-3/all",
        "serve:demo/r0/p1/n1/all",
        "serve:demo/r2/p9-3/n1/all",
        "serve:demo/r2/p3/n1/now",
        "serve:demo",
    ):
        with pytest.raises(PromptError):
            Requests.parse(wrong)


def test_ours_and_transformers_serve_the_same_tokens(tmp_path):
    steps = []
    rows, remarks = serve_all(
        ours("llama"),
        "serve:any/r7/p2-14/n3-6/all",
        RECIPE,
        ("eet_lab", HF),
        repeats=1,
        progress=lambda *a: steps.append(a),
    )
    assert [row.provider for row in rows] == ["eet_lab", HF] and remarks == []
    assert [row.same_tokens for row in rows] == [True, True] and len(steps) == 4
    for row in rows:
        waits = row.percentiles
        assert row.tok_s > 0 and waits["ttft_ms"]["p50"] <= waits["e2e_ms"]["p50"] <= waits["e2e_ms"]["p99"]
    [path] = append(rows, tmp_path)
    assert read(path) == rows
    shown = serve_table(rows)
    assert "tok/s" in shown and HF in shown and "yes" in shown and "prefix found" not in shown


@pytest.mark.parametrize("providers, same", [(("eet_lab", HF), False), ((HF,), None)])
def test_a_peers_tokens_that_are_not_ours_do_not_pass(monkeypatch, providers, same):
    monkeypatch.setattr(serving, "served_by_hf", lambda *args: ServingRun(1.0, [1.0], [1.0], [1], [[1]] * 2))
    rows, _ = serve_all(ours("llama"), "serve:any/r2/p2-3/n3/all", RECIPE, providers, repeats=1)
    assert rows[-1].equality.startswith("not checked") and rows[-1].same_tokens is same
    assert all(row.equality == "passed" and row.same_tokens for row in rows[:-1])


def test_the_same_requests_over_http(tmp_path, monkeypatch):
    """Each run finds what prompts share within it, and no prompt of the run before; answers that are kept cost none."""
    loads, stop = [], ServerHandle.stop
    monkeypatch.setattr(
        ServerHandle, "stop", lambda server: [loads.append(server._server.service.generator.load()), stop(server)]
    )
    workload = Requests.parse("serve:any/r7/p34-44/shared33/n3-6/all")
    providers = ("eet_lab", HTTP, HTTP_CACHED, HF_SERVE)
    rows, remarks = serve_all(ours("llama"), workload, f"{RECIPE},prefix_caching", providers, repeats=1)
    assert [row.provider for row in rows] == [*providers] and remarks == []
    within, over, kept, theirs = rows
    kept_load, load = loads
    num_tokens = sum(map(len, workload.prompts(99)))
    assert (load.prefix_cache_hits, load.prefix_cache_queries) == (6 * 32, num_tokens)
    assert within.prefix_hit_rate == 6 * 32 / num_tokens and kept_load.prefix_cache_queries == 0
    assert kept.same_tokens and "prefix found %" in serve_table(rows)
    assert theirs.same_tokens and theirs.tok_s == pytest.approx(sum(workload.new_lengths()) / theirs.total_ms.p50 * 1e3)
    assert over.same_tokens and over.recipe == within.recipe and over.name == f"{HTTP} {over.recipe}"
    assert over.tok_s > 0 and over.percentiles["ttft_ms"]["p50"] <= over.percentiles["e2e_ms"]["p50"]
    assert over.tok_s == pytest.approx(sum(workload.new_lengths()) / over.total_ms.p50 * 1e3)
    [path] = append(rows, tmp_path)
    assert read(path) == rows


@pytest.mark.parametrize(
    "output, says",
    [
        ({"error": "out of pages", "generated_tokens": [1]}, "request 2: out of pages"),
        ({"error": None, "generated_tokens": [1]}, "request 2: 1 of 3 tokens"),
        (None, "request 2: no answer"),
    ],
)
def test_what_transformers_did_not_answer_is_not_timed(output, says):
    whole = SimpleNamespace(error=None, generated_tokens=[1, 2, 3], timestamps=[0.0, 1.0])
    found = {"req_0": whole} | ({} if output is None else {"req_1": SimpleNamespace(**output)})
    model = SimpleNamespace(device=torch.device("cpu"), generate_batch=lambda **how: found)
    with pytest.raises(SetupError, match=says):
        served_by_hf(model, Asked([[1], [2]], [3, 3]))


def test_what_cannot_be_served_is_told():
    for recipe, error, says in (
        ("all", RecipeError, "add continuous_batching"),
        (RECIPE, PromptError, "no provider 'vllm' of requests"),
    ):
        with pytest.raises(error, match=says):
            serve_all(ours("llama"), "serve:any/r2/p2/n2/all", recipe, "vllm" if "vllm" in says else "eet_lab")
    with pytest.raises(PromptError, match="No recipe is given"):
        serve_all(ours("llama"), "serve:any/r2/p2/n2/all", [])
    with pytest.raises(PromptError, match="No provider of requests is named. Known ones: eet_lab, "):
        serve_all(ours("llama"), "serve:any/r2/p2/n2/all", providers=[])
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        serve_all(ours("llama"), "serve:any/r2/p2/n2/all", RECIPE, cancel=stop)


def test_percentiles_are_interpolated():
    assert percentiles([*range(101)]) == {"p50": 50, "p95": 95, "p99": 99}
    assert percentiles([7.0]) == {"p50": 7.0, "p95": 7.0, "p99": 7.0} and percentiles([]) == {}
