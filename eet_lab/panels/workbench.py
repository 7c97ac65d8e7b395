"""The workbench: one widget that toggles techniques on a model and shows what each does.

Threads: callbacks only put commands into an inbox; the ui thread (10 Hz) drains it and is the only writer of widgets;
the engine thread (`worker`) does the work; the sampler thread reads the device.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import ipywidgets as W
import torch
from IPython.display import display

from eet_lab.bench import Comparison, Ladder
from eet_lab.errors import EETError, ResultError
from eet_lab.models import Model
from eet_lab.panels import export, jobs, recordings, theme
from eet_lab.panels.controls import OTHER, Actions, Generating, Header, mode_label
from eet_lab.panels.device import Device
from eet_lab.panels.jobs import RunReport, token_ids
from eet_lab.panels.live import Live
from eet_lab.panels.progress import Clock
from eet_lab.panels.prompts_editor import PromptsEditor
from eet_lab.panels.results_view import ResultsView
from eet_lab.panels.runs import Runs
from eet_lab.panels.state import State, problem
from eet_lab.panels.toggles import Toggles
from eet_lab.panels.worker import Finished, Phase, Progress, Sampled, Started, Step, Worker
from eet_lab.technique import Recipe

TICK_S = 0.1
TICKS_PER_SNAPSHOT = 10

HEADLINE = "pre_padding,mask_removal,memory_reuse"

_open: Workbench | None = None


class Workbench:
    """Pick a model and prompts, switch techniques, run, compare, and see where the time and the memory go.

    `model` is what `eet_lab.load` takes. `recipe` is what is switched on at first. `settings` are those of a generation
    (max_new_tokens, temperature, top_k, top_p, seed). Results are in `result`; `report()` shows the last one as a
    cell's own output, which still shows when the kernel is gone; saved ones go to `folder`. Opening another workbench
    closes this one; `close()` ends its threads.
    """

    def __init__(
        self,
        model: Any = "demo",
        prompts: list[str] | None = None,
        recipe: str | Recipe = HEADLINE,
        *,
        device: str | None = None,
        dtype: str | None = None,
        folder: str | Path = recordings.FOLDER,
        **settings: Any,
    ) -> None:
        global _open
        if _open is not None:
            _open.close()
        self.devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
        state = State(model=model, device=device or self.devices[0], dtype=dtype or "auto")
        if prompts is not None:
            state.prompts = list(prompts)
        state.generation = {**state.generation, **settings}
        state.choose(Recipe.parse(recipe, state.device) if isinstance(recipe, str) else recipe)
        state.drop_blocked()
        self.state, self.files = state, recordings.Files(Path(folder))
        self.model: Model | None = None
        self.result: Comparison | Ladder | RunReport | None = None
        self.status = ""
        self.busy = self.stopping = False
        self._inbox: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._build()
        self._ticks = 0
        self._asking_path = False
        self._wanted: tuple[Any, str, str] | None = None
        self._monitor: dict[str, Any] = {}
        self._clock = Clock()
        self.worker = Worker()
        self.device = Device(self.live, self.worker.feed.planned_bytes)
        self.runs = Runs(self.live, self.device)
        self.device.watch(state.device)
        self._closing = threading.Event()
        self._ui = threading.Thread(target=self._loop, name="eet-ui", daemon=True)
        _open = self

    # What the user calls

    def wait(self, timeout_s: float = 600.0) -> Any:
        """Wait until nothing runs (for scripts; notebooks need it not). Ctrl+C stops the run. The last result."""
        deadline = time.monotonic() + timeout_s
        try:
            while (self.busy or not self._inbox.empty() or self.model is None) and time.monotonic() < deadline:
                time.sleep(TICK_S / 2)
        except KeyboardInterrupt:
            self.put("stop")
        return self.result

    def report(self) -> Any:
        """The last result as a cell's own output: its table, and its figures drawn in place."""
        if not isinstance(self.result, (Comparison, Ladder)):
            return W.HTML(theme.stylesheet() + theme.note("There is no result yet: press Compare or Ladder first."))
        return export.Report(self.result)

    def close(self) -> None:
        """End the run and all threads, and take the widgets off the page. May be called twice."""
        global _open
        if self._closing.is_set():
            return
        self._closing.set()
        self.worker.close()
        self.device.close()
        if self._ui.is_alive():
            self._ui.join()
        for widget in _all_widgets(self.box):
            widget.close()
        if _open is self:
            _open = None

    def put(self, command: str, *values: Any) -> None:
        """Leave a command for the ui thread. Callbacks do nothing else, since they run on whatever thread there is."""
        self._inbox.put((command, *values))

    def _ipython_display_(self) -> None:
        display(self.box)
        self.start()

    def start(self) -> None:
        """Start the ui thread, if it does not run yet; displaying does it."""
        if not self._ui.is_alive() and not self._closing.is_set():
            self._ui.start()

    # The ui thread

    def tick(self) -> None:
        """One turn of the ui thread: commands, then what the engine told, then what the device says."""
        try:
            self._drain()
            for event in self.worker.take():
                getattr(self, f"_on_{type(event).__name__.lower()}")(event)
            self.runs.flush()
            if not self.runs.resting:
                self.device.look(all_of_it=self.busy)
                if self._ticks % TICKS_PER_SNAPSHOT == 0:
                    self.live.snapshot()
            self._load_if_needed()
            self._show()
        except Exception as error:  # noqa: BLE001  shown to the user; the thread must live on
            self._fail(error)
        self._ticks += 1

    def _loop(self) -> None:
        while not self._closing.wait(TICK_S):
            self.tick()

    def _drain(self) -> None:
        while True:
            try:
                command, *values = self._inbox.get_nowait()
            except Empty:
                return
            try:
                getattr(self, f"_do_{command}")(*values)
            except EETError as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.actions.error.value = theme.error_card(error)
        self.status = "failed; the session goes on"

    def _show(self) -> None:
        """Bring all widgets up to date. Widgets send only what has changed."""
        state, model = self.state, self.model
        lengths = self._lengths()
        known = [length for length in lengths if length is not None]
        context, new = (model.config.context if model else None), int(state.generation["max_new_tokens"])
        self.header.update(state.model, state.device, state.dtype, model, self._asking_path)
        self.mode.value = mode_label(state.device, "cuda" in self.devices)
        self.toggles.update()
        self.prompts.update(state.prompts, lengths, new, context)
        why_not = problem(state, model, known) if len(known) == len(lengths) else "No model is loaded yet."
        self.actions.update(self.busy, self.stopping, why_not, len(state.recipe()))
        self.results.update(self.busy)
        self.actions.bar.value = self._clock.share
        self.actions.bar.layout.visibility = "visible" if self.busy else "hidden"
        if self.busy:
            text = "stopping…" if self.stopping else self.status
            self.actions.say(text, "warn" if self.stopping else "plain", self._clock.left())
        elif why_not and model is not None:
            self.actions.say(why_not, "bad")
        else:
            self.actions.say(self.status or "ready")

    def _lengths(self) -> list[int | None]:
        """Tokens of every prompt; an empty one counts as BOS."""
        if self.model is None:
            return [None] * len(self.state.prompts)
        return [max(len(token_ids(self.model, prompt)), 1) for prompt in self.state.prompts]

    def _load_if_needed(self) -> None:
        wanted = (self.state.model, self.state.device, self.state.dtype)
        if self.busy or wanted == self._wanted:
            return
        self._wanted, self.model = wanted, None
        dtype = None if self.state.dtype == "auto" else self.state.dtype
        self._submit("load", jobs.load_model(self.state.model, self.state.device, dtype))

    def _submit(self, name: str, work: Any) -> None:
        self.busy, self.stopping = True, False
        self.actions.error.value = ""
        self._clock.start()
        self.worker.submit(name, work)

    def _build(self) -> None:
        state, put = self.state, self.put
        self.header = Header(state.model, self.devices, put)
        self.mode = W.HTML()
        self.actions = Actions(put)
        self.toggles = Toggles(state, put)
        self.prompts = PromptsEditor(put)
        self.generating = Generating(state.generation, state.stop_at_eos, state.repeats, put)
        self.live = Live()
        self.results = ResultsView(put)
        inputs = W.HBox([self.prompts.box, self.generating.box]).add_class("eet-inputs")
        parts = [
            self.header.box,
            self.mode,
            self.toggles.box,
            inputs,
            self.actions.box,
            self.live.box,
            self.results.box,
        ]
        self.box = W.VBox([W.HTML(theme.stylesheet()), *parts]).add_class("eet-bench")
        self.results.offer(self.files.available())

    # What the engine thread tells

    def _on_started(self, event: Started) -> None:
        self.status = f"{event.name}…"

    def _on_progress(self, event: Progress) -> None:
        self.status = event.text or self.status
        self._clock.progress(event.done, event.total)

    def _on_phase(self, event: Phase) -> None:
        self.status = event.text
        self.runs.enter(event)

    def _on_step(self, event: Step) -> None:
        self._clock.step(event.event.index + 1, event.event.num_steps)
        self.runs.step(event.event)

    def _on_sampled(self, event: Sampled) -> None:
        self.runs.replayed(event)

    def _on_finished(self, event: Finished) -> None:
        self.runs.leave()
        stopped, self.busy, self.stopping = self.stopping, False, False
        self.status = f"{event.name} {'stopped' if stopped else 'done'} in {event.seconds:.1f} s"
        if event.error is not None:
            self._fail(event.error)
        elif event.name == "load":
            self._loaded(event.value)
        elif event.value is not None and getattr(event.value, "rungs", True):
            self.result = event.value
            self._monitor = self.runs.monitor if isinstance(event.value, Comparison) else {}
            self.results.show(event.value, "waterfall" if isinstance(event.value, Ladder) else "overview")

    def _loaded(self, model: Model | None) -> None:
        self.model = model
        self.status = "ready" if model else "no model: pick one above"

    # What the user asks for

    def _do_pick_model(self, value: Any) -> None:
        self._asking_path = value == OTHER
        if not self._asking_path:
            self.state.model = value

    def _do_type_model(self, text: str) -> None:
        if text.strip():
            self.state.model = text.strip()
            self._asking_path = False

    def _do_choose(self, name: str, value: Any) -> None:
        setattr(self.state, name, value)
        if name == "device":
            self.state.drop_blocked()
            self.device.watch(value)

    def _do_setting(self, name: str, value: Any) -> None:
        self.state.generation = {**self.state.generation, name: value}

    def _do_toggle(self, name: str, on: bool) -> None:
        self.state.toggle(name, on)

    def _do_knob(self, name: str, knob: str, value: Any) -> None:
        self.state.turn(name, knob, value)

    def _do_prompt(self, index: int, text: str) -> None:
        prompts = list(self.state.prompts)
        if index < len(prompts):
            prompts[index] = text
            self.state.prompts = prompts

    def _do_add_prompts(self, lines: list[str]) -> None:
        self.state.prompts = [*self.state.prompts, *lines]

    def _do_remove_prompt(self, index: int) -> None:
        self.state.prompts = [text for i, text in enumerate(self.state.prompts) if i != index]

    def _do_open_paste(self, wanted: bool) -> None:
        self.prompts.open_paste(wanted)

    def _do_paste(self) -> None:
        self._do_add_prompts(self.prompts.take_pasted())

    def _do_run(self) -> None:
        self._begin("run", jobs.run)

    def _do_compare(self) -> None:
        self._begin("compare", jobs.compare, self.state.repeats)

    def _do_ladder(self) -> None:
        self._begin("ladder", jobs.ladder, self.state.repeats)

    def _begin(self, name: str, job: Any, *more: Any) -> None:
        if self.busy or self.model is None:
            return
        state, model = self.state, self.model
        work = job(model, list(state.prompts), state.recipe(), state.settings(model), *more)
        self.runs.begin(state.prompts, model.decode)
        self._submit(name, work)

    def _do_stop(self) -> None:
        if self.busy:
            self.stopping = True
            self.worker.stop()

    def _do_tab(self, tab: str) -> None:
        self.results.show(self.result, tab)

    def _do_save(self) -> None:
        self._kept(self.files.save(self._measured(), self._monitor))

    def _do_export_csv(self) -> None:
        self._kept(self.files.export_csv(self._measured()))

    def _do_export_page(self) -> None:
        self._kept(self.files.export_page(self._measured()))

    def _do_upload(self, files: Any) -> None:
        if not files:
            return  # it was emptied, by us
        self.results.upload.value = ()  # a file's content need not be saved with the notebook
        path = self.files.take(bytes(files[0]["content"]))
        self._open_file(path)
        self._kept(path)

    def _do_open(self) -> None:
        self._open_file(Path(self.results.files.value))

    def _open_file(self, path: Path) -> None:
        self.result, self._monitor = recordings.open_file(path)
        self.results.show(self.result)

    def _kept(self, path: Path) -> None:
        self.results.say(f"Written: {path}")
        self.results.offer(self.files.available())

    def _measured(self) -> Comparison | Ladder:
        if not isinstance(self.result, (Comparison, Ladder)):
            raise ResultError("There is no result to keep yet: press Compare or Ladder first.")
        return self.result

    def _do_replay(self) -> None:
        self._open_file(Path(self.results.files.value))
        result = self._measured()
        decode = self.model.decode if self.model and self.model.name == result.environment.model else jobs.ids_as_text
        self.runs.begin(result.prompts, decode)
        self.device.pause_showing()
        self.live.watch(result.environment.device_kind == "cuda", f"recorded on {result.environment.device}")
        self._submit("replay", jobs.replay(result, self._monitor))


def _all_widgets(widget: W.Widget) -> list[W.Widget]:
    """A widget and everything below it."""
    return [widget, *(each for child in getattr(widget, "children", ()) for each in _all_widgets(child))]
