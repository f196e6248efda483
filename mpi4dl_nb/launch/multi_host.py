"""The ranks of a cluster over several hosts: everything that their start needs beyond a start on one machine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.localinterfaces import local_ips

from mpi4dl_nb.engines.comm.start import MPI_HOME, USER_HOME, add_variables, enter_folder
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.launch.host_agent import find_network, find_own_address, run_program
from mpi4dl_nb.launch.host_agents import BOOT, HostAgents
from mpi4dl_nb.launch.hosts import HostRanks, Hosts
from mpi4dl_nb.launch.mpi_library import find_mpiexec, make_mpi_environment
from mpi4dl_nb.launch.supervisor_reports import RankExit

# How to run a command on a host: by ssh, by Slurm's srun, or directly if the host is this machine.


# No prompts: nobody could answer them. A dead connection ends.
_SSH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
_SRUN = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--quiet")  # shares the resources of the job step
_ASK_S = 10.0
_VARIABLES = "variables.json"


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
        return [*self.agent, "--", host, f"exec {shlex.join(words)}"]

    def make_mpiexec_flags(self) -> list[str]:
        """Return flags that start MPI's daemons in the same way. By ssh, a batch job's own host list is ignored."""
        if self.srun:
            return ["--prtemca", "plm_slurm_args", "--overlap"]
        # No graphics (-x), which MPI would otherwise ask for behind the "--", where ssh would take it for the host.
        agent = shlex.join((*self.agent, "-x", "--"))
        return ["--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", agent, "--prtemca", "ras", "^slurm,pbs"]

    def resolve_addresses(self, hosts: Iterable[str]) -> dict[str, str]:
        """Return addresses by host. Raises PlanError if a host has no address, or if there is no ssh."""
        if not self.srun and not shutil.which(self.agent[0]):
            raise PlanError(f"There is no program {self.agent[0]!r} to reach hosts with. Install an ssh client.")
        addresses = {}
        for host in hosts:
            name = host if self.srun else self._resolve_host_name(host)
            try:
                addresses[host] = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
            except OSError as error:
                raise PlanError(
                    f"The host {host!r} has no address: {error.strerror or error}. Is it spelled right? A name of your "
                    "own goes into ~/.ssh/config (Host, HostName) or /etc/hosts."
                ) from error
        return addresses

    def _resolve_host_name(self, host: str) -> str:
        """Return the host name by the user's ssh configuration, which may define short names."""
        try:
            asked = run_program([*self.agent, "-G", "--", host], _ASK_S)
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


# Variables of this process that ranks on other hosts get. MPI forwards its own settings itself.
_FORWARDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "NVIDIA_TF32_OVERRIDE")
_FAMILIES = ("MALLOC_", "MPI4DL_NB_", "MPI4PY_", "NCCL_", "PYTORCH_", "TORCH_", "THP_")
# An unreachable MPI daemon is noticed after 6 + 3 s: later than SILENT_S, so that our error names its host first.
_ALIVE = {"oob_tcp_keepalive_time": 6, "oob_tcp_keepalive_intvl": 1, "oob_tcp_keepalive_probes": 3}


