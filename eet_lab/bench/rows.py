"""Rows: one JSON line per workload, provider and recipe in `benchmarks/<gpu>.jsonl`; whose it is; tables of them."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eet_lab.bench.measured import Parity, Spread, device_name, versions
from eet_lab.codec import decode, encode, parse
from eet_lab.errors import PromptError, ResultError, did_you_mean
from eet_lab.models import Config
from eet_lab.technique import Recipe, Technique
from eet_lab.texts import RecipeLike, as_recipe
from eet_lab.words import brief

OURS = "eet_lab"
TRAIN, ACCURACY = "train:", "accuracy:"
"""How workloads of training, and of accuracy, begin."""


@dataclass(frozen=True)
class Row:
    """What one line holds. `run` is one id per process, so that rows taken side by side can be found.

    `equality` is "passed", or why not; `gpu` names the device, also where it is a processor. What has a default came
    later: older lines lack it.
    """

    workload: str
    provider: str
    recipe: str
    dtype: str
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    total_ms: Spread | None  # of training: of a step
    peak_bytes: int | None
    floor_ms: float | None
    gb_per_s: float | None
    launches_per_token: float | None
    equality: str
    same_tokens: bool | None
    run: str
    gpu: str
    driver: str | None
    torch: str
    transformers: str
    commit: str | None
    date: str
    ceiling_gb_per_s: float | None = None  # what a streaming read reached in that process
    kernels_per_token: float | None = None  # as the device runs them, those inside a graph too
    predicted_ms: float | None = None  # by `cost.predicted_ms`
    activation_bytes: int | None = None  # peak beyond weights, libraries and KV cache (a peer's: of the run's columns)
    lower_bound_bytes: int | None = None  # of activations that are alive at once, by the recipe's own trace
    driver_allocations: int | None = None  # in a stream of requests, once it was under way
    step_allocations: int | None = None  # of torch, in a steady decode step
    tok_s: float | None = None  # of a workload of requests, texts or training, all together
    kl: float | None = None  # nats, from the next token's distribution in fp32
    nll: float | None = None  # nats, of a held-out text's tokens
    percentiles: dict[str, dict[str, float]] | None = None  # of its requests: ttft_ms, tpot_ms, e2e_ms by p50, p95, p99
    mfu: float | None = None  # of what is trained: operations a second, as a share of `ceiling_tflops`
    ceiling_tflops: float | None = None  # what a large product of matrices reached in that process
    prefix_hit_rate: float | None = None  # the share of prompt tokens that were found in the KV cache

    @property
    def is_op(self) -> bool:
        """Whether it is a single op, whose time is `total_ms`, rather than a model."""
        return self.workload.startswith("op:")

    @property
    def is_batch(self) -> bool:
        """Whether it is a model that generates for a batch: `gpt2/b1/p128/n128`, without a word in front."""
        return ":" not in self.workload

    @property
    def name(self) -> str:
        """Who ran: our recipe, or the provider, with a recipe where it has one."""
        return self.recipe if self.provider == OURS and self.recipe else f"{self.provider} {self.recipe}".rstrip()

    @property
    def share_of_ceiling(self) -> float | None:
        """The floor over what a step, or the op, took: 1 is the rate of a streaming read. None where one is missing."""
        took = self.total_ms if self.is_op else self.tpot_ms
        return self.floor_ms / took.p50 if self.floor_ms and took else None


def named(providers: Sequence[str] | str, known: Sequence[str], what: str = "", beside: str = "") -> list[str]:
    """The providers, one or several, by their names, each once; PromptError for none, and for what is none of `known`.

    The error says `what` they provide, and what there is `beside` those that are known.
    """
    names = [providers] if isinstance(providers, str) else list(dict.fromkeys(providers))
    of, told = f" of {what}" if what else "", ", ".join(known) + beside
    if not names:
        raise PromptError(f"No provider{of} is named. Known ones: {told}.")
    for name in names:
        if name not in known:
            raise PromptError(f"There is no provider {name!r}{of}.{did_you_mean(name, known)} Known ones: {told}.")
    return names


def distinct(
    recipes: RecipeLike | Sequence[RecipeLike], device: str, config: Config | None = None
) -> tuple[list[Recipe], list[str]]:
    """Each recipe once, and a remark on those that are the same in other words.

    Errors: PromptError where there is none, and those of `as_recipe`.
    """
    given = [recipes] if isinstance(recipes, (str, Recipe, Technique)) else recipes
    if not given:
        raise PromptError(f"No recipe is given. Name one, such as 'all', or leave {OURS} out of the providers.")
    words: dict[Recipe, list[str]] = {}
    for each in given:
        words.setdefault(as_recipe(each, device, config), []).append(repr(str(each)))
    remarks = [
        f"{recipe} was given {len(said)} times, as {' and '.join(said)}: it is timed once."
        for recipe, said in words.items()
        if len(said) > 1
    ]
    return list(words), remarks


def credited(name: str, peers: Collection[str]) -> dict[str, str]:
    """The provider and the recipe of a row: one of the `peers`, or ours with the recipe of that name."""
    return {"provider": name, "recipe": ""} if name in peers else {"provider": OURS, "recipe": name}


def equality(same: Parity) -> str:
    """What a row says of the check: "passed", how far a lossy recipe is off, or why it did not pass."""
    if same.verdict == "lossy":
        return f"lossy: logits off by {brief(same.max_error or 0.0, 2)}, stated bound {brief(same.budget, 2)}"
    return "passed" if same.verdict != "different" else same.explanation


RUN = uuid.uuid4().hex[:12]
"""One id per process."""


UNTIMED = (
    "ttft_ms", "tpot_ms", "total_ms", "peak_bytes", "floor_ms", "gb_per_s", "launches_per_token", "same_tokens",
)  # fmt: skip
"""What some rows have nothing to say of; older lines have it all the same."""


def taken(device: str, **known: Any) -> Row:
    """A row that is taken now on `device`: what is known of it, and run, gpu, versions, commit and date."""
    untimed: dict[str, Any] = dict.fromkeys(UNTIMED)
    where = {"run": RUN, "gpu": device_name(device), **versions(device)}
    return Row(**untimed | where | known)


def file_name(gpu: str) -> str:
    """`NVIDIA H200` -> `h200.jsonl`; processors share `cpu.jsonl`."""
    if not gpu.startswith("NVIDIA "):
        return "cpu.jsonl"
    return re.sub(r"[^a-z0-9]+", "-", gpu.removeprefix("NVIDIA ").lower()).strip("-") + ".jsonl"


def append(rows: Iterable[Row], folder: Path) -> list[Path]:
    """Add the rows to their GPUs' files in `folder`, which is made if need be, and return the files.

    A number that is not finite, which JSON cannot hold, is left out; `equality` says why it is none.
    """
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror
        raise ResultError(f"{folder} cannot be made a folder: {why}. Choose another folder.") from error
    for row in rows:
        path = folder / file_name(row.gpu)
        try:
            with path.open("a", encoding="utf-8") as file:
                kept = {name: value if _is_finite(value) else None for name, value in encode(row).items()}
                file.write(json.dumps(kept, allow_nan=False) + "\n")
        except OSError as error:
            raise ResultError(f"{path} cannot be written: {error.strerror}. Choose another folder.") from error
        files.append(path)
    return list(dict.fromkeys(files))


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def read(path: Path) -> list[Row]:
    """The rows of a file; ResultError, naming the line, for what is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path} cannot be read: {error}. Give a file that `append` made.") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(decode(Row, parse(line.encode()), "row"))
        except ValueError as error:
            raise ResultError(f"{path}, line {number}: {error}. Correct or remove the line.") from error
    return rows


