"""Many requests that are all there at once, as a server has them: ours, and transformers' beside them.

A row of `serve:llama-1b/r256/p100-1024/n512/all`: 256 prompts of random lengths from 100 to 1,024 tokens, drawn with
seed 0, 512 new tokens for each: tokens per second, and how long each request waited. They go through an engine of this
process, or over HTTP on loopback: the server's engine has a thread of this process, as in `eet_lab.serve`, and the
client is a process of its own. With `/shared64` all prompts begin with the same 64 tokens. Runs of one engine send the
same requests, but each begins with an empty prefix cache. A server with a response cache keeps what it said: its runs
are of requests that were all answered before.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.request import urlopen

import numpy as np

from eet_lab.bench import timing
from eet_lab.bench.measured import Spread
from eet_lab.bench.parity import parity
from eet_lab.bench.peers import to_hf
from eet_lab.bench.rows import OURS, Row, distinct, named, taken
from eet_lab.bench.timing import Series
from eet_lab.bench.workloads import Requests
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import Cancelled, RecipeError, SetupError
from eet_lab.models import Model
from eet_lab.models.config import Config
from eet_lab.models.families import settings_of
from eet_lab.models.on_device import on_its_device
from eet_lab.models.transcript import Transcript, ended_by
from eet_lab.paths import install_command
from eet_lab.progress import Cancel, Progress, raise_if_cancelled
from eet_lab.scheduling import Request
from eet_lab.scheduling.served import percentiles
from eet_lab.scheduling.traffic import Traffic
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike
from eet_lab.words import counted

RECIPE = "all,continuous_batching:rows=256:budget=2048"
CHECKED = 8
"""Prompts of the workload whose tokens are checked before anything is timed, and the new tokens of each."""

HTTP = "eet_lab-http"
HTTP_CACHED = "eet_lab-http-cached"
"""The same with a response cache."""
CACHE_MIB = 1024
"""Room for the answers of any workload here: what was let go of would be computed again."""
HF = "hf-generate-batch"
HF_SERVE = "hf-serve"
TIMEOUT_S = 3600.0
UP_S = 600.0
LOOK_S = 0.1


class Asked(NamedTuple):
    """Prompts, and the new tokens of each."""

    prompts: Sequence[Sequence[int]]
    new_tokens: Sequence[int]

    @classmethod
    def of(cls, requests: Requests, vocab_size: int) -> Self:
        """Those of a workload."""
        return cls(requests.prompts(vocab_size), requests.new_lengths())

    @property
    def most_columns(self) -> int:
        """The tokens of the longest prompt with its answer."""
        return max(len(prompt) + new for prompt, new in zip(*self, strict=True))


class ServingRun(NamedTuple):
    """Seconds in all, and for each request the ms to its first token and to its last, and how many tokens it got.

    What it got is told by `tokens`, or by `texts` where only these came. `found` is the share of prompt tokens that a
    prefix cache had, where there is one that says so.
    """

    total_s: float
    first_ms: Sequence[float]
    last_ms: Sequence[float]
    counts: Sequence[int]
    tokens: Sequence[Sequence[int]] | None = None
    texts: Sequence[str] | None = None
    found: float | None = None

    @property
    def tok_s(self) -> float:
        return sum(self.counts) / self.total_s

    @property
    def tpot_ms(self) -> list[float]:
        """The times of the requests that have more than one token."""
        each = zip(self.first_ms, self.last_ms, self.counts, strict=True)
        return [(last - first) / (count - 1) for first, last, count in each if count > 1]


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
    tokens are compared with ours, if any. Returns rows and remarks. Errors: RecipeError for a recipe without
    continuous batching, or whose tokens are wrong; PromptError; OutOfMemory; Cancelled.
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
    mine = next((each.runs[0] for (name, _), each in series.items() if name not in (HF, HF_SERVE)), None)
    medians = {who: timing.median_run(each.runs, lambda run: run.tok_s) for who, each in series.items()}
    return [_row(requests, who, model, run, mine) for who, run in medians.items()], remarks


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


def _are_same(model: Model, run: ServingRun, other: ServingRun) -> bool:
    """Whether both got the same tokens, or the same texts where one has only these."""
    if run.texts is None and other.texts is None:
        return run.tokens == other.tokens
    texts = (each.texts or [streamed_text(model, tokens) for tokens in each.tokens or ()] for each in (run, other))
    return all(one == another for one, another in zip(*texts, strict=True))


def streamed_text(model: Model, tokens: Sequence[int]) -> str:
    """The text of an answer of these tokens, as a server streams it."""
    transcript = Transcript(ended_by(model.config.ends, partial(model.decode, special=False)))
    return "".join(transcript.add([token]) for token in tokens) + transcript.finish()


def _row(requests: Requests, who: tuple[str, str], model: Model, run: ServingRun, mine: ServingRun | None) -> Row:
    """`mine`: a run of ours, where there is one."""
    same = None if mine is None else _are_same(model, mine, run)
    return taken(
        model.device,
        workload=str(requests),
        provider=who[0],
        recipe=who[1],
        dtype=model.dtype,
        ttft_ms=Spread.of(run.first_ms),
        tpot_ms=Spread.of(run.tpot_ms),
        total_ms=Spread.of([run.total_s * 1e3]),
        equality="passed" if same or who[0] not in (HF, HF_SERVE) else "not checked: its logits are not known",
        same_tokens=same,
        tok_s=run.tok_s,
        prefix_hit_rate=run.found,
        percentiles={
            "ttft_ms": percentiles(run.first_ms),
            "tpot_ms": percentiles(run.tpot_ms),
            "e2e_ms": percentiles(run.last_ms),
        },
    )


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


def loaded(target: Any, asked: Asked, prompts: Sequence[Any], cancel: Cancel | None = None) -> ServingRun:
    """What a server says to all of them, sent at once by a process of its own. Errors: SetupError, Cancelled."""
    from eet_lab.serving.load import run_load

    lengths = np.array([*map(len, asked.prompts)])
    traffic = Traffic(np.zeros(len(lengths)), lengths, np.array(asked.new_tokens), "all at once")
    found = run_load(target, traffic, prompts, timeout_s=TIMEOUT_S, keep_text=True, apart=True, cancel=cancel)
    if found.reasons:
        missing = counted(sum(found.reasons.values()), "request")
        raise SetupError(f"The server did not answer {missing}: {'; '.join(found.reasons)}.")
    return ServingRun(
        found.span_s, found.first_ms.tolist(), found.last_ms.tolist(), found.told.tolist(), texts=found.texts
    )


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
        raise SetupError(f"{HTTP} needs {error.name}: {install_command('serve')}") from error
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


def served_by_hf(model: Any, asked: Asked) -> ServingRun:
    """The same by a model of transformers, with its own continuous batching. Errors: SetupError.

    It is what its `generate_batch` does, which gives all requests as many new tokens. On a CPU its cache takes a
    twentieth of the memory: by default it fills most of the machine's with zeros, for which 24 GiB take half a minute.
    """
    import transformers
    from transformers import GenerationConfig

    cache: dict[str, Any] = {}
    if model.device.type == "cpu" and hasattr(transformers, "ContinuousBatchingConfig"):
        cache["continuous_batching_config"] = transformers.ContinuousBatchingConfig(max_memory_percent=0.05)
    how = GenerationConfig(max_new_tokens=max(asked.new_tokens), do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    if len({*asked.new_tokens}) == 1:
        inputs = [*map(list, asked.prompts)]
        found = model.generate_batch(inputs=inputs, generation_config=how, record_timestamps=True, **cache)
    else:
        found = _generate_batch(model, asked, how, cache)
    total_s = time.perf_counter() - start
    outputs = [found.get(f"req_{number}") for number in range(len(asked.prompts))]
    for number, (output, new) in enumerate(zip(outputs, asked.new_tokens, strict=True), 1):
        if output is None or output.error is not None or len(output.generated_tokens) < new:
            why = "no answer" if output is None else output.error or f"{len(output.generated_tokens)} of {new} tokens"
            raise SetupError(f"transformers' continuous batching did not answer request {number}: {why}.")
    times = [[(at - start) * 1e3 for at in output.timestamps] for output in outputs]
    tokens = [output.generated_tokens for output in outputs]
    return ServingRun(total_s, [t[0] for t in times], [t[-1] for t in times], [*map(len, tokens)], tokens)


def _generate_batch(model: Any, asked: Asked, how: Any, cache: dict[str, Any]) -> dict[str, Any]:
    """As transformers' `generate_batch`, with as many new tokens for each as it asks for."""
    outputs: dict[str, Any] = {}
    with model.continuous_batching_context_manager(generation_config=how, block=True, timeout=5, **cache) as manager:
        for number, (prompt, new) in enumerate(zip(*asked, strict=True)):
            manager.add_request([*prompt], f"req_{number}", max_new_tokens=new, record_timestamps=True, eos_token_id=-1)
        while len(outputs) < len(asked.prompts):
            output = manager.get_result(timeout=1)
            if output is not None and output.is_finished():
                outputs[output.request_id] = output
            elif output is None and not manager.is_running():
                raise SetupError("transformers' continuous batching ended before all requests were answered.")
    return outputs


