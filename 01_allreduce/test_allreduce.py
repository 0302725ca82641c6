"""Tests of 01_allreduce: the ring against the backend, the fit, the script from outside."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import allreduce
import alpha_beta
import pytest
import spawn
import torch
import torch.distributed as dist
from allreduce import IN_FLIGHT, PIECE_BYTES, fit, main, measure, ring_all_reduce
from matplotlib.figure import Figure

from common import setup
from common.testing.harness import ROOT, check_script_alone, masked, read_json

SCRIPT = Path(__file__).with_name("allreduce.py")
PNG = b"\x89PNG"
ALGORITHMS = ("gloo", "ring", "shared")
SMALL = ["--world-sizes", "2", "--steps", "3", "--warmup", "1"]


def sums(lengths, dtype):
    """Per length: does the ring's sum equal the backend's, bitwise?"""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    equal = []
    for length in lengths:
        numbers = torch.Generator().manual_seed(1000 * length + rank)
        mine = torch.randint(-9, 10, (length,), generator=numbers)
        mine = mine.to(dtype)  # sums stay exact, in bfloat16 too
        theirs = mine.clone()
        assert ring_all_reduce(mine) is None
        dist.all_reduce(theirs)
        equal.append(torch.equal(mine, theirs))
        if length > 9 and world_size > 1:
            assert mine.any()
    return equal


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, pytest.param(5, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_ring_equals_all_reduce(ranks, world_size, dtype):
    lengths = [0, 1, world_size - 1, world_size, world_size + 1, 9973, 10**6]
    assert ranks(world_size).run(sums, lengths, dtype) == [[True] * len(lengths)] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_more_pieces_than_in_flight(ranks, world_size):
    """Every buffer is used more than once; chunks differ in length and in number of pieces."""
    piece = PIECE_BYTES // 8
    lengths = [world_size * piece * (IN_FLIGHT + 1) + extra for extra in (-1, 0, 1)]
    assert ranks(world_size).run(sums, lengths, torch.float64) == [[True] * 3] * world_size


def random_sums(length):
    rank = dist.get_rank()
    ring = torch.randn(length, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    backend = ring.clone()
    ring_all_reduce(ring)
    dist.all_reduce(backend)
    gathered = [torch.empty_like(ring) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, ring)
    return (ring - backend).abs().max().item(), all(torch.equal(one, ring) for one in gathered)


def test_random_numbers(ranks):
    """The backend's sum is near (the order rounds differently); all ranks' own are the same."""
    for difference, same in ranks(4).run(random_sums, 100_003):
        assert difference < 1e-14 and same


def shapes():
    tensor = torch.full((3, 5, 7), dist.get_rank() + 1.0, requires_grad=True)
    ring_all_reduce(tensor)
    scalar = torch.tensor(1)
    ring_all_reduce(scalar)
    return bool((tensor == 6).all()) and scalar.item() == 3


def test_any_shape_in_place(ranks):
    assert ranks(3).run(shapes) == [True] * 3


def refused_then_summed():
    """Tensors that are refused; the sum that the next, correct call returns, of few and of many."""
    for tensor in (torch.arange(12.0)[::2], torch.ones(4, 6).t(), torch.ones(6, device="meta")):
        with pytest.raises(RuntimeError, match="contiguous CPU tensor"):
            ring_all_reduce(tensor)
    few = torch.arange(12.0)[::2].contiguous()
    many = torch.ones(PIECE_BYTES)
    ring_all_reduce(few)
    ring_all_reduce(many)
    return few.tolist(), many.unique().tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_refused_tensor_leaves_nothing_behind(ranks, world_size):
    """Receives that were posted before the error would swallow the next call's messages."""
    sums_of_all = [2.0 * world_size * number for number in range(6)], [float(world_size)]
    assert ranks(world_size).run(refused_then_summed, timeout=20) == [sums_of_all] * world_size


def test_fit_recovers_alpha_and_beta():
    sizes = [2**20 * megabytes for megabytes in (1, 10, 100, 1000)]
    for world_size in (2, 4, 6):
        times = [250e-6 + 2 * (world_size - 1) / world_size * size / 3e9 for size in sizes]
        alpha, beta, error = fit(sizes, times, world_size)
        assert alpha == pytest.approx(250e-6, rel=1e-6)
        assert beta == pytest.approx(3e9, rel=1e-9)
        assert error < 1e-9


