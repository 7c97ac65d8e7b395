"""How a time is taken: the clocks of host and device, the one loop of runs in turn, and Stop."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from eet_lab.bench.paired import LEAST_EFFECT, LEAST_PAIRS, Change
from eet_lab.devices import once_per_device
from eet_lab.errors import PromptError, first_line
from eet_lab.progress import Cancel, Progress, raise_if_cancelled

REGION_MS = 100.0
"""A region of calls between two looks at the clock is at least about this long."""


UNDISTURBED = 0.9
"""CPU seconds of the calling thread for each second of work on the CPU, below which others took the processor away.

Its own seconds only: those of torch's other threads would make up for what it lost."""

SHARED = "the processor was shared: other programs kept this one waiting"

Item = TypeVar("Item")
Run = TypeVar("Run")


class HostTime(NamedTuple, Generic[Run]):
    """What some work gave, and the seconds that it took on the host: in all, and of this thread's processor."""

    value: Run
    seconds: float
    cpu_s: float

    @property
    def was_disturbed(self) -> bool:
        """Whether other programs kept work on the CPU waiting."""
        return self.cpu_s < UNDISTURBED * self.seconds


def on_host(work: Callable[[], Run]) -> HostTime[Run]:
    """Time work that ends when it is done, as on a CPU, or with its results on the host."""
    start, cpu_start = time.perf_counter(), time.thread_time()
    value = work()
    return HostTime(value, time.perf_counter() - start, time.thread_time() - cpu_start)


def host_us(work: Callable[[], Any], calls: int) -> float:
    """Microseconds of the host for each of so many calls in a row."""
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) * 1e6 / calls


class Stopwatch:
    """Marks times without waiting for the device; the first mark is made at once."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> int:
        """Note the time; returns the number of the mark."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())
        return len(self._marks) - 1

    def between_ms(self, first: int, second: int) -> float:
        """Milliseconds from one mark to a later one."""
        start, end = self._marks[first], self._marks[second]
        if not self._on_gpu:
            return (end - start) * 1e3
        end.synchronize()
        return start.elapsed_time(end)

    def read_ms(self) -> list[float]:
        """Milliseconds from the first mark to each later one."""
        return [self.between_ms(0, number) for number in range(1, len(self._marks))]


def took_ms(work: Callable[[], Any], device: str) -> float:
    """Milliseconds that one call takes on `device` ("cpu", or "cuda": that is what it launches)."""
    clock = Stopwatch(device)
    work()
    return clock.between_ms(0, clock.mark())


@once_per_device
def capture_stream(device: str) -> torch.cuda.Stream:
    """The stream on which calls are captured: a backward pass can be only where its forward pass ran on that one."""
    return torch.cuda.Stream()


