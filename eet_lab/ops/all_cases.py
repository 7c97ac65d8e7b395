"""Every case of every op with kernels: what the checks on a GPU go through."""

from __future__ import annotations

from eet_lab.ops.cases import CASES
from eet_lab.ops.int8_cases import INT8_CASES
from eet_lab.ops.layer_cases import LAYER_CASES
from eet_lab.ops.row_cases import ROW_CASES
from eet_lab.ops.token_cases import TOKEN_CASES

ALL_CASES = (*CASES, *INT8_CASES, *LAYER_CASES, *ROW_CASES, *TOKEN_CASES)
