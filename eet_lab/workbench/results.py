"""What the answer and the list of runs show: the newest result, or a kept one. Only the ui thread calls it."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from eet_lab.bench import Comparison, Ladder
from eet_lab.bench.run_memory import RunMemory
from eet_lab.bench.timeline import Timelines
from eet_lab.errors import EETError, RecipeError, ResultError
from eet_lab.figures.ladder import Effect, effects
from eet_lab.models import Model
from eet_lab.technique import Recipe
from eet_lab.words import sized, visible
from eet_lab.workbench.commands import command
from eet_lab.workbench.engine_thread import Work
from eet_lab.workbench.history import History
from eet_lab.workbench.jobs import BASELINE, Job
from eet_lab.workbench.memory import MemoryTab
from eet_lab.workbench.opened import Opened, Setup, SideBySide, models_apart
from eet_lab.workbench.page import Page
from eet_lab.workbench.rows import KeptRun, Result, Stamp
from eet_lab.workbench.sheet import Sheet, SheetContent
from eet_lab.workbench.threads import Answer, Background
from eet_lab.workbench.views import answer
from eet_lab.workbench.views.runs import MOST_UPLOAD_BYTES, packed, runs_state

LADDERS = 8
"""So many of the newest ladders are looked at for one of what is on the page."""
LOOKS = ("tab", "scale", "pick", "tick")
"""Commands that leave what was said of a file."""
TICKED = 2
"""So many kept runs can be held side by side."""


class Results:
    """The result on the page with its tab, kept runs with their ticks, and the kept run that is open."""

    def __init__(self, page: Page, history: History, background: Background) -> None:
        self._page, self.history, self._background = page, history, background
        self.memory = MemoryTab(background)
        self._sheet = Sheet(page, self.memory)
        self.latest: Result | None = None
        """What was measured here last."""
        self.opened: Opened | None = None
        self.said = ""
        self._id = ""  # of the latest result's row, which may be deleted
        self._beside: dict[str, Any] = {}  # what its file holds beside it
        self._reading = False
        self._partial: Comparison | Ladder | None = None
        self._running = False
        self._ladders: dict[tuple[str, Stamp], Ladder | None] = {}  # that were opened for what they tell
        self._ticked: list[str] = []
        self._pages = 1
        self._num_files = 0  # that were sent to the page

    @property
    def result(self) -> Result | None:
        """What the answer is about."""
        return self.opened.result if self.opened else self._partial or self.latest

    @property
    def setup(self) -> Setup | None:
        """What the kept run that is open was measured with; None where the reader's own choices are shown."""
        return self.opened.setup if self.opened else None

    @property
    def sampled_before(self) -> Opened | None:
        """What is open, if the live charts are of another run: of this machine's newest one."""
        opened = self.opened
        if opened is None or opened.result is None:
            return None
        return opened if opened.result.environment.recorded or opened.id != self._id else None

    # A job of the engine thread

    def begin(self) -> None:
        """A job has begun: its text streams where figures stand."""
        self._running, self._partial, self.said = True, None, ""

    def provisional(self, result: Comparison | Ladder) -> None:
        """What has been measured so far."""
        self._partial = result

    def finish(self, result: Result | None, monitor: Mapping[str, Any], memory: Mapping[str, RunMemory]) -> None:
        """The job is over; without a result, what was there before stays."""
        self._running, self._partial = False, None
        if result is None:
            return
        self.latest, self._beside = result, {"monitor": dict(monitor)}
        self._sheet.open()
        self.memory.put_up(memory)
        self._id = self.history.add(result, monitor).id

    def timeline(self, model: Model) -> Work:
        """The job that takes the timelines of the newest comparison; EETError where this model cannot tell of it."""
        if not isinstance(self.latest, Comparison):
            raise ResultError("There is no comparison to take a timeline of: press Compare first.")
        job = Job.of(self.latest, model)
        return partial(job.timeline, Recipe.parse(self.latest.baseline.recipe, model.device))

    def put_timelines(self, taken: Timelines | None) -> None:
        """Timelines of a step of the newest comparison: no other job can have ended meanwhile."""
        self._running = False
        if taken is not None:
            self._beside["timeline"] = taken
            if self.history.has(self._id):
                self.history.attach(self._id, taken)

    def turn(self, busy: bool) -> None:
        """Let the tab on memory ask what it needs, and have files read that nobody has read yet."""
        self.memory.open = self._sheet.tab(self._subject()) in ("arena", "planners")
        self.memory.turn(busy)
        if not (busy or self._reading) and (files := self.history.unread()):
            self._reading = True
            self._background.ask(self.answered, None, lambda: self.history.read(files))

    def answered(self, answer: Answer) -> None:
        """What kept files hold."""
        self._reading = False
        if answer.error is not None:
            raise answer.error
        self.history.learn(answer.value)

    # What the user asks for

    def heed(self, name: str) -> None:
        """A command comes: what was said of another file goes."""
        if name not in LOOKS:
            self.said = ""

    @command
    def tab(self, name: str) -> None:
        """Another tab of the result."""
        self._sheet.open(name)

    @command
    def scale(self, name: str, on: bool) -> None:
        """Switch a scale of figures: "log", for a logarithmic axis, or "own width", for the steps of a timeline."""
        self._sheet.scale(name, on)

    @command
    def pick(self, what: str, name: str) -> None:
        """Another "run", "pass" or "planner" on the tab on memory."""
        self.memory.pick(what, name)

    @command
    def export(self, id: str, format: str) -> None:
        """Have the browser save a kept run, or what is shown (the id ""): as "json", "csv", "html" or "trace"."""
        self._send(*(self.history.export(id, format) if id else self._export(format)))

    @command
    def show_older(self) -> None:
        """List more of the kept runs."""
        self._pages += 1

    @command
    def tick(self, id: str, on: bool) -> None:
        """Choose a kept run for a comparison, or no longer."""
        kept = [each for each in self._ticked if each != id]
        self._ticked = [*kept, id][-TICKED:] if on else kept

    @command
    def pin(self, id: str, on: bool) -> None:
        """Make a kept run's recipe what Compare is held against, or no longer."""
        self.history.pin(id if on else None)

    @command
    def rename(self, id: str, text: str) -> None:
        """Another name for a kept run."""
        self.history.rename(id, text)

    @command
    def annotate(self, id: str, text: str) -> None:
        """Another note on a kept run."""
        self.history.annotate(id, text)

    @command
    def open_run(self, id: str) -> None:
        """Show a kept run with its own model, prompts and switches, read-only."""
        self._open(id)

    @command
    def replay(self, id: str) -> None:
        """Open a kept run and let its two lanes race."""
        self._open(id, race=True)

    @command
    def close_run(self) -> None:
        """Back to the reader's own choices and the newest result."""
        if self.opened is not None:
            self._put(None)

    @command
    def compare_ticked(self) -> None:
        """Show the two ticked runs side by side, as they were measured."""
        rows = self._two()
        self._put(Opened(pair=SideBySide.of(rows, [self.history.open(row.id)[0] for row in rows])))

    def _open(self, id: str, race: bool = False) -> None:
        row = next((row for row in self.history.rows() if row.id == id), None)
        if row is None:
            raise ResultError("This run is no longer kept: its file is gone.")
        opened = Opened.of(row, *self.history.open(id))
        self._put(opened, "race" if race else "")
        if opened.can_race:
            self._page.race.show(*opened.lanes(), begin=race)

    def _put(self, opened: Opened | None, tab: str = "") -> None:
        """Something else is open from now on; a race of what was open ends."""
        self.opened = opened
        self._sheet.open(tab)
        self._page.stop_race()

    def pinned_recipe(self, device: str) -> Recipe:
        """What Compare holds the selection against: the pinned run's recipe, else the baseline."""
        row = self.history.pinned()
        return Recipe() if row is None else _runnable(row.recipe_text, row.name, device)

    def ticked_recipes(self, device: str) -> tuple[Recipe, Recipe]:
        """The recipes of the two ticked runs; ResultError unless there are two."""
        rows = self._two()
        if why := models_apart(rows):
            raise ResultError(f"{why} Tick two of one model, and choose that model, to measure both recipes on it.")
        first, second = (_runnable(row.recipe_text, row.name, device) for row in rows)
        return first, second

    def _unfit(self, device: str) -> str:
        """Why the two ticked runs cannot be measured again; "" where they can, or there are not two."""
        try:
            if sum(row.id in self._ticked for row in self.history.rows()) == TICKED:
                self.ticked_recipes(device)
        except EETError as error:
            return str(error)
        return ""

    def against(self) -> str:
        """The label of what Compare holds the selection against."""
        row = self.history.pinned()
        return BASELINE if row is None else row.recipe

    def against_told(self) -> str:
        """The same as it stands below the buttons: a run that a reader has named is called so."""
        row = self.history.pinned()
        return self.against() if row is None or row.name == row.first_name else row.name

    def recording(self) -> str:
        """The id of the recorded comparison of GPT-2 XL; "" where there is none."""
        rows = (row for row in self.history.rows() if row.recorded and row.kind == "compare")
        return next((row.id for row in rows if "gpt2-xl" in row.model.lower() or "xl" in row.name.lower()), "")

    # What is shown

    def headline(self, model: Model | None) -> dict[str, Any] | None:
        """The answer in a line; None before there is one. It names its model, if another one is chosen by now."""
        if self.opened and self.opened.pair:
            return self.opened.pair.headline()
        result = self.result
        if result is None:
            return None
        where = result.environment
        is_other = not self.opened and (model is None or model.label != where.model_label)
        about = f"{visible(where.model)} · " * is_other + answer.about(result)
        return {"parts": answer.headline(result), "about": about}

    def effects(self, prompts: Sequence[str], model: Model | None) -> tuple[dict[str, Effect], str]:
        """What each technique brought in the ladder that is shown, or in the last one that fits, and which that was.

        One fits that was of this model, its device and these prompts: others say nothing of what is on the page.
        """
        shown = self.result
        if isinstance(shown, Ladder):
            return effects(shown), "change in this ladder"
        if self.setup or model is None:
            return {}, ""
        rows = [row for row in self.history.rows() if row.kind == "ladder" and not row.recorded and not row.problem]
        rows = [row for row in rows if row.weights in ("", visible(model.label))]
        wanted = model.name, model.label, model.device, tuple(prompts)
        for row in sorted(rows, key=lambda row: row.date, reverse=True)[:LADDERS]:
            if (ladder := self._opened_once(row)) is not None and _measured_on(ladder) == wanted:
                return effects(ladder), f"change in {row.name}"
        return {}, ""

    def _opened_once(self, row: KeptRun) -> Ladder | None:
        """A kept ladder; None where its file has gone since."""
        key = row.id, row.stamp
        if key not in self._ladders:
            found: Result | None = None
            with suppress(ResultError):
                found = self.history.open(row.id)[0]
            self._ladders[key] = found if isinstance(found, Ladder) else None
            self._ladders = dict(list(self._ladders.items())[-LADDERS:])
        return self._ladders[key]

    def show(self, busy: bool, device: str) -> None:
        """Put up the answer and the list of runs; `device` is the kind of what runs are measured on now."""
        rows = self.history.rows()
        if self.opened is not None:
            self.opened = self.opened.named({row.id: row for row in rows})
        self._sheet.show(self._subject())
        shown = self._shown
        self._page.runs.show(
            runs_state(rows, self._ticked, shown, self.history, self.said, busy, self._pages, self._unfit(device))
        )

    @property
    def _shown(self) -> str:
        """The id of the kept run that is open, else of the newest result."""
        return self.opened.id if self.opened else self._id

    def _subject(self) -> SheetContent:
        """What the answer is about: the kept run that is open, else the newest result or what is known of it."""
        if (opened := self.opened) is not None:
            newest = opened.id == self._id
            return SheetContent(opened.result, opened.timelines, opened.pair, True, newest, can_race=opened.can_race)
        timelines = self._beside.get("timeline")
        return SheetContent(self.result, timelines, running=self._running, partial=self._partial is not None)

    def _export(self, format: str) -> tuple[str, bytes]:
        """What is shown, as a file. The newest result is still here where its row was deleted."""
        if self.opened is not None:
            return self.history.export(self.opened.id, format)
        if self.latest is None:
            raise ResultError("There is no result to export yet: press Run, Compare or Ladder first.")
        if self.history.has(self._id):
            return self.history.export(self._id, format)
        return self.history.exported(self.latest, self._beside, format)

    def _send(self, name: str, content: bytes) -> None:
        """Have the browser save a file; what is too large to be sent is written, which may be on another machine."""
        small = packed(content)
        if small is None:
            self.said = f"Too large to be sent to this page, so it was written: {self.history.put_down(name, content)}"
            return
        self.said = f"Exported: {name}"
        self._num_files += 1
        self._page.runs.send({"kind": "file", "name": name, "number": self._num_files}, buffers=[small])

    @command
    def upload(self, name: str, content: str) -> None:
        """Keep a result's file, whose content comes as base64, and show it."""
        try:
            data = b64decode(content, validate=True)
        except NotBase64:
            raise ResultError(f"The upload of {name} is incomplete. Load it again.") from None
        if len(data) > MOST_UPLOAD_BYTES:
            raise ResultError(
                f"{name} has more than {sized(MOST_UPLOAD_BYTES)}, the most that a page can send. Copy it into "
                f"{self.history.folder}."
            )
        row = self.history.take(name, data)
        self.said = f"{name} is kept as {row.name}."
        self._open(row.id)

    @command
    def delete(self, id: str) -> None:
        """Remove a kept run."""
        name = next((row.label for row in self.history.rows() if row.id == id), "")
        self.history.delete(id)
        still = " It is shown until the next result, and no longer kept." if id == self._id == self._shown else ""
        self.said = f"Deleted: {name}.{still}" if name else ""
        self._ticked = [each for each in self._ticked if each != id]
        if self.opened and id in self.opened.ids:
            self.close_run()

    def _two(self) -> list[KeptRun]:
        rows = {row.id: row for row in self.history.rows()}
        self._ticked = [id for id in self._ticked if id in rows]
        if len(self._ticked) != TICKED:
            raise ResultError(
                f"{len(self._ticked)} runs are ticked, but exactly {TICKED} are needed: tick two in the list of runs."
            )
        return [rows[id] for id in self._ticked]


def _measured_on(result: Ladder) -> tuple[str, str, str, tuple[str, ...]]:
    """Model, whose weights, kind of device, prompts."""
    where = result.environment
    return where.model, where.model_label, where.device_kind, tuple(result.prompts)


def _runnable(recipe: str, name: str, device: str) -> Recipe:
    """A kept run's recipe, checked against the device; RecipeError that says whose it is."""
    try:
        return Recipe.parse(recipe, device).check(device)
    except RecipeError as error:
        raise RecipeError(f"The recipe of {name!r} cannot run here: {error}") from error
