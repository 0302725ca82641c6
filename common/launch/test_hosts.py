"""`make hosts`: a network as fast and as slow as was asked for, and nothing of it left behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common.launch.link import bytes_per_second, seconds
from common.testing.harness import ROOT, rank_1, wait_for_line

TOOLS = ["ip", "taskset", "unshare", "nsenter", "setpriv"]
# What runs on both hosts under torchrun: rank 1 asks rank 0, and writes how long the answers took.
# ENDLESS: it never ends by itself; "ready" when both ranks have met.
PROBE = """
import itertools, json, os, socket, statistics, time

def receive(connection, size):
    while size:
        piece = connection.recv(min(size, 1 << 20))
        if not piece:
            raise ConnectionError("the other rank has ended")
        size -= len(piece)

def ask(size):
    start = time.perf_counter()
    connection.sendall(bytes(size))
    receive(connection, 1)
    return time.perf_counter() - start

address = os.environ["MASTER_ADDR"], 5000
large = int(os.environ.get("BYTES", 0))
sizes = itertools.repeat(4000) if "ENDLESS" in os.environ else [1] * 150 + [large] * 6
if os.environ["RANK"] == "0":
    connection = socket.create_server(address).accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    print("ready", flush=True)
    for size in sizes:
        receive(connection, size)
        connection.sendall(b"x")
else:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = [ask(size) for size in sizes]
    medians = [statistics.median(times[i : i + 30]) for i in range(0, 150, 30)]
    with open(os.environ["RESULT"], "w") as file:
        json.dump([min(medians), min(times[150:])], file)
