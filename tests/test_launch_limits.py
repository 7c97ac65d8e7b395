"""The limits of the GPU that is launched on, where there are several."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from eet_lab.ops.cuda import launching
from eet_lab.ops.cuda.launching import HOPPER, Limits, gpu

ADA = Limits(99 * 1024, 76, False)
NUMBERS = {HOPPER: (9, 0), ADA: (8, 9)}


class Gpus:
    """GPUs of these kinds, the first of which is current; `asked` counts how often torch had to say which one is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *kinds: Limits) -> None:
        self.current = self.asked = 0
        found = {"is_available": lambda: bool(kinds), "device_count": lambda: len(kinds)}
        found |= {"current_device": self._current, "get_device_properties": lambda number: properties(kinds[number])}
        for name, value in found.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def _current(self) -> int:
        self.asked += 1
        return self.current


def properties(kind: Limits) -> SimpleNamespace:
    major, minor = NUMBERS[kind]
    sizes = {"shared_memory_per_block_optin": kind.shared_bytes, "multi_processor_count": kind.num_blocks}
    return SimpleNamespace(major=major, minor=minor, **sizes)


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    for known in (launching.limits, launching._limits_of):
        known.cache_clear()
    yield
    for known in (launching.limits, launching._limits_of):
        known.cache_clear()


def test_two_kinds_of_gpus_have_each_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, HOPPER, ADA)
    for gpus.current, kind in ((0, HOPPER), (1, ADA), (0, HOPPER)):
        assert gpu() == kind


def test_a_launch_does_not_ask_for_the_current_gpu_where_all_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus(monkeypatch, ADA, ADA)
    assert [gpu(), gpu()] == [ADA, ADA] and gpus.asked == 0


def test_where_there_is_no_gpu_plans_are_those_of_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch)
    assert gpu() == HOPPER
