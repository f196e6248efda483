"""Check a machine with a GPU: exactness, several ranks on one device, speed, and the largest images.

Needs only torch, mpi4py and an `mpiexec` (streamed tiles also need greenlet). Without a GPU it prints a message and
ends.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from mpi4dl_nb.engines.bench.measure import run_in_subprocess
from mpi4dl_nb.engines.cli import options
from mpi4dl_nb.engines.comm.device import has_own_memory
from mpi4dl_nb.engines.comm.streams import measure_seconds
from mpi4dl_nb.engines.errors import PlanError

LINK_BYTES, LINK_TIMES = 1 << 26, 15

_RESNET = "--model mpi4dl_nb:resnet20_v1"
_AMOEBANET = "--model amoebanet --num-filters 214"
_ONE = "--split-size 1 --spatial-size 0"
_TILES = "--image-size 1024 --split-size 1"
_LARGEST = "bench largest --precision bfloat16 --memory-mb 1000000 --step-px 256 --image-size 2048"
_COMMANDS = {  # the number of ranks, and the command
    "exact, ResNet-20 v1, 2x2 tiles": f"5 verify {_RESNET} --image-size 128",
    "exact, ResNet-110 v2, 2x3 tiles": "7 verify --image-size 100x132 --slice-method 2x3",
    "exact, U-Net tiled to its loss": "4 verify --model mpi4dl_nb:UNet --image-size 128 --split-size 1",
    "exact, 1F1B behind tiles": (
        f"4 verify {_RESNET} --image-size 64 --split-size 3 --slice-method 1x2 --parts 4 --batch-size 4 --schedule 1f1b"
    ),
    "exact, both ways, two replicas, fused halos": (
        f"6 verify {_RESNET} --image-size 64 --slice-method 1x2 --bidirectional --data-parallel 2 --halo-d2 "
        "--fused-layers 2 --checkpoint-activations"
    ),
    "exact, shared batch, zero bubble": (
        f"5 verify {_RESNET} --image-size 64 --split-size 3 --num-spatial-parts 1 --parts 2 --local-dp 2 "
        "--batch-size 4 --schedule zero_bubble"
    ),
    "exact, activations on the host": (
        f"5 verify {_RESNET} --image-size 128 --parts 2 --batch-size 4 --offload-activations"
    ),
    "exact, compiled segments": f"5 verify {_RESNET} --image-size 64 --overlap-halos --compile-segments",
    "bfloat16, ResNet-20 v1": f"5 verify {_RESNET} --image-size 128 --precision bfloat16",
    "float16, ResNet-20 v1": f"5 verify {_RESNET} --image-size 128 --precision float16",
    "float32, ResNet-110 v2": "5 verify --image-size 256 --dtype float32",
    "memory, ResNet-110 v2, 512 px, 2x2 tiles": "4 bench memory --image-size 512 --split-size 1",
    "speed, bfloat16, 4 micro-batches, 2 stages": (
        "2 bench step --image-size 512 --spatial-size 0 --parts 4 --batch-size 4 --precision bfloat16 --schedule 1f1b"
    ),
    "speed, ResNet-110 v2, 512 px": "5 bench step --image-size 512 --iterations 5",
    "speed, 1 rank, 512 px": f"1 bench step --image-size 512 --iterations 9 {_ONE}",
    "speed, 1 rank, 2,048 px, bfloat16": f"1 bench step --image-size 2048 --iterations 5 --precision bfloat16 {_ONE}",
    "speed, 2x2 tiles, 1,024 px, D1": f"4 bench step {_TILES}",
    "speed, 2x2 tiles, 1,024 px, D2": f"4 bench step {_TILES} --halo-d2 --fused-layers 2",
    "speed, 2x2 tiles, 1,024 px, overlapped": f"4 bench step {_TILES} --overlap-halos",
    "compiled segments, ResNet-110 v2, 512 px": f"1 bench compiled --image-size 512 {_ONE}",
    "compiled segments, ResNet-110 v2, 2,048 px, bfloat16": (
        f"1 bench compiled --image-size 2048 --precision bfloat16 {_ONE}"
    ),
    "halos, 4 strips of 64 channels, 4,096 px": (
        "4 bench halo --image-size 4096 --in-channels 64 --num-spatial-parts 4 --slice-method vertical --iterations 30"
    ),
    "largest image, ResNet-110 v2, plain": f"1 {_LARGEST} --way plain {_ONE}",
    "largest image, ResNet-110 v2, again": f"1 {_LARGEST} --way again {_ONE}",
    "largest image, ResNet-110 v2, in turn": f"1 {_LARGEST} --way in-turn --split-size 1 --slice-method 8x1",
    "largest image, AmoebaNet-D 214, plain": f"1 {_LARGEST} {_AMOEBANET} --way plain {_ONE}",
    "largest image, AmoebaNet-D 214, again": f"1 {_LARGEST} {_AMOEBANET} --way again {_ONE}",
}
CHECKS: Mapping[str, tuple[int, Sequence[str]]] = {
    name: (int(ranks), words) for name, (ranks, *words) in ((name, row.split()) for name, row in _COMMANDS.items())
}
"""Number of ranks and command by name. In speed checks, `of_limit` / `ratio` is the share of convolutions."""


def run_gpu_checks(arguments: Sequence[str] = ()) -> int:
    """Run the checks on this machine's GPU; return 0 if all succeed.

    Print the result of each check when it is done, then all results as JSON. Raises PlanError if no check is named so.
    """
    flags = options.FlagParser("gpu-check", description=__doc__.splitlines()[0])
    flags.add_argument("--only", default="", help="run the checks whose names begin with this text")
    flags.add_argument(
        "--timeout", type=options.parse_positive, default=900, help="time limit of each check in seconds"
    )
    chosen = flags.parse_args(arguments)
    names = [name for name in ("link", *CHECKS) if name.startswith(chosen.only)]
    if not names:
        raise PlanError(f"No check begins with {chosen.only}. There are link, {', '.join(CHECKS)}.")
    if not torch.cuda.is_available():
        print("There is no GPU that torch can use here: nothing to check.")
        return 0
    results = {}
    for name in names:
        if name == "link":  # in a process of its own, whose end frees its memory for the other checks
            results[name] = run_in_subprocess("mpi4dl_nb.engines.bench.gpu_check:print_link_speeds", [])
        elif "in-turn" in CHECKS[name][1] and not find_spec("greenlet"):
            results[name] = {"skipped": "tiles in turn need greenlet"}
        else:
            results[name] = _run_command(*CHECKS[name], chosen.timeout)
        facts = ", ".join(f"{key} {value}" for key, value in results[name].items())
        print(f"{name:42} {facts}", flush=True)
    print(json.dumps({"device": torch.cuda.get_device_name(), **results}))
    return 1 if any("error" in result or not result.get("ok", True) for result in results.values()) else 0


def print_link_speeds(_: Sequence[str]) -> None:
    """Print `measure_link_speeds` of this machine's first GPU."""
    print(json.dumps(measure_link_speeds(torch.device("cuda", 0))))


