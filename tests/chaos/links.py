"""Cut the connections of a process from outside, as a network or a firewall does: both ends see the end at once."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from contextlib import suppress

import psutil

_PIDFD_GETFD = 438  # of Linux on all machines; there is no function for it in the C library


def cut_connections(pid: int) -> int:
    """Shut down the TCP connections of a process, and return how many there were. Needs the right to trace it."""
    handle, library, count = os.pidfd_open(pid), ctypes.CDLL(None, use_errno=True), 0
    try:
        for link in psutil.Process(pid).net_connections("tcp"):
            if link.status != psutil.CONN_ESTABLISHED or link.fd < 0:
                continue
            # A copy of the process's own descriptor: what is shut down is the connection, not the copy.
            copy = library.syscall(_PIDFD_GETFD, handle, link.fd, 0)
            if copy < 0 and ctypes.get_errno() == errno.EBADF:  # closed meanwhile
                continue
            if copy < 0:
                raise PermissionError(ctypes.get_errno(), "pidfd_getfd")
            with socket.socket(fileno=copy) as connection, suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    finally:
        os.close(handle)
    return count