@contextmanager
def served_by_hf_serve(model: Model, asked: Asked, cancel: Cancel | None = None) -> Iterator[Callable[[], ServingRun]]:
    """`transformers serve` with continuous batching, that lasts as long as the block. Errors: SetupError, Cancelled.

    It takes prompts as texts only: a tokenizer that has a word for each token id goes with the weights.
    """
    from eet_lab.serving.load import Target

    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name) / "model", Path(name) / "log"
        model.save(folder)
        _add_what_it_needs(folder, model.config)
        port = _free_port()
        options = ["--continuous-batching", "--device", model.device, "--port", str(port), "--host", "127.0.0.1"]
        if model.device == "cpu":
            options += ["--cb-max-memory-percent", "0.05"]
        command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve"]
        with log.open("wb") as out:
            server = subprocess.Popen([*command, str(folder), *options], stdout=out, stderr=subprocess.STDOUT)
        try:
            _wait_until_up(f"http://127.0.0.1:{port}/health", server, log, cancel)
            target = Target(f"http://127.0.0.1:{port}", model=str(folder), as_text=True, ignore_eos=False)
            texts = [" ".join(f"w{token}" for token in prompt) for prompt in asked.prompts]
            yield lambda: _told(loaded(target, asked, texts, cancel))
        finally:
            server.kill()
            server.wait()


