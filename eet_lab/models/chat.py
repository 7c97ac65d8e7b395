"""The checkpoint's own chat template: messages in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eet_lab.errors import ModelError, PromptError, first_line
from eet_lab.models.checkpoint import AGAIN, read_json
from eet_lab.models.tokenizer import check_characters
from eet_lab.words import told

FILE = "chat_template.jinja"


class ChatTemplate:
    """What a checkpoint makes of a conversation, rendered by transformers in Jinja's sandbox: no code is run.

    Errors: ModelError for a tokenizer that transformers cannot read.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the library raises many kinds
            raise ModelError(f"The tokenizer in {folder} cannot be read: {first_line(error)}. {AGAIN}") from error

    def ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt that the next message follows; PromptError for a conversation that the template does not take."""
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template raises what it likes: that is how it refuses
            raise PromptError(f"The model's chat template refuses these messages: {first_line(error)}.") from error


def template_of(folder: Path | None) -> ChatTemplate | None:
    """The template of a model that was read from this folder; None where it has none."""
    if folder is None:
        return None
    config = folder / "tokenizer_config.json"
    has_one = (folder / FILE).exists() or (config.exists() and "chat_template" in read_json(config))
    return ChatTemplate(folder) if has_one else None


class MessageError(PromptError):
    """A message that cannot be read; `place` is the field, such as "messages.0.content"."""

    def __init__(self, place: str, wrong: str) -> None:
        super().__init__(f"{place} {wrong}")
        self.place = place


def as_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their texts in one piece each; MessageError for what is none."""
    return [{**message, "content": _text(message, f"messages.{number}")} for number, message in enumerate(messages)]


def _text(message: Mapping[str, Any], where: str) -> str:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise MessageError(f"{where}.role", f"is {told(role)}, but it must be a text such as 'user'.")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise MessageError(f"{where}.content", f"is {told(content)}, but it must be a text, or a list of parts.")
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise MessageError(f"{where}.content", f"has {told(part)}, but only parts of text are read.")
    text = "".join(part["text"] for part in parts)
    try:
        check_characters(text)
    except PromptError as error:
        raise MessageError(f"{where}.content", f"cannot be read. {error}") from error
    return text