def test_fit_minimises_the_relative_error():
    """A large time that is 20 % off moves α little, and no neighbour fits better."""
    sizes, times = [1e6, 1e7, 1e9], [1.1e-3, 3.0e-3, 0.25]
    alpha, beta, error = fit(sizes, times, 2)

    def error_of(alpha, beta):
        total = 0.0
        for size, seconds in zip(sizes, times, strict=True):
            total += ((alpha + size / beta) / seconds - 1) ** 2
        return (total / 3) ** 0.5

    assert error == pytest.approx(error_of(alpha, beta))
    assert error > 0.01  # of three points no error can vanish
    for a, b in ((1.02, 1), (0.98, 1), (1, 1.02), (1, 0.98)):
        assert error_of(alpha * a, beta * b) > error


def test_fit_keeps_alpha_at_zero_or_above():
    alpha, beta, error = fit([1e6, 1e8], [0.5e-3, 0.1], 2)  # a byte costs more in the large tensor
    assert alpha == 0 and beta > 0 and error > 0.1


@pytest.mark.parametrize(
    "sizes, times, world_size", [([1e6], [1.0], 2), ([1e6, 1e7], [1.0, 2.0], 1), ([], [], 2)]
)
def test_fit_says_when_there_is_nothing_to_fit(sizes, times, world_size):
    with pytest.raises(ValueError):
        fit(sizes, times, world_size)


def test_script_measures_fits_and_draws(forked, tmp_path):
    files = ["--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"]
    words = ["--sizes-mb", "0.5,1,1e9", *SMALL, *files]
    status, output = forked(None, SCRIPT, *words, PYTHONIOENCODING="ascii")
    assert status == 0, output
    assert "ranks  ?, ?s  ?, GB/s" in output  # ascii has no α, µ and β
    result = read_json(tmp_path / "a.json", "01_allreduce")
    rows = result["rows"]
    measured = {(row["algorithm"], row["world_size"], row["size_bytes"]) for row in rows}
    sizes = (2**19, 2**20)
    assert measured == {(name, 2, size) for name in ALGORITHMS for size in sizes}
    assert len(rows) == 6
    for row in rows:
        assert row["wrong"] == 0 and len(row["seconds"]) == 3 and min(row["seconds"]) > 0
        assert row["threads_per_rank"] == 1 and "torch" not in row
        assert min(row["seconds"]) <= row["mean"] <= max(row["seconds"])
        assert row["awake"] > 0 and row["asleep"] > 0
    assert output.count("3+1") == 6 and output.count("ranks hold the sum, bitwise equal") == 1
    assert (result["world_size"], result["backend"]) == ([2], ["gloo", "nccl"])
    assert result["options"]["steps"] == 3 and result["seconds"] > 0
    assert result["copy_bytes_per_second"] > 0
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    lines = masked(output)
    assert output.endswith("".join(f"written: {file}\n" for file in files[1::2]))
    assert "gloo # # not run: needs # GB of memory, and # are free" in lines
    if torch.cuda.device_count() < 2:
        assert "nccl # # not run: needs # GPUs, and torch finds #" in lines


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus(script, tmp_path):
    files = ["--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"]
    command = [sys.executable, SCRIPT, "--backends", "nccl", "--sizes-mb", "1", *SMALL, *files]
    status, output = script(command).wait()
    assert status == 0, output
    [row] = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert (row["algorithm"], row["world_size"], row["wrong"]) == ("nccl", 2, 0)
    assert min(row["seconds"]) > 0


def saved_result(path):
    """A file as --json writes it: two sizes of one algorithm, one of another."""
    rows = []
    for name, size, seconds in (("gloo", 2**20, 2e-3), ("gloo", 2**24, 9e-3), ("ring", 8, 1e-3)):
        rows.append({"algorithm": name, "world_size": 2, "size_bytes": size, "p50": seconds})
    for row in rows[:2]:  # and the third is of a file from before these were measured
        row |= {"awake": 1e-4, "asleep": 2e-4}
    path.write_text(json.dumps({"rows": rows, "copy_bytes_per_second": 1e10}))
    return path


