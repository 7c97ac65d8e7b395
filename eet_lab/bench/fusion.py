"""The fusion map: what each technique does to a training step, phase by phase.

A step's launches, bytes and milliseconds forward, backward and in the update, before and after each technique, beside
what it gains in a phase and what of that is left in the step (Amdahl).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from ctypes import c_void_p
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from eet_lab.bench import tables, timing
from eet_lab.bench.compare import rungs_up
from eet_lab.bench.launches import DispatchMode, is_work
from eet_lab.bench.measured import Environment, Spread, environment
from eet_lab.bench.paired import LEVEL, Change
from eet_lab.bench.profiler_trace import ProfiledStep
from eet_lab.bench.timeline import DEVICE
from eet_lab.bench.timeline_steps import PHASES, Phases, Watch
from eet_lab.bench.timing import Rounds, Series, Stopwatch, Tally, check_budget, check_repeats
from eet_lab.bench.training import Batch
from eet_lab.bench.workloads import TrainBatch
from eet_lab.devices import present
from eet_lab.models import Model
from eet_lab.models.on_device import on_any_device
from eet_lab.ops import native
from eet_lab.parts import Parts
from eet_lab.progress import Cancel, Progress, raise_if_cancelled
from eet_lab.texts import RecipeLike, as_recipe
from eet_lab.threads import cpu_threads

STEP = "step"


class PhaseWork(NamedTuple):
    """What a phase of a step launches, moves and takes. `launches` are kernels and copies, on a CPU calls of PyTorch;
    `num_bytes` are the inputs and outputs of each, our kernels among them; `ms` is that of a step that is not captured.
    """

    launches: int
    num_bytes: int
    ms: float


class Gain(NamedTuple):
    """The phase that a technique shortens most, what can be told from noise of it and of the step, and the share of the
    step that the phase was before: were it gone, the step would be `most` times as fast. No phase is told where the
    step alone is faster, as it is when it is captured.
    """

    phase: str | None
    of_phase: Change | None
    of_step: Change
    share: float

    @property
    def most(self) -> float:
        """Amdahl's bound."""
        return 1 / (1 - self.share) if self.share < 1 else float("inf")


@dataclass(frozen=True)
class FusionRung:
    """A recipe's step: `name` and `title` are those of the technique that it has more than the one before.

    `changes` are those of the milliseconds of each phase, and of the "step", from the rung before.
    """

    name: str
    title: str
    recipe: str
    work: Mapping[str, PhaseWork]
    step_ms: Spread
    changes: Mapping[str, Change]

    def gain(self, before: FusionRung) -> Gain | None:
        """What came with the technique; None where neither a phase nor the step can be told to be faster."""
        faster = {name: each for name, each in self.changes.items() if each.is_told and each.verdict == "better"}
        of_step = faster.pop(STEP, None)
        if not faster:
            return None if of_step is None else Gain(None, None, of_step, 0.0)
        phase = max(faster, key=lambda each: before.work[each].ms - self.work[each].ms)
        share = before.work[phase].ms / sum(work.ms for work in before.work.values())
        return Gain(phase, self.changes[phase], self.changes[STEP], share)


@dataclass(frozen=True)
class FusionMap:
    """The baseline's step, and that with each technique more."""

    environment: Environment
    workload: str
    rungs: tuple[FusionRung, ...]

    @property
    def pairs(self) -> Sequence[tuple[FusionRung, FusionRung]]:
        """Each step with the one before."""
        return list(pairwise(self.rungs))

    def to_frame(self) -> Any:
        """A row for each technique and phase."""
        import pandas as pd

        rows = [
            {"technique": rung.name or "baseline", "phase": phase, **work._asdict(), "step_ms": rung.step_ms.p50}
            for rung in self.rungs
            for phase, work in rung.work.items()
        ]
        return pd.DataFrame.from_records(rows, index=["technique", "phase"])

    def _repr_html_(self) -> str:
        frame = self.to_frame()
        return tables.framed(frame, frame.columns)


