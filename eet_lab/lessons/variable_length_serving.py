"""Lesson 7, serving requests of varying length: which of those that wait should share a pass?"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from eet_lab.bench.rows import Row
from eet_lab.figures.serving import batches, cost_of_one, cost_surface, latency_against_load, told_table
from eet_lab.lessons import recorded
from eet_lab.lessons.prediction import Prediction, after_prediction
from eet_lab.lessons.show import Shown, table, there
from eet_lab.scheduling import ContinuousBatching, DynamicProgram, LengthBuckets, NaivePadding, NoBatching, TokenBudget
from eet_lab.scheduling.choices import one_by_one_rate
from eet_lab.scheduling.cost import Costs, CostTable, EncoderCost
from eet_lab.scheduling.cost_files import load_cost
from eet_lab.scheduling.dynamic_program import FIGURE_8, FIGURE_8_LENGTHS, cheapest, figure_8_costs
from eet_lab.scheduling.policy import BasePolicy, Plan, W
from eet_lab.scheduling.record import Record
from eet_lab.scheduling.served import Served
from eet_lab.scheduling.simulator import simulate_traffic
from eet_lab.scheduling.sweep import LoadPoint, sweep
from eet_lab.scheduling.traffic import Gamma, LogNormal, Traffic, Uniform, make_traffic
from eet_lab.words import brief, percent

LENGTHS, ONE = Uniform(5, 250), Uniform(1, 1)
NUM, ROWS = 1000, 8
LOAD, HEAVY = 0.8, 1.1
"""What comes, as a share of what can be served one by one."""
LOADS = (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3)
LIMIT_MS = 5000.0
NONE, NAIVE, BUCKETS, PROGRAM, PACKED = "No batching", "Naive padding", "Length buckets", "Dynamic program", "Packed"
POLICIES = {
    NONE: NoBatching(),
    NAIVE: NaivePadding(max_rows=ROWS),
    BUCKETS: LengthBuckets(width=32, max_rows=ROWS),
    PROGRAM: DynamicProgram(max_rows=ROWS),
    PACKED: TokenBudget(budget=1024, max_rows=ROWS),
}
CHOICES = ("sooner", "at about the same time", "later")


@cache
def example() -> EncoderCost:
    """What passes of bert-base took on a CPU."""
    found = load_cost("bert-base-cpu")
    assert isinstance(found, EncoderCost)  # the file says so
    return found


@cache
def one_by_one() -> float:
    """Texts a second that can be served one by one."""
    return one_by_one_rate(LENGTHS, ONE, example())


def traffic(load: float, cv: float = 1.0) -> Traffic:
    """The lesson's texts, at such a share of what can be served one by one."""
    return make_traffic(NUM, Gamma(load * one_by_one(), cv), LENGTHS)


@cache
def served(name: str, load: float, cv: float = 1.0) -> Served:
    """The lesson's texts as one of POLICIES serves them."""
    return simulate_traffic(traffic(load, cv), POLICIES[name], example())


def costs() -> Shown:
    """The cost table as a surface, and what a text costs in a batch."""
    cost = example()
    short, long, most = cost.lengths[0], cost.lengths[-1], cost.batches[-1]
    alone, shared = ([cost.at(length, rows) / rows for length in (short, long)] for rows in (1, most))
    saved = [percent(1 - less / more) for more, less in zip(alone, shared, strict=True)]
    return Shown(
        there(told_table(cost)),
        cost_surface(cost, "What a pass costs: every point was measured, between them it is interpolated"),
        cost_of_one(cost, "What a text costs in a batch"),
        f"A text of {short} tokens takes {brief(alone[0])} ms alone, and {brief(shared[0])} ms as one of {most}: each "
        f"pass has a fixed cost, which its texts share, and a batch saves {saved[0]}. A text of {long} tokens takes "
        f"{brief(alone[1])} ms alone and {brief(shared[1])} ms as one of {most}, and a batch saves {saved[1]}: one "
        "text nearly fills this processor. It takes more tokens to fill a GPU than one thread of a CPU, so expect "
        "curves there that fall further; `eet-lab simulate --model` measures yours. There the fixed cost is mostly the "
        "host's: Python launched the kernels of a pass of bert-base in some 8 ms beside an H200, whatever it read, and "
        "a dynamic program that plans many small batches paid that for each. `cuda_graphs` captures a pass for each "
        "bucket of sizes and launches it at once, so that small batches cost what their kernels take.",
    )  # fmt: skip


