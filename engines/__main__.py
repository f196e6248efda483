"""`mpiexec -n N python -m mpi4py -m engines COMMAND`: verify, bench step, bench halo, gpu-check."""

from __future__ import annotations

import sys

from engines.command import main

sys.exit(main(sys.argv[1:]))
