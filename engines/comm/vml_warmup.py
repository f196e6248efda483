"""Makes the first call into the library of vector functions from one thread, before several threads can."""

from __future__ import annotations

import torch

__all__: list[str] = []

# PyTorch takes square roots, exponentials and the like of contiguous tensors from MKL, which looks up its functions on
# the first call. If several threads make that call at once, one of them occasionally computes its part to 12 bits only
# (seen with PyTorch 2.13: in 2 of 100 processes, most often in the first update of Adam). Once any of these functions
# has been called, all are found: here, from one thread. `python -m tests.first_call` shows the difference.
torch.ones(8).sqrt()
