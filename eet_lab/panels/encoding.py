"""Prompts as tokens, as they are typed: each is encoded once for a model."""

from __future__ import annotations

from collections.abc import Sequence

from eet_lab.errors import EETError
from eet_lab.models import Model
from eet_lab.panels import jobs


class Encoding:
    """Remembers the tokens of prompts while the model stays the same. Only the ui thread calls it."""

    def __init__(self) -> None:
        self._known: dict[str, list[int]] = {}

    def forget(self) -> None:
        """There is another model."""
        self._known.clear()

    def rows(self, model: Model | None, prompts: Sequence[str]) -> tuple[list[list[int]] | None, str | None]:
        """Tokens of every prompt; None without a model, or with why one cannot be encoded."""
        if model is None:
            return None, None
        try:
            for prompt in prompts:
                if prompt not in self._known:
                    self._known[prompt] = jobs.token_ids(model, prompt)
        except EETError as error:
            return None, str(error)
        return [self._known[prompt] for prompt in prompts], None