def predict() -> Prediction:
    """Does padding to the longest help half of the requests? Reveals both medians."""
    alone, naive = (served(name, LOAD).percentiles["e2e_ms"]["p50"] for name in (NONE, NAIVE))
    return Prediction(
        f"{NUM:,} texts of {LENGTHS.low} to {LENGTHS.high} tokens come at random, at {percent(LOAD)} of what can be "
        f"served one by one. Now up to {ROWS} of those that wait are read together, padded to the longest. Is the "
        "answer to a typical text there sooner?",
        choices=CHOICES,
        reveal=f"Later: half of the texts are answered within {brief(alone)} ms one by one, and within "
        f"{brief(naive)} ms in padded batches. The figure below shows why.",
    )


@after_prediction
def naive(guess: Prediction) -> Shown:
    """No batching and naive padding on the same texts, on one clock."""
    runs = {name: served(name, LOAD) for name in (NONE, NAIVE)}
    return Shown(
        batches(runs, "The same texts, one by one and in padded batches: the first 100 seconds", (0.0, 100e3)),
        f"You said: {guess}. A box is a pass, as wide as it takes and as high as the tokens that it computes. Texts "
        "that come while a pass runs wait, and are padded to the longest of them. While a large batch runs, more come, "
        "so the next batch is large, too, and most likely has a long text in it. In the end "
        f"{percent(runs[NAIVE].waste)} of all that is computed are pads, and more comes than can be served: the queue "
        f"grows for as long as texts come at this rate. One by one, the model is busy {percent(runs[NONE].busy)} of "
        "the time. So naive batching can lose to no batching at all. It ignores length.",
    )


def _played(groups: Sequence[Sequence[int]]) -> Served:
    """Requests of figure 8, by their places in it, all there from the start, in such batches one after the other."""
    num, end_ms = len(FIGURE_8_LENGTHS), 0.0
    record = Record(num, None, None)
    for group in groups:
        lengths = [FIGURE_8_LENGTHS[number] for number in group]
        begin_ms, end_ms = end_ms, end_ms + FIGURE_8[max(lengths), len(group)]
        record.add(begin_ms, end_ms, len(group), sum(lengths), 0, len(group) * max(lengths) - sum(lengths))
        for number in group:
            record.start[number], record.first[number], record.last[number] = begin_ms, end_ms, end_ms
    came = Traffic(np.zeros(num), np.array(FIGURE_8_LENGTHS), np.ones(num, int), "figure 8")
    return record.served(came, "figure 8", "TurboTransformers")


def figure_8() -> Shown:
    """TurboTransformers' own example: five requests one by one, and as its dynamic program cuts them."""
    order = sorted(range(len(FIGURE_8_LENGTHS)), key=FIGURE_8_LENGTHS.__getitem__)
    lengths = [FIGURE_8_LENGTHS[place] for place in order]
    slices = cheapest(lengths, figure_8_costs, len(lengths))
    cut = sorted((sorted(order[begin:end]) for begin, end in slices), key=min)
    groups = {"one by one": [[place] for place in range(len(order))], "dynamic program": cut}
    runs = {name: _played(of) for name, of in groups.items()}
    told = {
        name: [" + ".join(str(FIGURE_8_LENGTHS[at]) for at in group) for group in of] for name, of in groups.items()
    }
    alone, least = (float(run.passes.end_ms[-1]) for run in runs.values())
    rates = [f"{5e3 / ms:.0f}" for ms in (alone, least)]
    return Shown(
        batches(runs, "Figure 8 of TurboTransformers: five requests that wait together", queue=False, texts=told),
        f"One by one, requests of {', '.join(map(str, FIGURE_8_LENGTHS))} tokens take {alone:.2f} ms. The dynamic "
        f"program sorts them by length and tries, for each request, every size of the batch that ends with it: "
        f"{least:.2f} ms. Only neighbours in length share a batch, so few pads are computed. That is {rates[0]} and "
        f"{rates[1]} requests a second. (The caption in the paper counts rounds of five, "
        f"{1e3 / alone:.1f} and {1e3 / least:.1f} a second, and calls them responses.)",
    )  # fmt: skip


