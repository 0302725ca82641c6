"""A cable between two hosts that Linux plays here: it carries packets at a rate, after a delay.

tools/hosts.sh starts it on host 1, with host 0's end as its standard input. Each end is a TUN
device: what a host's TCP sends there can be read here as packets, and what is written is received.

    cable.py RATE DELAY DILATION         (1gbit 1ms 4: a quarter of the rate, four times the delay)
"""

import os
import re
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000  # linux/if_tun.h
UNITS = {"mbit": 1e6 / 8, "gbit": 1e9 / 8, "ms": 1e-3, "us": 1e-6, "": 0.0}
QUEUE = 0.05  # seconds of bytes that wait for the cable; what comes on top is dropped


class Line:
    """One direction: bytes per second, seconds of one way, and what is under way."""

    def __init__(self, rate: float, delay: float, queue: float):
        self.rate, self.delay, self.queue = rate, delay, queue
        self.free_at = 0.0  # when the last byte so far has left
        self.packets = deque()  # (when it arrives, the packet)

    def send(self, packet: bytes, now: float) -> None:
        """Put a packet on the line, behind those that wait for it, or drop it."""
        begins = max(self.free_at, now)
        if begins - now <= self.queue:
            self.free_at = begins + len(packet) / self.rate
            self.packets.append((self.free_at + self.delay, packet))

    def arrived(self, now: float) -> list[bytes]:
        """Return the packets that are at the other end by now, and forget them."""
        found = []
        while self.packets and self.packets[0][0] <= now:
            found.append(self.packets.popleft()[1])
        return found


def carry(lines: dict[int, tuple[int, Line]]) -> None:
    """Carry packets for ever: {end: (the other end, the line to it)}."""
    while True:
        arrivals = [line.packets[0][0] for _, line in lines.values() if line.packets]
        pause = max(0.0, min(arrivals) - time.monotonic()) if arrivals else None
        readable, _, _ = select.select(lines, [], [], pause)
        now = time.monotonic()
        for end in readable:
            lines[end][1].send(os.read(end, 65536), now)
        for other, line in lines.values():
            for packet in line.arrived(now):
                with suppress(OSError):  # that host is not up yet
                    os.write(other, packet)


def main() -> None:
    rate, delay, dilation = sys.argv[1:]
    fields = re.fullmatch(r"(\d*\.?\d+)(mbit|gbit) (\d*\.?\d+)(ms|us|)", f"{rate} {delay}")
    if not fields or float(fields[1]) == 0:
        said = f"error: RATE={rate!r} and DELAY={delay!r} are no rate and delay, as 1gbit and 1ms"
        print(said, file=sys.stderr)
        sys.exit(2)
    congestion_control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    said = f"TCP ({congestion_control}) between two hosts: {rate}, {delay}; all of it, and a step's"
    print(f"{said} computing, is {dilation} times slower here", flush=True)
    slower = float(dilation)
    bytes_per_second = float(fields[1]) * UNITS[fields[2]] / slower
    seconds = float(fields[3]) * UNITS[fields[4]] * slower
    ends = [sys.stdin.fileno(), os.open("/dev/net/tun", os.O_RDWR)]
    for number, end in enumerate(ends):
        name = f"host{number}".encode()
        ioctl(end, TUNSETIFF, struct.pack("16sH", name, IFF_TUN | IFF_NO_PI))
    lines = [Line(bytes_per_second, seconds, QUEUE * slower) for _ in ends]
    carry({ends[0]: (ends[1], lines[0]), ends[1]: (ends[0], lines[1])})


if __name__ == "__main__":
    main()
