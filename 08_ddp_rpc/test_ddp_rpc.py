"""Stage 08: roles, verify (and that it can fail), how a run ends, bad options, the file alone."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common.testing import harness

FOLDER = Path(__file__).resolve().parent
SCRIPT = FOLDER / "ddp_rpc.py"
linux = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds the processes of a run in /proc"
)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ddp_rpc = load(SCRIPT)
launcher = load(FOLDER / "launcher.py")


@pytest.mark.parametrize(
    "trainers, servers, expected",
    [
        (1, 3, ["trainer0", "ps0", "ps1", "ps2", "master"]),
        (3, 1, ["trainer0", "trainer1", "trainer2", "ps0", "master"]),
        (2, 4, ["trainer0", "trainer1", "ps0", "ps1", "ps2", "ps3", "master"]),
    ],
)
def test_roles_of_uneven_layouts(trainers, servers, expected):
    ranks = range(trainers + servers + 1)
    assert [launcher.role(rank, trainers, servers) for rank in ranks] == expected


def test_batches_are_what_the_benchmark_draws():
    generator = torch.Generator().manual_seed(1)
    for indices, offsets, targets in ddp_rpc.random_batches(500, 30, 3, generator):
        bags = torch.diff(offsets, append=torch.tensor([len(indices)]))
        assert 20 <= len(indices) <= 50 and 0 <= indices.min() and indices.max() < 30
        assert offsets[0] == 0 and 1 <= bags.min() and bags.max() <= 10
        assert len(targets) == 3 * len(offsets) and 0 <= targets.min() and targets.max() < 8


@pytest.mark.parametrize("trainers, servers", [(1, 3), pytest.param(3, 1, marks=pytest.mark.full)])
def test_uneven_layouts_verify_train_and_count_every_example(forked, tmp_path, trainers, servers):
    layout = ["--trainers", trainers, "--servers", servers, "--embeddings", 31]
    length = ["--lookup", "both", "--seed", 5, "--warmup", 10, "--steps", 20]
    words = [*layout, *length, "--json", tmp_path / "out.json"]
    status, output = forked(None, SCRIPT, *words, PYTHONIOENCODING="ascii")  # which has no ×
    assert status == 0 and output.count("verify: passed") == 2 and "Warning" not in output, output
    cuda, gpus = torch.version.cuda or "none", torch.cuda.device_count()
    assert output.splitlines()[1] == f"CUDA {cuda}, {gpus} GPUs; {launcher.topology()}"
    assert output.endswith(f"written: {tmp_path}/out.json\n") and " ? the time in l" in output
    result = harness.read_json(tmp_path / "out.json", "08_ddp_rpc")
    assert result["verify"]["max_abs_diff"] <= 1e-5 and result["verify"]["rows_moved"] == 15
    names = [f"trainer{rank}" for rank in range(trainers)]
    assert sorted(one["name"] for one in result["trainers"]) == names
    assert (result["world_size"], result["threads_per_rank"], result["backend"]) == (5, 1, "gloo")
    options = result["options"]
    assert (options["steps"], options["warmup"], options["embedding_dim"]) == (20, 10, 512)
    assert result["seconds"] > 0
    for rank, one in enumerate(result["trainers"]):
        generator = torch.Generator().manual_seed(5 + rank)
        counts = []
        for _ in range(6):
            batches = ddp_rpc.random_batches(10, 31, servers, generator)
            counts.append(sum(len(offsets) for _, offsets, _ in batches))
        # The two epochs of warming up are not counted.
        assert one["lookups"]["parallel"]["examples"] == counts[2::2]
        assert one["lookups"]["sequential"]["examples"] == counts[3::2]
        assert len(one["loss"]) == 6 and all(0 < loss < 20 for loss in one["loss"])
        assert f"trainer{rank} parallel" in output and f"trainer{rank} sequential" in output
    assert "all parallel" in output and "parallel / sequential" in output


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
        ("(2 * indices, offsets, targets)", "(2 * indices + 1, offsets, targets)", "rows of ps0"),
    ],
)
@pytest.mark.full
def test_verify_notices_wrong_training(forked, tmp_path, right, wrong, said):
    text = SCRIPT.read_text()
    assert text.count(right) == 1
    (tmp_path / "ddp_rpc.py").write_text(text.replace(right, wrong))
    shutil.copy(FOLDER / "launcher.py", tmp_path)
    shutil.copytree(FOLDER.parent / "common", tmp_path / "common")
    words = ["--trainers", 2, "--servers", 1]
    status, output = forked(None, tmp_path / "ddp_rpc.py", *words)
    assert status == 1 and "verify FAILED" in output and said in output, output


def wait_for(run, text):
    """Read a running script's output up to a line that has this text in it."""
    for line in run.process.stdout:
        if text in line:
            return
    pytest.fail(f"it ended without saying {text!r}")


