"""The front of a server: who may ask, how texts become tokens and tokens texts, and what is counted.

It needs no torch, so that it starts at once in a process of its own, with an interpreter's lock of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from starlette.requests import Request

from eet_lab.models.chat import ChatTemplate, template_of
from eet_lab.models.transcript import Decode, ended_by
from eet_lab.serving.errors import ApiError
from eet_lab.serving.gate import Admission, before
from eet_lab.serving.jobs import Answer, Card, Load, News
from eet_lab.serving.metrics import Metrics
from eet_lab.serving.options import Options
from eet_lab.serving.response_cache import ResponseCache
from eet_lab.words import MiB

if TYPE_CHECKING:
    from eet_lab.serving.engines import Engines
    from eet_lab.serving.front_process import RemoteEngine
    from eet_lab.serving.generator import Generator
    from eet_lab.serving.worker import Worker

SHORT = 4096
"""Characters that are read into tokens at once; longer texts go to a thread, so that nobody waits for them."""


class Front:
    """What serves requests, in front of `worker`, which has the engine. All calls come from the server's loop.

    `generator` is the same worker where the model generates.
    """

    per_answer_s: ClassVar[float] = 0.00006
    """The time from one event of all streams to the next, for each of them: an event takes some 50 us."""

    def __init__(
        self,
        card: Card,
        options: Options,
        worker: Worker | RemoteEngine | Engines,
        generator: Generator | RemoteEngine | Engines | None = None,
    ) -> None:
        self.card, self.options = card, options
        self.name, self.is_encoder, self.columns, self.ends = card.name, card.is_encoder, card.columns, card.ends
        self.created = self.created_now()
        self.admission = Admission(options)
        self.cache = ResponseCache(options.response_cache_mib * MiB)
        self.metrics = Metrics(self.name, self.load, self.cache)
        self.worker, self.generator = worker, generator
        self._ended: ApiError | None = None
        self._template: asyncio.Task[ChatTemplate | None] | None = None
        self._answers = set[Answer]()
        self._sleeping, self._is_waking = set[Answer](), False

    @staticmethod
    def created_now() -> int:
        """The time as OpenAI's objects have it."""
        return int(time.time())

    def load(self) -> Load:
        """What the engine has at hand."""
        return self.generator.load() if self.generator else Load(waiting=self.admission.num_queued)

    async def metrics_text(self) -> bytes:
        """What Prometheus reads, as it is now."""
        if self.generator is not None:
            await self.generator.refresh()
        return self.metrics.text()

    def receive(self, news: list[News]) -> None:
        """Take what one step of the engine told."""
        for each in news:
            answer = each.answer
            if answer.last_at is not None and each.tokens:
                self.metrics.between_s.observe((each.at - answer.last_at) / len(each.tokens))
            if answer.put(each):
                self._sleeping.add(answer)
        if self._sleeping and not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_later(len(self._sleeping) * self.per_answer_s, self._wake)

    def _wake(self) -> None:
        self._is_waking, sleeping, self._sleeping = False, self._sleeping, set()
        for answer in sleeping:
            answer.wake.set()

    def joined(self, answer: Answer) -> None:
        """This answer is waited for from now on. Errors: the one with which all were ended."""
        if self._ended is not None:
            raise self._ended
        self._answers.add(answer)

    def left(self, answers: Iterable[Answer]) -> None:
        """Nobody waits for these any more: those that are not over are ended before the engine's next step."""
        assert self.generator is not None
        for answer in answers:
            self._answers.discard(answer)
            if not answer.is_over:
                self.generator.leave(answer)
                answer.end("abort")

    def end_all(self, error: ApiError) -> None:
        """Every answer that is waited for ends with this error, and so do those of whoever is still inside."""
        self._ended = error
        for answer in list(self._answers):
            if self.generator is not None and not answer.is_over:
                self.generator.leave(answer)
            answer.put(News(answer, (), None, error, time.perf_counter()))

    async def kept(self, key: bytes | None, request: Request) -> Any | None:
        """The answer that is kept under this key, or made now for somebody else; None: it is the caller's to make.

        Errors: ApiError for a client that leaves meanwhile, or waits too long.
        """
        if key is None:
            return None
        cache, end = self.cache, request.state.ticket.since + self.options.request_s
        while (making := cache.making.get(key)) is not None:
            if (found := await before(end, asyncio.shield(making), request.receive)) is not None:
                cache.hits += 1
                return found
        if (found := cache.get(key)) is None:
            cache.begin(key)
        return found

    def check_model(self, name: str | None) -> None:
        """404 for another model than the one that is served. Whoever names none gets this one."""
        if name is not None and name != self.name:
            message = f"There is no model {ascii(name)[:80]} here, but {self.name!r}."
            raise ApiError(404, message, "model", "model_not_found")

    def check_kind(self, wants_encoder: bool, path: str) -> None:
        """400 for what such a model cannot do."""
        if wants_encoder != self.is_encoder:
            made = "tells no classes" if path.endswith("classify") else "makes no vectors"
            kind = f"a decoder, which {made}. Use /v1/completions"
            if self.is_encoder:
                kind = "an encoder, which generates nothing. Use /v1/embeddings or /v1/classify"
            raise ApiError(400, f"{path} is not served: {self.name} is {kind}.", "model", "wrong_kind")

    def look_for_template(self) -> asyncio.Task[ChatTemplate | None]:
        """Begin to read the checkpoint's chat template, once: transformers takes seconds to import.

        A look that failed is told to those who wait for it, and then forgotten: the next one may find it.
        """
        if self._template is None:
            self._template = asyncio.create_task(asyncio.to_thread(template_of, self.card.folder))
            self._template.add_done_callback(self._looked)
        return self._template

    def _looked(self, task: asyncio.Task[ChatTemplate | None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._template = None

    async def template(self) -> ChatTemplate:
        """The checkpoint's chat template; 400 where it has none."""
        found = await asyncio.shield(self.look_for_template())  # a client that leaves does not end it for others
        if found is None:
            raise ApiError(
                400,
                f"{self.name} has no chat template: its checkpoint was not made for conversations. Use "
                "/v1/completions.",
                "messages",
                "no_chat_template",
            )
        return found

    async def encode(self, text: str | list[int]) -> list[int]:
        """Token ids. Errors: PromptError, ModelError."""
        if isinstance(text, str) and len(text) > SHORT:
            return await asyncio.to_thread(self.card.encode, text)
        return self.card.encode(text)

    def decode(self, stop: Iterable[int]) -> Decode:
        """Text of tokens, without those that end it, and without special ones."""
        return ended_by({*self.ends, *stop}, self.card.decode)
