"""Where EET Lab's files are: the same answers in a clone and in an installed package."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from threading import get_ident

from eet_lab.errors import SetupError

PACKAGE = Path(__file__).resolve().parent
RESULTS = "eet-lab-results"
"""The name of the folder of results, which git ignores."""
RESULTS_VARIABLE = "EET_LAB_RESULTS"
"""Where `eet-lab lab` tells its kernels that folder: all notebooks that it serves have one."""


def csrc_dir() -> Path:
    """The folder of the CUDA sources."""
    return _shipped("csrc")


def notebooks_dir() -> Path:
    """The folder of the notebooks as they were shipped; in an installed package, read-only in spirit."""
    return _shipped("notebooks")


def benchmarks_dir() -> Path:
    """The folder of the measured rows, one JSONL file for each GPU."""
    return _shipped("benchmarks")


def results_dir() -> Path:
    """The folder of results: the one that `eet-lab lab` serves, else one in the current folder."""
    return Path(os.environ.get(RESULTS_VARIABLE) or RESULTS)


def other_results() -> str:
    """What to type for another folder of results: a command where `eet-lab lab` has named it, else a cell."""
    return "eet-lab lab --dir FOLDER" if os.environ.get(RESULTS_VARIABLE) else "Workbench(folder=...)"


def constraints_file() -> Path:
    """The versions that are known to work together, one a line, as `pip install -c` reads them."""
    return PACKAGE / "constraints.txt"


def is_clone() -> bool:
    """Whether the package runs from its repository, so that its notebooks may be used where they are."""
    return not (PACKAGE / "_notebooks").is_dir() and (PACKAGE.parent / "pyproject.toml").is_file()


def install_command(extra: str = "") -> str:
    """What to type so that the package is installed, with one of its extras, under the versions that were tried."""
    extras = f"[{extra}]" if extra else ""
    where = ["-e", f"{PACKAGE.parent}{extras}"] if is_clone() else [f"eet-lab{extras}"]
    return shlex.join([sys.executable, "-m", "pip", "install", "-c", str(constraints_file()), *where])


def cache_dir() -> Path:
    """The user's own cache folder for EET Lab, made when missing, private (mode 0700).

    Kernels that were built here are loaded into the process later, so nobody else may write to it.
    Raises SetupError when the folder cannot be made, belongs to another user or cannot be written to.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache") / "eet-lab"
    remedy = "Set XDG_CACHE_HOME to a folder of your own that can be written to."
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
        if owner != os.getuid():
            raise SetupError(f"{folder} belongs to user {owner}, not to user {os.getuid()}. {remedy}")
        folder.chmod(0o700)
    except OSError as error:
        raise SetupError(f"The cache folder {folder} cannot be used: {error.strerror}. {remedy}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SetupError(f"The cache folder {folder} cannot be written to. {remedy}")
    return folder


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: whoever reads it meanwhile sees the old one. OSError where it cannot be."""
    path, data = path.resolve(), content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():  # /dev/stdout and the like must not be replaced
        path.write_bytes(data)
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def _shipped(name: str) -> Path:
    """`eet_lab/_<name>` in an installed package, else `<name>` at the top of the clone."""
    for folder in (PACKAGE / f"_{name}", PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise SetupError(
        f"EET Lab's {name} folder is missing: looked in {PACKAGE / f'_{name}'} and {PACKAGE.parent / name}. "
        "Install it again: pip install --force-reinstall --no-deps eet-lab"
    )
