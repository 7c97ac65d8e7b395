"""Cost tables by measuring: an encoder's passes by length and batch; a decoder's steps, and passes that read prompts
beside rows that decode.

R rows, K columns of the KV cache that a row sees.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from statistics import median
from typing import NamedTuple

import torch

from eet_lab.bench.encoding import encoded
from eet_lab.bench.timing import SHARED, Tally, on_host
from eet_lab.engine.encode import EncoderEngine
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.engine.stream import passes_ahead
from eet_lab.errors import CostError, RecipeError
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_device, on_its_encoders_device
from eet_lab.parts.passes import Batching
from eet_lab.progress import Cancel, Progress, raise_if_cancelled
from eet_lab.scheduling import Request
from eet_lab.scheduling.cost import DecoderCost, EncoderCost, Provenance
from eet_lab.scheduling.traffic import FIRST_TOKEN
from eet_lab.scheduling.whole import check_whole
from eet_lab.technique import Recipe
from eet_lab.words import counted

REPEATS = 3
"""How often each time is taken, after a pass that warms up."""
DECODE_STEPS = 8
"""Decode steps that are timed together: no more than a host may be ahead of its device, or it would wait."""
JOINING_STEPS = 3
"""Passes that are timed together on a GPU where others join in each."""
SLEPT, MOST_SLEPT_MS, CYCLES = 1.5, 250.0, 2_000_000
"""How long a device waits, in times of what the host took, and at the most; and its cycles of a millisecond."""


def _powers(first: int, factor: int, most: int) -> tuple[int, ...]:
    """first, first * factor, ..., and `most` itself."""
    found = []
    while first < most:
        found.append(first)
        first *= factor
    return (*found, most)


class Timed(NamedTuple):
    """A pass that was timed, and whether other programs kept the processor from it meanwhile.

    `host_ms` are those in which the host launched it, where a device computes beside it, and `ms` the device's; else 0.
    """

    ms: float
    was_disturbed: bool
    host_ms: float = 0.0


def _median_of(run: Callable[[], Timed], repeats: int, cancel: Cancel | None, warm_up: int = 1) -> Timed:
    """The median of so many, after some that warm up; those that were disturbed count only if all were."""
    found = []
    for _ in range(warm_up + repeats):
        raise_if_cancelled(cancel, "Profiling")
        found.append(run())
    found = found[warm_up:]
    quiet = [timed for timed in found if not timed.was_disturbed]
    ms, host_ms = (median(times) for times in zip(*((each.ms, each.host_ms) for each in quiet or found), strict=True))
    return Timed(ms, not quiet, host_ms)


def _noted(source: Provenance, times: Iterable[Timed]) -> Provenance:
    """The provenance, which says so where the processor was shared."""
    if not any(timed.was_disturbed for timed in times):
        return source
    return replace(source, note="; ".join(filter(None, (source.note, SHARED))))


class Mix(NamedTuple):
    """A pass: `decoding` rows of K columns on average, and `joining` ones that read `extra` tokens beyond one each."""

    decoding: int
    columns: int
    joining: int
    extra: int


def _limits(model: Model, recipe: Recipe) -> tuple[int, int, int]:
    """Slots, tokens of a pass, and tokens of a row in a pass; RecipeError for a recipe whose requests do not join."""
    schedule, most = recipe.parts.schedule, model.config.context - 1
    if schedule.max_rows is None or not schedule.joins:
        raise RecipeError(f"{recipe or 'The baseline'} serves no requests that join: add continuous_batching to it.")
    budget = schedule.budget or schedule.max_rows * most
    return schedule.max_rows, budget, min(schedule.chunk or most, most)


def _read_meanwhile(rows: int, columns: int, budget: int) -> int:
    """The passes in which so many rows read their prompts: those that came first decode until the last has come."""
    return -(-rows * columns // budget)


def _joining_steps(device: torch.device) -> int:
    return JOINING_STEPS if passes_ahead(device) else 1


def _num_timed(device: torch.device, num_extras: int, repeats: int) -> int:
    """The most passes that are timed on the same rows: each adds a column to them."""
    return (1 + repeats) * (DECODE_STEPS + _joining_steps(device) * num_extras)


def decoder_axes(model: Model, recipe: Recipe, repeats: int) -> tuple[tuple[int, ...], ...]:
    """Extras up to the budget, rows up to the slots, and columns up to what the context leaves room for."""
    slots, budget, chunk = _limits(model, recipe)
    context = model.config.context
    extra = min(budget - 1, slots * (chunk - 1))
    extras = (0, *_powers(1, 8, extra)) if extra else (0,)
    more = _read_meanwhile(slots, context, budget) + _num_timed(torch.device(model.device), len(extras), repeats)
    most = max(context - more - 1, 1)
    return extras, _powers(1, 4, slots), _powers(min(16, most), 4, most)


def filled_decoder(axes: Sequence[tuple[int, ...]], source: Provenance) -> DecoderCost:
    """A decoder's table before it is measured: 1 ms each; CostError for axes that none can have."""
    extras, rows, columns = axes
    return DecoderCost(extras, rows, columns, (((1.0,) * len(columns),) * len(rows),) * len(extras), source)