@on_any_device
def fusion_map(
    model: Model,
    workload: TrainBatch | str,
    recipe: RecipeLike = "all",
    *,
    repeats: int | None = None,
    budget_s: float | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> FusionMap:
    """The step of a batch such as `train:demo/b8/s64`, as the techniques of a recipe are added to it one by one.

    Phases are those of passes that are launched one by one, and the step's milliseconds those of the recipe as it is.
    Steps of all are timed in turn, `repeats` of each; None: until what a technique changes is known well, or `budget_s`
    (default: two seconds a recipe) are spent. `plot(result, "fusion")` draws it.
    Errors: RecipeError, PromptError, ModelError, TrainingError, OutOfMemory, Cancelled, and MonitorError where another
    profiler is at work.
    """
    check_repeats(repeats)
    check_budget(budget_s)
    full = as_recipe(recipe, model.device, model.config.in_training)
    batch = Batch.of(TrainBatch.of(workload, model), model)
    climb = rungs_up(full)
    rounds = Rounds(
        repeats, budget_s, lambda: [each[STEP] for each in _changes(steps, phases) if STEP in each], len(climb)
    )
    tally = Tally(len(climb) * (1 + 2 * rounds.expected), progress)
    rungs, found = list[_Rung](), list[FusionRung]()
    for each in climb:
        raise_if_cancelled(cancel, "The benchmark")
        tally.say(f"counting the step of {each.recipe}")
        rungs.append(_Rung(batch, each.recipe.parts, model.device, cancel))
        tally.finish()
    steps = [Series(str(each.recipe), rung.step_ms) for each, rung in zip(climb, rungs, strict=True)]
    phases = [Series(f"phases of {each.name}", rung.phase_ms) for each, rung in zip(steps, rungs, strict=True)]
    timing.in_turn([*steps, *phases], rounds, tally, cancel)
    for each, rung, step, phase, changes in zip(
        climb, rungs, steps, phases, [{}, *_changes(steps, phases)], strict=True
    ):
        title = each.title if each.name else "baseline"
        found.append(FusionRung(each.name, title, step.name, rung.work(phase.runs), _spread(step.runs), changes))
    return FusionMap(environment(model), str(workload), tuple(found))


def _changes(steps: Sequence[Series[Any]], phases: Sequence[Series[Any]]) -> list[dict[str, Change]]:
    """What each recipe but the first changes of the one before. Phases are details: they share one `LEVEL`."""
    found = []
    for (step, phase), (next_step, next_phase) in pairwise(zip(steps, phases, strict=True)):
        changes = {STEP: Change.of(step.runs, next_step.runs)}
        for name in PHASES:
            before, after = ([run[name] for run in each.runs] for each in (phase, next_phase))
            changes[name] = Change.of(before, after, level=LEVEL / len(PHASES))
        found.append({name: change for name, change in changes.items() if change is not None})
    return found


def phases_of(batch: Batch, parts: Parts, device: str, repeats: int) -> dict[str, PhaseWork]:
    """What the phases of a step do, and the medians of their times. Errors: those of `fusion_map`."""
    with cpu_threads(device), present(batch.network.device):
        rung = _Rung(batch, parts, device, None)
        return rung.work([rung.phase_ms() for _ in range(repeats)])


def _spread(runs: Sequence[float]) -> Spread:
    found = Spread.of(runs)
    assert found is not None
    return found


class _Rung:
    """A recipe whose steps are timed, and what the phases of one do, counted once."""

    def __init__(self, batch: Batch, parts: Parts, device: str, cancel: Cancel | None) -> None:
        self._device = device
        self._begin: Any = lambda phase: None
        self._phases = Phases(batch, parts, lambda phase: self._begin(phase), cancel=cancel)
        self._launches, self._bytes = self._counted()

    def step_ms(self) -> float:
        """A step of the recipe as it is."""
        return timing.took_ms(self._phases.step, self._device)

    def phase_ms(self) -> dict[str, float]:
        """A step whose phases are timed."""
        clock, marks = Stopwatch(self._device), list[tuple[str, int]]()

        def begin(phase: str) -> None:
            marks.append((phase, clock.mark()))

        self._begin = begin
        self._phases.step_in_phases()
        clock.mark()
        found = dict.fromkeys(PHASES, 0.0)
        for phase, mark in marks:
            found[phase] += clock.between_ms(mark, mark + 1)
        return found

    def work(self, runs: Sequence[Mapping[str, float]]) -> dict[str, PhaseWork]:
        """What the phases do, with the medians of their times."""
        return {
            phase: PhaseWork(self._launches[phase], self._bytes[phase], _spread([run[phase] for run in runs]).p50)
            for phase in PHASES
        }

    def _counted(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        counter = _Moved(tensor for buffer in self._phases.trainer.optimizer.buffers for tensor in buffer.tensors)
        self._begin = counter.begin
        with counter, native.observed(counter.launched):
            self._phases.step_in_phases()
        if self._device == "cpu":
            return counter.calls, counter.num_bytes
        with closing(Watch(self._device)) as watch:
            self._begin = watch.begin
            watch.watch(self._phases.step_in_phases)
            watch.finish()
            [step] = watch.steps()
        return Counter(phase for phase, _ in _of_phases(step)), counter.num_bytes


class _Moved(DispatchMode):
    """Counts the calls of PyTorch in each phase, and the bytes of what they and our kernels read and write.

    A kernel is given addresses: what is there is the tensor of that address that PyTorch saw last. An update is given
    `buffers`, of which PyTorch sees parts alone, which may begin at the same address.
    """

    def __init__(self, buffers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.calls, self.num_bytes = Counter[str](), Counter[str]()
        self._phase = ""
        self._at, self._buffers = dict[int, int](), dict(map(_place, buffers))

    def begin(self, phase: str) -> None:
        """What comes now is of this phase."""
        self._phase = phase

    def launched(self, launcher: Any, arguments: Mapping[str, Any]) -> None:
        """A kernel of ours is launched."""
        pointers = {arguments[each.name] for each in launcher.parameters if each.ctype is c_void_p}
        known = self._at | self._buffers if self._phase == "update" else self._at
        self.num_bytes[self._phase] += sum(known.get(address, 0) for address in pointers)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        moved = {id(t): t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)}
        sizes = [*map(_place, moved.values())]
        self._at |= dict(sizes)
        if is_work(function):
            self.calls[self._phase] += 1
            self.num_bytes[self._phase] += sum(num_bytes for _, num_bytes in sizes)
        return result


def _place(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies, and its bytes."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _of_phases(step: ProfiledStep) -> Iterator[tuple[str, Any]]:
    """Each kernel or copy, with the phase in which it was launched."""
    phases = [span for span in step.spans if span.kind == "phase" and span.lane == "host"]
    for span in step.spans:
        if span.kind in DEVICE and span.launch is not None:
            at = step.spans[span.launch].start_us
            yield next((each.name for each in phases if each.start_us <= at < each.end_us), PHASES[0]), span