def _told(run: ServingRun) -> ServingRun:
    """The tokens that its words are."""
    tokens = [[*map(int, text.replace(" ", "").split("w")[1:])] for text in run.texts or ()]
    return run._replace(tokens=tokens, texts=None)


def _add_what_it_needs(folder: Path, config: Config) -> None:
    """A tokenizer with the words w0, w1 and so on, the model's class, and settings by which no token ends an answer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    vocabulary = {f"w{token}": token for token in range(config.vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))  # of a text, none is unknown
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0).save_pretrained(folder)
    path = folder / "config.json"
    added = {"eos_token_id": None, "architectures": settings_of(config)["architectures"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | added))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path, cancel: Cancel | None) -> None:
    """Return once it answers. Errors: SetupError with the last line of its log; Cancelled."""
    until = time.monotonic() + UP_S
    while server.poll() is None and time.monotonic() < until:
        raise_if_cancelled(cancel, "The run")
        try:
            with urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(LOOK_S)
    lines = log.read_text(errors="replace").strip().splitlines()
    said = lines[-1] if lines else "it said nothing"
    if server.poll() is None:
        raise SetupError(f"transformers serve did not answer within {UP_S:.0f} s; it said last: {said}")
    raise SetupError(f"transformers serve ended before it answered: {said}")
