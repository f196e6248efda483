"""Train convolutional networks on images larger than a GPU, from a notebook.

The `help()` of each of these is enough to use it:

- `Plan` says how a model and its images are split, `Cluster` starts the ranks, and `Training` trains on them; its
  `verify` compares the gradients with those of one process.
- `forecast`, `tune`, `largest_image`, `scaling` and `capabilities` predict and compare plans.
- `Slicer`, `Stepper`, `Configurator`, `TimelineView`, `Tuner`, `Monitor` and `Workbench` are the widgets; the functions
  `show_...` return the same as Matplotlib figures, and `save_page` writes them into one file that is alive.
- `open_image`, `crop_picture`, `folder_images` and `table_images` read pictures and slides.
"""

from __future__ import annotations

import mpi4dl_nb.own_engines  # noqa: F401 (first: it checks where the others will be found)
from engines.errors import (
    CheckpointError,
    ImageError,
    LossError,
    Mpi4dlError,
    PlanError,
    RankError,
    TraceError,
    VerifyError,
)
from engines.formatting import format_bytes, format_number, format_seconds
from engines.images.augmented import Augmented, restain
from engines.images.folder import folder_images
from engines.images.picture import crop_picture, open_image
from engines.images.sample_data import StainCrops, compute_dab, immunohistochemistry
from engines.images.tables import table_images, write_table
from engines.models import UNet, amoebanetd, resnet20_v1, resnet110_v2, resnet_v1, resnet_v2
from engines.plan import Plan
from engines.predict.explain import describe_plan
from engines.predict.kernel_effects import LiveBytes
from engines.predict.machine import Link, Machine
from engines.predict.machines import MACHINES, NodeSpec, Processor, make_machine
from engines.predict.sizes import Sizes
from engines.program.compile import compile_plan
from engines.program.program import count_traffic
from engines.program.schedule import compute_bubble_share
from engines.train.checkpoint_load import optimiser_state, scheduler_state
from engines.train.interrupts import StoppedError
from engines.train.training_events import Counts, EpochResult, Recovered, SkippedImage, StepResult
from mpi4dl_nb.cluster import Cluster
from mpi4dl_nb.draw.comparison import show_asynchrony, show_traffic
from mpi4dl_nb.draw.figure import Drawing
from mpi4dl_nb.draw.halo_points import find_halo_points
from mpi4dl_nb.draw.memory import show_memory
from mpi4dl_nb.draw.monitor import show_progress
from mpi4dl_nb.draw.prediction_map import show_prediction
from mpi4dl_nb.draw.rank_map import show_ranks
from mpi4dl_nb.draw.scaling import show_capabilities, show_limits, show_scaling
from mpi4dl_nb.draw.slicing import show_slicing
from mpi4dl_nb.draw.stepper import show_step
from mpi4dl_nb.draw.timeline import show_schedule, show_timeline
from mpi4dl_nb.draw.tuning import show_tuning
from mpi4dl_nb.exercise import grade_answer
from mpi4dl_nb.plan_benchmark import Candidate
from mpi4dl_nb.plan_cache import capabilities, forecast, largest_image, scaling
from mpi4dl_nb.plan_tuner import PlanTuner, TuningResult, tune
from mpi4dl_nb.training.training import Training
from mpi4dl_nb.widgets.configurator import Configurator
from mpi4dl_nb.widgets.monitor import Monitor
from mpi4dl_nb.widgets.saved_page import save_page
from mpi4dl_nb.widgets.slicer import Slicer
from mpi4dl_nb.widgets.stepper import Stepper
from mpi4dl_nb.widgets.timeline import TimelineView
from mpi4dl_nb.widgets.tuner import Tuner
from mpi4dl_nb.widgets.workbench import Workbench

__all__ = [
    "MACHINES",
    "Augmented",
    "Candidate",
    "CheckpointError",
    "Cluster",
    "Configurator",
    "Counts",
    "Drawing",
    "EpochResult",
    "ImageError",
    "Link",
    "LiveBytes",
    "LossError",
    "Machine",
    "Monitor",
    "Mpi4dlError",
    "NodeSpec",
    "Plan",
    "PlanError",
    "PlanTuner",
    "Processor",
    "RankError",
    "Recovered",
    "Sizes",
    "SkippedImage",
    "Slicer",
    "StainCrops",
    "StepResult",
    "Stepper",
    "StoppedError",
    "TimelineView",
    "TraceError",
    "Training",
    "Tuner",
    "TuningResult",
    "UNet",
    "VerifyError",
    "Workbench",
    "amoebanetd",
    "capabilities",
    "compile_plan",
    "compute_bubble_share",
    "compute_dab",
    "count_traffic",
    "crop_picture",
    "describe_plan",
    "find_halo_points",
    "folder_images",
    "forecast",
    "format_bytes",
    "format_number",
    "format_seconds",
    "grade_answer",
    "immunohistochemistry",
    "largest_image",
    "make_machine",
    "open_image",
    "optimiser_state",
    "resnet20_v1",
    "resnet110_v2",
    "resnet_v1",
    "resnet_v2",
    "restain",
    "save_page",
    "scaling",
    "scheduler_state",
    "show_asynchrony",
    "show_capabilities",
    "show_limits",
    "show_memory",
    "show_prediction",
    "show_progress",
    "show_ranks",
    "show_scaling",
    "show_schedule",
    "show_slicing",
    "show_step",
    "show_timeline",
    "show_traffic",
    "show_tuning",
    "table_images",
    "tune",
    "write_table",
]
