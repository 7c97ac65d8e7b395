"""Many requests through one engine: all at once, as a server has them, or a stream of one after the other.

A row of `serve:llama-1b/r256/p100-1024/n512/all`: 256 prompts of random lengths from 100 to 1,024 tokens, drawn with
seed 0, 512 new tokens for each, all there at once: tokens per second, and how long each request waited. They go through
an engine of this process, or over HTTP on loopback: the server's engine has a thread of this process, as in
`eet_lab.serve`, and the client is a process of its own. With `/shared64` all prompts begin with the same 64 tokens.
Runs of one engine send the same requests, but each begins with an empty prefix cache. A server with a response cache
keeps what it said: its runs are of requests that were all answered before. A stream tells how fast it was, and what it
allocated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from eet_lab.bench import timing
from eet_lab.bench.measured import Spread
from eet_lab.bench.parity import ParityCheck, parity
from eet_lab.bench.peers import to_hf
from eet_lab.bench.rows import OURS, Row, distinct, equality, named, taken
from eet_lab.bench.run_memory import allocated_afresh, driver_calls
from eet_lab.bench.serving_peers import (
    TIMEOUT_S,
    UP_S,
    Asked,
    ServingRun,
    loaded,
    served_by_hf,
    served_by_hf_serve,
)
from eet_lab.bench.timing import Series, on_host
from eet_lab.bench.workloads import Requests, Stream
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings, checked_prompts
from eet_lab.errors import Cancelled, RecipeError, SetupError
from eet_lab.memory import live_bytes
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_device
from eet_lab.models.transcript import Transcript, ended_by
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling import Request
from eet_lab.scheduling.served import percentiles
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike, as_recipe

HTTP = "eet_lab-http"
HTTP_CACHED = "eet_lab-http-cached"
"""The same with a response cache."""
CACHE_MIB = 1024
"""Room for the answers of any workload here: what was let go of would be computed again."""
HF = "hf-generate-batch"
HF_SERVE = "hf-serve"


@contextmanager
def served_over_http(
    model: Model, recipe: Recipe, asked: Asked, cancel: Cancel | None = None, cache_mib: int = 0
) -> Iterator[Callable[[], ServingRun]]:
    """A server that lasts as long as the block, and what sends it all requests at once. Errors: SetupError, Cancelled.

    All times count from the moment at which all are due; connecting is in them. With `cache_mib` the first run is
    computed, and later ones get the answers that were kept.
    """
    try:
        from eet_lab.serving.handle import serve
    except ImportError as error:
        raise SetupError(f"{HTTP} needs {error.name}: pip install 'eet-lab[serve]'") from error
    from eet_lab.serving.load import Target

    limits: dict[str, Any] = {
        "max_queued_requests": len(asked.prompts),
        "max_queued_tokens": sum(map(len, asked.prompts)),
        "request_s": TIMEOUT_S,
        "response_cache_mib": cache_mib,
    }
    server = serve(model, recipe, max_model_len=asked.most_columns, **limits)
    try:
        server.wait_until_up(UP_S)

        def run() -> ServingRun:
            server.reset_prefix_cache()  # else a repeated run would find its own prompts
            return loaded(Target(server.url), asked, asked.prompts, cancel)

        yield run
    finally:
        server.stop()


def streamed_text(model: Model, tokens: Sequence[int]) -> str:
    """The text of an answer of these tokens, as a server streams it."""
    transcript = Transcript(ended_by(model.config.ends, partial(model.decode, special=False)))
    return "".join(transcript.add([token]) for token in tokens) + transcript.finish()


RECIPE = "all,continuous_batching:rows=256:budget=2048"
CHECKED = 8
"""Prompts of the workload whose tokens are checked before anything is timed, and the new tokens of each."""


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
    """Serve all requests with each recipe and peer in turn, `repeats` times, after runs of each that warm up.

    A row tells of the run with the median throughput. What our recipes say is checked on a sample before; a peer's
    tokens are compared with ours. Returns rows and remarks. Errors: RecipeError for a recipe without continuous
    batching, or whose tokens are wrong; PromptError; OutOfMemory; Cancelled.
    """
    timing.check_repeats(repeats)
    requests = Requests.of(requests, model)
    providers = named(providers, (OURS, HTTP, HTTP_CACHED, HF, HF_SERVE), "requests")
    has_recipes = not {OURS, HTTP, HTTP_CACHED}.isdisjoint(providers)
    chosen, remarks = distinct(recipes, model.device, model.config) if has_recipes else ([], [])
    asked = Asked.of(requests, model.config.vocab_size)
    series: dict[tuple[str, str], Series[ServingRun]] = {}
    with ExitStack() as open_engines:
        for recipe in chosen:
            _check(model, recipe, asked)
            if OURS in providers:
                engine = open_engines.enter_context(closing(_ready(model, recipe, asked)))
                run = partial(served, engine, asked, cancel)
                series[OURS, str(recipe)] = Series(str(recipe), run, warm_ups=recipe.parts.num_warm_ups)
            for name, cache_mib in ((HTTP, 0), (HTTP_CACHED, CACHE_MIB)):
                if name in providers:
                    over_http = served_over_http(model, recipe, asked, cancel, cache_mib)
                    series[name, str(recipe)] = Series(f"{name} {recipe}", open_engines.enter_context(over_http))
        if HF in providers:
            series[HF, ""] = Series(HF, partial(served_by_hf, to_hf(model.decoder), asked))
        if HF_SERVE in providers:
            series[HF_SERVE, ""] = Series(
                HF_SERVE, open_engines.enter_context(served_by_hf_serve(model, asked, cancel))
            )
        timing.after_warm_up([*series.values()], repeats, progress, cancel)
    first = next(iter(series.values())).runs[0]
    medians = {who: timing.median_run(each.runs, lambda run: run.tok_s) for who, each in series.items()}
    return [_row(requests, who, model, run, _are_same(model, first, run)) for who, run in medians.items()], remarks


def _are_same(model: Model, run: ServingRun, other: ServingRun) -> bool:
    """Whether both got the same tokens, or the same texts where one has only these."""
    if run.texts is None and other.texts is None:
        return run.tokens == other.tokens
    texts = (each.texts or [streamed_text(model, tokens) for tokens in each.tokens or ()] for each in (run, other))
    return all(one == another for one, another in zip(*texts, strict=True))


def _check(model: Model, recipe: Recipe, asked: Asked) -> None:
    """RecipeError for a recipe whose requests cannot join, or whose tokens are wrong on a sample."""
    if recipe.parts.schedule.max_rows is None:
        raise RecipeError(f"{recipe or 'The baseline'} serves no requests that join: add continuous_batching to it.")
    few = Settings(min(CHECKED, *asked.new_tokens))
    found = parity(model.decoder, recipe.parts, asked.prompts[:CHECKED], few)
    if found.verdict == "different":
        raise RecipeError(f"{recipe} gives other tokens, so it is not timed: {found.explanation}")


def _ready(model: Model, recipe: Recipe, asked: Asked) -> Engine:
    """An engine with room for all."""
    engine = Engine(model.decoder, recipe.parts)
    rows = recipe.parts.schedule.max_rows
    assert rows is not None
    engine.reserve(rows, max(map(len, asked.prompts)), Settings(max(asked.new_tokens)))
    return engine


def served(engine: Engine, asked: Asked, cancel: Cancel | None = None) -> ServingRun:
    """Add all prompts and step until the last is done. Times count from before the first one is added."""
    engine.reset_prefix_cache()  # else a repeated run would find its own prompts
    start = time.perf_counter()
    requests = [engine.add(prompt, Settings(new)) for prompt, new in zip(*asked, strict=True)]
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
    first, last = ([*map(each.__getitem__, requests)] for each in (first_ms, last_ms))
    found = engine.prefix_cache_hit_rate if engine.cache.prefix_cache_queries else None
    return ServingRun(total_s, first, last, [*map(len, tokens)], tokens, found=found)


def _row(requests: Requests, who: tuple[str, str], model: Model, run: ServingRun, same: bool) -> Row:
    return taken(
        model.device,
        workload=str(requests),
        provider=who[0],
        recipe=who[1],
        dtype=model.dtype,
        ttft_ms=Spread.of(run.first_ms),
        tpot_ms=Spread.of(run.tpot_ms),
        total_ms=Spread.of([run.total_s * 1e3]),
        equality="passed",
        same_tokens=same,
        tok_s=run.tok_s,
        prefix_hit_rate=run.found,
        percentiles={
            "ttft_ms": percentiles(run.first_ms),
            "tpot_ms": percentiles(run.tpot_ms),
            "e2e_ms": percentiles(run.last_ms),
        },
    )


WARM_UP = 3  # requests before any is timed


@on_its_device
def run_stream(
    model: Model, stream: Stream, recipe: str | Recipe = "all", *, reserved: bool = True, cancel: Cancel | None = None
) -> Row:
    """Serve a stream, after memory was reserved for its largest request, or as it comes.

    The row's recipe ends in " (reserved)" with a reservation. Activations are the peak beyond weights, libraries and KV
    cache, and their lower bound what the largest request has alive at once; the first requests are checked, before any
    is timed. Errors: RecipeError, PromptError, OutOfMemory, Cancelled.
    """
    settings = Settings(max_new_tokens=stream.new_tokens)
    requests, chosen = stream.prompts(model.config.vocab_size), as_recipe(recipe, model.device, model.config)
    longest = max(requests, key=len)
    checked_prompts([[0] * stream.high], Settings(stream.new_tokens), model.config)
    check = ParityCheck(model.decoder, requests[:WARM_UP], settings, cancel=cancel)
    before = allocated_afresh(model.device)
    with closing(Engine(model.decoder, chosen.parts)) as engine:
        engine.prepare(cancel=cancel)
        if reserved:
            engine.reserve(1, stream.high, settings)
        first = [_tokens(engine, prompt, settings, cancel) for prompt in requests[:WARM_UP]]
        calls = _driver_allocations(engine, model.device)
        if model.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        timed = on_host(lambda: sum(len(_tokens(engine, prompt, settings, cancel)) for prompt in requests))
        calls = _driver_allocations(engine, model.device) - calls
        peak = torch.cuda.max_memory_allocated() - before if model.device == "cuda" else None
        same = check.judge(chosen.parts, first, chosen.tolerance)
        return taken(
            model.device,
            workload=str(stream),
            provider=OURS,
            recipe=str(chosen) + " (reserved)" * reserved,
            dtype=model.dtype,
            total_ms=Spread.of([timed.seconds * 1e3]),  # every request waits for its tokens
            tok_s=timed.value / timed.seconds,
            peak_bytes=peak,
            equality=equality(same),
            same_tokens=same.same_tokens,
            activation_bytes=None if peak is None or not reserved else peak - engine.kv_bytes,
            lower_bound_bytes=max(max(live_bytes(t)) for t in engine.lifetimes([longest], settings).values()),
            driver_allocations=calls,
            step_allocations=_step_allocations(engine, longest, settings, model.device),
        )


def _tokens(engine: Engine, prompt: Sequence[int], settings: Settings, cancel: Cancel | None) -> tuple[int, ...]:
    generation = engine.generate([prompt], settings, cancel=cancel)
    if generation.cancelled:
        raise Cancelled("The stream was stopped.")
    return generation.tokens[0]


def _driver_allocations(engine: Engine, device: str) -> int:
    """Of torch's allocator on a GPU; on the CPU those of the memory part, whose chunks stand for it."""
    calls = driver_calls(device) if device == "cuda" else engine.memory.calls
    return calls.allocations


def _step_allocations(engine: Engine, prompt: Sequence[int], settings: Settings, device: str) -> int | None:
    """What torch allocates from one step to the next, where that is the same for most."""
    if device != "cuda":
        return None
    counts = []
    engine.generate(
        [prompt],
        settings,
        on_step=lambda event: counts.append(torch.cuda.memory_stats()["allocation.all.allocated"]),
    )
    between = sorted(b - a for a, b in pairwise(counts))
    return between[len(between) // 2] if between else None
