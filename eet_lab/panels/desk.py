"""The desk: all that the ui thread does, ten times a second. It is the only writer of widgets.

A turn: do what the user asked for (the inbox), take in what the engine thread told, look at the device, show.
"""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ipywidgets as W

from eet_lab.bench import Ladder
from eet_lab.errors import EETError
from eet_lab.models import Model
from eet_lab.panels import jobs, theme
from eet_lab.panels.beside import Beside
from eet_lab.panels.choices import Choices
from eet_lab.panels.controls import Actions, Generating, Header, mode_label
from eet_lab.panels.device import Device
from eet_lab.panels.encoding import Encoding
from eet_lab.panels.live import Live
from eet_lab.panels.loading import Loading
from eet_lab.panels.prompts_editor import PromptsEditor
from eet_lab.panels.recorded_prompts import as_ids
from eet_lab.panels.refresh import Refresh
from eet_lab.panels.runs import Runs
from eet_lab.panels.shelf import Shelf
from eet_lab.panels.state import State, problem
from eet_lab.panels.status import Status
from eet_lab.panels.toggles import Toggles
from eet_lab.panels.worker import Finished, Kept, Phase, Progress, Sampled, Started, Step, Worker

TICK_S = 0.1


class Desk:
    """The widgets, the choices behind them, the engine and sampler threads. Only `put` and `idle` are for others."""

    def __init__(self, state: State, devices: list[str], folder: Path) -> None:
        self.state, self.devices = state, devices
        self.model: Model | None = None
        self.busy = self.stopping = False
        self._inbox: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._ticks, self._turning = 0, False
        self._encoding = Encoding()
        self._build(folder)
        self.worker = Worker()
        self.device = Device(self.live, self.worker.feed.probes)
        self.runs = Runs(self.live, self.device)
        self.device.watch(state.device)

    def _build(self, folder: Path) -> None:
        state, put = self.state, self.put
        self.header = Header(state.model, self.devices, put)
        self.mode = W.HTML()
        self.toggles = Toggles(state, put)
        self.prompts = PromptsEditor(put)
        self.choices = Choices(state, self.prompts)
        self.loading = Loading(state)
        self.generating = Generating(state.generation, state.stop_at_eos, state.repeats, put)
        self.actions = Actions(put)
        self.status = Status(self.actions, state)
        self.live = Live()
        self.beside = Beside(put)
        self.shelf = Shelf(folder, put, self.status.say, self.beside.memory)
        inputs = W.HBox([self.prompts.box, self.generating.box]).add_class("eet-inputs")
        above = [W.HTML(theme.stylesheet()), self.header.box, self.mode, self.actions.box, self.actions.error]
        below = [self.beside.forecast.box, self.toggles.box, inputs, self.live.box, self.shelf.view.box]
        self.box = W.VBox([*above, *below]).add_class("eet-bench")
        self._refresh = Refresh(self.box)

    def put(self, command: str, *values: Any) -> None:
        """Leave a command for the ui thread. Callbacks do nothing else, since they run on whatever thread there is."""
        self._inbox.put((command, *values))

    @property
    def idle(self) -> bool:
        """Nothing is asked for, running, or still to be loaded."""
        # In this order: a command leaves the inbox within a turn, and whatever it starts is known at the turn's end.
        return self._inbox.empty() and not self._turning and not self.busy and self.loading.settled

    def close(self) -> None:
        """End the threads: the engine's, the sampler's, and that of what is asked aside."""
        self.worker.close()
        self.beside.close()
        self.device.close()

    def tick(self) -> None:
        """One turn."""
        self._turning = True
        try:
            changed = self._drain()
            for event in self.worker.take():
                getattr(self, f"_on_{type(event).__name__.lower()}")(event)
                changed |= isinstance(event, (Started, Finished))
            self.beside.turn(self.busy)
            self.actions.warn(*self.beside.forecast.warnings)
            self._load_if_needed()
            second = self._ticks % round(1 / TICK_S) == 0
            if not self.runs.resting:
                self.runs.flush()
                self.device.look(all_of_it=self.busy)
                if second:
                    self.live.snapshot()
            if changed or (second and not self.runs.resting):  # each second, for techniques registered in a cell
                self._show_choices()
            self.status.show(self.busy)
            self._refresh.turn(changed, self.busy)
        except Exception as error:  # noqa: BLE001  shown to the user; the thread must live on
            self.status.fail(error)
        self._ticks += 1
        self._turning = False

    def _drain(self) -> bool:
        """Do what was asked for before this turn; whether there was anything."""
        homes = self, self.choices, self.loading, self.shelf, self.beside.memory
        num_commands = self._inbox.qsize()  # one that asks for the next cannot keep the turn from ending
        for _ in range(num_commands):
            command, *values = self._inbox.get()
            home = next(each for each in homes if hasattr(each, f"do_{command}"))
            if home is self.shelf:
                self.status.forgive()
            try:
                getattr(home, f"do_{command}")(*values)
            except EETError as error:
                self.status.fail(error)
        return num_commands > 0

    def _show_choices(self) -> None:
        """What was chosen, and what follows from it. Widgets send only what has changed."""
        state, model = self.state, self.model
        self.status.look()
        rows, unreadable = self._encoding.rows(model, state.prompts)
        lengths = None if rows is None else [max(len(row), 1) for row in rows]  # an empty prompt counts as BOS
        context, new = (model.config.context if model else None), int(state.generation["max_new_tokens"])
        self.header.update(state.model, state.device, state.dtype, model, self.loading.asking_path)
        self.header.offer_again(self.loading.failed is not None and not self.busy)
        self.mode.value = mode_label(state.device, "cuda" in self.devices)
        self.toggles.update()
        self.prompts.update(state.prompts, lengths, new, context)
        why_not = unreadable or problem(state, model, rows)
        self.actions.update(self.busy, self.stopping, model is not None, why_not, not len(state.recipe()))
        if not self.busy:
            self.beside.look(state, model, rows, why_not is None)
        self.shelf.view.update(self.busy)

    def _load_if_needed(self) -> None:
        if not (self.busy or self.loading.settled):
            self._submit("load", self.loading.next())

    def _submit(self, name: str, work: Any) -> None:
        self.status.forgive()
        self.busy, self.stopping = True, False
        self.status.clock.start()
        self.worker.submit(name, work)

    # What the engine thread tells

    def _on_started(self, event: Started) -> None:
        self.status.text = f"{event.name}…"

    def _on_progress(self, event: Progress) -> None:
        self.status.text = event.text or self.status.text
        self.status.clock.progress(event.done, event.total)

    def _on_phase(self, event: Phase) -> None:
        self.status.text = event.text
        self.runs.enter(event)

    def _on_step(self, event: Step) -> None:
        self.status.clock.step(event.event.index + 1, event.event.num_steps)
        self.runs.step(event.event)

    def _on_sampled(self, event: Sampled) -> None:
        self.runs.replayed(event)

    def _on_kept(self, event: Kept) -> None:
        self.runs.keep(event)

    def _on_finished(self, event: Finished) -> None:
        self.runs.leave()
        self.beside.resume()
        stopped, self.busy, self.stopping = self.stopping, False, False
        self.status.text = f"{event.name} {'stopped' if stopped else 'done'} in {event.seconds:.1f} s"
        if event.name == "load":
            self._loaded(event.value)
        if event.error is not None:
            self.status.fail(event.error)
        elif event.name not in ("load", "replay") and event.value is not None:  # a replay's is up since it was opened
            tab = "waterfall" if isinstance(event.value, Ladder) else ""
            self.shelf.put_up(event.value, self.runs.monitor, tab, self.runs.memory)

    def _loaded(self, model: Model | None) -> None:
        """The new model; None: it could not be loaded, and the one before stays."""
        if model is not None:
            self.model = model
            self.worker.feed.loaded_bytes = model.decoder.weight_bytes
            self._encoding.forget()
            self.loading.succeeded()
        elif self.loading.back():
            self.do_choose("device", self.state.device)
        self.status.text = "ready" if self.model else "no model: pick one above"

    # What the user asks for

    def do_choose(self, name: str, value: Any) -> None:
        if name == "device":
            self.state.move_to(value)
            self.device.watch(value)
        else:
            setattr(self.state, name, value)

    def do_run(self) -> None:
        self._begin("run", jobs.run)

    def do_compare(self) -> None:
        self._begin("compare", jobs.compare, self.state.repeats)

    def do_ladder(self) -> None:
        self._begin("ladder", jobs.ladder, self.state.repeats)
        self.live.remark("a ladder only measures: nothing is watched, so nothing moves here")

    def _begin(self, name: str, job: Any, *more: Any) -> None:
        if self.busy or self.model is None:
            return
        state, model = self.state, self.model
        settings = state.settings(model)
        work = job(model, list(state.prompts), state.recipe(), settings, *more)
        self.runs.begin(state.prompts, jobs.decoder(model, settings.stop))
        self._submit(name, self.beside.alone(work))

    def do_stop(self) -> None:
        if self.busy:
            self.stopping = True
            self.worker.stop()

    def do_replay(self) -> None:
        if self.busy:
            return
        result, monitor = self.shelf.open_chosen()
        same_model = self.model is not None and self.model.name == result.environment.model
        prompts = result.prompts if same_model else as_ids(result)
        decode = jobs.decoder(self.model if same_model else None, result.settings.get("stop", ()))
        self.runs.begin_recorded(result, bool(monitor), prompts, decode)
        self._submit("replay", jobs.replay(result, monitor))
