"""A built library and its launchers: each `extern "C" cudaError_t eet_...(...)` becomes a Python callable."""

from __future__ import annotations

import ctypes
import hashlib
import keyword
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from eet_lab.errors import KernelBuildError, KernelError, did_you_mean
from eet_lab.ops.native.build import Stamps, are_current, build, source, stamps_of
from eet_lab.ops.native.toolchain import capability
from eet_lab.paths import cache_dir, csrc_dir, write_whole
from eet_lab.progress import Cancel, Progress
from eet_lab.words import told

_LAUNCHER = re.compile(r'extern\s+"C"[^(;{]*?\bcudaError_t\s+(\w+)\s*\(([^)]*)\)\s*\{')
_SCALARS: dict[str, Any] = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "cudaStream_t": ctypes.c_void_p,
}
_KINDS = {
    ctypes.c_void_p: "an address, such as x.data_ptr() of a tensor, or None",
    ctypes.c_int: "a whole number",
    ctypes.c_int64: "a whole number",
    ctypes.c_float: "a number",
}
MOST = 2**31 - 1  # of an int


class Parameter(NamedTuple):
    name: str
    ctype: Any


MISSING: Any = type("Missing", (), {"__repr__": lambda self: "..."})()
"""What stands for an argument that a launch was not given: no int, and no pointer."""


class Launcher:
    """A C function that returns a cudaError_t: `launch` takes its arguments by keyword, as C names them.

    It raises KernelError for a name that is missing or unknown, for what a parameter's type does not take or an int
    does not hold, and when C returns an error.
    """

    def __init__(self, library: Library, name: str, parameters: list[Parameter]) -> None:
        self.name, self.parameters, self._library = name, parameters, library
        function = library.cdll[name]
        function.argtypes = [parameter.ctype for parameter in parameters]
        function.restype = ctypes.c_int
        self.launch = self._taking_keywords(function)

    def _taking_keywords(self, function: Any) -> Callable[..., None]:
        """A function with the keywords for parameters. Its source is text, as namedtuple's is: Python itself then puts
        keywords in their order, in half the time that it takes to look each up in a dictionary (LOG).

        C has no names that begin with two underscores.
        """
        names = [parameter.name for parameter in self.parameters]
        ints = [parameter.name for parameter in self.parameters if parameter.ctype is ctypes.c_int]
        everything, all_ints = f"{', '.join(names)},", ", ".join(ints)
        text = f"""
def {self.name}(*, {", ".join(f"{name}=__missing" for name in names)}, **__unknown):
    if __unknown:
        raise __refusal(__unknown, ({everything}))
    try:  # ctypes passes the lower 32 bits of what an int cannot hold; this is the least that finds it
        __pack_ints({all_ints})
        __error = __function({everything})
    except __Wrong as __problem:
        raise __refusal({{}}, ({everything})) or __problem
    if __error:
        raise __failure(__error, ({everything}))
"""
        known = {
            "__missing": MISSING,
            "__pack_ints": struct.Struct(f"{len(ints)}i").pack,
            "__function": function,
            "__Wrong": (struct.error, ctypes.ArgumentError),
            "__refusal": self._refusal,
            "__failure": self._failure,
        }
        exec(compile(text, f"<keywords of {self.name}>", "exec"), known)
        return known[self.name]

    def _refusal(self, unknown: dict[str, Any], args: tuple[Any, ...]) -> KernelError | None:
        """What is wrong with arguments; None where C takes each of them."""
        names = [parameter.name for parameter in self.parameters]
        takes = f"It takes, by keyword: {', '.join(names)}."
        for name in unknown:
            return KernelError(f"{self.name} has no parameter {name!r}.{did_you_mean(name, names)} {takes}")
        if missing := [name for name, value in zip(names, args, strict=True) if value is MISSING]:
            return KernelError(f"{self.name} was not given {', '.join(missing)}. {takes}")
        for parameter, value in zip(self.parameters, args, strict=True):
            if parameter.ctype is ctypes.c_int and isinstance(value, int) and not -MOST - 1 <= value <= MOST:
                return KernelError(
                    f"{self.name}: {parameter.name} is {value:,}, but kernels count from {-MOST - 1:,} to {MOST:,}. "
                    "Use fewer tokens or smaller sizes; in a kernel of your own, declare it int64_t."
                )
            try:
                struct.pack("i", value) if parameter.ctype is ctypes.c_int else parameter.ctype.from_param(value)
            except (struct.error, TypeError, ctypes.ArgumentError):
                kind = _KINDS[parameter.ctype]
                return KernelError(f"{self.name}: {parameter.name} is {told(value)}, but C takes {kind} there.")
        return None

    def _failure(self, error: int, args: tuple[Any, ...]) -> KernelError:
        sizes = (
            f"{parameter.name}={value}"
            for parameter, value in zip(self.parameters, args, strict=True)
            if parameter.ctype is not ctypes.c_void_p
        )
        return KernelError(
            f"{self.name} failed: {self._library.error_string(error)} ({', '.join(sizes)}). Its source says above each "
            "kernel what it needs. Leave the technique out that launches it; restart Python if all launches fail now."
        )


