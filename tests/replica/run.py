"""`mpiexec -n 7 python -m mpi4py run.py`: the cases beside this file, as `tests/ranks/run.py` runs its own."""

from __future__ import annotations

from tests.ranks.run import main

if __name__ == "__main__":
    main()
