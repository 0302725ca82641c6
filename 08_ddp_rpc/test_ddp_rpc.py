"""Stage 08: layouts, verify (and that it can fail), how a run ends, bad options, the file alone."""

import os
import shutil
import signal
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import ddp_rpc
import pytest
import torch
from torch.distributed import rpc

from tools import testing
from tools.testing import needs_proc, wait_for_line

FOLDER = Path(__file__).resolve().parent
SCRIPT = FOLDER / "ddp_rpc.py"
QUICK = [SCRIPT, "--warmup-cycles", 1, "--steps", 20]


def test_batches_are_what_the_benchmark_draws():
    args = SimpleNamespace(servers=3, embedding_dim=512)
    for indices, offsets, targets in islice(ddp_rpc.random_batches(args, 30, seed=1), 500):
        bags = torch.diff(offsets, append=torch.tensor([len(indices)]))
        assert 20 <= len(indices) <= 50 and 0 <= indices.min() and indices.max() < 30
        assert offsets[0] == 0 and 1 <= bags.min() and bags.max() <= 10
        assert len(targets) == 3 * len(offsets) and 0 <= targets.min() and targets.max() < 8


def bytes_of_a_step(indices, offsets, servers, embedding_dim):
    """int64 there, float32 sums back, and their gradients there again."""
    return servers * (8 * len(indices) + 8 * len(offsets) + 2 * 4 * embedding_dim * len(offsets))


full = pytest.mark.full
LAYOUTS = [(2, 2, 300), *[pytest.param(*each, marks=full) for each in ((1, 3, 31), (3, 1, 20_000))]]


@pytest.mark.parametrize("trainers, servers, embeddings", LAYOUTS)
def test_layouts_verify_train_and_count(script, tmp_path, trainers, servers, embeddings):
    """Examples, and bytes, which grow with the batch and not with the tables."""
    words = ["--trainers", trainers, "--servers", servers, "--embeddings", embeddings]
    words += ["--json", tmp_path / "out.json"]
    status, output = script([sys.executable, *QUICK, *words]).wait(220)
    assert status == 0 and output.count("verify: passed") == 2 and "Warning" not in output, output
    result = testing.read_json(tmp_path / "out.json", "08_ddp_rpc")
    assert len(result["epochs"]) == trainers and result["verify"]["max_abs_diff"] <= 1e-5
    args = SimpleNamespace(**result["options"])
    for rank, of_lookups in enumerate(result["epochs"]):
        batches = ddp_rpc.random_batches(args, embeddings, rank)
        epochs = [list(islice(batches, 10)) for _ in range(6)]
        in_turn = [of_lookups[number % 2][number // 2] for number in range(4)]
        for batches, measured in zip(epochs[2:], in_turn, strict=True):  # two were to warm up
            seconds, waited, message_bytes, examples = measured
            assert 0 < waited < seconds and examples == sum(len(each[1]) for each in batches)
            steps = [bytes_of_a_step(*each[:2], servers, args.embedding_dim) for each in batches]
            assert message_bytes == sum(steps)


@pytest.mark.parametrize(
    "lookup, expected",
    [("parallel", ["ask", "ask", "wait"]), ("sequential", ["ask", "wait", "ask", "wait"])],
)
def test_all_servers_are_asked_before_an_answer_is_awaited(lookup, expected, monkeypatch):
    calls = []
    answers = [torch.zeros(3)] * 2

    def ask_and_wait(*question):
        calls.extend(["ask", "wait"])
        return answers[0]

    monkeypatch.setattr(rpc, "rpc_async", lambda *_: calls.append("ask"))
    monkeypatch.setattr(torch.futures, "wait_all", lambda _: calls.append("wait") or answers)
    monkeypatch.setattr(rpc, "rpc_sync", ask_and_wait)
    tables = [SimpleNamespace(owner=lambda: "ps0")] * 2
    model = SimpleNamespace(tables=tables, lookup=lookup, round_trip=0.1)
    model.lookup_seconds, model.message_bytes = 0.0, 0
    ddp_rpc.HybridModel.ask_servers(model, torch.zeros(4), torch.zeros(1))
    assert calls == expected and 0.1 * expected.count("wait") <= model.lookup_seconds
    assert model.message_bytes == 2 * (16 + 4) + 2 * 2 * 12


GROUP = "dist.new_group([dist.get_rank()], use_local_synchronization=True)"


@pytest.mark.full
@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("local, lr=LEARNING_RATE", "local, lr=2 * LEARNING_RATE", "away from a plain model"),
        ("=process_group)\n        self.r", f"={GROUP})\n        self.r", "different dense"),
    ],
)
def test_verify_notices_wrong_training(script, tmp_path, right, wrong, said):
    text = SCRIPT.read_text()
    assert text.count(right) == 1
    (tmp_path / "ddp_rpc.py").write_text(text.replace(right, wrong))
    shutil.copytree(FOLDER.parent / "common", tmp_path / "common")
    words = ["--trainers", 2, "--servers", 1, "--steps", 10]
    status, output = script([sys.executable, tmp_path / "ddp_rpc.py", *words]).wait()
    assert status == 1 and "verify FAILED" in output and said in output, output


