"""The stop button of a real kernel, while its ranks are at work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty

import pytest
from jupyter_client.manager import KernelManager, start_new_kernel

START = """
import hashlib, os, time
from mpi4dl_nb import Cluster
cluster = Cluster(2).start()
def waits(host, note):
    if host.world.rank == 1:
        open(note, "w").close()
        while True:
            time.sleep(0.01)
    host.world.all_gather(None)
def deaf(host, note):
    if host.world.rank == 1:
        open(note, "w").close()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000_000)
    host.world.all_gather(None)
def meet(host):
    return host.world.all_gather(host.world.rank)
"""


class Kernel:
    """A kernel as its page sees it."""

    def __init__(self) -> None:
        self.manager: KernelManager
        self.manager, self.client = start_new_kernel()

    def run(self, code: str, stop_s: float = 0, note: Path | None = None, timeout_s: float = 60) -> tuple[str, float]:
        """What a cell printed, or the name of its error; and the seconds since the stop button was pressed.

        It is pressed so long after the cell has begun, or after the note is there.
        """
        # A kernel that stops on errors also refuses the cell after an interrupted one, if it comes at once.
        message = self.client.execute(code, stop_on_error=False)
        while note and not note.exists():
            time.sleep(0.05)
        if stop_s:
            time.sleep(stop_s)
            self.manager.interrupt_kernel()
        pressed_s = time.monotonic()
        reply = self._read_reply(message, timeout_s)
        took_s = time.monotonic() - pressed_s
        said = reply["ename"] if reply["status"] == "error" else "".join(self._read_printed(message))
        return said.strip(), took_s

    def _read_reply(self, message: str, timeout_s: float) -> dict[str, str]:
        while True:
            reply = self.client.get_shell_msg(timeout=timeout_s)
            if reply["parent_header"].get("msg_id") == message:
                return reply["content"]

    def _read_printed(self, message: str) -> Iterator[str]:
        while True:
            try:
                heard = self.client.get_iopub_msg(timeout=2)
            except Empty:
                return
            if heard["parent_header"].get("msg_id") != message:
                continue
            if heard["msg_type"] == "stream":
                yield heard["content"]["text"]
            if heard["content"].get("execution_state") == "idle":
                return


@pytest.fixture
def kernel():
    found = Kernel()
    try:
        yield found
    finally:
        found.run("cluster.stop()")
        found.client.stop_channels()
        found.manager.shutdown_kernel()


@pytest.mark.nightly
def test_the_stop_button_ends_a_step_and_a_second_press_ends_ranks_that_are_deaf(kernel, tmp_path):
    notes = [tmp_path / "waits", tmp_path / "deaf"]
    kernel.run(START)
    said, took_s = kernel.run(f"cluster.call(waits, {str(notes[0])!r})", 0.5, notes[0])
    assert said == "KeyboardInterrupt"
    assert took_s < 1
    assert kernel.run("print(cluster.call(meet), cluster.state)")[0] == "[[0, 1], [0, 1]] ready"

    # A rank in the midst of compiled code hears nothing: the cell ends all the same, and what comes next waits for it.
    said, took_s = kernel.run(f"cluster.call(deaf, {str(notes[1])!r})", 0.5, notes[1])
    assert said == "KeyboardInterrupt"
    assert took_s < 1.5
    said, took_s = kernel.run("cluster.call(meet)", 1.5)
    assert said == "KeyboardInterrupt"
    assert took_s < 4
    told = "try: cluster.call(meet)\nexcept Exception as error: print(error)"
    assert "Rank 1: its process was killed by SIGKILL" in kernel.run(told)[0]
    assert kernel.run("print(cluster.heal().call(meet))")[0] == "[[0, 1], [0, 1]]"
