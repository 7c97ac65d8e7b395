"""The controller: all that the ui thread does, ten times a second. It is the only writer of widgets.

A turn: do what the user asked for (the inbox), take in what the engine thread told, look at the device, show.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from eet_lab.bench import Comparison, Ladder
from eet_lab.engine.generation import StepEvent
from eet_lab.errors import Cancelled, EETError, PromptError, RecipeError
from eet_lab.labels import with_labels
from eet_lab.models import Model
from eet_lab.progress import Cancel
from eet_lab.workbench import commands as c
from eet_lab.workbench import engine_thread as e
from eet_lab.workbench import jobs
from eet_lab.workbench.choices import Choices, State
from eet_lab.workbench.commands import command
from eet_lab.workbench.engine_thread import EngineThread, Work
from eet_lab.workbench.forecast import NO_FORECAST, Fits
from eet_lab.workbench.history import History
from eet_lab.workbench.live import Device, TopRow, Watching
from eet_lab.workbench.page import Page
from eet_lab.workbench.problems import settled_recipe
from eet_lab.workbench.results import Results
from eet_lab.workbench.serving_jobs import ModelWork
from eet_lab.workbench.serving_view import JOBS, ServingTab
from eet_lab.workbench.threads import TICK_S, Answer, Background
from eet_lab.workbench.views import bar
from eet_lab.workbench.views.chosen import inputs_state, techniques_state

SETTLE_S = 2.5
"""A page that opens has asked for every view's state, and listens to changes, within this time."""


