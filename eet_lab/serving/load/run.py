"""Put load on a server, and wait for what comes of it; or let it run, in a notebook, and follow it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

from eet_lab.errors import TrafficError
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.traffic import Traffic
from eet_lab.scheduling.whole import check_whole, is_real, is_whole
from eet_lab.serving.load.apart import run_apart
from eet_lab.serving.load.open_loop import Job, OpenLoop
from eet_lab.serving.load.result import Loaded
from eet_lab.serving.load.target import Prompt, Target
from eet_lab.words import told

TIMEOUT_S = 600.0
MOST_S = 1e6


def run_load(
    target: Target | str,
    traffic: Traffic,
    prompts: Sequence[Prompt] | None = None,
    *,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
    keep_text: bool = False,
    apart: bool = False,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Loaded:
    """Send each request when it is due (open loop), and return once all are answered, refused or lost.

    Without `prompts`, one for each request, they are drawn with `seed`, as long as the traffic says. A request
    without an answer `timeout_s` after it was due is lost. `apart` sends from a process of its own, so that a server
    in this one keeps its processor. Errors: SetupError for a URL where no server answers; TrafficError; Cancelled.
    """
    job = job_of(target, traffic, prompts, seed, timeout_s, keep_text)
    if apart:
        return run_apart(job, progress, cancel)
    # On a thread of its own: a notebook's has a loop that runs already.
    is_left = threading.Event()
    try:
        return Loading(lambda *_: run_here(job, progress, _Either(is_left, cancel))).result()
    except BaseException:  # an interrupt ends what is sent, too
        is_left.set()
        raise


class _Either(NamedTuple):
    """Stops where one of them does."""

    own: Cancel
    given: Cancel | None

    def is_set(self) -> bool:
        return self.own.is_set() or (self.given is not None and self.given.is_set())


def run_here(job: Job, progress: Progress | None = None, cancel: Cancel | None = None) -> Loaded:
    """Run a job on this thread."""
    begin, exchanges = asyncio.run(OpenLoop(job, progress, cancel).run())
    return Loaded.of(job.traffic, job.target.url, begin, exchanges, job.keep_text)


def job_of(
    target: Target | str,
    traffic: Traffic,
    prompts: Sequence[Prompt] | None,
    seed: int,
    timeout_s: float,
    keep_text: bool,
) -> Job:
    """What shall be sent, checked."""
    target = Target(target) if isinstance(target, str) else target
    if not is_real(timeout_s) or not 0 < timeout_s <= MOST_S:
        raise TrafficError(f"timeout_s is {told(timeout_s)}, but it must be seconds above 0, at most {MOST_S:,.0f}.")
    if prompts is not None and len(prompts) != len(traffic):
        raise TrafficError(f"There are {len(prompts):,} prompts for {len(traffic):,} requests. Give one for each.")
    for number, prompt in enumerate(() if prompts is None else prompts):
        if not isinstance(prompt, str) and not (isinstance(prompt, list | tuple) and all(map(is_whole, prompt))):
            raise TrafficError(
                f"prompts[{number}] is {told(prompt)}, but it must be a text, or a list of whole numbers: token ids."
            )
    check_whole(TrafficError, "seed", seed, 0, 2**63)
    return Job(target, traffic, prompts, seed, timeout_s, keep_text)


class Loading:
    """Load that runs while a notebook goes on: `start_load` makes it."""

    def __init__(self, run: Callable[[Progress, Cancel], Loaded]) -> None:
        self._stop, self._told = threading.Event(), (0, 0, "it begins")
        self._future: Future[Loaded] = Future()
        threading.Thread(target=self._run, args=(run,), name="eet-loading", daemon=True).start()

    def cancel(self) -> None:
        """End it now; `result` then raises Cancelled."""
        self._stop.set()

    @property
    def done(self) -> bool:
        """Whether it is over, however it ended."""
        return self._future.done()

    @property
    def progress(self) -> tuple[int, int, str]:
        """Requests that are over, all requests, and how they fared until now."""
        return self._told

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is over; whether it is."""
        return bool(wait([self._future], timeout_s).done)

    def result(self, timeout_s: float | None = None) -> Loaded:
        """What became of it, once it is over. Errors: those of `run_load`; TimeoutError after the time."""
        return self._future.result(timeout_s)

    def __repr__(self) -> str:
        if not self.done:
            over, num, said = self._told
            return f"<load: {over:,} of {num:,} requests; {said}>"
        error = self._future.exception()
        return repr(self._future.result()) if error is None else f"<load: {error}>"

    def _follow(self, done: int, total: int, said: str) -> None:
        self._told = done, total, said

    def _run(self, run: Callable[[Progress, Cancel], Loaded]) -> None:
        try:
            self._future.set_result(run(self._follow, self._stop))
        except BaseException as error:  # noqa: BLE001  raised by `result`
            self._future.set_exception(error)


def start_load(
    target: Target | str,
    traffic: Traffic,
    prompts: Sequence[Prompt] | None = None,
    *,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
    keep_text: bool = False,
    apart: bool = True,
) -> Loading:
    """The same as `run_load`, but it returns at once what can be followed and stopped.

    It sends from a process of its own unless `apart` is False. Errors: TrafficError, SetupError for what cannot be.
    """
    job = job_of(target, traffic, prompts, seed, timeout_s, keep_text)
    run = run_apart if apart else run_here
    return Loading(lambda progress, cancel: run(job, progress, cancel))
