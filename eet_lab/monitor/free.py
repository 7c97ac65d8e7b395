"""What a device has left."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def free_bytes_of(device: torch.device) -> int:
    """Bytes that the device has for new tensors now, with what torch keeps for reuse; of a CPU, the machine's."""
    if device.type == "cuda":
        import torch

        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    import psutil

    return psutil.virtual_memory().available
