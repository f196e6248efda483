"""`mpiexec -n N python -m mpi4py -m engines COMMAND`: train, verify, bench step, bench halo and others, gpu-check."""

from __future__ import annotations

import sys

from engines.command import main

sys.exit(main(sys.argv[1:]))
