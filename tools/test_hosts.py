"""`make hosts`: a network as fast as was asked for, and nothing of it left behind."""

import json
import os
import re
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
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
numbers = torch.ones(10 * 2**18)
dist.all_reduce(numbers)
start = time.perf_counter()
dist.all_reduce(numbers)
if os.environ["RANK"] == "0":
    print(time.perf_counter() - start, flush=True)
time.sleep(float(os.environ["LONGER"]))
dist.destroy_process_group()
"""
SAYS_ITS_CORES = f"{sys.executable} -c 'import os; print(sorted(os.sched_getaffinity(0)))'"


@pytest.fixture
def hosts(script, tmp_path):
    """hosts(…): two hosts that all-reduce 10 MB and stay for so many seconds."""
    try:
        subprocess.run(CAN, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system gives no network namespaces, or has no tc with tbf")
    (tmp_path / "probe.py").write_text(PROBE)

    def start(rate: str, longer="0", delay="", python=sys.executable, cores=()):
        command = ["bash", "tools/hosts.sh", python, rate, delay, tmp_path / "probe.py"]
        limit = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        return script([*limit, *command], cwd=ROOT, env={"LONGER": longer})

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


@pytest.mark.parametrize("words", [("1 gbit",), ("1gbit", "0", "soon")])
def test_a_wrong_rate_or_delay_is_one_line(hosts, words):
    status, output = hosts(*words).wait()
    assert status == 2 and output.startswith("error: ") and output.count("\n") == 1, output


@pytest.mark.full
def test_the_rate_is_the_one_asked_for(hosts):
    """10 MB at 100 Mbit/s take no less than their bits; how much more is a question of the CPU."""
    status, output = hosts("100mbit").wait()
    least = 10 * 2**20 * 8 / 100e6
    assert status == 0 and 0.99 * least < float(output.split()[-1]) < 2 * least, output


@pytest.mark.full
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGTERM", "SIGINT", "a rank"])
def test_nothing_is_left_behind(hosts, fault):
    """No process and no device."""
    before = socket.if_nameindex()
    run = hosts("1gbit", longer="1000")
    wait_for_line(run, "0.")
    if fault == "a rank":
        os.kill(rank_1(run), signal.SIGKILL)
    elif fault == "SIGINT":
        os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
    else:
        run.process.send_signal(getattr(signal, fault))
    assert run.wait(30)[0] != 0 and socket.if_nameindex() == before