@after_prediction
def policies(guess: Prediction) -> Shown:
    """All policies on the lesson's texts, at both loads."""
    rows = []
    for load in (LOAD, HEAVY):
        for name in POLICIES:
            one = served(name, load)
            times = (brief(one.percentiles["e2e_ms"][each]) for each in ("p50", "p99"))
            waste = percent(one.waste) if one.waste else "0"
            rows.append([f"{percent(load)}: {name}", *times, waste, brief(one.requests_per_s)])
    program, packed = (served(name, HEAVY).percentiles["e2e_ms"]["p50"] for name in (PROGRAM, PACKED))
    window = (60e3, 90e3)
    return Shown(
        table(["load, policy", "p50 ms", "p99 ms", "pads", "texts a second"], rows),
        batches({name: served(name, HEAVY) for name in (PROGRAM, PACKED)}, "Half a minute at the higher load", window),
        "Buckets need no cost table and lose little to the dynamic program, which is the best of all cuts for the "
        "texts that wait now, and for padded batches. Packing lays texts end to end: there are no pads left to "
        f"save. At {percent(HEAVY)}, half of the texts take {brief(program)} ms by the dynamic program, and "
        f"{brief(packed)} ms packed, in the order in which they came.",
    )  # fmt: skip


@cache
def swept() -> dict[str, list[LoadPoint]]:
    """Points of all policies at all loads."""
    rates = [load * one_by_one() for load in LOADS]
    return sweep(lambda rate: traffic(rate / one_by_one()), POLICIES, example(), rates)


@after_prediction
def loads(guess: Prediction) -> Shown:
    """Latency against load, and the highest load within a limit."""
    highest = {
        name: max((point.rate for point in points if point.times["e2e_ms"]["p99"] <= LIMIT_MS), default=0.0)
        for name, points in swept().items()
    }
    said = ", ".join(f"{name} {brief(rate)}" for name, rate in highest.items())
    return Shown(
        latency_against_load(swept(), "Latency against load: solid p99, dotted p50, hollow where it is always busy"),
        f"At low load all policies are the same: texts hardly ever share a pass. A policy shows its worth where its "
        f"curve turns up. Of the loads above, the highest at which 99 of 100 texts are answered within "
        f"{LIMIT_MS / 1e3:.0f} s, in texts a second: {said}. A hollow mark depends on how long the traffic lasts: "
        "there more comes than can be served, and each text waits longer than the one before.",
    )  # fmt: skip


def on_the_h200() -> Shown:
    """What padding, sorting and packing come to on a GPU, of texts that all wait from the start."""
    rows = [row for row in recorded.rows() if row.workload == "encode:bert-base/t2048/p5-500"]
    last = max(row.date for row in rows if row.provider == recorded.OURS and "packed_prefill" in row.recipe)
    [run] = {row.run for row in rows if row.date == last}
    side = {row: row.total_ms.p50 for row in rows if row.run == run and row.total_ms}
    names = {"hf-sdpa": "transformers, padded", "hf-sdpa-sorted": "transformers, sorted by length and padded"}
    lines = [
        [names.get(row.provider, recorded.who(row)), f"{ms:,.0f}", brief(2048e3 / ms)]
        for row, ms in sorted(side.items(), key=lambda item: -item[1])
    ]
    return Shown(
        there([*side]),
        table(["2,048 texts of 5 to 500 tokens, bert-base, fp16", "ms in all", "texts a second"], lines),
        "Here all texts wait from the start, so this is throughput and no latency. The order is the same: sorting "
        "saves most of the pads, packing all of them.",
    )


