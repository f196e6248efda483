"""The hosts that a batch system has allocated to this job, read from the environment set by Slurm and PBS."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.errors import PlanError
from mpi4dl_nb.launch.hosts import Host, Hosts, read_hosts

__all__ = ["Allocation", "choose_hosts", "expand_nodes", "read_allocation"]

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_PARTS = re.compile(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Allocation:
    """The batch system ("Slurm", "PBS"), the job's id, and its hosts with their slots."""

    system: str
    job: str
    hosts: tuple[Host, ...]


def choose_hosts(wish: Any, several: bool) -> Hosts | None:
    """Return the hosts that the user names, else those of the batch job; None for this machine alone.

    A job with one host counts as this machine alone. Raises PlanError, also if hosts are named but ranks cannot run on
    `several` hosts.
    """
    if named := read_hosts(wish):
        if not several:
            raise PlanError(f"hosts={wish!r} needs backend='mpi': the threads of this process are all here.")
        return Hosts(named)
    job = read_allocation() if several else None
    if job is None or len(job.hosts) == 1:
        return None
    by_srun = job.system == "Slurm" and shutil.which("srun") is not None
    return Hosts(job.hosts, f"the hosts of {job.system} job {job.job},", by_srun)


def read_allocation(told: Mapping[str, str] = os.environ) -> Allocation | None:
    """Return this process's allocation; None outside of Slurm and PBS. Raises PlanError if it cannot be parsed.

    >>> read_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}).hosts
    (Host(name='n1', slots=4), Host(name='n2', slots=4))
    """
    if nodes := told.get("SLURM_JOB_NODELIST", told.get("SLURM_NODELIST", "")):
        names = expand_nodes(nodes)
        slots = _parse_slots(told, len(names))
        return Allocation("Slurm", told.get("SLURM_JOB_ID", "?"), tuple(map(Host, names, slots)))
    if path := told.get("PBS_NODEFILE", ""):
        try:
            lines = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
        except OSError as error:
            raise PlanError(f"PBS_NODEFILE={path} can't be read: {error}. Name the hosts: hosts=[...].") from error
        slots = {name: lines.count(name) for name in lines}
        return Allocation("PBS", told.get("PBS_JOBID", "?"), tuple(Host(*each) for each in slots.items()))
    return None


def _parse_slots(told: Mapping[str, str], hosts: int) -> list[int]:
    """Return the tasks per host from Slurm's short form `2(x3),1`; if no tasks were requested, its processors."""
    name = next((key for key in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE") if told.get(key)), None)
    if name is None:
        return [1] * hosts
    found = [_COUNT.fullmatch(part) for part in told[name].split(",")]
    if not all(found):
        raise PlanError(f"{name}={told[name]!r} is no list of counts such as 2(x3),1. Name the hosts: hosts=[...].")
    counts = [int(match[1]) for match in found for _ in range(int(match[2] or 1))]
    if len(counts) != hosts:
        raise PlanError(f"{name}={told[name]!r} tells of {len(counts)} hosts, but the job has {hosts}.")
    return counts


def expand_nodes(nodes: str) -> list[str]:
    """Expand Slurm's compact host list; each host once, in order. Raises PlanError if it is invalid.

    >>> expand_nodes("node[001-003,7],gpu1")
    ['node001', 'node002', 'node003', 'node7', 'gpu1']
    """
    parts = _split_nodes(nodes)
    if not all(parts):
        raise PlanError(f"{nodes!r} is no list of hosts such as node[001-003,7],gpu1. Name them: hosts=[...].")
    found = [name for part in parts for name in _expand_part(part, nodes)]
    return list(dict.fromkeys(found))


def _split_nodes(nodes: str) -> list[str]:
    """Split at commas outside of brackets; an empty part marks unbalanced brackets."""
    # "node[1-3,7],gpu1" has two parts, "node[1-3,7]" and "gpu1"; "node[1,[2]]" and "node]" have an empty one.
    parts, at = [], 0
    while at <= len(nodes):
        found = _PARTS.match(nodes, at)
        parts.append(found[0].strip() if "]" not in re.sub(r"\[[^\[\]]*\]", "", found[0]) else "")
        at = found.end()
        if at < len(nodes) and nodes[at] != ",":
            return [""]
        at += 1
    return parts


def _expand_part(part: str, nodes: str) -> Iterator[str]:
    """Expand `rack[1-2]node[3,5]` to all combinations, the last brackets varying fastest."""
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, tail = rest.partition("]")
    for piece in inside.split(","):
        found = _RANGE.fullmatch(piece.strip())
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise PlanError(
                f"{piece!r} in {nodes!r} is no number, nor a range that ascends. Name the hosts: hosts=[...]."
            )
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            for end in _expand_part(tail, nodes):
                yield f"{head}{number:0{len(found[1])}d}{end}"
