"""One thread makes the first call into the library of vector functions, before several of them can.

PyTorch takes roots, exponentials and the like of contiguous tensors from MKL, which finds its functions on the first
call. Where several threads make that call at once, one of them now and then computes its part to 12 bits only (seen
with PyTorch 2.13: in 2 of 100 processes, most often in the first update of Adam). Once any of these functions has been
called, all are found. `python -m tests.first_call` shows it.
"""

from __future__ import annotations

import torch

__all__: list[str] = []

torch.ones(8).sqrt()
