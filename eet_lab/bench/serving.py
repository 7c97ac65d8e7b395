"""Many requests through one engine, as a server has them: tokens per second, and how long each request waited.

A row of `serve:llama-1b/r256/p100-1024/n512/all`: 256 prompts of random lengths from 100 to 1,024 tokens, drawn with
seed 0, 512 new tokens for each, all there at once, in process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, NamedTuple

from eet_lab.bench import timing
from eet_lab.bench.benchmark import check_is_of, distinct
from eet_lab.bench.measured import Spread
from eet_lab.bench.parity import parity
from eet_lab.bench.peers import to_hf
from eet_lab.bench.providers import OURS, named
from eet_lab.bench.rows import Row, taken
from eet_lab.bench.timing import Tally
from eet_lab.bench.workloads import Requests
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import Cancelled, RecipeError
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_device
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling import Request
from eet_lab.scheduling.served import percentiles
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike

RECIPE = "all,continuous_batching:rows=256:budget=2048"
HF = "hf-generate-batch"
CHECKED = 8
"""Prompts of the workload whose tokens are checked before anything is timed, and the new tokens of each."""


class ServingRun(NamedTuple):
    """One run: seconds in all, and for each request the ms to its first token and to its last, and its tokens."""

    total_s: float
    first_ms: Sequence[float]
    last_ms: Sequence[float]
    tokens: Sequence[Sequence[int]]

    @property
    def tok_s(self) -> float:
        return sum(map(len, self.tokens)) / self.total_s

    @property
    def tpot_ms(self) -> list[float]:
        """The times of the requests that have more than one token."""
        each = zip(self.first_ms, self.last_ms, self.tokens, strict=True)
        return [(last - first) / (len(new) - 1) for first, last, new in each if len(new) > 1]


@on_its_device
def serve_all(
    model: Model,
    requests: Requests | str,
    recipes: RecipeLike | Sequence[RecipeLike] = (RECIPE,),
    providers: Sequence[str] | str = (OURS,),
    *,
    repeats: int = 3,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> tuple[list[Row], list[str]]:
    """Serve all requests with each recipe and peer interleaved, `repeats` times, after a run of each that warms up.

    A row tells of the run with the median throughput. What our recipes say is checked on a sample before; a peer's
    tokens are compared with ours. Returns rows and remarks. Errors: RecipeError for a recipe without continuous
    batching, or whose tokens are wrong; PromptError; OutOfMemory; Cancelled.
    """
    timing.check_repeats(repeats)
    requests = Requests.parse(requests) if isinstance(requests, str) else requests
    check_is_of(requests, model)
    providers = named(providers, (OURS, HF), "requests")
    chosen, remarks = distinct(recipes, model.device, model.config) if OURS in providers else ([], [])
    prompts, settings = requests.prompts(model.config.vocab_size), Settings(requests.new_tokens)
    runs_of: dict[str, Callable[[], ServingRun]] = {}
    with ExitStack() as open_engines:
        for recipe in chosen:
            engine = open_engines.enter_context(closing(_ready(model, recipe, prompts, settings)))
            runs_of[str(recipe)] = partial(served, engine, prompts, settings, cancel)
        if HF in providers:
            runs_of[HF] = partial(served_by_hf, to_hf(model.decoder), prompts, settings)
        tally = Tally((1 + repeats) * len(runs_of), progress)
        timing.interleaved(runs_of, 1, tally, cancel, "warming up")
        runs = timing.interleaved(runs_of, repeats, tally, cancel)
    rows, first = [], next(iter(runs.values()))[0]
    for name, all_runs in runs.items():
        run = timing.median_run(all_runs, lambda run: run.tok_s)
        rows.append(_row(requests, "" if name == HF else name, name, model, run, first.tokens == run.tokens))
    return rows, remarks


def _ready(model: Model, recipe: Recipe, prompts: Sequence[Sequence[int]], settings: Settings) -> Engine:
    """An engine with room for all, whose tokens are right."""
    if recipe.parts.schedule.max_rows is None:
        raise RecipeError(f"{recipe or 'The baseline'} serves no requests that join: add continuous_batching to it.")
    found = parity(model.decoder, recipe.parts, prompts[:CHECKED], Settings(min(CHECKED, settings.max_new_tokens)))
    if found.verdict == "different":
        raise RecipeError(f"{recipe} gives other tokens, so it is not timed: {found.explanation}")
    engine = Engine(model.decoder, recipe.parts)
    engine.reserve(recipe.parts.schedule.max_rows, max(map(len, prompts)), settings)
    return engine


def served(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: Settings, cancel: Cancel | None = None
) -> ServingRun:
    """Add all prompts and step until the last is done. Times count from before the first one is added."""
    start = time.perf_counter()
    requests = [engine.add(prompt, settings) for prompt in prompts]
    first_ms: dict[Request, float] = {}
    last_ms: dict[Request, float] = {}
    while any(not request.done for request in reversed(requests)):
        if cancel is not None and cancel.is_set():
            engine.close()
            raise Cancelled("The run was stopped.")
        told, now = engine.step(), (time.perf_counter() - start) * 1e3
        for request, _, _ in told:
            first_ms.setdefault(request, now)
            last_ms[request] = now
    total_s, tokens = time.perf_counter() - start, [request.generated for request in requests]
    return ServingRun(total_s, [*map(first_ms.__getitem__, requests)], [*map(last_ms.__getitem__, requests)], tokens)


def served_by_hf(model: Any, prompts: Sequence[Sequence[int]], settings: Settings) -> ServingRun:
    """The same by transformers' own continuous batching, `generate_batch`."""
    from transformers import GenerationConfig

    how = GenerationConfig(max_new_tokens=settings.max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    found = model.generate_batch(inputs=[*map(list, prompts)], generation_config=how, record_timestamps=True)
    total_s = time.perf_counter() - start
    outputs = [found[f"req_{number}"] for number in range(len(prompts))]
    times = [[(at - start) * 1e3 for at in output.timestamps] for output in outputs]
    return ServingRun(total_s, [t[0] for t in times], [t[-1] for t in times], [o.generated_tokens for o in outputs])


def _row(requests: Requests, recipe: str, name: str, model: Model, run: ServingRun, same: bool) -> Row:
    return taken(
        model.device,
        workload=str(requests),
        provider=HF if name == HF else OURS,
        recipe=recipe,
        dtype=model.dtype,
        ttft_ms=Spread.of(run.first_ms),
        tpot_ms=Spread.of(run.tpot_ms),
        total_ms=Spread.of([run.total_s * 1e3]),
        equality="passed",
        same_tokens=same,
        tok_s=run.tok_s,
        percentiles={
            "ttft_ms": percentiles(run.first_ms),
            "tpot_ms": percentiles(run.tpot_ms),
            "e2e_ms": percentiles(run.last_ms),
        },
    )
