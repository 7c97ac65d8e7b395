"""The JSON of OpenAI's objects for generated text: whole, or in chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eet_lab.serving.generating import Generating, Piece


def usage_of(prompt_tokens: int, completion_tokens: int = 0) -> dict[str, int]:
    """OpenAI's count of tokens."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


@dataclass(frozen=True)
class Form:
    """What one endpoint calls its objects and how a choice looks in them."""

    prefix: str
    whole_object: str
    chunk_object: str
    is_chat: bool

    def whole(self, head: dict[str, Any], generating: Generating, texts: Sequence[str]) -> dict[str, Any]:
        """A complete answer."""
        choices = [
            {"index": choice.number, **self._said(text), "logprobs": None, "finish_reason": choice.finish}
            for choice, text in zip(generating.choices, texts, strict=True)
        ]
        usage = usage_of(generating.prompt_tokens, generating.completion_tokens)
        return {**head, "object": self.whole_object, "choices": choices, "usage": usage}

    def head(self, head: dict[str, Any]) -> str:
        """The beginning of each chunk, up to its choices: JSON without its end."""
        return json.dumps({**head, "object": self.chunk_object})[:-1] + ',"choices":['

    def chunk(self, piece: Piece) -> str:
        """One choice of a chunk. It is written by hand: a server writes one for each token."""
        text = json.dumps(piece.text)
        finish = "null" if piece.finish is None else f'"{piece.finish}"'
        said = f'"text":{text}'
        if self.is_chat:
            said = '"delta":{' + (f'"content":{text}' if piece.text else "") + "}"
        return f'{{"index":{piece.number},{said},"logprobs":null,"finish_reason":{finish}}}'

    def opening(self, number: int) -> str:
        """What a choice of a chat begins with; nothing elsewhere."""
        if not self.is_chat:
            return ""
        delta = '"delta":{"role":"assistant","content":""}'
        return f'{{"index":{number},{delta},"logprobs":null,"finish_reason":null}}'

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}


TEXT = Form("cmpl", "text_completion", "text_completion", is_chat=False)
CHAT = Form("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)
