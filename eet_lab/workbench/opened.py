"""What is open instead of the newest result: a kept run with its own choices, read-only, or two side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eet_lab.bench import Comparison, Ladder, Measurement, Workload
from eet_lab.bench.timeline import Timelines
from eet_lab.errors import EETError, PromptError, ResultError
from eet_lab.figures import theme
from eet_lab.figures.players import race_lane
from eet_lab.figures.results import pair_names
from eet_lab.labels import short_form
from eet_lab.models.config import PRESETS
from eet_lab.models.loading import RANDOM_LABEL, demo_tokenizer, is_demo
from eet_lab.models.tokenizer import UNKNOWN, Tokenizer
from eet_lab.words import counted
from eet_lab.workbench.choices import State
from eet_lab.workbench.jobs import BASELINE, decoder
from eet_lab.workbench.rows import KeptRun, Result, end, facts
from eet_lab.workbench.views import answer, bar

NOT_IN_TURN = "These runs were not timed in turn, so other load on the machine may explain a difference."
HOW = f"{NOT_IN_TURN} Measure again times both recipes in turn, here and now."


def models_apart(rows: Sequence[KeptRun]) -> str:
    """That runs are of several models, or of several weights of one, in words; "" where they are of one."""
    for what in ("model", "weights"):
        found = list(dict.fromkeys(value for row in rows if (value := getattr(row, what))))
        if len(found) > 1:
            return f"The {what.rstrip('s')}s differ: {' and '.join(found)}."
    return ""


@dataclass(frozen=True)
class SideBySide:
    """Two rows of the list with what was measured last in each."""

    rows: Sequence[KeptRun]
    ends: tuple[Measurement, Measurement]
    of_others: str
    """What differs, so that no change can be told: "of other models", "of other prompts", or both; "" where nothing."""
    reads: bool
    """Whether they are an encoder's."""

    @classmethod
    def of(cls, rows: Sequence[KeptRun], results: Sequence[Result]) -> SideBySide:
        """ResultError where one of them was stopped too soon."""
        first, second = (end(result) for result in results)
        if first is None or second is None:
            raise ResultError("One of these runs was stopped before anything was measured. Tick two others.")
        one, other = (result.prompts for result in results)
        differ = ["models"] * bool(models_apart(rows)) + ["prompts"] * (one != other)
        reads = any(result.reads for result in results)
        return cls(rows, (first, second), f"of other {' and '.join(differ)}" if differ else "", reads)

    def table(self) -> dict[str, Any]:
        """All that is known of both."""
        apart = models_apart(self.rows)
        told = [*["model"] * bool(apart), "recipe", "device"]
        lines = [[name, *(getattr(row, name) for row in self.rows)] for name in told]
        one, other = map(facts, self.ends)
        lines += [[name, one[name], other[name]] for name in one]
        same = f"The same tokens: {'yes' if self.ends[0].tokens == self.ends[1].tokens else 'no'}."
        same = "Their vectors are not kept, so they cannot be compared." if self.reads else same
        how = f"{apart} {NOT_IN_TURN}" if apart else NOT_IN_TURN if self.reads else HOW
        notes = [how, f"They are {self.of_others}." if self.of_others else same]
        return {"head": ["", *(row.label for row in self.rows)], "rows": lines, "notes": notes}

    def tiles(self) -> list[dict[str, Any]]:
        """The second, from the first."""
        return answer.tiles_apart(*self.ends, self.of_others, self.reads)

    def headline(self) -> dict[str, Any]:
        """What stands in the bar in place of an answer: nothing was measured of both in turn."""
        said = "two kept runs side by side", self.of_others or "not timed in turn"
        first, second = (row.label for row in self.rows)
        return {"parts": [{"text": text, "kind": "plain"} for text in said], "about": f"{second}, from {first}"}

    def told(self) -> str:
        """What stands in the banner."""
        names = " and ".join(f"{row.label} ({row.recipe})" for row in self.rows)
        apart = f"{why} " if (why := models_apart(self.rows)) else ""
        return f"These are two kept runs side by side: {names}. {apart}They were not timed in turn."


@dataclass(frozen=True)
class Setup:
    """What a kept run was measured with, for the views that show choices: `bar` has the bar's lists."""

    state: State
    bar: Mapping[str, Any]
    lengths: Sequence[int]
    context: int | None


