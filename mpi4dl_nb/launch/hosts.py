"""Which ranks run on which host: parsed from the user's input, checked, and assigned. No host is contacted here."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any

from engines.errors import PlanError, RankError
from engines.images.regular_file import read_bounded

_NAME = re.compile(r"(?:[\w.-]+@)?\w[\w.-]*")
_LINE = re.compile(r"(?P<name>\S+?)(?::(?P<short>\S*)|\s+slots\s*=\s*(?P<slots>\S+))?(?:\s+max[_-]slots\s*=\s*\d+)?")


@dataclass(frozen=True)
class Host:
    """A host name that `ssh` understands, and its number of ranks (`slots`; None: an even share)."""

    name: str
    slots: int | None = None

    def __str__(self) -> str:
        return self.name if self.slots is None else f"{self.name}:{self.slots}"


@dataclass(frozen=True)
class HostRanks:
    """A host and its ranks."""

    name: str
    ranks: range

    def __str__(self) -> str:
        return f"{self.name} ({format_ranks(self.ranks)})"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> format_ranks(range(3)), format_ranks([4])
    ('ranks 0, 1, 2', 'rank 4')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def read_hosts(wish: Iterable[str] | Mapping[str, int] | str | PathLike[str] | None) -> tuple[Host, ...]:
    """Parse a list of `"name"` or `"name:slots"`, a dict of slots by name, or the path of an MPI hostfile.

    Raises PlanError on anything else, on an empty list, on duplicate names, and on slots below 1.

    >>> read_hosts(["node1", "node2:3"])
    (Host(name='node1', slots=None), Host(name='node2', slots=3))
    """
    if wish is None:
        return ()
    if isinstance(wish, str | PathLike):
        try:
            lines = read_bounded(Path(wish)).decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                f"hosts={str(Path(wish))!r} is no hostfile that can be read ({error}). "
                "A list of names goes as hosts=[...]."
            ) from error
        found = [_parse_host(text) for line in lines if (text := line.split("#")[0].strip())]
    elif isinstance(wish, Mapping):
        found = [_make_host(name, name, slots) for name, slots in wish.items()]
    elif isinstance(wish, Iterable):
        found = [_parse_host(text) for text in wish]
    else:
        raise PlanError(f"hosts={wish!r} must be a list of names, a dict of slots by name, or a hostfile's path.")
    if not found:
        raise PlanError(f"hosts={wish!r} names no host. Leave it away to start the ranks on this machine.")
    names = [host.name for host in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise PlanError(f"hosts names {twice[0]!r} {names.count(twice[0])} times. Name it once, with its slots.")
    return tuple(found)


def _parse_host(text: Any) -> Host:
    if not isinstance(text, str) or not (found := _LINE.fullmatch(text.strip())):
        raise PlanError(f"The host {text!r} must be a name, or a name with its slots: 'node2:3'.")
    return _make_host(text, found["name"], found["short"] if found["short"] is not None else found["slots"])


def _make_host(entry: Any, name: Any, slots: Any) -> Host:
    """Return a checked host: a name that starts with a dash would be a flag of ssh."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PlanError(f"The host {entry!r} has no name that ssh could take: letters, digits, '.', '-' and '_'.")
    if slots is None:
        return Host(name)
    if isinstance(slots, bool) or not re.fullmatch("0*[1-9][0-9]*", str(slots)):
        raise PlanError(f"The host {name!r} has slots {slots!r}: they must be a whole number, 1 or more.")
    return Host(name, int(slots))


