"""Close the ports of mpiexec once its ranks are connected: whoever reaches them could start programs as this user.

PMIx, by which ranks and mpiexec talk, listens on a port of this machine. It believes a process that connects which user
it belongs to, and starts programs for it. PRRTE, the runtime of Open MPI, listens for daemons of other hosts, of which
a cluster on one machine has none.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from contextlib import suppress

import psutil

_PIDFD_GETFD = 438  # the number of this system call on every processor
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # of classic BPF: return 0, which keeps nothing of a packet


def close_ports(process: psutil.Process) -> int:
    """Drop all packets of new connections to the ports of a process, and return how many ports it had.

    Connections that exist go on, and the process sees no difference. Does nothing where the system allows no access to
    the descriptors of another process (not Linux; some containers).
    """
    # The listening socket is shared with the other process for a moment, and a filter attached to it:
    #
    #     mpiexec   fd 14 ──┐
    #                       ├──> listening socket, whose filter drops each packet before a connection is made
    #     here      fd 9  ──┘
    if sys.platform != "linux":
        return 0
    library, count = ctypes.CDLL(None, use_errno=True), 0
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    attached = struct.pack("HP", 1, ctypes.addressof(program))
    with suppress(OSError, psutil.Error):
        handle = os.pidfd_open(process.pid)
        try:
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    descriptor = library.syscall(_PIDFD_GETFD, handle, connection.fd, 0)
                    if descriptor < 0:
                        break
                    with socket.socket(fileno=descriptor) as shared:
                        shared.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)
                        count += 1
        finally:
            os.close(handle)
    return count
