"""Stage 08: what is verified, trained and counted, verify can fail, how a run ends, flags."""

import math
import os
import re
import signal
import socket
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import ddp_rpc
import pytest
import torch

from tools import testing
from tools.testing import needs_proc, wait_for_line

FOLDER = Path(__file__).resolve().parent
SCRIPT = FOLDER / "ddp_rpc.py"
QUICK = [SCRIPT, "--warmup-cycles", 1, "--steps", 20]


def test_batches_are_what_the_benchmark_draws():
    args = SimpleNamespace(servers=3, embedding_dim=512, embeddings=30)
    for indices, offsets, targets in islice(ddp_rpc.random_batches(args, seed=1), 500):
        bags = torch.diff(offsets, append=torch.tensor([len(indices)]))
        assert 20 <= len(indices) <= 50 and indices.max() < 30
        assert offsets[0] == 0 and 1 <= bags.min() and bags.max() <= 10
        assert len(targets) == 3 * len(offsets) and targets.max() < 8


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("trainers, servers", [(2, 2), pytest.param(1, 3, marks=pytest.mark.full)])
def test_what_is_verified_trained_and_counted(forked, tmp_path, trainers, servers):
    """Examples, and what lookups take: a round trip, or one for each server."""
    words = f"--trainers {trainers} --servers {servers} --embeddings 31 --round-trip-ms 10".split()
    words += ["--master-addr", "localhost", "--master-port", free_port()]
    words += ["--json", tmp_path / "out.json"]
    status, output = forked(None, *QUICK, *words)
    assert status == 0 and output.count("verify: passed") == 2 and "Warning" not in output, output
    result = testing.read_json(tmp_path / "out.json", "08_ddp_rpc")
    assert result["verify"]["trainer0"]["max_abs_diff"] <= 1e-5
    for number in [*range(trainers), "All"]:
        for lookup in ddp_rpc.LOOKUPS:
            name = f"trainer{number}" if number != "All" else number
            assert re.search(f"^{name}, {lookup} ", output, re.MULTILINE), output
    args = SimpleNamespace(**result["options"])
    all_batches = islice(ddp_rpc.random_batches(args, 0), 10, None)  # ten were to warm up
    for epoch in range(2):
        examples = sum(len(offsets) for _, offsets, _ in islice(all_batches, 10))
        for row, round_trips in zip(result["rows"], (1, servers), strict=True):
            of_trainer0 = {name: row[name][0][epoch] for name in ddp_rpc.QUANTITIES}
            assert of_trainer0["examples"] == examples
            assert 0.1 * round_trips <= of_trainer0["lookup_seconds"] < of_trainer0["seconds"]


def test_verify_sees_a_nan_anywhere():
    finite, nan = torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])
    assert ddp_rpc.largest_difference([finite, finite], [finite, finite + 1]) == 1
    for tensors in ([nan, finite], [finite, nan]):
        assert math.isnan(ddp_rpc.largest_difference(tensors, [finite, finite]))


# How a run ends.

ENDLESS = [sys.executable, SCRIPT, "--steps", 10_000_000]
VERIFIED = "verify: passed"  # training begins


def process_of(run, name):
    """The process of the run that has this role: the last ones, in the order of their ranks."""
    names = ["master", "trainer0", "trainer1", "ps0", "ps1"]
    return dict(zip(names, sorted(run.processes())[-5:], strict=True))[name]


@needs_proc
@pytest.mark.full
@pytest.mark.parametrize("name, number", [("ps1", signal.SIGKILL), ("trainer1", signal.SIGSTOP)])
def test_when_a_process_is_killed_or_does_not_respond_all_end(script, name, number):
    run = script([*ENDLESS, "--timeout", 10])
    wait_for_line(run, VERIFIED)
    os.kill(process_of(run, name), number)
    status, output = run.wait()
    assert status == 1 and "all others were ended" in output, output
    if number == signal.SIGKILL:
        assert name in output and "SIGKILL" in output and "Traceback" not in output, output


@needs_proc
@pytest.mark.full
@pytest.mark.parametrize("end, number, expected", [(os.killpg, 2, 1), (os.kill, 9, -9)])
def test_when_the_launcher_is_ended_all_end(script, end, number, expected):
    """Ctrl-C at a terminal reaches all processes; a SIGKILL the launcher alone."""
    run = script(ENDLESS)
    wait_for_line(run, VERIFIED)
    end(run.process.pid, number)
    status, output = run.wait()  # fails if a process is left
    assert status == expected and "Traceback" not in output, output


# The command line.


def test_layouts_and_upstreams_names_of_flags(monkeypatch):
    """A table has the fewest columns that make rows of 512."""
    for words, expected in {
        "": (2, 2, 256),
        "--nproc 3 --trainers 1 --servers 12": (1, 12, 128),
        "--number-trainers 3 --number-ps 16 --number-embeddings 300": (3, 16, 32),
    }.items():
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words.split()])
        args = ddp_rpc.read_arguments()
        assert (args.trainers, args.servers, args.embedding_dim) == expected
        assert args.embeddings == 300


def test_a_port_that_is_taken(refusal):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = refusal(ddp_rpc.main, SCRIPT, "--master-port", port)
    assert said.startswith("argument --master-addr, --master-port") and str(port) in said
