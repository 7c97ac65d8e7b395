"""Have a Chromium for the browser tests: the one there is, else apt's where installing it is permitted.

Never fails: without a browser those tests are skipped, and the last line here says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
"""Of every Chromium that tests and tools start: nothing of it asks the network."""
APT = ["apt-get", "-o", "DPkg::Lock::Timeout=60"]


def working_browser() -> str | None:
    """A Chromium that starts; Ubuntu's package may be a stub that only points at snap."""
    for path in filter(None, (os.environ.get("EET_CHROMIUM"), *map(shutil.which, NAMES))):
        try:
            if subprocess.run([path, "--version"], capture_output=True, timeout=30).returncode == 0:
                return path
        except (OSError, subprocess.TimeoutExpired):
            continue
    return None


def install() -> str:
    """Install by apt; an empty string, or why it was not done."""
    if not shutil.which("apt-get"):
        return "there is no apt-get here"
    if os.geteuid() != 0:
        return "this is not root; type: sudo apt-get install -y chromium fonts-dejavu-core"
    print("Installing Chromium for the browser tests (apt-get) ...", flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    packages = ["install", "-y", "-q", "--no-install-recommends", "chromium", "fonts-dejavu-core"]
    for words in ([*APT, "update", "-q"], [*APT, *packages]):
        try:
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            return f"{' '.join(words)} took more than five minutes"
        if done.returncode != 0:
            return f"{' '.join(words)} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return ""


def main() -> None:
    """Say which browser the tests will use, or why there is none."""
    why = "" if working_browser() else install()
    browser = working_browser()
    why = why or "the package that apt installed does not start (on Ubuntu it needs snap)"
    print(f"Browser tests use {browser}" if browser else f"Browser tests will be skipped: {why}", flush=True)


if __name__ == "__main__":
    main()
