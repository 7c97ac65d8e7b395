"""Renew generated tables: techniques from the registry, measurements from `benchmarks/*.jsonl`.

`python tools/readme.py` writes them between their markers, the most wanted into the README and all of them into
`benchmarks/README.md`; `--check` only says whether they are in step.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from eet_lab.bench.rows import OURS, TRAIN, Row, digits, markdown, newest, percent, read
from eet_lab.bench.workloads import Stream
from eet_lab.labels import less_than_all
from eet_lab.technique import registry
from eet_lab.words import MiB

ROOT = Path(__file__).resolve().parent.parent

MODELS = (
    ("gpt2-xl/b1/p128/n128", "tpot_ms"),
    ("gpt2/b1/p128/n128", "tpot_ms"),
    ("gpt2-xl/b8/p512/n128", "tpot_ms"),
    ("l16-h1024/b4/p128/n896", "total_ms"),
    ("l16-h1024/b4/p512/n512", "total_ms"),
    ("l16-h1024/b4/p896/n128", "total_ms"),
    ("l24-h2048/b4/p512/n512", "total_ms"),
    ("gpt2-xl/b16/p16-960/n64", "ttft_ms"),
    ("gpt2-xl/b32/p64-500/n64", "tpot_ms"),
    ("llama-1b/b1/p128/n128", "tpot_ms"),
    ("llama-1b/b16/p1024/n128", "tpot_ms"),
    ("qwen3-0.6b/b1/p128/n128", "tpot_ms"),
    ("qwen3-8b/b1/p128/n64", "tpot_ms"),
    ("serve:llama-1b/r1/p128/n128/all", "tpot_ms"),
    ("serve:llama-1b/r256/p100-1024/n512/all", "total_ms"),
    ("serve:llama-1b/r256/p100-1024/n100-1024/all", "total_ms"),
    ("encode:bert-base/t2048/p5-500", "total_ms"),
    *(
        (f"{TRAIN}{batch}", "total_ms")
        for batch in (
            "transformer-big/b8/s64", "transformer-base/b64/s64", "bert-base/b32/s128", "bert-base/b32/s5-101",
            "vit-b-32/b128", "gpt2/b8/s1024", "gpt2/b64/s1024",
        )
    ),
)  # fmt: skip
OPS = (
    "decode_attention/b1/kv1024/h25/d64",
    "decode_attention/b16/kv1024/h25/d64",
    "decode_attention/b32/kv4096/h32g8/d128",
    "prefill_attention/b8/s2048/h25/d64",
    "prefill_attention/b8/s64-2048/h25/d64/packed",
    "norm_linear/t1/n4800/c1600",
    "norm_linear/t1/n6400/c1600/gelu_tanh",
    "linear_residual/t1/n1600/c6400",
    "norm/t8192/c1600",
    "softmax/t8192/c1600",
    *(f"norm_backward/t8192/c{channels}" for channels in (512, 1024, 4096)),
    "cross_entropy/t8192/v50257",
    "linear_cross_entropy/t8192/c768/v50257",
    "adamw/n124M",
)
GPU = "H200"
"""What has measured all rows but those that say another."""
TOLD = 0.01
"""A later time of ours is told where it is off by this share."""
BATCH = "gpt2-xl/b16/p16-960/n64"
STREAM = Stream.parse("gpt2-xl/r200/p1-960/n16")
PREFIX = "/shared"
WORDS = {"tpot_ms": "a token", "total_ms": "in all", "ttft_ms": "to the first token"}
A_STEP = "a step (the ceiling is that of arithmetic)"
NOTHING = "No rows yet."
RECORDED = "recorded"
"""The run of rows of systems that cannot run beside ours."""


def techniques() -> str:
    """A row for each technique, in canonical order."""
    lines = ["| technique | what it does | needs | numerics |", "|---|---|---|---|"]
    for t in (technique() for technique in registry().values()):
        needs = [f"`{name}`" for name in t.requires]
        if reason := t.unavailable("cpu"):
            needs.append(_gpu(reason))
        lines.append(f"| `{t.name}` | {t.summary} | {', '.join(needs) or '–'} | {t.numerics} |")
    return "\n".join(lines)


def _gpu(reason: str) -> str:
    """What is needed where no GPU is, and how new, if the reason says so."""
    oldest = re.search(r"needs compute capability (\d+)\.(\d+)", reason)
    return f"an NVIDIA GPU of sm_{oldest[1]}{oldest[2]} or newer" if oldest else "an NVIDIA GPU"


def models(rows: Sequence[Row]) -> str:
    """A line a workload, of its last race: our fastest, how near to the ceiling its steps are, and the others."""
    lines = []
    for workload, metric in MODELS:
        words = A_STEP if workload.startswith(TRAIN) else WORDS[metric]
        own = [row for row in rows if row.workload == workload]
        lines.append(_line(f"`{workload}`, ms {words}", own, metric, 1))
    return _table(lines, share="% of ceiling, a step")


def ops(rows: Sequence[Row]) -> str:
    """The same for single ops, in microseconds."""
    whole = [row for row in rows if not row.equality.startswith("not compared")]  # those that do the whole op
    own = {op: [row for row in whole if row.workload == f"op:{op}"] for op in OPS}
    return _table([_line(f"`{op}`", own[op], "total_ms", 1e3) for op in OPS])


def batch_memory(rows: Sequence[Row]) -> str:
    """What the last race of one batch held beyond weights, libraries and KV cache; least first."""
    race = _last_race([row for row in rows if row.workload == BATCH])
    found = ((row.activation_bytes, row) for row in race if row.activation_bytes)
    lines = [
        f"| {row.provider} | {digits(held / MiB)} | {_over_bound(row)} | {digits((row.peak_bytes or 0) / MiB)} |"
        for held, row in sorted(found, key=lambda pair: pair[0])
    ]
    head = ["| | activations, MiB | of the lower bound | peak, MiB |", "|---|--:|--:|--:|"]
    return "\n".join([*head, *lines]) if lines else NOTHING


def stream_memory(rows: Sequence[Row]) -> str:
    """What a stream of requests allocated in its last run, recipe by recipe; the fastest first."""
    ours = [row for row in rows if row.workload == str(STREAM) and row.provider.startswith(OURS) and row.total_ms]
    runs = ((row.total_ms.p50, row) for row in ours if row.total_ms and row.run == ours[-1].run)
    num_tokens = STREAM.requests * STREAM.new_tokens
    lines = [
        f"| {_named(row.recipe)} | {num_tokens / ms * 1e3:.0f} | {row.driver_allocations} "
        f"| {row.step_allocations} | {_over_bound(row)} |"
        for ms, row in sorted(runs, key=lambda pair: pair[0])
    ]
    head = ["| recipe | tokens/s | of the driver | of torch, a step | of the bound |", "|---|--:|--:|--:|--:|"]
    return "\n".join([*head, *lines]) if lines else NOTHING


def shared_prefix(rows: Sequence[Row]) -> str:
    """What its last run says of requests that begin alike, in process, over HTTP and asked again; the slowest first."""
    shared = [row for row in rows if PREFIX in row.workload and row.provider.startswith(OURS) and row.tok_s]
    ours = sorted(shared, key=lambda row: row.date)
    runs = ((row.tok_s or 0, row) for row in ours if row.run == ours[-1].run)
    lines = [
        f"| {row.provider} | {'on' if 'prefix_caching' in row.recipe else 'off'} | {digits(tok_s)} "
        f"| {digits(_p50(row, 'ttft_ms'))} | {digits(_p50(row, 'e2e_ms'))} | {percent(row.prefix_hit_rate)} |"
        for tok_s, row in sorted(runs, key=lambda pair: pair[0])
    ]
    head = [
        "| | prefix caching | tokens/s | TTFT p50, ms | end to end p50, ms | found, % |",
        "|---|---|--:|--:|--:|--:|",
    ]
    return "\n".join([f"`{ours[-1].workload}`, {ours[-1].gpu}:", "", *head, *lines]) if lines else NOTHING


def _p50(row: Row, what: str) -> float | None:
    return (row.percentiles or {}).get(what, {}).get("p50")


def _over_bound(row: Row) -> str:
    if not (row.activation_bytes and row.lower_bound_bytes):
        return "–"
    return f"{row.activation_bytes / row.lower_bound_bytes:.2f}"


def _named(recipe: str) -> str:
    text, reserved, _ = recipe.partition(" (reserved)")
    return f"`{less_than_all(text)}`{', reserved' if reserved else ''}"


def _table(lines: Sequence[str | None], share: str = "% of ceiling") -> str:
    known = [line for line in lines if line]
    return "\n".join([f"| | EET Lab | {share} | others |", "|---|--:|--:|---|", *known]) if known else NOTHING


def _line(name: str, rows: Sequence[Row], metric: str, scale: float) -> str | None:
    """None where we were not measured. A lossy recipe does not count: it computes something else."""
    race = _last_race(rows)
    took = sorted(
        ((getattr(row, metric).p50 * scale, row) for row in race if getattr(row, metric)), key=lambda pair: pair[0]
    )
    ours = [pair for pair in took if _counts(pair[1])]
    if not ours:
        return None
    best, row = ours[0]
    others = (f"{other.provider} {digits(each)}" for each, other in took if not other.provider.startswith(OURS))
    is_decode = metric != "ttft_ms" and "prefill" not in name  # the floor is that of a decode step's reads
    share = percent(row.mfu or (row.share_of_ceiling if is_decode else None))
    where = [] if GPU in row.gpu else [row.gpu.split()[1]]
    name = f"{name} ({', '.join([*where, row.date[:10]])})"
    since = _alone_since(row, rows, metric)
    later = f" ({digits(getattr(since, metric).p50 * scale)} on {since.date[5:10]})" if since else ""
    return f"| {name} | **{digits(best)}**{later} | {share} | {', '.join(others) or '–'} |"


def _alone_since(row: Row, rows: Sequence[Row], metric: str) -> Row | None:
    """The fastest of our newest run on such a GPU after that of a row, if it took another time."""
    later = [each for each in rows if each.date > row.date and (each.gpu, each.dtype) == (row.gpu, row.dtype)]
    ours = [each for each in later if each.run != row.run and getattr(each, metric) and _counts(each)]
    if not ours:
        return None
    run = max(ours, key=lambda each: each.date).run
    best = min((each for each in ours if each.run == run), key=lambda each: getattr(each, metric).p50)
    ratio = getattr(best, metric).p50 / getattr(row, metric).p50
    return best if abs(ratio - 1) >= TOLD else None


def _last_race(rows: Sequence[Row]) -> list[Row]:
    """The last run in which transformers ran beside us (or else others, or else the last of ours), and what was
    recorded elsewhere.
    """
    runs: dict[str, list[Row]] = {}
    newest = max((row for row in rows if row.provider == OURS), key=lambda row: row.date, default=None)
    for row in (row for row in rows if newest is None or row.dtype == newest.dtype):  # another type: another workload
        runs.setdefault(row.run, []).append(row)
    recorded = runs.pop(RECORDED, [])
    own = [run for run in runs.values() if any(row.provider == OURS for row in run)]
    own.sort(key=lambda run: run[-1].date)
    races = [run for run in own if not all(row.provider.startswith(OURS) for row in run)]
    whole = [run for run in races if any(row.provider.startswith("hf-") for row in run)]
    return [*(whole or races or own or [[]])[-1], *recorded]


def _counts(row: Row) -> bool:
    return row.provider == OURS and not _is_lossy(row) and _is_equal(row)


def _is_lossy(row: Row) -> bool:
    words = (word.partition(":")[0] for word in row.recipe.split(","))
    return any(registry()[word].numerics == "lossy" for word in words if word in registry())


def _is_equal(row: Row) -> bool:
    return row.equality == "passed" or row.equality.startswith("not checked")


def renewed(page: str, tables: Mapping[str, str], name: str = "README.md") -> str:
    """A page's text with each table between its markers, `<!-- name:begin -->` and `<!-- name:end -->`."""
    for table_name, table in tables.items():
        begin, end = f"<!-- {table_name}:begin -->", f"<!-- {table_name}:end -->"
        head, found, rest = page.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{name} lacks the markers {begin} and {end}; put them where the table belongs.")
        page = f"{head}{begin}\n\n{table}\n\n{end}{tail}"
    return page


def main(argv: Sequence[str] | None = None) -> int:
    """Write, or with --check compare (exit code 1 where they differ)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--benchmarks", type=Path, default=ROOT / "benchmarks")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    rows = [row for path in sorted(args.benchmarks.glob("*.jsonl")) for row in read(path)]
    pages = {
        args.readme: {
            "techniques": techniques(),
            "benchmarks": models(rows),
            "ops": ops(rows),
            "batch_memory": batch_memory(rows),
            "stream_memory": stream_memory(rows),
            "shared_prefix": shared_prefix(rows),
        },
        args.benchmarks / "README.md": {"rows": markdown(newest(rows)) or NOTHING},
    }
    differs = False
    for path, tables in pages.items():
        old = path.read_text(encoding="utf-8")
        new = renewed(old, tables, path.name)
        if args.check:
            print(f"{path} is in step" if new == old else f"{path} is out of step: run python tools/readme.py")
        else:
            path.write_text(new, encoding="utf-8")
        differs |= new != old
    return int(args.check and differs)


if __name__ == "__main__":
    sys.exit(main())
