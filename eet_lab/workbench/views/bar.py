"""The bar: which model, what can be pressed, how far it is, and the answer in a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

from eet_lab.devices import kind_of
from eet_lab.errors import first_line
from eet_lab.figures.theme import error_state
from eet_lab.models import PRESETS, Model
from eet_lab.progress import Clock
from eet_lab.words import params_words
from eet_lab.workbench.choices import DEMO, LIVE, OTHER, Choices, State
from eet_lab.workbench.jobs import BASELINE, NOTHING_ON

DTYPES = ("auto", "float32", "float16", "bfloat16")
BADGES = {
    "demo": ("trained weights", "good"),
    "random": ("random weights: for timing", "warn"),
    "folder": ("weights from a folder", "good"),
    "hub": ("weights from the hub", "good"),
    "live": ("live model", "plain"),
}
"""What to say of each `Model.kind`, and how good it is."""
TIPS = {
    "run": "Generate once with the selection, and watch (R)",
    "compare": "Time the selection against {against}: same prompts, weights and seed (C)",
    "ladder": "Add the techniques one by one, then leave each out: what each one saves (L)",
    "stop": "Stop what runs (Esc); a Run keeps what it has generated",
}
KEPT = "A kept run is open, and nothing can start: press “Back to my model” ({}) first."


@dataclass(frozen=True)
class Buttons:
    """What decides which buttons can be pressed. `why_not` is why nothing can start; `tight` warns of memory.

    `against` is the label of what Compare is held against, `kept` the own model behind a kept run that is open.
    """

    loaded: bool
    busy: bool
    stopping: bool
    why_not: str | None
    nothing_on: bool
    against: str
    tight: tuple[str, str] = ("", "")
    kept: str = ""

    def state(self) -> dict[str, dict[str, Any]]:
        """What the page shows: each action, whether it can be pressed, and what it does or why it may fail."""
        can_run = self.loaded and not self.busy and not self.kept and self.why_not is None
        enabled = {
            "run": can_run,
            "compare": can_run and not self._nothing_to_compare,
            "ladder": can_run and not self.nothing_on,
            "stop": self.busy and not self.stopping,
        }
        warnings = {"run": self.tight[0], "compare": self.tight[1], "ladder": NOTHING_ON if self.nothing_on else ""}
        warnings |= {"compare": NOTHING_ON} if self._nothing_to_compare else {}
        tips = {name: tip.format(against=self.against) for name, tip in TIPS.items()}
        told = {name: f"{tip}. {warnings[name]}" if warnings.get(name) else tip for name, tip in tips.items()}
        if self.kept:
            told |= dict.fromkeys(warnings, KEPT.format(self.kept))
        return {name: {"enabled": on, "tip": told[name]} for name, on in enabled.items()}

    def hint(self) -> dict[str, str] | None:
        """What stands in the way, if anything does; the loading of a model tells of itself."""
        if not self.loaded or self.busy:
            return None
        if self.kept:
            return {"text": KEPT.format(self.kept), "kind": "dim"}
        if self.why_not is not None:
            return {"text": self.why_not, "kind": "bad"}
        return {"text": NOTHING_ON, "kind": "warn"} if self._nothing_to_compare else None

    @property
    def _nothing_to_compare(self) -> bool:
        return self.nothing_on and self.against == BASELINE


class Status:
    """How far the present job is, how the last one went, or what failed. Only the ui thread calls it.

    `text` is what is said, `clock` how far the present job is, `error` what failed, for the page. While `text` is the
    `remark`, it stands beside the headline too.
    """

    def __init__(self, state: State) -> None:
        self.text, self.clock = "", Clock()
        self.remark = ""
        self.error: dict[str, Any] | None = None
        self._state = state
        self._failed_with: dict[str, Any] | None = None

    def fail(self, error: BaseException) -> None:
        """Tell what failed."""
        self.text = f"failed: {shorten(first_line(error), 160, placeholder=' …')} The session goes on."
        self.error, self._failed_with = error_state(error), self._state.trait_values()

    def forgive(self) -> None:
        """Take down what failed: something else was chosen since, or is done."""
        if self.error is not None:
            self.error, self._failed_with = None, None
            self.rest()

    def rest(self) -> None:
        """Nothing of the last job is to be said any more."""
        self.text = "ready"

    def look(self) -> None:
        """Forgive where something else was chosen since."""
        if self._failed_with not in (None, self._state.trait_values()):
            self.forgive()

    def shown(self, busy: bool, stopping: bool, buttons: Buttons) -> dict[str, Any]:
        """What the bar shows: words, how much of the job is done, and the time left."""
        if busy:
            told = {"text": "stopping…", "kind": "warn"} if stopping else {"text": self.text, "kind": "plain"}
            return {"status": told, "share": round(self.clock.share, 3), "left": self.clock.left(), "error": self.error}
        kind = "warn" if self.text and self.text == self.remark else "plain"
        plain = {"text": self.text, "kind": "bad" if self.error else kind}
        return {"status": buttons.hint() or plain, "share": 0.0, "left": "", "error": self.error}


def model_state(model: Any, choices: Choices) -> dict[str, Any]:
    """The list of models, and what is chosen of it; where a name is asked for, the one that failed, to be mended."""
    live, asking_path = choices.live, choices.asking_path
    options = [{"value": DEMO, "label": "demo (trained, bundled)"}]
    options += [{"value": name, "label": f"{name} (random weights: for timing)"} for name in PRESETS]
    if live is not None:
        options.append({"value": LIVE, "label": f"{type(live).__name__} (live)"})
    options.append({"value": OTHER, "label": "folder or hub name…"})
    if asking_path:
        value = OTHER
    elif not isinstance(model, str):
        value = LIVE
    else:
        value = model if model == DEMO or model in PRESETS else OTHER
    listed = {option["value"] for option in options}
    path = model if value == OTHER and not asking_path else ""
    if asking_path and choices.failed_name not in listed:
        path = choices.failed_name
    return {"models": options, "model": value, "ask_path": value == OTHER, "path": path}


def facts(model: Model | None) -> dict[str, Any]:
    """What was loaded, in a line, and where its weights are from."""
    if model is None:
        return {"facts": "", "badge": None}
    config = model.config
    text, kind = BADGES[model.kind]
    return {
        "facts": f"{params_words(config.num_params)} parameters · {config.num_layers} layers · "
        f"{config.hidden_size:,} wide · context {config.context:,} · {model.dtype} on {model.device}",
        "badge": {"text": text, "kind": kind, "tip": model.label},
    }


def header(state: State, devices: Sequence[str], choices: Choices, loaded: Model | None, busy: bool) -> dict[str, Any]:
    """What can be chosen of models, devices and types, what is, and what was loaded."""
    return {
        **model_state(state.model, choices),
        "devices": [{"value": each, "label": device_label(each)} for each in devices],
        "device": state.device,
        "dtypes": list(DTYPES),
        "dtype": state.dtype,
        "load_again": "" if busy else choices.failed_name,
        **facts(loaded),
    }


def device_label(device: str) -> str:
    """ "CPU", "GPU", or "GPU 1" of several."""
    kind, _, number = device.partition(":")
    return f"{'GPU' if kind == 'cuda' else kind.upper()} {number}".rstrip()


def banner(device: str, devices: Sequence[str], recording: str, busy: bool) -> dict[str, Any] | None:
    """What stands under the bar: that nothing is measured on a GPU, and the way to a recording of one."""
    if kind_of(device) == "cuda":
        return None
    if any(kind_of(each) == "cuda" for each in devices):
        text = "CPU mode: the model runs on this processor. Choose the GPU above."
        return {"text": text, "kind": "warn", "action": None}
    command = {"command": "replay", "id": recording}
    # A race would disturb what is measured; the button stays where it is, so that nothing moves.
    action = {"label": "Watch GPT-2 XL on a recorded H200", "command": command, "enabled": not busy}
    return {
        "text": "CPU mode: no NVIDIA GPU. Times are this processor's; GPU techniques are greyed out.",
        "kind": "warn",
        "action": action if recording else None,
    }


UNKEPT = "Runs are kept in memory only: the line above their list says why."


def with_unkept(banner: Mapping[str, Any] | None, problem: str) -> Mapping[str, Any] | None:
    """The banner, which also says that runs cannot be written; `problem` is why, which the head of Runs tells."""
    if not problem:
        return banner
    rest = banner or {"text": "", "action": None}
    return {**rest, "text": f"{UNKEPT} {rest['text']}".rstrip(), "kind": "warn"}


def kept_banner(text: str, back: str) -> dict[str, Any]:
    """The banner above what was kept: which it is, and the way back."""
    return {"text": text, "kind": "plain", "action": {"label": back, "command": {"command": "close_run"}}}
