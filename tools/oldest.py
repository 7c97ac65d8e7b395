"""The oldest versions that pyproject.toml allows, for tests: those of transformers and its own, or all of them.

`oldest.py` puts transformers, tokenizers and huggingface_hub into .venv/oldest, for tests/test_oldest.py (some seconds,
130 MB). `oldest.py --all` makes .venv-oldest, where every dependency with a minimum has that version, and runs tests in
it: minutes and, where pip's torch comes with CUDA, 6 GB.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import setup_env

ROOT = setup_env.ROOT
OVERLAY = ROOT / ".venv" / "oldest"
OF_TRANSFORMERS = ("huggingface_hub", "tokenizers", "transformers")


def main() -> int:
    """What the first word says; pytest's exit code, or 0."""
    if sys.argv[1:2] == ["--all"]:
        return test_all(sys.argv[2:])
    overlay()
    return 0


def minima() -> dict[str, str]:
    """The newest patch of each lower bound, as pip reads it: `{"torch": "torch==2.6.*", ...}`.

    A bound has two numbers at least: pip reads "6.*" as the newest 6.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["app"], *extras["optimal"], *extras["serve"]]
    found = [re.match(r"([\w.-]+)[^;]*?>=([\d.]+)", line) for line in lines]
    return {match[1]: f"{match[1]}=={match[2]}.*" for match in found if match}


def overlay() -> None:
    """Install what transformers' tests need before everything else on the path; without a network they are skipped."""
    wanted = [line for name, line in minima().items() if name in OF_TRANSFORMERS]
    stamp = OVERLAY / "versions"
    if stamp.exists() and stamp.read_text().split() == wanted:
        return
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(OVERLAY)]
    done = subprocess.run([*words, *wanted], capture_output=True, text=True)
    if done.returncode:
        print(f"The tests with {wanted[-1]} will be skipped: pip says\n{done.stderr.strip()[-500:]}")
        return
    stamp.write_text("\n".join(wanted))


def test_all(words: list[str]) -> int:
    """An environment of all minima, and the tests that need neither a browser nor a notebook."""
    setup_env.VENV = ROOT / ".venv-oldest"
    setup_env.pins = lambda: "\n".join(minima().values())
    setup_env.find_torch = lambda python: None  # the one that is kept elsewhere is not the oldest
    try:
        setup_env.set_up(["test"])
    except setup_env.SetupFailed as error:
        print(f"\nSetup failed. {error}", file=sys.stderr)
        return 1
    tests = [str(setup_env.venv_python()), "-m", "pytest", "-m", "not gpu and not browser and not notebook", *words]
    return subprocess.run(tests, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
