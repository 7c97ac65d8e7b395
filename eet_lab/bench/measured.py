"""What is measured, where and how sure: the frozen dataclasses that results are made of, and the place of this machine.

Times are ms, sizes are bytes. Whatever is None could not be measured here.
"""

from __future__ import annotations

import hashlib
import math
import platform
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal, Protocol

import torch

import eet_lab
from eet_lab.codec import (
    Amount,
    Bytes,
    Count,
    Date,
    Many,
    Ms,
    Name,
    Nats,
    Positive,
    Real,
    Seconds,
    SignedMs,
    Some,
    Text,
)
from eet_lab.devices import choices, kind_of
from eet_lab.errors import MonitorError
from eet_lab.models import Model
from eet_lab.paths import PACKAGE, is_clone
from eet_lab.words import MiB, counted

Verdict = Literal["identical", "within rounding", "lossy", "different"]


@dataclass(frozen=True)
class Spread:
    """The median of some repeats, and the range that holds the middle 60 % of them."""

    p20: SignedMs
    p50: SignedMs
    p80: SignedMs

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """The spread of `values`, interpolated; None where one of them is missing or there are none."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        fifths = quantiles(known, n=10, method="inclusive") if len(known) > 1 else known * 9
        return cls(*(round(fifths[i], 4) for i in (1, 4, 7)))


def p50(spread: Spread | None) -> float | None:
    """The median, where there is one."""
    return None if spread is None else spread.p50


def origin(device: str, driver: str | None, torch: str, transformers: str, days: str, commits: str | None) -> str:
    """The words for where something was measured; what is not known is left out."""
    known = {"driver": driver, "torch": torch, "transformers": transformers}
    versions = [f"{name} {version}" for name, version in known.items() if version]
    return ", ".join([device, *versions, days, *([f"commit {commits}"] if commits else [])])


@dataclass(frozen=True)
class Environment:
    """Where a result was taken. `device` is a name, `device_kind` "cpu" or "cuda".

    `recorded`: it came with the package or from a file of another machine, and is no measurement of this one.
    """

    device: Name
    device_kind: Literal["cpu", "cuda"]
    driver: Name | None
    torch: Name
    transformers: Name
    eet_lab: Name
    commit: Name | None
    date: Date  # ISO 8601, UTC
    dtype: Name
    model: Name
    model_label: Name
    recorded: bool = False
    machine: Name | None = None  # `machine_id` of where it was taken; older files lack it

    @property
    def origin(self) -> str:
        """All that a time depends on beside the recipe, in words: device, driver, versions, day, commit."""
        return origin(self.device, self.driver, self.torch, self.transformers, self.date[:10], self.commit)


@dataclass(frozen=True)
class Cost:
    """What the hardware asks for one decode step at its middle length, beside what was measured.

    `floor_ms` is `step_bytes` at `ceiling_gb_per_s`, the rate that a streaming read reached on this device in this
    process.
    """

    weight_bytes: Bytes  # each weight that a step reads, the LM head included
    kv_bytes: Bytes  # keys and values of all rows
    ceiling_gb_per_s: Positive | None
    floor_ms: Ms | None
    gb_per_s: Amount | None  # achieved: step_bytes over the measured time per token
    launches_per_token: Positive | None  # told without the device (`launches`): PyTorch may have a fifth more

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True)
class Perplexity:
    """How well a text is predicted: `nats` is the mean surprise of a token, and e to that the perplexity.

    `nats` is None where it would say nothing, and `why_not` tells why.
    """

    nats: Nats | None
    num_tokens: Count  # that were predicted
    text: Name  # which one
    why_not: Name = ""

    @property
    def value(self) -> float | None:
        """The number of equally likely tokens among which the next one would be as hard to guess."""
        return None if self.nats is None else math.exp(self.nats)


@dataclass(frozen=True)
class Measurement:
    """One recipe on one workload.

    `step_ms` traces every step of the median repeat, the prefill first; `step_tokens[i]` says how many tokens
    step i generated (0 while a prompt is still being read). `memory` has the keys of `run_memory.MEMORY_KEYS` in
    bytes; `memory_source` says how the peak was found: "measured" by torch's counters on a GPU, "planned" from
    lifetimes on the CPU. `prepare_s` is building kernels, capturing and the first warm-up. `tokens` and `texts` are
    what was generated, or read by an encoder. `perplexity` is known where a recipe is lossy, or compared with one that
    is.
    """

    recipe: Name
    title: Name
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    total_ms: Spread | None
    tokens_per_s: Spread | None
    step_ms: Many[Ms]
    step_tokens: Many[Count]
    memory: dict[Name, Bytes]
    memory_source: Literal["measured", "planned"]
    prepare_s: Seconds
    captures: Count
    joules_per_token: Amount | None
    tokens: Some[Many[Count]]
    texts: Some[Text]
    repeats: Count
    warnings: Many[Text] = ()
    cost: Cost | None = None
    perplexity: Perplexity | None = None


def tokens_by_step(m: Measurement, prompt_lengths: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Which (row, token) pairs each step gave: rows begin in order of their prompts' lengths, the shortest first."""
    waiting = sorted(range(len(m.tokens)), key=lambda row: prompt_lengths[row])
    given = [0] * len(m.tokens)
    active: list[int] = []
    for count in m.step_tokens:
        active = [row for row in active if given[row] < len(m.tokens[row])]
        while len(active) < count and waiting:
            active.append(waiting.pop(0))
        new = tuple((row, m.tokens[row][given[row]]) for row in sorted(active))
        for row in active:
            given[row] += 1
        yield new


