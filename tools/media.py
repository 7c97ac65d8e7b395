"""Make the README's pictures from the real page: `eet-lab lab` in headless Chromium.

    python tools/media.py                 docs/workbench.png, docs/race.png, docs/compare.gif

The GIF shows a Compare from the click to the answer, in real time, and stays below 2 MB. Needs Chromium and the extra
"dev", which has pillow: `make media` sees to both.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chromium import FLAGS, working_browser

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIZE = {"width": 1440, "height": 900}
FRAMES_A_SECOND = 2
LONGEST_S, END_S = 18, 2
GIF_WIDTH, GIF_COLORS = 960, 48
MOST_GIF_BYTES = 2_000_000


def main() -> int:
    """Make all of them; 0 when they are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCS)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, lab(Path(home)) as address, page_at(address) as page:
        page.locator(".eet-bar").wait_for(timeout=90_000)
        until(page, busy=False)
        page.wait_for_timeout(3000)  # the forecast arrives
        save_gif(recorded(page), out / "compare.gif")
        page.mouse.move(0, 0)
        page.screenshot(path=out / "workbench.png")
        page.get_by_role("button", name="Watch GPT-2 XL on a recorded H200").click()
        page.wait_for_timeout(2500)
        page.screenshot(path=out / "race.png")
    return 0


@contextmanager
def lab(home: Path) -> Iterator[str]:
    """`eet-lab lab` in a home of its own; its address."""
    folders = {f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    command = [sys.executable, "-m", "eet_lab", "lab", "--no-browser", "--dir", str(home / "lab")]
    env = {**os.environ, **folders, "HOME": str(home)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = (re.search(r"http://127\S+", line) for line in process.stdout)
        yield next(each[0] for each in found if each)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@contextmanager
def page_at(address: str) -> Iterator[Any]:
    """That address in a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=working_browser(), args=FLAGS)
        page = browser.new_page(viewport={"width": SIZE["width"], "height": SIZE["height"]})
        page.goto(address)
        yield page
        browser.close()


def until(page: Any, busy: bool) -> None:
    """Wait until something runs, or nothing any more and Run can be pressed."""
    free = ".eet-told-block:not(.eet-busy)"
    ready = f"document.querySelector('{free}') && !document.querySelector('.eet-do-run[aria-disabled=\"true\"]')"
    page.wait_for_function(f"() => {'!' if busy else ''}({ready})", timeout=120_000)


def recorded(page: Any) -> list[bytes]:
    """Pictures of a Compare, so many a second, and of its answer for a while."""
    frames, begun = [page.screenshot()], time.monotonic()
    page.get_by_role("button", name="Compare", exact=True).click()
    until(page, busy=True)
    end = begun + LONGEST_S
    while (now := time.monotonic()) < end:
        frames.append(page.screenshot())
        if page.locator(".eet-told-block:not(.eet-busy)").count():
            end = min(end, now + END_S)
        page.wait_for_timeout(max(0, 1000 / FRAMES_A_SECOND - (time.monotonic() - now) * 1000))
    until(page, busy=False)
    page.wait_for_timeout(1500)
    return [*frames, *[page.screenshot()] * (END_S * FRAMES_A_SECOND)]


def save_gif(frames: list[bytes], path: Path) -> None:
    """Write them as a GIF; SystemExit where it is larger than the README should carry."""
    from PIL import Image

    height = GIF_WIDTH * SIZE["height"] // SIZE["width"]
    images = [Image.open(io.BytesIO(frame)).convert("RGB").resize((GIF_WIDTH, height)) for frame in frames]
    # Of a frame in mid-run too, whose Stop is red, by octree: median cut has no colour left for so few pixels.
    shown = Image.new("RGB", (GIF_WIDTH, 2 * height))
    for at, image in enumerate((images[len(images) // 2], images[-1])):
        shown.paste(image, (0, at * height))
    palette = shown.quantize(GIF_COLORS, method=Image.Quantize.FASTOCTREE)
    small = [image.quantize(GIF_COLORS, palette=palette, dither=Image.Dither.NONE) for image in images]
    small[0].save(path, save_all=True, append_images=small[1:], duration=1000 // FRAMES_A_SECOND, loop=0, optimize=True)
    if path.stat().st_size > MOST_GIF_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size:,} bytes, but at most {MOST_GIF_BYTES:,} are wanted.")


if __name__ == "__main__":
    sys.exit(main())