@on_its_device
def measured_decoder(
    model: Model,
    recipe: Recipe,
    axes: Sequence[tuple[int, ...]],
    source: Provenance,
    repeats: int,
    progress: Progress | None,
    cancel: Cancel | None,
) -> DecoderCost:
    """Passes of an engine over random tokens."""
    extras, rows, columns = axes
    filled_decoder(axes, source)  # which checks the axes
    slots, budget, chunk = _limits(model, recipe)
    if rows[-1] > slots or rows[0] < 1:
        raise CostError(f"rows go from {rows[0]:,} to {rows[-1]:,}, but {recipe} has 1 to {slots:,}.")
    num_timed = _num_timed(torch.device(model.device), len(extras), repeats)
    new = _read_meanwhile(rows[-1], columns[-1], budget) + num_timed + 1
    if (reached := columns[-1] + new) > model.config.context:
        raise CostError(
            f"The table's last number of columns is {columns[-1]:,}, and rows reach {reached:,} while it is measured, "
            f"but the model's context is {model.config.context:,}. Measure fewer columns, rows or extras."
        )
    nodes = list(product(extras, rows, columns))
    mixes = [_mix(*node, slots, budget, chunk) for node in nodes]
    with closing(Engine(model.decoder, recipe.parts)) as engine:
        engine.lead_ms = inf  # all passes that are timed together are launched before the first is done
        engine.prepare(progress, cancel)
        engine.reserve(slots, max(columns[-1], min(chunk, extras[-1] + 1) + 1 - new), Settings(new))
        bench = _Decoding(engine, budget, num_timed, Settings(new), repeats, cancel)
        times = bench.measured(mixes, Tally(len(set(mixes)), progress))

    def table(found: Iterator[float]) -> tuple[tuple[tuple[float, ...], ...], ...]:
        return tuple(tuple(tuple(next(found) for _ in columns) for _ in rows) for _ in extras)

    on_device, source = table(times[mix].ms for mix in mixes), _noted(source, times.values())
    if not (ahead := passes_ahead(torch.device(model.device))):
        return DecoderCost(extras, rows, columns, on_device, source)
    return DecoderCost(extras, rows, columns, on_device, source, ahead, table(times[mix].host_ms for mix in mixes))