class TimedTokens(Protocol):
    """What every run tells, of a decoder as of an encoder: when tokens came or were read; None for what it has not."""

    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def tpot_ms(self) -> float | None: ...
    @property
    def total_ms(self) -> float: ...
    @property
    def tokens_per_s(self) -> float: ...
    @property
    def step_ms(self) -> Sequence[float]: ...
    @property
    def step_tokens(self) -> tuple[int, ...]: ...
    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]: ...


@dataclass(frozen=True)
class Parity:
    """Whether a recipe computes what the baseline computes.

    `max_error` is the largest difference of its teacher-forced logits from a reference in higher precision, and
    `budget` what rounding explains; None and 0 where the baseline's own logits overflow. `first_difference[b]` is the
    first generated token in which row b parts from the baseline (both count from 0; `explanation` counts from 1),
    `margins[b]` how far its choice lies below the reference's there (a near-tie if small); None for rows that never
    part. "lossy": the recipe changes the weights, and `budget` holds what it states as well.
    """

    same_tokens: bool
    first_difference: Some[Count | None]
    margins: Some[Real | None]
    max_error: Amount | None
    budget: Amount
    verdict: Verdict
    explanation: Text


@dataclass(frozen=True)
class Metric:
    """One number of a run. `read` takes a `Measurement` and gives a `Spread`, a number, or None where it is missing.

    `key` is its name in a `Measurement` and in the `changes` of a result; empty where it is not timed.
    """

    name: str
    unit: str
    read: Callable[[Any], Any]
    more_is_better: bool = False
    key: str = ""


TIMES = (
    Metric("time to first token", "ms", lambda m: m.ttft_ms, key="ttft_ms"),
    Metric("time per output token", "ms", lambda m: m.tpot_ms, key="tpot_ms"),
    Metric("end to end", "ms", lambda m: m.total_ms, key="total_ms"),
    Metric("throughput", "tokens/s", lambda m: m.tokens_per_s, more_is_better=True, key="tokens_per_s"),
)
"""A `Generation` has these too, as plain numbers."""

PEAK = Metric("peak memory", "MiB", lambda m: m.memory["peak"] / MiB)
ENERGY = Metric("energy", "J/token", lambda m: m.joules_per_token)
PERPLEXITY = Metric("perplexity", "", lambda m: m.perplexity and m.perplexity.value)

