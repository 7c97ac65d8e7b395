"""Jupyter's side: ipykernel, JupyterLab's extensions, and whether kernel and server live in one environment.

The two often differ on rented machines, in Colab and in VS Code: the package is then installed for the
kernel, while the page is served by a server that lacks the widgets' front end, and widgets show as text.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from eet_lab.doctor.check import Check
from eet_lab.doctor.software import installed, pip_install

EXTENSIONS = {"anywidget": "anywidget", "@jupyter-widgets/jupyterlab-manager": "ipywidgets"}
BROKEN_KERNELS = {"7.0.0": "loses widget updates that are sent from threads"}


def inspect_notebook() -> list[Check]:
    """ipykernel, environments and extensions."""
    prefix, front_end = find_server()
    return [check_kernel(), check_environments(prefix, front_end), check_extensions(prefix, front_end)]


def check_kernel() -> Check:
    """An ipykernel whose threads can update widgets."""
    version = installed("ipykernel")
    if version is None:
        return Check("ipykernel", "fail", "not installed", pip_install("ipykernel!=7.0.0"))
    if version in BROKEN_KERNELS:
        return Check("ipykernel", "fail", f"{version} {BROKEN_KERNELS[version]}", pip_install("ipykernel>=7.3"))
    return Check("ipykernel", "ok", version)


def find_server() -> tuple[Path | None, str]:
    """(the environment of the server that shows this kernel, what that front end is).

    Outside a kernel it is this environment, where `eet-lab lab` would start one. (None, ...) for front ends
    that bring their own widget manager.
    """
    if "google.colab" in sys.modules:
        return None, "Colab"
    if not (parent := os.environ.get("JPY_PARENT_PID")) or "ipykernel" not in sys.modules:
        return Path(sys.prefix), "this environment's JupyterLab"
    if "VSCODE_PID" in os.environ or "VSCODE_CWD" in os.environ:
        return None, "VS Code"
    return _environment_of(int(parent)), f"the Jupyter server, process {parent}"


def check_environments(prefix: Path | None, front_end: str) -> Check:
    """Whether the server's environment is the kernel's."""
    here = Path(sys.prefix)
    if prefix is None:
        return Check("environments", "note", f"kernel in {here}; {front_end} brings its own front end")
    if prefix.resolve() != here.resolve():
        found = f"kernel in {here}, server in {prefix}: the widgets' front end must be in both"
        remedy = f"{prefix}/bin/python -m pip install anywidget ipywidgets   # then reload the page"
        return Check("environments", "warn", found, remedy)
    return Check("environments", "ok", f"{front_end}, in {here}")


def check_extensions(prefix: Path | None, front_end: str) -> Check:
    """The front ends of ipywidgets and anywidget, where the server looks for them."""
    if prefix is None:
        return Check("lab extensions", "note", f"not checked: {front_end} loads widgets its own way")
    folders = _extension_folders(prefix)
    lacking = {name: package for name, package in EXTENSIONS.items() if not _is_in(folders, name)}
    if lacking:
        python = sys.executable if prefix == Path(sys.prefix) else f"{prefix}/bin/python"
        install = f"{python} -m pip install --force-reinstall {' '.join(lacking.values())}"
        found = f"not in {prefix}: {', '.join(lacking)}"
        return Check("lab extensions", "fail", found, f"{install}   # then reload the page")
    return Check("lab extensions", "ok", ", ".join(EXTENSIONS))


def _extension_folders(prefix: Path) -> list[Path]:
    """The environment's own folder, then the user's and the system's, which every server reads too."""
    from jupyter_core.paths import SYSTEM_JUPYTER_PATH, jupyter_data_dir

    shares = [prefix / "share" / "jupyter", Path(jupyter_data_dir()), *map(Path, SYSTEM_JUPYTER_PATH)]
    return [share / "labextensions" for share in shares]


def _is_in(folders: list[Path], name: str) -> bool:
    return any((folder / name / "package.json").is_file() for folder in folders)


def _environment_of(pid: int) -> Path | None:
    """The prefix of a running Python: the folder above the `bin` of the interpreter that started it."""
    import psutil

    try:
        [program, *_] = psutil.Process(pid).cmdline()
    except (psutil.Error, ValueError):
        return None
    path = Path(program)
    return path.parent.parent if path.is_absolute() and path.parent.name == "bin" else None
