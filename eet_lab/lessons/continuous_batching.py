"""Lesson 6, continuous batching: why wait for the longest answer of a batch, if another request could have its slot?"""

from __future__ import annotations

import random
from functools import cache
from statistics import mean

from eet_lab.bench import Change
from eet_lab.bench.timing import Rounds, Series, Tally, in_turn
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.figures.slot_lanes import lanes, lanes_by_slots, pass_tokens
from eet_lab.lessons.prediction import Prediction, after_prediction
from eet_lab.lessons.show import Shown, here, table
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_device
from eet_lab.scheduling import PageLedger, Request, Schedule, SharedPageLedger
from eet_lab.scheduling.simulate import Simulated, simulate
from eet_lab.technique import Recipe
from eet_lab.words import brief, counted, percent

REQUESTS = (
    (12, 24), (40, 8), (6, 64), (24, 16), (64, 12), (9, 40), (18, 6), (30, 28), (8, 52), (48, 10), (14, 20), (20, 36),
)  # fmt: skip
"""(prompt tokens, new tokens): in each group of four, one answer is far longer than the others."""

SLOTS, CHUNK = 4, 16
GROUPS, JOINS = "in groups", "joining"
BASE = "pre_padding,mask_removal,memory_reuse,packed_prefill"
RECIPE = f"{BASE},continuous_batching:rows={SLOTS}:chunk={CHUNK}"


@cache
def served(joins: bool, slots: int = SLOTS) -> Simulated:
    """The twelve requests, all there from the start, in groups or joining."""
    return simulate(REQUESTS, Schedule(CHUNK, None, slots, joins))


def both(slots: int = SLOTS) -> dict[str, Simulated]:
    """The requests served in groups, and joining."""
    return {GROUPS: served(False, slots), JOINS: served(True, slots)}


def requests() -> Shown:
    """The lesson's requests, and what a group of them costs."""
    head = ["request", *(f"{number}" for number in range(1, len(REQUESTS) + 1))]
    prompts, answers = zip(*REQUESTS, strict=True)
    lines = [["prompt tokens", *map(str, prompts)], ["new tokens", *map(str, answers)]]
    return Shown(
        table(head, lines),
        f"All {len(REQUESTS)} wait from the start. There are {SLOTS} slots; a request reads at most {CHUNK} tokens of "
        "its prompt in a pass (a chunk). The pass that reads the last of them gives its first token, and each later "
        "pass gives one more.",
    )


def predict() -> Prediction:
    """How many passes does joining save? Reveals the two counts."""
    groups, joined = (len(each.passes) for each in both().values())
    return Prediction(
        f"In groups of {SLOTS}, these requests take {groups} passes: a group begins when the one before is done. How "
        "many passes are saved if a request may join as soon as a slot is free?",
        reveal=f"{groups - joined}: {joined} passes in place of {groups}. The figure below shows where they went.",
        number=(0, groups),
        unit="passes",
    )