STEADY_RUNS = {"cpu": 1.5, "cuda": 1.25}
"""A result carries a warning if the longest run takes more than this times the shortest. GPU times are steadier."""


@dataclass(frozen=True)
class Sampled:
    """One sample; `t` is in seconds since the run began."""

    t: Amount
    values: dict[Name, Real]


@dataclass(frozen=True)
class Recording:
    """One watched run: the source, its metrics' units, why others are missing, and the samples."""

    label: Name
    metrics: dict[Name, Name]
    missing: dict[Name, Name]
    samples: Many[Sampled]


def environment(model: Model) -> Environment:
    """Where a result that is taken now comes from."""
    return Environment(
        device=device_name(model.device),
        device_kind="cuda" if model.device == "cuda" else "cpu",
        **versions(model.device),
        eet_lab=eet_lab.__version__,
        dtype=model.dtype,
        model=model.name,
        model_label=model.label,
        machine=machine_id(str(model.network.device)),
    )


def versions(device: str) -> dict[str, Any]:
    """driver, torch, transformers, commit and date, as results and rows name them."""
    return {
        "driver": driver_version() if device == "cuda" else None,
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def device_name(device: str) -> str:
    """The GPU's or the processor's name."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} ({counted(torch.get_num_threads(), 'thread')})"


@lru_cache
def driver_version() -> str | None:
    """The NVIDIA driver's version, None where NVML cannot say."""
    from eet_lab.monitor.nvml import find_driver

    try:
        return find_driver().version
    except MonitorError:
        return None


@lru_cache
def commit() -> str | None:
    """The commit of the clone that runs, with a + where files differ from it; None in an installed package."""
    if not is_clone():
        return None
    git = ["git", "-C", str(PACKAGE.parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "eet_lab", "csrc"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed else "")


MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")


@lru_cache
def machine_id(device: str) -> str | None:
    """An id of this machine and its `device` ("cpu" or "cuda:1"), the same in every process; None without that device.

    A hash: nothing of it can be read back. Containers made from one image share their machine id, so the host's name
    and the GPU's own id are in it. Where a host is renamed, what it measured before counts as recorded elsewhere.
    """
    kind, _, number = device.partition(":")
    parts = [socket.gethostname(), kind]
    for path in MACHINE_IDS:
        with suppress(OSError):
            parts.append(Path(path).read_text(encoding="ascii", errors="replace").strip())
            break
    if kind != "cpu":
        if not torch.cuda.is_available():
            return None
        parts.append(str(torch.cuda.get_device_properties(int(number or 0)).uuid))
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def is_here(environment: Environment) -> bool:
    """Whether it was taken on this machine, by any GPU that is seen now; files that do not say it were not."""
    devices = (device for device in choices() if kind_of(device) == environment.device_kind)
    return environment.machine is not None and environment.machine in map(machine_id, devices)


def placed(environment: Environment) -> Environment:
    """The environment of a file, marked as recorded unless it was taken on this machine."""
    return replace(environment, recorded=not is_here(environment))


def describe(environment: Environment, now: datetime | None = None) -> str:
    """A sentence: `Measured on this machine at 14:02.`, or where it was recorded. `now` is for tests."""
    if environment.recorded:
        return f"Recorded on {environment.origin}; not measured on this machine."
    return f"Measured on this machine {moment(environment.date, now)}."


def moment(date: str, now: datetime | None = None) -> str:
    """`at 14:02` of today, else `on 2026-11-23 at 14:02`: local time, of an ISO date; the date as it is for others."""
    try:
        then = datetime.fromisoformat(date).astimezone()
    except (ValueError, OverflowError):
        return f"on {date[:10]}"
    today = (now or datetime.now()).astimezone().date()
    return f"at {then:%H:%M}" if then.date() == today else f"on {then:%Y-%m-%d} at {then:%H:%M}"
