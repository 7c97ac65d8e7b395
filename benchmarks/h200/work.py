"""How each kind of part takes its rows: a function of a session, which keeps them and says what was found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from check_kernels import HOME, cold_build_s, is_wrong

from eet_lab.bench import encoding, held_out, streams
from eet_lab.bench.benchmark import benchmark
from eet_lab.bench.cost import launch_cost, streaming_gb_per_s
from eet_lab.bench.fusion import fusion_map
from eet_lab.bench.op_workloads import OpWorkload
from eet_lab.bench.ops import benchmark_op
from eet_lab.bench.peers import PEERS
from eet_lab.bench.rows import OURS, Row, append
from eet_lab.bench.serving import HF, serve_all
from eet_lab.bench.training import train_all
from eet_lab.bench.workloads import Requests, Stream, Texts, TrainBatch, Workload
from eet_lab.commands.bench_tables import (
    accuracy_table,
    encode_table,
    model_table,
    op_tables,
    serve_table,
    train_table,
)
from eet_lab.technique import registry
from eet_lab.texts import as_recipe
from h200.session import Session


def build(session: Session) -> dict[str, Any]:
    """Import time, and every kernel from an empty cache, in processes of their own."""
    code = "import time; t = time.perf_counter(); import eet_lab; print(time.perf_counter() - t)"
    python = [sys.executable, "-c", code]
    done = subprocess.run(
        python, env=os.environ | {"PYTHONPATH": str(HOME)}, capture_output=True, text=True, check=True
    )
    found = {"import_s": round(float(done.stdout), 3)}
    if not session.smoke:
        found["cold_build_s"] = round(cold_build_s(), 2)
    return found


def machine(session: Session) -> dict[str, Any]:
    """The ceiling, what a launch costs, and why a technique cannot run here, if so."""
    device = session.model("demo").device
    reasons = {name: technique().unavailable(device) for name, technique in registry().items()}
    cost = launch_cost(device)
    launch = cost and cost._asdict()
    return {"streaming_gb_per_s": streaming_gb_per_s(device), "launch_cost": launch, "unavailable": reasons}


def benchmarked(
    *workloads: str,
    recipes: Sequence[str] = ("all",),
    repeats: int = 3,
    peers: Sequence[str] = tuple(PEERS),
    dtype: str | None = None,
) -> Callable[[Session], Any]:
    """Recipes beside peers on each workload."""

    def work(session: Session) -> Any:
        found = {}
        for workload in (session.sized(Workload.parse(text)) for text in workloads):
            model = session.model(workload.model, dtype)
            distinct = list(dict.fromkeys(str(as_recipe(each, model.device, model.config)) for each in recipes))
            providers = [OURS, *(name for name in peers if session.peers is None or name in session.peers)]
            rows, remarks = benchmark(model, workload, distinct, providers, repeats=repeats, **session.common())
            keep(session, rows, remarks, model_table)
            found[str(workload)] = {"rows": len(rows), "remarks": remarks}
        return found

    return work


def ops(
    *texts: str, smoke: Sequence[str] = ("op:norm_linear/t2/n96/c64",), dtype: str | None = None
) -> Callable[[Session], Any]:
    """Every size of these ops, ours beside others; `smoke` are those of a smoke test."""

    def work(session: Session) -> Any:
        found: dict[str, Any] = {"rows": 0, "remarks": {}, "wrong": []}
        for workload in (each for text in (smoke if session.smoke else texts) for each in OpWorkload.parse(text)):
            kind = None if session.smoke else dtype
            rows, remarks = benchmark_op(workload, device=session.device, dtype=kind, cancel=session.deadline)
            append(rows, session.out)
            print(op_tables(rows), flush=True)
            found["rows"] += len(rows)
            found["remarks"][str(workload)] = remarks
            found["wrong"] += [f"{row.workload}: {row.equality}" for row in rows if is_wrong(row)]
        return found

    return work


def streamed(text: str, *ways: tuple[str, bool]) -> Callable[[Session], Any]:
    """Recipes, and whether memory is reserved for them, on one stream of requests."""

    def work(session: Session) -> Any:
        stream = Stream.parse("smoke/r5/p1-20/n4" if session.smoke else text)
        model = session.model(stream.model)
        found = {}
        for recipe, reserved in ways:
            line = streams.run_stream(model, stream, recipe, reserved=reserved, cancel=session.deadline)
            append([line], session.out)
            found[line.recipe] = asdict(line)
            print(line.recipe, found[line.recipe], flush=True)
        return found

    return work


def keep(session: Session, rows: Sequence[Row], remarks: Sequence[str], table: Callable[[Sequence[Row]], str]) -> None:
    """Write rows, and show them."""
    append(rows, session.out)
    print(table(rows), *remarks, sep="\n", flush=True)


def served(
    text: str,
    *recipes: str,
    providers: Sequence[str] = (OURS, HF),
    repeats: int = 2,
    smoke: str = "serve:smoke/r5/p1-20/n2-4/all",
) -> Callable[[Session], Any]:
    """Recipes, the same behind our server, and transformers' own continuous batching on one workload of requests."""

    def work(session: Session) -> Any:
        requests = Requests.parse(smoke if session.smoke else text)
        model = session.model(requests.model)
        rows, remarks = serve_all(
            model, requests, recipes, providers, repeats=1 if session.smoke else repeats, cancel=session.deadline
        )
        keep(session, rows, remarks, serve_table)
        found = {row.name: row.prefix_hit_rate for row in rows if row.prefix_hit_rate is not None}
        tok_s = {row.name: round(row.tok_s or 0) for row in rows}
        return {"rows": len(rows), "tok_s": tok_s, "prefix_hit_rate": found, "remarks": remarks}

    return work