def spawned(run):
    """The process ids of the spawned processes, by rank."""
    found = []
    for pid in run.processes():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return sorted(found)[1:]  # the first one forks the others


def second_process(run):
    """A trainer, as soon as all five are there."""
    deadline = time.monotonic() + 30
    while len(spawned(run)) < 5 and run.process.poll() is None and time.monotonic() < deadline:
        pass
    return spawned(run)[1]


def listening(processes):
    """The addresses, as /proc writes them, on which these processes listen."""
    addresses = set()
    for pid in processes:
        files = Path(f"/proc/{pid}/fd").iterdir()
        sockets = {os.readlink(one) for one in files if one.is_symlink()}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:  # 0A: listening
                    addresses.add(fields[1].split(":")[0])
    return addresses


@linux
@pytest.mark.parametrize(
    "of_each, rank, name",
    [
        (1, 0, "trainer0"),
        pytest.param(2, 0, "trainer0", marks=pytest.mark.full),
        pytest.param(2, 3, "ps1", marks=pytest.mark.full),
    ],
)
def test_listens_on_loopback_and_when_a_process_is_killed_all_end(script, of_each, rank, name):
    layout = ["--trainers", of_each, "--servers", of_each]
    run = script([sys.executable, SCRIPT, *layout, "--steps", 10_000_000])
    wait_for(run, "have moved")  # verify is over, training begins
    processes = spawned(run)
    assert len(processes) == 2 * of_each + 1
    assert listening(run.processes()) == {"0100007F"}  # 127.0.0.1
    os.kill(processes[rank], signal.SIGKILL)
    start = time.monotonic()
    status, output = run.wait()
    assert status == 1 and f"error: {name} (rank {rank}) was ended by SIGKILL" in output, output
    assert time.monotonic() - start < 30


ENDLESS = ["--trainers", 1, "--servers", 1, "--steps", 10_000_000]


@linux
def test_when_a_signal_ends_the_launcher_all_end(forked):
    runs = [forked.start(None, SCRIPT, *ENDLESS) for _ in range(2)]  # at once: most is waiting
    for run in runs:
        run.wait_for("all meet at")
    os.kill(runs[0].processes[0].pid, signal.SIGTERM)
    os.killpg(runs[1].processes[0].pid, signal.SIGINT)  # as the terminal does
    for run, expected in zip(runs, [143, 1], strict=True):
        status, output = run.wait(30)  # fails if a process is left
        assert status == expected and "Traceback" not in output, output


@linux
@pytest.mark.full
def test_when_the_launcher_is_ended_nothing_is_left(script):
    """By each of three signals; three runs at once, because most of a run is its start."""
    runs = {}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        runs[number] = script([sys.executable, SCRIPT, *ENDLESS])
    for number, run in runs.items():
        wait_for(run, "all meet at")
        if number == signal.SIGINT:
            os.killpg(run.process.pid, number)  # as the terminal does
        else:
            run.process.send_signal(number)
    expected = {signal.SIGTERM: 143, signal.SIGINT: 1, signal.SIGKILL: -9}
    for number, run in runs.items():
        deadline = time.monotonic() + 30  # the others may still be importing torch
        while run.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        status, output = run.wait()
        assert status == expected[number], output
        # After SIGKILL Python itself complains where a process was half started.
        if number != signal.SIGKILL:
            assert "Traceback" not in output, output


@pytest.mark.full
@linux
@pytest.mark.parametrize("fault", harness.FAULTS)
@pytest.mark.parametrize(
    "moment", ["rank 0 to", "verify: passed, one trainer", "verify: passed, dense"]
)
def test_faults(script, moment, fault, tmp_path):
    words = ["--trainers", 2, "--servers", 2, "--embedding-dim", 256, "--steps", 10_000_000]
    command = [sys.executable, SCRIPT, *words]
    harness.check_fault(script, command, moment, fault, tmp_path, second_process)


