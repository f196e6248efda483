"""`mpiexec -n N python -m mpi4py -m mpi4dl_nb.engines COMMAND`: train, predict, verify, bench ..., gpu-check."""

from __future__ import annotations

import os
import sys

if sys.argv[1:2] == ["predict"]:  # torch reads this when it is imported; see `keep_memory_tight`
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from mpi4dl_nb.engines.cli.command import main

sys.exit(main(sys.argv[1:]))
