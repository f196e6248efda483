"""What a machine with a GPU has to show: exactness on it, several ranks on one device, images per second.

Needs torch, mpi4py and an `mpiexec` only. Where there is no GPU it says so and ends well.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["gpu_check", "launch"]

RESNET = "engines.models:resnet20_v1"

_CHECKS: dict[str, tuple[int, Sequence[str]]] = {
    "exact, ResNet-20 v1, 2x2 tiles": (5, ("verify", "--model", "engines.models:resnet20_v1", "--image-size", "128")),
    "exact, ResNet-110 v2, 2x3 tiles": (7, ("verify", "--image-size", "100x132", "--slice-method", "2x3")),
    "exact, U-Net tiled to its loss": (
        4, ("verify", "--model", "engines.models.unet:UNet", "--image-size", "128", "--split-size", "1"),
    ),
    "exact, 1F1B behind tiles": (
        4, ("verify", "--model", RESNET, "--image-size", "64", "--split-size", "3", "--slice-method", "1x2",
            "--parts", "4", "--batch-size", "4", "--schedule", "1f1b"),
    ),
    "exact, both ways, two replicas, fused halos": (
        6, ("verify", "--model", RESNET, "--image-size", "64", "--slice-method", "1x2", "--bidirectional",
            "--data-parallel", "2", "--halo-d2", "--fused-layers", "2", "--checkpoint-activations"),
    ),
    "exact, shared batch, zero bubble": (
        5, ("verify", "--model", RESNET, "--image-size", "64", "--split-size", "3", "--num-spatial-parts", "1",
            "--parts", "2", "--local-dp", "2", "--batch-size", "4", "--schedule", "zero_bubble"),
    ),
    "exact, activations on the host": (
        5, ("verify", "--model", RESNET, "--image-size", "128", "--parts", "2", "--batch-size", "4",
            "--offload-activations"),
    ),
    "bfloat16, ResNet-20 v1": (5, ("verify", "--model", RESNET, "--image-size", "128", "--precision", "bfloat16")),
    "float16, ResNet-20 v1": (5, ("verify", "--model", RESNET, "--image-size", "128", "--precision", "float16")),
    "float32, ResNet-110 v2": (5, ("verify", "--image-size", "256", "--dtype", "float32")),
    "memory, ResNet-110 v2, 512 px, 2x2 tiles": (4, ("bench", "memory", "--image-size", "512", "--split-size", "1")),
    "speed, bfloat16, 4 micro-batches, 2 stages": (
        2, ("bench", "step", "--image-size", "512", "--spatial-size", "0", "--parts", "4", "--batch-size", "4",
            "--precision", "bfloat16", "--schedule", "1f1b"),
    ),
    "speed, ResNet-110 v2, 512 px": (5, ("bench", "step", "--image-size", "512", "--iterations", "5")),
}  # fmt: skip


def gpu_check() -> int:
    """Run every check on this machine's GPU and print a table, then JSON; 0 if all are well."""
    if not torch.cuda.is_available():
        print("There is no GPU that torch can use here: nothing to check.")
        return 0
    results = {name: _run(ranks, arguments) for name, (ranks, arguments) in _CHECKS.items()}
    for name, result in results.items():
        facts = ", ".join(f"{key} {value}" for key, value in result.items())
        print(f"{name:34} {facts}")
    print(json.dumps({"device": torch.cuda.get_device_name(), **results}))
    return (
        0
        if all(result.get("ok", "images_per_s" in result or "peak_bytes" in result) for result in results.values())
        else 1
    )


def _run(ranks: int, arguments: Sequence[str]) -> dict[str, object]:
    done = launch(ranks, ["-m", "engines", *arguments, "--device", "cuda"])
    if done.returncode == 2 or not done.stdout.strip():
        return {"ok": False, "error": done.stderr.strip()[-400:]}
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def launch(ranks: int, arguments: Sequence[str], timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    """`mpiexec -n RANKS python -m mpi4py ARGUMENTS`, with what Open MPI must be told before it starts."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"
    environment = {**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
