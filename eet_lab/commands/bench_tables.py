"""What `eet-lab bench` prints: a line for each row, with the hardware's bound and what the cost model predicts."""

from __future__ import annotations

from collections.abc import Sequence

from eet_lab.bench.cost import call_us, launch_cost
from eet_lab.bench.measured import Spread
from eet_lab.bench.rows import Row, digits, percent
from eet_lab.bench.tables import spread
from eet_lab.labels import less_than_all
from eet_lab.words import MiB, aligned, brief, plain

NOTHING = digits(None)
WHOLE, GROUPED = "{:.0f}".format, "{:,.0f}".format


def model_table(rows: Sequence[Row]) -> str:
    """Rows of one workload, as in the other tables: at least one."""
    bound = ["floor ms", "predicted ms", "GB/s", "% of ceiling", "launches", "kernels"]
    cells = [["", "TTFT ms", "TPOT ms", "total ms", *bound, "peak MiB", "same output"]]
    for row in rows:
        times = map(_spread, (row.ttft_ms, row.tpot_ms, row.total_ms))
        counts = [digits(row.launches_per_token, WHOLE), digits(row.kernels_per_token, WHOLE)]
        cells.append([_name(row), *times, *_bound(row, 1), *counts, _peak(row), row.equality])
    return "\n".join([*_titled(rows[0], cells), "", *_legend(rows[0], "a step")])


def serve_table(rows: Sequence[Row]) -> str:
    """Rows of one workload of requests."""
    found = ["prefix found %"] * any(row.prefix_hit_rate is not None for row in rows)
    waits = (f"{what} ms p50 / p95 / p99" for what in ("TTFT", "TPOT", "end to end"))
    cells = [["", "tok/s", *waits, *found, "same tokens"]]
    for row in rows:
        each = (row.percentiles or {}).get
        waits = (
            " / ".join(map(plain, (each(name) or {}).values())) or "–" for name in ("ttft_ms", "tpot_ms", "e2e_ms")
        )
        share = [percent(row.prefix_hit_rate)] * len(found)
        same = {None: "–", True: "yes", False: "no"}[row.same_tokens]
        cells.append([_name(row), digits(row.tok_s, GROUPED), *waits, *share, same])
    return "\n".join(_titled(rows[0], cells))


def encode_table(rows: Sequence[Row]) -> str:
    """Rows of one workload of texts."""
    cells = [["", "tok/s", "total ms", "peak MiB", "same output"]]
    for row in rows:
        cells.append([_name(row), digits(row.tok_s, GROUPED), _spread(row.total_ms), _peak(row), row.equality])
    return "\n".join(_titled(rows[0], cells))


def train_table(rows: Sequence[Row]) -> str:
    """Rows of one workload of training."""
    cells = [["", "tok/s", "ms a step", "MFU %", "peak MiB", "same gradient"]]
    for row in rows:
        figures = digits(row.tok_s, GROUPED), _spread(row.total_ms), percent(row.mfu), _peak(row)
        cells.append([_name(row), *figures, row.equality])
    legend = (
        f"MFU is what a step must compute, as a share of {digits(rows[0].ceiling_tflops)} TFLOP/s, what a large "
        "product of matrices reaches here."
    )
    return "\n".join([*_titled(rows[0], cells), "", legend])


def accuracy_table(rows: Sequence[Row]) -> str:
    """Rows of one workload of text."""
    cells = [["", "KL from fp32, nats", "NLL, nats", "same output"]]
    for row in rows:
        distances = (digits(value, plain) for value in (row.kl, row.nll))
        cells.append([_name(row) or "baseline", *distances, row.equality])
    return "\n".join(_titled(rows[0], cells))


def op_tables(rows: Sequence[Row]) -> str:
    """Rows of ops, in microseconds, a table for each workload; what they all say of the columns stands at the end."""
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row.workload, []).append(row)
    legend = dict.fromkeys(line for row in rows for line in _legend(row, "the op"))
    return "\n".join([line for each in tables.values() for line in (*_op_table(each), "")] + [*legend])


def _op_table(rows: Sequence[Row]) -> list[str]:
    more = {"MFU %": [percent(row.mfu) for row in rows], "peak MiB": [_peak(row) for row in rows]}
    told = {name: column for name, column in more.items() if any(cell != NOTHING for cell in column)}
    cells = [["", "us", "floor us", "predicted us", "GB/s", "% of ceiling", "kernels", *told, "same output"]]
    for row, *others in zip(rows, *told.values(), strict=True):
        kernels = digits(row.kernels_per_token, WHOLE)
        cells.append([row.provider, _spread(row.total_ms, 1e3), *_bound(row, 1e3), kernels, *others, row.equality])
    return _titled(rows[0], cells)


def _name(row: Row) -> str:
    """Who ran: a recipe in the fewest words that `--recipe` takes."""
    return min(row.name, less_than_all(row.recipe), key=len) if row.name == row.recipe else row.name


def _bound(row: Row, scale: float) -> list[str]:
    floor, predicted = (ms and ms * scale for ms in (row.floor_ms, row.predicted_ms))
    share = row.share_of_ceiling and 100 * row.share_of_ceiling
    return [*(digits(value, plain) for value in (floor, predicted, row.gb_per_s)), digits(share, WHOLE)]


def _titled(row: Row, cells: list[list[str]]) -> list[str]:
    return [f"{row.workload}, {row.dtype} on {row.gpu}", "", *aligned(cells)]


def _legend(row: Row, what: str) -> list[str]:
    """What the columns mean, with the numbers of this device."""
    lines = [
        f"The ceiling is {digits(row.ceiling_gb_per_s, GROUPED)} GB/s, what a streaming read reaches here; the floor "
        f"is what {what} must move at that rate."
    ]
    cost = launch_cost("cuda" if row.gpu.startswith("NVIDIA") else "cpu")
    if cost is not None:
        lines.append(
            f"Predicted: the floor and {brief(cost.kernel_us)} us for each kernel, or {brief(cost.launch_us)} us of "
            "host time for each launch if that is more; a graph counts as one launch, as does a copy of tokens to the "
            "host."
        )
    elif row.predicted_ms is not None:
        lines.append(
            f"Predicted: the floor and {brief(call_us())} us for each PyTorch call, one after the other; the time of "
            "the arithmetic itself is not included."
        )
    return lines


def _spread(times: Spread | None, scale: float = 1) -> str:
    return "–" if times is None else spread(times, scale)


def _peak(row: Row) -> str:
    return digits(row.peak_bytes, lambda num_bytes: f"{num_bytes / MiB:.1f}")