def encoded(text: str, *recipes: str) -> Callable[[Session], Any]:
    """Recipes beside transformers, as texts come and sorted, on one workload of texts."""

    def work(session: Session) -> Any:
        texts = Texts.parse("encode:smoke-encoder/t9/p1-20" if session.smoke else text)
        model, providers = session.model(texts.model), (OURS, encoding.HF, encoding.SORTED)
        rows, remarks = encoding.encode_all(model, texts, recipes, providers, cancel=session.deadline)
        keep(session, rows, remarks, encode_table)
        return {"rows": len(rows), "tok_s": {row.name: round(row.tok_s or 0) for row in rows}, "remarks": remarks}

    return work


def trained(peers: Mapping[str, Sequence[str]], *recipes: str) -> Callable[[Session], Any]:
    """Recipes beside these peers of transformers on each workload of training, in bfloat16."""

    def work(session: Session) -> Any:
        found = {}
        for text, names in peers.items():
            workload = session.sized_batch(TrainBatch.parse(text))
            model = session.model(workload.model, "bfloat16")
            providers = [OURS, *(name for name in names if session.peers is None or name in session.peers)]
            rows, remarks = train_all(model, workload, recipes, providers, repeats=3, **session.common())
            keep(session, rows, remarks, train_table)
            figures = {row.name: row.total_ms and row.total_ms.p50 for row in rows}
            found[str(workload)] = {"step_ms": figures, "remarks": remarks}
        return found

    return work


def fused(text: str) -> Callable[[Session], Any]:
    """The fusion map of a workload in bfloat16, as a file for benchmarks/."""

    def work(session: Session) -> Any:
        workload = session.sized_batch(TrainBatch.parse(text))
        found = fusion_map(session.model(workload.model, "bfloat16"), workload, **session.common())
        path = session.out / f"fusion-{workload.model}.json"
        path.write_text(json.dumps(asdict(found), indent=1) + "\n")
        return {"step_ms": {rung.title: rung.step_ms.p50 for rung in found.rungs}, "file": path.name}

    return work


def with_dropout(workload: str, plain: Sequence[str], dropped: Sequence[str]) -> dict[str, Sequence[str]]:
    """The peers of a workload, and those of the same with dropout."""
    return {f"train:{workload}": plain, f"train:{workload}/d0.1": dropped}


def accuracy_of(text: str, *recipes: str) -> Callable[[Session], Any]:
    """Recipes beside transformers on held-out text of a trained model."""

    def work(session: Session) -> Any:
        workload = "accuracy:demo/b2/p8/n4" if session.smoke else text
        model = session.model("demo")
        rows, remarks = held_out.measure_accuracy(
            model, workload, recipes, (OURS, held_out.HF), cancel=session.deadline
        )
        keep(session, rows, remarks, accuracy_table)
        return {"kl": {row.name: row.kl for row in rows}, "nll": {row.name: row.nll for row in rows}}

    return work


def allocators(session: Session) -> Any:
    """What torch's caching allocator does with the streams of lesson 5, for those who have no GPU."""
    if session.smoke:
        return "needs a GPU"
    streams.main([str(session.out / streams.RECORDED.name)])
    return streams.RECORDED.name