def test_table_and_picture_from_a_file(tmp_path, monkeypatch, capsys):
    words = [saved_result(tmp_path / "a.json"), "--plot", tmp_path / "a.png"]
    monkeypatch.setattr(sys, "argv", ["alpha_beta.py", *map(str, words)])
    alpha_beta.main()
    lines = masked(capsys.readouterr().out)
    assert "gloo # # # # % # #" in lines
    assert "ring # - - no fit: needs two ranks and two sizes - -" in lines
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_medians_of_three_runs(tmp_path, monkeypatch, capsys):
    """The ratio is the median of the runs' ratios, which is not the ratio of the medians."""
    files = []
    for run, (gloo, shared) in enumerate([(4e-3, 1e-3), (6e-3, 3e-3), (5e-3, 2.5e-3)]):
        rows = []
        for name, size, seconds in (("gloo", 2**20, gloo), ("shared", 2**20, shared)):
            rows.append({"algorithm": name, "world_size": 2, "size_bytes": size, "p50": seconds})
            rows[-1] |= {"awake": 1e-4, "asleep": 2e-4 + run, "wrong": run}
        rows.append(rows[0] | {"size_bytes": 2**21 if run else 2**22})  # not in all runs
        files.append(tmp_path / f"{run}.json")
        files[-1].write_text(json.dumps({"rows": rows, "copy_bytes_per_second": 1e9 * (run + 1)}))
    monkeypatch.setattr(sys, "argv", ["alpha_beta.py", *map(str, files)])
    alpha_beta.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "01_allreduce: 3 runs, memory copy 2.00 GB/s"
    assert lines[2].split() == "gloo 2 1 5.00 0.21 1.00 1.00 1.00 1.00 3".split()
    assert lines[3].split() == "shared 2 1 2.50 0.42 4.00 2.00 2.00 2.00 3".split()
    assert lines[-2].split()[-2:] == ["100", "1000200"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rows": [], "copy_bytes_per_second": 1.0}'])
def test_a_file_that_is_no_result_is_one_line(content, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.json").write_text(content)
    monkeypatch.setattr(sys, "argv", ["alpha_beta.py", str(tmp_path / "a.json")])
    with pytest.raises(SystemExit) as end:
        alpha_beta.main()
    output, error = capsys.readouterr()
    assert end.value.code == 2 and output == ""
    assert "is not a result of allreduce.py --json" in error and error.count("\n") == 1


def test_demo(forked):
    status, output = forked(None, SCRIPT, "--demo")
    assert status == 0 and "passed, all ranks hold the sum" in output
    assert [line[:7] for line in output.splitlines()[:4]] == [f"rank {rank}:" for rank in range(4)]
    assert "benchmark" not in output


def seconds_of_calls():
    """What a call is said to take that sleeps; on each rank so long as it does on the slowest."""
    device = torch.device("cpu")
    rank = dist.get_rank()
    said = [alpha_beta.call_seconds(lambda _: time.sleep(0.02 * rank), device, 0.0, calls=3)]
    said.append(alpha_beta.call_seconds(lambda _: time.sleep(0.02 * rank), device, 0.2, calls=3))
    return said


def test_seconds_of_a_call(ranks):
    """The slowest rank's, the same on all, without the pause."""
    one, other = ranks(2).run(seconds_of_calls)
    assert one == other
    assert all(0.02 < seconds < 0.15 for seconds in one), one


def wrong_of_a_broken_one():
    """The check must see a ring that leaves one element out, and one that swaps two chunks."""

    def leaves_one_out(tensor):
        dist.all_reduce(tensor[:-1])

    def swaps_chunks(tensor):
        dist.all_reduce(tensor)
        tensor.copy_(tensor.roll(len(tensor) // 2))

    algorithms = {"gloo": dist.all_reduce, "one out": leaves_one_out, "swapped": swaps_chunks}
    return measure(algorithms, torch.empty(2**18), 2, 1, 10.0)[2]


def test_wrong_elements_are_counted(ranks):
    for wrong in ranks(2).run(wrong_of_a_broken_one):
        assert wrong["gloo"] == 0 and wrong["one out"] == 3 * 2 and wrong["swapped"] > 2**18


@pytest.mark.parametrize(
    "words",
    [
        ["--sizes-mb", "0"],
        ["--sizes-mb", "1,x"],
        ["--sizes-mb", ""],
        ["--sizes-mb", "-1"],
        ["--sizes-mb", "inf"],
        ["--sizes-mb", "nan"],
        ["--world-sizes", "0"],
        ["--world-sizes", "two"],
        ["--world-sizes", "2,"],
        ["--backends", "mpi"],
        ["--backends", ""],
        ["--steps", "0"],
        ["--steps", "1.5"],
        ["--warmup", "-1"],
        ["--row-seconds", "0"],
        ["--json", "/"],
        ["--plot", "/no/such/folder/a.png"],
        ["--json", ""],
        ["--json", "a.json", "--demo"],
        ["--plot", "a.png", "--demo"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    with pytest.raises(SystemExit) as end:
        main()
    output, error = capsys.readouterr()
    assert end.value.code == 2 and output == ""
    assert error.startswith(f"allreduce.py: error: argument {words[0]}: ")
    assert error.count("\n") == 1


QUICK = [SCRIPT, "--backends", "gloo", "--sizes-mb", "0.5,1", *SMALL]


@pytest.mark.full
def test_nothing_is_written_that_no_flag_names(forked, tmp_path):
    """In a checkout of its own, without results/."""
    for folder in ("01_allreduce", "common"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    before = sorted(path for path in tmp_path.rglob("*") if path.suffix != ".pyc")
    command = [tmp_path / "01_allreduce" / "allreduce.py", *QUICK[1:]]
    status, output = forked(None, *command, cwd=tmp_path)
    assert status == 0 and "written" not in output, output
    assert sorted(path for path in tmp_path.rglob("*") if path.suffix != ".pyc") == before


def test_make_needs_results_only_for_its_picture(tmp_path):
    (tmp_path / "common").mkdir()
    for name in ("Makefile", "common/recordings/reference.mk"):
        shutil.copy(ROOT / name, tmp_path / name)

    environment = {key: value for key, value in os.environ.items() if "MAKE" not in key}
    environment.pop("NPROC", None)

    def would_run(arguments):
        words = ["make", "-n", f"PYTHON={sys.executable}", "01_allreduce", f"ARGS={arguments}"]
        return subprocess.check_output(words, cwd=tmp_path, env=environment, text=True)

    assert "mkdir" in would_run("") and "--plot results/01_allreduce.png" in would_run("")
    for arguments in ("--demo", "--plot a.png", "--plot=a.png", "--help"):
        assert f"allreduce.py {arguments}" in " ".join(would_run(arguments).split()).replace(
            "\\ ", ""
        )
        assert "results" not in would_run(arguments)


def test_progress_on_a_terminal_and_none_in_a_pipe(forked):
    status, output, shown = forked.on_a_terminal(None, *QUICK)
    assert status == 0 and "\r" not in output and "Traceback" not in shown, shown
    for part in ("4 ranks are started", "0.5 MB: call 1 of 4: gloo", "1 MB: call 4 of 4, "):
        assert part in shown, shown
    assert " s left: ring" in shown and "\n" not in shown
    assert shown.endswith("\r\x1b[K")  # nothing stays


@pytest.mark.full
def test_a_closed_pipe_loses_no_file(forked, tmp_path):
    files = ["--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"]
    assert forked.check_closed_pipe(None, *QUICK, *files) == ""
    assert len(json.loads((tmp_path / "a.json").read_text())["rows"]) == 6
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    "sizes, ticks",
    [
        ([10, 1, 10], [1, 10]),
        ([1, 10, 100, 1000], [1, 10, 100, 1000]),
        ([5], [5]),
        ([2.0**k for k in range(21)], [2.0**k for k in range(0, 21, 3)]),
    ],
)
def test_ticks_are_measured_sizes(sizes, ticks):
    assert alpha_beta.ticks_of(sizes) == ticks


def test_the_pictures_ticks_are_sizes_and_plain_numbers(tmp_path, monkeypatch):
    """Two sizes, less than a decade apart: matplotlib's own would be 2 × 10⁰ and so on."""
    figures = []
    save = Figure.savefig

    def note(figure, *arguments, **options):
        save(figure, *arguments, **options)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", note)
    rows = []
    for size, seconds in ((2**20, 2e-3), (2**22, 7e-3)):
        rows.append({"algorithm": "gloo", "world_size": 2, "size_bytes": size, "p50": seconds})
    alpha_beta.draw(tmp_path / "a.png", rows, [], 1e10)
    for axes in figures[0].axes:
        words = [label.get_text() for label in axes.get_xticklabels(which="both")]
        assert words == ["1", "4"]
        words = [label.get_text() for label in axes.get_yticklabels(which="both")]
        assert len(words) > 2 and all(float(word) > 0 for word in words), words


def test_grid(monkeypatch):
    words = ["--backends", "gloo,nccl", "--world-sizes", "2,4"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    args = allreduce.read_arguments(setup)
    everywhere = [("gloo", 2), ("gloo", 4), ("nccl", 2), ("nccl", 4)]
    assert allreduce.grid_of(args, has_gpu=False) == everywhere
    on_gpu = [("gloo-cuda", 2), ("gloo-cuda", 4), ("nccl", 1)]
    assert allreduce.grid_of(args, has_gpu=True) == everywhere + on_gpu


@pytest.mark.cuda
def test_gloo_with_cuda_tensors_and_one_rank_of_nccl(script, tmp_path):
    words = ["--sizes-mb", "1", *SMALL, "--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"]
    status, output = script([sys.executable, SCRIPT, *words]).wait()
    assert status == 0, output
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    measured = {(row["algorithm"], row["world_size"]) for row in rows if row["wrong"] == 0}
    assert {("gloo-cuda", 2), ("nccl", 1)} <= measured, output


def test_old_names_of_flags(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--iters", "7"])
    assert allreduce.read_arguments(setup).steps == 7


def test_help_is_within_100_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--help"])
    with pytest.raises(SystemExit):
        main()
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100 and "--iters" not in text
    assert text.count("(default: ") == 6


GRID = ["--backends", "gloo", "--sizes-mb", "0.5,1,400", "--world-sizes", "2,4"]
LONG = [*GRID, "--steps", "100000", "--row-seconds", "0.3"]


def long_run(script, *words):
    """A run that would take minutes, and its output so far: when the first sizes are measured."""
    one = script([sys.executable, SCRIPT, *LONG, *words])
    output = ""
    for line in one.process.stdout:
        output += line
        if line.startswith("ring") and line.split()[2] == "1":
            break
    return one, output


@pytest.mark.parametrize("spawned", [False, pytest.param(True, marks=pytest.mark.full)])
def test_ctrl_c_keeps_what_is_measured(script, forked, tmp_path, spawned):
    files = ["--json", tmp_path / "a.json", "--plot", tmp_path / "a.png"]
    if spawned:
        one, output = long_run(script, *files)
        one.process.send_signal(signal.SIGINT)
    else:
        one, output = forked.start(None, SCRIPT, *LONG, *files), ""
        one.wait_for("\nring          2       1 ")
        os.kill(one.processes[0].pid, signal.SIGINT)
    status, rest = one.wait(30)
    assert status == 130 and "Traceback" not in output + rest, output + rest
    assert "interrupted" in rest and "model" in rest and "β, GB/s" in rest
    assert len(json.loads((tmp_path / "a.json").read_text())["rows"]) >= 4
    assert (tmp_path / "a.png").exists()


@pytest.mark.distributed
def test_ctrl_c_while_ranks_are_started_leaves_none(tmp_path, monkeypatch):
    """Any thread of the launcher may get the signal: that the main one blocks it is not enough."""
    popen = SpawnProcess._Popen
    before = multiprocessing.active_children()
    other = threading.Thread(target=threading.Event().wait, daemon=True)
    other.start()
    arrived, arriving = socket.socketpair()
    arriving.setblocking(False)
    signal.set_wakeup_fd(arriving.fileno())
    started = []

    def start_one(process):
        started.append(popen(process))
        if len(started) == 2:
            signal.pthread_kill(other.ident, signal.SIGINT)
            arrived.recv(1)  # the other thread has it
        return started[-1]

    monkeypatch.setattr(SpawnProcess, "_Popen", staticmethod(start_one))
    try:
        with pytest.raises(KeyboardInterrupt):
            spawn.run_ranks(3, str(tmp_path), allreduce.demonstrate, "gloo")
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    left = [process for process in multiprocessing.active_children() if process not in before]
    for process in left:
        process.kill()
    assert not left


@pytest.mark.full
def test_sigterm_leaves_no_process(script):
    one = script([sys.executable, SCRIPT])
    one.process.stdout.readline()  # the demonstration's ranks are alive now
    one.process.send_signal(signal.SIGTERM)
    status, rest = one.wait(30)
    assert status == 130 and "Traceback" not in rest, rest


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finding the ranks needs /proc")
def test_a_rank_that_dies_ends_all(script, tmp_path):
    one, output = long_run(script, "--plot", tmp_path / "a.png")
    ranks = []
    for process in one.processes():
        if b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes():
            ranks.append(process)
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    status, rest = one.wait(30)
    assert status == 1 and rest.count("error: a rank ended") == 1 and "Traceback" not in rest, rest
    assert "model" in rest and (tmp_path / "a.png").exists()


@pytest.mark.parametrize("name", ["allreduce.py", "alpha_beta.py"])
def test_file_alone(name, tmp_path):
    check_script_alone(SCRIPT.with_name(name), tmp_path)
