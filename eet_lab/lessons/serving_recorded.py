"""Lesson 7's runs on GPUs: the highest load that each policy sustains, and a simulation beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eet_lab.figures.serving import highest_loads, in_percent
from eet_lab.lessons import recorded
from eet_lab.lessons.show import Shown, table, there
from eet_lab.scheduling.agreement import COMPARED, Compared
from eet_lab.scheduling.policies import POLICIES
from eet_lab.words import brief

H200 = "H200, 2026-11-25"
SHORT, LONG = "U[2,100]", "U[5,500]"
TIMES = {title: metric for metric, title in COMPARED.items()}
PADDED, PROGRAM, PACKED = "naive_padding", "dynamic_program", "token_budget"


def policies_on_gpus() -> Shown:
    """The most texts a second of which 99 % are read within 50 ms, by policy: simulated beside measured."""
    kept, before = recorded.kept("h100-policies-bert-base"), recorded.kept("h200-policies-bert-base")["found"]
    now = kept["found"]
    pairs = [(lengths, policy) for lengths in (LONG, SHORT) for policy in now[lengths]]
    rows = [[lengths, POLICIES[policy].title, *_of(now[lengths][policy], before[lengths].get(policy))]
            for lengths, policy in pairs]  # fmt: skip
    head = ["tokens", "policy", "simulated, H100", "measured, H100", "error", "measured, H200"]
    short, long = (
        {policy: _compared(policy, found).measured for policy, found in now[lengths].items()}
        for lengths in (SHORT, LONG)
    )
    panels = {lengths: [_compared(*item) for item in found.items()] for lengths, found in now.items()}
    return Shown(
        there(
            f"recorded with bert-base, fp16, captured passes, {_on(kept)}; the last column: without captures, on an "
            f"{H200}"
        ),
        highest_loads(panels, "The highest load with p99 within 50 ms, on an H100"),
        table(head, rows),
        f"Packing serves the most: on {LONG} and {SHORT} it comes to {_times(long, PACKED, PROGRAM)} and "
        f"{_times(short, PACKED, PROGRAM)} times the dynamic program. The dynamic program comes to "
        f"{_times(long, PROGRAM, PADDED)} and {_times(short, PROGRAM, PADDED)} times naive padding: short texts have "
        "few pads to save. Many small batches cost its host little, since passes are captured, and since all batches "
        "of a plan are one read: one is laid out while another is computed. Without captured passes it was never in "
        "time. Each number is one run. Where others use the host too, runs differ by more than policies do.",
    )


def simulated_on_gpus() -> Shown:
    """A decoder's times under continuous batching, simulated beside measured, for two sizes of chunk; then those of
    traffic in which a few prompts are long.
    """
    kept = recorded.kept("h100-simulated-llama-1b")
    by_chunk = _by_chunk(kept)
    names = next(iter(by_chunk.values()))["agreement"]
    worst = max(abs(number["error"]) for each in by_chunk.values() for number in each["agreement"].values())
    return Shown(
        there(_with_llama(kept, "requests")),
        _beside(by_chunk, names),
        "The same trace, which no cost table was made of, as the simulator serves it and as the engine did. The "
        f"simulation is at most {100 * worst:.0f} % off here. Smaller chunks bring no first token sooner: a prompt "
        "takes more passes then, and each reads all weights, however few tokens it has.",
        *_documents(),
    )


def _documents() -> tuple[Any, ...]:
    """The same of a chat in which a prompt is now and then a document."""
    kept = recorded.kept("h100-simulated-documents-llama-1b")
    by_chunk = _by_chunk(kept)
    (whole, chunked), (of_whole, of_chunked) = (
        [each[what] for each in by_chunk.values()] for what in ("measured", "agreement")
    )
    whole, chunked = whole["ttft_ms"], chunked["ttft_ms"]
    return (
        there(_with_llama(kept, f"requests of {kept['lengths']} tokens")),
        _beside(by_chunk, [f"{title} {p}" for title in TIMES for p in ("p50", "p95", "p99")]),
        "Where one prompt of 200 is a document, a request that arrives meanwhile waits until the whole document is "
        "read, or, with chunks, only until the current chunk is. Few requests meet one here: of 100 first tokens 95 "
        f"come within {brief(whole['p95'])} ms, or {brief(chunked['p95'])}. But the slowest of 100 comes after "
        f"{brief(chunked['p99'])} ms with chunks instead of {brief(whole['p99'])}. The documents pay for it: each "
        "takes 16 passes, and its own first token comes later.",
        f"The simulator foresees it: with chunks its TTFT p99 is {_off(of_chunked, 'TTFT p99')} off, and its time per "
        f"token p99 {_off(of_chunked, 'time per token p99')}; where prompts are read at once, "
        f"{_off(of_whole, 'TTFT p99')} and {_off(of_whole, 'time per token p99')}. The slowest of 100 are 30 requests "
        "here, most of them documents with chunks: a few others more or less decide what is told of them.",
    )


def _with_llama(kept: Mapping[str, Any], requests: str) -> str:
    return f"recorded with Llama-1b, fp16, {kept['requests']} {requests}, {brief(kept['rate'])} a second, {_on(kept)}"


def _by_chunk(kept: Mapping[str, Any]) -> dict[str, Any]:
    """What was found, by the size of the chunk."""
    return {words.rpartition("chunk=")[2]: each for words, each in kept["found"].items()}


def _beside(by_chunk: Mapping[str, Any], names: Iterable[str]) -> Any:
    """A table of those numbers, simulated beside measured; what was measured alone has nothing beside it."""
    rows = []
    for name in names:
        cells = [_cells(each, name) for each in by_chunk.values()]
        rows.append([f"{name}, {cells[0][0]}", *(cell for _, *three in cells for cell in three)])
    head = ["", *(f"{what}, chunk {chunk}" for chunk in by_chunk for what in ("simulated", "measured", "error"))]
    return table(head, rows)


def _cells(found: Mapping[str, Any], name: str) -> list[str]:
    """The unit, and what was simulated and measured, and the error."""
    if name not in found["agreement"]:
        title, _, percentile = name.rpartition(" ")
        return ["ms", "", brief(found["measured"][TIMES[title]][percentile]), ""]
    one = _agreed(found["agreement"], name)
    return [one.unit, brief(one.simulated), brief(one.measured), in_percent(one)]


def _agreed(agreement: Mapping[str, Any], name: str) -> Compared:
    return Compared(**{field: agreement[name][field] for field in Compared._fields})


def _off(agreement: Mapping[str, Any], name: str) -> str:
    return f"{100 * abs(_agreed(agreement, name).error):.0f} %"


def _on(kept: Mapping[str, Any]) -> str:
    """The GPU, the day and the commit."""
    source = kept["source"]
    return f"on an {source['device'].removeprefix('NVIDIA ')}, {source['date'][:10]}, {source['commit'][:7]}"


def _compared(policy: str, found: Mapping[str, Any]) -> Compared:
    return Compared(POLICIES[policy].title, "texts/s", found["simulated_per_s"], found["measured_per_s"])


def _of(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[str]:
    """Cells of one policy; before is what was measured elsewhere, which may be nothing."""
    one = _compared(PADDED, now)
    late = "not run" if before is None else f"not in time at {brief(before['measured_per_s'])}"
    last = late if before is None or before["at"] is None else brief(before["measured_per_s"])
    return [brief(one.simulated), brief(one.measured), in_percent(one), last]


def _times(rates: Mapping[str, float], one: str, other: str) -> str:
    return f"{rates[one] / rates[other]:.1f}"
