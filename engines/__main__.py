"""`mpiexec -n N python -m mpi4py -m engines COMMAND`: train, verify, table, bench step and others, gpu-check."""

from __future__ import annotations

import sys

from engines.command import main

sys.exit(main(sys.argv[1:]))
