"""`python -m eet_lab`."""

from __future__ import annotations

import sys

from eet_lab.cli import main

sys.exit(main())
