"""Out of memory, foreseen: what a run will need, told from meta traces before any of it is allocated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from eet_lab.engine.logprobs import LogprobLog
from eet_lab.engine.meta_trace import META, MetaTracer, NoArithmetic, RequestShape, new_cache
from eet_lab.engine.settings import Settings
from eet_lab.errors import OutOfMemory, PromptError
from eet_lab.memory import Lifetime, live_bytes
from eet_lab.models.decoder import Decoder
from eet_lab.monitor import free_bytes_of
from eet_lab.ops.oom import OTHERS, REMEDY
from eet_lab.ops.types import Keys
from eet_lab.parts import Parts
from eet_lab.parts.batches import decode_batch, empty_buffer
from eet_lab.parts.memory import FreshMemory
from eet_lab.scheduling import Request, Scheduler
from eet_lab.words import counted, sized

MOST_ROWS = 4096
MOST_TOKENS = 2**20
"""The most rows, and the most tokens, of a batch that is tried. Larger ones are not tried, even if they would fit."""

LIBRARY_BYTES = 32 * 2**20
"""What cuBLAS keeps on a large GPU once it has multiplied anything."""


def workspace_bytes(device: torch.device, captures: bool = False) -> int:
    """What libraries keep for themselves on that device; where passes are captured, for those too."""
    return 0 if device.type == "cpu" else LIBRARY_BYTES * (1 + captures)


def check_keys(num_rows: int, num_columns: int, model: Decoder) -> None:
    """OutOfMemory where the keys and values of so many rows and columns do not fit on their own.

    It is asked before lists of so many rows are made, which a forecast needs.
    """
    row_bytes = num_columns * model.config.kv_bytes_per_token(model.dtype.itemsize)
    if num_rows * row_bytes > (free := free_bytes_of(model.device)):
        raise OutOfMemory(
            f"num_rows is {num_rows:,}, but the keys and values of each row take {row_bytes:,} bytes, and {free:,} are "
            f"free. That is room for {free // row_bytes:,} rows at the very most, before activations: Engine.forecast "
            f"tells how many would fit. Ask for fewer rows or tokens. {OTHERS}"
        )


class Peak(NamedTuple):
    """Bytes beside the weights, at the time when they are the most."""

    kv: int
    activations: int
    growth: int
    logprobs: int = 0


@dataclass(frozen=True)
class Forecast:
    """The memory of a run at its peak, by purpose, beside what there is. All sizes are bytes.

    `activation_bytes` is the arena, or what fresh tensors take at once; `growth_bytes` the copy beside a KV cache that
    grows; `logprob_bytes` what log-probabilities take, if they are asked for; `workspace_bytes` what libraries keep
    for themselves. `free_bytes` is what the device has for all of this, the weights included. `largest_batch` is how
    many rows of this shape would fit. `largest_context` is the most columns (prompt and new tokens) that would fit with
    this many rows, up to the model's context; where it is below the longest prompt, prompts are cut to leave one new
    token. 0: none.
    """

    num_rows: int
    prompt_tokens: int  # of the longest prompt
    new_tokens: int
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    growth_bytes: int
    workspace_bytes: int
    free_bytes: int
    largest_batch: int
    largest_context: int
    logprob_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return self.weight_bytes + self.run_bytes

    @property
    def run_bytes(self) -> int:
        """What the run adds to the weights."""
        return self.kv_bytes + self.activation_bytes + self.growth_bytes + self.logprob_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.free_bytes

    @property
    def parts(self) -> dict[str, int]:
        """The peak by purpose, what is nothing left out."""
        named = {
            "weights": self.weight_bytes,
            "KV cache": self.kv_bytes,
            "its growth": self.growth_bytes,
            "activations": self.activation_bytes,
            "log-probabilities": self.logprob_bytes,
            "workspace": self.workspace_bytes,
        }
        return {name: num_bytes for name, num_bytes in named.items() if num_bytes}

    @property
    def most_rows(self) -> int:
        """The largest batch that was tried. If `largest_batch` is as large, an even larger one may fit too."""
        return most_rows(self.num_rows, self.prompt_tokens + self.new_tokens)

    @property
    def room(self) -> str:
        """What would fit, as a sentence."""
        if not self.largest_batch:
            return "Not even one row of this shape would fit."
        rows = f"{self.largest_batch:,} or more rows"
        if self.largest_batch < self.most_rows:
            rows = counted(self.largest_batch, "row")
        columns = f"{self.largest_context:,} columns" if self.largest_context else "not even prompts of one token"
        return f"Would fit: {rows} of this shape, or {columns} for {counted(self.num_rows, 'row')}."

    @property
    def remedy(self) -> str:
        """What to do about a run that ran out of memory. It names what would fit if this run does not."""
        return REMEDY if self.fits else f"{REMEDY} {self.room}"

    def __str__(self) -> str:
        shape = f"{counted(self.num_rows, 'row')} of {self.prompt_tokens} + {self.new_tokens} tokens"
        verdict = "fits" if self.fits else "does not fit"
        parts = ", ".join(f"{name} {sized(num_bytes)}" for name, num_bytes in self.parts.items())
        return f"{shape}: {verdict}. {sized(self.total_bytes)} of {sized(self.free_bytes)} ({parts}). {self.room}"


class Forecaster:
    """Traces batches of one shape, and larger ones, on meta tensors."""

    def __init__(self, tracer: MetaTracer, parts: Parts, settings: Settings | None = None) -> None:
        self._tracer, self._parts, self._settings = tracer, parts, settings or Settings()
        self._peaks: dict[tuple, Peak] = {}

    def forecast(self, lengths: Sequence[int], device: torch.device, free_bytes: int | None = None) -> Forecast:
        """What prompts of such lengths need, and how many of them, or how long ones, would fit.

        `free_bytes` None: what the device has, beside the model's weights, which are there already; for a model of
        shapes alone, what this machine has for weights too.
        """
        model, num_new = self._tracer.model, self._settings.max_new_tokens
        on_host = device.type == "meta" and free_bytes is None
        workspace = 0 if on_host else workspace_bytes(device, self._parts.is_captured)
        if free_bytes is None:
            free_bytes = free_bytes_of(device) + (0 if device.type == "meta" else model.weight_bytes)
        lengths = sorted(lengths, reverse=True)  # fewer rows "of this shape" are the longest: no order of theirs counts
        num_rows, longest = len(lengths), lengths[0]
        peak, anyhow = self.peak(lengths, num_new), model.weight_bytes + workspace
        # A planner that does as well with a few layers as with all of them may be asked about a few from here on.
        outlined = anyhow <= free_bytes and self.peak(lengths, num_new, outline=True) == peak

        def needed(lengths: Sequence[int], num_new: int) -> int:
            try:
                return anyhow + sum(self.peak(lengths, num_new, outlined))
            except PromptError:  # more than a limited pool of pages holds
                return sys.maxsize

        def rows(count: int) -> int:
            return needed([lengths[i % num_rows] for i in range(count)], num_new)

        def columns(count: int) -> int:
            cut = [min(length, count - 1) for length in lengths]
            return needed(cut, count - cut[0])

        most, context = most_rows(num_rows, longest + num_new), model.config.context
        if anyhow > free_bytes:  # no count of rows or columns would change that
            most = context = 0
        return Forecast(
            num_rows=num_rows,
            prompt_tokens=longest,
            new_tokens=num_new,
            weight_bytes=model.weight_bytes,
            kv_bytes=peak.kv,
            activation_bytes=peak.activations,
            growth_bytes=peak.growth,
            logprob_bytes=peak.logprobs,
            workspace_bytes=workspace,
            free_bytes=free_bytes,
            largest_batch=largest(rows, free_bytes, 1, most, num_rows),
            largest_context=largest(columns, free_bytes, 2, context, longest + num_new),
        )

    def peak(self, lengths: Sequence[int], num_new: int | None = None, outline: bool = False) -> Peak:
        """The bytes in the pass in which a run takes the most. `num_new` None: as many new tokens as the settings say.

        `outline` traces a few layers instead of all, as is enough for fresh tensors. What was asked before is known.
        """
        num_new = self._settings.max_new_tokens if num_new is None else num_new
        memory = self._parts.memory()
        outline = outline and memory.has_arena
        key = (*lengths, num_new, outline)
        if key not in self._peaks:
            self._peaks[key] = self._peak(memory, lengths, num_new, outline)
        return self._peaks[key]

    def _peak(self, memory: FreshMemory, lengths: Sequence[int], num_new: int, outline: bool) -> Peak:
        settings = replace(self._settings, max_new_tokens=num_new)
        shape = self._tracer.request(lengths, settings)
        passes, max_kv, found = shape.passes, shape.max_kv, list[Peak]()
        if outline:
            passes = {name: traced_pass.outlines() for name, traced_pass in passes.items()}
        memory.plan(passes, like=self._tracer.model.token_embedding)
        longest, asked = Request((0,) * max(lengths), num_new), settings.logprobs is not None
        log, written = LogprobLog.num_bytes(len(shape.num_pad), self._tracer.model) if asked else (0, 0)
        for columns, traced_pass in zip((max_kv, shape.capacity - 1), passes.values(), strict=True):
            kv, growth = self._cache_bytes(shape, columns, longest)
            held = memory.held_bytes
            most, kept = (held, held) if held else fresh_bytes(memory.outlined(traced_pass))
            found += Peak(kv, most, growth, log), Peak(kv, kept, 0, log + written)
        return max(found, key=sum)

    def _cache_bytes(self, shape: RequestShape, max_kv: int, longest: Request) -> tuple[int, int]:
        """Bytes held once a step has been there whose columns are [0, max_kv), and those of the copy while it was."""
        cache, schedule = new_cache(self._tracer.model, self._parts), self._parts.schedule
        num_rows = len(shape.num_pad)
        cache.open(shape.num_pad, shape.capacity, shape.ends)
        if schedule.max_rows is None:
            cache.check_room(shape.num_pad, shape.ends)
        else:
            Scheduler(schedule.of_at_most(num_rows), cache.ledger, shape.capacity).check(longest)
        buffer = empty_buffer(num_rows, 1, META)
        with NoArithmetic():
            batch = decode_batch(buffer, Keys(buffer.columns), max_kv)
            for layer in range(cache.num_layers):
                cache.layer(layer, batch)
        return cache.num_bytes, cache.growth_bytes


def fresh_bytes(lifetimes: Sequence[Lifetime]) -> tuple[int, int]:
    """The most bytes that a pass holds at once, and those it still holds once its last op has chosen the tokens."""
    end = len(lifetimes) - 1
    kept = (life.num_bytes for life in lifetimes if life.last == end and life.op != lifetimes[end].op)
    return max(live_bytes(lifetimes), default=0), sum(kept)


def most_rows(num_rows: int, num_columns: int) -> int:
    """The largest batch to try in a forecast of `num_rows` rows."""
    return max(num_rows, min(MOST_ROWS, MOST_TOKENS // num_columns))


def largest(needed: Callable[[int], int], free_bytes: int, least: int, most: int, start: int) -> int:
    """The largest count from `least` to `most` whose need is met; 0 if there is none. Needs are taken to grow.

    Each look is at where a straight line through the nearest known counts meets `free_bytes`. Where such looks come
    from one side again and again, the line misses a bend: then it is in the middle.
    """
    known: dict[int, int] = {}

    def fits(count: int) -> bool:
        known[count] = needed(count)
        return known[count] <= free_bytes

    low, high = least - 1, most + 1  # fits (or is below all), does not fit (or is above all)
    count = min(max(start, least), most)
    sides: list[bool] = []
    while high - low > 1:
        sides.append(fits(count))
        low, high = (count, high) if sides[-1] else (low, count)
        if len(sides) > 2 and len(set(sides[-3:])) == 1:
            count = (low + high) // 2
            continue
        (a, below), *more = sorted(known.items(), key=lambda item: abs(item[0] - (low + high) / 2))[:2]
        b, above = more[0] if more else (0, below // 2)
        slope = (above - below) / (b - a) if b != a else 0
        guess = a + int((free_bytes - below) // slope) if slope > 0 else (low + high) // 2
        count = min(max(guess, low + 1), high - 1)
    return low if low >= least else 0
