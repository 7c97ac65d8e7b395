"""Take every row of a GPU, beside the peers, and record the results that ship with the package.

    python benchmarks/run_h200.py --list                        the parts, and about how long each takes
    python benchmarks/run_h200.py --out OUT --only bench-xl ops  those with one of these words in their name
    python benchmarks/run_h200.py --out OUT --smoke             tiny models on the CPU: does the script run?

Writes OUT/<gpu>.jsonl (rows to append to benchmarks/), OUT/recorded-*.json (for eet_lab/recorded/), what torch's
allocator did (for eet_lab/bench/) and OUT/report.json.
A part that fails is reported, and the others go on. `--minutes` is the budget: the part that runs when it is spent is
stopped, and those after it are left out and said to be.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from h200.parts import PARTS, Part
from h200.session import Deadline, Session

from eet_lab.bench import measured


def main() -> int:
    """Run the parts; the exit code is the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--list", action="store_true", help="only say what would run")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", nargs="*", metavar="WORD", help="only parts with one of these words in their name")
    parser.add_argument("--peers", nargs="*", metavar="NAME", help="only these peers, where a part has them")
    parser.add_argument("--commit", help="what the rows say the commit is, where there is no git to ask")
    args = parser.parse_args()
    chosen = {name: part for name, part in PARTS.items() if not args.only or any(word in name for word in args.only)}
    tell(chosen)
    if args.list:
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if args.commit:
        measured.commit = lambda: args.commit
    session = Session(args.out, Deadline(args.minutes), args.smoke, args.peers)
    for name, part in chosen.items():
        session.run(name, part.run)
    failed, left_out = session.those("failed"), session.those("left out")
    print(f"{len(session.report)} parts; failed: {failed or 'none'}; left out: {left_out or 'none'}")
    return len(failed)


def tell(parts: dict[str, Part]) -> None:
    """Each part's estimate, and when it would begin."""
    begin = 0
    for name, part in parts.items():
        print(f"{name:16} about {part.seconds:4d} s, from {begin} s")
        begin += part.seconds
    print(f"{'all of them':16} about {begin:4d} s on an H200", flush=True)


if __name__ == "__main__":
    sys.exit(main())
