"""The JSON of OpenAI's objects for generated text: whole, or in chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eet_lab.serving.generating import Generating, Piece
from eet_lab.serving.logprobs import Scored, of_chat, of_completion
from eet_lab.serving.replay import Replay


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

    def whole(self, head: dict[str, Any], generating: Generating | Replay, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A complete answer, of all its pieces."""
        texts, scored = [[[] for _ in generating.choices] for _ in range(2)]  # type: ignore[var-annotated]
        for piece in pieces:
            texts[piece.number].append(piece.text)
            scored[piece.number] += piece.scored
        choices = [
            {
                "index": choice.number,
                **self._said("".join(texts[choice.number])),
                "logprobs": self._logprobs(scored[choice.number]),
                "finish_reason": choice.finish,
            }
            for choice in generating.choices
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
        logprobs = "null" if not piece.scored else json.dumps(self._logprobs(piece.scored))
        return f'{{"index":{piece.number},{said},"logprobs":{logprobs},"finish_reason":{finish}}}'

    def opening(self, number: int) -> str:
        """What a choice of a chat begins with; nothing elsewhere."""
        if not self.is_chat:
            return ""
        delta = '"delta":{"role":"assistant","content":""}'
        return f'{{"index":{number},{delta},"logprobs":null,"finish_reason":null}}'

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if not scored:
            return None
        return of_chat(scored) if self.is_chat else of_completion(scored)

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}


TEXT = Form("cmpl", "text_completion", "text_completion", is_chat=False)
CHAT = Form("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)
