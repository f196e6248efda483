"""Published results of the field as rows: each claim, its source, and the assumptions needed to simulate it.

Assumptions of all rows: the papers themselves were not available; the claims are those of the talk and the abstracts
named as sources. Configurations that these do not give are chosen by one rule, before any simulation. The model is the
one named, or else that of the system's benchmarks. A replica has the fewest GPUs, a power of two, on which everything
compared fits into 16 GB by our count of tensors. Batches are as large as fits, with at most two images per direction.
Plans are simulated as our programs run them, with exact halos and batch norm over all tiles, whereas the systems
normalise each tile separately. Arithmetic is float32, images are in memory when a step begins, and running statistics
are not communicated.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.machine import Link
from mpi4dl_nb.engines.predict.machines import SMALL_S
from mpi4dl_nb.engines.predict.published_replay import ModelReference, PublishedResult, RunVariant, StudyRun

AMOEBANET = ModelReference("mpi4dl_nb:amoebanetd", {"num_layers": 18, "num_filters": 214})
RESNET_110 = ModelReference("mpi4dl_nb:resnet_v2", {"depth": 110})
RESNET_1K = ModelReference("mpi4dl_nb:resnet_v2", {"depth": 1001})
RESNET_50 = ModelReference(
    "monai.networks.nets:resnet50", {"spatial_dims": 2, "n_input_channels": 3, "num_classes": 1000, "conv1_t_stride": 2}
)

TALK = "A. Jain, Distributed Deep Neural Network Training using MVAPICH2, OSU booth at SC '22"
HY_FI = f"Jain et al., Hy-Fi, ISC 2022, abstract; {TALK}, Accelerating Out-of-core Training at Scale"
VERY_LARGE = f"{TALK}, Enabling Training on Very High-Resolution Images"


def _change_plan(run: StudyRun, **fields: Any) -> StudyRun:
    return replace(run, plan=replace(run.plan, **fields))


# 2048 x 2048 on 2,048 GPUs, 16 of them a replica
_LAYERS = Plan(split_size=16, spatial_size=0, data_parallel=128)
_BOTH_WAYS = Plan(split_size=13, num_spatial_parts=4, bidirectional=True, schedule="gems", data_parallel=128)
_HY_FI = StudyRun(AMOEBANET, 2048, 2, replace(_BOTH_WAYS, parts=2), "Lassen")
_EIGHT = _change_plan(_HY_FI, split_size=5, data_parallel=256)
_EIGHT_LAYERS = replace(_EIGHT, images=1, plan=replace(_LAYERS, split_size=8, data_parallel=256))
_RESNET = replace(_HY_FI, model=RESNET_110, images=1, plan=_BOTH_WAYS)
_TWO_PAIRS = RunVariant("two pairs of batches", _change_plan(_HY_FI, times=2))
_HY_FI_ASSUMED = (
    "AmoebaNet-D with 18 normal cells and 214 filters, the model that the same talk names for larger images",
    "nodes like Lassen's, 4 V100 of 16 GB each, as in the same group's GEMS results (32 nodes, 128 GPUs)",
    "16 GPUs a replica, 128 replicas",
    "Hy-Fi: four tiles in the first of 13 stages, two micro-batches of one image, both directions, one pair of batches",
    "stages balanced by predicted cost",
)

# 8192 x 8192 and 16,384 x 16,384
_SPATIAL = StudyRun(AMOEBANET, 8192, 1, Plan(split_size=8, spatial_size=8, num_spatial_parts=16), "Lassen")
_OVER_SPATIAL = _change_plan(_SPATIAL, bidirectional=True, schedule="gems", halo_d2=True)
_TWICE = _change_plan(_OVER_SPATIAL, num_spatial_parts=32, slice_method="4x8")
_LARGER = _change_plan(replace(_SPATIAL, image_px=16384), num_spatial_parts=64)
_OVER_LARGER = _change_plan(replace(_OVER_SPATIAL, image_px=16384), num_spatial_parts=64)
_SPATIAL_ASSUMED = (
    "18 normal cells; nodes like Lassen's",
    "basic spatial parallelism: one image, eight stages one after another, a halo before each windowed layer",
    "each stage is cut into the same tiles, to the end: behind tiles, no single GPU holds the rest",
    "Hy-Fi: the same GPUs, an image in each of both directions, and halos exchanged once for each group of layers",
)

_HALOS = (
    "Exchanges of halos cost less here than they did: fused ones gain nothing. The variant of amoebanet/8192 in which "
    "one with four neighbours takes 2 ms, as the predecessor's own does between processes of one host, is nearer to "
    "what was published."
)

# ResNet-1k
_GEMS = StudyRun(RESNET_1K, 512, 1, replace(_LAYERS, split_size=8, bidirectional=True, schedule="gems"), "Lassen")

# Data parallelism
_SUMMIT = StudyRun(RESNET_50, 224, 64, Plan(split_size=1, spatial_size=0, data_parallel=1536), "Summit")
_FRONTERA = StudyRun(RESNET_50, 224, 64, Plan(split_size=1, spatial_size=0, data_parallel=4 * 2048), "Frontera")

_SLOW_LINKS = RunVariant("links between nodes a tenth as fast", changes={"between": Link(SMALL_S, 2.5e9)})

_hy_fi_result = partial(PublishedResult, source=HY_FI, run=_HY_FI)
_very_large_result = partial(PublishedResult, measure="times as fast", source=VERY_LARGE)

PUBLISHED: tuple[PublishedResult, ...] = (
    _hy_fi_result(
        "hy-fi/layers",
        "2.67x over layer parallelism, 2048 x 2048",
        published=2.67,
        measure="times as fast",
        assumed=_HY_FI_ASSUMED,
        against=replace(_HY_FI, plan=_LAYERS),
        variants=(
            RunVariant("8 GPUs a replica, layers with one image", _EIGHT, _EIGHT_LAYERS),
            _TWO_PAIRS,
            RunVariant("ResNet-110 v2, one image a direction", _RESNET, replace(_RESNET, plan=_LAYERS)),
        ),
    ),
    _hy_fi_result(
        "hy-fi/pipeline",
        "1.68x over pipeline parallelism, 2048 x 2048",
        published=1.68,
        measure="times as fast",
        assumed=_HY_FI_ASSUMED,
        against=replace(_HY_FI, plan=replace(_LAYERS, parts=2)),
        variants=(
            RunVariant("8 GPUs a replica", _EIGHT, replace(_EIGHT, plan=replace(_EIGHT_LAYERS.plan, parts=2))),
            _TWO_PAIRS,
        ),
    ),
    _hy_fi_result(
        "hy-fi/scaling",
        "94.5 % on 2,048 V100",
        published=94.5,
        measure="% of linear",
        assumed=(*_HY_FI_ASSUMED, "linear is what 128 times one replica would do"),
        against=_change_plan(_HY_FI, data_parallel=1),
        variants=(_SLOW_LINKS,),
        why="Of the 5.5 % that are lost nearly nothing is lost here, with links between nodes a tenth as fast neither. "
        "Why they lose it is not known; ranks of unequal speed, other jobs on the network and reading of images are "
        "not simulated.",
    ),
    _very_large_result(
        "amoebanet/8192",
        "1.476x over spatial parallelism, 8192 x 8192",
        published=1.476,
        assumed=(*_SPATIAL_ASSUMED, "16 tiles, 128 GPUs"),
        run=_OVER_SPATIAL,
        against=_SPATIAL,
        variants=(
            RunVariant("a halo before each windowed layer in both", _change_plan(_OVER_SPATIAL, halo_d2=False)),
            RunVariant(
                "a message of a halo keeps its ranks for 0.25 ms: 2 ms with four neighbours",
                changes={"exchange_s": 2.5e-4},
            ),
        ),
        why=_HALOS,
    ),
    _very_large_result(
        "amoebanet/8192 strong",
        "2.26x over spatial parallelism, 8192 x 8192, strong scaling",
        published=2.26,
        assumed=(*_SPATIAL_ASSUMED, "Hy-Fi has twice the tiles and GPUs: 4 x 8 and 256"),
        run=_TWICE,
        against=_SPATIAL,
    ),
    _very_large_result(
        "amoebanet/16384",
        "1.47x over spatial parallelism, 16,384 x 16,384",
        published=1.47,
        assumed=(*_SPATIAL_ASSUMED, "64 tiles, 512 GPUs"),
        run=_OVER_LARGER,
        against=_LARGER,
        why=_HALOS,
    ),
    PublishedResult(
        "gems/resnet-1k",
        "97.32 % scaling of ResNet-1k on 1,024 V100",
        published=97.32,
        measure="% of linear",
        source="Jain et al., GEMS, SC 2020, abstract",
        assumed=(
            "ResNet-1001 v2 on 512 x 512, the smallest images that the group calls out of core",
            "GEMS-Hybrid: 8 stages, one image in each of both directions, 128 replicas, on nodes like Lassen's",
            "linear is what 128 times one replica would do",
        ),
        run=_GEMS,
        against=_change_plan(_GEMS, data_parallel=1),
        variants=(_SLOW_LINKS,),
        why="Of the 2.7 % that are lost nearly nothing is lost here: as for Hy-Fi's scaling.",
    ),
    PublishedResult(
        "resnet-50/summit",
        "90 epochs in 4.5 minutes on 1,536 V100: 3 s an epoch",
        published=3.0,
        measure="s per epoch",
        source=f"{TALK}, Distributed TensorFlow on ORNL Summit",
        assumed=("64 images a GPU, as in the same talk's runs of ResNet-50", "synthetic images of 224 x 224"),
        run=_SUMMIT,
        variants=tuple(RunVariant(f"{images} images a GPU", replace(_SUMMIT, images=images)) for images in (32, 128)),
    ),
    PublishedResult(
        "resnet-50/frontera",
        "260,000 images/s on 2,048 CPU nodes",
        published=260_000,
        measure="images/s",
        source=f"{TALK}, Distributed TensorFlow on TACC Frontera; Jain et al., DLS 2019, abstract (four processes a "
        "node)",
        assumed=("64 images a process", "synthetic images of 224 x 224"),
        run=_FRONTERA,
        variants=tuple(
            RunVariant(f"{count} images a process", replace(_FRONTERA, images=count)) for count in (32, 128)
        ),
    ),
)
"""The rows in the order of the talk."""
