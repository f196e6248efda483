"""Train convolutional networks on images larger than a GPU, from a notebook: `help(mpi4dl_nb.Training)`."""

from __future__ import annotations

import mpi4dl_nb.own_engines  # noqa: F401 (first: it checks where the others will be found)
from engines.images.augmented import Augmented
from engines.images.folder import folder_images
from engines.images.picture import open_image
from engines.images.tables import table_images
from engines.plan import Plan
from engines.predict.sizes import Sizes, largest_image
from engines.predict.studies import capabilities, scaling
from engines.train.checkpoint_load import optimiser_state, scheduler_state
from mpi4dl_nb.cluster import Cluster
from mpi4dl_nb.draw.comparison import show_asynchrony, show_traffic
from mpi4dl_nb.draw.memory import show_memory
from mpi4dl_nb.draw.rank_map import show_ranks
from mpi4dl_nb.draw.scaling import show_capabilities, show_limits, show_scaling
from mpi4dl_nb.draw.slicing import show_slicing
from mpi4dl_nb.draw.stepper import show_step
from mpi4dl_nb.draw.timeline import show_schedule, show_timeline
from mpi4dl_nb.plan_cache import forecast
from mpi4dl_nb.plan_tuner import tune
from mpi4dl_nb.training.training import Training
from mpi4dl_nb.widgets.configurator import Configurator
from mpi4dl_nb.widgets.monitor import Monitor
from mpi4dl_nb.widgets.slicer import Slicer
from mpi4dl_nb.widgets.stepper import Stepper
from mpi4dl_nb.widgets.timeline import TimelineView
from mpi4dl_nb.widgets.tuner import Tuner

__all__ = [
    "Augmented",
    "Cluster",
    "Configurator",
    "Monitor",
    "Plan",
    "Sizes",
    "Slicer",
    "Stepper",
    "TimelineView",
    "Training",
    "Tuner",
    "capabilities",
    "folder_images",
    "forecast",
    "largest_image",
    "open_image",
    "optimiser_state",
    "scaling",
    "scheduler_state",
    "show_asynchrony",
    "show_capabilities",
    "show_limits",
    "show_memory",
    "show_ranks",
    "show_scaling",
    "show_schedule",
    "show_slicing",
    "show_step",
    "show_timeline",
    "show_traffic",
    "table_images",
    "tune",
]
