"""What a client sends, checked field by field: the first one that is wrong is named.

An unknown field is refused, for it would have no effect; so is one that is known and not served yet, unless its value
asks for nothing. Fields that only label a request are taken and not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eet_lab.codec import SURROGATE
from eet_lab.engine.settings import MOST_LOGPROBS
from eet_lab.errors import did_you_mean
from eet_lab.scheduling.whole import MOST
from eet_lab.serving.errors import ApiError, bad
from eet_lab.words import told, too_many_digits

MOST_STOPS = 16
MOST_STOP_LENGTH = 256
MOST_CHOICES = 128
LABELS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "priority"}
NOTHING: tuple[Any, ...] = (False, 0, "", [], {})
NOT_YET: Mapping[str, tuple[Any, ...]] = {
    "prompt_logprobs": (),
    "echo": (False,),
    "best_of": (1,),
    "repetition_penalty": (1,),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    **dict.fromkeys(("suffix", "presence_penalty", "frequency_penalty", "min_p", "logit_bias"), NOTHING),
    **dict.fromkeys(("tools", "functions", "audio", "prediction", "use_beam_search", "web_search_options"), NOTHING),
    **dict.fromkeys(("reasoning_effort", "verbosity", "guided_json", "structured_outputs"), ()),
}
"""Fields that are not served yet, and the values that ask for nothing."""


class Body(BaseModel):
    """Any request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None

    def identity(self) -> dict[str, Any] | None:
        """The fields that decide what is answered; None where the same request gets something else each time."""
        return self.model_dump(exclude={"model"})


class StreamOptions(BaseModel):
    """What comes beside the tokens of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Sampled(Body):
    """How to generate. `top_k`, `ignore_eos`, `min_tokens` and `stop_token_ids` are vLLM's."""

    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: Any = None
    stop_token_ids: list[Annotated[int, Field(ge=0, le=MOST)]] = Field(default=[], max_length=MOST_STOPS)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    stream: bool = False
    stream_options: StreamOptions | None = None

    def identity(self) -> dict[str, Any] | None:
        """The same: of a greedy request how others would be drawn does not matter, of a drawn one its seed."""
        if self.temperature and self.seed is None:
            return None
        no_matter = {"model", "stream", "stream_options"}
        return self.model_dump(exclude=no_matter if self.temperature else no_matter | {"seed", "top_k", "top_p"})

    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside each, with their log-probabilities; None: nothing is."""
        return None

    def stops(self) -> list[str]:
        """The stop strings; ApiError for what are none."""
        stops = [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise bad(
                f"stop is {told(self.stop)}, but it must be a text or a list of texts, none of them empty.", "stop"
            )
        if len(stops) > MOST_STOPS:
            raise bad(f"stop has {len(stops):,} texts, but at most {MOST_STOPS} are looked for. Give fewer.", "stop")
        if (longest := max(map(len, stops), default=0)) > MOST_STOP_LENGTH:
            raise bad(
                f"stop has a text of {longest:,} characters, but at most {MOST_STOP_LENGTH} are allowed. Shorten it.",
                "stop",
            )
        if half := SURROGATE.search("\n".join(stops)):
            raise bad(f"stop has {half[0]!a}, half of a surrogate pair, which no answer has. Take it out.", "stop")
        return stops


class CompletionBody(Sampled):
    """A request for /v1/completions.

    `truncate_prompt_tokens` is vLLM's: of a longer prompt its last tokens are read, so many; -1: all that there is room
    for beside `max_tokens`. Those that mark the beginning of a text stay, and count.
    """

    prompt: Any
    logprobs: int | None = Field(default=None, ge=0, le=5)
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)

    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(Sampled):
    """A request for /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_LOGPROBS)

    def num_logprobs(self) -> int | None:
        """The same; ApiError where only their number is given."""
        if self.top_logprobs and not self.logprobs:
            raise bad(
                f"top_logprobs is {self.top_logprobs}, but nothing is told without logprobs=true. Add it.",
                "top_logprobs",
            )
        return self.top_logprobs if self.logprobs else None


class TextsBody(Body):
    """A request for /v1/classify.

    `truncate_prompt_tokens` is vLLM's: texts are cut to so many tokens, those among them that mark a text's beginning
    and end; -1: to the context. As there, a text keeps its first words. Of token ids the first and the last one stay,
    where vLLM keeps the first alone (its older versions: the last). No pair of texts is taken, as in vLLM, where
    /score reads those: ids that are one are cut at their end too, which is its second text's.
    """

    input: Any
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)


class EmbeddingBody(TextsBody):
    """A request for /v1/embeddings."""

    encoding_format: str = "float"
    dimensions: int | None = None

    def identity(self) -> dict[str, Any] | None:
        """The same: vectors are kept as numbers, however they are written."""
        return self.model_dump(exclude={"model", "encoding_format", "dimensions"})


Kind = TypeVar("Kind", bound=Body)


def parsed(raw: bytes, kind: type[Kind]) -> Kind:
    """A body as it was sent; ApiError, with the field, for what is none."""
    constants: list[str] = []

    def no_number(name: str) -> object:
        constants.append(name)
        return object()  # which no JSON can be made of

    try:
        found = json.loads(raw.decode(), parse_constant=no_number, object_pairs_hook=_object)
        if constants:
            raise _not_finite(found, constants[0])
    except UnicodeDecodeError as error:
        raise bad(f"The body is no UTF-8: {error.reason} at byte {error.start}.") from error
    except RecursionError as error:
        raise bad("The body nests too deeply.") from error
    except ValueError as error:
        wrong = too_many_digits(error)
        raise bad(f"The body cannot be read: {wrong}." if wrong else f"The body is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise bad(f"The body is {told(found)}, but it must be a JSON object.")
    fields = {name: value for name, value in found.items() if value is not None and name not in LABELS}
    for name in [name for name in fields if name in NOT_YET]:
        value = fields.pop(name)
        if not any(_same(value, nothing) for nothing in NOT_YET[name]):
            raise bad(f"{name} is {told(value)}, but it is not supported yet. Leave it out.", name, "unsupported")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _of(error, kind) from error


def _same(value: Any, other: Any) -> bool:
    """Equal, where Python takes 0 for False: logprobs=0 asks for something."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if half := SURROGATE.search("\n".join(found)):
        raise bad(f"A field's name has {half[0]!a}, half of a surrogate pair. Take it out.")
    return found


def _not_finite(found: Any, constant: str) -> ApiError:
    """NaN or an infinity, which Python reads, and the field that holds it."""
    for name, value in found.items() if isinstance(found, dict) else ():
        try:
            json.dumps(value)
        except TypeError:
            shown = name[:60]
            return bad(f"{ascii(shown)[1:-1]} has {constant}, which is no number of JSON. Give a finite one.", shown)
    return bad(f"The body is no JSON: {constant} is no number of it.")


def _of(error: ValidationError, kind: type[Body]) -> ApiError:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        shown = ascii(name[:60])
        within = StreamOptions if len(first["loc"]) > 1 else kind  # the one field that has fields
        hint = did_you_mean(str(first["loc"][-1]), within.model_fields)
        return bad(f"There is no field {shown}.{hint}", name[:60], "unknown_field")
    if first["type"] == "missing":
        return bad(f"{name} is missing.", name, "missing_field")
    if first["type"] == "too_short":
        return bad(f"{name} is {told(first['input'])}, but it must have at least one entry.", name)
    return bad(f"{name} is {told(first['input'])}, but {_lower(first['msg'])}.", name)


def _lower(message: str) -> str:
    return f"it{message[5:]}" if message.startswith("Input") else message[:1].lower() + message[1:]
