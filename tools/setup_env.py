"""Make `.venv` and install EET Lab into it, under pinned versions. Needs only Python's standard library.

Quick when nothing changed. A CUDA build of torch that the Python in use can already import is kept instead of
downloaded: the new environment sees it, and its version takes the place of the pin.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
OLDEST_TORCH = (2, 6)
NEEDED_GB = {"cuda": 9, "cpu": 3, "kept": 2}
"""Measured, by the torch that is installed, at the fullest: with torch 2.13 for CUDA the environment has 5.8 GB while
2.9 GB of downloads lie beside it, and with its CPU build 2.0 and 0.4; a torch that is there already needs neither."""
CUDA_IS_LARGE = (
    ", most of them for the CUDA libraries that pip's torch comes with; where the CPU is enough, 3 GB will do: set "
    "PIP_EXTRA_INDEX_URL to the index of CPU builds that https://pytorch.org/get-started/locally/ names"
)
PIP_CACHE_GB = 3
"""What pip's cache keeps of the downloads where there is room."""

NO_NETWORK = "NameResolution|Failed to establish a new connection|Network is unreachable|ProxyError"

FIND_TORCH = """
import importlib.metadata, json, os, torch
site = os.path.dirname(os.path.dirname(torch.__file__))
found = next(iter(importlib.metadata.Distribution.discover(name="torch", path=[site])), None)
needs = [need for need in found and found.requires or () if "extra ==" not in need]
print(json.dumps([torch.__version__, torch.version.cuda, site, found and found.version, needs]))
"""


class SetupFailed(Exception):
    """What went wrong and what to type."""


@dataclass(frozen=True)
class Torch:
    """A CUDA build of torch outside the environment: its version, the site-packages it is in, what it requires.

    `installed` is its version as pip has it, which may lack the "+cu130" of the other.
    """

    version: str
    site: str
    installed: str
    needs: tuple[str, ...] = ()


def main() -> int:
    """Bring `.venv` up to date; 0 when it is."""
    parser = argparse.ArgumentParser(description="Make .venv and install EET Lab into it.")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml: test, ...")
    extras = sorted(parser.parse_args().extra)
    try:
        set_up(extras)
    except SetupFailed as error:
        print(f"\nSetup failed. {error}", file=sys.stderr)
        return 1
    return 0


def set_up(extras: list[str]) -> None:
    """Create, install, check; nothing when the stamp says that it was done for these files and extras."""
    stamp = VENV / "eet-lab-stamp.json"
    key = fingerprint([ROOT / "pyproject.toml", ROOT / "constraints.txt"])
    done = read_stamp(stamp)
    if done.get("key") == key and set(extras) <= set(done.get("extras", [])) and runs(venv_python()):
        return
    if done.get("key") == key:  # keep what was there before, or the next `make lab` would install again
        extras = sorted({*extras, *done["extras"]})
    say(1, f"environment {VENV} (Python {sys.version.split()[0]})")
    torch = find_torch(venv_python() if runs(venv_python()) else Path(sys.executable))
    if not runs(venv_python()):
        create_venv(torch)
    say(2, f"packages{f', keeping torch {torch.version}' if torch else ''}; minutes the first time")
    install(extras, torch)
    say(3, "check")
    check(torch)
    stamp.write_text(json.dumps({"key": key, "extras": extras}))
    print(f"Ready: {VENV}", flush=True)


def fingerprint(files: Iterable[Path]) -> str:
    """Changes when one of the files does."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def read_stamp(path: Path) -> dict[str, list[str]]:
    """What was installed last time; empty when nothing was, or when the file is damaged."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def venv_python() -> Path:
    """The environment's interpreter, whether or not it is there yet."""
    return VENV / "bin" / "python"


def runs(python: Path) -> bool:
    """Whether this interpreter starts; a venv breaks when its Python is removed or upgraded away."""
    return python.exists() and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0


def find_torch(python: Path) -> Torch | None:
    """The CUDA torch that `python` imports from outside `.venv`, if it is new enough to keep."""
    answer = subprocess.run([python, "-c", FIND_TORCH], capture_output=True, text=True)
    if answer.returncode != 0:
        return None
    version, cuda, site, installed, needs = json.loads(answer.stdout.splitlines()[-1])
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if cuda is None or numbers < OLDEST_TORCH or Path(site).is_relative_to(VENV):
        return None
    names = (re.split(r"[^\w.-]", need)[0].lower().replace("_", "-") for need in needs)
    return Torch(version, site, installed or version, tuple(names))


def create_venv(torch: Torch | None) -> None:
    """A fresh environment; when a torch is kept, one that sees the packages around it."""
    try:
        import ensurepip  # noqa: F401  Debian splits it off
        import venv  # noqa: F401
    except ImportError as error:
        package = f"python3.{sys.version_info.minor}-venv"
        raise SetupFailed(
            f"This Python cannot make environments ({error}). Type:\n  sudo apt-get install -y {package}"
        ) from error
    words = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    if torch:
        words.insert(3, "--system-site-packages")
    made = subprocess.run(words, capture_output=True, text=True)
    if made.returncode != 0:
        raise SetupFailed(f"{' '.join(words)} says:\n{(made.stdout + made.stderr).strip()}\n{space_left()}")
    if torch:
        # From inside another venv, "system" packages are those below it and not its own: name the folder.
        [site] = (VENV / "lib").glob("python3*/site-packages")
        (site / "kept-torch.pth").write_text(torch.site + "\n")


