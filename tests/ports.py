"""Free TCP ports of this host, for processes that meet at one."""

import contextlib
import random
import socket

PORTS = range(20000, 30000)
"""None that the system gives to connections: one of those can be taken again before its test listens."""
_given: set[int] = set()


def free_port(num_ports: int = 1) -> int:
    """The first of some free ports that follow each other. This process is given each port once."""
    chosen = random.SystemRandom()
    while True:
        first = chosen.randrange(PORTS.start, PORTS.stop, num_ports)
        ports = range(first, first + num_ports)
        if not _given.isdisjoint(ports):
            continue
        _given.update(ports)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
