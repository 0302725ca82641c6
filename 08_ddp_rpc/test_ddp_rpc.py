"""Stage 08: layouts, verify (and that it can fail), how a run ends, bad options, the file alone."""

import os
import re
import shutil
import signal
import sys
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import ddp_rpc
import pytest
import torch
from torch.distributed import rpc

from tools import testing
from tools.record import output_of
from tools.testing import needs_proc, wait_for_line

FOLDER = Path(__file__).resolve().parent
SCRIPT = FOLDER / "ddp_rpc.py"


def test_batches_are_what_the_benchmark_draws():
    args = SimpleNamespace(servers=3, embedding_dim=512)
    for indices, offsets, targets in islice(ddp_rpc.random_batches(args, 30, seed=1), 500):
        bags = torch.diff(offsets, append=torch.tensor([len(indices)]))
        assert 20 <= len(indices) <= 50 and 0 <= indices.min() and indices.max() < 30
        assert offsets[0] == 0 and 1 <= bags.min() and bags.max() <= 10
        assert len(targets) == 3 * len(offsets) and 0 <= targets.min() and targets.max() < 8


# What torch says now and then on a busy machine when RPC ends well: it closes a connection as soon
# as its answer has arrived, and before its own thread knows that it was sent.
CLOSED_EARLY = r"\[W.*encountered error when sending response to request .*: pipe closed.*\n"


def test_it_prints_what_was_recorded(forked):
    status, output = forked(None, SCRIPT, "--device", "cpu", "--warmup", 0, "--steps", 50)
    output = re.sub(CLOSED_EARLY, "", output)
    assert status == 0 and "Warning" not in output, output
    lines = testing.masked(output)
    recorded = testing.masked(output_of(FOLDER / "reference_output.txt"))
    machine = 1  # the line of CUDA, which some builds lack
    assert lines[machine].startswith("CUDA ")
    del lines[machine], recorded[machine]
    assert lines == recorded, output


@pytest.mark.full
@pytest.mark.parametrize("trainers, servers", [(1, 3), (3, 1)])
def test_uneven_layouts_verify_train_and_count_every_example(forked, tmp_path, trainers, servers):
    words = ["--trainers", trainers, "--servers", servers, "--embeddings", 31, "--lookup", "both"]
    words += ["--warmup", 10, "--steps", 20, "--json", tmp_path / "out.json"]
    status, output = forked(None, SCRIPT, *words, PYTHONIOENCODING="ascii")  # which has no ×
    assert status == 0 and output.count("verify: passed") == 2 and "Warning" not in output, output
    assert output.endswith(f"written: {tmp_path}/out.json\n") and " ? the time in l" in output
    assert "of 31 rows per server exactly the 15 that were looked up have moved" in output
    result = testing.read_json(tmp_path / "out.json", "08_ddp_rpc")
    assert len(result["epochs"]) == trainers and result["verify"]["max_abs_diff"] <= 1e-5
    for rank, epochs in enumerate(result["epochs"]):
        batches = ddp_rpc.random_batches(SimpleNamespace(**result["options"]), 31, rank)
        bags = [len(offsets) for _, offsets, _ in islice(batches, 60)]
        for number, epoch in enumerate(epochs):
            assert epoch["examples"] == sum(bags[10 * number : 10 * number + 10])
            assert epoch["lookup"] == ["parallel", "sequential"][number % 2]
            assert epoch["is_counted"] == (number >= 2) and 0 < epoch["loss"] < 20
        assert len(epochs) == 6


@pytest.mark.parametrize(
    "lookup, expected",
    [("parallel", ["ask", "ask", "wait"]), ("sequential", ["ask", "wait", "ask", "wait"])],
)
def test_all_servers_are_asked_before_an_answer_is_awaited(lookup, expected, monkeypatch):
    calls = []

    def ask_and_wait(server, function, arguments):
        calls.extend(["ask", "wait"])

    monkeypatch.setattr(rpc, "rpc_async", lambda *_: calls.append("ask"))
    monkeypatch.setattr(torch.futures, "wait_all", lambda _: calls.append("wait"))
    monkeypatch.setattr(rpc, "rpc_sync", ask_and_wait)
    model = SimpleNamespace(servers=["ps0", "ps1"], lookup_seconds=0.0, round_trip=0.1)
    ddp_rpc.HybridModel.ask_servers(model, None, None, lookup)
    assert calls == expected
    assert 0.1 * expected.count("wait") <= model.lookup_seconds


