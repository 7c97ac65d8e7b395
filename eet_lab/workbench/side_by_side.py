"""Two kept runs side by side: they were not timed in turn, so no change is claimed of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eet_lab.bench import Measurement
from eet_lab.errors import ResultError
from eet_lab.workbench.rows import KeptRun, Result, end, facts
from eet_lab.workbench.views import answer

HOW = (
    "These runs were not timed in turn, so other load on the machine may explain a difference. Measure again times "
    "both recipes in turn, here and now."
)


@dataclass(frozen=True)
class SideBySide:
    """Two rows of the list with what was measured last in each."""

    rows: Sequence[KeptRun]
    ends: tuple[Measurement, Measurement]
    same_prompts: bool

    @classmethod
    def of(cls, rows: Sequence[KeptRun], results: Sequence[Result]) -> SideBySide:
        """ResultError where one of them was stopped too soon."""
        first, second = (end(result) for result in results)
        if first is None or second is None:
            raise ResultError("One of these runs was stopped before anything was measured. Tick two others.")
        return cls(rows, (first, second), results[0].prompts == results[1].prompts)

    def table(self) -> dict[str, Any]:
        """All that is known of both."""
        lines = [["recipe", *(row.recipe for row in self.rows)], ["device", *(row.device for row in self.rows)]]
        one, other = map(facts, self.ends)
        lines += [[name, one[name], other[name]] for name in one]
        same = f"The same tokens: {'yes' if self.ends[0].tokens == self.ends[1].tokens else 'no'}."
        notes = [HOW, same if self.same_prompts else "They had other prompts."]
        return {"head": ["", *(row.label for row in self.rows)], "rows": lines, "notes": notes}

    def tiles(self) -> list[dict[str, Any]]:
        """The second, from the first."""
        return answer.tiles_apart(*self.ends, self.same_prompts)

    def told(self) -> str:
        """What stands in the banner."""
        names = " and ".join(f"{row.label} ({row.recipe})" for row in self.rows)
        return f"These are two kept runs side by side: {names}. They were not timed in turn."
