"""A model's weights by the names that checkpoints give them, and whether their values can be computed with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eet_lab.errors import ModelError
from eet_lab.models import table
from eet_lab.models.decoder import Decoder
from eet_lab.models.families import FAMILIES
from eet_lab.models.seq2seq import Seq2Seq
from eet_lab.models.vision import AnyEncoder
from eet_lab.words import brief


def named(network: Decoder | AnyEncoder | Seq2Seq) -> Iterator[tuple[str, Tensor]]:
    """Every tensor as a checkpoint has it, by its name without the family's prefix; a tied head comes once."""
    return table.theirs(FAMILIES[network.config.family].table(network.config), network)


def check_finite(network: Decoder | AnyEncoder | Seq2Seq, source: Decoder | AnyEncoder | Seq2Seq) -> None:
    """ModelError where a weight is NaN or infinite; `source` is the model as it was read, in its own dtype.

    A pass over the weights where they are, which reads them once, and one wait for a GPU.
    """
    names, weights = zip(*named(network), strict=True)
    finite = torch.stack([torch.stack(tensor.aminmax()).isfinite().all() for tensor in weights])
    if bool(finite.all()):
        return
    index = finite.tolist().index(False)
    name, read = names[index], dict(named(source))[names[index]]
    if bool(read.isfinite().all()):
        raise ModelError(
            f"{name} has values up to {brief(read.abs().max().item())}, and {network.dtype} ends at "
            f"{brief(torch.finfo(network.dtype).max)}; load it with dtype='bfloat16' or 'float32'."
        )
    num_bad = int((~read.isfinite()).sum())
    raise ModelError(
        f"{name} has {num_bad:,} of {read.numel():,} values that are NaN or infinite, so that no output would mean "
        "anything. Download or save the model again; was its training stable?"
    )
