"""The header (model, device, dtype), the settings of a generation, and the actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets as W

from eet_lab.models import PRESETS, Model
from eet_lab.panels import theme

Put = Callable[..., None]

OTHER = "folder or hub name…"
NOTHING_ON = "No technique is switched on: Run shows the baseline; Compare and Ladder need one to hold against it."
DTYPES = ("auto", "float32", "float16", "bfloat16")
BADGES = {
    "demo": ("trained weights", "good"),
    "random": ("random weights: for timing", "warn"),
    "folder": ("weights from a folder", "good"),
    "hub": ("weights from the hub", "good"),
    "live": ("live model", "plain"),
}
"""What to say of each `Model.kind`, and how good it is."""


class Header:
    """Pickers for model, dtype and device, and what was loaded."""

    def __init__(self, model: Any, devices: list[str], put: Put) -> None:
        options = [("demo (trained, bundled)", "demo")]
        options += [(f"{name} (random weights: for timing)", name) for name in PRESETS]
        self._presets = {value for _, value in options}
        if not isinstance(model, str):
            options.append((f"{type(model).__name__} (live)", model))
        value = model if not isinstance(model, str) or model in self._presets else OTHER
        self.model = W.Dropdown(options=[*options, (OTHER, OTHER)], value=value, tooltip="Model")
        self.path = W.Text(
            value=model if value == OTHER else "",
            placeholder="./my-gpt2 or openai-community/gpt2, then Enter",
            continuous_update=False,
            tooltip="A folder in Hugging Face format, or a hub name",
        )
        self.dtype = W.Dropdown(options=DTYPES, tooltip="dtype; auto: float16 on a GPU, float32 on the CPU")
        self.device = W.Dropdown(options=devices, tooltip="Device")
        self.model.observe(lambda change: put("pick_model", change.new), "value")
        self.path.observe(lambda change: put("type_model", change.new), "value")
        self.dtype.observe(lambda change: put("choose", "dtype", change.new), "value")
        self.device.observe(lambda change: put("choose", "device", change.new), "value")
        self.again = W.Button(description="Load again", tooltip="Try the same model once more").add_class("eet-quiet")
        self.again.on_click(lambda _: put("load_again"))
        self.offer_again(False)
        self._facts = W.HTML().add_class("eet-facts")
        brand = W.HTML('<div class="eet-brand">EET<b>Lab</b></div>')
        fields = {"Model": self.model, "Folder or hub name": self.path, "dtype": self.dtype, "Device": self.device}
        self._fields = {label: _labelled(label, widget) for label, widget in fields.items()}
        self.box = W.HBox([brand, *self._fields.values(), self.again, self._facts]).add_class("eet-header")

    def ask_path(self, wanted: bool) -> None:
        """Show or hide the place to type a folder or hub name into."""
        self._fields["Folder or hub name"].layout.display = "" if wanted else "none"

    def offer_again(self, wanted: bool) -> None:
        """Show or hide the button that loads the same model once more."""
        self.again.layout.display = "" if wanted else "none"

    def update(self, model: Any, device: str, dtype: str, loaded: Model | None, asking_path: bool) -> None:
        """Show the choice and, once it is there, the model; `asking_path` while a folder is yet to be named."""
        known = model if not isinstance(model, str) or model in self._presets else OTHER
        self.model.value = OTHER if asking_path else known
        self.ask_path(asking_path or known == OTHER)
        self.device.value, self.dtype.value = device, dtype
        self._facts.value = "" if loaded is None else _facts(loaded)


class Generating:
    """The settings of a generation."""

    def __init__(self, values: Mapping[str, Any], stop_at_eos: bool, repeats: int, put: Put) -> None:
        def number(label: str, value: Any, tip: str, tell: Callable[[Any], None], step: float = 1) -> Any:
            # Unbounded: a number that cannot be is told with its limit, where a bounded field would change it silently.
            widget = W.FloatText(value=value, step=step, tooltip=tip)
            widget.observe(lambda change: tell(int(change.new) if change.new.is_integer() else change.new), "value")
            return _labelled(label, widget)

        def setting(name: str, label: str, tip: str, step: float = 1) -> Any:
            return number(label, values[name], tip, lambda value: put("setting", name, value), step)

        self.stop = W.Checkbox(value=stop_at_eos, description="stop at end of text", indent=False)
        self.stop.observe(lambda change: put("choose", "stop_at_eos", change.new), "value")
        timed = "Timed runs of each recipe in Compare and Ladder"
        grid = W.Box(
            [
                setting("max_new_tokens", "New tokens", "For every prompt"),
                setting("temperature", "Temperature", "0: greedy", step=0.1),
                setting("top_k", "Top-k", "0: no limit"),
                setting("top_p", "Top-p", "1: no limit", step=0.05),
                setting("seed", "Seed", "The same seed, the same draws"),
                number("Repeats", repeats, timed, lambda value: put("choose", "repeats", value)),
            ],
            layout={"display": "grid"},
        ).add_class("eet-settings")
        self.box = W.VBox([W.HTML('<div class="eet-section">Generation</div>'), grid, self.stop]).add_class("eet-panel")


RUN_TIP = "Generate once with the selection, and watch"
COMPARE_TIP = "The baseline against the selection: same prompts, weights and seed"


class Actions:
    """Run, Compare, Ladder, Stop; progress and status."""

    def __init__(self, put: Put) -> None:
        self.run, self.compare = _action("Run", RUN_TIP, put), _action("Compare", COMPARE_TIP, put)
        self.ladder = _action("Ladder", "Add the techniques one by one, then leave each out: who saves what", put)
        self.stop = _action("Stop", "End the run; what is there stays", put)
        self.compare.add_class("eet-primary")
        self.stop.add_class("eet-danger")
        self.bar = W.FloatProgress(min=0, max=1, value=0).add_class("eet-progress")
        self.status = W.HTML().add_class("eet-status")
        self.error = W.HTML().add_class("eet-errors")
        self._stopping, self._hint = False, ("", "plain")
        buttons = W.HBox([self.run, self.compare, self.ladder, self.stop]).add_class("eet-buttons")
        line = W.HBox([buttons, W.VBox([self.bar, self.status]).add_class("eet-progress-box")]).add_class("eet-actions")
        self.box = line

    def update(self, busy: bool, stopping: bool, loaded: bool, why_not: str | None, nothing_on: bool) -> None:
        """Which buttons can be pressed, and why not all; `why_not` is why nothing can start."""
        self._stopping = stopping
        self._hint = (why_not, "bad") if why_not else (NOTHING_ON, "warn") if nothing_on else ("", "plain")
        if not loaded:
            self._hint = "", "plain"  # then the status tells
        self.run.disabled = busy or why_not is not None
        self.compare.disabled = self.ladder.disabled = self.run.disabled or nothing_on
        self.stop.disabled = not busy or stopping

    def warn(self, run: str, compare: str) -> None:
        """What is foreseen to go wrong, beside what a button does; both can be pressed, since a forecast may err."""
        self.run.tooltip, self.compare.tooltip = (
            f"{tip}. {words}" if words else tip for tip, words in ((RUN_TIP, run), (COMPARE_TIP, compare))
        )

    def progress(self, status: str, share: float, left: str) -> None:
        """Something runs."""
        self.bar.value, self.bar.layout.visibility = share, "visible"
        text, kind = ("stopping…", "warn") if self._stopping else (status, "plain")
        self._say(text, kind, left)

    def rest(self, status: str) -> None:
        """Nothing runs: say why nothing could, else how the last one went."""
        self.bar.layout.visibility = "hidden"
        text, kind = self._hint
        self._say(text or status, kind)

    def _say(self, text: str, kind: str, right: str = "") -> None:
        """The status line; `right` is the time left."""
        extra = f'<span class="eet-left">{escape(right)}</span>' if right else ""
        self.status.value = f'<div class="eet-status-line eet-{kind}"><span>{escape(text)}</span>{extra}</div>'


def mode_label(device: str, has_gpu: bool) -> str:
    """A visible word where nothing is measured on a GPU."""
    if device == "cuda":
        return ""
    why = "the model runs on this processor; switch the device to cuda" if has_gpu else "no NVIDIA GPU"
    text = f"CPU mode: {why}; times and memory below are this processor's, and GPU-only techniques are greyed"
    return f'<div class="eet-mode" role="status">{escape(text)}</div>'


def _action(name: str, tip: str, put: Put) -> W.Button:
    button = W.Button(description=name, tooltip=tip).add_class("eet-action").add_class(f"eet-{name.lower()}")
    button.on_click(lambda _: put(name.lower()))
    return button


def _labelled(label: str, widget: W.DOMWidget) -> W.VBox:
    return W.VBox([W.HTML(f'<div class="eet-label">{escape(label)}</div>'), widget]).add_class("eet-field")


def _facts(model: Model) -> str:
    config = model.config
    return (
        f"<b>{config.num_params / 1e6:.3g} M</b> parameters · {config.num_layers} layers · "
        f"{config.hidden_size} wide · context <b>{config.context}</b> · {model.dtype} on {model.device} "
        f"{theme.badge(*BADGES[model.kind])}"
    )
