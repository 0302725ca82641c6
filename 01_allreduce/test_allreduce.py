"""Tests of 01_allreduce: what all three all-reduces promise, the fit, the script from outside."""

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent / "shared_memory"))

import allreduce
from allreduce import IN_FLIGHT, PIECE_BYTES, RINGS
from alpha_beta import fit
from shared_memory import SharedMemoryAllReduce

from tools.record import output_of
from tools import harness
from tools.harness import ROOT, SHARED_MEMORY, masked, names_in, read_json, wait_for_line

SCRIPT = Path(__file__).with_name("allreduce.py")
SHARED = Path(__file__).parent / "shared_memory" / "shared_memory.py"
RECORDED = output_of(SCRIPT.with_name("reference_output.txt"))
PNG = b"\x89PNG"
SMALL = ["--sizes-mb", "0.5,1", "--nproc", "2", "--steps", "3", "--warmup", "1"]


def files_in(folder):
    return ["--json", folder / "a.json", "--plot", folder / "a.png"]


# What all three promise

SMALL_PIECE = 4096  # bytes, so that a small tensor has many of them
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


def all_reduce_of(name):
    """On a rank: one of the three all-reduces."""
    if name == "shared":
        return SharedMemoryAllReduce(piece_bytes=SMALL_PIECE, timeout=30)
    return RINGS[name]


each = pytest.mark.parametrize("name", [*RINGS, "shared"])


def differing_sums(name) -> list[tuple]:
    """Those (dtype, shape) whose sum is not bitwise torch's: of integers, exact in any order.

    With empty parts, with one piece and with many, and pieces one element off.
    """
    all_reduce = all_reduce_of(name)
    world_size = dist.get_world_size()
    floats = SMALL_PIECE // 4
    shapes = [(), (0,), (1,), (world_size - 1,), (world_size + 1,), (3, 5, 7)]
    shapes += [(floats - 1,), (floats,), (floats + 1,), (9973,)]
    numbers = torch.Generator().manual_seed(dist.get_rank())
    differing = []
    for dtype, shape in itertools.product(DTYPES, shapes):
        tensor = torch.randint(0, 10, shape, generator=numbers).to(dtype)
        expected = tensor.clone()
        all_reduce(tensor.requires_grad_(dtype.is_floating_point))
        dist.all_reduce(expected)
        if not torch.equal(tensor, expected):
            differing.append((dtype, shape))
    return differing


@each
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sum_equals_all_reduce(ranks, name, world_size):
    assert ranks(world_size).run(differing_sums, name) == [[]] * world_size


def check_random_numbers(name):
    """The backend's sum is near (the order rounds differently); all ranks' own are the same.

    The ring uses every buffer more than once; chunks differ in length and number of pieces.
    """
    numbers = torch.Generator().manual_seed(dist.get_rank())
    length = 3 * (IN_FLIGHT + 1) * PIECE_BYTES // 8 + 1
    ours = torch.randn(length, dtype=torch.float64, generator=numbers)
    backends = ours.clone()
    all_reduce_of(name)(ours)
    dist.all_reduce(backends)
    assert (ours - backends).abs().max() < 1e-14
    first = ours.clone()
    dist.broadcast(first, 0)
    assert torch.equal(ours, first)


@each
def test_all_ranks_hold_the_same_bits(ranks, name):
    ranks(3).run(check_random_numbers, name)


def sum_after_refusals(name):
    """Tensors that are refused; the sum that the next, correct call returns."""
    all_reduce = all_reduce_of(name)
    for tensor in (torch.arange(12.0)[::2], torch.ones(4, 6).t(), torch.ones(6, device="meta")):
        with pytest.raises(RuntimeError, match="contiguous CPU tensor"):
            all_reduce(tensor)
    tensor = torch.ones(PIECE_BYTES)
    all_reduce(tensor)
    return tensor.unique().tolist()


@each
def test_a_refused_tensor_leaves_nothing_behind(ranks, name):
    """Receives that were posted before the error would swallow the next call's messages."""
    assert ranks(3).run(sum_after_refusals, name, timeout=20) == [[3.0]] * 3


# The measurement and the model