def newest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each GPU, workload, provider, recipe and dtype, in the order in which they first came."""
    latest = {(*_table(row), row.provider, row.recipe): row for row in rows}
    return list(latest.values())


def markdown(rows: Sequence[Row]) -> str:
    """A table for each workload, dtype and GPU, the slowest first."""
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        tables.setdefault(_table(row), []).append(row)
    return "\n\n".join(_heading(own) + "\n\n" + _body(own) for own in tables.values())


def _table(row: Row) -> tuple[str, ...]:
    """What the rows of one table share."""
    return row.workload, row.dtype, row.gpu


def _heading(rows: Sequence[Row]) -> str:
    workload, *where = _table(rows[0])
    days = sorted({row.date[:10] for row in rows})
    return f"**`{workload}`**, {', '.join(where)}, {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def _body(rows: Sequence[Row]) -> str:
    head, cells = _columns(rows[0])
    lines = [" | ".join(["|", *head, "same output", "commit |"]), "|---|" + "--:|" * len(head) + "---|---|"]
    for row in sorted(rows, key=_total, reverse=True):
        name = row.name.replace(",", ", ")
        lines.append(f"| {' | '.join([name, *cells(row), row.equality, (row.commit or '–')[:7]])} |")
    return "\n".join(lines)


MODEL_HEAD = ("TTFT ms", "TPOT ms", "predicted ms", "% of ceiling", "total ms", "peak GiB")
OP_HEAD = ("us", "GB/s", "% of ceiling")
TRAIN_OP_HEAD = (*OP_HEAD, "MFU %", "peak GiB")
TRAIN_HEAD = ("tok/s", "ms a step", "MFU %", "peak GiB")
ACCURACY_HEAD = ("KL from fp32, nats", "NLL, nats")
THROUGHPUT_HEAD = ("tok/s", "TTFT p50 ms", "TPOT p50 ms", "total ms", "peak GiB")
STREAM_HEAD = ("total ms", "allocations of the driver", "of torch, a step", "of the bound", "beside weights, GiB")


def _columns(row: Row) -> tuple[tuple[str, ...], Callable[[Row], list[str]]]:
    """The heading of its table, and what makes its cells, by what kind of workload it is."""
    if row.is_op and (row.peak_bytes is not None or row.mfu is not None):
        return TRAIN_OP_HEAD, lambda row: [*_op_cells(row), percent(row.mfu), _gib(row)]
    if row.is_op:
        return OP_HEAD, _op_cells
    if row.driver_allocations is not None:
        return STREAM_HEAD, _stream_cells
    if row.workload.startswith(ACCURACY):
        return ACCURACY_HEAD, lambda row: [digits(row.kl), digits(row.nll)]
    if row.workload.startswith(TRAIN):
        return TRAIN_HEAD, _train_cells
    if row.tok_s is not None:
        return THROUGHPUT_HEAD, _throughput_cells
    return MODEL_HEAD, _model_cells


def _model_cells(row: Row) -> list[str]:
    ttft, tpot, total = map(_median, (row.ttft_ms, row.tpot_ms, row.total_ms))
    return [ttft, tpot, digits(row.predicted_ms), percent(row.share_of_ceiling), total, _gib(row)]


def _train_cells(row: Row) -> list[str]:
    return [digits(row.tok_s), _median(row.total_ms), percent(row.mfu), _gib(row)]


def _throughput_cells(row: Row) -> list[str]:
    """Of requests or texts that are all there at once."""
    waits = ((row.percentiles or {}).get(name, {}).get("p50") for name in ("ttft_ms", "tpot_ms"))
    return [digits(row.tok_s), *map(digits, waits), _median(row.total_ms), _gib(row)]


def _stream_cells(row: Row) -> list[str]:
    """Of requests one after the other: what they allocated, and how much was held at most."""
    counts = (digits(count, str) for count in (row.driver_allocations, row.step_allocations))
    over = row.activation_bytes and row.lower_bound_bytes and row.activation_bytes / row.lower_bound_bytes
    return [_median(row.total_ms), *counts, digits(over or None), _gib(row)]


def _op_cells(row: Row) -> list[str]:
    return [_median(row.total_ms, 1e3), digits(row.gb_per_s, "{:.0f}".format), percent(row.share_of_ceiling)]


def _gib(row: Row) -> str:
    return digits(row.peak_bytes, lambda num_bytes: f"{num_bytes / 2**30:.2f}")


def _median(spread: Spread | None, scale: float = 1) -> str:
    return digits(None if spread is None else spread.p50 * scale)


def digits(value: float | None, form: Callable[[float], str] = brief) -> str:
    """Three digits, or another form; a dash for what is missing."""
    return "–" if value is None else form(value)


def percent(share: float | None) -> str:
    """A share of 1 in whole percents, or a dash."""
    return digits(share, lambda share: f"{share:.0%}".removesuffix("%"))


def _total(row: Row) -> float:
    return row.total_ms.p50 if row.total_ms else float("inf")
