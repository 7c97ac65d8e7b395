"""The script that takes every row of a GPU runs, in its smoke test's sizes, and names its parts."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from load_servers import serving

from eet_lab.bench.rows import read
from eet_lab.bench.timeline import read_timelines
from eet_lab.bench.workloads import Workload
from eet_lab.models.config import PRESETS
from eet_lab.paths import PACKAGE

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import run_h200

    yield run_h200
    for name in [name for name in sys.modules if name.split(".")[0] in ("h200", "run_h200", "check_kernels")]:
        del sys.modules[name]
    PRESETS.pop("smoke", None)


def run(h200, monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run_h200.py", *words])
    return h200.main()


def test_it_lists_its_parts_with_their_estimates(h200, monkeypatch, capsys):
    assert run(h200, monkeypatch, "--list", "--only", "bench-xl") == 0
    out = capsys.readouterr().out
    assert "bench-xl-b1      about  120 s, from 0 s" in out
    assert "bench-l16" not in out


def test_a_smoke_test_takes_rows_and_reports(h200, monkeypatch, tmp_path, capsys):
    words = ["bench-gpt2-b1", "serve-prefix", "ops-linear", "compare-xl"]
    options = ["--smoke", "--out", str(tmp_path), "--peers", "hf-sdpa", "--only", *words]
    assert run(h200, monkeypatch, *options) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report) == words
    rows = read(tmp_path / "cpu.jsonl")
    served = [row for row in rows if row.workload.startswith("serve:")]
    assert {"eet_lab", "hf-sdpa"} == {row.provider for row in rows if row.is_batch}
    assert {row.workload for row in rows if row not in served} == {"smoke/b1/p4/n6", "op:norm_linear/t2/n96/c64"}
    ways = [(row.provider, row.recipe.endswith("prefix_caching")) for row in served]
    assert sorted(ways) == [(f"eet_lab{over}", on) for over in ("", "-http", "-http-cached") for on in (False, True)]
    assert {row.workload for row in served} == {"serve:smoke/r5/p36-50/shared34/n2-4/all"}
    assert all(row.equality == "passed" and "kv=paged" in row.recipe for row in served)
    assert (tmp_path / "recorded-compare-smoke.json").exists()


def test_liger_is_timed_beside_a_model_that_it_has_kernels_for(h200, monkeypatch, tmp_path, capsys):
    """Of what we train, Liger 0.8.5 has kernels for Llama, Mistral, Qwen 2 and Qwen 3."""
    options = ["--smoke", "--out", str(tmp_path), "--peers", "hf-sdpa", "hf-liger", "--only", "train-qwen3"]
    assert run(h200, monkeypatch, *options) == 0
    assert {row.provider for row in read(tmp_path / "cpu.jsonl")} == {"eet_lab", "hf-sdpa"}
    [told] = json.loads((tmp_path / "report.json").read_text())["train-qwen3"]["found"].values()
    assert "hf-liger is left out: Liger needs an NVIDIA GPU" in told["remarks"]


def test_timelines_are_put_into_the_shipped_result_or_the_sessions_own(h200, monkeypatch, tmp_path, capsys):
    """Twice: what the first call wrote to OUT is what the second finds there."""
    shipped = json.loads((PACKAGE / "recorded" / "h200-ladder-gpt2-xl-one-row.json").read_text())
    target = tmp_path / "recorded-ladder-gpt2-xl-one-row.json"
    for _ in range(2):
        assert run(h200, monkeypatch, "--smoke", "--out", str(tmp_path), "--only", "timeline-xl-one-row") == 0
        found = json.loads(target.read_text())
        assert found.pop("timeline").keys() == {"baseline", "selection"}
        assert found == {name: entry for name, entry in shipped.items() if name != "timeline"}
        target.write_text(json.dumps(shipped | {"mark": 1}))
        shipped["mark"] = 1
    target.write_text(json.dumps({name: entry for name, entry in shipped.items() if name != "timeline"}))
    assert read_timelines(target) is None
    assert (tmp_path / "trace-ladder-gpt2-xl-one-row.json").exists()
    told = json.loads((tmp_path / "report.json").read_text())["timeline-xl-one-row"]["found"]
    assert told["baseline"]["num_launches"] > 0 == told["baseline"]["spans"].get("launch", 0)


def test_a_part_that_fails_is_reported_and_the_others_go_on(h200, monkeypatch, tmp_path, capsys):
    parts = {"bad": h200.Part(1, lambda session: 1 / 0), "good": h200.Part(1, lambda session: {"fine": True})}
    monkeypatch.setattr(h200, "PARTS", parts)
    assert run(h200, monkeypatch, "--out", str(tmp_path)) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert "ZeroDivisionError" in report["bad"]["found"]["failed"]
    assert report["good"]["found"] == {"fine": True}
    assert run(h200, monkeypatch, "--out", str(tmp_path), "--minutes", "-1") == 0
    assert "left out: ['bad', 'good']" in capsys.readouterr().out


def test_large_workloads_become_small_ones_of_their_kind(h200, tmp_path):
    from h200.session import Deadline, Session

    session = Session(tmp_path, Deadline(1), smoke=True)
    assert str(session.sized(Workload.parse("gpt2-xl/b16/p16-960/n64"))) == "smoke/b3/p4-9/n6"
    real = Session(tmp_path, Deadline(1))
    assert str(real.sized(Workload.parse("gpt2-xl/b16/p16-960/n64"))) == "gpt2-xl/b16/p16-960/n64"


def test_ranks_are_timed_and_held_against_one_process(monkeypatch, tmp_path, capsys):
    """Ranks in turn in this process, which reads all rows: `test_ranks` has several."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    import ranks

    monkeypatch.setattr(ranks, "launch", lambda function, num_ranks, *args: function(*args))
    words = ["train:demo/b1/s8", "--device", "cpu", "--recipe", "baseline", "--repeats", "1"]
    assert ranks.main([*words, "--append", str(tmp_path)]) == 0
    rows = read(tmp_path / "cpu.jsonl")
    assert [row.workload for row in rows] == [f"train:demo/b1/s8/ranks{count}" for count in (1, 2)]
    assert all(row.equality == "passed" and row.recipe == "baseline" for row in rows)
    share = rows[1].tok_s / rows[0].tok_s / 2
    assert f"{share:.0%}" in capsys.readouterr().out
    right = ranks.gradients_of
    monkeypatch.setattr(ranks, "gradients_of", lambda trainer, batch: (1.0, right(trainer, batch)[1]))
    assert ranks.main([*words, "--ranks", "1"]) == 1
    with pytest.raises(SystemExit):
        ranks.main([*words, "--ranks", "0"])


