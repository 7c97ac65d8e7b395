"""What the engine thread can be asked to do. Each function returns `work(feed, cancel)`."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from eet_lab import bench
from eet_lab.engine.engine import Engine
from eet_lab.engine.generation import Generation, StepEvent
from eet_lab.engine.settings import Settings
from eet_lab.errors import PromptError
from eet_lab.models import Model, load
from eet_lab.models.transcript import Decode, ended_by
from eet_lab.monitor import ReplaySource
from eet_lab.panels.run_memory import RunMemory, TorchCalls, TorchCounter
from eet_lab.panels.worker import Feed, Work
from eet_lab.technique import Recipe
from eet_lab.words import plain

SHORTEST_REPLAY_S, LONGEST_REPLAY_S = 3.0, 10.0
"""A recorded run that took less is played slower, one that took longer is played faster."""

NAMES = ("baseline", "selection")
"""Of the runs that the live view shows, in the order of its series."""

PHASES = {
    "check": "checking that the output is the same",
    "warm-up": "warming up",
    "watched": "watched run",
    "measured": "measuring, with the view at rest",
}


@dataclass(frozen=True)
class RunReport:
    """One watched run, not a measurement: the text and its timing as it went by."""

    model_label: str
    recipe: str
    texts: tuple[str, ...]
    generation: Generation
    planned_bytes: float


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


def decoder(model: Model | None, stop: Collection[int] = ()) -> Decode:
    """Token ids to text, a piece at a time; without a tokenizer (or a model) the ids themselves, apart.

    `stop`: the tokens that end a text, which are not shown.
    """
    if model is not None and model.tokenizer is not None:
        return ended_by(stop, model.tokenizer.decode)  # not `model.decode`, which would keep the weights alive
    return ended_by(stop, lambda ids: "".join(f"{token} " for token in ids))


def load_model(name: Any, device: str, dtype: str | None) -> Work:
    """Load a model."""

    def work(feed: Feed, cancel: threading.Event) -> Model:
        feed.progress(0, 0, f"loading {name if isinstance(name, str) else type(name).__name__}")
        return load(name, device=device, dtype=dtype)

    return work


def run(model: Model, prompts: Sequence[str], recipe: Recipe, settings: Settings) -> Work:
    """Generate once, watched."""

    def work(feed: Feed, cancel: threading.Event) -> RunReport:
        rows = [token_ids(model, prompt) for prompt in prompts]
        engine = Engine(model.decoder, recipe.check(model.device).parts)
        try:
            engine.prepare(feed.progress, cancel)
            feed.engine(engine)
            feed.progress(0, 1)  # one unit, whose steps are told; building was another count
            series, counter = 1 if recipe else 0, TorchCounter(model.device)
            feed.phase(f"running {recipe}", series)
            generation = engine.generate(rows, settings, on_step=feed.step, cancel=cancel)
            planned = feed.planned_bytes()
            feed.keep(series, RunMemory.of(str(recipe), engine, counter.read()))
        finally:
            engine.close()
        texts = tuple(map(ended_by(settings.stop, model.decode), generation.tokens))
        return RunReport(model.label, str(recipe), texts, generation, planned)

    return work


def compare(model: Model, prompts: Sequence[str], recipe: Recipe, settings: Settings, repeats: int) -> Work:
    """The baseline against the recipe: checked, watched, measured."""

    def work(feed: Feed, cancel: threading.Event) -> bench.Comparison:
        present, counter = (0, ""), TorchCounter(model.device)
        first_runs: dict[str, TorchCalls | None] = {}

        def on_phase(phase: str, about: str) -> None:
            nonlocal present, counter
            first_runs.setdefault(present[1], counter.read(frees=False))  # a warm-up, which ends where the next begins
            present, counter = (1 if about == str(recipe) and len(recipe) else 0, about), TorchCounter(model.device)
            feed.phase(f"{PHASES.get(phase, phase)}: {about}", present[0], watched=phase == "watched")

        def on_engine(engine: Engine) -> None:  # it has been warmed up, so it has been where it will be
            feed.engine(engine)
            feed.keep(present[0], RunMemory.of(present[1], engine, first_runs[present[1]]))

        rows, common = [token_ids(model, prompt) for prompt in prompts], _common(repeats, settings, feed, cancel)
        return bench.compare(model, rows, recipe, on_step=feed.step, on_phase=on_phase, on_engine=on_engine, **common)

    return work


def ladder(model: Model, prompts: Sequence[str], recipe: Recipe, settings: Settings, repeats: int) -> Work:
    """The recipe's techniques added one by one, then left out one by one."""

    def work(feed: Feed, cancel: threading.Event) -> bench.Ladder | None:
        feed.phase(PHASES["measured"], watched=False)
        rows = [token_ids(model, prompt) for prompt in prompts]
        found = bench.ladder(model, rows, recipe, **_common(repeats, settings, feed, cancel))
        return found if found.rungs else None  # stopped before anything was measured

    return work