GROUPS, JOINING = "Packed groups", "Continuous batching"
ANSWERING = {
    GROUPS: TokenBudget(budget=1024, max_rows=ROWS),
    JOINING: ContinuousBatching(max_rows=ROWS, budget=256, chunk=128),
}
ASKED = make_traffic(150, Gamma(2.5), LogNormal(40, 0.8, 300), LogNormal(40, 0.9, 300))
"""Questions to a model that generates: prompts and answers are short mostly, and long at times."""
WINDOW_MS = (8000.0, 11000.0)
DEADLINE_MS = 2000.0
OVER = 1.3
BURSTS = 4.0


@cache
def generating() -> CostTable:
    """What passes of the demo model took on a CPU."""
    return load_cost("demo-cpu")


@cache
def answered(name: str) -> Served:
    """The questions as one of ANSWERING serves them."""
    return simulate_traffic(ASKED, ANSWERING[name], generating())


@after_prediction
def continuous(guess: Prediction) -> Shown:
    """Groups that end with their longest answer, and requests that join, on the same questions."""
    runs = {name: answered(name) for name in ANSWERING}
    rows = []
    for name, run in runs.items():
        first, token, end = (run.percentiles[key] for key in ("ttft_ms", "tpot_ms", "e2e_ms"))
        rows.append([name, *(brief(each[p]) for each in (first, token, end) for p in ("p50", "p99"))])
    groups, joining = (run.percentiles for run in runs.values())
    slower = joining["tpot_ms"]["p50"] / groups["tpot_ms"]["p50"] - 1
    head = ["", *(f"{name} {p} ms" for name in ("TTFT", "TPOT", "end to end") for p in ("p50", "p99"))]
    return Shown(
        there(told_table(generating())),
        batches(runs, "Rows of each pass: three seconds of the same questions", WINDOW_MS, height="rows"),
        table(head, rows),
        "A model that generates makes a pass for each token of an answer. A packed group has no pads, but it ends with "
        "its longest answer: its boxes become lower, and those who come meanwhile wait. With continuous batching a "
        "request joins as soon as a row is free (lesson 6), so the first token of half of the requests comes after "
        f"{brief(joining['ttft_ms']['p50'])} ms and not {brief(groups['ttft_ms']['p50'])}, and of 99 of 100 after "
        f"{brief(joining['ttft_ms']['p99'])} and not {brief(groups['ttft_ms']['p99'])}. The median "
        f"time per token is {percent(slower)} longer: prompts are read beside answers.",
    )


@dataclass(frozen=True)
class ShortestFirst(BasePolicy):
    """Run the shortest of all that wait together, packed.

    It optimizes how soon most are served; long requests starve.
    """

    name: ClassVar[str] = "shortest_first"
    title: ClassVar[str] = "Shortest first"
    is_packed: ClassVar[bool] = True

    def next(self, waiting: Collection[W], now_ms: float, costs: Costs) -> Plan[W]:
        return Plan([sorted(waiting, key=lambda each: each.length)[:ROWS]])


def by_length(run: Served) -> tuple[float, float]:
    """The longest that one of the shortest tenth took, and one of the longest tenth, in ms."""
    low, high = np.percentile(run.traffic.lengths, (10, 90))
    short, long = run.traffic.lengths <= low, run.traffic.lengths >= high
    return float(run.e2e_ms[short].max()), float(run.e2e_ms[long].max())


@cache
def shortest_first() -> Served:
    """The lesson's texts, far more than can be served, the shortest first."""
    return simulate_traffic(traffic(OVER), ShortestFirst(), example())


def in_time(run: Served) -> float:
    """The share of the requests that are answered before the deadline."""
    return float((run.e2e_ms <= DEADLINE_MS).mean())