def test_replicas_stand_beside_the_plain_server(monkeypatch, tmp_path, capsys):
    """Servers that are made up, sent to by threads of this process: `make test-ray` has real ones."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import replica_overhead

    said = {0: "a", 1: "a", 2: "a"}

    @contextmanager
    def server(*options, device, max_model_len):
        replicas = int(options[options.index("--replicas") + 1]) if "--replicas" in options else 0

        async def answer(asked):
            asked.stream()
            for _ in range(asked.body["max_tokens"]):
                asked.text(said[replicas])
            asked.finish()

        assert (device, max_model_len) == ("cpu", 32)
        with serving(answer) as url:
            yield url, None

    monkeypatch.setattr(replica_overhead, "server", server)
    monkeypatch.setattr(replica_overhead, "SOON_S", 0.0)
    monkeypatch.setattr(replica_overhead, "ProcessPoolExecutor", lambda most, context: ThreadPoolExecutor(most))
    words = ["serve:demo/r6/p2-9/n3/all", "--replicas", "2", "--requests", "4", "--turns", "1", "--gap-ms", "1"]
    assert replica_overhead.main([*words, "--clients", "2", "--append", str(tmp_path)]) == 0
    rows = read(tmp_path / "cpu.jsonl")
    assert [row.provider for row in rows[::2]] == ["eet_lab-http", "eet_lab-ray1", "eet_lab-ray2"]
    assert {row.workload for row in rows} == {"serve:demo/r6/p2-9/n3/all", "serve:demo/r4/p16/n16/one"}
    assert all(row.equality == "passed" for row in rows)
    assert rows[0].tok_s == pytest.approx(18 / rows[0].total_ms.p50 * 1e3, rel=1e-3)
    assert "x the tokens/s of one" in capsys.readouterr().out
    said[1] = "b"
    assert replica_overhead.main([*words, "--replicas", "1", "--append", str(tmp_path)]) == 1
    assert [row.equality == "passed" for row in read(tmp_path / "cpu.jsonl")[6:]] == [True] * 2 + [False] * 2