class Controller:
    """The page, the choices behind it, the engine and sampler threads. Only `put` and `idle` are for others."""

    def __init__(self, state: State, devices: list[str], history: History) -> None:
        self.state, self.devices = state, devices
        self.model: Model | None = None
        self.busy = self.large = False
        self._job_name = ""
        self.status, self.choices = bar.Status(state), Choices(state)
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._later: list[str] = []  # jobs that were asked for before the model was there
        self._ticks, self._turning, self._send_at = 0, False, 0.0
        self.page = Page(self.put)
        self.top_row = TopRow(self.page.live, self.page.kept)
        self.background, self.engine = Background(), EngineThread()
        self.fits = Fits(self.background)
        self.results = Results(self.page, history, self.background)
        self.serving = ServingTab(self.page, self.background, self._run_serving)
        self.commands = c.owners(self, state, self.choices, self.results)
        self.device = Device(self.page.live, self.engine.feed.probes, state.device)
        self.watching = Watching(self.page.live, self.device)

    def put(self, message: Any) -> None:
        """Leave a message, such as the page sends, for the ui thread.

        Callbacks do nothing else, since they run on whatever thread there is.
        """
        self._inbox.put(message)

    @property
    def idle(self) -> bool:
        """Nothing is asked for, running, or still to be loaded."""
        # In this order: a command leaves the inbox within a turn, and whatever it starts is known at the turn's end.
        waits = not self._inbox.empty() or self.serving.waits or self._later or self._turning
        return not (waits or self.busy or self.serving.busy) and self.choices.settled

    @property
    def stopping(self) -> bool:
        """The present job has been asked to end."""
        return self.busy and self.engine.cancel.is_set()

    def close(self) -> None:
        """End the threads: the engine's, the background's and the sampler's."""
        self.serving.close()  # first: the background's thread may be simulating for it
        self.engine.close()
        self.background.close()
        self.device.close()

    def tick(self) -> None:
        """One turn."""
        self._turning = True
        try:
            changed = self._drain() | self._listen()
            if not (self.busy or self.choices.settled):
                self._submit("load", self.choices.load())
            self._begin_later()
            second = self._ticks % round(1 / TICK_S) == 0
            resting = self.watching.resting
            if second and not self.busy:
                self.results.history.look()
            if not resting:
                self.watching.flush()
                self.device.look(all_of_it=self.busy)
                if second:
                    self.page.live.snapshot()
            if changed or (second and not resting):  # each second, for techniques registered in a cell
                self._show()
            self._show_bar()
            self._send_again(changed)
        except Exception as error:  # noqa: BLE001  shown to the user; the thread must live on
            self.status.fail(error)
        self._ticks += 1
        self._turning = False

    # A turn's parts

    def _drain(self) -> bool:
        """Do what was asked for before this turn; whether there was anything."""
        num_commands = self._inbox.qsize()  # one that asks for the next cannot keep the turn from ending
        for _ in range(num_commands):
            try:
                self.do(self._inbox.get())
            except EETError as error:
                self.status.fail(error)
        return num_commands > 0

    def _listen(self) -> bool:
        """Take in what the engine thread and the background told; whether the page has to show it."""
        changed = False
        for told in [*self.engine.take(), *self.background.take()]:
            try:
                told.to(told) if isinstance(told, Answer) else self.hear(told)
            except Exception as error:  # noqa: BLE001  shown to the user; what was told after it counts as well
                self.status.fail(error)
            changed |= not isinstance(told, StepEvent | e.Progress)
        self.results.turn(self.busy)
        return self.serving.turn() or changed

    def _begin_later(self) -> None:
        """What was asked for while the model was loading."""
        if self.busy or not self.choices.settled:
            return
        waiting, self._later = self._later, []
        for name in waiting:
            self.put({"command": name})

    def _send_again(self, changed: bool) -> None:
        """Once, a while after each change; never while something is timed."""
        if changed:
            self._send_at = time.monotonic() + SETTLE_S
        if self._send_at and time.monotonic() >= self._send_at and not self.busy:
            self._send_at = 0.0
            self.page.send_again()

    # What the user asks for

    def do(self, message: Any) -> None:
        """Do what a message of the page asks for; EETError where it cannot be done."""
        call, before = c.read(message, self.commands), self.results.opened
        if self.commands[name := message["command"]] is self.results:
            self.status.forgive()
            self.results.heed(name)
        call()
        if name == "pick_model" and not self.choices.asking_path:
            self.status.forgive()  # also where the model that is there is chosen again, which changes nothing
        if self.results.opened is not before and self.model is not None and not self.busy:
            self.status.rest()

    @command
    def run(self) -> None:
        """Generate once with the selection, watched."""
        self._ask("run", lambda model: self._job(model).run)

    @command
    def compare(self) -> None:
        """Time the selection against the pinned recipe, or against the baseline."""
        pinned = self.results.pinned_recipe
        self._ask("compare", lambda model: partial(self._job(model).compare, pinned(self.state.kind)))

    @command
    def ladder(self) -> None:
        """Credit each technique of the selection with its own milliseconds and bytes."""

        def work(model: Model) -> Work:
            if not len((job := self._job(model)).recipe):
                raise RecipeError(jobs.NOTHING_ON)
            return job.ladder

        self._ask("ladder", work)

    @command
    def measure_ticked(self) -> None:
        """Time the recipes of the two ticked runs in turn, here and now, on the present prompts."""

        def work(model: Model) -> Work:
            before, after = self.results.ticked_recipes(self.state.kind)
            return partial(replace(self._job(model), recipe=after).compare, before)

        self._ask("measure_ticked", work)

    @command
    def take_timeline(self) -> None:
        """Take the timeline of one decode step of both recipes of the comparison that is shown."""
        self._ask("take_timeline", self.results.timeline)

    @command
    def stop(self) -> None:
        """End the present job, if it has not just ended, and what waits for it; what is there stays."""
        self._later = []
        if self.busy:
            self.engine.stop()

    @command
    def pick_device(self, value: str) -> None:
        """Take another device, and watch it."""
        self.state.move_to(value)
        self.device.watch(self.state.device)

    @command
    def show_serving(self, on: bool) -> None:
        """Show the page for serving, or the bench."""
        self.serving.show(on)

    @command
    def larger_type(self, on: bool) -> None:
        """Larger type, for a projector."""
        self.large = on
        self.page.larger(on)

    @command
    def dismiss_error(self) -> None:
        """Take down the card of what failed."""
        self.status.forgive()

    def _run_serving(self, action: str, work: ModelWork, cancel: threading.Event) -> None:
        """Have the engine thread measure or serve the model; EETError where it is not there, or something runs."""
        if self.model is None or self.busy or not self.choices.settled:
            raise EETError(f"{action} cannot start while a model is loaded or something runs: wait, or press Stop.")
        model, recipe, said = self.model, settled_recipe(self.state), self.serving.progress

        def job(feed: e.Feed, stop: Cancel) -> Any:
            return work(model, recipe, said(feed.progress), stop)

        self._submit_alone(JOBS[action], model, job, cancel)

    def _ask(self, name: str, work: Callable[[Model], Work]) -> None:
        """Begin a job; later, if the model is still on its way. One that runs or waits was pressed twice."""
        if self.model is None or not self.choices.settled:
            self._later += [name] if name not in self._later else []
        elif not self.busy:
            self._begin(name, self.model, work(self.model))
        elif name != self._job_name or self.stopping:
            name = name.replace("_", " ")
            raise EETError(f"{name} cannot start while something runs: wait until it is done, or press Stop.")

    def _begin(self, name: str, model: Model, work: Work) -> None:
        self.serving.show(False)  # what runs now is seen on the bench
        if name != "take_timeline":
            self.results.close_run()
            decode = jobs.decoder(model.tokenizer, self.state.settings(model).stop)
            self.watching.begin(self.state.prompts, decode, watched=name != "ladder")
        self.results.begin()
        self._submit_alone(name, model, work)

    def _job(self, model: Model) -> jobs.Job:
        """A job with the present choices; PromptError where they cannot run."""
        if why := self.choices.problem(self.model):
            raise PromptError(why.text)
        state = self.state
        return jobs.Job(model, list(state.prompts), state.recipe(), state.settings(model), state.repeats or None)

    def _submit_alone(self, name: str, model: Model, work: Work, cancel: threading.Event | None = None) -> None:
        self.choices.give_up()  # the list names the model that runs
        self.background.hold()
        self._submit(name, jobs.undisturbed(model, self.background.wait_quiet, work), cancel)

    def _submit(self, name: str, work: Work, cancel: threading.Event | None = None) -> None:
        self.status.forgive()
        self.busy, self._job_name = True, name
        self.status.text = f"{jobs.loading(self.state.model) if name == 'load' else jobs.BEGUN[name]}…"
        self.status.clock.start()
        self.engine.submit(self._finished, name, work, cancel or threading.Event())

    # What the engine thread tells

    def hear(self, event: e.Event) -> None:
        """Take in one event."""
        match event:
            case e.Progress(done, total, text):
                self.status.text = with_labels(text, self.state.kind) or self.status.text
                self.status.clock.progress(done, total)
            case e.Named(names):
                self.watching.name(names)
            case e.Phase(text):
                self.status.text = text
                self.watching.enter(event)
            case StepEvent():
                self.status.clock.step(event.index + 1, event.num_steps)
                self.watching.step(event)
            case e.Kept():
                self.watching.keep(event)
            case Comparison() | Ladder():
                self.results.provisional(event)

    def _finished(self, answer: Answer) -> None:
        """A job is over: the one that `answer.key` names."""
        of_serving = answer.key in JOBS.values()
        before = answer.value is None and self.results.latest is not None and not of_serving and answer.key != "load"
        self.watching.leave(in_vain=before and answer.key != "take_timeline")
        self.background.resume()
        self.fits.forget_free()
        stopped, self.busy, self._job_name = self.stopping, False, ""
        name = answer.key.replace("_", " ")
        self.status.text = f"{name} done in {answer.seconds:.1f} s"
        if of_serving and answer.error is not None:
            self.status.text = f"{name} failed after {answer.seconds:.1f} s: its page says why"
        if stopped:
            self.status.text = f"{name.capitalize()} was stopped after {answer.seconds:.1f} s."
            self.status.text += " The result below is the previous one." if before else ""
            self.status.remark = self.status.text
        if answer.key == "load":
            self._loaded(answer.value)
        elif of_serving:
            self.serving.answered(answer)
        elif answer.key == "take_timeline":
            self.results.put_timelines(answer.value)
        else:
            self.results.finish(answer.value, self.watching.monitor, self.watching.memory)
        if not (of_serving or answer.error is None or isinstance(answer.error, Cancelled)):
            self.status.fail(answer.error)

    def _loaded(self, model: Model | None) -> None:
        """The new model; None: it could not be loaded, and the one before stays, for which nothing was asked."""
        if model is not None:
            self.model = model
            self.choices.loaded(model)
            self.engine.feed.loaded_bytes = model.decoder.weight_bytes
        else:
            if self.choices.back():
                self.pick_device(self.state.device)
            if self.choices.settled:
                self._later = []
        self.status.text = "ready" if self.model else "no model: pick one above"

    # What is shown

    def _show(self) -> None:
        """What was chosen, and what follows from it. Views send only what has changed."""
        self.status.look()
        state, model, setup = self.state, self.model, self.results.setup
        rows = self.choices.tokens(model)[0]
        # An empty prompt counts as BOS.
        lengths: Sequence[int] | None = None if rows is None else [max(len(row), 1) for row in rows]
        context = model.config.context if model else None
        if not self.busy:
            self.fits.look(state, model, rows, self.choices.problem(model) is None)
        if setup:
            state, lengths, context = setup.state, setup.lengths, setup.context
        read_only, selected = setup is not None, self.choices.selected
        effects, whose = self.results.effects(state.prompts, model)
        self.page.techniques.show(techniques_state(state, selected, effects, whose, state.recipe_label(), read_only))
        fits = NO_FORECAST if setup else {**self.fits.state(), "held": self.page.live.held()}
        wrong = None if setup else self.choices.problem(model)
        self.page.inputs.show(inputs_state(state, lengths, context, fits, read_only, wrong))
        self.top_row.show(self.results.sampled_before)
        self.results.show(self.busy, self.state.kind)

    def _show_bar(self) -> None:
        opened, setup, against = self.results.opened, self.results.setup, self.results.against()
        buttons = bar.Buttons(
            loaded=self.model is not None,
            busy=self.busy,
            stopping=self.stopping,
            why_not=why.text if (why := self.choices.problem(self.model)) else None,
            nothing_on=not len(self.state.recipe()),
            against=against,
            tight=self.fits.warnings,
            kept=self.model.name if setup and self.model else "",
        )
        own = bar.header(self.state, self.devices, self.choices, self.model, self.busy)
        banner = bar.banner(self.state.device, self.devices, self.results.recording(), self.busy)
        self.page.bar.show(
            {
                **(setup.bar if setup else own),
                **self.status.shown(self.busy, self.stopping, buttons),
                "actions": buttons.state(),
                "busy": self.busy,
                "headline": None if self.busy else self.results.headline(self.model),
                "banner": bar.with_unkept(opened.banner if opened else banner, self.results.history.problem),
                "read_only": setup is not None,
                "large": self.large,
                "serving": self.serving.shown,
                "against": opened.against if opened and setup else self.results.against_told(),
                "against_tip": opened.against if opened and setup else against,
            }
        )