@after_prediction
def ignored(guess: Prediction) -> Shown:
    """Starvation, deadlines and bursts: what policies do not look at."""
    runs = {name: served(name, OVER) for name in POLICIES if name != NAIVE} | {ShortestFirst.title: shortest_first()}
    rows = []
    for name, run in runs.items():
        bursts = percent(in_time(served(name, LOAD, BURSTS))) if name in POLICIES else ""
        half = brief(run.percentiles["e2e_ms"]["p50"])
        rows.append([name, half, *map(brief, by_length(run)), percent(in_time(run)), bursts])
    _, starved = by_length(shortest_first())
    packed = float(runs[PACKED].e2e_ms.max())
    return Shown(
        table(
            [
                f"load {percent(OVER)}", "p50 ms", "longest of the shortest tenth, ms",
                "longest of the longest tenth, ms", f"within {DEADLINE_MS / 1e3:.0f} s",
                f"within {DEADLINE_MS / 1e3:.0f} s, load {percent(LOAD)} in bursts",
            ],
            rows,
        ),
        f"Starvation: under far more load than can be served, the shortest first answers "
        f"{percent(in_time(shortest_first()))} of the texts in time, more than all others. A long text pays for it: it "
        f"waits for up to {brief(starved / 1e3)} s, until no shorter one comes. Packed in the order of arrival, none "
        f"takes more than {brief(packed / 1e3)} s. No policy of this lab starves a request: the oldest is in every "
        "plan. But the dynamic program runs all batches of a plan before it looks again, so what comes meanwhile waits "
        "for the whole plan.",
        "Deadlines: no policy here knows any. Under more load than can be served, they all go on to answer texts whose "
        f"reader has left; a server rejects such requests on arrival instead. Bursts: the last column is the lower "
        f"load, but texts come in bursts (their gaps vary by {brief(BURSTS)} times their mean). The same number of "
        "texts a second is answered, and far fewer in time: an average load says little about a tail.",
    )  # fmt: skip


OPS = tuple(
    [f"norm/{size}" for size in ("t64/c1600", "t8192/c768", "t8192/c1600", "t8192/c4096", "t8192/c12288")]
    + [f"softmax/{size}" for size in ("t64/c1600", "t8192/c768", "t8192/c1600", "t8192/c4096")]
)
ROWS_AT_ONCE = ("eet_lab", "eet_lab-2-rows", "eet_lab-4-rows")


def row_kernels() -> dict[str, dict[str, Row]]:
    """Rows of the H200 by op and provider: ours with 1, 2 and 4 rows at once, and torch."""
    return {op: {row.provider: row for row in recorded.rows() if row.workload == f"op:{op}"} for op in OPS}


def kernels() -> Shown:
    """TurboTransformers' batch reduction: several rows at once, beside one row and torch."""
    found, lines = row_kernels(), []
    ratios, gains = list[float](), list[float]()
    for op, of in found.items():
        us = {name: 1e3 * row.total_ms.p50 for name, row in of.items() if row.total_ms}
        (one, *several), torch = (us[name] for name in ROWS_AT_ONCE), us[f"torch-{op.partition('/')[0]}"]
        floor = of[recorded.OURS].floor_ms or 0.0
        lines.append([op, *map(brief, (one, *several, torch, 1e3 * floor))])
        ratios.append(torch / one)
        gains.append(1 - min(several) / one)
    num_gains = sum(gain > 0 for gain in gains)
    return Shown(
        there([row for of in found.values() for row in of.values()]),
        table(["op (t rows of c)", "1 row at once, us", "2 rows", "4 rows", "torch", "its bytes alone"], lines),
        "TurboTransformers' first idea was a kernel that reduces several rows at once: each shuffle of a reduction "
        "waits for the one before, and a second row keeps the processor busy meanwhile. Our kernels have "
        f"the number of rows as a knob. On this GPU, 2 or 4 rows at once save {percent(max(gains))} at best; in "
        f"{num_gains} of {len(gains)} sizes they save anything, and in the others they lose. With thousands of rows "
        "there are other warps to run while one waits. Read once and kept in registers, one row at a time is "
        f"{brief(min(ratios))} to {brief(max(ratios))} times as fast as torch's kernel. And the softmax of attention, "
        "for which the idea was made, is no kernel of its own any more: fused attention keeps no scores.",
    )
