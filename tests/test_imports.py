"""What is imported when it is asked for, and what a server does without."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

import eet_lab
from eet_lab.collector import frozen_heap
from eet_lab.imports import on_demand


def test_the_collector_waits_while_a_name_is_imported(monkeypatch):
    seen, home = [], eet_lab.Recipe
    monkeypatch.setattr("eet_lab.imports.import_module", lambda name: seen.append(gc.isenabled()) or sys.modules[name])
    assert on_demand("eet_lab", {"Recipe": "eet_lab.technique"})("Recipe") is home
    assert seen == [False] and gc.isenabled()


@pytest.mark.parametrize("name", ["bench", "scheduling", "serving", "training"])
def test_packages_that_come_when_they_are_asked_for(name):
    """Asked as where nothing else has imported them."""
    assert name in dir(eet_lab) and eet_lab.__getattr__(name) is sys.modules[f"eet_lab.{name}"]
    assert eet_lab.serving.__getattr__("load") is sys.modules["eet_lab.serving.load"]


def test_a_name_that_is_none_of_a_package():
    with pytest.raises(AttributeError, match="module 'eet_lab.models' has no attribute 'lode'"):
        getattr(eet_lab.models, "lode")  # noqa: B009
    gone = on_demand("eet_lab", {"gone": "eet_lab.gone"})
    with pytest.raises(ModuleNotFoundError):
        gone("gone")
    assert gc.isenabled()


def test_a_heap_is_frozen_for_a_while_in_a_process_that_has_not_done_so():
    gc.unfreeze()  # what the tests' collection has left
    try:
        with frozen_heap():
            assert gc.get_freeze_count() > 10_000
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > 10_000, "who has frozen the heap finds it so"


def test_a_server_starts_without_the_benchmarks():
    code = (
        "import sys, eet_lab.serving.service, eet_lab.serving.split_server as last; "
        "print([name for name in sys.modules if name.startswith('eet_lab.bench')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
