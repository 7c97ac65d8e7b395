"""How many threads torch gets while something is measured or generated on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch

from eet_lab import threads
from eet_lab.bench import benchmark, compare, ladder, measure
from eet_lab.bench.measure import Subject
from eet_lab.bench.workloads import Workload
from eet_lab.engine.settings import Settings
from eet_lab.models.on_device import on_its_device
from eet_lab.texts import generate
from eet_lab.threads import cpu_threads, num_cpu_threads


@pytest.fixture
def many_threads(monkeypatch):
    """torch set to four threads where only three are ours to take."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.setattr(threads, "num_cpu_threads", lambda: 3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("cores", "num_threads"), [(1, 1), (2, 1), (16, 15)])
def test_one_core_is_left_to_others(monkeypatch, cores, num_threads):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert num_cpu_threads() == num_threads


def test_the_setting_holds_within_and_is_restored(many_threads):
    with cpu_threads("cpu"):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 4
    with cpu_threads("cuda"):
        assert torch.get_num_threads() == 4


def test_an_error_restores_it_too(many_threads, tiny):
    @on_its_device
    def fail(model: object) -> None:
        raise KeyError(torch.get_num_threads())

    with pytest.raises(KeyError, match="3"):
        fail(tiny)
    assert torch.get_num_threads() == 4


def test_fewer_threads_stay_fewer(many_threads):
    torch.set_num_threads(2)
    with cpu_threads("cpu"):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 2


def test_it_counts_for_the_thread_that_works(many_threads, tiny):
    found = []

    def work() -> None:
        torch.set_num_threads(4)
        found.append(on_its_device(lambda model: torch.get_num_threads())(tiny))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert found == [3]


def test_everything_that_measures_or_generates_keeps_to_it(tiny, many_threads, monkeypatch):
    seen = set()

    def progress(*args: object) -> None:
        seen.add(torch.get_num_threads())

    few = {"max_new_tokens": 2, "repeats": 1}
    compared = compare(tiny, [[1, 2]], "pre_padding", watch=False, progress=progress, **few)
    assert "(3 threads)" in compared.environment.device
    ladder(tiny, [[1, 2]], "pre_padding", progress=progress, **few)
    benchmark(tiny, Workload.parse("tiny/b1/p2/n2"), ["pre_padding"], repeats=1, progress=progress)
    generate(tiny, [[1, 2]], "pre_padding", max_new_tokens=2, on_step=progress)
    monkeypatch.setattr(Subject, "prepare", lambda *args, prepare=Subject.prepare: (progress(), prepare(*args))[1])
    measure(tiny, [[1, 2]], Settings(max_new_tokens=2), repeats=1)
    assert seen == {3}
    assert torch.get_num_threads() == 4
