"""What the engine thread can be asked to do: what ends in `feed, cancel` is work for it, once the rest is given."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from eet_lab import bench
from eet_lab.bench.run_memory import RunMemory, TorchCalls, TorchCounter
from eet_lab.bench.timeline_steps import timelines
from eet_lab.devices import present
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import Cancelled, EETError, PromptError
from eet_lab.figures.results import pair_names
from eet_lab.labels import short_form
from eet_lab.models import PRESETS, Model, load
from eet_lab.models.loading import UnknownModel
from eet_lab.models.transcript import Decode, ended_by
from eet_lab.progress import Cancel
from eet_lab.technique import Recipe
from eet_lab.workbench.engine_thread import Feed, Kept, Named, Phase, Work
from eet_lab.workbench.live import NAMES

BASELINE = "baseline"
"""What Compare is held against while no run is pinned."""
NOTHING_ON = "No technique is on. Run shows the baseline; Compare and Ladder need at least one technique."
BEGUN = {
    "run": "preparing the run",
    "compare": "preparing the comparison",
    "ladder": "preparing the ladder",
    "measure_ticked": "preparing to measure the two ticked runs again",
    "take_timeline": "preparing the timeline",
    "cost_table": "preparing to measure the model for serving",
    "serving": "preparing to serve the model",
}
"""What is said of a job until it tells of itself."""
PHASES = {
    "check": "checking that the output is the same",
    "warm-up": "warming up",
    "watched": "watched run",
    "measured": "measuring with the live view paused",
}


def token_ids(model: Model, prompt: str) -> list[int]:
    """A prompt's tokens; without a tokenizer the text is read as token ids."""
    if model.tokenizer is not None:
        return model.encode(prompt)
    try:
        return [int(word) for word in prompt.replace(",", " ").split()]
    except ValueError:
        raise PromptError(
            f"{model.name} came without a tokenizer, so prompts are token ids such as 12 7 405, and {prompt[:40]!r} is "
            "not. Load it with a tokenizer, or write numbers."
        ) from None


def decoder(tokenizer: Any, stop: Collection[int] = ()) -> Decode:
    """Token ids to text, a piece at a time; without a tokenizer (None) the ids themselves, apart.

    `stop`: the tokens that end a text, which are not shown.
    """
    return ended_by(stop, tokenizer.decode if tokenizer else lambda ids: "".join(f"{token} " for token in ids))


def loading(name: Any) -> str:
    """What is said while a model is loaded."""
    return f"loading the model {name if isinstance(name, str) else type(name).__name__}"


def load_model(name: Any, device: str, dtype: str | None, feed: Feed, cancel: threading.Event) -> Model:
    """Load a model; ModelError offers those that can be run here."""
    feed.progress(0, 0, loading(name))
    try:
        model = load(name, device=device, dtype=dtype)
    except UnknownModel as error:
        raise UnknownModel(error.name, ("demo", *PRESETS)) from None
    model.decoder  # noqa: B018  an encoder says here that it cannot generate
    return model


