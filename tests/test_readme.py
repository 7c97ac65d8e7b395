"""The README's tables come from data, and are in step with it."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2LMHeadModel

import eet_lab
from eet_lab.bench.measured import Spread
from eet_lab.bench.rows import read
from eet_lab.engine.slots import COLUMNS
from eet_lab.models.loading import DEMO
from eet_lab.technique import names_in_all, registry
from eet_lab.techniques.dependent_launch import OLDEST_GPU

ROOT = Path(__file__).resolve().parent.parent
MANY = ("serve:", "encode:")
SPEC = importlib.util.spec_from_file_location("readme", ROOT / "tools" / "readme.py")
readme = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(readme)


def test_the_readme_is_in_step(capsys):
    assert readme.main(["--check"]) == 0, capsys.readouterr().out


def test_tables_are_renewed_between_their_markers(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- techniques:begin -->old<!-- techniques:end -->\n"
        "<!-- benchmarks:begin --><!-- benchmarks:end --><!-- ops:begin --><!-- ops:end -->"
        "<!-- batch_memory:begin --><!-- batch_memory:end -->"
        "<!-- stream_memory:begin --><!-- stream_memory:end -->"
        "<!-- shared_prefix:begin --><!-- shared_prefix:end -->\nafter\n"
    )
    rows = tmp_path / "README.md"
    rows.write_text("<!-- rows:begin --><!-- rows:end -->")
    where = ["--readme", str(page), "--benchmarks", str(tmp_path)]
    assert readme.main([*where, "--check"]) == 1
    assert readme.main(where) == 0
    assert readme.main([*where, "--check"]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert all(f"`{name}`" in text for name in registry())


def test_a_technique_that_needs_a_newer_gpu_says_so_in_the_table():
    newer = f"an NVIDIA GPU of sm_{OLDEST_GPU[0]}{OLDEST_GPU[1]} or newer"
    needs = {line.split("|")[1].strip(" `"): line.split("|")[3] for line in readme.techniques().splitlines()[2:]}
    assert [name for name, words in needs.items() if newer in words] == ["dependent_launch"]
    assert needs["cuda_graphs"].endswith("an NVIDIA GPU ") and "GPU" not in needs["memory_reuse"]


def test_others_stand_beside_us_only_if_they_ran_beside_us():
    rows = [row for row in read(ROOT / "benchmarks" / "h200.jsonl") if row.workload == "gpt2-xl/b1/p128/n128"]
    ours = next(row for row in rows if row.provider == "eet_lab")
    peer = replace(ours, provider="a-peer", recipe="")
    [line] = readme.models([replace(peer, provider="of-another-day", run="0"), ours, peer]).splitlines()[2:]
    assert "a-peer" in line
    assert "of-another-day" not in line


def test_the_newest_run_is_told_whatever_its_type():
    rows = [row for row in read(ROOT / "benchmarks" / "h200.jsonl") if row.workload == "gpt2-xl/b1/p128/n128"]
    newer = next(row for row in rows if row.provider == "eet_lab")
    older = replace(newer, dtype="bfloat16", run="0", date="2026-01-02T00:00:00+00:00")
    [line] = readme.models([older, newer]).splitlines()[2:]
    assert newer.date[:10] in line and "2026-01-02" not in line


def test_a_step_s_share_stands_beside_no_time_to_the_first_token():
    """A share of the ceiling is that of a decode step; requests and texts come in steps of many sizes."""
    rows = read(ROOT / "benchmarks" / "h200.jsonl")
    shares = {line.split("`")[1]: line.split("|")[3].strip() for line in readme.models(rows).splitlines()[2:]}
    others = [
        workload
        for workload, metric in readme.MODELS
        if workload in shares and (metric == "ttft_ms" or workload.startswith(("serve:", "encode:")))
    ]
    assert len(others) >= 3 and all(shares[workload] == "–" for workload in others)
    assert all(share.isdigit() for workload, share in shares.items() if workload not in others)


def test_the_share_of_a_training_step_is_that_of_arithmetic():
    row = read(ROOT / "benchmarks" / "h200.jsonl")[0]
    row = replace(row, workload="train:gpt2/b8/s1024", provider="eet_lab", recipe="all", equality="passed")
    row = replace(row, total_ms=Spread(17.0, 17.0, 17.0), tpot_ms=None, floor_ms=None, mfu=0.512)
    line = readme.models([row]).splitlines()[-1]
    assert line.startswith("| `train:gpt2/b8/s1024`, ms a step") and "| **17** | 51 |" in line


def test_what_was_held_stands_beside_its_lower_bound():
    rows = read(ROOT / "benchmarks" / "h200.jsonl")
    ours, *others = readme.batch_memory(rows).splitlines()[2:]
    assert ours.startswith("| eet_lab |") and " 1.00 " in ours
    assert others and all("–" in line for line in others)
    reserved = [line for line in readme.stream_memory(rows).splitlines() if "reserved" in line]
    assert reserved and all("| 0 | 0 |" in line for line in reserved)
    everything = ",".join(names_in_all())
    paged = everything.replace("memory_reuse", "memory_reuse:kv=paged").replace(",cuda_graphs", "")
    assert readme._named(f"{paged},int8_weights") == "`all,-cuda_graphs,memory_reuse:kv=paged,int8_weights`"
    assert readme.batch_memory([]) == readme.stream_memory([]) == readme.NOTHING


def test_the_stream_table_is_of_our_last_run():
    rows = [row for row in read(ROOT / "benchmarks" / "h200.jsonl") if row.workload == str(readme.STREAM)]
    others = replace(rows[0], provider="a-peer", run="of another day")
    later = [replace(row, run="later") for row in rows[:2]]
    untimed = replace(rows[0], total_ms=None, run="later still")
    assert readme.stream_memory([*rows, others, *later, untimed]) == readme.stream_memory(later)
    assert len(readme.stream_memory(later).splitlines()) == 2 + len(later)
    assert "allocations of the driver" in readme.markdown(later) and "TTFT" not in readme.markdown(later)


def test_requests_that_begin_alike_stand_beside_each_other():
    row = next(row for row in read(ROOT / "benchmarks" / "h200.jsonl") if row.workload.startswith("serve:"))
    row = replace(
        row,
        workload="serve:any/r9/p20-30/shared10/n4/all",
        provider="eet_lab",
        recipe=(everything := ",".join(names_in_all())),
        tok_s=1000.0,
    )
    shared = replace(row, recipe=f"{everything},prefix_caching", tok_s=3000.0, prefix_hit_rate=0.874)
    kept, earlier = (
        replace(row, provider="eet_lab-http-cached", tok_s=9000.0),
        replace(row, run="earlier", tok_s=7.0, date="2026-11-01"),
    )
    lines = readme.shared_prefix([earlier, kept, shared, row, replace(row, provider="a-peer")]).splitlines()
    assert lines[0] == f"`{row.workload}`, {row.gpu}:"
    lines = lines[4:]
    assert [line.split("|")[1:4] for line in lines] == [
        [" eet_lab ", " off ", " 1,000 "],
        [" eet_lab ", " on ", " 3,000 "],
        [" eet_lab-http-cached ", " off ", " 9,000 "],
    ]
    assert [line.split("|")[6].strip() for line in lines] == ["–", "87", "–"]
    assert readme.PREFIX in (ROOT / "benchmarks" / "h200" / "parts.py").read_text()
    assert readme.shared_prefix([earlier, replace(row, workload="serve:other")]).count("\n") == 4
    assert readme.shared_prefix([]) == readme.NOTHING


def test_a_later_run_without_others_does_not_hide_the_race():
    rows = [row for row in read(ROOT / "benchmarks" / "h200.jsonl") if row.workload == "gpt2-xl/b1/p128/n128"]
    ours = next(row for row in rows if row.provider == "eet_lab")
    peer, alone = replace(ours, provider="a-peer", recipe=""), replace(ours, run="later")
    assert readme.models([ours, peer, alone]) == readme.models([ours, peer])
    first = replace(peer, provider="hf-sdpa")
    assert readme.models([ours, first, alone, replace(peer, run="later")]) == readme.models([ours, first])
    assert readme.models([alone]).count("|") > readme.models([]).count("|"), "one that was alone is better than none"


def test_a_line_has_its_date_and_what_our_newest_run_took_where_that_is_another_time():
    rows = [row for row in read(ROOT / "benchmarks" / "h200.jsonl") if row.workload == "gpt2-xl/b1/p128/n128"]
    ours = replace(next(row for row in rows if row.provider == "eet_lab"), date="2026-11-22T01:00:00")
    peer, took = replace(ours, provider="a-peer", recipe=""), ours.tpot_ms.p50
    later = [
        replace(ours, run=f"later-{day}", date=f"2026-11-{day}T01:00:00", tpot_ms=Spread(ms, ms, ms))
        for day, ms in ((24, 2 * took), (25, 1.05 * took))
    ]
    line = readme.models([ours, peer, *later]).splitlines()[2]
    assert "ms a token (2026-11-22) |" in line
    assert f"| **{readme.digits(took)}** ({readme.digits(1.05 * took)} on 11-25) |" in line
    for other in ({"gpu": "NVIDIA H100 80GB HBM3"}, {"equality": "failed"}, {"tpot_ms": ours.tpot_ms}):
        [line] = readme.models([ours, peer, replace(later[1], **other)]).splitlines()[2:]
        assert f"| **{readme.digits(took)}** |" in line


def test_what_the_readme_says_of_builds_is_in_the_file_that_it_links():
    [said] = re.findall(r"\[build\]\(benchmarks/h100-build\.json\) in (.*?)\.\s", (ROOT / "README.md").read_text())
    found = json.loads((ROOT / "benchmarks" / "h100-build.json").read_text())
    seconds = [max(found["seconds_until"].values()), *sorted(found["with_start_s"].values())]
    assert re.findall(r"\d+", said) == [f"{each:.0f}" for each in seconds]


def test_fusion_maps_that_are_told_of_are_of_the_model_that_their_workload_names():
    texts = [(ROOT / "README.md").read_text(), (ROOT / "notebooks" / "08_fast_training.ipynb").read_text()]
    told = [call for text in texts for call in re.findall(r"fusion_map\((.*?/s\d+)", text.replace("\\", ""))]
    assert len(told) == 2
    for call in told:
        [model], [workload] = re.findall(r'load\("(.+?)"\)', call), re.findall(r'"train:(.+?)/', call)
        assert model == workload


def test_what_serves_imports_the_client_that_it_uses():
    section = (ROOT / "README.md").read_text().split("## Serve a model")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    assert "openai." in block and block.startswith("import openai")


def test_missing_markers_are_named(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="<!-- techniques:begin -->"):
        readme.main(["--readme", str(page)])


def test_every_file_that_the_readme_names_exists():
    text = (ROOT / "README.md").read_text()
    links = [path for path in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) if path]
    newcomer = re.findall(r"`((?:eet_lab|csrc|notebooks)/[\w/.]+\.\w+)`", text)
    assert len(newcomer) >= 6
    assert [path for path in links + newcomer if not (ROOT / path).exists()] == []


def test_the_newcomers_path_stays_short():
    text = (ROOT / "README.md").read_text()
    files = re.findall(r"`(eet_lab/[\w/]+\.py)`", text)
    assert sum(len((ROOT / path).read_text().splitlines()) for path in files) < 1000


def test_what_the_readme_says_of_memory_runs_as_pasted(capsys):
    section = (ROOT / "README.md").read_text().split("## Memory you can see")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    told = capsys.readouterr().out
    assert told.startswith("2 rows of 4 + 64 tokens: fits.")
    assert "Lifetime(" in told


def test_requests_that_join_run_as_pasted_and_slots_have_the_columns_that_are_told(capsys):
    section = (ROOT / "README.md").read_text().split("Requests that join and leave")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    exec(compile(block, "README.md", "exec"), cell := {"__name__": "__main__", "eet_lab": eet_lab})
    engine, request = cell["engine"], cell["request"]
    assert len(request.generated) == capsys.readouterr().out.count("new ones>") == 20
    assert f"A slot has {COLUMNS:,} columns" in section and engine.slots.num_slots == 16
    late = engine.add([1, 2, 3])
    engine.step()
    engine.cancel(late)
    assert late.finish_reason == "cancelled" and engine.slots.idle


def test_the_logits_of_a_prompt_are_had_as_pasted():
    section = (ROOT / "README.md").read_text().split("How well a decoder predicts")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    exec(compile(block, "README.md", "exec"), cell := {"__name__": "__main__", "eet_lab": eet_lab})
    ids = cell["model"].encode("Return a list of")
    theirs = GPT2LMHeadModel.from_pretrained(DEMO, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = theirs.to(cell["model"].device)(torch.tensor([ids], device=cell["model"].device)).logits[0]
    [got] = cell["found"]
    assert torch.allclose(got.float(), wanted, atol=1e-3 if got.dtype == torch.float32 else 0.1)


def test_training_runs_as_pasted_but_for_fewer_steps(tmp_path, monkeypatch, capsys):
    section = (ROOT / "README.md").read_text().split("## Train a model")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    for long, short in (("=100", "=4"), ("=128", "=32"), ("=16", "=1"), ("steps=10,", "steps=1,")):
        assert block.count(long) == 1
        block = block.replace(long, short)
    (tmp_path / "texts.jsonl").write_text('{"text": "%s"}\n' % ("A list is a sequence of items. " * 40))
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__", "eet_lab": eet_lab})
    told = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[1]) for line in told if not line.startswith("held out")]
    assert len(told) == 5 and len(losses) == 4 and losses[-1] < losses[0]
    assert (tmp_path / "run" / "trainer.pt").exists() and eet_lab.load(tmp_path / "trained").config.vocab_size


def test_a_technique_of_your_own_runs_as_pasted(forgotten, few_rounds):
    section = (ROOT / "README.md").read_text().split("## Your own technique")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    exec(compile(block, "README.md", "exec"), cell := {"__name__": "__main__"})
    assert cell["result"].selection.recipe == "static_cache"
    assert cell["result"].parity.verdict == "identical"
