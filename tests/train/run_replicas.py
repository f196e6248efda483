"""`mpiexec -n 7 python -m mpi4py run_replicas.py`: the cases of this folder on every rank."""

from __future__ import annotations

from tests.comm.run import main
from tests.train.replica_cases import CASES

if __name__ == "__main__":
    main(CASES)