def _common(repeats: int, settings: Settings, feed: Feed, cancel: threading.Event) -> dict[str, Any]:
    """What Compare and Ladder both take."""
    return {"repeats": repeats, "progress": feed.progress, "cancel": cancel, **vars(settings)}


def replay(result: bench.Comparison | bench.Ladder, monitor: Mapping[str, Any]) -> Work:
    """Play a recorded result: its steps, its tokens, and its samples where it has them. Nothing is measured."""

    def work(feed: Feed, cancel: threading.Event) -> Any:
        played = _played(result)
        sampled_s = 0.0
        for series, (name, m) in enumerate(played):
            feed.progress(series, len(played))
            seconds = sum(m.step_ms) / 1e3
            speed = seconds / min(max(seconds, SHORTEST_REPLAY_S), LONGEST_REPLAY_S)
            how = f"recorded on {result.environment.device}: {plain(seconds * 1e3)} ms {_pace(speed)}"
            feed.phase(f"replaying {name}, {how}", series)
            _play(feed, cancel, m, result.prompt_lengths, monitor.get(name), speed, sampled_s)
            sampled_s += seconds
        return result

    return work


def _pace(speed: float) -> str:
    if speed < 1:
        return f"in slow motion ({1 / speed:.3g}× slower)"
    return f"{speed:.3g}× faster" if speed > 1 else "at their own pace"


def _played(result: bench.Comparison | bench.Ladder) -> list[tuple[str, bench.Measurement]]:
    """The two that the live view can show side by side; none of a ladder that was stopped before its first rung."""
    if isinstance(result, bench.Comparison):
        ends = [result.baseline, result.selection]
    else:
        ends = [rung.measurement for rung in (*result.rungs[:1], *result.rungs[-1:])]
    return list(zip(NAMES, ends, strict=False))


def _play(
    feed: Feed,
    cancel: threading.Event,
    m: bench.Measurement,
    prompt_lengths: Sequence[int],
    recording: Mapping[str, Any] | None,
    speed: float,
    sampled_s: float,
) -> None:
    """Play one run; `sampled_s` is where its samples begin on their charts, after those of the runs before."""
    start = time.perf_counter()
    source = ReplaySource(recording) if recording else None
    times = iter(source.times if source else ())
    due = next(times, None)
    ends, steps = list(accumulate(m.step_ms)), tokens_by_step(m, prompt_lengths)
    for index, (t_ms, step_ms, tokens) in enumerate(zip(ends, m.step_ms, steps, strict=True)):
        while source and due is not None and due * 1e3 <= t_ms:
            feed.sample(sampled_s + due, {"weights_bytes": m.memory.get("weights", 0), **source.read()})
            due = next(times, None)
        if cancel.wait(max(0.0, start + t_ms / 1e3 / speed - time.perf_counter())):
            return
        feed.step(StepEvent(index, len(ends), t_ms, step_ms, tokens))


def tokens_by_step(m: bench.Measurement, prompt_lengths: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Which (row, token) pairs each step gave: rows begin in order of their prompts' lengths, the shortest first."""
    waiting = sorted(range(len(m.tokens)), key=lambda row: prompt_lengths[row])
    given = [0] * len(m.tokens)
    active: list[int] = []
    for count in m.step_tokens:
        active = [row for row in active if given[row] < len(m.tokens[row])]
        while len(active) < count and waiting:
            active.append(waiting.pop(0))
        new = tuple((row, m.tokens[row][given[row]]) for row in sorted(active))
        for row in active:
            given[row] += 1
        yield new
