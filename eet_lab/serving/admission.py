"""Who may come in: bounds on queued requests and tokens, which are asked before anything is read of a request."""

from __future__ import annotations

from eet_lab.serving.errors import ApiError
from eet_lab.serving.options import BYTES_PER_TOKEN, Options

SMOOTHING = 0.1
"""The weight of the newest wait in the mean."""


class Ticket:
    """A request that was let in. It is queued until it is `started`, and inside until it has `left`."""

    def __init__(self, admission: Admission, tokens: int, now: float) -> None:
        self._admission, self._tokens, self.since = admission, tokens, now
        self._requests, self._is_queued, self._is_inside = 1, True, True

    def count(self, requests: int, tokens: int) -> None:
        """What it really is, once its prompts are read: that many requests of an engine, and their tokens."""
        if self._is_queued:
            self._admission.queue(requests - self._requests, tokens - self._tokens)
        self._requests, self._tokens = requests, tokens

    def started(self, now: float) -> bool:
        """The first token came `now`: it waits no more. Whether that is news."""
        is_news = self._is_queued
        if is_news:
            self._admission.waited(now - self.since)
        self._unqueue()
        return is_news

    def left(self) -> None:
        """The answer is complete, or nobody waits for it."""
        self._unqueue()
        if self._is_inside:
            self._is_inside = False
            self._admission.num_inside -= 1

    def _unqueue(self) -> None:
        if self._is_queued:
            self._is_queued = False
            self._admission.queue(-self._requests, -self._tokens)


class Admission:
    """Counts what is queued and inside. All calls come from the server's loop."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.num_queued = self.queued_tokens = self.num_inside = 0
        self.is_draining = False
        self._mean_wait_s = 0.0

    def enter(self, num_bytes: int, now: float) -> Ticket:
        """Let in a request whose body has so many bytes. Errors: ApiError, 503 while draining, 429 where it is full.

        One that finds room comes in however long it is: its own limit is the model's context.
        """
        if self.is_draining:
            raise ApiError(503, "The server is shutting down and takes no more requests.", code="shutting_down")
        limits = (
            ("requests", self.num_queued, self._options.max_queued_requests),
            ("tokens", self.queued_tokens, self._options.max_queued_tokens),
        )
        for name, queued, most in limits:
            if queued >= most:
                raise ApiError(
                    429,
                    f"The queue is full: {queued:,} {name} wait, and at most {most:,} may (max_queued_{name}). Send "
                    "this again later.",
                    code=f"too_many_queued_{name}",
                    retry_after_s=min(self._mean_wait_s, 60),
                )
        tokens = num_bytes // BYTES_PER_TOKEN
        self.queue(1, tokens)
        self.num_inside += 1
        return Ticket(self, tokens, now)

    def queue(self, requests: int, tokens: int) -> None:
        """So many more are queued; negative: fewer."""
        self.num_queued += requests
        self.queued_tokens += tokens

    def waited(self, seconds: float) -> None:
        """Another request has waited so long for its first token."""
        self._mean_wait_s += SMOOTHING * (seconds - self._mean_wait_s)
