"""The notebooks that JupyterLab is opened on: the clone's own, copies elsewhere, working copies beside them."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from eet_lab import paths
from eet_lab.errors import SetupError, did_you_mean
from eet_lab.files import folder_path
from eet_lab.words import counted

WORKBENCH = "workbench.ipynb"
MARK = "eet_lab"
"""Where the metadata of a working copy keep what was shipped when it was made."""


def prepare(folder: Path | None = None) -> tuple[Path, Path]:
    """Put the notebooks where the user works: (the folder to serve, the folder of the notebooks in it).

    A clone is served as a whole and its notebooks are used where they are, unless `folder` is given.
    Elsewhere they are copied, by default into the current folder; what exists is kept.
    """
    target = notebooks_in(folder)
    if folder is None and paths.is_clone():
        return paths.PACKAGE.parent, target
    copied, changed = copy_notebooks(target)
    if copied:
        print(f"Copied {counted(len(copied), 'notebook')} into {target}")
    for path in changed:
        _say_kept(path)
    return target, target


def notebooks_in(folder: Path | None) -> Path:
    """The folder of the user's notebooks, which need not exist yet."""
    if folder is None and paths.is_clone():
        return paths.notebooks_dir()
    return folder_path(folder or Path.cwd(), SetupError).resolve()


def notebook_name(wanted: str, folder: Path | None = None) -> str:
    """`wanted`, with .ipynb where that was left out: a notebook that is there, or will be copied there.

    Nothing is copied yet; SetupError names those that there are.
    """
    target, name = notebooks_in(folder), wanted if wanted.endswith(".ipynb") else f"{wanted}.ipynb"
    have = sorted({path.name for place in (target, paths.notebooks_dir()) for path in place.glob("*.ipynb")})
    if name in have or ((target / name).is_file() and (target / name).resolve().is_relative_to(target)):
        return name
    raise SetupError(
        f"There is no {name} for {target}.{did_you_mean(name, have)} "
        f"There are {', '.join(have) or 'no notebooks'}. Choose one with --notebook."
    )


def copy_notebooks(target: Path) -> tuple[list[Path], list[Path]]:
    """Copy the shipped notebooks into `target`, never over a file: (what was copied, what differs there)."""
    copied, changed = [], []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for source in sorted(paths.notebooks_dir().glob("*.ipynb")):
            path = target / source.name
            try:
                with path.open("xb") as file:
                    file.write(source.read_bytes())
                copied.append(path)
            except FileExistsError:
                if _sources(path) != _sources(source):
                    changed.append(path)
    except OSError as error:
        raise SetupError(
            f"The notebooks cannot be copied into {target}: {error.strerror}. "
            "Name a folder of your own: eet-lab lab --dir FOLDER"
        ) from error
    return copied, changed


def working_copy(root: Path, notebook: Path) -> Path:
    """What to open for `notebook`: itself, or, for one of the clone's own, a copy that the page may save.

    The page links to the others, so all of them are copied, beside the results, which git ignores. A copy follows the
    shipped one until its reader edits it. What is no notebook, as in a merge under way, is told and left out.
    SetupError where a copy cannot be written.
    """
    if notebook.parent != paths.notebooks_dir():
        return notebook
    copies = dict[Path, Path]()
    for path in sorted(notebook.parent.glob("*.ipynb")):
        copy, shipped = root / paths.RESULTS / path.name, _read(path)
        if shipped is None:
            print(f"{path} is no notebook, and was not copied. To get the shipped one back: git checkout {path}")
            continue
        try:
            _follow(copy, shipped)
        except OSError as error:
            raise SetupError(f"{copy} cannot be written: {error.strerror}.") from error
        copies[path] = copy
    return copies.get(notebook, notebook)


def _follow(copy: Path, theirs: dict[str, Any]) -> None:
    """Make the copy what is shipped now, unless it is that already, or was edited."""
    mine = _read(copy)
    if mine is None and copy.exists() and copy.stat().st_size:
        print(f"{copy} is no notebook: it is now {copy.replace(copy.with_suffix('.broken'))}")
    made_of, now = None if mine is None else mine["metadata"].get(MARK), _digest(theirs)
    if mine is None or made_of == _digest(mine) != now:
        theirs["metadata"][MARK] = now
        copy.parent.mkdir(exist_ok=True)
        paths.write_whole(copy, json.dumps(theirs, indent=1) + "\n")
    elif made_of != now:
        _say_kept(copy)


def workbench_cell(notebook: dict[str, Any]) -> dict[str, Any] | None:
    """The cell that shows the workbench, if it is there as it was shipped: no other code is run unasked."""
    notebooks = json.loads((paths.notebooks_dir() / WORKBENCH).read_bytes())
    [shipped] = [cell for cell in notebooks["cells"] if cell["cell_type"] == "code"]
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and "".join(cell["source"]) == "".join(shipped["source"]):
            return cell
    return None


def _say_kept(path: Path) -> None:
    print(f"Kept your {path} (the shipped one differs; move yours away to get it)")


def _sources(path: Path) -> str | bytes:
    notebook = _read(path)
    return path.read_bytes() if notebook is None else _digest(notebook)


def _read(path: Path) -> dict[str, Any] | None:
    """A notebook; None where there is none that can be read."""
    with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
        notebook = json.loads(path.read_bytes())
        if _digest(notebook) and isinstance(notebook["metadata"], dict):
            return notebook
    return None


def _digest(notebook: dict[str, Any]) -> str:
    """What a notebook says, without what running it adds."""
    cells = [[cell["cell_type"], "".join(cell["source"])] for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()
