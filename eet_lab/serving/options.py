"""What a server allows, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from eet_lab.errors import ScheduleError, SetupError, check_known
from eet_lab.scheduling.policies import parse_policy
from eet_lab.scheduling.whole import MOST, check_whole, is_real
from eet_lab.words import MiB, told


@dataclass(frozen=True)
class Options:
    """Bounds and times of a server. Errors: SetupError, which names the field, its value and its limits.

    A request counts as queued until its first token is there; a text that an encoder reads, until it is read.
    """

    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_048_576
    """Tokens of prompts. A body that is not tokenized yet counts as one token for every 4 bytes."""
    max_body_bytes: int = 4 * MiB
    max_model_len: int | None = None
    """The most tokens of a prompt and its answer, or of a text that an encoder reads.

    None: the model's context; of one that generates, no more than `LONGEST`.
    """
    header_s: float = 10.0
    """The time for a request's headers to arrive."""
    body_s: float = 30.0
    """The time for its body."""
    request_s: float = 600.0
    """The time from its acceptance to the last byte of its answer."""
    drain_s: float = 30.0
    """The time for what was accepted to finish once the server is asked to stop."""
    api_key: str | None = field(default=None, repr=False)
    """The key that every request must bring, but for /health. None: no key is asked for."""
    served_model_name: str | None = None
    """The model's name in requests. None: the name by which it was loaded."""
    response_cache_mib: int = 0
    """Room for the answers to requests that get the same again (greedy or seeded texts, embeddings, classes). 0: none.

    All clients share it, and the time of an answer tells whether somebody asked for it before.
    """
    policy: str | None = None
    """Which texts an encoder reads together: words of a batching policy, such as "dynamic_program:trigger=lazy".

    Its cost table, if it asks for one, is measured before the first request, once a machine. None: whole requests, as
    many as come to a pass of tokens. Requests of other models join as the recipe's continuous_batching says.
    """
    pool: str = "mean"
    """How /v1/embeddings makes a vector of a text: "mean" or "cls"."""

    def __post_init__(self) -> None:
        for name in ("max_queued_requests", "max_queued_tokens", "max_body_bytes"):
            check_whole(SetupError, name, getattr(self, name), 1, MOST)
        check_whole(SetupError, "response_cache_mib", self.response_cache_mib, 0, MOST)
        if self.max_model_len is not None:
            check_whole(SetupError, "max_model_len", self.max_model_len, 2, MOST)
        for name in ("header_s", "body_s", "request_s", "drain_s"):
            value = getattr(self, name)
            if not is_real(value) or not 0 < value <= LONGEST_S:
                raise SetupError(f"{name} is {told(value)}, but it must be seconds above 0, at most {LONGEST_S:,}.")
        for name in ("api_key", "served_model_name"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise SetupError(f"{name} is {told(value)}, but it must be a text of one character at least, or None.")
        if self.api_key is not None and (not self.api_key.isprintable() or self.api_key != self.api_key.strip()):
            raise SetupError("api_key must be one line, without a space at either end: no request could bring it.")
        if self.policy is not None:
            _check_policy(self.policy)
        if self.pool not in ("mean", "cls"):
            raise SetupError(f"pool is {told(self.pool)}, but it must be 'mean' or 'cls'.")

    @classmethod
    def of(cls, **options: Any) -> Options:
        """Options from keywords; SetupError names one that does not exist."""
        for name in options:
            check_known(SetupError, "option", name, [each.name for each in fields(cls)])
        return cls(**options)

    def columns(self, context: int, is_encoder: bool) -> int:
        """`max_model_len` of a model of such a context; SetupError for more."""
        if self.max_model_len is None:
            return context if is_encoder else min(context, LONGEST)
        if self.max_model_len > context:
            raise SetupError(
                f"max_model_len is {self.max_model_len:,}, but the model's context has {context:,} tokens. Ask for at "
                "most as many."
            )
        return self.max_model_len


def _check_policy(words: Any) -> None:
    """SetupError for what is no policy of an encoder."""
    if not isinstance(words, str):
        raise SetupError(f"policy is {told(words)}, but it must be words such as 'dynamic_program', or None.")
    try:
        policy = parse_policy(words)
    except ScheduleError as error:
        raise SetupError(f"policy: {error}") from None
    if "encode" not in policy.stages:
        raise SetupError(
            f"policy is {policy.name}, which is for models that generate: its knobs are those of their recipe, such as "
            "all,continuous_batching:rows=16."
        )


DECODER_RECIPE, ENCODER_RECIPE = "all,continuous_batching", "all"
"""Recipes where none is given."""
LONGEST = 4096
"""Where nothing says how long requests may be: every slot holds memory for as many tokens."""
LONGEST_S = 86_400
BYTES_PER_TOKEN = 4
"""An estimate for English text in a vocabulary of some 50,000 words."""