def _mix(extra: int, rows: int, columns: int, slots: int, budget: int, chunk: int) -> Mix:
    """The pass that stands for a node of the table: the nearest that the recipe allows.

    No pass has more tokens than the budget, and no row reads more than a chunk, so that more of them have to join.
    """
    extra = min(extra, budget - rows, slots * (chunk - 1))
    if not extra:
        return Mix(rows, columns, 0, 0)
    joining = -(-extra // (chunk - 1))
    decoding = max(rows - joining, 0)
    return Mix(decoding, columns if decoding else 0, joining, min(extra, budget - joining - decoding))


class _Decoding:
    """Times passes of an engine on requests of random tokens."""

    def __init__(
        self, engine: Engine, budget: int, num_timed: int, settings: Settings, repeats: int, cancel: Cancel | None
    ) -> None:
        self._engine, self._budget, self._num_timed = engine, budget, num_timed
        self._settings, self._repeats, self._cancel = settings, repeats, cancel
        self._draw, self._host_ms = random.Random(0), 0.0

    def measured(self, mixes: Iterable[Mix], tally: Tally) -> dict[Mix, Timed]:
        """The median ms of each. Those with the same rows that decode come together, so that these are read once."""
        times = {}
        begun: dict[tuple[int, int], list[Mix]] = {}
        for mix in dict.fromkeys(mixes):
            begun.setdefault((mix.decoding, mix.columns), []).append(mix)
        for (decoding, columns), alike in begun.items():
            read = f"{counted(decoding, 'row')} of {counted(columns, 'column')}"
            tally.say(read if decoding else "prompts alone")
            requests = self._begin(decoding, columns)
            for mix in alike:
                run = partial(self._join, mix) if mix.joining else self._decode
                times[mix] = _median_of(run, self._repeats, self._cancel)
                tally.finish()
            for request in requests:
                self._engine.cancel(request)
        return times

    def _begin(self, rows: int, columns: int) -> list[Request]:
        """So many requests whose next tokens see so many columns, on average and over the passes that are timed.

        They see different numbers of them, as those of a server do: attention may take equal rows together.
        """
        ahead = (_read_meanwhile(rows, columns, self._budget) + self._num_timed) // 2
        spread = min(rows, 2 * ahead + 1)
        shortest = max(columns - ahead - spread // 2, 1)
        lengths = [shortest + row % spread for row in range(rows)]
        requests = [self._engine.add(self._prompt(length), self._settings) for length in lengths]
        while any(request.read < length for request, length in zip(requests, lengths, strict=True)):
            raise_if_cancelled(self._cancel, "Profiling")
            self._engine.step()
        return requests

    def _prompt(self, length: int) -> list[int]:
        return [self._draw.randrange(self._engine.model.config.vocab_size) for _ in range(length)]

    def _decode(self) -> Timed:
        """A decode step, in a run of them."""
        return self._timed([[]] * DECODE_STEPS)

    def _join(self, mix: Mix) -> Timed:
        """A pass that reads prompts beside rows that decode, in a run of them: those who join have no more to tell."""
        shares = [mix.extra // mix.joining + (place < mix.extra % mix.joining) for place in range(mix.joining)]
        return self._timed(
            [[self._prompt(1 + share) for share in shares] for _ in range(_joining_steps(self._engine.model.device))]
        )

    def _timed(self, joining: Sequence[Sequence[list[int]]]) -> Timed:
        """One of so many steps, in each of which such prompts join."""

        def add(prompts: Sequence[list[int]]) -> None:
            for prompt in prompts:
                self._engine.add(prompt, Settings(1))

        def work() -> None:
            for following in (*joining[1:], []):
                self._engine.step()
                add(following)

        add(joining[0])
        if self._engine.model.device.type == "cuda":
            return self._apart(work, len(joining))
        took = on_host(work)
        return Timed(took.seconds * 1e3 / len(joining), took.was_disturbed)

    def _apart(self, work: Callable[[], None], num_steps: int) -> Timed:
        """One of the steps: the device's time, and the host's.

        The device is kept waiting until the host, by its last run, has launched all: so it never waits between them.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(round(min(self._host_ms * SLEPT, MOST_SLEPT_MS) * CYCLES))  # as PyTorch's own tests do
        begin.record()
        took = on_host(work)
        end.record()
        torch.cuda.synchronize()
        self._host_ms = took.seconds * 1e3
        return Timed(begin.elapsed_time(end) / num_steps, took.was_disturbed, self._host_ms / num_steps)


def encoder_axes(model: Model) -> tuple[tuple[int, ...], ...]:
    """Lengths up to the context, and batches."""
    return _powers(16, 2, model.config.context), _powers(1, 2, 64 if model.device == "cpu" else 256)


def filled_encoder(axes: Sequence[tuple[int, ...]], source: Provenance) -> EncoderCost:
    """The same of an encoder."""
    lengths, batches = axes
    return EncoderCost(lengths, batches, ((1.0,) * len(batches),) * len(lengths), source)


@on_its_encoders_device
def measured_encoder(
    model: Model,
    recipe: Recipe,
    axes: Sequence[tuple[int, ...]],
    source: Provenance,
    repeats: int,
    progress: Progress | None,
    cancel: Cancel | None,
) -> EncoderCost:
    """Passes over random texts, the largest first, from lists of token ids to vectors on the host."""
    lengths, batches = axes
    filled_encoder(axes, source)  # which checks the axes
    check_whole(CostError, "the longest text", lengths[-1], 1, model.config.context)
    draw, vocab, times = random.Random(0), model.config.vocab_size, {}
    with closing(EncoderEngine(model.encoder, recipe.parts)) as engine:
        engine.prepare(progress, cancel)
        tally = Tally(len(lengths) * len(batches), progress)
        for length, batch in sorted(product(lengths, batches), key=lambda size: -size[0] * size[1]):
            tally.say(f"{batch:,} x {counted(length, 'token')}")
            rows = [[draw.randrange(FIRST_TOKEN, vocab) for _ in range(length)] for _ in range(batch)]
            work = partial(_pass_ms, engine, rows, Batching(length * batch), cancel)
            times[length, batch] = _median_of(work, repeats, cancel, recipe.parts.num_warm_ups)
            tally.finish()
    table = tuple(tuple(times[length, batch].ms for batch in batches) for length in lengths)
    return EncoderCost(lengths, batches, table, _noted(source, times.values()))


def _pass_ms(engine: EncoderEngine, rows: Sequence[Sequence[int]], batching: Batching, cancel: Cancel | None) -> Timed:
    read = encoded(engine, rows, batching, cancel)
    return Timed(read.total_s * 1e3, read.was_disturbed)