def captured(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
    """The calls as one graph; what they return lives as long as it."""
    side = capture_stream("cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries make their workspaces at the first call, which can't be captured
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        # Kept until the capture ends: each call then writes to memory of its own, as its inputs are its own.
        kept = [call() for call in calls]
    del kept
    return graph


class Timed:
    """Calls that do the same, each on a copy of the inputs; `ms` is one region's mean.

    Their inputs come from memory only if all copies together are larger than the caches. On a GPU they are one graph
    where they can be captured, and are launched by the host one by one otherwise.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], device: str, can_be_captured: bool = True) -> None:
        self._num, self._device, self._rounds = len(calls), device, 1
        self._kept = calls  # a graph holds neither the inputs that it reads nor the code that it launches
        self._calls = [captured(calls).replay] if device == "cuda" and can_be_captured else calls
        self.ms()
        self._rounds = max(1, round(REGION_MS / (self.ms() * self._num)))

    def ms(self) -> float:
        """Milliseconds a call, over a region."""
        return took_ms(self._region, self._device) / self._rounds / self._num

    def _region(self) -> None:
        for _ in range(self._rounds):
            for call in self._calls:
                call()


MOST_REPEATS = 10_000

MOST_ROUNDS = 64
"""The most rounds of a series without a given number: with more, an interval hardly narrows."""

RECIPE_BUDGET_S = 2.0
"""Seconds of timed runs that each recipe may take, once there are `LEAST_PAIRS` rounds, where no budget is given."""

NARROW = 3 * math.log1p(LEAST_EFFECT)
"""Width of an interval that need not be narrower: half of the least effect on either side, beside that effect."""


class Rounds:
    """Numbers of rounds until enough is known: `for number in rounds`.

    `repeats`: exactly so many. None: at least `LEAST_PAIRS`, then two more at a time, in both orders, until every
    interval of `changes` is `NARROW`, or two more would take the timed runs past `budget_s` (None: `RECIPE_BUDGET_S`
    for each of `num_recipes`). Whether a change is told plays no part, since who stops once it is finds effects in
    noise; but for one that is doubtful, for which there are `SURE_PAIRS` in any case.
    """

    def __init__(
        self,
        repeats: int | None,
        budget_s: float | None = None,
        changes: Callable[[], Collection[Change]] = tuple,
        num_recipes: int = 2,
    ) -> None:
        self._repeats, self._changes = repeats, changes
        self._budget_s = RECIPE_BUDGET_S * num_recipes if budget_s is None else budget_s
        self._spent_s, self.done, self._begun = 0.0, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self._goes_on():
            start = time.perf_counter()
            self._begun = self.done + 1
            yield self.done
            self.done += 1
            self._spent_s += time.perf_counter() - start

    @property
    def expected(self) -> int:
        """How many there will be, at the pace so far; never fewer than were begun, two at a time."""
        if self._repeats is not None:
            return self._repeats
        begun = self._begun + self._begun % 2
        return max(LEAST_PAIRS, self._in_budget, begun)

    @property
    def _in_budget(self) -> int:
        """How many fit in the budget at the pace so far."""
        if not self.done or self._spent_s <= 0:
            return 0
        return math.floor(min(self._budget_s * self.done / self._spent_s, MOST_ROUNDS) / 2) * 2

    def _goes_on(self) -> bool:
        if self._repeats is not None:
            return self.done < self._repeats
        if self.done < LEAST_PAIRS or self.done % 2:
            return True
        found = self._changes()
        if any(change.is_doubtful for change in found):
            return True
        return self.done < max(LEAST_PAIRS, self._in_budget) and any(change.width > NARROW for change in found)


def check_repeats(repeats: int | None) -> None:
    """PromptError unless something can be timed that often; None: until enough is known."""
    if repeats is None:
        return
    if not isinstance(repeats, int) or not 1 <= repeats <= MOST_REPEATS:
        raise PromptError(f"repeats is {repeats!r}, but it must be a whole number from 1 to {MOST_REPEATS:,}.")


def check_budget(budget_s: float | None) -> None:
    """PromptError for what are no seconds; None: as many as `Rounds` gives."""
    if budget_s is None:
        return
    if not isinstance(budget_s, int | float) or not 0 <= budget_s < math.inf:
        raise PromptError(f"budget_s is {budget_s!r}, but it must be a finite number of seconds, 0 or more.")


def split(reasons: Mapping[str, str | None]) -> tuple[list[str], list[str]]:
    """The names that nothing speaks against, and a remark for each of the others."""
    remarks = [f"{name} is left out: {why}" for name, why in reasons.items() if why]
    return [name for name, why in reasons.items() if not why], remarks


def forget_compiled() -> None:
    """Have PyTorch forget what it compiled before: of one function it compiles a few variants, and then no more."""
    if "torch._dynamo" in sys.modules:  # else it has compiled nothing
        torch._dynamo.reset()


class LeftOut(Exception):
    """One who cannot do what is timed; says why."""


def missing(what: str, package: str, modules: Sequence[str], device: str) -> str | None:
    """Why another's kernels for GPUs cannot run on a device, or None."""
    if device != "cuda":
        return f"{what} needs an NVIDIA GPU"
    return None if all(map(find_spec, modules)) else f"{what} is not installed: pip install {package}"


no_liger = partial(missing, "Liger", "liger-kernel", ("liger_kernel", "triton"))


def ready(
    makers: Mapping[str, Callable[[], Item]], ours: Collection[str], runs: int, tally: Tally, cancel: Cancel | None
) -> tuple[dict[str, Item], list[str]]:
    """What the makers make, by name, and why the others are left out. Those in `ours` raise; others may fail.

    `tally` counts `runs` units of each that come later; those of who is left out do not come.
    """
    made, remarks = dict[str, Item](), list[str]()
    for name, make in makers.items():
        raise_if_cancelled(cancel, "The benchmark")
        tally.say(f"preparing {name}")
        try:
            made[name] = make()
        except LeftOut as why:
            remarks.append(f"{name} is left out: {why}")
        except Exception as error:
            if name in ours:
                raise
            remarks.append(f"{name} failed: {type(error).__name__}: {first_line(error)}")
            forget_compiled()
        tally.finish()
        if name not in made:
            tally.add(-runs)
    return made, remarks


@dataclass
class Series(Generic[Run]):
    """One who is timed in turn with others: what makes a run, and the runs that there are by now.

    `warm_ups` are the runs that it takes until one counts.
    """

    name: str
    run: Callable[[], Run]
    runs: list[Run] = field(default_factory=list)
    warm_ups: int = 1


def in_turn(
    series: Sequence[Series[Any]],
    rounds: Rounds,
    tally: Tally,
    cancel: Cancel | None = None,
    *,
    doing: str = "timing",
    on_round: Callable[[], None] | None = None,
) -> None:
    """A round after the other, A B C, then C B A: whoever goes first, and a drift, cancel over two rounds.

    Every run is a unit of `tally`, whose total goes with `rounds`. `on_round` is called between two rounds.
    Errors: Cancelled between two runs.
    """
    expected = rounds.expected
    for number in rounds:
        tally.add(len(series) * (rounds.expected - expected))
        expected = rounds.expected
        if number and on_round is not None:
            on_round()
        for each in series[::-1] if number % 2 else series:
            raise_if_cancelled(cancel, "The benchmark")
            tally.say(f"{doing} {each.name}, {number + 1} of {expected}")
            each.runs.append(each.run())
            tally.finish()
    tally.add(len(series) * (rounds.done - expected))


def warm_up(series: Sequence[Series[Run]], tally: Tally, cancel: Cancel | None) -> list[Series[Run]]:
    """Runs of each that are none of those that are timed, as many as its `warm_ups`."""
    first = [replace(each, runs=[]) for each in series]
    for number in range(max((each.warm_ups for each in first), default=0)):
        due = [each for each in first if number < each.warm_ups]
        in_turn(due, Rounds(1), tally, cancel, doing="warming up")
    return first


def after_warm_up(
    series: Sequence[Series[Any]], repeats: int, progress: Progress | None, cancel: Cancel | None
) -> None:
    """Runs of each that warm up, then so many of each in turn. Errors: Cancelled between two runs."""
    tally = Tally(sum(each.warm_ups + repeats for each in series), progress)
    warm_up(series, tally, cancel)
    in_turn(series, Rounds(repeats), tally, cancel)


def median_run(runs: Sequence[Run], key: Callable[[Run], float]) -> Run:
    """The run in the middle; of an even number the upper one."""
    return sorted(runs, key=key)[len(runs) // 2]


class Tally:
    """Counts finished units and passes them on. The time left is for whoever shows them to tell, with a `Clock`."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def say(self, message: str) -> None:
        """What is being done now."""
        if self._progress is not None:
            self._progress(self._done, self._total, message)

    def building(self, done: int, total: int, message: str) -> None:
        """A `Progress` for building kernels: a count of its own, whose pace tells nothing of the units."""
        if self._progress is not None:
            self._progress(done, total, f"building kernels: {message}")

    def add(self, units: int) -> None:
        """There are so many more units than was thought, or fewer."""
        self._total += units

    def finish(self, units: int = 1) -> None:
        """So many more units are done."""
        self._done += units