@after_prediction
def picture(guess: Prediction) -> Shown:
    """Slots over passes, in groups and joining, for 2, 4 and 8 slots."""
    groups, joined = both().values()
    saved = len(groups.passes) - len(joined.passes)
    least = -(-sum(map(len, joined.passes)) // SLOTS)
    return Shown(
        lanes_by_slots({slots: both(slots) for slots in (2, 4, 8)}, SLOTS),
        f"You said {guess}, and {saved} are saved with {SLOTS} slots. A gap in a lane is a slot that reads nothing. "
        "Above, each gap ends where the longest answer of its group ends. Below, gaps are left only at the end, when "
        f"no request waits. Both do the same work: {sum(map(len, joined.passes))} boxes of one pass, which need at "
        f"least {least} passes of {SLOTS} slots. Move the slider: more slots waste more in a group, as the longest of "
        "eight answers is longer than the longest of two.",
    )


BESIDE = ((4, 30), (4, 30), (4, 30), (160, 4))
"""Three short prompts, whose rows decode when a long one comes."""
COMES = 6
CHUNKS = {"chunks of 16": 16, "chunks of 64": 64, "no limit": None}


@cache
def beside(chunk: int | None) -> Simulated:
    """A long prompt that joins three rows that decode."""
    return simulate(BESIDE, Schedule(chunk, None, SLOTS, True), arrivals=(0, 0, 0, COMES))


def longest_gap(run: Simulated) -> int:
    """Tokens of the largest pass between two tokens of the first request, which decodes."""
    first, *later = run.told(0)
    return max(sum(tokens) for tokens in run.tokens[first + 1 : later[-1] + 1])


def first_token(run: Simulated) -> tuple[int, int]:
    """Passes, and tokens in them, from the arrival of the long prompt to its first token."""
    until = run.told(len(BESIDE) - 1)[0] + 1
    return until - COMES, sum(map(sum, run.tokens[COMES:until]))


def chunks() -> Shown:
    """The same long prompt, in chunks of several sizes, beside rows that decode."""
    runs = {name: beside(chunk) for name, chunk in CHUNKS.items()}
    rows = [[name, f"{longest_gap(run)}", *(f"{each}" for each in first_token(run))] for name, run in runs.items()]
    small, _, whole = runs.values()
    times = longest_gap(whole) / longest_gap(small)
    return Shown(
        pass_tokens(runs, f"A prompt of {BESIDE[-1][0]} tokens comes while {len(BESIDE) - 1} rows decode"),
        table(
            [
                "", "longest gap of a row that decodes (tokens of a pass)", "TTFT of the long prompt (passes)",
                "TTFT (tokens in these passes)",
            ],
            rows,
        ),
        "A row that decodes gets one token in each pass, so it waits as long as the pass takes. A bar's height is what "
        f"the pass costs. Without a limit, one pass is {brief(times)} times as high as with chunks of "
        f"{CHUNKS['chunks of 16']}: three readers see their text stop. With chunks it goes on, but the long prompt "
        f"waits: its first token comes after {first_token(small)[0]} passes and not {first_token(whole)[0]}. Its "
        f"tokens are the same; what it pays for is the decode tokens beside each chunk ({first_token(small)[1]} tokens "
        f"in place of {first_token(whole)[1]}), and that each pass reads all weights once more. A budget limits the "
        "height of all bars, however many prompts come at once.",
    )  # fmt: skip


class Runner:
    """The twelve requests on an engine that lives on, with the tokens and the times of its runs."""

    def __init__(self, model: Model, joins: bool) -> None:
        self.engine = Engine(model.decoder, Recipe.parse(f"{RECIPE}:joins={joins}", model.device).parts)
        draw, vocabulary = random.Random(6), model.config.vocab_size
        self._asked = [
            ([draw.randrange(1, vocabulary) for _ in range(prompt)], Settings(new)) for prompt, new in REQUESTS
        ]
        self.engine.reserve(SLOTS, max(map(sum, REQUESTS)) - 2, Settings(2))
        self.totals_ms, self.ttfts_ms = list[float](), list[float]()
        self.tokens: tuple[tuple[int, ...], ...] = ()

    def run(self) -> None:
        """Add all, and step until each has its tokens."""
        first, last = dict[Request, float](), 0.0
        added = [self.engine.add(prompt, settings) for prompt, settings in self._asked]
        while any(len(request.generated) < request.max_new_tokens for request in added):
            for request, _, t_ms in self.engine.step():
                first.setdefault(request, t_ms)
                last = t_ms
        self.totals_ms.append(last)
        self.ttfts_ms.append(mean(first.values()))
        self.tokens = tuple(tuple(request.generated) for request in added)


BUDGET_S = 4.0
Changes = tuple[Change, Change]


@on_its_device
def paired(model: Model) -> tuple[Changes, bool]:
    """What joining changes of the total and of the mean TTFT, in pairs of runs; and whether the tokens are the same."""
    runners = Runner(model, False), Runner(model, True)
    try:
        for runner in runners:  # to warm up
            runner.run()
            runner.totals_ms, runner.ttfts_ms = [], []
        rounds = Rounds(None, BUDGET_S, lambda: _changes(*runners))
        in_turn([Series(RECIPE, runner.run) for runner in runners], rounds, Tally(0, None))
        return _changes(*runners), runners[0].tokens == runners[1].tokens
    finally:
        for runner in runners:
            runner.engine.close()


def _changes(groups: Runner, joining: Runner) -> Changes:
    total, ttft = (
        Change.of(before, after)
        for before, after in ((groups.totals_ms, joining.totals_ms), (groups.ttfts_ms, joining.ttfts_ms))
    )
    assert total is not None and ttft is not None  # no run takes no time
    return total, ttft


@after_prediction
def measured(guess: Prediction, model: Model) -> Shown:
    """The twelve requests on the engine, in groups and joining, in turn until the interval of the pairs is narrow."""
    (total, ttft), same = paired(model)
    groups, joined = (len(each.passes) for each in both().values())
    gains_more = total.verdict == ttft.verdict == "better" and ttft.ratio < total.ratio
    sooner = (
        " The mean TTFT gains more than the total: a request that waits no longer waits for the longest answer of the "
        "group before."
        if gains_more
        else ""
    )
    rows = [
        ["passes (counted)", f"{groups}", f"{joined}", f"{groups / joined:.2f} × fewer"],
        ["until all are done, ms", *_sides(total), total.words("total_ms")],
        ["requests per second", *(brief(len(REQUESTS) * 1e3 / ms) for ms in (total.before, total.after)), ""],
        ["mean TTFT, ms", *_sides(ttft), ttft.words("ttft_ms")],
    ]
    moved = ""
    if total.is_of_pairs or ttft.is_of_pairs:
        moved = "A drift has moved the medians apart, so a × that is not their ratio is the median of the pairs' own. "
    return Shown(
        here(model),
        table(["", GROUPS, JOINS, ""], rows),
        f"Medians of {counted(total.num_pairs, 'pair')} of runs; in brackets, the interval of the paired ratio. {moved}"
        f"Same tokens for each request? {'Yes' if same else 'No'}. You said {guess}, and {groups - joined} are saved. "
        "Time does not follow the count exactly: a pass in which several prompts are read takes longer than one of "
        f"{SLOTS} tokens.{sooner}",
    )


def _sides(change: Change) -> list[str]:
    return [brief(change.before), brief(change.after)]


PAGE, FEW = 8, 14
"""Columns of a page, and a number of pages at which requests are preempted."""


@cache
def paged(num_pages: int) -> Simulated:
    """The twelve requests joining, their keys and values in so many pages."""
    return simulate(REQUESTS, Schedule(CHUNK, None, SLOTS, True), PageLedger(num_pages + 1, PAGE, SLOTS))


@cache
def enough() -> int:
    """The least number of pages with which nothing waits for one: as many passes as in slots of full length."""
    best, num_pages = len(served(True).passes), -(-max(map(sum, REQUESTS)) // PAGE)
    while len(paged(num_pages).passes) > best or paged(num_pages).gave_way:
        num_pages += 1
    return num_pages


def preempted() -> Shown:
    """The same stream with fewer and fewer pages."""
    slab, few = SLOTS * -(-(max(map(sum, REQUESTS)) - 1) // PAGE), paged(FEW)
    reads = sum(request.num_columns for request in few.requests)
    rows = []
    for num_pages in (slab, enough(), 20, FEW, 10):
        run = paged(num_pages)
        left = f"{len(run.gave_way)}", f"{run.read_twice}", percent(run.read_twice / reads)
        rows.append([f"{num_pages}", f"{len(run.passes)}", *left, percent(run.idle_share)])
    (number, at), *_ = few.gave_way
    others = ", ".join(f"request {request + 1} in pass {when + 1}" for request, when in few.gave_way[1:])
    return Shown(
        lanes({f"{FEW} pages of {PAGE} columns": few}),
        table(["pages", "passes", "preempted", "tokens read twice", "of all reads", "slots idle"], rows),
        f"With {FEW} pages, request {number + 1} is preempted first, in pass {at + 1}: a row needs a page, "
        f"none is free, and {number + 1} is the newest that runs. Later it is {others}. A preempted request waits in "
        "front of all others, and reads its prompt and its own answer again (red). The oldest is never preempted, so "
        f"all are done in the end. {slab} pages are what {SLOTS} slots of full length hold. {enough()} are enough to "
        "lose nothing, since few requests are long and they are not at their longest at the same time. With fewer "
        "pages, fewer requests run and more wait: most of the lost time is idle slots, and not what is read twice. (A "
        "request is admitted only if a page is left for each that runs: else it would be preempted at once.)",
    )


INSTRUCTIONS = 52
"""Tokens that all prompts begin with: no whole number of pages."""

WITHOUT, WITH = "each reads its whole prompt", "prefix caching"


@cache
def prefixed(shares: bool, instructions: int = INSTRUCTIONS) -> Simulated:
    """The twelve requests joining, with so many tokens of instructions in front of each prompt."""
    lengths = [(instructions + prompt, new) for prompt, new in REQUESTS]
    num_pages = 1 + SLOTS * -(-max(map(sum, lengths)) // PAGE)  # as many as slots of full length hold
    ledger = (SharedPageLedger if shares else PageLedger)(num_pages, PAGE, SLOTS)
    return simulate(lengths, Schedule(CHUNK, None, SLOTS, True), ledger, shared_tokens=instructions)


def shared() -> Shown:
    """Both ways on one axis of passes, and what is read."""
    runs, rows = {WITHOUT: prefixed(False), WITH: prefixed(True)}, []
    for name, run in runs.items():
        waits = mean(run.told(number)[0] + 1 for number in range(len(run.requests)))
        rows.append([name, f"{len(run.passes)}", f"{read(run)}", percent(found_share(run)), f"{waits:.1f}"])
    one, rest = INSTRUCTIONS // PAGE * PAGE, INSTRUCTIONS % PAGE
    return Shown(
        lanes(runs),
        table(["", "passes", "prompt tokens read", "of them found", "pass of the first token, mean"], rows),
        f"The instructions have {INSTRUCTIONS} tokens, and a page {PAGE}: {one} tokens fill pages, which all requests "
        f"share. The {rest} behind them are in a page with tokens of the request's own, and are read by each. Request "
        "1 reads the instructions, and requests that could join meanwhile wait: they would only read the same tokens "
        "once more. Nothing is saved on answers: a row that decodes reads one token in each pass, as before.",
    )


def read(run: Simulated) -> int:
    """Prompt tokens that were read."""
    return sum(prompts for _, prompts in run.tokens)


def found_share(run: Simulated) -> float:
    """The share of prompt tokens that were there."""
    return 1 - read(run) / sum(len(request.prompt) for request in run.requests)
