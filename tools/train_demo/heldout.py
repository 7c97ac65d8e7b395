"""Choose the held-out text that ships with the demo model: a part of the test split, which chose nothing in training.

    python tools/train_demo/heldout.py [--data .demo_data] [--out eet_lab/models/demo]

Writes `heldout.jsonl`: every seventh document of the split, with the module that it is from.
"""

from __future__ import annotations

import argparse
from pathlib import Path

EVERY = 7
"""About 8,000 of the demo model's tokens: a perplexity in seconds on a laptop."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(".demo_data"))
    parser.add_argument("--out", type=Path, default=Path("eet_lab/models/demo"))
    args = parser.parse_args()
    documents = (args.data / "test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (args.out / "heldout.jsonl").write_text("".join(documents[::EVERY]), encoding="utf-8")


if __name__ == "__main__":
    main()
