"""What one server serves: a model, its engine's thread, and who may ask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from eet_lab.models import Model
from eet_lab.models.chat import ChatTemplate, template_of
from eet_lab.models.checkpoint import read_json
from eet_lab.models.encoder import Encoder
from eet_lab.models.transcript import Decode, ended_by
from eet_lab.serving.admission import Admission
from eet_lab.serving.answer import Answer, News
from eet_lab.serving.errors import ApiError
from eet_lab.serving.generator import Generator, Load
from eet_lab.serving.metrics import Metrics
from eet_lab.serving.options import Options
from eet_lab.serving.reader import Reader
from eet_lab.serving.response_cache import ResponseCache
from eet_lab.serving.worker import Worker
from eet_lab.technique import Recipe
from eet_lab.texts import RecipeLike, as_recipe
from eet_lab.words import MiB

SHORT = 4096
"""Characters that are read into tokens at once; longer texts go to a thread, so that nobody waits for them."""
PER_ANSWER_S = 0.0002
"""The time from one event of all streams to the next, for each of them. An event takes some 50 us of the interpreter's
lock, which the engine's thread needs too: more than a quarter of the time would slow the engine for everyone.
"""
DECODER_RECIPE, ENCODER_RECIPE = "all,continuous_batching", "all"


class Service:
    """A model behind a server. All but `worker`'s work runs on the server's loop."""

    def __init__(self, model: Model, recipe: RecipeLike | None = None, options: Options | None = None) -> None:
        self.model, self.options = model, options or Options()
        self.name = self.options.served_model_name or model.name
        self.is_encoder = isinstance(model.network, Encoder)
        self.columns = self.options.columns(model.config.context)
        self.created = self.created_now()
        self.admission = Admission(self.options)
        self.cache = ResponseCache(self.options.response_cache_mib * MiB)
        self.metrics = Metrics(self.name, self.load, self.cache)
        default = ENCODER_RECIPE if self.is_encoder else DECODER_RECIPE
        self.recipe: Recipe = as_recipe(default if recipe is None else recipe, model.device, model.config)
        self.ends = ends_of(model)
        self._template: ChatTemplate | None = None
        self._has_looked = False
        self._answers = set[Answer]()
        self._sleeping, self._is_waking = set[Answer](), False
        self.generator: Generator | None = None
        self.reader: Reader | None = None
        if self.is_encoder:
            self.reader = Reader(model, self.recipe)
        else:
            self.generator = Generator(model, self.recipe, self.columns, self.receive)

    @property
    def worker(self) -> Worker:
        """The thread that owns the engine."""
        worker = self.generator or self.reader
        assert worker is not None
        return worker

    @staticmethod
    def created_now() -> int:
        """The time as OpenAI's objects have it."""
        return int(time.time())

    def load(self) -> Load:
        """What the engine has at hand."""
        return self.generator.load() if self.generator else Load(waiting=self.admission.num_queued)

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
            asyncio.get_running_loop().call_later(len(self._sleeping) * PER_ANSWER_S, self._wake)

    def _wake(self) -> None:
        self._is_waking, sleeping, self._sleeping = False, self._sleeping, set()
        for answer in sleeping:
            answer.wake()

    def joined(self, answer: Answer) -> None:
        """This answer is waited for from now on."""
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
        """Every answer that is waited for ends with this error."""
        for answer in list(self._answers):
            if self.generator is not None and not answer.is_over:
                self.generator.leave(answer)
            answer.put(News(answer, (), None, error, time.perf_counter()))

    def check_model(self, name: str | None) -> None:
        """404 for another model than the one that is served. Whoever names none gets this one."""
        if name is not None and name != self.name:
            message = f"There is no model {ascii(name)[:80]} here, but {self.name!r}."
            raise ApiError(404, message, "model", "model_not_found")

    def check_kind(self, wants_encoder: bool, path: str) -> None:
        """400 for what such a model cannot do."""
        if wants_encoder != self.is_encoder:
            kind = "an encoder, which generates nothing" if self.is_encoder else "a decoder, which makes no vectors"
            raise ApiError(400, f"{path} is not served: {self.name} is {kind}.", "model", "wrong_kind")

    async def template(self) -> ChatTemplate:
        """The checkpoint's chat template; 400 where it has none."""
        if not self._has_looked:
            self._template = await asyncio.to_thread(template_of, self.model)
            self._has_looked = True
        if self._template is None:
            raise ApiError(
                400,
                f"{self.name} has no chat template: its checkpoint was not made for conversations. Use "
                "/v1/completions.",
                "messages",
                "no_chat_template",
            )
        return self._template

    async def encode(self, text: str | list[int]) -> list[int]:
        """Token ids. Errors: PromptError, ModelError."""
        if isinstance(text, str) and len(text) > SHORT:
            return await asyncio.to_thread(self.model.encode, text)
        return self.model.encode(text)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token's text, which may be half a character."""
        return self.model.bytes_of(token)

    def decode(self, stop: Iterable[int]) -> Decode:
        """Text of tokens, without those that end it, and without special ones."""
        return ended_by({*self.ends, *stop}, partial(self.model.decode, special=False))


def ends_of(model: Model) -> tuple[int, ...]:
    """The tokens that end a text of this model: the config's, and those that the checkpoint's generation_config.json
    adds, such as the end of a turn.
    """
    path = None if model.folder is None else model.folder / "generation_config.json"
    sources: list[Any] = [model.config.eos_id, (model.settings or {}).get("eos_token_id")]
    if path is not None and path.exists():
        sources.append(read_json(path).get("eos_token_id"))
    found = dict.fromkeys(token for source in sources for token in (source if isinstance(source, list) else [source]))
    return tuple(token for token in found if isinstance(token, int) and 0 <= token < model.config.vocab_size)
