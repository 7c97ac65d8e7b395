"""The ranges that a value of a saved result may have: what tables, figures and replays can show.

They are wide: a file outside of them is damaged or hostile, and none that was measured is. `codec.decode` checks them.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from msgspec import Meta

T = TypeVar("T")

Ms = Annotated[float, Meta(ge=0, le=1e12)]
"""A duration; 1e12 ms are 30 years."""
SignedMs = Annotated[float, Meta(ge=-1e12, le=1e12)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
"""A rate, an energy, an error: nothing negative."""
Positive = Annotated[float, Meta(gt=0, le=1e18)]
Real = Annotated[float, Meta(ge=-1e18, le=1e18)]
Nats = Annotated[float, Meta(ge=0, le=100)]
"""Of which e to that is still a number to read."""
Bytes = Annotated[int, Meta(ge=0, le=2**60)]
SignedBytes = Annotated[int, Meta(ge=-(2**60), le=2**60)]
Count = Annotated[int, Meta(ge=0, le=2**40)]
Whole = Annotated[int, Meta(ge=-(2**62), le=2**62)]

Name = Annotated[str, Meta(max_length=10_000)]
"""What stands in one line: a device, a recipe, a version."""
Text = Annotated[str, Meta(max_length=4_000_000)]
Date = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)?$", max_length=40)]
"""ISO 8601."""

Some = Annotated[tuple[T, ...], Meta(min_length=1, max_length=100_000)]
Many = Annotated[tuple[T, ...], Meta(max_length=1_000_000)]
Setting = bool | Whole | Real | Text | None | Annotated[list[Whole], Meta(max_length=100_000)]
