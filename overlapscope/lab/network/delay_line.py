"""Network delay: a process that carries packets between network namespaces after a fixed delay.

    python -m overlapscope.lab.network.delay_line --delay-ms 2.5 --interface eth0 NAMESPACE NAMESPACE...

It replaces ``tc netem``, which many kernels lack. Every namespace gets a TUN device; packets sent into it are read
here, held until they are due, and written to the device of the namespace they are addressed to: 10.0.0.1 is the first
one's, 10.0.0.2 the second one's. The devices read and write segments of up to 64 KB as the kernel's TCP makes them, so
packets are seldom as small as those on a wire: 1 Gbit/s in both directions at once takes a third of a core or less;
faster links have not been tried. To limit the rate, put a ``tc tbf`` on the devices.

It runs with real-time priority where permitted, because a network does not wait for a processor. It prints "ready", and
exits when its standard input is closed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

# linux/if_tun.h
_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_CLONE_NEWNET: Final = 0x40000000

_OFFLOAD_HEADER_BYTES: Final = 10
"""Size of struct virtio_net_hdr, which precedes every packet and says how to cut a segment into packets. Passed on
unchanged."""
_IPV4_VERSION_AT: Final = _OFFLOAD_HEADER_BYTES
_LAST_BYTE_OF_DESTINATION_AT: Final = _OFFLOAD_HEADER_BYTES + 19
_MOST_BYTES: Final = _OFFLOAD_HEADER_BYTES + 65535
_MAX_PACKETS_PER_READ: Final = 16
"""Maximum number of packets read from one device before the others are served."""


def open_device(namespace: str, interface: str) -> int:
    """Make a TUN device in a namespace. It exists until the file is closed.

    Returns:
        File descriptor from which its packets are read and to which they are written; neither blocks.
    """
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        _enter_namespace(f"/run/netns/{namespace}")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), flags))
        fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
        return device
    finally:
        _enter_namespace(f"/proc/self/fd/{own}")
        os.close(own)


def carry_packets(devices: Sequence[int], delay_ns: int, until: int) -> None:
    """Carry packets until the writer of ``until`` closes it. Packets without a destination here are dropped."""
    on_the_way: deque[tuple[int, int, bytes]] = deque()  # due, to, packet: all have the same delay
    while True:
        wait_s = max(0, on_the_way[0][0] - time.monotonic_ns()) / 1e9 if on_the_way else None
        readable, _, _ = select.select([*devices, until], [], [], wait_s)
        if until in readable:
            return
        for device in readable:
            for packet in _read_packets(device):
                destination = packet[_LAST_BYTE_OF_DESTINATION_AT] - 1
                if packet[_IPV4_VERSION_AT] >> 4 == 4 and destination < len(devices):
                    on_the_way.append((time.monotonic_ns() + delay_ns, devices[destination], packet))
        while on_the_way and on_the_way[0][0] <= time.monotonic_ns():
            _, device, packet = on_the_way.popleft()
            with contextlib.suppress(OSError):  # its interface is not up: lost, as on any network
                os.write(device, packet)


def _read_packets(device: int) -> list[bytes]:
    packets: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while len(packets) < _MAX_PACKETS_PER_READ:
            packets.append(os.read(device, _MOST_BYTES))
    return packets


def _enter_namespace(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"{namespace}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    """Carry packets as the command line says, until standard input is closed."""
    parser = argparse.ArgumentParser(
        prog="python -m overlapscope.lab.network.delay_line",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("namespaces", nargs="+", metavar="NAMESPACE")
    parser.add_argument("--delay-ms", type=float, required=True, help="of every packet, one way")
    parser.add_argument("--interface", default="eth0", help="name of the devices (default: eth0)")
    args = parser.parse_args()
    # The parent process closes our input at the end, also after Ctrl-C, which reaches this process too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    devices = [open_device(namespace, args.interface) for namespace in args.namespaces]
    print("ready", flush=True)
    carry_packets(devices, round(args.delay_ms * 1e6), until=sys.stdin.fileno())


if __name__ == "__main__":
    main()