@dataclass(frozen=True)
class Hosts:
    """Hosts in order. `whose` describes them in messages. `srun`: Slurm's job holds them, and srun starts the ranks."""

    hosts: tuple[Host, ...]
    whose: str = "hosts"
    srun: bool = False

    def __str__(self) -> str:
        return ", ".join(map(str, self.hosts))

    def exclude(self, names: Collection[str]) -> Hosts:
        """Return the remaining hosts. Raises RankError if there are none."""
        left = tuple(host for host in self.hosts if host.name not in names)
        if not left:
            raise RankError(f"None of {self.whose} {self} answers. Mend them, then call restart() on the cluster.")
        return replace(self, hosts=left)

    def assign_ranks(self, n: int) -> tuple[HostRanks, ...]:
        """Assign `n` ranks to the hosts in order: slots are filled, and hosts without slots share the rest evenly.

        A host without ranks is left out. Raises PlanError if there are more ranks than slots.

        >>> [str(share) for share in Hosts(read_hosts(["a", "b"])).assign_ranks(5)]
        ['a (ranks 0, 1, 2)', 'b (ranks 3, 4)']
        """
        fixed = sum(host.slots or 0 for host in self.hosts)
        others = sum(host.slots is None for host in self.hosts)
        if n > fixed and not others:
            raise PlanError(
                f"{n} ranks do not fit: {self.whose} {self} have {fixed} slots together. "
                "Give more slots or hosts, or start fewer ranks."
            )
        # 8 ranks on a, b:3, c: b has 3 slots, and the rest is shared evenly, the first hosts taking one more.
        #
        #     a      b:3    c
        #     0 1 2  3 4 5  6 7
        left, counts = n, []
        even, more = divmod(max(0, n - fixed), max(1, others))
        for host in self.hosts:
            if host.slots is None:
                counts.append(even + (more > 0))
                more -= 1
            else:
                counts.append(min(left, host.slots))
                left -= counts[-1]
        ends = accumulate(counts)
        return tuple(
            HostRanks(host.name, range(end - count, end))
            for host, count, end in zip(self.hosts, counts, ends, strict=True)
            if count
        )


# The hosts that a batch system has allocated to this job, read from the environment set by Slurm and PBS.


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


def read_allocation(variables: Mapping[str, str] = os.environ) -> Allocation | None:
    """Return this process's allocation; None outside of Slurm and PBS. Raises PlanError if it cannot be parsed.

    >>> read_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}).hosts
    (Host(name='n1', slots=4), Host(name='n2', slots=4))
    """
    if nodes := variables.get("SLURM_JOB_NODELIST", variables.get("SLURM_NODELIST", "")):
        names = expand_nodes(nodes)
        slots = _parse_slots(variables, len(names))
        return Allocation("Slurm", variables.get("SLURM_JOB_ID", "?"), tuple(map(Host, names, slots)))
    if path := variables.get("PBS_NODEFILE", ""):
        try:
            lines = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
        except OSError as error:
            raise PlanError(f"PBS_NODEFILE={path} can't be read: {error}. Name the hosts: hosts=[...].") from error
        slots = {name: lines.count(name) for name in lines}
        return Allocation("PBS", variables.get("PBS_JOBID", "?"), tuple(Host(*each) for each in slots.items()))
    return None


def _parse_slots(variables: Mapping[str, str], hosts: int) -> list[int]:
    """Return the tasks per host from Slurm's short form `2(x3),1`; if no tasks were requested, its processors."""
    name = next((key for key in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE") if variables.get(key)), None)
    if name is None:
        return [1] * hosts
    found = [_COUNT.fullmatch(part) for part in variables[name].split(",")]
    if not all(found):
        raise PlanError(
            f"{name}={variables[name]!r} is no list of counts such as 2(x3),1. Name the hosts: hosts=[...]."
        )
    counts = [int(match[1]) for match in found for _ in range(int(match[2] or 1))]
    if len(counts) != hosts:
        raise PlanError(f"{name}={variables[name]!r} is for {len(counts)} hosts, but the job has {hosts}.")
    return counts


def expand_nodes(nodes: str) -> list[str]:
    """Expand Slurm's compact host list; each host once, in order. Raises PlanError if it is invalid.

    >>> expand_nodes("node[001-003,7],gpu1")
    ['node001', 'node002', 'node003', 'node7', 'gpu1']
    """
    # Split at commas outside of brackets: "node[1-3,7],gpu1" has two parts, "node[1-3,7]" and "gpu1". Unbalanced
    # brackets, as of "node[1,[2]]" and "node]", leave an empty part.
    parts, at = list[str](), 0
    while at <= len(nodes):
        found = _PARTS.match(nodes, at)
        parts.append(found[0].strip() if "]" not in re.sub(r"\[[^\[\]]*\]", "", found[0]) else "")
        at = found.end()
        if at < len(nodes) and nodes[at] != ",":
            parts.append("")
            break
        at += 1
    if not all(parts):
        raise PlanError(f"{nodes!r} is no list of hosts such as node[001-003,7],gpu1. Name them: hosts=[...].")
    return list(dict.fromkeys(name for part in parts for name in _expand_part(part, nodes)))


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