def measure_link_speeds(device: torch.device) -> dict[str, object]:
    """Return the bytes per second between a device and pinned host memory, both ways: the bound of staged halos."""
    there = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=has_own_memory(device))
    speeds: dict[str, object] = {}
    for name, into, of in (("to_host_bytes_per_s", here, there), ("to_device_bytes_per_s", there, here)):
        copy = partial(into.copy_, of, non_blocking=True)
        speeds[name] = LINK_BYTES / statistics.median(measure_seconds(copy, device) for _ in range(LINK_TIMES))
    return speeds


def _run_command(ranks: int, arguments: Sequence[str], timeout_s: float) -> dict[str, object]:
    try:
        done = launch(ranks, ["-m", "mpi4dl_nb.engines", *arguments, "--device", "cuda"], timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {timeout_s:g} s"}
    if done.returncode == 2 or not done.stdout.strip():
        return {"error": find_cause(done.stderr)}
    return json.loads(done.stdout.strip().splitlines()[-1])


def find_cause(stderr: str) -> str:
    """Return the ranks' last lines before mpiexec's own notices, which begin with a row of dashes.

    >>> find_cause("Traceback ...\\nValueError: eps must be positive\\n------\\nprterun has exited ...\\n\\0")
    'Traceback ...\\nValueError: eps must be positive'
    """
    text = stderr.replace("\0", "").strip()
    by_ranks = re.split(r"^-{5,}$", text, maxsplit=1, flags=re.MULTILINE)[0].strip()
    return (by_ranks or text)[-400:]


def launch(ranks: int, arguments: Sequence[str], timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    """Run `mpiexec -n RANKS python -m mpi4py ARGUMENTS`, with the environment that Open MPI needs."""
    beside = Path(sys.prefix) / "bin" / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"
    # More ranks than cores: Open MPI refuses to start them otherwise, and several ranks share one GPU here.
    environment = {**os.environ, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py", *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as process:
        try:
            output = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpiexec then ends its ranks
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=20.0)
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, *output)
