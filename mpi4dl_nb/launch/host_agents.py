"""The notebook's side of the host agents: what the hosts have, whether they are alike, and whether they answer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

from mpi4dl_nb.engines.errors import RankError
from mpi4dl_nb.launch import host_agent
from mpi4dl_nb.launch.reaper_process import get_pipe

SILENT_S = 4.0  # a host that is silent for longer is lost
_BEAT_S, _LOOK_S, _REPLY_S, _LEAVE_S = 0.5, 0.02, 25.0, 5.0
_REMOTE_SILENCE_S = 20.0  # an agent without messages for this long ends the ranks on its host
BOOT = "import json; exec(compile(json.loads(open(0, 'rb', buffering=0, closefd=False).readline()), 'agent', 'exec'))"

# Patterns in the output of ssh, with their meaning and a remedy.
_CAUSES = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key is not the one known here. If that is in order, forget "
    "the old one: ssh-keygen -R {host}",
    "Host key verification failed": "its host key is unknown here. Log in once by hand, compare the key and accept "
    "it: ssh {host}",
    "Permission denied|Too many authentication": "ssh does not log in there without a password. Give it a key: "
    "ssh-copy-id {host}",
    "Could not resolve hostname": "ssh finds no address for it. Is it spelled right?",
    "Connection refused": "it is there, but no ssh server listens. Start sshd there, or name its port in ~/.ssh/config",
    "timed out|No route to host|unreachable": "it can't be reached. Is it on, and is no firewall between?",
    "not found|No such file|can't execute|cannot execute": "there is no {python}. Install mpi4dl_nb there in the same "
    "place as here",
    "Unable to create step|Invalid node name|not in this job|Invalid job id": "Slurm starts nothing there. Is it one "
    "of the job's hosts, and is the job still running?",
}


# What passes between the notebook and an agent, line by line, over ssh's own input and output. No port is opened, and
# the file of keys never travels in the clear.
#
#     notebook                                        agent on a host
#     the text of host_agent.py             ──>       compiled and run (BOOT)
#     tell: folder, mpiexec, ranks          ──>
#                                           <──       sent: versions, network, cores; its folders
#     arm: keys, variables, the controller  ──>
#                                           <──       unreachable: "", or why
#     beat, every half second               ──>
#                                           <──       beat
#     (end of input, or silence)                      end the ranks left here, remove the folders


class HostAgent:
    """Connection to the agent process on one host, with the latest replies."""

    def __init__(self, host: str, command: list[str], error_log: Path) -> None:
        self.host, self._error_log = host, error_log
        with error_log.open("wb") as errors:
            # In a session of its own, so that it is not interrupted together with the notebook.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
        self.orders = get_pipe(self.process.stdin)
        self.replied_s, self.replies = time.monotonic(), dict[str, Any]()
        self._send(Path(host_agent.__file__).read_text(encoding="utf-8"))
        self._reader = Thread(target=self._read_replies, name=f"host agent {host}", daemon=True)
        self._reader.start()

    def _read_replies(self) -> None:
        with get_pipe(self.process.stdout) as lines:
            for line in lines:
                with suppress(ValueError, TypeError):  # a greeting of the shell
                    self.replies |= json.loads(line)
                    self.replied_s = time.monotonic()

    def _send(self, what: object) -> None:
        with suppress(OSError, ValueError):  # the agent is gone, which shows when its reply does not come
            self.orders.write(json.dumps(what).encode() + b"\n")
            self.orders.flush()

    def send_request(self, do: str, **what: Any) -> None:
        """Send a request; the reply arrives asynchronously."""
        self._send({"do": do, **what})

    def wait_for_reply(self, key: str, until_s: float) -> Any:
        """Wait for a reply. Raises RankError, with the reason, if there is none in time."""
        while key not in self.replies:
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise RankError(f"The host {self.host} can't be used: {self._describe_failure()}.")
            time.sleep(_LOOK_S)
        return self.replies[key]

    def _describe_failure(self) -> str:
        output = self._error_log.read_text(encoding="utf-8", errors="replace")
        code = self.process.poll()
        if code is None:
            return f"it has not answered within {_REPLY_S:.0f} s" + _quote(output)
        for pattern, meaning in _CAUSES.items():
            if re.search(pattern, output):
                return meaning.format(host=self.host, python=sys.executable) + _quote(output)
        return f"what was started there has ended with code {code}" + _quote(output)

    def end(self, until_s: float) -> None:
        """Wait until the agent has exited; kill its connection if that takes too long."""
        try:
            self.process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(_LEAVE_S)


class HostAgents:
    """The agents on all hosts of a cluster. They receive heartbeats until `close`."""

    def __init__(self, commands: Mapping[str, list[str]], home: str) -> None:
        self.agents: dict[str, HostAgent] = {}
        self._closed, self._beats = Event(), 0
        for index, (host, command) in enumerate(commands.items()):
            self.agents[host] = HostAgent(host, command, Path(home, f"host-agent-{index}.log"))

    def collect_facts(
        self, towards: Mapping[str, str], ranks: Mapping[str, int], folder: str, mpiexec: str
    ) -> dict[str, dict[str, Any]]:
        """Return the facts of all hosts (`host_agent.collect_facts`). Raises RankError if one is silent or differs."""
        until_s = time.monotonic() + _REPLY_S
        # By this connection: a command line would show them to all users of the host.
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        for host, agent in self.agents.items():
            details = {"towards": towards[host], "ranks": ranks[host], "paths": paths}
            agent.send_request("tell", folder=folder, mpiexec=mpiexec, silence_s=_REMOTE_SILENCE_S, **details)
        versions = host_agent.collect_versions(mpiexec)
        replies = {host: agent.wait_for_reply("facts", until_s) for host, agent in self.agents.items()}
        for host, facts in replies.items():
            check_alike(host, facts, versions, folder)
        Thread(target=self._send_heartbeats, name="heartbeats of host agents", daemon=True).start()
        return replies

    def get_folders(self, host: str) -> tuple[str, str]:
        """Return the cluster's folders on a host: for its files, and for shared memory."""
        return self.agents[host].replies["home"], self.agents[host].replies["memory"]

    def send_files(self, files: Mapping[str, Mapping[str, str]], controller: tuple[str, int]) -> None:
        """Send each host its files, by name. Raises RankError if one cannot reach the controller."""
        until_s = time.monotonic() + _REPLY_S
        for host, agent in self.agents.items():
            agent.send_request("arm", files=dict(files[host]), controller=controller)
        for host, agent in self.agents.items():
            if why := agent.wait_for_reply("unreachable", until_s):
                raise RankError(
                    f"The host {host} can't connect to this machine at {controller[0]}, port {controller[1]}: {why}. "
                    "Let the firewall pass connections between the hosts: MPI needs them too."
                )

    def _send_heartbeats(self) -> None:
        """Send heartbeats. If this process itself was suspended, the delay does not count as silence of the hosts."""
        last_s = time.monotonic()
        while not self._closed.wait(_BEAT_S):
            suspended_s, last_s = time.monotonic() - last_s - _BEAT_S, time.monotonic()
            self._beats += 1
            for agent in self.agents.values():
                agent.replied_s += suspended_s if suspended_s > _BEAT_S else 0.0
                agent.send_request("beat", beat=self._beats)

    def find_silent_hosts(self) -> dict[str, float]:
        """Return the hosts that do not answer, with the seconds since their last reply."""
        now_s, silent = time.monotonic(), {}
        for host, agent in self.agents.items():
            if (quiet_s := now_s - agent.replied_s) > SILENT_S or agent.process.poll() is not None:
                silent[host] = quiet_s
        return silent

    def close(self) -> None:
        """Make all agents exit; kill the connections of those that do not answer."""
        self._closed.set()
        for host, agent in self.agents.items():
            if host in self.find_silent_hosts():
                agent.process.kill()
            with suppress(OSError):  # the agent is gone already
                agent.orders.close()  # on this it cleans up and exits
        until_s = time.monotonic() + _LEAVE_S
        for agent in self.agents.values():
            agent.end(until_s)


def _quote(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip(" @\n")]
    return f" ({' / '.join(lines[-3:])})" if lines else ""


def check_alike(host: str, facts: Mapping[str, Any], own: Mapping[str, Any], folder: str) -> None:
    there = ((name, facts["versions"].get(name), version) for name, version in own.items())
    other = [f"{name} {its or 'not at all'} (here: {version})" for name, its, version in there if its != version]
    if other:
        raise RankError(
            f"The host {host} is not like this one: it has {'; '.join(other)}. Install the same there, "
            f"for {sys.executable}."
        )
    if not facts["has_folder"]:
        raise RankError(
            f"The host {host} has no folder {folder}, where this notebook works. Make it there, share it, or start "
            "the notebook in a folder that all hosts have."
        )
