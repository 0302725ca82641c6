"""A network cable in user space, of a chosen rate and delay, on any Linux.

Makes two TUN devices and carries the packets of each to the other. Each direction has a wire of
its own: a packet leaves when the one before it has left, takes its bits divided by the rate, and
arrives after the delay. `make hosts` puts the devices into the network namespaces of its two hosts.

    python tools/link.py 1gbit 0.2ms              (only says whether these can be read)
    python tools/link.py 1gbit 0.2ms host0 host1  (says "ready", runs until it is ended)

Nothing is dropped: while more than BACKLOG waits for a wire, the sending device is not read, its
queue grows, and TCP waits for its acknowledgements. As from a network card with TSO, a "packet" is
up to 64 KB of TCP's data, without checksums: few and cheap enough for Python. The rate counts
their bytes, not the Ethernet headers of a real network. The devices live as long as this process.

Source: Documentation/networking/tuntap.rst of Linux, linux/virtio_net.h.
"""

import fcntl
import os
import re
import select
import signal
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# From linux/if_tun.h: IP packets, nothing before them but the header that describes an offload.
TUNSETIFF, IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x400454CA, 0x0001, 0x1000, 0x4000
TUNSETOFFLOAD, TUN_F_CSUM, TUN_F_TSO4 = 0x400454D0, 0x01, 0x02
HEADER = 10  # bytes of struct virtio_net_hdr; the other device gets it as it came
LARGEST_PACKET = HEADER + 65_535  # bytes
BACKLOG = 0.005  # seconds that a wire needs for what has been read and not yet sent
LATE = 50e-6  # seconds by which this process wakes up late, for a packet and for its arrival

RATES = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}  # in bytes per second
DELAYS = {"ms": 1e-3, "us": 1e-6}  # in seconds


def read_quantity(name: str, text: str, units: dict[str, float]) -> float:
    """Of 1gbit, 0.2ms, …; ValueError, with the name, for anything else."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-z]+)", text)
    if not match or match[2] not in units or float(match[1]) == 0:
        raise ValueError(f"{name}={text!r} is not a number above 0 in {' or '.join(units)}")
    return float(match[1]) * units[match[2]]


def open_tun(name: str) -> int:
    """Make a TUN device of this name, which lives as long as the file descriptor returned."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


@dataclass
class Direction:
    """One of the two wires, from one device to the other."""

    source: int
    sink: int
    free_at: float = 0.0  # when the last bit of what has been read leaves; time.monotonic()
    on_its_way: deque = field(default_factory=deque)  # (when it arrives, packet), in order


def forward(one: int, other: int, rate: float, delay: float) -> None:
    """Carry packets between two devices for ever: rate in bytes per second, delay in seconds."""
    wires = {one: Direction(one, other), other: Direction(other, one)}
    while True:
        now = time.monotonic()
        events = []  # when to look again
        for wire in wires.values():
            while wire.on_its_way and wire.on_its_way[0][0] <= now:
                with suppress(OSError):  # the other device is not up
                    os.write(wire.sink, wire.on_its_way.popleft()[1])
            if wire.on_its_way:
                events.append(wire.on_its_way[0][0])
            if wire.free_at > now + BACKLOG:
                events.append(wire.free_at - BACKLOG)
        readable = [wire.source for wire in wires.values() if wire.free_at <= now + BACKLOG]
        wait = max(0.0, min(events) - time.monotonic()) if events else None
        for source in select.select(readable, [], [], wait)[0]:
            wire = wires[source]
            packet = os.read(source, LARGEST_PACKET)
            wire.free_at = max(wire.free_at, time.monotonic()) + (len(packet) - HEADER) / rate
            wire.on_its_way.append((wire.free_at + delay - LATE, packet))


def main():
    try:
        rate = read_quantity("RATE", sys.argv[1], RATES)
        delay = read_quantity("DELAY", sys.argv[2], DELAYS)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if len(sys.argv) == 3:
        return
    try:
        one, other = (open_tun(name) for name in sys.argv[3:])
    except OSError as error:
        print(f"error: cannot make a network device with /dev/net/tun: {error}", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends at Ctrl-C without a word
    # A wire is punctual: wake up to the microsecond and, as root may, before those who compute.
    with suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1000")
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    forward(one, other, rate, delay)


if __name__ == "__main__":
    main()