@dataclass(frozen=True)
class Opened:
    """What is open instead of the newest result: a kept run with its `setup`, or a `pair` of two side by side.

    A pair has no setup of its own: the reader's choices stay as they are. `monitor`: what was sampled while it ran.
    """

    row: KeptRun | None = None
    result: Result | None = None
    setup: Setup | None = None
    pair: SideBySide | None = None
    timelines: Timelines | None = None
    monitor: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, row: KeptRun, result: Result, beside: Mapping[str, Any]) -> Opened:
        """One kept run; `beside` is what its file holds beside the result."""
        where, config = result.environment, PRESETS.get(result.environment.model)
        header = _header(where.model_label, where.device, where.dtype)
        setup = Setup(state_of(result), header, result.prompt_lengths, config.context if config else None)
        return cls(row, result, setup, timelines=beside.get("timeline"), monitor=beside.get("monitor") or {})

    def named(self, rows: Mapping[str, KeptRun]) -> Opened:
        """The same under present names: a run may be renamed while it is open."""
        if self.pair is not None:
            return replace(self, pair=replace(self.pair, rows=[rows.get(row.id, row) for row in self.pair.rows]))
        return replace(self, row=rows.get(self.id, self.row))

    @property
    def id(self) -> str:
        """The id of the kept run; "" for two."""
        return self.row.id if self.row else ""

    @property
    def ids(self) -> list[str]:
        """The ids of all that is open."""
        return [row.id for row in (self.pair.rows if self.pair else [self.row] if self.row else [])]

    @property
    def banner(self) -> Mapping[str, Any]:
        """What is open, and the way back."""
        if self.pair is not None:
            return bar.kept_banner(self.pair.told(), "Back to my result")
        if (row := self.row) is None:
            return {}
        told = (
            f"This is a kept run: {row.name}. {row.origin} Model, prompts and switches are those of the run, read-only."
        )
        return bar.kept_banner(told, "Back to my model")

    @property
    def against(self) -> str:
        """The label of what it was compared with; "" of a single run, and of a pair, which was not compared."""
        if isinstance(result := self.result, Comparison):
            return short_form(result.baseline.recipe, result.environment.device_kind)
        return BASELINE if isinstance(result, Ladder) else ""

    @property
    def can_race(self) -> bool:
        """Whether it has two lanes, on which tokens come one after the other."""
        return self.result is not None and not self.result.reads and answer.ends(self.result) is not None

    def lanes(self) -> tuple[str, Sequence[str], list[dict[str, Any]]]:
        """The title, the prompts and the two lanes of a race."""
        result = self.result
        if result is None or (pair := answer.ends(result)) is None:
            raise EETError("A race needs two runs, and this is a single one: open a Compare or a Ladder.")
        where, trained = result.environment, is_demo(result.environment.model_label)
        stop: Any = result.settings.get("stop", ())  # a list of ids, as files are checked
        tokenizer = demo_tokenizer() if trained else None
        decode = decoder(tokenizer, stop)
        prompts = result.prompts if trained else as_ids(result)
        names, colors = pair_names([m.recipe for m in pair], where.device_kind), (theme.BASELINE, theme.SELECTION)
        lanes = [
            race_lane(name, color, m, result.prompt_lengths, decode)
            for name, m, color in zip(names, pair, colors, strict=True)
        ]
        title = f"{where.model_label}, recorded on {where.device}. Both lanes run on one clock."
        title = " ".join(filter(None, [title, answer.meaningless(result)]))
        return title, prompts, lanes


def state_of(result: Result) -> State:
    """The choices that a result was measured with."""
    settings, where = dict(result.settings), result.environment
    stop = settings.pop("stop", ())
    state = State(model=where.model, device=where.device_kind, dtype=where.dtype, prompts=list(result.prompts))
    state.generation, state.stop_at_eos = {**state.generation, **settings}, bool(stop)
    recipe = result.selection.recipe if isinstance(result, Comparison) else result.recipe
    state.show_only(recipe)
    return state


def _header(model: str, device: str, dtype: str) -> dict[str, Any]:
    """The bar's lists, each with the one thing that was chosen."""
    chosen = {"model": model, "device": device, "dtype": dtype}
    return {
        **chosen,
        **{f"{name}s": [value] for name, value in chosen.items()},
        "ask_path": False,
        "path": "",
        "load_again": "",
        "facts": "",
        "badge": {"text": "kept run", "kind": "plain", "tip": "Nothing is measured while it is open."},
    }


def as_ids(result: Result) -> tuple[str, ...]:
    """Each prompt in the notation of `decoder(None)`.

    A result keeps prompts as texts. The demo model and random weights share a vocabulary that is always there, so ids
    of their prompts can be found again. Where they cannot, a whole text stays, and of one in pieces only the number of
    its tokens is told.
    """
    label = result.environment.model_label
    tokenizer = demo_tokenizer() if is_demo(label) or label.endswith(RANDOM_LABEL) else None
    written = decoder(None)
    return tuple(
        written(ids) if ids else f"{counted(length, 'token') if UNKNOWN.search(text) else text} "
        for ids, text, length in zip(_found(result, tokenizer), result.prompts, result.prompt_lengths, strict=True)
    )


def _found(result: Result, tokenizer: Tokenizer | None) -> Iterator[Sequence[int]]:
    """The ids of each prompt, known to give its text; none where there are no such."""
    drawn = _drawn(result)
    for row, (text, length) in enumerate(zip(result.prompts, result.prompt_lengths, strict=True)):
        likely = [*drawn[row : row + 1], tokenizer.encode(text)] if tokenizer else []
        right = (ids for ids in likely if tokenizer and len(ids) == length and tokenizer.decode(ids) == text)
        yield next(right, ())


def _drawn(result: Result) -> list[list[int]]:
    """The random prompts of a workload of that name; none where prompts have other lengths, and so were chosen."""
    config = PRESETS.get(result.environment.model)
    try:
        workload = Workload.parse(result.workload)
    except PromptError:
        return []
    same = workload.lengths == tuple(result.prompt_lengths)
    return workload.prompts(config.vocab_size) if config and same else []
