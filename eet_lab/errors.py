"""What can go wrong for a user: every message names the value, the limit and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping


class EETError(Exception):
    """The base of every error that EET Lab raises on purpose."""


class RecipeError(EETError, ValueError):
    """A technique or knob that does not exist, is unavailable, or conflicts with another."""


class BrokenTechnique(RecipeError):
    """A technique whose own code does not make parts; `wrong` tells what it did instead."""

    def __init__(self, name: str, wrong: str) -> None:
        super().__init__(f"{name} is broken: {wrong}. Mend it, or leave {name} out.")
        self.wrong = wrong


class ModelError(EETError, ValueError):
    """A model that cannot be loaded: unknown, unsupported, or its checkpoint is damaged."""


class PromptError(EETError, ValueError):
    """A prompt or generation setting that cannot be run."""


class TrainingError(EETError, ValueError):
    """Training data or a setting that cannot be trained with, or a step whose loss is not finite."""


class ScheduleError(EETError, ValueError):
    """A batching policy that cannot be, or a request that a scheduler does not know (any more)."""


class CostError(EETError, ValueError):
    """A cost table that cannot be read, or that was asked for a pass beyond what was measured."""


class TrafficError(EETError, ValueError):
    """Arrivals or lengths of requests that cannot be, such as those of a damaged trace."""


class EngineBusy(EETError, RuntimeError):
    """An engine that was asked for something while it is generating."""


class KernelBuildError(EETError, RuntimeError):
    """A CUDA kernel that cannot be built or loaded here."""


class KernelError(EETError, RuntimeError):
    """A CUDA kernel that reported an error when it was launched."""


class OutOfMemory(EETError, MemoryError):
    """A buffer that did not fit into the device's memory."""


class PlanError(EETError, ValueError):
    """A memory plan that would let tensors overwrite each other, or a request that a pool cannot place."""


class ResultError(EETError, ValueError):
    """A saved result that cannot be read."""


class SetupError(EETError, RuntimeError):
    """A machine or an installation that lacks something: a folder, a port, a package."""


class MonitorError(EETError, RuntimeError):
    """A source of measurements that cannot be opened or read."""


class Cancelled(EETError):
    """The user pressed Stop."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?" for the nearest known name, or one that begins or ends with it; "" where none is near."""
    names = list(known)
    longer = [each for each in names if len(name) > 2 and (each.startswith(name) or each.endswith(name))]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6) or longer
    return f" Did you mean {near[0]!r}?" if near else ""


def check_known(error: type[EETError], what: str, name: str, known: Iterable[str]) -> None:
    """Raise `error`, which lists what there is, for a name that is none of the known."""
    names = list(known)
    if name not in names:
        hint, listed = did_you_mean(str(name), names), ", ".join(map(repr, names))
        raise error(f"There is no {what} {name!r}.{hint} Choose one of: {listed}.")


def as_called(message: str, names: Mapping[str, str], *, throughout: bool = False) -> str:
    """The message with the field that it begins with (`top_k is -1`) named as where its value is typed: {field: name}.

    `throughout`: wherever a field stands as a word of its own, but not in a path or in quotes; for fields whose names
    are no plain words.
    """
    fields = "|".join(map(re.escape, names))
    pattern = rf"(?<![\w./\\'\"-])({fields})(?![\w/\\'\"-]|\.\w)" if throughout else rf"^({fields})(?= is )"
    return re.sub(pattern, lambda found: names[found[1]], message) if names else message


def first_line(error: BaseException) -> str:
    """The first line of an error's message; "no message" where it has none."""
    return next(iter(str(error).splitlines()), "no message")


def name_in_words(error: BaseException) -> str:
    """ "PromptError" -> "Prompt error"; the base of all is just an "Error"."""
    if type(error) is EETError:
        return "Error"
    name = "".join(f" {c.lower()}" if c.isupper() else c for c in type(error).__name__).strip()
    return name.capitalize()