class Library:
    """A shared library; its launchers are its attributes: `library.eet_norm(out=..., x=..., ...)`."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        try:
            self.cdll = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelBuildError(f"{path} cannot be loaded: {error}. Delete it; it is built again.") from error
        self.launchers = {name: Launcher(self, name, parameters) for name, parameters in signatures(text).items()}
        # Plain attributes, and plain functions: no code between an op and its launch.
        self.__dict__.update({name: launcher.launch for name, launcher in self.launchers.items()})

    def __getattr__(self, name: str) -> Callable[..., None]:
        near = did_you_mean(name, self.__dict__.get("launchers", ()))
        raise AttributeError(f"{self.__dict__.get('path')} has no launcher {name!r}.{near}")

    def error_string(self, error: int) -> str:
        """What CUDA calls this error, where the source includes eet/launch.cuh."""
        try:
            function = self.cdll["eet_error_string"]
        except AttributeError:
            return f"CUDA error {error}"
        function.restype = ctypes.c_char_p
        return f"{function(error).decode()} (CUDA error {error})"


def signatures(text: str) -> dict[str, list[Parameter]]:
    """The launchers that a source defines, with their parameters. Raises KernelBuildError for a type it cannot pass."""
    return {name: [_parameter(part, name) for part in params.split(",")] for name, params in _LAUNCHER.findall(text)}


def _parameter(text: str, launcher: str) -> Parameter:
    declared = re.fullmatch(r"\s*(.+?)\s*(\w+)\s*", re.sub(r"//.*", "", text), re.DOTALL)
    kind = declared[1].removeprefix("const ").strip() if declared else text.strip()
    ctype = ctypes.c_void_p if kind.endswith("*") else _SCALARS.get(kind)
    if declared is None or ctype is None:
        raise KernelBuildError(f"{launcher}: cannot pass {text.strip()!r}; use a pointer, {', '.join(_SCALARS)}.")
    if keyword.iskeyword(declared[2]):
        raise KernelBuildError(
            f"{launcher}: no keyword of a call can be {declared[2]!r}; give the parameter another name."
        )
    return Parameter(declared[2], ctype)


_current: dict[str, Library] = {}


def load(name: str | Path) -> Library:
    """The library of a source in csrc/ (by stem) or of a `.cu` path; built, or built again, when the source changed."""
    return _at(str(name), build([name])[str(name)])


@contextmanager
def observed(note: Callable[[Launcher, dict[str, Any]], None]) -> Iterator[None]:
    """Tell `note` of each launch from what is loaded by now: the launcher, and its arguments by keyword. For counting:
    a launch takes longer meanwhile.
    """

    def noted(launcher: Launcher) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            note(launcher, arguments)
            launcher.launch(**arguments)

        return launch

    launchers = [(library, launcher) for library in _current.values() for launcher in library.launchers.values()]
    for library, launcher in launchers:
        setattr(library, launcher.name, noted(launcher))
    try:
        yield
    finally:
        for library, launcher in launchers:
            setattr(library, launcher.name, launcher.launch)


def _at(name: str, path: Path) -> Library:
    library = _current.get(name)
    if library is None or library.path != path:
        library = _current[name] = Library(path, source(name).read_text())
    return library


def loaded(name: str) -> Library:
    """The library as it was last loaded, without a look at its source: for launches."""
    return _current.get(name) or load(name)


def compile_source(text: str, name: str) -> Library:
    """Build and load a kernel that is a string: one written in a notebook cell, for instance."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise KernelBuildError(f"{name!r} cannot name a kernel source: use letters, digits and underscores.")
    folder = cache_dir() / "sources"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cu"
    if not path.exists() or path.read_bytes() != text.encode():  # cut short; another text is another file
        write_whole(path, text)
    return load(path)


def prepare(names: Iterable[str], progress: Progress | None = None, cancel: Cancel | None = None) -> None:
    """Build and load, so that no launch has to: before the first step, and before a capture.

    It is asked before every request, so what is loaded is built again only if a file of its sources was written.
    """
    asked = tuple(names), csrc_dir(), capability()
    stamps, libraries = _prepared.get(asked, ({}, ()))
    if stamps and libraries == tuple(map(_current.get, asked[0])) and are_current(stamps):
        return
    stamps = stamps_of(asked[0])  # before the build: what is written meanwhile is noticed the next time
    for name, path in build(asked[0], progress=progress, cancel=cancel).items():
        _at(name, path)
    _prepared[asked] = stamps, tuple(map(_current.get, asked[0]))


_prepared: dict[tuple, tuple[Stamps, tuple]] = {}
"""By sources and GPU: when their files were written, and their libraries."""
