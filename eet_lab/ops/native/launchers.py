"""A built library and its launchers: each `extern "C" cudaError_t eet_...(...)` becomes a Python callable."""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
from collections.abc import Iterable
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from eet_lab.errors import KernelBuildError, KernelError, did_you_mean
from eet_lab.ops.native.build import Stamps, are_current, build, source, stamps_of
from eet_lab.ops.native.toolchain import capability
from eet_lab.paths import cache_dir, csrc_dir, write_whole
from eet_lab.progress import Cancel, Progress

_LAUNCHER = re.compile(r'extern\s+"C"[^(;{]*?\bcudaError_t\s+(\w+)\s*\(([^)]*)\)\s*\{')
_SCALARS: dict[str, Any] = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "cudaStream_t": ctypes.c_void_p,
}
MOST = 2**31 - 1  # of an int


class Parameter(NamedTuple):
    name: str
    ctype: Any


class Launcher:
    """A C function that returns a cudaError_t; calling it raises KernelError when that is not 0."""

    def __init__(self, library: Library, name: str, parameters: list[Parameter]) -> None:
        self.name, self.parameters, self._library = name, parameters, library
        self._function = library.cdll[name]
        self._function.argtypes = [parameter.ctype for parameter in parameters]
        self._function.restype = ctypes.c_int
        self._is_int = [parameter.ctype is ctypes.c_int for parameter in parameters]
        self._pack_ints = struct.Struct(f"{sum(self._is_int)}i").pack

    def __call__(self, *args: int | float | None) -> None:
        try:  # ctypes passes the lower 32 bits of what an int cannot hold; this is the least that finds it
            self._pack_ints(*compress(args, self._is_int))
        except struct.error:
            self._check_ints(args)
        if error := self._function(*args):
            raise KernelError(self._explain(error, args))

    def _check_ints(self, args: tuple[int | float | None, ...]) -> None:
        """KernelError for a number that no int holds; for what else is wrong, ctypes has its own words."""
        for parameter, value in zip(self.parameters, args, strict=False):
            if parameter.ctype is ctypes.c_int and isinstance(value, int) and not -MOST - 1 <= value <= MOST:
                raise KernelError(
                    f"{self.name}: {parameter.name} is {value:,}, but kernels count from {-MOST - 1:,} to {MOST:,}. "
                    "Use fewer tokens or smaller sizes; in a kernel of your own, declare it int64_t."
                )

    def _explain(self, error: int, args: tuple[int | float | None, ...]) -> str:
        sizes = (
            f"{parameter.name}={value}"
            for parameter, value in zip(self.parameters, args, strict=True)
            if parameter.ctype is not ctypes.c_void_p
        )
        return (
            f"{self.name} failed: {self._library.error_string(error)} ({', '.join(sizes)}). Its source says above each "
            "kernel what it needs. Leave the technique out that launches it; restart Python if all launches fail now."
        )


class Library:
    """A shared library; its launchers are its attributes: `library.eet_norm(...)`."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        try:
            self.cdll = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelBuildError(f"{path} cannot be loaded: {error}. Delete it; it is built again.") from error
        self.launchers = {name: Launcher(self, name, parameters) for name, parameters in signatures(text).items()}
        self.__dict__.update(self.launchers)  # plain attributes: no look-up code between an op and its launch

    def __getattr__(self, name: str) -> Launcher:
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
    return Parameter(declared[2], ctype)


_current: dict[str, Library] = {}


def load(name: str | Path) -> Library:
    """The library of a source in csrc/ (by stem) or of a `.cu` path; built, or built again, when the source changed."""
    return _at(str(name), build([name])[str(name)])


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
