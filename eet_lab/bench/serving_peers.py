"""Requests that are all there at once, and how transformers answers them: within a process, and over HTTP."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.request import urlopen

import numpy as np

from eet_lab.bench.workloads import Requests
from eet_lab.errors import SetupError
from eet_lab.models import Model
from eet_lab.models.config import Config
from eet_lab.models.families import settings_of
from eet_lab.progress import Cancel, raise_if_cancelled
from eet_lab.scheduling.traffic import Traffic
from eet_lab.words import counted

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
