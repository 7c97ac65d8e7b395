"""The choice of a kernel beside the times that it was made from, and the script that takes them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eet_lab.ops import native
from eet_lab.ops.cuda import choice, linear
from eet_lab.ops.cuda.launching import Limits
from linears.sources import GPUS

RECORDED = Path(__file__).resolve().parents[2] / "benchmarks" / "h200-kernel-choice.json"


@pytest.fixture(scope="module")
def timed():
    """By product, its recorded rows by column."""
    return {
        name: [dict(zip(table[0], row, strict=True)) for row in table[1:]]
        for name, table in json.loads(RECORDED.read_text()).items()
        if isinstance(table, list)
    }


def test_no_choice_is_far_from_the_fastest_that_was_recorded(no_tiles, timed):
    """What a chain of a layer's products prefers may be slower alone, but not by much. Tiles have no record."""
    for product, rows in timed.items():
        normed = product.endswith("norm")
        for row in rows:
            T, N, C = row["T"], row["N"], row["C"]
            if "int8_linear" in row:
                kernel = "int8_linear" if choice.takes_int8(T, N, C, 2, normed, 1, Limits(*GPUS[-1])) else None
            else:
                kernel = linear.streaming_kernel(T, N, C, 2, normed=normed)
            times = {name: us for name, us in row.items() if name not in "TNC" and us}
            assert (kernel or "cublas") in times, f"{(product, T, N, C)}: {kernel} does not take it"
            assert times[kernel or "cublas"] <= 1.15 * min(times.values()), (product, T, N, C, kernel, times)


@pytest.fixture
def kernel_choice(monkeypatch):
    """The script that recorded them."""
    monkeypatch.syspath_prepend(str(RECORDED.parent))
    return import_module("kernel_choice")


def test_the_script_times_the_sizes_that_were_recorded(timed, kernel_choice):
    for name, rows in timed.items():
        product = kernel_choice.PRODUCTS[name]
        assert list(rows[0]) == product.columns
        sizes = [(T, *size) for size in product.sizes for T in product.tokens]
        assert [(row["T"], row["N"], row["C"]) for row in rows] == sizes


@pytest.mark.parametrize("name", ["residual", "norm", "int8_residual", "int8_norm"])
def test_the_script_times_one_kernel_at_a_time(kernel_choice, name, monkeypatch):
    """On the CPU, where what would be launched is noted, and cuBLAS is PyTorch's product."""
    launched, timed = [], []

    class Launchers:
        def __getattr__(self, name):
            return lambda **given: launched.append(name.removeprefix("eet_"))

    def captured(runs):
        launched.clear()
        for run in runs:
            run()
        timed.append({*launched} - {"dequantize", "norm", "epilogue"})
        return SimpleNamespace(replay=None)

    monkeypatch.setattr(native, "loaded", lambda name: Launchers())
    for module in ("linear", "int8", "norm"):
        monkeypatch.setattr(import_module(f"eet_lab.ops.cuda.{module}"), "stream_of", lambda x: 0)
    monkeypatch.setattr(kernel_choice, "random", lambda *shape: torch.randn(*shape, dtype=torch.float16))
    monkeypatch.setattr(kernel_choice, "LEAST_BYTES", 1)
    monkeypatch.setattr(kernel_choice, "captured", captured)
    monkeypatch.setattr(kernel_choice, "took_ms", lambda replay, device: 1.0)
    product = replace(kernel_choice.PRODUCTS[name], sizes=((48, 64),), tokens=(3,))
    [row] = product.rows()
    assert len(row) == len(product.columns) and None not in row
    assert timed == [{kernel} - {"cublas"} for kernel in product.kernels]


def test_what_the_script_writes_is_json(kernel_choice):
    tables = {"b": [["T", "x"], [1, None]], "c": [["T"]]}
    assert json.loads(kernel_choice.as_json({"a": 1}, tables)) == {"a": 1} | tables
