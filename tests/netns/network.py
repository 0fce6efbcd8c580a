"""Hosts of their own network namespaces, joined by a hub in this process that can delay, lose and cut.

The hub holds one TAP device per host and passes frames on. It does what `tc netem` does on a bridge, and needs no
kernel module.
"""

import contextlib
import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Self

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
IFF_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
MAX_FRAME_BYTES = 65536
PORTS_AND_SEQUENCE = slice(34, 42)
"""Of TCP, behind the headers of Ethernet and IP."""
POLL_SECS = 0.05
DEVICE = "eth0"


def ip(*arguments: str) -> None:
    """Runs `ip`; its complaint is the error's text."""
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")


class Network:
    """`num_hosts` namespaces, numbered from 0. Use it as a context manager.

    Args:
        num_hosts: hosts.
        delay_secs: what each frame takes from host to host.
        loss: share of frames that vanish.

    Attributes:
        num_sent_in_vain: how often a host that is cut off has sent the same part of a connection at most.
        joined_at: time.monotonic(), which all hosts of a machine share, just before a cut ended.
    """

    def __init__(self, num_hosts: int, delay_secs: float = 0.0, loss: float = 0.0) -> None:
        self.num_hosts = num_hosts
        self.delay_secs = delay_secs
        self.loss = loss
        self.num_sent_in_vain = 0
        self.joined_at = 0.0
        self._cut: frozenset[int] = frozenset()
        self._sent_in_vain: Counter[bytes] = Counter()
        self._random = random.Random(0)
        self._taps: list[int] = []
        self._namespaces: list[str] = []
        self._stopped = threading.Event()
        self._hub = threading.Thread(target=self._pass_frames, daemon=True)

    def address(self, host: int) -> str:
        """A host's address."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` as it runs on a host, whose processes share a /dev/shm that no other host has.

        They must descend from one command, since each has its own.
        """
        own_shared_memory = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self._namespaces[host], "sh", "-c", own_shared_memory, "sh", *command]

    def cut(self, *hosts: int) -> None:
        """From now on nothing reaches these hosts or leaves them; all others are joined again."""
        self._cut = frozenset(hosts)

    def __enter__(self) -> Self:
        try:
            for host in range(self.num_hosts):
                self._add_host(host)
        except OSError:
            self._remove_hosts()
            raise
        self._hub.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._hub.join()
        self._remove_hosts()

    def _add_host(self, host: int) -> None:
        namespace, tap = f"ep_a2a_{os.getpid()}_{host}", f"ep{os.getpid()}_{host}"
        ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        self._taps.append(os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        fcntl.ioctl(self._taps[-1], TUNSETIFF, struct.pack("16sH22x", tap.encode(), IFF_TAP_WITHOUT_HEADER))
        ip("link", "set", tap, "netns", namespace)
        ip("-n", namespace, "link", "set", tap, "name", DEVICE)
        ip("-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", DEVICE)
        for device in ("lo", DEVICE):
            ip("-n", namespace, "link", "set", device, "up")

    def _remove_hosts(self) -> None:
        for tap in self._taps:
            os.close(tap)
        for namespace in self._namespaces:
            ip("netns", "delete", namespace)

    def _pass_frames(self) -> None:
        # All frames take equally long, so they leave in the order in which they came.
        waiting: deque[tuple[float, int, bytes]] = deque()
        while not self._stopped.is_set():
            until_next = waiting[0][0] - time.monotonic() if waiting else POLL_SECS
            ready = select.select(self._taps, [], [], min(max(until_next, 0.0), POLL_SECS))[0]
            for source in map(self._taps.index, ready):
                frame = os.read(self._taps[source], MAX_FRAME_BYTES)
                if source in self._cut:
                    part = frame[PORTS_AND_SEQUENCE]
                    self._sent_in_vain[part] += 1
                    self.num_sent_in_vain = max(self.num_sent_in_vain, self._sent_in_vain[part])
                due = time.monotonic() + self.delay_secs
                waiting.extend((due, target, frame) for target in range(self.num_hosts) if self._passes(source, target))
            while waiting and waiting[0][0] <= time.monotonic():
                _, target, frame = waiting.popleft()
                self._write(target, frame)

    def _write(self, target: int, frame: bytes) -> None:
        # a full queue loses frames, as everywhere
        with contextlib.suppress(BlockingIOError):
            os.write(self._taps[target], frame)

    def _passes(self, source: int, target: int) -> bool:
        if source == target or self._cut & {source, target}:
            return False
        return self._random.random() >= self.loss