def select_environment(known: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that ranks on other hosts get, such as settings of torch and its libraries."""
    return {name: value for name, value in known.items() if name in _FORWARDED or name.startswith(_FAMILIES)}


@dataclass(frozen=True, slots=True)
class HostLost(RankExit):
    """End of a rank whose state is unknown, because its host does not answer."""

    host: str = ""
    silent_s: float = 0.0

    def __str__(self) -> str:
        return f"its host {self.host} has not answered for {self.silent_s} s: it is down, or its network is"


class MultiHost:
    """Starts `n` ranks on several hosts.

    Order of use: `prepare`, `send_files`, then mpiexec with `make_engine_flags`, and `close` in the end.
    """

    def __init__(self, n: int, hosts: Hosts) -> None:
        """Assign ranks to hosts. Raises PlanError, before any start, if they do not fit or a host has no address."""
        self.shares, self.reach = hosts.assign_ranks(n), RemoteShell(hosts.srun)
        self.addresses = self.reach.resolve_addresses(share.name for share in self.shares)
        self._home, self._agents = "", HostAgents({}, "")  # of no host until `prepare`
        self._facts: dict[str, dict[str, Any]] = {}

    @property
    def address(self) -> str:
        """The address of this machine on the route to the hosts: the only one on which the controller listens."""
        far = [address for address in self.addresses.values() if not is_local_address(address)]
        return (find_own_address(far[0]) if far else None) or "127.0.0.1"

    def make_controller_flags(self) -> list[str]:
        """Return flags of the controller: engines connect from the hosts, and the client from this machine."""
        addresses = {"engine_ip": self.address, "location": self.address, "client_ip": "127.0.0.1"}
        return [f"--IPController.{name}={address}" for name, address in addresses.items()]

    def prepare(self, home: str) -> None:
        """Check that all hosts answer and are alike. Raises RankError that names the host and a remedy."""
        words = [sys.executable, "-c", BOOT]
        # Jupyter reads this machine's addresses once in the life of a process. One that came later (a VPN, another
        # Wi-Fi) would be taken for another machine's, and the client would warn that it can't reach the controller.
        if self.address not in local_ips():
            local_ips().append(self.address)
        hosts = [share.name for share in self.shares]
        commands = {host: self.reach.make_command(host, self.addresses[host], words) for host in hosts}
        towards = {host: find_own_address(self.addresses[host]) or self.address for host in hosts}
        self._home, self._agents = home, HostAgents(commands, home)
        counts = {share.name: len(share.ranks) for share in self.shares}
        self._facts = self._agents.collect_facts(towards, counts, str(Path.cwd()), find_mpiexec())

    def send_files(self, file: str, port: int, cluster_id: str) -> None:
        """Send the hosts their files over the encrypted agent connections, never in the clear or on a command line.

        These are the engines' connection file, the variables of the host's ranks, and the mark of its folder.
        """
        keys = Path(file).read_text(encoding="utf-8")
        self._agents.send_files(
            {
                share.name: {
                    f"security/{Path(file).name}": keys,
                    _VARIABLES: json.dumps(self._make_variables(share, cluster_id)),
                    Path(self._home).name: "",
                }
                for share in self.shares
            },
            (self.address, port),
        )

    def _make_variables(self, share: HostRanks, cluster_id: str) -> dict[str, str | None]:
        """Return the variables of the ranks on a host. None unsets a variable."""
        home, memory = self._agents.get_folders(share.name)
        facts, count = self._facts[share.name], len(share.ranks)
        return {
            **select_environment(os.environ),
            **make_mpi_environment(count),
            "HOME": facts["home"],
            USER_HOME: None,
            MPI_HOME: home,
            "IPYTHONDIR": home,
            "TORCHINDUCTOR_CACHE_DIR": str(Path(home, "torchinductor")),
            "IPP_PROFILE_DIR": home,
            "IPP_CLUSTER_ID": cluster_id,
            "OMPI_MCA_btl_sm_backing_directory": memory,
            # The ranks share the cores of their own host, whatever this machine has.
            "OMP_NUM_THREADS": str(max(1, facts["cores"] // count)),
        }

    def make_engine_flags(self, program: Sequence[str]) -> list[str]:
        """Return the flags with which mpiexec runs `program`, the engine, on the hosts in each one's cluster folder."""
        flags = self.reach.make_mpiexec_flags()
        # On a host MPI's daemon, too, has its home and its files in the cluster's folder there.
        daemon = enter_folder(Path(self._home).name, ["prted"])
        flags += ["--prtemca", "prte_launch_agent", " ".join(daemon)]
        # Restrict MPI to the networks that lead to the hosts: others may have the same addresses on every host.
        known = {facts["network"] for facts in self._facts.values()} | {find_network(self.address)}
        known -= {"127.0.0.0/8"}
        if known and None not in known:
            networks = ",".join(sorted(filter(None, known)))
            if not any(name.startswith("OMPI_MCA_btl_tcp_if_") for name in os.environ):
                flags += ["--mca", "btl_tcp_if_include", networks]
            if not any(name.startswith(("PRTE_MCA_prte_if_", "PRTE_MCA_oob_tcp_if_")) for name in os.environ):
                flags += ["--prtemca", "prte_if_include", networks]
        for name, value in {"prte_local_tmpdir_base": self._home, **_ALIVE}.items():
            flags += ["--prtemca", name, str(value)]
        # One program after another, each with its own variables, but all in the same MPI_COMM_WORLD:
        #
        #     mpiexec ... -n 2 -H node1:2 start.py --with-file .../variables.json python ... : -n 1 -H node2:1 ...
        for index, share in enumerate(self.shares):
            count, (home, _) = len(share.ranks), self._agents.get_folders(share.name)
            flags += [":"] * (index > 0)
            flags += ["-n", str(count), "-H", f"{share.name}:{count}", "-wdir", str(Path.cwd())]
            flags += add_variables(str(Path(home, _VARIABLES)), program)
        return flags

    def find_lost_hosts(self) -> frozenset[str]:
        """Return the hosts that do not answer."""
        return frozenset(self._agents.find_silent_hosts())

    def find_lost_ranks(self) -> dict[int, RankExit]:
        """Return the ranks on hosts that do not answer."""
        silent = self._agents.find_silent_hosts()
        return {
            rank: HostLost(None, host=str(share), silent_s=round(silent[share.name], 1))
            for share in self.shares
            if share.name in silent
            for rank in share.ranks
        }

    def close(self) -> None:
        """End the agents, which remove everything from the hosts."""
        self._agents.close()
