"""Which ranks run on which host: parsed from the user's input, checked, and assigned. No host is contacted here."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, chain, product
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

from mpi4dl_nb.engines.errors import PlanError, RankError
from mpi4dl_nb.engines.formatting import format_ranks
from mpi4dl_nb.engines.images.regular_file import read_bounded

# A name, or a user and a name. Neither begins with a dash, which ssh, srun and mpiexec would take for a flag. Nor is
# there a blank, a comma, a quote, a dollar sign or a NUL.
_NAME = re.compile(r"(?:\w[\w.-]*@)?\w[\w.-]*")
_NAME_LENGTH = 320  # 64 letters of a user, 253 of a name
_MOST_HOSTS = 1 << 16  # in a short list such as n[1-9]; Slurm itself expands no longer ones
_LINE = re.compile(r"(?P<name>\S+?)(?::(?P<short>\S*)|\s+slots\s*=\s*(?P<slots>\S+))?(?:\s+max[_-]slots\s*=\s*\d+)?")


@dataclass(frozen=True)
class Host:
    """A host name that `ssh` understands, and its number of ranks (`slots`; None: an even share).

    Raises PlanError for any other name, wherever it comes from: arguments, a hostfile, Slurm or PBS.
    """

    name: str
    slots: int | None = None

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise PlanError(
                f"The host {_shorten(self.name)} has no name that ssh could take: up to {_NAME_LENGTH} letters, "
                "digits, '.', '-' and '_', with or without 'user@' before it, and no '-' at the beginning of either."
            )

    def __str__(self) -> str:
        return self.name if self.slots is None else f"{self.name}:{self.slots}"


@dataclass(frozen=True)
class HostRanks:
    """A host and its ranks."""

    name: str
    ranks: range

    def __str__(self) -> str:
        return f"{self.name} ({format_ranks(self.ranks)})"


def _is_name(name: object) -> bool:
    return isinstance(name, str) and len(name) <= _NAME_LENGTH and _NAME.fullmatch(name) is not None


def _shorten(value: object) -> str:
    """Return a value of a user for a message, which is cut if it is long."""
    try:
        text = repr(value)
    except ValueError:  # a number with thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}... ({len(text):,} characters)"


def read_hosts(wish: Iterable[str] | Mapping[str, int] | str | PathLike[str] | None) -> tuple[Host, ...]:
    """Parse a list of `"name"` or `"name:slots"`, a dict of slots by name, or the path of an MPI hostfile.

    Raises PlanError on anything else, on an empty list, on duplicate names, and on slots below 1.

    >>> read_hosts(["node1", "node2:3"])
    (Host(name='node1', slots=None), Host(name='node2', slots=3))
    """
    if wish is None:
        return ()
    if isinstance(wish, str | PathLike):
        lines = _read_lines(wish, f"hosts={_shorten(os.fspath(wish))} is no hostfile that can be read")
        hosts = [_parse_host(text) for line in lines if (text := line.split("#")[0].strip())]
    elif isinstance(wish, Mapping):
        hosts = [_make_host(name, slots) for name, slots in wish.items()]
    elif isinstance(wish, Iterable):
        hosts = [_parse_host(text) for text in wish]
    else:
        raise PlanError(f"hosts={wish!r} must be a list of names, a dict of slots by name, or a hostfile's path.")
    if not hosts:
        raise PlanError(f"hosts={wish!r} names no host. Leave it away to start the ranks on this machine.")
    (name, times), *_ = Counter(host.name for host in hosts).most_common(1)
    if times > 1:
        raise PlanError(f"hosts names {name!r} {times} times. Name it once, with its slots.")
    return tuple(hosts)


def _read_lines(path: str | PathLike[str], what: str) -> list[str]:
    """Return the lines of a file of hosts. Raises PlanError, which begins with `what`, if it cannot be read."""
    try:
        return read_bounded(Path(path)).decode().splitlines()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or no UTF-8
        raise PlanError(f"{what} ({error}). A list of names goes as hosts=[...].") from error


def _parse_host(text: Any) -> Host:
    # The length first: a long line of colons would take time that grows with its square.
    if not isinstance(text, str) or len(text) > 2 * _NAME_LENGTH or not (match := _LINE.fullmatch(text.strip())):
        raise PlanError(f"The host {_shorten(text)} must be a name, or a name with its slots: 'node2:3'.")
    return _make_host(match["name"], match["short"] if match["short"] is not None else match["slots"])


def _make_host(name: Any, slots: Any) -> Host:
    host = Host(name)
    if slots is None:
        return host
    if isinstance(slots, bool) or not isinstance(slots, str | int) or not _is_count(slots):
        wrong = f"The host {name!r} has slots {_shorten(slots)}"
        raise PlanError(f"{wrong}: they must be a whole number from 1 to {_MOST_SLOTS:,}.")
    return Host(name, int(slots))


_MOST_SLOTS = 999_999


def _is_count(slots: str | int) -> bool:
    # Python converts numbers of at most 4300 digits: a text is measured first.
    if isinstance(slots, str):
        return re.fullmatch("0{0,9}[1-9][0-9]{0,5}", slots) is not None
    return 1 <= slots <= _MOST_SLOTS


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
        ['a (ranks 0 to 2)', 'b (ranks 3, 4)']
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
        shares = zip(self.hosts, counts, accumulate(counts), strict=True)
        return tuple(HostRanks(host.name, range(end - count, end)) for host, count, end in shares if count)


# The hosts that a batch system has allocated to this job, read from the environment set by Slurm and PBS.


_NUMBER = r"[0-9]{1,9}"
_COUNT = re.compile(rf"({_NUMBER})(?:\(x({_NUMBER})\))?")
_PARTS = re.compile(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*")
_RANGE = re.compile(rf"({_NUMBER})(?:-({_NUMBER}))?")


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
        lines = map(str.strip, _read_lines(path, f"PBS_NODEFILE={path} can't be read"))
        slots_of = Counter(filter(None, lines))  # a line for each slot
        return Allocation("PBS", variables.get("PBS_JOBID", "?"), tuple(Host(*pair) for pair in slots_of.items()))
    return None


def _parse_slots(variables: Mapping[str, str], hosts: int) -> list[int]:
    """Return the tasks per host from Slurm's short form `2(x3),1`; if no tasks were requested, its processors."""
    name = next((key for key in ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE") if variables.get(key)), None)
    if name is None:
        return [1] * hosts
    parts, setting = variables[name].split(","), f"{name}={_shorten(variables[name])}"
    matches = [match for match in map(_COUNT.fullmatch, parts) if match]
    if len(matches) < len(parts):
        raise PlanError(f"{setting} is no list of counts such as 2(x3),1. Name the hosts: hosts=[...].")
    times = [int(match[2] or 1) for match in matches]
    if sum(times) != hosts:  # before the list is written out, which may be long
        raise PlanError(f"{setting} is for {sum(times):,} hosts, but the job has {hosts:,}.")
    return [int(match[1]) for match, repeats in zip(matches, times, strict=True) for _ in range(repeats)]


def expand_nodes(nodes: str) -> list[str]:
    """Expand Slurm's compact host list; each host once, in order.

    Raises PlanError if it is invalid, or stands for more than 65,536 hosts.

    >>> expand_nodes("node[001-003,7],gpu1")
    ['node001', 'node002', 'node003', 'node7', 'gpu1']
    """
    # Split at commas outside of brackets: "node[1-3,7],gpu1" has two parts, "node[1-3,7]" and "gpu1". Unbalanced
    # brackets, as of "node[1,[2]]" and "node]", leave an empty part.
    parts, at = list[str](), 0
    while at <= len(nodes):
        part = next(_PARTS.finditer(nodes, at))[0]  # empty at least
        parts.append(part.strip() if "]" not in re.sub(r"\[[^\[\]]*\]", "", part) else "")
        at += len(part)
        if at < len(nodes) and nodes[at] != ",":
            parts.append("")
            break
        at += 1
    if not all(parts):
        raise PlanError(f"{_shorten(nodes)} is no list of hosts such as node[001-003,7],gpu1. Name them: hosts=[...].")
    # Count before anything is written out: each bracket multiplies the number of names.
    choices = [[_parse_ranges(piece, nodes) for piece in re.findall(r"\[[^\]]*\]|[^\[]+", part)] for part in parts]
    count = sum(prod(size for size, _ in part) for part in choices)
    if count > _MOST_HOSTS:
        problem = f"{_shorten(nodes)} stands for more than {_MOST_HOSTS:,} hosts"
        raise PlanError(f"{problem}. Name those that you need: hosts=[...].")
    names = chain.from_iterable(product(*(texts for _, texts in part)) for part in choices)
    return list(dict.fromkeys(map("".join, names)))


def _parse_ranges(piece: str, nodes: str) -> tuple[int, Iterable[str]]:
    """Return how many choices a piece of a host list has, `[3,5-7]` or plain text, and these, not yet written out."""
    if not piece.startswith("["):
        return 1, [piece]
    count, texts = 0, list[Iterable[str]]()
    for item in piece[1:-1].split(","):
        match = _RANGE.fullmatch(item.strip())
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise PlanError(
                f"{_shorten(item)} in {_shorten(nodes)} is no number of up to 9 digits, nor a range that ascends. Name "
                "the hosts: hosts=[...]."
            )
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1)
        count += len(numbers)
        texts.append(map(f"{{:0{len(match[1])}d}}".format, numbers))  # as wide as the first: 001-128
    return count, chain.from_iterable(texts)