"""


def missing() -> str:
    """Why this machine cannot play two hosts; "" if it can."""
    for tool in TOOLS:
        if not shutil.which(tool):
            return f"there is no command {tool}"
    namespaces = ["--net", "--mount", "--pid", "--fork", "--mount-proc"]
    test = "ip tuntap add test mode tun && exec 3<> /dev/net/tun"
    for user in ([], ["--user", "--map-root-user"]):
        command = ["unshare", *user, *namespaces, "bash", "-c", test]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return ""
    return "this system gives no network namespaces, or no /dev/net/tun"


MISSING = missing()
needs_hosts = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.mark.parametrize("text, bits", [("1gbit", 1e9), ("200mbit", 2e8), ("2.5gbit", 2.5e9)])
def test_rates(text, bits):
    assert bytes_per_second(text) == bits / 8


@pytest.mark.parametrize(
    "text, time", [("0.2ms", 2e-4), ("500us", 5e-4), ("0", 0), ("5", 5e-6), ("1s", 1)]
)
def test_times(text, time):
    assert seconds(text) == pytest.approx(time)


@pytest.mark.parametrize("rate", ["fast", "0", "-1gbit", "1 gbit", "0.5mbit", "1g", "9999gbit"])
def test_no_rate(rate):
    with pytest.raises(ValueError, match=f"RATE='{rate}' is not a rate"):
        bytes_per_second(rate)


@pytest.mark.parametrize("delay", ["long", "-1ms", "1min", "2s", "0,2ms"])
def test_no_time(delay):
    with pytest.raises(ValueError, match=f"DELAY='{delay}' is not a time"):
        seconds(delay)


def hosts(*words, rate="1gbit", delay="0.2ms") -> list:
    words = [f"RATE={rate}", f"DELAY={delay}", "ARGS=", *words]  # the last of a name counts
    return ["make", "-C", ROOT, "hosts", f"PYTHON={sys.executable}", *words]


# A `make` that runs these tests hands its own flags and variables down.
NO_MAKE = {"MAKEFLAGS": "", "MFLAGS": ""}


@pytest.mark.parametrize(
    "word, message",
    [
        ("RATE=fast", "is not a rate"),
        ("RATE=1g'bit", "is not a rate"),
        ("DELAY=long", "is not a time"),
        ("SCRIPT=nothing.py", "is not a file"),
    ],
)
def test_wrong_input_is_one_line(script, word, message):
    status, output = script([*hosts("SCRIPT=conftest.py"), word], env=NO_MAKE).wait()
    name, value = word.split("=")
    said = [line for line in output.splitlines() if "make" not in line and "mkdir" not in line]
    assert status == 2 and len(said) == 1, output
    assert said[0].startswith(f"error: {name}={value!r} {message}"), output


def check_network(script, folder: Path, rate: str, delay: str, prefix=()):
    """Round trip and rate are within 15 % of what was asked for.

    Other processes can only make the network slower: hence the best of five medians of round trips,
    and the best of several transfers of half a second.
    """
    (folder / "probe.py").write_text(PROBE)
    size = int(bytes_per_second(rate) / 2)
    environment = NO_MAKE | {"BYTES": str(size), "RESULT": str(folder / "result")}
    command = hosts(f"SCRIPT={folder}/probe.py", rate=rate, delay=delay)
    status, output = script([*prefix, *command], env=environment).wait()
    assert status == 0, output
    assert "\nnetwork: " in output and "\nmake hosts took " in output, output
    round_trip, transfer = json.loads((folder / "result").read_text())
    assert round_trip == pytest.approx(2 * seconds(delay), rel=0.15), (round_trip, transfer)
    expected = size / bytes_per_second(rate) + 2 * seconds(delay)
    assert transfer == pytest.approx(expected, rel=0.15), (round_trip, transfer)


@needs_hosts
@pytest.mark.full
@pytest.mark.parametrize("rate, delay", [("400mbit", "2ms"), ("1gbit", "5ms"), ("50mbit", "20ms")])
def test_rate_and_delay(script, tmp_path, rate, delay):
    check_network(script, tmp_path, rate, delay)


@needs_hosts
@pytest.mark.full
def test_without_the_rights_of_root(script, tmp_path):
    """As root: without capabilities, but for the one that mapping root into a namespace takes."""
    prefix = ["setpriv", "--bounding-set", "-all,+setfcap"] if os.getuid() == 0 else []
    check_network(script, tmp_path, "400mbit", "2ms", prefix)


@needs_hosts
@pytest.mark.full
def test_the_rungs_know_the_network_and_write_files_of_their_own(script, tmp_path):
    picture, raw = tmp_path / "x.png", tmp_path / "x.json"
    flags = f"--size nano --steps 1 --warmup 0 --plot {picture} --json {raw}"
    status, output = script(hosts(f"ARGS={flags}", delay="0.3ms"), env=NO_MAKE).wait(300)
    assert status == 0 and picture.exists(), output
    result = json.loads(raw.read_text())
    assert result["network"] == "1gbit, 0.3ms"
    assert result["world_size"] == 2 and result["options"]["steps"] == 1


def process_of(run, program: str, *words) -> int:
    """The first process of this run that executes the program, with these words after it."""
    for process in sorted(run.processes()):
        first, *others = Path(f"/proc/{process}/cmdline").read_text().split("\0")
        if Path(first).name.startswith(program) and set(words) <= {Path(w).name for w in others}:
            return process
    pytest.fail(f"no process {program} with {words}")


def surroundings() -> tuple:
    """What a run could leave behind besides processes, as seen from outside."""
    return socket.if_nameindex(), Path("/proc/mounts").read_text()


SIGKILL_OF = {
    "a rank": rank_1,
    "make": lambda run: run.process.pid,
    "the first hosts.sh": lambda run: process_of(run, "bash", "hosts.sh", "watch"),
    "unshare": lambda run: process_of(run, "unshare", "hosts.sh", "within"),
    "the second hosts.sh": lambda run: process_of(run, "bash", "hosts.sh", "within"),
    "link.py": lambda run: process_of(run, "python", "link.py", "host0"),
}


def check_nothing_is_left(script, folder: Path, fault: str):
    (folder / "probe.py").write_text(PROBE)
    before = surroundings()
    environment = NO_MAKE | {"TMPDIR": str(folder), "ENDLESS": "1"}
    run = script(hosts(f"SCRIPT={folder}/probe.py"), env=environment)
    wait_for_line(run, "ready")
    if fault in SIGKILL_OF:
        os.kill(SIGKILL_OF[fault](run), signal.SIGKILL)
    elif fault == "Ctrl-C":
        os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
    else:
        run.process.send_signal(signal.SIGTERM)
    status, output = run.wait(timeout=30)
    assert status != 0, output
    assert surroundings() == before


@needs_hosts
def test_nothing_is_left_when_make_is_killed(script, tmp_path):
    check_nothing_is_left(script, tmp_path, "make")


@needs_hosts
@pytest.mark.full
@pytest.mark.parametrize("fault", [*SIGKILL_OF, "SIGTERM of make", "Ctrl-C"])
def test_nothing_is_left_behind(script, tmp_path, fault):
    check_nothing_is_left(script, tmp_path, fault)
