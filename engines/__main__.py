"""`mpiexec -n N python -m mpi4py -m engines COMMAND`: train, predict, verify, bench step and others, gpu-check."""

from __future__ import annotations

import os
import sys

if sys.argv[1:2] == ["predict"]:  # torch reads this when it is imported; see `keep_memory_tight`
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from engines.cli.command import main

sys.exit(main(sys.argv[1:]))