def install(extras: list[str], torch: Torch | None) -> None:
    """pip install -e, under the constraints; its output goes to a log, its current step to the terminal."""
    constraints = VENV / "constraints.txt"
    constraints.write_text(constrain(pins(), torch))
    pip_words = [str(venv_python()), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    pip_words += ["--progress-bar", "off", "-c", str(constraints)]
    needed = check_room(torch, pip_words)
    if shutil.disk_usage(VENV).free < (needed + PIP_CACHE_GB) * 10**9:
        pip_words.append("--no-cache-dir")
    words = [*pip_words, "-e", f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)]
    log = VENV / "install.log"
    with log.open("w") as file:
        pip = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        for line in pip.stdout or ():
            file.write(line)
            show_step(line)
        code = pip.wait()
    clear_step()
    if code != 0:
        raise SetupFailed(explain(log.read_text(), log))


def check_room(torch: Torch | None, pip_words: list[str]) -> int:
    """The gigabytes that installing takes at its fullest; SetupFailed where they are not free."""
    free = shutil.disk_usage(VENV).free
    kind = "kept" if torch else "cuda"
    if free < NEEDED_GB[kind] * 10**9 and not torch:  # only now is it worth asking an index
        kind = torch_to_install(pip_words)
    needed = NEEDED_GB[kind]
    if free < needed * 10**9:
        why = f"{space_left()} At least {needed} GB are needed"
        raise SetupFailed(f"{why}{CUDA_IS_LARGE if kind == 'cuda' else ''}. Make room there (pip cache purge).")
    return needed


def torch_to_install(pip_words: list[str]) -> str:
    """The kind of torch that pip would install: "cuda" also where it cannot say, "kept" where one is there already."""
    words = [*pip_words, "--quiet", "--dry-run", "--no-deps", "--report", "-", "torch"]
    answer = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    try:
        found = json.loads(answer.stdout)["install"]
    except (ValueError, KeyError):
        return "cuda"
    if not found:
        return "kept"
    return "cpu" if found[0]["metadata"]["version"].endswith("+cpu") else "cuda"


def pins() -> str:
    """The versions to install."""
    return (ROOT / "constraints.txt").read_text()


def constrain(constraints: str, torch: Torch | None) -> str:
    """The constraints; where a torch is kept, with its version, and without pins for what it requires in its own."""
    if torch is None:
        return constraints
    lines = re.sub(r"(?m)^torch==.*$", f"torch=={torch.installed}", constraints).splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("==")[0] not in torch.needs)


def explain(log: str, path: Path) -> str:
    """Why pip failed, as far as its words tell, and the end of its log."""
    tail = "\n".join(log.splitlines()[-12:])
    hint = "Fix what it names and run the same command again; what is installed is kept."
    if "No space left" in log or "Errno 28" in log:
        hint = f"{space_left()} Make room (pip cache purge) and run the same command again."
    elif re.search(NO_NETWORK, log):
        hint = "The package index cannot be reached. Check the network or the proxy (HTTPS_PROXY), try again."
    return f"pip could not install the packages. {hint}\nThe end of {path}:\n{tail}"


def check(torch: Torch | None) -> None:
    """Import what was installed, and see that the torch in use is the one that was meant."""
    words = [str(venv_python()), "-c", "import torch, transformers, eet_lab; print(torch.__version__)"]
    answer = subprocess.run(words, capture_output=True, text=True, cwd=VENV)
    if answer.returncode != 0:
        raise SetupFailed(f"What was installed cannot be imported:\n{answer.stderr.strip()[-1500:]}")
    found = answer.stdout.split()[-1]
    if torch and found != torch.version:
        raise SetupFailed(f"torch {torch.version} was to stay, but {found} is imported. Remove {VENV}, try again.")


def space_left() -> str:
    """How full the disk is."""
    folder = VENV if VENV.exists() else ROOT
    return f"{shutil.disk_usage(folder).free / 1e9:.1f} GB are free in {folder}."


def say(step: int, what: str) -> None:
    """One line for each step."""
    print(f"[{step}/3] {what}", flush=True)


def show_step(line: str) -> None:
    """On a terminal: what pip is doing now, in one line that is written over."""
    match = re.match(r"\s*(Collecting|Downloading|Building|Installing)\b.*", line)
    if match and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 8
        print(f"\r\x1b[2K      {line.strip()[:width]}", end="", flush=True)


def clear_step() -> None:
    """Take pip's line away."""
    if sys.stdout.isatty():
        print("\r\x1b[2K", end="", flush=True)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)  # it would leak into the new environment's view of what is installed
    sys.exit(main())