@pytest.mark.full
@linux
@pytest.mark.parametrize(
    "rank, place, name",
    [
        (1, "somebody has waited for an all-reduce of the trainers in vain; ", "trainer1"),
        (3, "somebody has waited for an answer by RPC in vain; ", "ps1"),
        (4, "", "master (rank 4)"),
    ],
)
def test_a_process_that_does_not_respond_is_named(script, rank, place, name):
    words = ["--trainers", 2, "--servers", 2, "--steps", 10_000_000, "--timeout", 10]
    run = script([sys.executable, SCRIPT, *words])
    wait_for(run, "have moved")
    os.kill(spawned(run)[rank], signal.SIGSTOP)
    status, output = run.wait(60)
    assert status == 1, output
    said = f"error: --timeout 10 s are over: {place}no sign of life from {name}\n"
    assert said in output, output


@pytest.mark.parametrize(
    "options, said",
    [
        (["--trainers", "0"], "argument --trainers: '0' is not a whole number from 1 to 64"),
        (["--trainers", "many"], "argument --trainers: 'many'"),
        (["--trainers", "100000"], "argument --trainers: '100000'"),
        (["--servers", "-1"], "argument --servers: '-1'"),
        (["--servers", ""], "argument --servers: ''"),
        (["--embeddings", "0"], "argument --embeddings: '0'"),
        (["--embeddings", "2000000000"], "argument --embeddings: '2000000000'"),
        (["--embedding-dim", "0"], "argument --embedding-dim: '0'"),
        (["--embedding-dim", "100"], "with 8 servers the nearest that works is 64 or 128"),
        (["--embedding-dim", "63"], "with 8 servers the nearest that works is 64"),
        (
            ["--servers", "3", "--embedding-dim", "700"],
            "with 3 servers the nearest that works is 512 or 1024",
        ),
        (["--warmup", "-1"], "argument --warmup: '-1'"),
        (["--warmup", "5"], "'5' is not a multiple of 10; the nearest that work are 0 and 10"),
        (["--steps", "0"], "argument --steps: '0' is not a whole number from 10 to "),
        (["--steps", "1.5"], "argument --steps: '1.5'"),
        (["--steps", "15"], "'15' is not a multiple of 10; the nearest that work are 10 and 20"),
        (["--epochs", "0"], "argument --epochs: '0' is not a whole number from 1 to "),
        (["--lookup", "random"], "argument --lookup: invalid choice: 'random'"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (
            ["--master-addr", "no.such.host.invalid"],
            "argument --master-addr: cannot listen on 'no.such.host.invalid'",
        ),
        (
            ["--master-addr", "192.0.2.1"],
            "argument --master-addr: cannot listen on '192.0.2.1'",
        ),  # of nobody: RFC 5737
        (["--master-port", "65536"], "argument --master-port: '65536'"),
        (["--timeout", "0"], "argument --timeout: '0'"),
        (["--timeout", "soon"], "argument --timeout: 'soon'"),
        (["--seed", "x"], "argument --seed: 'x'"),
        (["--json", ""], "argument --json: ''"),
        (["--json", "/no/such/folder/x.json"], "argument --json: '/no/such/folder/x.json'"),
        (["--json", str(FOLDER)], "argument --json:"),
        (["--trainer", "1"], "unrecognized arguments: --trainer 1"),
    ],
)
def test_bad_options_are_one_line(options, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        ddp_rpc.main()
    captured = capsys.readouterr()
    assert ended.value.code == 2 and captured.out == ""
    assert captured.err.startswith("ddp_rpc.py: error: ") and captured.err.count("\n") == 1
    assert said in captured.err


def test_topology(tmp_path, monkeypatch):
    said = launcher.topology()
    assert f"{os.cpu_count()} cores, " in said or "GPU" in said
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU0 beside GPU1 $*\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert launcher.topology() == "\nGPU0 beside GPU1 topo -m"
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")  # no driver
    assert "NUMA " in launcher.topology()


def test_a_port_in_use_is_one_line(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = "argument --master-port: cannot listen on"
        test_bad_options_are_one_line(["--master-port", port], said, monkeypatch, capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu_is_one_line(monkeypatch, capsys):
    said = "argument --device: 'cuda' needs a GPU"
    test_bad_options_are_one_line(["--device", "cuda"], said, monkeypatch, capsys)


@pytest.mark.cuda
@pytest.mark.parametrize("trainers", [1, 2])
def test_on_a_gpu(script, trainers):
    layout = ["--trainers", trainers, "--servers", 2, "--device", "cuda"]
    length = ["--warmup", 10, "--steps", 20]
    status, output = script([sys.executable, SCRIPT, *layout, *length]).wait()
    assert status == 0 and output.count("verify: passed") == 2, output


@pytest.mark.parametrize(
    "old, new",
    [
        ("--epochs 7", "--steps 70"),
        ("--warmup-cycles 0", "--warmup 0"),
        ("--warmup-cycles 3", "--warmup 30"),
        ("--number-trainers 3 --number-ps 2", "--trainers 3 --servers 2"),
        ("--number-embeddings 9", "--embeddings 9"),
        ("", "--steps 1000 --warmup 50"),
    ],
)
def test_old_and_upstream_names_of_flags(old, new, monkeypatch):
    understood = []
    for words in (old, new):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words.split()])
        understood.append(vars(launcher.read_arguments("", 512, 10)))
    assert understood[0] == understood[1]


def test_help_is_within_100_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    said = read_help(monkeypatch, capsys)
    assert max(map(len, said.splitlines())) <= 100
    for hidden in ("--epochs", "--warmup-cycles", "--number-", "SUPPRESS"):
        assert hidden not in said
    assert "measured; a multiple of 10 (default: 1000)" in said


def read_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        ddp_rpc.main()
    assert not ended.value.code
    return capsys.readouterr().out


SHORT = [SCRIPT, "--trainers", 1, "--servers", 1, "--steps", 20, "--warmup", 0]


def test_progress_on_a_terminal(forked):
    """Of the launcher, while the others start, of the master, and of trainer0."""
    status, output, shown = forked.on_a_terminal(None, *SHORT)
    assert status == 0 and "\n" not in shown and "\r" not in output, shown
    starting, _, later = shown.partition("\r\x1b[Kverify: one trainer with all")
    assert "0 of 3 processes have started" in starting and "have started" not in later, shown
    _, _, training = later.partition("\r\x1b[Kverify: all trainers")
    assert "training: epoch 1 of 2\r" in training and "epoch 2 of 2, " in training, shown
    assert shown.endswith("\r\x1b[K")  # nothing stays


@pytest.mark.full
def test_a_closed_pipe_loses_no_file(forked, tmp_path):
    words = [*SHORT, "--no-verify", "--json", tmp_path / "out.json"]
    assert forked.check_closed_pipe(None, *words) == ""
    [trainer] = json.loads((tmp_path / "out.json").read_text())["trainers"]
    assert len(trainer["lookups"]["parallel"]["seconds"]) == 2


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)


def test_without_its_launcher_it_says_what_to_copy(monkeypatch):
    monkeypatch.setitem(sys.modules, "launcher", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        ddp_rpc.main()
    message = ended.value.code
    assert message.startswith("error: ") and "08_ddp_rpc/launcher.py beside this file" in message


def test_file_without_its_launcher(forked, tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    shutil.copytree(FOLDER.parent / "common", tmp_path / "common")
    status, output = forked(None, tmp_path / SCRIPT.name)
    assert status == 1 and output.count("\n") == 1, output
    assert "No module named 'launcher': copy" in output and "08_ddp_rpc/launcher.py" in output


def delayed_loopback():
    """None, or the reason why a network namespace with 1 ms of delay cannot be had."""
    if not all(shutil.which(tool) for tool in ("unshare", "ip", "tc")):
        return "needs unshare, ip and tc"
    command = ["unshare", "-n", "sh", "-c", f"{DELAY} true"]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode != 0:
        return f"no delayed loopback here: {made.stderr.strip().splitlines()[0]}"
    return None


DELAY = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms && "


def test_with_latency_only_the_sequential_lookups_add_it_up(script, tmp_path):
    if reason := delayed_loopback():
        pytest.skip(reason)
    options = f"--trainers 1 --servers 8 --lookup both --steps 50 --json {tmp_path}/out.json"
    command = f"{DELAY} exec {sys.executable} {SCRIPT} {options}"
    status, output = script(["unshare", "-n", "sh", "-c", command]).wait()
    assert status == 0, output
    measured = json.loads((tmp_path / "out.json").read_text())["trainers"][0]["lookups"]
    seconds = 10 * 8 * 2 * 0.001  # steps × servers × there and back
    assert min(measured["sequential"]["lookup_seconds"]) >= seconds
