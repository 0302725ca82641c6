"""Stage 08: layouts, verify (and that it can fail), how a run ends, bad options, the file alone."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import ddp_rpc
import launcher
import pytest
import torch
from torch.distributed import rpc

from common.recordings.record import output_of
from common.testing import harness
from common.testing.harness import needs_proc, wait_for_line

FOLDER = Path(__file__).resolve().parent
SCRIPT = FOLDER / "ddp_rpc.py"


def test_names_of_ranks():
    names = ["trainer0", "trainer1", "ps0", "ps1", "ps2", "ps3", "master"]
    assert launcher.names_of_ranks(2, 4) == names


def test_batches_are_what_the_benchmark_draws():
    generator = torch.Generator().manual_seed(1)
    for indices, offsets, targets in ddp_rpc.random_batches(500, 30, 3, generator):
        bags = torch.diff(offsets, append=torch.tensor([len(indices)]))
        assert 20 <= len(indices) <= 50 and 0 <= indices.min() and indices.max() < 30
        assert offsets[0] == 0 and 1 <= bags.min() and bags.max() <= 10
        assert len(targets) == 3 * len(offsets) and 0 <= targets.min() and targets.max() < 8


def test_it_prints_what_was_recorded(forked):
    status, output = forked(None, SCRIPT, "--device", "cpu", "--warmup", 0, "--steps", 50)
    assert status == 0 and "Warning" not in output, output
    lines = harness.masked(output)
    recorded = harness.masked(output_of(FOLDER / "reference_output.txt"))
    machine = 1  # the line of CUDA and of what the host is made of
    assert lines[machine].startswith("CUDA ")
    del lines[machine], recorded[machine]
    assert lines == recorded, output


@pytest.mark.full
@pytest.mark.parametrize("trainers, servers", [(1, 3), (3, 1)])
def test_uneven_layouts_verify_train_and_count_every_example(forked, tmp_path, trainers, servers):
    layout = ["--trainers", trainers, "--servers", servers, "--embeddings", 31]
    length = ["--lookup", "both", "--seed", 5, "--warmup", 10, "--steps", 20]
    words = [*layout, *length, "--json", tmp_path / "out.json"]
    status, output = forked(None, SCRIPT, *words, PYTHONIOENCODING="ascii")  # which has no ×
    assert status == 0 and output.count("verify: passed") == 2 and "Warning" not in output, output
    assert output.endswith(f"written: {tmp_path}/out.json\n") and " ? the time in l" in output
    result = harness.read_json(tmp_path / "out.json", "08_ddp_rpc")
    assert result["verify"]["max_abs_diff"] <= 1e-5 and result["verify"]["rows_moved"] == 15
    assert (result["world_size"], result["threads_per_rank"], result["backend"]) == (5, 1, "gloo")
    options = result["options"]
    assert (options["steps"], options["warmup"], options["embedding_dim"]) == (20, 10, 512)
    assert len(result["trainers"]) == trainers
    for rank, trainer in enumerate(result["trainers"]):
        assert trainer["name"] == f"trainer{rank}"
        generator = torch.Generator().manual_seed(5 + rank)
        counts = []
        for _ in range(6):
            batches = ddp_rpc.random_batches(10, 31, servers, generator)
            counts.append(sum(len(offsets) for _, offsets, _ in batches))
        counted = {}
        for lookup, samples in trainer["lookups"].items():
            counted[lookup] = [sample["examples"] for sample in samples]
        # The two epochs of warming up are not counted.
        assert counted == {"parallel": counts[2::2], "sequential": counts[3::2]}
        assert len(trainer["loss"]) == 6 and all(0 < loss < 20 for loss in trainer["loss"])
        assert f"trainer{rank} parallel" in output and f"trainer{rank} sequential" in output
    assert "all parallel" in output and "parallel / sequential" in output


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
    model = SimpleNamespace(servers=["ps0", "ps1"], lookup_seconds=0.0)
    ddp_rpc.HybridModel.ask_servers(model, None, None, lookup)
    assert calls == expected and model.lookup_seconds > 0


@pytest.mark.full
@pytest.mark.parametrize(
    "right, wrong, said",
    [
        (
            "remote + local, lr=LEARNING_RATE",
            "remote + local, lr=2 * LEARNING_RATE",
            "away from a plain model",
        ),
        (
            "process_group=process_group)\n        self.lookup",
            "process_group=dist.new_group([dist.get_rank()], "
            "use_local_synchronization=True))\n        self.lookup",
            "different dense weights",
        ),
        ("(even, offsets, targets)", "(even + 1, offsets, targets)", "rows of ps0"),
    ],
)
def test_verify_notices_wrong_training(forked, tmp_path, right, wrong, said):
    text = SCRIPT.read_text()
    assert text.count(right) == 1
    (tmp_path / "ddp_rpc.py").write_text(text.replace(right, wrong))
    shutil.copy(FOLDER / "launcher.py", tmp_path)
    shutil.copytree(FOLDER.parent / "common", tmp_path / "common")
    words = ["--trainers", 2, "--servers", 1]
    status, output = forked(None, tmp_path / "ddp_rpc.py", *words)
    assert status == 1 and "verify FAILED" in output and said in output, output


# How a run ends: each of these runs has its own forkserver, as outside of the tests, unless it says
# `forked`.

ENDLESS = [SCRIPT, "--steps", 10_000_000]
SHORT = [SCRIPT, "--nproc", 1, "--steps", 20, "--warmup", 0]
VERIFIED = "verify: passed, dense"  # training begins


def started(run):
    """The ids of the processes that a run has started, by rank."""
    found = []
    for pid in run.processes():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return sorted(found)[1:]  # the first one forks the others


def trainer_1(run):
    """The process of the second trainer, as soon as all five are there."""
    deadline = time.monotonic() + 30
    while len(started(run)) < 5 and run.process.poll() is None and time.monotonic() < deadline:
        pass
    return started(run)[1]


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


@needs_proc
@pytest.mark.parametrize(
    "nproc, rank, name", [(1, 0, "trainer0"), pytest.param(2, 3, "ps1", marks=pytest.mark.full)]
)
def test_listens_on_loopback_and_when_a_process_is_killed_all_end(script, nproc, rank, name):
    run = script([sys.executable, *ENDLESS, "--nproc", nproc])
    wait_for_line(run, VERIFIED)
    processes = started(run)
    assert len(processes) == 2 * nproc + 1
    assert listening(run.processes()) == {"0100007F"}  # 127.0.0.1
    os.kill(processes[rank], signal.SIGKILL)
    begin = time.monotonic()
    status, output = run.wait()
    assert status == 1 and f"process {rank} terminated with signal SIGKILL" in output, output
    assert f"error: {name} (rank {rank}) failed; all other processes were ended\n" in output
    assert time.monotonic() - begin < 30


@pytest.mark.full
@needs_proc
def test_when_the_launcher_is_ended_all_end(forked):
    """By three signals, all at once: most is waiting."""
    runs = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        runs[number] = forked.start(None, *ENDLESS, "--nproc", 1)
    for number, run in runs.items():
        # A launcher that is killed while it starts a process leaves Python's own traceback there.
        run.wait_for(VERIFIED if number == signal.SIGKILL else "all meet at")
        if number == signal.SIGINT:
            os.killpg(run.processes[0].pid, number)  # as the terminal does
        else:
            os.kill(run.processes[0].pid, number)
    expected = {signal.SIGTERM: 143, signal.SIGINT: 1, signal.SIGKILL: -9}
    for number, run in runs.items():
        deadline = time.monotonic() + 30  # after SIGKILL the others notice it one after another
        while run.left() and time.monotonic() < deadline:
            time.sleep(0.1)
        status, output = run.wait(30)  # fails if a process is left
        assert status == expected[number] and "Traceback" not in output, output


@needs_proc
@pytest.mark.full
@pytest.mark.parametrize("moment", ["rank 4: master", VERIFIED])
def test_when_the_launcher_is_killed_nothing_is_left(script, moment):
    run = script([sys.executable, *ENDLESS])
    wait_for_line(run, moment)
    run.process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30  # the others may still be importing torch
    while run.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    status, output = run.wait(5)
    assert status == -9, output


@needs_proc
@pytest.mark.full
@pytest.mark.parametrize("fault", harness.FAULTS)
@pytest.mark.parametrize("moment", ["rank 0 to", "verify: passed, one trainer", VERIFIED])
def test_faults(script, moment, fault, tmp_path):
    command = [sys.executable, *ENDLESS]
    harness.check_fault(script, command, moment, fault, tmp_path, trainer_1)


@needs_proc
@pytest.mark.full
@pytest.mark.parametrize(
    "rank, place, name",
    [
        (1, "somebody has waited for an all-reduce of the trainers in vain; ", "trainer1"),
        (3, "somebody has waited for an answer by RPC in vain; ", "ps1"),
        (4, "", "master (rank 4)"),
    ],
)
def test_a_process_that_does_not_respond_is_named(script, rank, place, name):
    run = script([sys.executable, *ENDLESS, "--timeout", 10])
    wait_for_line(run, VERIFIED)
    os.kill(started(run)[rank], signal.SIGSTOP)
    status, output = run.wait(60)
    assert status == 1, output
    assert f"error: --timeout 10 s are over: {place}no sign of life from {name}\n" in output, output


def test_progress_on_a_terminal(forked):
    """Of the launcher, while the others start, of the master, and of trainer0."""
    status, output, shown = forked.on_a_terminal(None, *SHORT)
    assert status == 0 and "\n" not in shown and "\r" not in output, shown
    starting, _, later = shown.partition("\r\x1b[Kverify: one trainer with all")
    assert starting.endswith("\r\x1b[Kstarting 3 processes") and "starting" not in later, shown
    _, _, training = later.partition("\r\x1b[Kverify: all trainers")
    assert "training: epoch 1 of 2\r" in training and "epoch 2 of 2, " in training, shown
    assert shown.endswith("\r\x1b[K")  # nothing stays


@pytest.mark.full
def test_a_closed_pipe_loses_no_file(forked, tmp_path):
    words = [*SHORT, "--no-verify", "--json", tmp_path / "out.json"]
    assert forked.check_closed_pipe(None, *words) == ""
    [trainer] = json.loads((tmp_path / "out.json").read_text())["trainers"]
    assert len(trainer["lookups"]["parallel"]) == 2


# The command line.


def read_arguments(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    return vars(ddp_rpc.read_arguments())


@pytest.mark.parametrize(
    "words, trainers, servers, columns",
    [
        ("", 2, 2, 256),
        ("--nproc 8", 8, 8, 64),
        ("--nproc 3 --trainers 1", 1, 3, 512),
        ("--number-ps 4", 2, 4, 128),
    ],
)
def test_layout(words, trainers, servers, columns, monkeypatch):
    options = read_arguments(monkeypatch, *words.split())
    assert (options["trainers"], options["servers"]) == (trainers, servers)
    assert options["embedding_dim"] == columns  # the smallest that makes rows of 512


@pytest.mark.parametrize(
    "old, new",
    [
        ("--warmup-cycles 0", "--warmup 0"),
        ("--warmup-cycles 3", "--warmup 30"),
        ("--number-trainers 3 --number-ps 2", "--trainers 3 --servers 2"),
        ("--number-embeddings 9", "--embeddings 9"),
        ("", "--steps 1000 --warmup 50"),
    ],
)
def test_names_of_flags_of_upstream(old, new, monkeypatch):
    understood = read_arguments(monkeypatch, *old.split())
    assert understood == read_arguments(monkeypatch, *new.split())


WRONG = [
    ("--trainers 100000", "argument --trainers: '100000' is not a whole number from 1 to 64"),
    ("--embeddings 2000000000", "argument --embeddings: '2000000000' rows of 256 columns need"),
    ("--nproc 8 --embedding-dim 100", "argument --embedding-dim: '100' is not a multiple of 64: "),
    ("--warmup 5", "argument --warmup: '5' is not 0 or a multiple of 10"),
    ("--warmup-cycles x", "argument --warmup-cycles: 'x'"),
    ("--steps 0", "argument --steps: '0' is not a multiple of 10 above 0"),
    ("--trainer 1", "unrecognized arguments: --trainer 1"),
]
if not torch.cuda.is_available():
    WRONG.append(("--device cuda", "argument --device: 'cuda' needs a GPU"))


@pytest.mark.parametrize("words, said", WRONG)
def test_wrong_input_is_one_line(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words.split()])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        ddp_rpc.main()
    captured = capsys.readouterr()
    assert ended.value.code == 2 and captured.out == ""
    assert captured.err.startswith("ddp_rpc.py: error: ") and captured.err.count("\n") == 1
    assert said in captured.err


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)


def test_file_without_its_launcher(forked, tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    shutil.copytree(FOLDER.parent / "common", tmp_path / "common")
    status, output = forked(None, tmp_path / SCRIPT.name)
    assert status == 1 and output.count("\n") == 1, output
    assert "No module named 'launcher': copy" in output and "08_ddp_rpc/launcher.py" in output


# What few machines can run.


@pytest.mark.cuda
@pytest.mark.parametrize("trainers", [1, 2])
def test_on_a_gpu(script, trainers):
    layout = ["--trainers", trainers, "--servers", 2, "--device", "cuda"]
    status, output = script([sys.executable, *SHORT, *layout]).wait()
    assert status == 0 and output.count("verify: passed") == 2, output
