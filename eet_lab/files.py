"""Files that somebody else may have made, or holds: read whole, and only where that must come to an end; locked. And
how many may be open.
"""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from eet_lab.errors import EETError
from eet_lab.words import sized, told, visible

POLL_S = 0.01


def lock(opened: int, wait: Callable[[], object] | None = None) -> None:
    """Take the lock on an open file or folder, which ends with the process, or when it is closed.

    While another holds it `wait` is called again and again; what it raises ends the waiting. BlockingIOError without
    one; OSError on a file system that has no locks.
    """
    while True:
        try:
            return fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait is None:
                raise
            wait()
            time.sleep(POLL_S)


def raise_file_limit() -> None:
    """Let this process have as many open connections as it may at all: the limit that shells set is often 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # macOS says that there is none, and has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def check_folder(folder: Path, what: str, error: type[EETError], num_bytes: int = 0) -> None:
    """`error`, which names `what` goes there, where nothing can be written to a folder, or none can be made, or where
    it has no room for so many bytes.

    One that is made to find out is taken away again: what is refused for other reasons leaves nothing behind.
    """
    for tries_left in (2, 1, 0):
        made: list[Path] = []
        try:
            _make_folder(folder, made)
            TemporaryFile(dir=folder).close()
            disk = shutil.disk_usage(folder)
        except FileNotFoundError as problem:  # somebody else who looked has just taken the folder away
            if not tries_left:
                raise _unwritable(folder, what, error, problem) from problem
        except (OSError, ValueError) as problem:  # a name with a NUL byte is a ValueError
            raise _unwritable(folder, what, error, problem) from problem
        else:
            if disk.total and disk.free < num_bytes:  # a file system that does not tell its size has none
                raise error(
                    f"{what} cannot be saved in {visible(str(folder))}: it takes {sized(num_bytes)}, and "
                    f"{sized(disk.free)} are free there. Choose another folder, or make room there."
                )
            return
        finally:
            for each in reversed(made):
                with suppress(OSError):  # somebody else has put something there
                    each.rmdir()


def _make_folder(folder: Path, made: list[Path]) -> None:
    """Make a folder and those around it; `made` gets each that was not there, also where the next cannot be made."""
    for each in reversed((folder, *folder.parents)):
        if not each.is_dir():
            try:
                each.mkdir()
                made.append(each)
            except FileExistsError:
                if not each.is_dir():  # else somebody else has just made it
                    raise


def _unwritable(folder: Path, what: str, error: type[EETError], problem: Exception) -> EETError:
    is_other = isinstance(problem, FileExistsError | NotADirectoryError)
    why = "there is a file in its place" if is_other else getattr(problem, "strerror", None) or problem
    return error(f"{what} cannot be saved in {visible(str(folder))} ({why}). Choose another folder.")


def folder_path(folder: object, error: type[EETError]) -> Path:
    """The path of a folder that a user named, with the home that ~ stands for; `error` for what is no path."""
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise error(f"folder is {told(folder)}, but it must be a path, such as 'first-run'.")
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        whose = f"of {told(Path(folder).parts[0])}"
        raise error(f"folder is {told(folder)}, but no home {whose} is known. Write the path out.") from None


def check_regular(path: Path, error: type[EETError], remedy: str, most_bytes: int | None = None) -> None:
    """`error` unless this is a regular file, or a link to one, of at most so many bytes.

    Reading a pipe would wait for ever, and a device may never end. FileNotFoundError where there is nothing.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as problem:  # a name with a NUL byte is a ValueError
        raise error(f"{visible(str(path))} cannot be read: {problem}. {remedy}") from problem
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{path} is not a regular file, and only those are read. {remedy}")
    if most_bytes is not None and found.st_size > most_bytes:
        raise error(f"{path} has {sized(found.st_size)}, but at most {sized(most_bytes)} are read. {remedy}")


def regular_content(
    path: str | Path,
    what: str,
    most_bytes: int,
    error: type[EETError],
    *,
    remedy: str,
    follow_links: bool = True,
) -> bytes:
    """A regular file's bytes; `error`, which calls it `what`, where it cannot be read or has more than `most_bytes`.

    What may wait for ever, or never end, such as a pipe or a device, is not read. `remedy` is for a file that is too
    large.
    """
    name = visible(str(path))
    links = 0 if follow_links else os.O_NOFOLLOW
    try:
        if not follow_links and os.path.islink(path):
            raise error(f"{name} is a link, and only regular files are read. Copy the file that it points to.")
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise error(f"{name} is not a regular file, and only those are read. Give {what}.")
            content = file.read(most_bytes + 1) if status.st_size <= most_bytes else b""
    except error:
        raise  # which may be a ValueError, too
    except IsADirectoryError as problem:
        raise error(f"{name} is not a regular file, but a folder. Give {what}.") from problem
    except (OSError, ValueError) as problem:  # a name with a NUL byte is a ValueError
        why = getattr(problem, "strerror", None) or problem
        raise error(f"{name} cannot be read: {why}. Give the path of {what} that can be read.") from problem
    if max(status.st_size, len(content)) > most_bytes:
        raise error(
            f"{name} has {sized(max(status.st_size, len(content)))}, but {what} has at most {sized(most_bytes)}. "
            f"{remedy}"
        )
    return content
