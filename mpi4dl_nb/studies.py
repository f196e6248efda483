"""The studies of `engines.predict`, which may take minutes, with a line below the cell while they run."""

from __future__ import annotations

from engines.predict import sizes, studies
from mpi4dl_nb.status_line import with_status

capabilities = with_status("Forecasting plans", counts="seen")(studies.capabilities)
scaling = with_status("Forecasting the plan for each number of ranks")(studies.scaling)
largest_image = with_status("Looking for the largest image that fits")(sizes.largest_image)
