"""The same requests through our server on loopback: what HTTP costs beside the engine alone.

The server's engine has a thread of this process, as in `eet_lab.serve`; the client is a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from eet_lab.bench.serving_run import ServingRun
from eet_lab.engine.settings import Settings
from eet_lab.errors import SetupError
from eet_lab.models import Model
from eet_lab.models.transcript import Transcript, ended_by
from eet_lab.progress import Cancel
from eet_lab.scheduling.traffic import Traffic
from eet_lab.technique import Recipe
from eet_lab.words import counted

HTTP = "eet_lab-http"
TIMEOUT_S = 3600.0
UP_S = 600.0


@contextmanager
def served_over_http(
    model: Model, recipe: Recipe, prompts: Sequence[Sequence[int]], settings: Settings, cancel: Cancel | None = None
) -> Iterator[Callable[[], ServingRun]]:
    """A server that lasts as long as the block, and what sends it all requests at once. Errors: SetupError, Cancelled.

    All times count from the moment at which all are due; connecting is in them.
    """
    try:
        from eet_lab.serving.handle import serve
    except ImportError as error:
        raise SetupError(f"{HTTP} needs {error.name}: pip install 'eet-lab[serve]'") from error
    from eet_lab.serving.load import Target, run_load

    lengths = np.array([len(prompt) for prompt in prompts])
    traffic = Traffic(np.zeros(len(prompts)), lengths, np.full(len(prompts), settings.max_new_tokens), "all at once")
    limits: dict[str, Any] = {
        "max_queued_requests": len(prompts),
        "max_queued_tokens": int(lengths.sum()),
        "request_s": TIMEOUT_S,
    }
    columns = int(lengths.max()) + settings.max_new_tokens
    server = serve(model, recipe, max_model_len=columns, **limits)

    def run() -> ServingRun:
        loaded = run_load(
            Target(server.url), traffic, prompts, timeout_s=TIMEOUT_S, keep_text=True, apart=True, cancel=cancel
        )
        if loaded.reasons:
            missing = counted(sum(loaded.reasons.values()), "request")
            raise SetupError(f"The server did not answer {missing}: {'; '.join(loaded.reasons)}.")
        first, last = loaded.first_ms.tolist(), loaded.last_ms.tolist()
        return ServingRun(loaded.span_s, first, last, loaded.told.tolist(), texts=loaded.texts)

    try:
        server.wait_until_up(UP_S)
        yield run
    finally:
        server.stop()


def streamed_text(model: Model, tokens: Sequence[int]) -> str:
    """The text of an answer of these tokens, as a server streams it."""
    from eet_lab.serving.service import ends_of

    transcript = Transcript(ended_by(ends_of(model), partial(model.decode, special=False)))
    return "".join(transcript.add([token]) for token in tokens) + transcript.finish()
