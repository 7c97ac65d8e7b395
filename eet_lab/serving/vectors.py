"""/v1/embeddings and /v1/classify, for encoders."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from eet_lab.encoding import POOLS, as_texts, scores_of
from eet_lab.engine.settings import checked_texts
from eet_lab.engine.tasks import CLASSES, TextTask
from eet_lab.errors import EETError
from eet_lab.parts.passes import Readable, Text
from eet_lab.serving.bodies import EmbeddingBody, TextsBody, parsed
from eet_lab.serving.completions import token_lists
from eet_lab.serving.errors import ApiError, bad, of_engine
from eet_lab.serving.forms import usage_of
from eet_lab.serving.gate import before, read_body
from eet_lab.serving.reader import Reading
from eet_lab.serving.response_cache import HIT
from eet_lab.serving.service import LocalFront
from eet_lab.serving.truncation import most_of
from eet_lab.words import told

MOST_TEXTS = 2048
GIVEN_UP = (499, 504)
"""The client has left, or the server waits no more: others failed."""


async def embed(front: LocalFront, request: Request) -> Response:
    """A vector of each text, as `eet_lab.encode` makes it: it is not scaled to length 1."""
    body = parsed(await read_body(request.receive, front.options), EmbeddingBody)
    front.check_model(body.model)
    if body.encoding_format not in ("float", "base64"):
        raise bad(
            f"encoding_format is {told(body.encoding_format)}, but it must be 'float' or 'base64'.", "encoding_format"
        )
    width = front.model.config.hidden_size
    if body.dimensions not in (None, width):
        raise bad(
            f"dimensions is {told(body.dimensions)}, but the vectors of {front.name} have {width:,}, and are not cut. "
            "Leave it out.",
            "dimensions",
        )
    found = await _once(front, request, body, POOLS[front.options.pool])
    # To write a thousand vectors takes a while, in which others are answered.
    return await asyncio.to_thread(_embedded, front.name, found, body.encoding_format)


class Found(NamedTuple):
    """What a task made of texts, a row each, of how many tokens, and the headers that say whence it comes."""

    values: np.ndarray
    num_tokens: int
    headers: Mapping[str, str]


async def _once(front: LocalFront, request: Request, body: TextsBody, task: TextTask) -> Found:
    """What was made of the same texts before, or is made of them now."""
    key = front.cache.key_of(request.url.path, body)
    if (found := await front.kept(key, request)) is not None:
        values, num_tokens = found
        return Found(values, num_tokens, HIT)
    try:
        texts = await _texts(front, body)
        values, num_tokens = (await _read(front, request, texts, task)).numpy(), sum(len(text.ids) for text in texts)
        front.cache.put(key, (values, num_tokens))
    finally:
        front.cache.done(key)
    return Found(values, num_tokens, {})


def _embedded(name: str, found: Found, encoding: str) -> Response:
    data = [
        {"object": "embedding", "index": index, "embedding": _written(vector, encoding)}
        for index, vector in enumerate(found.values)
    ]
    whole = {"object": "list", "data": data, "model": name, "usage": usage_of(found.num_tokens)}
    return JSONResponse(whole, headers=dict(found.headers))


async def classify(front: LocalFront, request: Request) -> Response:
    """The classes of each text, in vLLM's form: the likeliest one's label, and the scores of all."""
    body = parsed(await read_body(request.receive, front.options), TextsBody)
    front.check_model(body.model)
    try:
        CLASSES.check(front.model.encoder.config)
    except EETError as error:
        raise of_engine(error, "model") from error
    found = await _once(front, request, body, CLASSES)
    scores = scores_of(front.model.encoder.config, torch.from_numpy(found.values))
    labels = front.model.encoder.config.labels
    data = [
        {"index": index, "label": labels[int(row.argmax())], "probs": row.tolist(), "num_classes": len(labels)}
        for index, row in enumerate(scores)
    ]
    head = {"id": f"classify-{request.state.request_id}", "object": "list", "created": front.created_now()}
    whole = {**head, "model": front.name, "data": data, "usage": usage_of(found.num_tokens)}
    return JSONResponse(whole, headers=dict(found.headers))


async def _texts(front: LocalFront, body: TextsBody) -> Sequence[Readable]:
    """What shall be read, with its special tokens; ApiError for what cannot be."""
    given, config = token_lists(body.input, "input"), replace(front.model.config, context=front.columns)
    if len(given) > MOST_TEXTS:
        raise bad(f"input has {len(given):,} texts, but one request may have {MOST_TEXTS:,}. Send several.", "input")
    try:
        texts = await asyncio.to_thread(as_texts, front.model, given)
        if (most := body.truncate_prompt_tokens) is not None:
            most = most_of(front, most, front.columns, given, "text")
            texts = [_cut(text, most) for text in texts]  # type: ignore[arg-type]  # none is an image
        checked_texts([text.ids for text in texts], config, cut_by="truncate_prompt_tokens=-1")
    except EETError as error:
        raise of_engine(error, "input") from error
    return texts


def _cut(text: Text, most: int) -> Text:
    """Its first tokens, and its last one, which marks a text's end."""
    if len(text.ids) <= most:
        return text
    keep = [*range(most - 1), len(text.ids) - 1]
    types = text.types and [text.types[at] for at in keep]
    return text._replace(ids=[text.ids[at] for at in keep], types=types)


async def _read(front: LocalFront, request: Request, texts: Sequence[Readable], task: TextTask) -> Tensor:
    """What the task makes of each text, once it is their turn. Each counts as one of vLLM's requests."""
    assert front.reader is not None
    ticket, metrics = request.state.ticket, front.metrics
    lengths = [len(text.ids) for text in texts]
    ticket.count(1, sum(lengths))
    reading = Reading(texts, task, front.awaited())
    front.reader.join(reading)
    try:
        values = await before(ticket.since + front.options.request_s, reading.result, request.receive)
    except ApiError as error:
        metrics.finished["abort" if error.status in GIVEN_UP else "error"] += len(texts)
        raise
    now = time.perf_counter()
    ticket.started(now)
    whole_s = now - ticket.since
    metrics.finished["stop"] += len(texts)
    for length in lengths:
        metrics.prompt_tokens += length
        metrics.prompt_lengths.observe(length)
        metrics.whole_s.observe(whole_s)
    return values


def _written(vector: np.ndarray, encoding: str) -> Any:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()