def test_what_crosses_the_network_grows_with_the_batch_and_not_with_the_tables(forked, tmp_path):
    """Per step: indices, 256 sums per bag and server, their gradients, and little else.

    DDP averages the dense gradients between the trainers: no server sees them.
    """
    per_step = {}
    for rows in (300, 20_000):
        words = ["--steps", 50, "--warmup", 0, "--no-verify", "--embeddings", rows]
        status, output = forked(None, SCRIPT, *words, "--json", tmp_path / "out.json")
        assert status == 0, output
        result = testing.read_json(tmp_path / "out.json", "08_ddp_rpc")
        per_step[rows] = result["network_bytes_per_step"]
        assert f"exchange {per_step[rows] / 1000:.1f} kB per step" in output
    examples = sum(epoch["examples"] for epoch in result["epochs"][0])
    sums = 2 * 2 * 256 * 4 * examples / 50  # there and back, servers, columns, bytes
    assert sums < per_step[300] < 2 * sums
    assert per_step[20_000] == pytest.approx(per_step[300], rel=0.02)


GROUP = "dist.new_group([dist.get_rank()], use_local_synchronization=True)"


@pytest.mark.full
@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("local, lr=LEARNING_RATE", "local, lr=2 * LEARNING_RATE", "away from a plain model"),
        ("=process_group)\n        self.r", f"={GROUP})\n        self.r", "different dense"),
        ("(even, offsets, targets)", "(even + 1, offsets, targets)", "the rows that moved"),
    ],
)
def test_verify_notices_wrong_training(forked, tmp_path, right, wrong, said):
    text = SCRIPT.read_text()
    assert text.count(right) == 1
    (tmp_path / "ddp_rpc.py").write_text(text.replace(right, wrong))
    shutil.copytree(FOLDER.parent / "common", tmp_path / "common")
    status, output = forked(None, tmp_path / "ddp_rpc.py", "--trainers", 2, "--servers", 1)
    assert status == 1 and "verify FAILED" in output and said in output, output


# How a run ends.

ENDLESS = [SCRIPT, "--steps", 10_000_000]
SHORT = [SCRIPT, "--nproc", 1, "--steps", 20, "--warmup", 0]
VERIFIED = "verify: passed, dense"  # training begins


def ranks_of(run):
    """The ids of the processes that a run has started, by rank."""
    return sorted(set(run.processes()) - {run.process.pid})


def trainer_1(run):
    """The process of the second trainer, as soon as all five are there."""
    deadline = time.monotonic() + 30
    while len(ranks_of(run)) < 5 and run.process.poll() is None and time.monotonic() < deadline:
        pass
    return ranks_of(run)[1]


def listening(processes):
    """The addresses, as /proc writes them, on which these processes listen."""
    addresses = set()
    for pid in processes:
        files = Path(f"/proc/{pid}/fd").iterdir()
        sockets = {os.readlink(file) for file in files if file.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # 0A: listening
                    addresses.add(fields[1].split(":")[0])
    return addresses


FULL = pytest.mark.full


@needs_proc
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=FULL), pytest.param(2, marks=FULL)])
def test_listens_on_loopback_and_when_a_process_is_killed_all_end(script, rank):
    run = script([sys.executable, *ENDLESS, "--nproc", 1])
    wait_for_line(run, VERIFIED)
    assert len(ranks_of(run)) == 3
    assert listening(run.processes()) == {"0100007F"}  # 127.0.0.1
    os.kill(ranks_of(run)[rank], signal.SIGKILL)
    status, output = run.wait(30)
    assert status == 1 and f"process {rank} terminated with signal SIGKILL" in output, output
    name = ["trainer0", "ps0", "master"][rank]
    assert f"error: {name} (rank {rank}) failed; all other processes were ended\n" in output


