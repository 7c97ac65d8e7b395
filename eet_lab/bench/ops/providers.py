"""All providers of ops, ours first. To add one: a `Provider` in its file's tuple."""

from __future__ import annotations

from eet_lab.bench.ops.attention import ATTENTION
from eet_lab.bench.ops.plain import PLAIN
from eet_lab.bench.ops.provider import Provider
from eet_lab.bench.ops.rows import ROWS
from eet_lab.bench.racers import OURS
from eet_lab.ops.cases import Case

PROVIDERS: dict[str, Provider] = {provider.name: provider for provider in (*PLAIN, *ROWS, *ATTENTION)}


def names_for(case: Case) -> tuple[str, ...]:
    """Ours, and everyone who does that case's op."""
    return (OURS, *(name for name, provider in PROVIDERS.items() if case.op in provider.ops))
