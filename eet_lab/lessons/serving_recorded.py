"""Lesson 7's runs on GPUs: the highest load that each policy sustains, and a simulation beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eet_lab.figures.serving import highest_loads, in_percent
from eet_lab.lessons import recorded
from eet_lab.lessons.show import Shown, noted, table
from eet_lab.scheduling.agreement import Compared
from eet_lab.scheduling.policies import POLICIES
from eet_lab.words import brief

H200 = "H200, 2026-11-25"
SHORT, LONG = "U[2,100]", "U[5,500]"
TIMES = (("TTFT", "ttft_ms"), ("time per token", "tpot_ms"))
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
        _there(f"bert-base, fp16, captured passes, {_on(kept)}; the last column: without captures, on an {H200}"),
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
    by_chunk = {words: each["agreement"] for words, each in kept["found"].items()}
    rows = []
    for name in next(iter(by_chunk.values())):
        cells = [f"{name}, {next(iter(by_chunk.values()))[name]['unit']}"]
        for numbers in by_chunk.values():
            one = Compared(**{field: numbers[name][field] for field in Compared._fields})
            cells += [brief(one.simulated), brief(one.measured), in_percent(one)]
        rows.append(cells)
    chunks = [words.rpartition("chunk=")[2] for words in by_chunk]
    head = ["", *(f"{what}, chunk {chunk}" for chunk in chunks for what in ("simulated", "measured", "error"))]
    worst = max(abs(each["error"]) for numbers in by_chunk.values() for each in numbers.values())
    return Shown(
        _there(f"Llama-1b, fp16, {kept['requests']} requests, {brief(kept['rate'])} a second, {_on(kept)}"),
        table(head, rows),
        "The same trace, which no cost table was made of, as the simulator serves it and as the engine did. The "
        f"simulation is at most {100 * worst:.0f} % off. Smaller chunks bring no first token sooner here: a prompt "
        "takes more passes then, and each reads all weights, however few tokens it has.",
        *_documents(),
    )


def _documents() -> tuple[Any, ...]:
    """The same of a chat in which a prompt is now and then a document: as measured."""
    kept = recorded.kept("h100-simulated-documents-llama-1b")
    by_chunk = {words.rpartition("chunk=")[2]: each["measured"] for words, each in kept["found"].items()}
    times = [(f"{title} {p}, ms", key, p) for title, key in TIMES for p in ("p50", "p95", "p99")]
    rows = [[name, *(brief(each[key][p]) for each in by_chunk.values())] for name, key, p in times]
    whole, chunked = by_chunk.values()
    return (
        _there(
            f"Llama-1b, fp16, {kept['requests']} requests of {kept['lengths']} tokens, {brief(kept['rate'])} a "
            f"second, {_on(kept)}"
        ),
        table(["", *(f"measured, chunk {chunk}" for chunk in by_chunk)], rows),
        "Where one prompt of 200 is a document, who comes while it is read waits for all of it, or for a chunk: of 100 "
        f"first tokens 95 come within {brief(whole['ttft_ms']['p95'])} ms or {brief(chunked['ttft_ms']['p95'])}. The "
        f"slowest of 100 come no sooner ({brief(whole['ttft_ms']['p99'])} ms or {brief(chunked['ttft_ms']['p99'])}): "
        "among them are those of the documents, which are read in 16 passes then.",
    )


def _on(kept: Mapping[str, Any]) -> str:
    """The GPU, the day and the commit."""
    source = kept["source"]
    return f"on an {source['device'].removeprefix('NVIDIA ')}, {source['date'][:10]}, {source['commit'][:7]}"


def _there(where: str) -> Any:
    return noted(f"Not this machine: recorded with {where}.", "recorded")


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
