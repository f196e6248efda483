"""Run the comparison, and print its lines as they come."""

import sys

from mpi4dl_nb.engines.errors import PlanError
from tests.peers.compare import print_comparison

try:
    for line in print_comparison(sys.argv[1:]):
        print(line, flush=True)
except PlanError as error:
    sys.exit(f"PlanError: {error}")
