"""States that the views are tested with: what a workbench sends, of the demo model and of results that come along."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from eet_lab.bench import load_result
from eet_lab.errors import PromptError
from eet_lab.parts import Parts
from eet_lab.technique import Recipe, Technique, knob, names_in_all, registry
from eet_lab.workbench import Workbench
from eet_lab.workbench.history import SHIPPED
from eet_lab.workbench.views.chosen import knobs_state
from workbench.driving import ask, do, turn_until

State = dict[str, Any]
States = dict[str, State]

PROMPTS = [
    "The museum opened its doors at nine, and the first visitors",
    "A transformer reads",
    "In the beginning there was a small computer that nobody wanted, because it was slow and rather expensive",
    "Once upon a time",
]
RECORDING = "recorded:h200-compare-gpt2-xl"


@dataclass(frozen=True)
class Knobs(Technique):
    """A knob of each kind."""

    name: ClassVar[str] = "knobs"
    title: ClassVar[str] = "Knobs"
    page: int = knob(16, "How many columns.", label="KV layout", choices=(16, 32))
    head: bool = knob(True, "Of the LM head as well.", label="LM head")
    bucket: int = knob(256, "Columns that one graph serves.", label="Bucket", unit="columns", low=16, high=4096)

    def apply(self, parts: Parts) -> Parts:
        return parts


def knobs() -> list[State]:
    """The knobs of a technique that has one of each kind."""
    return knobs_state(Knobs(), enabled=True)


def empty() -> States:
    """A model on a CPU, and nothing measured."""
    return deepcopy(_made()["empty"])


def forecast() -> States:
    """The forecast has come."""
    return deepcopy(_made()["forecast"])


def compared() -> States:
    """After a Compare on a CPU, which is kept as "compare 1"."""
    return deepcopy(_made()["compared"])


def busy() -> States:
    """In the middle of a Compare."""
    return deepcopy(_made()["busy"])


def failed() -> States:
    """An error, with its details."""
    return deepcopy(_made()["failed"])


def laddered() -> States:
    """After a Ladder with all techniques that keep the weights on a GPU; two other runs are named and ticked."""
    return deepcopy(_made()["laddered"])


def tabled() -> States:
    """The table of a ladder."""
    return deepcopy(_made()["tabled"])


ALL = {f.__name__: f for f in (empty, forecast, compared, laddered, busy, failed, tabled)}


@cache
def _made() -> dict[str, States]:
    with TemporaryDirectory() as folder:
        bench = Workbench("demo", PROMPTS, device="cpu", folder=Path(folder) / "eet-lab-results", temperature=0)
        try:
            return dict(_driven(bench))
        finally:
            bench.close()


def _driven(bench: Workbench) -> Iterator[tuple[str, States]]:
    """One state after the other, each from the one before; only what takes a GPU or long is put there by hand."""
    controller, history = bench.controller, bench.controller.results.history
    controller.devices = ["cpu"]  # whatever this machine has
    turn_until(bench, lambda: bench.model is not None and not history.unread())
    do(bench, ask.select("memory_reuse"))
    yield "empty", _taken(bench)
    turn_until(bench, lambda: controller.fits.state()["summary"] and controller.background.idle)
    yield "forecast", _taken(bench)
    controller.status.fail(_error())
    yield "failed", _taken(bench)
    controller.status.forgive()
    compare, ladder = (load_result(SHIPPED / f"h200-{name}.json") for name in ("compare-demo", "ladder-gpt2-xl"))
    controller.results.finish(compare, {}, {})
    [first] = [row.id for row in history.rows() if row.writable]
    do(bench, ask.rename(first, "compare 1"))
    yield "compared", _taken(bench)
    controller.busy, controller.status.text = True, "Measuring pair 3 of 6: baseline"
    controller.status.clock.start()
    controller.status.clock.progress(46, 100)
    controller.results.begin()
    controller.results.provisional(compare)
    yield "busy", _taken(bench)
    controller.busy = False
    controller.results.finish(compare, {}, {})
    second = next(row.id for row in history.rows() if row.writable)
    do(
        bench,
        ask.rename(first, "no graphs"),
        ask.rename(second, "before the fix"),
        ask.annotate(second, "driver 580, cold"),
    )
    do(bench, ask.pin(second, True), ask.tick(first, True), ask.tick(second, True))
    controller.results.finish(ladder, {}, {})
    third = next(row.id for row in history.rows() if row.writable and not row.pinned)
    do(bench, ask.rename(third, "ladder 1"))
    _move_to_a_gpu(bench)
    yield "laddered", _taken(bench)
    controller.results.tab("table")
    yield "tabled", _taken(bench)


def _taken(bench: Workbench) -> States:
    """What the five views show now."""
    bench.controller._show()
    bench.controller._show_bar()
    views = ("bar", "techniques", "inputs", "answer", "runs")
    return {view: deepcopy(getattr(bench.controller.page, view).state) for view in views}


def _move_to_a_gpu(bench: Workbench) -> None:
    """As if there were one on which all techniques run; a turn would load the model there."""
    controller, state = bench.controller, bench.controller.state
    state._unavailable |= {(technique, "cuda", state._config): None for technique in registry().values()}
    controller.devices, state.device = ["cuda", "cpu"], "cuda"
    state.choose(Recipe(tuple(registry()[name]() for name in names_in_all())))


def _error() -> PromptError:
    try:
        raise PromptError("Prompt 3 has 612 tokens, past the context of 512.\nShorten it.") from ValueError("612")
    except PromptError as error:
        return error
