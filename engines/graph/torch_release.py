"""The releases of PyTorch with which traced graphs were tested."""

from __future__ import annotations

import re
import warnings
from functools import cache

import torch

from mpi4dl_nb.engines.errors import TraceError

_OLDEST, _NEWEST = (2, 11), (2, 15)


@cache
def check_torch_release(release: str = str(torch.__version__)) -> None:
    """Warn, once, of a release that is newer than those that were tested. Raises TraceError for one that is older."""
    known = f"{'.'.join(map(str, _OLDEST))} to {'.'.join(map(str, _NEWEST))}"
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if version < _OLDEST:
        raise TraceError(f"PyTorch {release} is too old: models are traced with {known}. pip install --upgrade torch.")
    if version > _NEWEST:
        warnings.warn(
            f"PyTorch {release} is newer than the releases that traced models were tested with ({known}): rely on it "
            "only after training.verify().",
            RuntimeWarning,
            stacklevel=4,
        )
