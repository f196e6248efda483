"""How to run a command on a host: by ssh, by Slurm's srun, or directly if the host is this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engines.errors import PlanError

__all__ = ["RemoteShell", "is_local_address"]

# No prompts: nobody could answer them. A dead connection ends.
_SSH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
_SRUN = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--quiet")  # shares the resources of the job step
_ASK_S = 10.0


@dataclass(frozen=True)
class RemoteShell:
    """Runs commands by srun if Slurm's job holds the hosts, else by ssh or `MPI4DL_NB_SSH` (`ssh -F my_config`)."""

    srun: bool = False

    @property
    def agent(self) -> tuple[str, ...]:
        """The program that connects to a host by name, with its flags."""
        return (*shlex.split(os.environ.get("MPI4DL_NB_SSH", "ssh")), *_SSH)

    def make_command(self, host: str, address: str, words: Sequence[str]) -> list[str]:
        """Return the local command that runs `words` on the host."""
        if is_local_address(address):
            return list(words)
        if self.srun:
            return [*_SRUN, f"--nodelist={host}", *words]
        return [*self.agent, host, f"exec {shlex.join(words)}"]

    def make_mpiexec_flags(self) -> list[str]:
        """Return flags that start MPI's daemons in the same way. By ssh, a batch job's own host list is ignored."""
        if self.srun:
            return ["--prtemca", "plm_slurm_args", "--overlap"]
        ssh = ["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", shlex.join(self.agent)]
        return [*ssh, "--prtemca", "ras", "^slurm,pbs"]

    def resolve_addresses(self, hosts: Iterable[str]) -> dict[str, str]:
        """Return addresses by host. Raises PlanError if a host has no address, or if there is no ssh."""
        if not self.srun and not shutil.which(self.agent[0]):
            raise PlanError(f"There is no program {self.agent[0]!r} to reach hosts with. Install an ssh client.")
        found = {}
        for host in hosts:
            name = host if self.srun else self._resolve_host_name(host)
            try:
                found[host] = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
            except OSError as error:
                raise PlanError(
                    f"The host {host!r} has no address: {error.strerror or error}. Is it spelled right? A name of your "
                    "own goes into ~/.ssh/config (Host, HostName) or /etc/hosts."
                ) from error
        return found

    def _resolve_host_name(self, host: str) -> str:
        """Return the host name by the user's ssh configuration, which may define short names."""
        try:
            command, nothing = [*self.agent, "-G", host], subprocess.DEVNULL
            asked = subprocess.run(command, stdin=nothing, capture_output=True, text=True, timeout=_ASK_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return host.rpartition("@")[2]
        named = [line.split()[1] for line in asked.stdout.splitlines() if line.startswith("hostname ")]
        return named[0] if named and not asked.returncode else host.rpartition("@")[2]


def is_local_address(address: str) -> bool:
    """Return whether an address belongs to this machine: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True
