"""The one place that chooses a device; everywhere else the device follows the tensor."""

from __future__ import annotations

import torch

from engines.errors import PlanError

__all__ = ["choose_device"]


def choose_device(wish: str, rank: int) -> torch.device:
    """`auto`: the GPUs of this host in turn, the CPU where there is none; else what `wish` names.

    Raises PlanError where the wish cannot be fulfilled.
    """
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() else "cpu"
    if wish == "cuda":
        if not torch.cuda.is_available():
            raise PlanError("device='cuda', but torch sees no GPU here. Use device='auto' or 'cpu'.")
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device(wish)