@needs_proc
@pytest.mark.full
@pytest.mark.parametrize(
    "number, expected", [(signal.SIGTERM, 143), (signal.SIGINT, 1), (signal.SIGKILL, -9)]
)
def test_when_the_launcher_is_ended_all_end(script, number, expected):
    run = script([sys.executable, *ENDLESS])
    wait_for_line(run, VERIFIED)
    end = os.killpg if number == signal.SIGINT else os.kill  # as the terminal does
    end(run.process.pid, number)
    status, output = run.wait(30)  # fails if a process is left
    assert status == expected and "Traceback" not in output, output
    assert ("interrupted\n" in output) == (number == signal.SIGINT)


@needs_proc
@pytest.mark.full
@pytest.mark.parametrize("fault", testing.FAULTS)
def test_faults(script, fault, tmp_path):
    """While the processes start."""
    testing.check_fault(script, [sys.executable, *ENDLESS], "", fault, tmp_path, trainer_1)


@needs_proc
@pytest.mark.full
@pytest.mark.parametrize("rank, name", [(1, "trainer1"), (3, "ps1")])
def test_a_process_that_does_not_respond_is_named(script, rank, name):
    run = script([sys.executable, *ENDLESS, "--timeout", 10])
    wait_for_line(run, VERIFIED)
    os.kill(ranks_of(run)[rank], signal.SIGSTOP)
    status, output = run.wait(60)
    assert status == 1, output
    assert f"error: --timeout 10 s are over; no sign of life from {name}\n" in output, output


def test_progress_on_a_terminal(forked):
    """Of the launcher, while the others start, of the master, and of trainer0."""
    status, output, shown = forked.on_a_terminal(None, *SHORT)
    shown = re.sub(CLOSED_EARLY, "", shown.replace("\r\n", "\n"))
    assert status == 0 and "\n" not in shown and "\r" not in output, shown
    steps = [step for step in shown.split("\r\x1b[K") if step]
    starts = ["starting 3 pro", "verify: one tra", "verify: all tra", "training: epoch", "training"]
    assert all(map(str.startswith, steps, starts)) and len(steps) == 5, steps
    assert shown.endswith("\r\x1b[K")  # nothing stays


# The command line.


@pytest.mark.parametrize(
    "words, expected",
    [
        ("", (2, 2, 256, 50)),
        ("--nproc 8 --warmup 0", (8, 8, 64, 0)),  # columns: the fewest that make rows of 512
        ("--nproc 3 --trainers 1 --warmup-cycles 3", (1, 3, 512, 30)),
        ("--number-trainers 3 --number-ps 4 --number-embeddings 300", (3, 4, 128, 50)),
    ],
)
def test_layout_and_upstreams_names_of_flags(words, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words.split()])
    args = ddp_rpc.read_arguments()
    assert (args.trainers, args.servers, args.embedding_dim, args.warmup) == expected
    assert args.embeddings == 300


WRONG = [
    (
        "--trainers 100000",
        "argument --trainers/--number-trainers: '100000' is not a whole number from 1 to 64",
    ),
    ("--embeddings 2000000000", "argument --embeddings: '2000000000' rows of 256 columns need"),
    ("--nproc 8 --embedding-dim 100", "argument --embedding-dim: '100' is not a multiple of 64: "),
    ("--warmup 5", "argument --warmup: '5' is not a multiple of 10 from 0"),
    ("--steps 0", "argument --steps: '0' is not a multiple of 10 from 10"),
    ("--round-trip 2s", "argument --round-trip: '2s' is not a number of milliseconds up to 1000"),
]
if not torch.cuda.is_available():
    WRONG.append(("--device cuda", "argument --device: 'cuda' needs a GPU"))


@pytest.mark.parametrize("words, said", WRONG)
def test_wrong_input_is_one_line(refusal, words, said):
    assert refusal(ddp_rpc.main, SCRIPT, *words.split()).startswith(said)


def test_file_alone(tmp_path):
    testing.check_script_alone(SCRIPT, tmp_path)


# What few machines can run.


@pytest.mark.cuda
@pytest.mark.parametrize("trainers", [1, 2])
def test_on_a_gpu(script, trainers):
    layout = ["--trainers", trainers, "--servers", 2, "--device", "cuda"]
    status, output = script([sys.executable, *SHORT, *layout]).wait()
    assert status == 0 and output.count("verify: passed") == 2, output
