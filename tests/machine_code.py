"""The machine code that tests read, of all its sources at once. As a program it makes it, where there is what makes it.

It needs nothing but Python's standard library, so that `make test` runs it beside pip, which leaves cores idle.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from eet_lab.errors import KernelBuildError, SetupError
from eet_lab.ops import native

MACHINE_CODE = ("-fatbin", "-Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error")
"""And nothing else: the compiler of kernels reads launchers too, and finds their errors. To compile and link them for
the host takes a quarter of the time, and `host_code` does so with some."""
RINGS = (
    "linear",
    "vector_linear",
    "register_linear",
    "wgmma_linear",
    "vector_layer",
    "int8_linear",
    "stream_attention",
    "balanced_attention",
    "hopper_attention",
)
"""Kernels that leave a stage of shared memory to whoever fills it next."""
SMALL = "append"
"""A source that two ways of assembling are compared with."""


def machine_code(names: tuple[str, ...]) -> dict[str, Path]:
    """For an H100, in the cache."""
    return native.build(names, arch="90a", extra_flags=MACHINE_CODE)


if __name__ == "__main__":
    with suppress(KernelBuildError, SetupError):  # tests tell of it, or are skipped
        machine_code((*RINGS, SMALL))
