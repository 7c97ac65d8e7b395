"""What a client is told when something goes wrong: a status, and OpenAI's error object."""

from __future__ import annotations

import math
from typing import Any

from eet_lab.errors import EETError, ModelError, OutOfMemory, PromptError, RecipeError, ScheduleError
from eet_lab.models.chat import MessageError

TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
"""OpenAI's `type` of a status; every other is an invalid_request_error."""
FIELDS = ("temperature", "top_k", "top_p", "seed", "stop", "max_tokens", "prompt", "input")
"""Fields whose names begin an engine's message about them."""


class ApiError(Exception):
    """An answer that is no success. `param` is the field that was wrong, `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """What belongs to the status: when to come again, and how to bring a key."""
        found = {}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be answered as it is: 400."""
    return ApiError(400, message, param, code)


def took_too_long() -> ApiError:
    """What is told of a request that is not complete when its time, `request_s`, is over."""
    return ApiError(504, "The answer took longer than the server waits.", code="timeout")


def failed(error: BaseException, number: str) -> ApiError:
    """An engine that failed while it served this request: 500, with the number under which the log has the reason."""
    return ApiError(
        500,
        f"The engine failed ({type(error).__name__}), and this request with it. Send it again; the server's log has "
        f"the reason under {number}.",
        code=number,
    )


def of_engine(error: EETError, param: str) -> ApiError:
    """What an engine says of a request before it runs. `param` is the field where nothing else is named."""
    if isinstance(error, MessageError):
        return bad(str(error), error.place)
    if isinstance(error, PromptError):
        first = str(error).partition(" ")[0]
        named = "max_tokens" if first == "max_new_tokens" else first
        return bad(str(error), named if named in FIELDS else param)
    if isinstance(error, (ModelError, RecipeError)):
        return bad(str(error), "model")
    return ApiError(503 if isinstance(error, (OutOfMemory, ScheduleError)) else 500, str(error), retry_after_s=1)
