"""The widgets of the training panel: choices, buttons, charts of what goes on, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from html import escape
from typing import ClassVar

import ipywidgets as W

from eet_lab.bench.paired import memory_words
from eet_lab.bench.train_compare import TrainComparison, TrainedSide, TrainLadder, TrainRung
from eet_lab.figures import theme
from eet_lab.figures.ladder import training_waterfall
from eet_lab.figures.live import Point, StripCharts
from eet_lab.figures.outputs import FigureBox
from eet_lab.models import Model
from eet_lab.models.config import Config, VisionConfig
from eet_lab.scheduling.whole import is_whole
from eet_lab.technique import Technique, known, obstacle, registry
from eet_lab.training import TrainRun
from eet_lab.training.asked import TrainAsked
from eet_lab.training.run import Evaluation
from eet_lab.training.tasks import task_of
from eet_lab.words import MiB, amount, brief, counted, percent, visible
from eet_lab.workbench.actions import ActionPage, field, help_line
from eet_lab.workbench.train_jobs import Compared, Look

LINES = {
    "loss": ("loss", "nats a label", {"training": theme.BASELINE, "held-out": theme.SELECTION}),
    "speed": ("speed", "tokens/s", {"tokens a second": theme.GAIN}),
    "mfu": ("MFU", "%", {"of this GPU’s bf16 products": theme.SERIES[5]}),
    "norm": ("gradient norm", "", {"norm": theme.SERIES[3]}),
    "memory": ("GPU memory", "MiB", {"allocated": theme.SELECTION, "peak": theme.SERIES[1]}),
}
"""Title, unit and lines of each chart."""
SCALES = {"loss": "log", "norm": "log"}


class TrainLive(StripCharts):
    """Strip charts over the steps of a run."""

    def __init__(self, on_gpu: bool) -> None:
        super().__init__(LINES, height="190px", x_unit="", scales=SCALES, overflow="visible")
        if not on_gpu:
            self.charts["memory"].note = "Not measured on a CPU."
            self.charts["mfu"].note = "No ceiling measured on a CPU."

    def push(self, looks: Iterable[Look | Evaluation]) -> None:
        """What was told since."""
        points: dict[str, list[Point]] = {name: [] for name in self.charts}
        for look in looks:
            if isinstance(look, Evaluation):
                points["loss"].append((1, look.num_steps, look.loss))
                continue
            at, step = look.step.number + 1, look.step
            points["loss"].append((0, at, step.loss))
            points["speed"].append((0, at, step.num_tokens / step.ms * 1e3))
            points["norm"].append((0, at, step.grad_norm))
            if look.mfu is not None:
                points["mfu"].append((0, at, 100 * look.mfu))
            held = enumerate((look.allocated_bytes, look.peak_bytes))
            points["memory"] += [(line, at, num_bytes / MiB) for line, num_bytes in held if num_bytes is not None]
        self.show(points)


CALLED = {
    "lr": "learning rate", "warmup_steps": "warm-up steps", "batch_rows": "rows a batch", "row_tokens": "tokens a row",
}  # fmt: skip
"""What is above the fields that code has other names for."""
WHOLE = ("warmup_steps", "steps", "batch_rows", "row_tokens")
WIDE = {"width": "auto"}
FORM = {"grid_template_columns": "repeat(auto-fit, minmax(215px, 1fr))", "grid_gap": "4px 18px", "margin": "6px 0"}
ROW = {"flex_flow": "row wrap", "display": "flex", "grid_gap": "4px 14px", "align_items": "center", "margin": "6px 0"}


class TrainPage(ActionPage):
    """All widgets."""

    ACTIONS: ClassVar[Mapping[str, tuple[str, str, str]]] = {
        "train": ("Train", "From the model’s own weights", "Reading the data …"),
        "stop": ("Stop", "Stops within one pass; writes the checkpoint, if a folder is named", ""),
        "resume": ("Resume", "From the last checkpoint", "Reading the checkpoint …"),
        "compare": ("Compare", "The ticked techniques with none, a step of each in turn", "Reading the data …"),
        "ladder": ("Ladder", "The ticked techniques added, and left out, one by one", "Reading the data …"),
    }
    CALLED: ClassVar[Mapping[str, str]] = {**CALLED, "max_steps": "steps"}

    def __init__(self, model: Model, asked: TrainAsked, put: Callable[[str], None]) -> None:
        self._asked, on_gpu = asked, model.device == "cuda"
        self._where = "" if on_gpu else theme.badge("on a CPU: its times say nothing of a GPU’s", "warn")
        of_text, text = asked.reads_rows(model), {"continuous_update": False, "layout": WIDE}
        data = W.Text(asked.data, placeholder="none", **text)
        data.disabled = isinstance(model.config, VisionConfig)
        kind = "text or JSONL" if asked.reads_text(model) else "JSONL with labels"
        help = "" if data.disabled else f" A file: {kind}; a tenth is held out."
        folder = W.Text(asked.folder, placeholder="none", **text)
        self._usual_warmup = asked.warmup if asked.warmup_steps is None else None  # until somebody types another
        warmup, row_tokens = _whole(asked.warmup), _whole(asked.tokens_a_row(model))
        row_tokens.disabled = not of_text
        most = f"At most the model’s context, {model.config.context:,}." if of_text else "Examples are read whole."
        fields = {
            "data": ("data, a file", data, f"None: {asked.told(model)}.{help}"),
            "folder": ("checkpoint, a folder", folder, "Written at most ten times a run, and at Stop."),
            "lr": (CALLED["lr"], W.FloatText(asked.lr, layout=WIDE), "How far AdamW moves the weights."),
            "warmup_steps": (CALLED["warmup_steps"], warmup, "The learning rate rises from 0."),
            "steps": ("steps", _whole(asked.steps), "The total, including those before a Resume."),
            "batch_rows": (CALLED["batch_rows"], _whole(asked.batch_rows), "A step reads one batch."),
            "row_tokens": (CALLED["row_tokens"], row_tokens, most),
            "dropout": ("dropout, a share", W.FloatText(asked.dropout, layout=WIDE), "Of hidden states and attention."),
        }
        super().__init__(fields, put, width="110px")
        self.buttons["resume"].disabled = True
        config = model.config.in_training
        fitting = [technique() for technique in registry().values() if "train" in technique.stages]
        self.techniques = {t.name: _checkbox(t, model.device, config, t.name in asked.techniques) for t in fitting}
        cards = [
            W.HBox([box, help_line(box.tooltip)], layout={"align_items": "center"}) for box in self.techniques.values()
        ]
        self.live = TrainLive(on_gpu)
        self.headline, self.comparison, self.figure = W.HTML(), W.HTML(), FigureBox()
        task = task_of(asked.task, model.config).name
        told = f"<b>{escape(visible(model.label))}</b>, {escape(model.dtype)}, {task} {self._where}"
        self.box = W.VBox(
            [
                W.HTML(theme.stylesheet()), W.HTML(f"<div>{told}</div>"), W.GridBox([*self.form.values()], layout=FORM),
                field("techniques", W.VBox(cards)),
                W.HBox([*self.buttons.values(), self.status], layout=ROW), self.error, self.headline,
                self.live.box, self.figure, self.comparison,
            ]
        )  # fmt: skip

    def asked(self) -> TrainAsked:
        """What the fields say now."""
        ticked = tuple(name for name, box in self.techniques.items() if box.value)
        said = self.said()
        said |= {name: int(said[name]) for name in WHOLE if said[name].is_integer()}
        if said["warmup_steps"] == self._usual_warmup:
            said["warmup_steps"] = None
        return replace(self._asked, techniques=ticked, **said)

    def follow_steps(self) -> None:
        """Show the warm-up that the steps leave room for, as long as nobody types one."""
        asked = self.asked()
        if asked.warmup_steps is None and is_whole(asked.steps, 1):
            self._usual_warmup = self.fields["warmup_steps"].value = asked.warmup

    def begin(self, compares: bool) -> None:
        """Something is asked for: what was told of the last one of its kind goes, and charts that would stay empty."""
        if compares:
            self.comparison.value = ""
            self.figure.show()
        else:
            self.headline.value = ""
            self.live.clear()
        has_run = not compares or any(chart.points for chart in self.live.charts.values())
        self.live.box.layout.display = None if has_run else "none"

    def offer_resume(self, there_is_one: bool, busy: bool) -> None:
        """Whether there is a checkpoint to go on from."""
        resume = self.buttons["resume"]
        resume.disabled = busy or not there_is_one
        resume.tooltip = "From the folder’s checkpoint" if there_is_one else "The folder has no checkpoint"

    def show_run(self, run: TrainRun, num_steps: int, mfu: float | None) -> None:
        """What came of a run that was asked for so many steps; `mfu` is that of its step in the middle."""
        kind = "warn" if run.was_stopped else "good"
        reached = "" if mfu is None else f", MFU {percent(mfu)}"
        told = f"<b>{escape(headline(run, num_steps) + reached)}</b> {self._where}"
        self.headline.value = f'<div class="eet-note eet-{kind}">{told}</div>'

    def show_comparison(self, found: Compared, is_last: bool) -> None:
        """Two recipes side by side, or a ladder, as far as they came. The figure comes last: to draw it would take time
        from the steps that are timed.
        """
        if isinstance(found, TrainComparison):
            self.comparison.value = comparison_table(found, self._where)
            return
        self.comparison.value = ladder_table(found, self._where)
        if is_last:
            self.figure.show(training_waterfall(found))


def headline(run: TrainRun, num_steps: int) -> str:
    """`Loss 5.21 to 3.87 on held-out data in 40 steps, 1,230 tokens/s`."""
    if not run.steps:
        return "Stopped before the first step."
    first, *_, last = (brief(each.loss) for each in (*run.evaluations[:1], *run.evaluations))
    speed = f"{brief(run.tokens_per_s or 0)} tokens/s"
    if not run.was_stopped:
        return f"Loss {first} to {last} on held-out data in {counted(len(run.steps), 'step')}, {speed}"
    fell = f"{first} to {last} on held-out data" if len(run.evaluations) > 1 else f"{first} at first on held-out data"
    return f"Stopped after {run.steps[-1].number + 1:,} of {counted(num_steps, 'step')}: loss {fell}, {speed}"


SAME = {"identical": "good", "within rounding": "good", "different": "bad"}


def comparison_table(found: TrainComparison, where: str) -> str:
    """Milliseconds a step of both, whether they can be told apart, and whether their losses are the same.

    `where` is a badge beside the times.
    """
    change = found.change
    sides = {"no technique": found.baseline, visible(found.selection.recipe.replace(",", ", ")): found.selection}
    times = {} if change is None else dict(zip(sides, (change.before, change.after), strict=True))
    on_gpu = found.baseline.peak_bytes is not None
    rows = [[name, *_cells(side, times.get(name))] for name, side in sides.items()]
    return theme.table(("", "ms a step", "tokens/s", *["peak memory"] * on_gpu), rows, _told(found, where))


def _told(found: TrainComparison, where: str) -> str:
    """What a comparison says, in lines: of a step, of memory, of the loss."""
    change = found.change
    words = [] if change is None else [f"A step: {theme.badge(change.words('ms'), change.kind)} {where}"]
    if found.baseline.peak_bytes is not None and found.selection.peak_bytes is not None:
        less = memory_words(found.baseline.peak_bytes, found.selection.peak_bytes)
        words.append(f"Peak memory: {theme.badge(less)}")
    words.append(f"Same loss curve? {theme.badge(found.verdict, SAME[found.verdict])} {escape(found.explanation)}")
    return "".join(f"<div>{line}</div>" for line in words)


def ladder_table(found: TrainLadder, where: str) -> str:
    """What each technique brings a step on the way up, and what the full recipe is without it; then all beside none."""
    none, change = found.whole.baseline, found.whole.change
    on_gpu = none.peak_bytes is not None
    first = [brief(change.before) if change else "–", "", *[amount(none.peak_bytes or 0)] * on_gpu, ""]
    told = ("ms a step", "change", *["peak memory"] * on_gpu, "same loss curve?")
    added = theme.table(("added one by one", *told), [["no technique", *first], *map(_rung, found.rungs)])
    left_out = [_rung(rung, without=True) for rung in found.left_out]
    whole = f"<div>All of them beside none:</div>{_told(found.whole, where)}"
    return added + (theme.table(("all of them but", *told), left_out, whole) if left_out else whole)


def _rung(rung: TrainRung, without: bool = False) -> list[str]:
    """A technique's line: what it is compared with has all else that is there."""
    found, along = rung.found, [known(name).title for name in rung.along]
    name = " and ".join([rung.title, *along])
    times = ["–", "–"] if found.change is None else [brief(found.change.after), found.change.words("ms")]
    peak = found.selection.peak_bytes
    return [name if without else f"+ {name}", *times, *([] if peak is None else [amount(peak)]), found.verdict]


def _cells(side: TrainedSide, ms: float | None) -> list[str]:
    num_tokens = side.steps[-1].num_tokens if side.steps else 0
    cells = ["–", "–"] if ms is None else [brief(ms), brief(num_tokens / ms * 1e3)]
    return cells + ([] if side.peak_bytes is None else [amount(side.peak_bytes)])


def _whole(value: int) -> W.FloatText:
    """A field for a whole number. An IntText would make 2 of a 2.5 that is typed, and say nothing."""
    return W.FloatText(value, step=1, layout=WIDE)


def _checkbox(t: Technique, device: str, config: Config, ticked: bool) -> W.Checkbox:
    """A technique; where it cannot be ticked, its tooltip says why. A prompt is a text here."""
    reason = obstacle(t, device, config)
    return W.Checkbox(
        ticked and not reason, description=t.title, indent=False, disabled=reason is not None,
        layout={"width": "200px", "flex": "none"},
        tooltip=f"Not here: {reason.rstrip('.')}." if reason else t.summary.replace("prompts", "texts"),
    )  # fmt: skip
