"""Renew the README's generated tables: techniques from the registry, benchmarks from `benchmarks/*.jsonl`.

`python tools/readme.py` writes them between their markers; `--check` only says whether they are in step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from eet_lab.bench.rows import markdown, newest, read
from eet_lab.technique import registry

ROOT = Path(__file__).resolve().parent.parent


def techniques() -> str:
    """A row for each technique, in canonical order."""
    lines = ["| technique | what it does | needs | numerics |", "|---|---|---|---|"]
    for t in (technique() for technique in registry().values()):
        needs = ", ".join(f"`{name}`" for name in t.requires)
        if t.unavailable("cpu"):
            needs = f"{needs}, an NVIDIA GPU" if needs else "an NVIDIA GPU"
        lines.append(f"| `{t.name}` | {t.summary} | {needs or '–'} | {t.numerics} |")
    return "\n".join(lines)


def benchmarks(folder: Path) -> str:
    """A table for each workload that was measured."""
    rows = [row for path in sorted(folder.glob("*.jsonl")) for row in read(path)]
    return markdown(newest(rows)) or "No rows yet."


def renewed(readme: str, tables: Mapping[str, str]) -> str:
    """The README's text with each table between its markers, `<!-- name:begin -->` and `<!-- name:end -->`."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        head, found, rest = readme.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"README.md lacks the markers {begin} and {end}; put them where the table belongs.")
        readme = f"{head}{begin}\n\n{table}\n\n{end}{tail}"
    return readme


def main(argv: Sequence[str] | None = None) -> int:
    """Write, or with --check compare (exit code 1 where they differ)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--benchmarks", type=Path, default=ROOT / "benchmarks")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(argv)
    old = args.readme.read_text(encoding="utf-8")
    new = renewed(old, {"techniques": techniques(), "benchmarks": benchmarks(args.benchmarks)})
    if args.check:
        print("in step" if new == old else f"{args.readme} is out of step: run python tools/readme.py")
        return int(new != old)
    args.readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
