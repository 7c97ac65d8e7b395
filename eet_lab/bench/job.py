"""What Compare and Ladder are asked to do, checked once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eet_lab.bench.environment import environment
from eet_lab.bench.turns import check_repeats
from eet_lab.bench.workloads import default_prompts, describe
from eet_lab.engine.settings import Settings, checked_prompts
from eet_lab.models import Model
from eet_lab.texts import Prompts, as_rows


@dataclass(frozen=True)
class Job:
    """A model, its prompts as token ids, and how to generate."""

    model: Model
    rows: list[list[int]]
    settings: Settings

    @classmethod
    def of(cls, model: Model, prompts: Prompts | None, repeats: int | None, settings: dict[str, Any]) -> Job:
        """From what the user gave (no prompts: the default ones); PromptError for what cannot run."""
        check_repeats(repeats)
        chosen = Settings.of(**settings)
        encoded = as_rows(model, default_prompts(model) if prompts is None else prompts)
        return cls(model, checked_prompts(encoded, chosen.max_new_tokens, model.config), chosen)

    @property
    def workload(self) -> str:
        return describe(self.model.name, self.rows, self.settings.max_new_tokens)

    def described(self) -> dict[str, Any]:
        """The fields that every result begins with."""
        settings = asdict(self.settings)
        return {
            "environment": environment(self.model),
            "workload": self.workload,
            "prompts": tuple(map(self.model.decode, self.rows)),
            "prompt_lengths": tuple(map(len, self.rows)),
            "settings": settings | {"stop": list(settings["stop"])},
        }