def seconds_and_wrong():
    def leaves_one_out(tensor):
        dist.all_reduce(tensor[:-1])
        time.sleep(0.02 * dist.get_rank())

    def swaps_chunks(tensor):
        dist.all_reduce(tensor)
        tensor.copy_(tensor.roll(len(tensor) // 2))

    algorithms = {"gloo": dist.all_reduce, "one out": leaves_one_out, "swapped": swaps_chunks}
    return allreduce.measure(algorithms, torch.empty(2**18), 2, 1)


def test_wrong_elements_are_counted_and_the_slowest_rank_is_timed(ranks):
    for rows in ranks(2).run(seconds_and_wrong):
        gloo, one_out, swapped = rows
        assert gloo["wrong"] == 0 and one_out["wrong"] == 3 * 2 and swapped["wrong"] > 2**18
        assert one_out["warmup"] == 1 and len(one_out["seconds"]) == 2
        assert min(one_out["seconds"]) > 0.02


def test_a_row_of_the_table(capsys):
    """busbw of 4 ranks is algbw · 6/4; the ratio to the backend's, whose p50 is 50 ms here."""
    row = {"algorithm": "ring", "world_size": 4, "size_bytes": 10**8, "warmup": 5, "wrong": 7}
    row |= {"seconds": [0.1] * 20, "p50": 0.1}
    allreduce.print_measured(row, 0.05)
    cells = capsys.readouterr().out.split()
    assert cells[3] == "20+5" and cells[-4:] == ["1.00", "1.50", "0.50", "7"]


def test_fit():
    """α and β of exact times; a large one that is 20 % off moves α little."""
    sizes = [2**20 * megabytes for megabytes in (1, 10, 100, 1000)]
    times = [250e-6 + 2 * 3 / 4 * size / 3e9 for size in sizes]
    alpha, beta, error = fit(sizes, times, world_size=4)
    assert (alpha, beta) == (pytest.approx(250e-6), pytest.approx(3e9)) and error < 1e-9
    times[-1] *= 1.2
    alpha, beta, error = fit(sizes, times, world_size=4)
    assert alpha == pytest.approx(250e-6, rel=0.2) and 0.05 < error < 0.2


# The script


def test_script_measures_fits_and_draws(forked, tmp_path):
    words = [*SMALL, "--sizes-mb", "0.5,32"]  # far apart: the time grows on a busy machine, too
    status, output = forked(None, SCRIPT, *words, *files_in(tmp_path))
    assert status == 0, output
    grid, model = masked(output.partition("\nmodel")[0]), masked(output.partition("\nmodel")[2])
    if torch.cuda.device_count() < 2:
        assert set(masked(RECORDED.partition("\nmodel")[0])) == set(grid), output
    assert model[1:] == ["algorithm ranks α, µs β, GB/s error (rms)"] + [
        f"{name} # # # # %" for name in ("gloo", "plain ring", "ring")
    ]
    assert output.count("3+1") == 6 and output.count("ranks hold the sum, bitwise equal") == 1
    assert output.endswith(f"written: {tmp_path / 'a.json'}\nwritten: {tmp_path / 'a.png'}\n")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)

    result = read_json(tmp_path / "a.json", "01_allreduce")
    assert (result["world_size"], result["backend"]) == ([2], ["gloo", "nccl"])
    assert result["copy_bytes_per_second"] > 0 and len(result["fits"]) == 3
    assert len(result["rows"]) == 6
    for row in result["rows"]:
        assert row["wrong"] == 0 and len(row["seconds"]) == 3
        assert 0 < min(row["seconds"]) <= row["p50"] <= max(row["seconds"])


def test_what_needs_too_much_memory_is_left_out(forked):
    words = ["--sizes-mb", "0.5,1e9", *SMALL[2:], "--backends", "gloo", "--no-plot"]
    status, output = forked(None, SCRIPT, *words)
    assert status == 0, output
    lines = masked(output)
    assert "gloo # # not run: needs # GB of memory, and # are free" in lines
    assert "gloo # - - -" in lines  # a size alone has no fit


def test_demo(forked):
    status, output = forked(None, SCRIPT, "--demo")
    assert status == 0 and output.strip() == RECORDED.partition("\n\n")[0]


@pytest.mark.cuda
def test_with_a_gpu(script, tmp_path):
    """As many ranks as there are GPUs for."""
    words = [*SMALL, "--nproc", "1,2", *files_in(tmp_path)]
    status, output = script([sys.executable, SCRIPT, *words]).wait()
    assert status == 0, output
    rows = read_json(tmp_path / "a.json", "01_allreduce")["rows"]
    measured = {(row["algorithm"], row["world_size"]) for row in rows if row["wrong"] == 0}
    assert {("gloo", 2), ("nccl", 1)} <= measured, output
    assert (("nccl", 2) in measured) == (torch.cuda.device_count() >= 2), output


def test_arguments(monkeypatch):
    """By default, and as upstream's benchmark is called."""
    theirs = "--world_size 4 --tensor_size_mb 10 --backend gloo --iters 7"
    for words, expected in (("", ([2, 4, 6], 20)), (theirs, ([4], 7))):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words.split()])
        args = allreduce.read_arguments(allreduce.__doc__, "01_allreduce.png")
        assert (args.world_sizes, args.steps) == expected
        assert args.plot == ROOT / "results" / "01_allreduce.png"
    assert (args.sizes_mb, args.backends) == ([10], ["gloo"])


WRONG = ["--sizes-mb 0", "--sizes-mb x", "--sizes-mb nan", "--nproc 0", "--backends mpi"]


@pytest.mark.parametrize("words", WRONG)
def test_bad_input_is_one_line(refusal, words):
    option, value = words.split(" ")
    said = refusal(allreduce.main, SCRIPT, option, value)
    assert said.startswith(f"argument {option}/--") and value in said


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)


# What ends it early: each run would take a minute, and is hit when the first sizes are measured.
LONG = ["--backends", "gloo", "--sizes-mb", "0.5,1,400", "--nproc", "2,4"]


def check_kept(output, folder):
    """What was measured has been fitted, drawn and written."""
    assert "Traceback" not in output and "model" in output and "β, GB/s" in output, output
    assert len(json.loads((folder / "a.json").read_text())["rows"]) >= 4
    assert (folder / "a.png").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_is_measured(forked, tmp_path, number):
    run = forked.start(None, SCRIPT, *LONG, *files_in(tmp_path))
    run.wait_for("\nring            2       1 ")
    os.kill(run.processes[0].pid, number)
    status, output = run.wait(30)
    assert status == 130 and "interrupted" in output
    check_kept(output, tmp_path)


@pytest.mark.full
@harness.needs_proc
def test_kill_of_a_rank_keeps_what_is_measured(script, tmp_path):
    """With spawned ranks; nothing stays in the shared memory."""
    memory = names_in(SHARED_MEMORY)
    run = script([sys.executable, SHARED, *LONG, *files_in(tmp_path)])
    wait_for_line(run, "shared          2       1 ")
    processes = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in run.processes()}
    ranks = [pid for pid, command in processes.items() if b"spawn_main" in command]
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    status, rest = run.wait(30)  # fails if a process is left
    assert status == 1 and rest.count("shared_memory.py: error: a rank ended: ") == 1, rest
    check_kept(rest, tmp_path)
    assert not harness.left_in(SHARED_MEMORY, memory)