# How a run ends.

ENDLESS = [sys.executable, SCRIPT, "--steps", 10_000_000]
VERIFIED = "verify: passed"  # training begins


def process_of(run, name):
    """The process of the run that has this role: they start in the order of their ranks."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in run.processes()}
    ranks = sorted(pid for pid, command in commands.items() if b"spawn_main" in command)
    names = ["master", "trainer0", "trainer1", "ps0", "ps1"]
    return dict(zip(names, ranks, strict=True))[name]


@needs_proc
@pytest.mark.full
@pytest.mark.parametrize("name", ["ps1", "trainer0", "master"])
def test_when_a_process_is_killed_all_end(script, name):
    run = script(ENDLESS)
    wait_for_line(run, VERIFIED)
    os.kill(process_of(run, name), signal.SIGKILL)
    status, output = run.wait(30)
    assert status == 1 and f"error: {name} failed, and all others were ended: " in output, output
    assert "SIGKILL" in output and "Traceback" not in output


@needs_proc
@pytest.mark.parametrize(
    "number, expected", [(signal.SIGINT, 1), pytest.param(signal.SIGKILL, -9, marks=full)]
)
def test_when_the_launcher_is_ended_all_end(script, number, expected):
    run = script(ENDLESS)
    wait_for_line(run, VERIFIED)
    end = os.killpg if number == signal.SIGINT else os.kill  # as the terminal does
    end(run.process.pid, number)
    status, output = run.wait(30)  # fails if a process is left
    assert status == expected and "Traceback" not in output, output
    assert ("interrupted\n" in output) == (number == signal.SIGINT)


@needs_proc
@pytest.mark.full
@pytest.mark.parametrize("name", ["trainer1", "ps1"])
def test_a_process_that_does_not_respond_is_named(script, name):
    run = script([*ENDLESS, "--timeout", 10])
    wait_for_line(run, VERIFIED)
    os.kill(process_of(run, name), signal.SIGSTOP)
    status, output = run.wait(60)
    assert status == 1, output
    assert f"error: --timeout 10 s are over; no sign of life from {name}\n" in output, output


# The command line.


@pytest.mark.parametrize(
    "words, expected",
    [
        ("", (2, 2, 256, 5)),
        ("--nproc 8 --warmup-cycles 0", (8, 8, 64, 0)),  # columns: the fewest that make rows of 512
        ("--nproc 3 --trainers 1 --servers 12", (1, 12, 128, 5)),
        ("--number-trainers 3 --number-ps 16 --number-embeddings 300", (3, 16, 32, 5)),
    ],
)
def test_layout_and_upstreams_names_of_flags(words, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words.split()])
    args = ddp_rpc.read_arguments()
    assert (args.trainers, args.servers, args.embedding_dim, args.warmup_cycles) == expected
    assert args.embeddings == 300


WRONG = [
    ("--trainers 100000", "argument --trainers/--number-trainers: '100000' is not a whole number"),
    ("--nproc 8 --embedding-dim 100", "argument --embedding-dim: '100' is not a multiple of 64: "),
    ("--steps 0", "argument --steps: '0' is not a whole number from 1"),
    ("--round-trip-ms 2s", "argument --round-trip-ms: "),
]
if not torch.cuda.is_available():
    WRONG.append(("--device cuda", "argument --device: invalid choice: 'cuda'"))


@pytest.mark.parametrize("words, said", WRONG)
def test_wrong_input_is_one_line(refusal, words, said):
    assert refusal(ddp_rpc.main, SCRIPT, *words.split()).startswith(said)


def test_file_alone(tmp_path):
    testing.check_script_alone(SCRIPT, tmp_path)


@pytest.mark.cuda
def test_on_a_gpu(script):
    status, output = script([sys.executable, *QUICK, "--device", "cuda"]).wait()
    assert status == 0 and output.count("verify: passed") == 2, output
