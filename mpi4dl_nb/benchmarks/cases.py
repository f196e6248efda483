"""The studies of `make bench`: each is a table of the page, with the commands that produce its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchmarkCase:
    """A command on a number of ranks that prints one or more lines of JSON. `at` is the value that grows."""

    name: str
    ranks: int
    arguments: tuple[str, ...]
    at: int | None = None


@dataclass(frozen=True, slots=True)
class BenchmarkStudy:
    """Cases with lines of the same form. `columns` maps fields of the lines to headings (`a.b` is field b of field a).

    `ratio` is the field that is compared with earlier figures, and `more_is_better` its direction. `grows` names the
    value that grows from case to case; a picture shows it against the ratio, or against `drawn` (columns of bytes).
    """

    title: str
    says: str
    columns: Mapping[str, str]
    cases: tuple[BenchmarkCase, ...]
    ratio: str = "ratio"
    more_is_better: bool = True
    grows: str = ""
    phases: bool = False
    drawn: tuple[str, ...] = ()


# The commands are written as on a command line, and split at spaces: JSON among the flags must have none.
_CHAIN = "--model mpi4dl_nb.engines.models:chain"
_ATTENTION = "--model mpi4dl_nb.engines.bench.networks:PixelTransformer --batch-size 1"
_SWIN = "--model mpi4dl_nb.engines.bench.networks:make_swin_t --batch-size 1"
_VOLUMES = '--model mpi4dl_nb:UNet3d --model-args {"channels":3,"width":8} --batch-size 1'
_QUARTERS = "--split-size 1 --spatial-size 1 --num-spatial-parts 4"
_MONAI_ARGS = {"spatial_dims": 2, "n_input_channels": 3, "num_classes": 10}
_SPEED = {
    "images_per_s": "images/s",
    "one_process_images_per_s": "one process",
    "ratio": "ratio",
    "of_limit": "of the limit",
    "spread": "spread",
}
_MIB = 1 << 20


def _make_case(name: str, ranks: int, command: str, at: int | None = None) -> BenchmarkCase:
    return BenchmarkCase(name, ranks, tuple(command.split()), at)


def _make_step_case(name: str, ranks: int, flags: str, at: int | None = None, times: int = 7) -> BenchmarkCase:
    return _make_case(name, ranks, f"bench step --iterations {times} {flags}", at)


def _make_strip_flags(ranks: int) -> str:
    if ranks == 1:
        return "--split-size 1 --spatial-size 0"
    return f"--split-size 1 --spatial-size 1 --num-spatial-parts {ranks} --slice-method horizontal"


def _make_monai_flags(**more: int) -> str:
    arguments = json.dumps(_MONAI_ARGS | more, separators=(",", ":"))
    return f"--model monai.networks.nets:resnet18 --model-args {arguments}"


STUDIES: tuple[BenchmarkStudy, ...] = (
    BenchmarkStudy(
        "Against one process",
        "Ranks that share all cores against the plain model in one process with as many threads as there are cores, "
        "interleaved. The limit is the time of the kernels of convolutions and products alone.",
        _SPEED,
        (
            _make_step_case(
                "MONAI ResNet-18, 1,024 px, 2 strips",
                2,
                f"{_make_monai_flags()} --image-size 1024 {_make_strip_flags(2)}",
            ),
            _make_step_case(
                "ResNet-110 v2, 512 px, 2 x 2 tiles and a layer stage",
                5,
                "--image-size 512 --split-size 2 --spatial-size 1 --num-spatial-parts 4 --slice-method square",
            ),
        ),
        phases=True,
    ),
    BenchmarkStudy(
        "Volumes and windows",
        "The same for a 3-D U-Net in 2 slabs, and for attention in shifted windows (Swin-T) in 2 strips.",
        _SPEED,
        (
            _make_step_case(
                "3-D U-Net, 128 voxels a side",
                2,
                f"{_VOLUMES} --image-size 128x128x128 --split-size 1 --slice-method 2x1x1",
                times=5,
            ),
            _make_step_case("Swin-T, 1,024 px", 2, f"{_SWIN} --image-size 1024 {_make_strip_flags(2)}", times=5),
        ),
    ),
    BenchmarkStudy(
        "Larger images",
        "Twenty layers of 16 filters on a quarter of the image's side, 2 strips on 2 ranks.",
        _SPEED,
        tuple(
            _make_step_case(f"{px:,} px", 2, f"{_CHAIN} --image-size {px} {_make_strip_flags(2)}", px, times)
            for px, times in ((256, 7), (512, 7), (1024, 7), (2048, 7), (4096, 3))
        ),
        grows="pixels a side",
        phases=True,
    ),
    BenchmarkStudy(
        "More ranks",
        "The same layers at 1,024 px in as many strips as there are ranks. More ranks than cores take turns.",
        _SPEED,
        tuple(
            _make_step_case(name, n, f"{_CHAIN} --image-size 1024 {_make_strip_flags(n)}", n)
            for name, n in (("1 rank", 1), ("2 ranks", 2), ("4 ranks", 4), ("8 ranks", 8))
        ),
        grows="ranks",
        phases=True,
    ),
    BenchmarkStudy(
        "More layers",
        "As many layers of 16 filters at 512 px, 2 strips on 2 ranks.",
        _SPEED,
        tuple(
            _make_step_case(f"{n} layers", 2, f"{_CHAIN} --num-layers {n} --image-size 512 {_make_strip_flags(2)}", n)
            for n in (20, 50, 100, 200)
        ),
        grows="layers",
        phases=True,
    ),
    BenchmarkStudy(
        "Memory",
        "Peak bytes of a training step beyond what a process has after a first one, of the fullest of 4 ranks with a "
        "quarter of the image each, and of one process with all of it; 0.25 would be an even share.",
        {"peak_bytes": "fullest rank", "one_process_peak_bytes": "one process", "share": "share"},
        tuple(
            _make_case(f"{px:,} px", 4, f"bench memory {_CHAIN} --image-size {px} {_QUARTERS}", px)
            for px in (512, 1024, 2048, 4096)
        ),
        ratio="share",
        more_is_better=False,
        grows="pixels a side",
        drawn=("peak_bytes", "one_process_peak_bytes"),
    ),
    BenchmarkStudy(
        "Memory of volumes",
        "The same for a 3-D U-Net, whose volume is cut along two axes.",
        {"peak_bytes": "fullest rank", "one_process_peak_bytes": "one process", "share": "share"},
        tuple(
            _make_case(
                name,
                4,
                f"bench memory {_VOLUMES} --image-size {px}x{px}x{px} --split-size 1 --slice-method 2x2x1",
                px,
            )
            for name, px in (("64 voxels a side", 64), ("96 voxels a side", 96), ("128 voxels a side", 128))
        ),
        ratio="share",
        more_is_better=False,
        grows="voxels a side",
        drawn=("peak_bytes", "one_process_peak_bytes"),
    ),
    BenchmarkStudy(
        "Ranks within a bound",
        "The same U-Net on 4 ranks with activations in a file, each within a bound of memory that the kernel enforces: "
        "how many times the bound one process needs.",
        {"memory_bytes": "bound of each rank", "one_process_peak_bytes": "one process", "needs": "needs"},
        tuple(
            _make_case(
                f"{px} voxels a side",
                4,
                f"bench memory {_VOLUMES} --image-size {px}x{px}x{px} --split-size 1 --slice-method 2x2x1 "
                f"--offload-activations --memory-mb {memory_mb}",
            )
            for px, memory_mb in ((64, 40), (128, 300))
        ),
        ratio="needs",
    ),
    BenchmarkStudy(
        "Memory of attention",
        "The same for attention of each pixel to all others: the keys travel in a ring, and PyTorch's operator, which "
        "keeps no matrix of scores either, computes it in one process.",
        {"peak_bytes": "fullest rank", "one_process_peak_bytes": "one process", "share": "share"},
        tuple(
            _make_case(f"{px * px:,} pixels", 4, f"bench memory {_ATTENTION} --image-size {px} {_QUARTERS}", px)
            for px in (192, 256)
        ),
        ratio="share",
        more_is_better=False,
        grows="pixels a side",
        drawn=("peak_bytes", "one_process_peak_bytes"),
    ),
    BenchmarkStudy(
        "Tiles in turn",
        "One process trains strips or slabs one after another, then late layers whole, within a bound of memory that "
        "the kernel enforces, beside one process with the whole image and no bound: how many times the bound that "
        "needs, and how many times as long a step takes in turn.",
        {
            "memory_bytes": "bound",
            "peak_bytes": "peak, with the file's pages",
            "one_process_peak_bytes": "one process",
            "needs": "needs",
            "stored_bytes": "in the file",
            "time_ratio": "time",
            "spread": "spread",
        },
        (
            _make_case(
                "3-D U-Net, 96 voxels a side",
                1,
                "bench streaming --memory-mb 150 --iterations 3 --image-size 96x96x96 --split-size 1 "
                f"--slice-method 12x1x1 {_VOLUMES}",
            ),
            _make_case(
                "MONAI ResNet-18 (stride 2), 1,536 px",
                1,
                "bench streaming --memory-mb 270 --iterations 3 --image-size 1536 --split-size 2 --balance 6,4 "
                f"--spatial-size 1 --slice-method 8x1 {_make_monai_flags(conv1_t_stride=2)}",
            ),
        ),
        ratio="time_ratio",
        more_is_better=False,
    ),
    BenchmarkStudy(
        "Largest images",
        "The largest square image (in steps of 128 px, to 4,096) whose training takes no more than 300 MB, which the "
        "kernel enforces, in one process: the same twenty layers.",
        {"largest_px": "px a side", "peak_bytes": "peak, with the file's pages", "s_per_megapixel": "s a megapixel"},
        tuple(
            _make_case(
                name,
                1,
                f"bench largest {_CHAIN} --memory-mb 300 --image-size 1024 --step-px 128 --most-px 4096 --way {way}",
            )
            for name, way in (
                ("PyTorch's own loop", "plain"),
                ("activations computed again", "again"),
                ("activations in a file", "away"),
                ("8 strips in turn", "in-turn --split-size 1 --slice-method 8x1"),
            )
        ),
        ratio="largest_px",
    ),
    BenchmarkStudy(
        "Halos",
        "One exchange of 3 pixels around 4 strips of a 1,024 px image, there and back, against the same by hand in "
        "mpi4py, and against its messages alone: 1 is as fast, more is slower.",
        {
            "forward.ms": "there, ms",
            "forward.ratio": "to by hand",
            "backward.ms": "back, ms",
            "backward.ratio": "to by hand",
            "ratio_messages_only": "to messages alone",
            "forward.spread": "spread",
        },
        (_make_case("1,024 px, 4 ranks", 4, "bench halo --slice-method vertical --num-spatial-parts 4"),),
        more_is_better=False,
    ),
    BenchmarkStudy(
        "Sums",
        "A sum over 4 ranks as gradients are summed, beside MPI's own and gloo's: above 1 is faster than MPI's.",
        {
            "ours_ms": "ours, ms",
            "raw_mpi_ms": "MPI, ms",
            "gloo_ms": "gloo, ms",
            "ratio_to_mpi": "ratio",
            "spread": "spread",
        },
        (_make_case("", 4, f"bench allreduce --max-bytes {64 * _MIB} --iterations 15"),),
        ratio="ratio_to_mpi",
        grows="bytes",
    ),
    BenchmarkStudy(
        "Overhead",
        "What an instruction of a program costs beside its kernels, in microseconds of one thread, and what a kernel's "
        "call costs beside its work.",
        {"instruction_us": "instruction", "call_us": "call", "back_call_us": "call, backward", "spread": "spread"},
        (_make_case("1 rank", 1, "bench overhead"),),
        ratio="instruction_us",
        more_is_better=False,
    ),
    BenchmarkStudy(
        "Compiled segments",
        "The same training as PyTorch runs it, and with `compile_segments`, interleaved: above 1 is faster "
        "compiled. The first step compiles.",
        {
            "step_s": "s a step",
            "compiled_step_s": "compiled",
            "ratio": "ratio",
            "first_s": "first step, s",
            "spread": "spread",
        },
        tuple(
            _make_case(name, n, f"bench compiled --iterations 7 {model} --image-size 512 {_make_strip_flags(n)}")
            for name, n, model in (
                ("MONAI ResNet-18, 512 px, 1 rank", 1, _make_monai_flags()),
                ("the twenty layers, 512 px, 2 strips", 2, _CHAIN),
            )
        ),
    ),
)
"""In the order of the page; together they take about ten minutes on two cores."""
