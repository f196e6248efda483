"""`python -m tests.hosts [--hosts 2]`: a training across hosts, of which one loses its network.

The hosts are network namespaces of this machine (tests/namespaces.py): root is needed, `ip` and `sshd`. Five ranks,
four tiles and a stage behind them, train on 1, 2, ... hosts: each time the training is held against one process. On all
of them, the link of the last host is then pulled in the middle of a training, `heal()` goes back to the others, and the
training goes on from its checkpoint. What is printed is JSON: for each number of hosts the seconds of a step, then how
many seconds passed until the notebook was told, and what. It ends with 1 if any of this was wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import torch
from torch import Tensor

from mpi4dl_nb import Cluster, Plan, Training
from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.train.oracle import ReferenceTraining, train_reference
from mpi4dl_nb.engines.train.recipe import sgd
from tests.namespaces import Namespaces, find_obstacle, open_namespaces

RANKS, STEPS, SHAPE = 5, 8, (2, 3, 32, 32)
PLAN = Plan(split_size=2, num_spatial_parts=4, slice_method="square", precision="float64")
DEADLINE_S, PULLED_AT = 10.0, 3

Batch = tuple[Tensor, Tensor]


def make_batches() -> list[Batch]:
    """The same ones each time."""
    random = torch.Generator().manual_seed(0)
    return [
        (torch.randn(SHAPE, generator=random), torch.randint(10, SHAPE[:1], generator=random)) for _ in range(STEPS)
    ]


def make_training(cluster: Cluster) -> Training:
    """A new one, with the same weights each time."""
    torch.manual_seed(0)
    return Training(resnet20_v1(), PLAN, cluster, SHAPE)


def compute_reference_losses() -> tuple[float, ...]:
    """The losses of one process."""
    torch.manual_seed(0)
    whole = [{"images": images, "labels": labels} for images, labels in make_batches()]
    alone = ReferenceTraining(resnet20_v1(), torch.nn.CrossEntropyLoss(), sgd, torch.float64)
    return train_reference(alone, whole).mean_losses


def is_close(found: Sequence[float], expected: Sequence[float]) -> bool:
    """But for the order of sums."""
    near = (abs(one - other) <= 1e-10 * abs(other) for one, other in zip(found, expected, strict=False))
    return len(found) == len(expected) and all(near)


def train(cluster: Cluster, expected: Sequence[float]) -> dict[str, object]:
    """A line about a training on the hosts that the cluster has: verified, and timed."""
    training = make_training(cluster)
    proof, losses, seconds = training.verify(), [], []
    for images, labels in make_batches():
        start_s = time.perf_counter()
        losses.append(training.step(images, labels))
        seconds.append(time.perf_counter() - start_s)
    return {
        "hosts": len(cluster.hosts.hosts),
        "ranks_on": sorted(cluster.call(_get_host_name)),
        "ok": bool(proof["ok"]) and is_close(losses, expected),
        "worst_rel": max(
            value for name, value in proof.items() if name.endswith("_rel") and name != "worst_parameter_rel"
        ),
        "step_s": round(statistics.median(seconds[1:]), 4),
    }


def pull(cluster: Cluster, hosts: Namespaces, expected: Sequence[float]) -> dict[str, object]:
    """A line about a training in which a host loses its network: when that was told, and how it went on."""
    training, saved = make_training(cluster), hosts.home / "saved"
    name, pulled_s = hosts.names[-1], []

    def cut() -> None:
        while training.steps < PULLED_AT:
            time.sleep(0.01)
        hosts.set_link(name, up=False)
        pulled_s.append(time.monotonic())

    Thread(target=cut, daemon=True).start()
    try:
        training.fit(make_batches(), save=saved, save_every=1, progress=False)
        said, noticed_s = "nothing", float("inf")
    except RankError as error:
        said, noticed_s = str(error), time.monotonic() - pulled_s[0]
    start_s = time.monotonic()
    cluster.heal()
    line = {"pulled": name, "noticed_s": round(noticed_s, 2), "said": said}
    line |= {"healed_s": round(time.monotonic() - start_s, 1), "ranks_on": sorted(cluster.call(_get_host_name))}
    resumed_at, losses = go_on(make_training(cluster), saved)
    right = is_close(losses, expected[resumed_at:]) and resumed_at >= PULLED_AT - 1  # it may have been saving
    named = f"its host {name}" in said and noticed_s < DEADLINE_S
    return {**line, "resumed_at": resumed_at, "ok": right and named and name not in line["ranks_on"]}


def go_on(training: Training, saved: Path) -> tuple[int, list[float]]:
    """From its last checkpoint to the end: the steps that it had, and the losses of the others."""
    resumed_at = training.load(saved)
    return resumed_at, [training.step(*batch) for batch in make_batches()[resumed_at:]]


def _get_host_name(host: object) -> str:
    import socket

    return socket.gethostname()


def list_processes_left(hosts: Namespaces, names: Sequence[str], within_s: float) -> list[str]:
    """What still runs on these hosts so long after the cluster's end."""
    until_s = time.monotonic() + within_s
    while (left := [str(p.cmdline()) for name in names for p in hosts.list_processes(name)]) and (
        time.monotonic() < until_s
    ):
        time.sleep(0.2)
    return left


def main(arguments: Sequence[str]) -> int:
    """0 if all went well, or nothing can be tried here."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--hosts", type=int, default=2)
    count = flags.parse_args(arguments).hosts
    if why := find_obstacle():
        print(json.dumps({"skipped": why}))
        return 0
    expected, lines = compute_reference_losses(), []

    def report_line(line: dict[str, object]) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)

    with open_namespaces(count) as hosts:
        for number in range(1, count + 1):
            start_s = time.monotonic()
            with Cluster(RANKS, hosts=hosts.names[:number]) as cluster:
                started_s = round(time.monotonic() - start_s, 1)
                report_line({**train(cluster, expected), "started_s": started_s})
                if number == count > 1:
                    report_line(pull(cluster, hosts, expected))
        hosts.set_link(hosts.names[-1], up=True)
        left = list_processes_left(hosts, hosts.names, 30.0)
        report_line({"left_behind": left, "ok": not left})
    return int(not all(line["ok"] for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
