"""`make hosts`: a network as fast as was asked for, and nothing of it left behind."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys

import pytest

from tools.testing import ROOT, rank_1, wait_for_line

TRIAL = "ip link add name x type veth peer name y"
TRIAL += " && tc qdisc add dev x root tbf rate 1mbit burst 9k latency 9ms"
CAN = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "bash", "-c", TRIAL]
PROBE = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for elements in (1, 5 * 2**18):
    numbers = torch.ones(elements)
    dist.all_reduce(numbers)
    start = time.perf_counter()
    dist.all_reduce(numbers)
    if os.environ["RANK"] == "0":
        print("took", time.perf_counter() - start, flush=True)
time.sleep(float(os.environ.get("LONGER", 0)))
dist.destroy_process_group()
"""
SAYS_ITS_CORES = f"{sys.executable} -c 'import os; print(sorted(os.sched_getaffinity(0)))'"


@pytest.fixture
def hosts(script, tmp_path):
    """hosts(rate, delay, …): two hosts with a script that all-reduces 4 bytes, then 5 MB.

    Started by a make, as `make hosts` starts them.
    """
    try:
        subprocess.run(CAN, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system gives no network namespaces, or has no tc with tbf")
    (tmp_path / "probe.py").write_text(PROBE)

    def start(rate: str, delay="", python=sys.executable, cores=(), **variables):
        words = ["exec", "bash", "tools/hosts.sh", python, rate, delay, tmp_path / "probe.py"]
        makefile = tmp_path / "Makefile"
        makefile.write_text(f"hosts:\n\t{shlex.join(map(str, words))}\n")
        limit = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        command = [*limit, "make", "--silent", "--file", makefile]
        return script(command, cwd=ROOT, env=variables)

    return start


def test_hosts_share_the_cores_that_may_be_used(hosts, tmp_path):
    """A stand-in for Python says which cores it has, in the place of torchrun."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exec {sys.executable} "$@"\n{SAYS_ITS_CORES}')
    python.chmod(0o755)
    allowed = sorted(os.sched_getaffinity(0))[1:] or [0]
    status, output = hosts("1gbit", python=python, cores=allowed).wait()
    shares = [json.loads(share) for share in re.findall(r"\[.*?\]", output)]
    assert status == 0 and {*shares[0], *shares[1]} == {*allowed}, output
    assert abs(len(shares[0]) - len(shares[1])) <= 1


@pytest.mark.parametrize("words", [("1 gbit", ""), ("1gbit", "soon")])
def test_a_wrong_rate_or_delay_is_one_line(hosts, words):
    status, output = hosts(*words).wait()
    said = [line for line in output.splitlines() if not line.startswith("make")]
    assert status == 2 and len(said) == 1 and said[0].startswith("error: "), output


@pytest.mark.full
@pytest.mark.parametrize("delay", ["", "20ms"])
def test_a_call_takes_no_less_than_its_rate_and_delay(hosts, delay):
    """Two delays there and back, and the bytes of 5 MB but for the burst that tc lets through.

    (A call has four delays, but this rank may find the other waiting.)
    """
    status, output = hosts("200mbit", delay).wait()
    if delay and status == 2:
        pytest.skip("this kernel has no netem")
    small, large = [float(seconds) for seconds in re.findall("^took (.*)$", output, re.M)]
    delays = 2 * 0.020 if delay else 0
    assert status == 0 and small >= delays, output
    assert large >= delays + 0.95 * 5 * 2**20 / (200e6 / 8), output


@pytest.mark.full
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGTERM", "SIGINT", "a rank"])
def test_nothing_is_left_behind(hosts, fault):
    """No process, and so no namespace; no device; whatever happens to make, or to a rank."""
    before = socket.if_nameindex()
    run = hosts("1gbit", LONGER="1000")
    wait_for_line(run, "took ")
    if fault == "a rank":
        os.kill(rank_1(run), signal.SIGKILL)
    elif fault == "SIGINT":
        os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
    else:
        run.process.send_signal(getattr(signal, fault))
    assert run.wait()[0] != 0  # fails if a process is left
    assert socket.if_nameindex() == before
