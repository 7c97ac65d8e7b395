"""How attention knows what a query may see: an attend part makes the attention of one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from eet_lab.ops import reference
from eet_lab.ops.attention import within_window
from eet_lab.ops.types import KV, NO_EXTRAS, Batch, Empty, Extras, Source, Spec
from eet_lab.ops.varlen import with_cu_seqlens

if TYPE_CHECKING:
    from eet_lab.parts.kv_cache import KVCache


class Bounds:
    """A row's first column and the query's own bound the keys; no mask is built, and pads are never read.

    Where each row reads one token, a window is another first column, the same for all layers.
    """

    op: ClassVar[str] = "attention"
    """The op that attends."""

    def __init__(
        self,
        ops: Any,
        batch: Batch,
        cache: KVCache | None,
        *,
        empty: Empty,
        window: int | None = None,
        source: Source | None = None,
    ) -> None:
        self.ops, self.cache, self.empty, self.source = ops, cache, empty, source
        self.batch = within_window(batch, window, empty) if window is not None and batch.one_each else batch

    def __call__(self, layer: int, qkv: Tensor, spec: Spec, extras: Extras = NO_EXTRAS) -> Tensor:
        return self.ops.attention(qkv, self._kv(layer), self.batch, spec, extras)

    def cross(self, layer: int, q: Tensor, spec: Spec) -> Tensor:
        assert self.source is not None, "a pass of a decoder that has sources"
        kv, batch = self.source.layers[layer], self.source.batch
        return self.ops.cross_attention(q, kv, self.batch, batch, spec, mask=self._cross_mask(q))

    def _cross_mask(self, like: Tensor) -> Tensor | None:
        return None

    def _kv(self, layer: int) -> KV | None:
        return None if self.cache is None else self.cache.layer(layer, self.batch)


class Packed(Bounds):
    """The same of rows end to end, whose ends are made once a pass, for the attention of all layers."""

    def __init__(
        self, ops: Any, batch: Batch, cache: KVCache | None, *, source: Source | None = None, **how: Any
    ) -> None:
        source = source and source._replace(batch=with_cu_seqlens(source.batch))
        super().__init__(ops, with_cu_seqlens(batch), cache, source=source, **how)


class DenseMask(Bounds):
    """The baseline: an additive mask [B,1,Q,K], built once a pass and added in every layer.

    What layers add to scores is the same in all of them, and is in it.
    """

    op: ClassVar[str] = "masked_attention"

    def __init__(
        self,
        ops: Any,
        batch: Batch,
        cache: KVCache | None,
        *,
        empty: Empty,
        window: int | None = None,
        source: Source | None = None,
    ) -> None:
        super().__init__(ops, batch, cache, empty=empty, source=source)
        self._masks: dict[Spec, Tensor] = {}
        self._of_source: Tensor | None = None

    def __call__(self, layer: int, qkv: Tensor, spec: Spec, extras: Extras = NO_EXTRAS) -> Tensor:
        if spec not in self._masks:
            self._masks[spec] = reference.dense_mask(self.batch, spec, qkv, extras.bias, empty=self.empty)
        return self.ops.masked_attention(qkv, self._kv(layer), self.batch, spec, extras, mask=self._masks[spec])

    def _cross_mask(self, like: Tensor) -> Tensor | None:
        if self._of_source is None and self.source is not None:
            self._of_source = reference.cross_mask(self.source.batch, like, empty=self.empty)
        return self._of_source
