"""What a trainer needs to go on: weights, moments, and how far it is, in one file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

from eet_lab.errors import TrainingError, first_line
from eet_lab.files import check_folder, check_regular, folder_path
from eet_lab.ops.oom import is_out_of_memory
from eet_lab.parts.optimizer_state import is_dense
from eet_lab.scheduling.whole import MOST, check_whole
from eet_lab.words import counted, sized, some, type_of, visible

NAME, PREVIOUS = "trainer.pt", "trainer.previous.pt"
FORMAT = 1
AGAIN = "Take an older checkpoint."


def check(folder: str | Path, num_bytes: int = 0) -> Path:
    """The folder. TrainingError where `write` could not write so much to it, told before there is anything to lose."""
    folder = folder_path(folder, TrainingError)
    left = [path for path in (folder / f"{NAME}.part", folder / PREVIOUS) if path.is_file()]  # of a run that was killed
    room = sum(found.st_size for found in map(Path.stat, left) if found.st_nlink == 1)
    check_folder(folder, "The training", TrainingError, max(num_bytes - room, 0))
    return folder


def write(folder: str | Path, state: Mapping[str, Any]) -> Path:
    """The file, which takes the place of an older one once it is whole. Errors: TrainingError."""
    folder = folder_path(folder, TrainingError)
    unfinished, path = folder / f"{NAME}.part", folder / NAME
    on_host = {name: tensor.detach().cpu() for name, tensor in state["weights"].items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)  # a pipe would wait for a reader
        with unfinished.open("wb") as file:  # torch's own writer does not say that a disk is full
            has_sums = torch.serialization.get_crc32_options()
            torch.save({**state, "weights": on_host, "format": FORMAT, "has_checksums": has_sums}, file)
        unfinished.replace(path)
    except (OSError, RuntimeError, ValueError) as error:
        with suppress(OSError, ValueError):  # what is told is why it could not be written
            unfinished.unlink(missing_ok=True)
        # Where a disk is full, torch's writer may tell of its own insides.
        needed, free = _num_bytes(state), _free(folder)
        is_full = isinstance(error, RuntimeError) and free is not None and free < needed
        why = "the disk is full" if is_full else first_line(error)
        raise TrainingError(
            f"The training cannot be saved in {visible(str(folder))} ({why}). It takes {sized(needed)}{_room(folder)}. "
            "Choose another folder, or make room there. An older checkpoint in it is as it was."
        ) from error
    return path


def keep(folder: str | Path) -> None:
    """Keep the checkpoint that is there, if one is, beside the one that is written next. Errors: TrainingError."""
    folder = folder_path(folder, TrainingError)
    path, previous = folder / NAME, folder / PREVIOUS
    try:
        previous.unlink(missing_ok=True)  # of a run that was killed
        if not path.is_file():
            return
        try:
            os.link(path, previous)
        except OSError:  # a file system without links
            shutil.copyfile(path, previous)
    except OSError as error:
        raise TrainingError(
            f"The checkpoint in {visible(str(folder))} cannot be kept beside the next one ({first_line(error)})"
            f"{_room(folder)}. Choose another folder, or make room there."
        ) from error


def forget(folder: str | Path) -> None:
    """Remove what was kept."""
    with suppress(OSError):
        (folder_path(folder, TrainingError) / PREVIOUS).unlink(missing_ok=True)


def restore(folder: str | Path) -> None:
    """Put back what was kept; where nothing was, the newest checkpoint stays."""
    folder = folder_path(folder, TrainingError)
    with suppress(OSError):
        (folder / PREVIOUS).replace(folder / NAME)


def _room(folder: Path) -> str:
    """How much is free there, in words; nothing if unknown."""
    return "" if (free := _free(folder)) is None else f", where {sized(free)} are free"


def _free(folder: Path) -> int | None:
    """Bytes; None if unknown."""
    try:
        return shutil.disk_usage(folder).free
    except (OSError, ValueError):  # a name with a NUL byte is a ValueError
        return None


def _num_bytes(state: object) -> int:
    """Of all tensors in it."""
    if isinstance(state, Mapping):
        return sum(map(_num_bytes, state.values()))
    return state.nbytes if isinstance(state, torch.Tensor) else 0


def read(folder: str | Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What `write` wrote of a model with weights of these shapes. Errors: TrainingError."""
    path = folder_path(folder, TrainingError) / NAME
    try:
        check_regular(path, TrainingError, AGAIN)
        state = _loaded(path)
        found = {name: tuple(tensor.shape) for name, tensor in state["weights"].items()}
        if damaged := next((name for name, tensor in state["weights"].items() if not is_dense(tensor)), None):
            raise ValueError(f"{damaged} is no dense tensor of numbers with a fraction")
        version, optimizer = state["format"], state["optimizer"]
        check_whole(ValueError, "format", version, 1, MOST)
        check_whole(ValueError, "its number of steps", state["num_steps"], 0, MOST)
        if not {"state", "param_groups"} <= {*optimizer}:
            raise ValueError("it lacks the optimizer's state")
    except FileNotFoundError:
        raise TrainingError(f"{folder} has no {NAME}; Trainer.save writes one.") from None
    except TrainingError:
        raise
    except MemoryError as error:
        raise TrainingError(
            f"{path} cannot be read: this machine's memory is full ({first_line(error)}). Make room there, and resume."
        ) from error
    except OSError as error:
        raise TrainingError(f"{path} cannot be read ({first_line(error)}). {AGAIN}") from error
    except Exception as error:  # whatever is there in place of what was saved
        why = first_line(error) if isinstance(error, ValueError) else "it is not what Trainer.save writes"
        raise TrainingError(f"{path} cannot be read (it is damaged: {why}). {_remedy(path)}") from error
    state["settings"] = settings if isinstance(settings := state.get("settings"), dict) else {}
    if version != FORMAT:
        raise TrainingError(f"{path} is of a later version of EET Lab. Update it, or take another checkpoint.")
    if strange := sorted(str(name) for name in {*found, *shapes} if found.get(name) != shapes.get(name)):
        raise TrainingError(
            f"{path} is of another model, in {counted(len(strange), 'tensor')}: {some(strange)}. Take a checkpoint of "
            "this one."
        )
    return state


def _loaded(path: Path) -> dict[str, Any]:
    """What a file holds, which has all that `write` writes. Errors: ValueError for a damaged file; OSError."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        with ZipFile(path) as parts:
            changed = parts.testzip()  # torch writes checksums, unless told not to, and does not look at them
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise MemoryError(first_line(error)) from error
        # Torch's own words tell of its reader's insides.
        size = sized(path.stat().st_size)
        raise ValueError(f"of its {size} no weights can be read: it was cut short, or is another file") from error
    if not isinstance(state, dict):
        raise ValueError(f"it holds {type_of(state)}, not what Trainer.save writes")
    if changed is not None and state.get("has_checksums", True):
        raise ValueError(f"its part {changed} is not what was written")
    if lacks := [name for name in ("weights", "optimizer", "num_steps", "format") if name not in state]:
        raise ValueError(f"it lacks {', '.join(lacks)}")
    return state


def _remedy(path: Path) -> str:
    """What to do about a damaged file."""
    previous = path.with_name(PREVIOUS)
    if previous.is_file():
        return f"The one before it is {previous.name}, in the same folder: rename that to {path.name}."
    return "Resume from an older checkpoint; where there is none, begin anew in another folder."
