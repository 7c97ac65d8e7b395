"""One HTTP request that generates: its choices, what they say piece by piece, and its end, however it comes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from starlette.types import Receive

from eet_lab.engine.settings import Settings
from eet_lab.errors import EETError
from eet_lab.models.transcript import StoppedText
from eet_lab.scheduling.whole import MOST, MOST_SEED
from eet_lab.serving.bodies import MOST_CHOICES, ChatBody, Sampled
from eet_lab.serving.errors import bad, of_engine
from eet_lab.serving.front import Front
from eet_lab.serving.gate import NUMBERS, Ticket, disconnected
from eet_lab.serving.jobs import COMPLETE, Answer, Job, Reason
from eet_lab.serving.logprobs import Scored, Scores
from eet_lab.words import counted, told


class Piece(NamedTuple):
    """What choice `number` says next; `finish` with its last piece. `scored`: its tokens, if that was asked for."""

    number: int
    text: str
    finish: Reason | None
    scored: tuple[Scored, ...] = ()


class Step(NamedTuple):
    """What choices say at once, and how many tokens all of them have by then."""

    pieces: list[Piece]
    num_tokens: int


@dataclass
class Choice:
    """One of the texts that a request gets: what vLLM calls a request, and its metrics count."""

    number: int
    prompt_tokens: int
    answer: Answer
    text: StoppedText
    scores: Scores
    finish: Reason | None = None
    has_begun: bool = False
    is_counted: bool = False

    def advance(self) -> Piece | None:
        """What is new, if anything. Errors: the one that ended the answer."""
        if self.finish is not None:
            return None
        new, before = self.answer.take(), self.text.num_tokens
        text, is_last = self.text.add(new), self.answer.is_over and self.answer.error is None
        num_read = self.text.num_tokens - before  # what follows a stop string is not
        told = self.answer.take_logprobs()[:num_read]
        scored = self.scores.add(new[:num_read], told) if told else ()
        if not self.text.is_stopped and is_last:
            text += self.text.finish()
            self.finish = self.answer.reason
        if self.text.is_stopped:
            self.finish = "stop"
        return Piece(self.number, text, self.finish, scored) if text or scored or self.finish else None


class Generating:
    """A request, from its jobs to its last piece. `close` ends what is still under way."""

    def __init__(self, front: Front, prompts: Sequence[Sequence[int]], body: Sampled, ticket: Ticket) -> None:
        self._front, self._ticket = front, ticket
        self._wake = asyncio.Event()
        self._deadline = ticket.since + front.options.request_s
        self._watch: asyncio.Task[None] | None = None
        self.prompt_tokens = sum(map(len, prompts))
        self._prompts, self._body = prompts, body
        self.choices: list[Choice] = []
        self.is_abandoned = False

    def start(self, settings: Sequence[Settings], receive: Receive) -> None:
        """Give the engine a job for each choice: `n` of each prompt. `settings` are those of each prompt.

        A prompt whose request has a seed draws what it would draw alone; without one, all choices draw on their own.
        """
        assert self._front.generator is not None
        body, stops = self._body, self._body.stops()
        decode = self._front.decode(body.stop_token_ids)
        self._ticket.count(len(self._prompts) * body.n, self.prompt_tokens)
        for prompt, how in zip(self._prompts, settings, strict=True):
            for number in range(body.n):
                scores = Scores(self._front.card.bytes_of)
                answer = Answer(self._wake, is_followed=body.stream or bool(stops))
                text = StoppedText(decode, stops)
                self.choices.append(Choice(len(self.choices), len(prompt), answer, text, scores))
                self._front.joined(answer)
                drawn = number if body.seed is not None else len(self.choices) - 1
                self._front.generator.join(Job(prompt, how, drawn, answer, self._deadline))
        self._watch = asyncio.create_task(self._watch_client(receive))

    async def steps(self) -> AsyncIterator[Step]:
        """What all choices say, as it comes, until the last is finished. Errors: ApiError."""
        running = self.choices
        while running:
            await self._wake.wait()
            self._wake.clear()
            try:
                found = [piece for choice in running if (piece := choice.advance()) is not None]
            finally:  # others may be complete where one fails
                self._begin(running)
                if done := [choice for choice in running if choice.finish is not None]:
                    self._end(done)
                    self._front.left([choice.answer for choice in done])
            running = [choice for choice in running if choice.finish is None]
            if found:
                yield Step(found, self.completion_tokens)

    def close(self) -> None:
        """The request is over: count it, and free what the engine still holds for it."""
        self._front.left([choice.answer for choice in self.choices])
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None  # its error holds its frame, and that this: the collector alone would find them
        self._front.metrics.generation_tokens += self.completion_tokens
        self._end(self.choices)

    @property
    def left_s(self) -> float:
        """Seconds until the answer must be complete."""
        return self._deadline - time.perf_counter()

    @property
    def completion_tokens(self) -> int:
        """The tokens of all choices until now."""
        return sum(choice.text.num_tokens for choice in self.choices)

    def _begin(self, running: Sequence[Choice]) -> None:
        """Count those whose first token came; with the first of all, the request waits no more."""
        metrics = self._front.metrics
        for choice in running:
            first = choice.answer.first_at
            if first is not None and not choice.has_begun:
                choice.has_begun = True
                self._ticket.started(first)
                metrics.prompt_tokens += choice.prompt_tokens
                metrics.first_token_s.observe(first - self._ticket.since)

    def _end(self, ended: Sequence[Choice]) -> None:
        """Count those that have come to their end, each once; what was cut short has no latency."""
        metrics, whole_s = self._front.metrics, time.perf_counter() - self._ticket.since
        for choice in ended:
            if choice.is_counted:
                continue
            choice.is_counted = True
            reason = choice.finish or ("error" if choice.answer.error else "abort")
            metrics.finished[reason] += 1
            if reason not in COMPLETE:
                continue
            metrics.prompt_lengths.observe(choice.prompt_tokens)
            metrics.generation_lengths.observe(choice.text.num_tokens)
            metrics.whole_s.observe(whole_s)
            metrics.observe_phases(choice.answer)

    async def _watch_client(self, receive: Receive) -> None:
        await disconnected(receive)
        self.is_abandoned = True
        self._front.left([choice.answer for choice in self.choices])


def settings_of(body: Sampled, prompts: Sequence[Sequence[int]], asked: int | None, front: Front) -> list[Settings]:
    """How each prompt is continued. `asked` are the tokens that the client wants; None: all that there is room for.

    Errors: ApiError, with the field, for what there is no room for.
    """
    field = "messages" if isinstance(body, ChatBody) else "prompt"
    if len(prompts) * body.n > MOST_CHOICES:
        raise bad(
            f"{len(prompts):,} prompts with n={body.n} ask for {len(prompts) * body.n:,} texts, but one request gets "
            f"{MOST_CHOICES} at most. Send several requests.",
            "n" if body.n > 1 else field,
        )
    logprobs = body.num_logprobs()
    seed = NUMBERS.randrange(MOST_SEED + 1) if body.seed is None else body.seed % (MOST_SEED + 1)
    stop = {*body.stop_token_ids, *(() if body.ignore_eos else front.ends)}
    found = []
    for prompt in prompts:
        most, length = front.columns, max(len(prompt), 1)
        room = most - length
        if room < 1:
            raise bad(f"The prompt has {length:,} tokens, but with its answer it may have {most:,}. Shorten it.", field)
        if asked is not None and asked > room:
            shown = f"{asked:,}" if asked <= MOST else told(asked)
            is_given = isinstance(body, ChatBody) or body.max_tokens is not None
            raise bad(
                f"max_tokens is {shown}{'' if is_given else ' where a request gives none'}, but beside a prompt of "
                f"{counted(length, 'token')} there is room for {room:,} (max_model_len is {most:,}). Give "
                f"max_tokens={room} or less, or shorten the prompt.",
                "max_tokens",
            )
        new_tokens = room if asked is None else asked
        if body.min_tokens and (not body.ignore_eos or body.min_tokens > new_tokens):
            raise bad(
                f"min_tokens is {told(body.min_tokens)}, but it is only supported with ignore_eos=true, and up to "
                f"max_tokens ({new_tokens:,}). Leave it out, or add ignore_eos.",
                "min_tokens",
            )
        try:
            chosen = body.temperature, max(body.top_k, 0), body.top_p
            found.append(Settings(new_tokens, *chosen, seed, tuple(sorted(stop)), logprobs))
        except EETError as error:
            raise of_engine(error, "temperature") from error
    return found