@dataclass(frozen=True)
class Job:
    """A model, its prompts, what is switched on, and how to generate; each method is one thing to do with them.

    `repeats` is the number of pairs that are timed; None: until the interval is narrow.
    """

    model: Model
    prompts: Sequence[str]
    recipe: Recipe
    settings: Settings
    repeats: int | None = None

    @classmethod
    def of(cls, result: bench.Comparison, model: Model) -> Job:
        """What a comparison's selection was asked to do: its own recipe, prompts and settings.

        EETError where `model` is another than it was measured on, or of another type or device.
        """
        where = result.environment
        was, here = (where.model_label, where.dtype, where.device_kind), (model.label, model.dtype, model.device)
        if was != here:
            raise EETError(
                f"The comparison that is shown was measured on {' '.join(was)}, but {' '.join(here)} is loaded: choose "
                "that model again, or press Compare."
            )
        stop: Any = result.settings.get("stop", ())  # a list of ids
        settings = Settings.of(**{**result.settings, "stop": tuple(stop)})
        return cls(model, result.prompts, Recipe.parse(result.selection.recipe, model.device), settings)

    def run(self, feed: Feed, cancel: threading.Event) -> bench.Run:
        """Generate once, watched."""
        model, recipe, settings = self.model, self.recipe, self.settings
        job = bench.RunInputs.of(model, self._rows(), 1, vars(settings))
        engine, begun = Engine(model.decoder, recipe.check(model.device, model.config).parts), time.perf_counter()
        try:
            engine.prepare(feed.progress, cancel)
            prepare_s = time.perf_counter() - begun
            feed.engine(engine)
            feed.progress(0, 1)  # one unit, whose steps are told; building was another count
            series, counter = 1 if recipe else 0, TorchCounter(model.device)
            feed.tell(Named([BASELINE, short_form(str(recipe), model.device)] if recipe else NAMES))
            feed.tell(Phase(f"running {short_form(str(recipe), model.device)}", series))
            run = bench.watched(engine, recipe, job, feed.tell, cancel, prepare_s)
            feed.tell(Kept(series, RunMemory.of(engine, counter.read())))
        finally:
            engine.close()
        return run

    def compare(self, baseline: Recipe, feed: Feed, cancel: threading.Event) -> bench.Comparison:
        """`baseline` against the recipe: checked, watched, timed in turn."""
        model, recipe = self.model, self.recipe
        feed.tell(Named(pair_names([str(baseline), str(recipe)], model.device)))
        present, counter = (0, ""), TorchCounter(model.device)
        begun: Counter[str] = Counter()  # of each phase, how many subjects have entered it
        first_runs: dict[tuple[int, str], TorchCalls | None] = {}
        watched: list[Engine] = []

        def on_phase(phase: str, about: str) -> None:
            nonlocal present, counter
            # A warm-up ends where the next phase begins.
            first_runs.setdefault(present, counter.read(frees=False))
            if watched:  # that run is over: its cache has grown to its end, which a warm-up's may not have
                feed.tell(Kept(present[0], RunMemory.of(watched.pop(), first_runs[present])))
            # Both may have one recipe, but each warms up and is watched once, the baseline first.
            series = min(begun[phase], 1) if phase in ("warm-up", "watched") else int(about == str(recipe))
            begun[phase] += 1
            present, counter = (series, about), TorchCounter(model.device)
            label = short_form(about, model.device)
            feed.tell(Phase(f"{PHASES.get(phase, phase)}: {label}", present[0], phase == "watched"))

        def on_engine(engine: Engine) -> None:
            feed.engine(engine)
            watched.append(engine)

        told: dict[str, Any] = {"on_step": feed.tell, "on_phase": on_phase, "on_engine": on_engine}
        return bench.compare(model, self._rows(), recipe, baseline=baseline, **told, **self._common(feed, cancel))

    def ladder(self, feed: Feed, cancel: threading.Event) -> bench.Ladder | None:
        """The recipe's techniques added one by one, then left out one by one."""
        feed.tell(Phase(PHASES["measured"], watched=False))
        found = bench.ladder(self.model, self._rows(), self.recipe, **self._common(feed, cancel))
        return found if found.rungs else None  # stopped before anything was measured

    def timeline(self, baseline: Recipe, feed: Feed, cancel: threading.Event) -> Any:
        """The timeline of one decode step, of `baseline` and of the recipe."""
        feed.tell(Phase("recording the timeline of a step", watched=False))
        told: dict[str, Any] = {"progress": feed.progress, "cancel": cancel, **vars(self.settings)}
        return timelines(self.model, self._rows(), self.recipe, baseline=baseline, **told)

    def _rows(self) -> list[list[int]]:
        return [token_ids(self.model, prompt) for prompt in self.prompts]

    def _common(self, feed: Feed, cancel: threading.Event) -> dict[str, Any]:
        """What Compare and Ladder both take."""
        told = {"progress": feed.progress, "cancel": cancel, "on_partial": feed.tell}
        return {"repeats": self.repeats, **told, **vars(self.settings)}


def undisturbed(model: Model, wait_quiet: Callable[[Cancel], bool], work: Work) -> Work:
    """The same work with the model's GPU as torch's present one, once nothing else computes.

    Cancelled if that was not waited for.
    """

    def alone(feed: Feed, cancel: threading.Event) -> Any:
        feed.progress(0, 0, "waiting for work in the background")
        if not wait_quiet(cancel):
            raise Cancelled("It was stopped before it began.")
        with present(model.decoder.device):
            return work(feed, cancel)

    return alone
