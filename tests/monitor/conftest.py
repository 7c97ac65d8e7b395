"""NVML as every test here sees it."""

from __future__ import annotations

import sys

import pytest

from monitor.fakes import FakeNvml


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake
