"""Tests of 01_allreduce: the ring against the backend, the fit, the script from outside."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
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
from allreduce import IN_FLIGHT, PIECE_BYTES, differing_sums, main, measure, ring_all_reduce
from alpha_beta import fit
from matplotlib.figure import Figure

from common.testing.harness import ROOT, check_script_alone, masked, read_json, wait_for_line

SCRIPT = Path(__file__).with_name("allreduce.py")
PNG = b"\x89PNG"
SMALL = ["--sizes-mb", "0.5,1", "--nproc", "2", "--steps", "3", "--warmup", "1"]


def files_in(folder):
    return ["--json", folder / "a.json", "--plot", folder / "a.png"]


def rows_in(folder):
    return json.loads((folder / "a.json").read_text())["rows"]


# The ring


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, pytest.param(5, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_ring_equals_all_reduce(ranks, world_size, dtype):
    lengths = [0, 1, world_size - 1, world_size, world_size + 1, 9973, 10**6]
    results = ranks(world_size).run(differing_sums, ring_all_reduce, lengths, [dtype])
    assert results == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_more_pieces_than_in_flight(ranks, world_size):
    """Every buffer is used more than once; chunks differ in length and in number of pieces."""
    length = world_size * (IN_FLIGHT + 1) * PIECE_BYTES // 8
    lengths = [length - 1, length, length + 1]
    results = ranks(world_size).run(differing_sums, ring_all_reduce, lengths, [torch.float64])
    assert results == [[]] * world_size


def leave_all_as_it_is(tensor):
    pass


def test_a_wrong_sum_is_noticed(ranks):
    results = ranks(2).run(differing_sums, leave_all_as_it_is, [0, 100], [torch.float32])
    assert results == [[(100, torch.float32)]] * 2


def sums_of_random_numbers(length):
    """The ring's sum and the backend's."""
    numbers = torch.Generator().manual_seed(dist.get_rank())
    ring = torch.randn(length, dtype=torch.float64, generator=numbers)
    backend = ring.clone()
    ring_all_reduce(ring)
    dist.all_reduce(backend)
    return ring, backend


def test_random_numbers(ranks):
    """The backend's sum is near (the order rounds differently); all ranks' own are the same."""
    results = ranks(4).run(sums_of_random_numbers, 100_003)
    for ring, backend in results:
        assert (ring - backend).abs().max() < 1e-14
        assert torch.equal(ring, results[0][0])


def sums_of_shapes():
    tensor = torch.full((3, 5, 7), dist.get_rank() + 1.0, requires_grad=True)
    ring_all_reduce(tensor)
    scalar = torch.tensor(1)
    ring_all_reduce(scalar)
    return tensor.unique().tolist(), scalar.item()


def test_any_shape_in_place(ranks):
    assert ranks(3).run(sums_of_shapes) == [([6.0], 3)] * 3


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
    expected = [2.0 * world_size * number for number in range(6)], [float(world_size)]
    assert ranks(world_size).run(refused_then_summed, timeout=20) == [expected] * world_size


# The measurement and the model


def wrong_of_broken_ones():
    def leaves_one_out(tensor):
        dist.all_reduce(tensor[:-1])

    def swaps_chunks(tensor):
        dist.all_reduce(tensor)
        tensor.copy_(tensor.roll(len(tensor) // 2))

    algorithms = {"gloo": dist.all_reduce, "one out": leaves_one_out, "swapped": swaps_chunks}
    _, _, wrong = measure(algorithms, torch.empty(2**18), 2, 1, 10.0)
    return wrong


def test_wrong_elements_are_counted(ranks):
    for wrong in ranks(2).run(wrong_of_broken_ones):
        assert wrong["gloo"] == 0 and wrong["one out"] == 3 * 2 and wrong["swapped"] > 2**18


def seconds_of_calls():
    """What a call takes that sleeps 20 ms on rank 1, without a pause before it and with one."""

    def sleeps(tensor):
        time.sleep(0.02 * dist.get_rank())

    device = torch.device("cpu")
    without = alpha_beta.call_seconds(sleeps, device, pause=0.0, calls=3)
    with_pause = alpha_beta.call_seconds(sleeps, device, pause=0.2, calls=3)
    return without, with_pause


def test_seconds_of_a_call(ranks):
    """The slowest rank's, the same on all, without the pause."""
    of_rank_0, of_rank_1 = ranks(2).run(seconds_of_calls)
    assert of_rank_0 == of_rank_1
    assert all(0.02 < seconds < 0.15 for seconds in of_rank_0), of_rank_0


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
    sizes = [1e6, 1e7, 1e9]
    times = [1.1e-3, 3.0e-3, 0.25]
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


def test_no_fit_is_a_row_of_the_table(capsys):
    row = {"algorithm": "ring", "world_size": 2, "size_bytes": 8, "p50": 1.0}
    assert alpha_beta.fit_all([row | {"awake": 1e-4, "asleep": 2e-4}]) == []
    lines = masked(capsys.readouterr().out)
    assert "ring # - - no fit: needs two ranks and two sizes # #" in lines


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
    row = {"algorithm": "gloo", "world_size": 2}
    rows = [row | {"size_bytes": 2**20, "p50": 2e-3}, row | {"size_bytes": 2**22, "p50": 7e-3}]
    alpha_beta.draw(tmp_path / "a.png", rows, [], 1e10)
    for axes in figures[0].axes:
        words = [label.get_text() for label in axes.get_xticklabels(which="both")]
        assert words == ["1", "4"]
        words = [label.get_text() for label in axes.get_yticklabels(which="both")]
        assert len(words) > 2 and all(float(word) > 0 for word in words), words


# The script


def test_script_measures_fits_and_draws(forked, tmp_path):
    words = [*SMALL, "--sizes-mb", "0.5,32"]  # far apart: the time grows on a busy machine, too
    status, output = forked(None, SCRIPT, *words, *files_in(tmp_path))
    assert status == 0, output
    recorded = SCRIPT.with_name("reference_output.txt").read_text()
    if torch.cuda.device_count() < 2:
        assert set(masked(recorded)) == set(masked(output)), output
    assert output.count("3+1") == 4 and output.count("ranks hold the sum, bitwise equal") == 1
    json_and_picture = [f"written: {tmp_path / name}" for name in ("a.json", "a.png")]
    assert output.splitlines()[-2:] == json_and_picture
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)

    result = read_json(tmp_path / "a.json", "01_allreduce")
    assert (result["world_size"], result["backend"]) == ([2], ["gloo", "nccl"])
    assert result["options"]["steps"] == 3 and result["seconds"] > 0
    assert result["copy_bytes_per_second"] > 0 and len(result["fits"]) == 2
    rows = [row for row in result["rows"] if row["algorithm"] in ("gloo", "ring")]
    assert {(row["algorithm"], row["world_size"], row["size_bytes"]) for row in rows} == {
        ("gloo", 2, 2**19),
        ("ring", 2, 2**19),
        ("gloo", 2, 2**25),
        ("ring", 2, 2**25),
    }
    assert len(rows) == 4
    for row in rows:
        assert row["wrong"] == 0 and len(row["seconds"]) == 3 and row["threads_per_rank"] >= 1
        assert 0 < min(row["seconds"]) <= row["mean"] <= max(row["seconds"])
        assert row["awake"] > 0 and row["asleep"] > 0


def test_what_does_not_fit_is_said_in_any_encoding(forked):
    words = ["--sizes-mb", "0.5,1e9", *SMALL[2:], "--backends", "gloo", "--no-plot"]
    status, output = forked(None, SCRIPT, *words, PYTHONIOENCODING="ascii")
    assert status == 0, output
    assert "gloo # # not run: needs # GB of memory, and # are free" in masked(output)
    assert "ranks  ?, ?s  ?, GB/s" in output  # ascii has no α, µ and β


def test_demo(forked):
    status, output = forked(None, SCRIPT, "--demo")
    assert status == 0 and "passed, all ranks hold the sum" in output
    assert [line[:7] for line in output.splitlines()[:4]] == [f"rank {rank}:" for rank in range(4)]
    assert "algorithm" not in output and "written" not in output


@pytest.mark.cuda
def test_with_a_gpu(script, tmp_path):
    """gloo with CUDA tensors, one rank of nccl; and as many as there are GPUs for."""
    status, output = script([sys.executable, SCRIPT, *SMALL, *files_in(tmp_path)]).wait()
    assert status == 0, output
    rows = [row for row in rows_in(tmp_path) if row["wrong"] == 0]
    measured = {(row["algorithm"], row["world_size"]) for row in rows}
    assert {("gloo-cuda", 2), ("nccl", 1)} <= measured, output
    assert (("nccl", 2) in measured) == (torch.cuda.device_count() >= 2), output


def arguments_of(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    return allreduce.read_arguments(allreduce.__doc__, "01_allreduce.png")


def test_grid(monkeypatch):
    args = arguments_of(monkeypatch, "--backends", "gloo,nccl", "--world-sizes", "2,4")
    everywhere = [("gloo", 2), ("gloo", 4), ("nccl", 2), ("nccl", 4)]
    assert allreduce.grid_of(args, has_gpu=False) == everywhere
    on_gpu = [("gloo-cuda", 2), ("gloo-cuda", 4), ("nccl", 1)]
    assert allreduce.grid_of(args, has_gpu=True) == everywhere + on_gpu


def test_arguments(monkeypatch):
    args = arguments_of(monkeypatch)
    assert (args.world_sizes, args.plot) == ([2, 4, 6], ROOT / "results" / "01_allreduce.png")
    args = arguments_of(monkeypatch, "--nproc", "3", "--iters", "7", "--no-plot")
    assert (args.world_sizes, args.steps, args.plot) == ([3], 7, None)


@pytest.mark.parametrize(
    "words",
    [
        ["--sizes-mb", "0"],
        ["--sizes-mb", "1,x"],
        ["--sizes-mb", "inf"],
        ["--sizes-mb", "nan"],
        ["--world-sizes", "2,"],
        ["--nproc", "0"],
        ["--backends", "mpi"],
        ["--backends", ""],
        ["--row-seconds", "0"],
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


def test_file_alone(tmp_path):
    check_script_alone(SCRIPT, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("words, written", [([], ["01_allreduce.png"]), (["--no-plot"], [])])
def test_only_the_picture_is_written_that_no_flag_names(forked, tmp_path, words, written):
    """In a checkout of its own, without results/."""
    for folder in ("01_allreduce", "common"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    before = {path for path in tmp_path.rglob("*") if path.suffix != ".pyc"}
    path = tmp_path / "01_allreduce" / "allreduce.py"
    status, output = forked(None, path, "--backends", "gloo", *SMALL, *words, cwd=tmp_path)
    assert status == 0, output
    new = {path for path in tmp_path.rglob("*") if path.suffix != ".pyc"} - before
    results = tmp_path / "results"
    assert {path for path in new if path.name != "__pycache__"} == {
        results,
        *(results / name for name in written),
    }


def test_progress_on_a_terminal_and_none_in_a_pipe(forked):
    words = ["--backends", "gloo", "--no-plot", *SMALL]
    status, output, shown = forked.on_a_terminal(None, SCRIPT, *words)
    assert status == 0 and "\r" not in output and "Traceback" not in shown, shown
    for part in ("4 ranks are started", "0.5 MB: call 1 of 4: gloo", "1 MB: call 4 of 4, "):
        assert part in shown, shown
    assert " s left: ring" in shown and "\n" not in shown
    assert shown.endswith("\r\x1b[K")  # nothing stays


@pytest.mark.full
def test_a_closed_pipe_loses_no_file(forked, tmp_path):
    words = ["--backends", "gloo", *SMALL, *files_in(tmp_path)]
    assert forked.check_closed_pipe(None, SCRIPT, *words) == ""
    assert len(rows_in(tmp_path)) == 4
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


# What ends it early: each run would take minutes, and is hit when the first sizes are measured.
LONG = ["--backends", "gloo", "--sizes-mb", "0.5,1,400", "--world-sizes", "2,4"]
LONG += ["--steps", "100000", "--row-seconds", "0.3"]
RING_HAS_1_MB = "ring           2       1 "


def check_interrupted(status, output, folder):
    assert status == 130 and "Traceback" not in output, output
    assert "interrupted" in output and "model" in output and "β, GB/s" in output
    assert len(rows_in(folder)) >= 4
    assert (folder / "a.png").exists()


def test_ctrl_c_keeps_what_is_measured(forked, tmp_path):
    run = forked.start(None, SCRIPT, *LONG, *files_in(tmp_path))
    run.wait_for("\n" + RING_HAS_1_MB)
    os.kill(run.processes[0].pid, signal.SIGINT)
    check_interrupted(*run.wait(30), tmp_path)


@pytest.mark.full
def test_ctrl_c_of_spawned_ranks_keeps_what_is_measured(script, tmp_path):
    run = script([sys.executable, SCRIPT, *LONG, *files_in(tmp_path)])
    wait_for_line(run, RING_HAS_1_MB)
    run.process.send_signal(signal.SIGINT)
    check_interrupted(*run.wait(30), tmp_path)


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

    def start_rank(process):
        started.append(popen(process))
        if len(started) == 2:
            signal.pthread_kill(other.ident, signal.SIGINT)
            arrived.recv(1)  # the other thread has it
        return started[-1]

    monkeypatch.setattr(SpawnProcess, "_Popen", staticmethod(start_rank))
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
    run = script([sys.executable, SCRIPT, "--no-plot"])
    run.process.stdout.readline()  # the demonstration's ranks are alive now
    run.process.send_signal(signal.SIGTERM)
    status, rest = run.wait(30)
    assert status == 130 and "Traceback" not in rest, rest


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finding the ranks needs /proc")
def test_a_rank_that_dies_ends_all(script, tmp_path):
    run = script([sys.executable, SCRIPT, *LONG, *files_in(tmp_path)])
    wait_for_line(run, RING_HAS_1_MB)
    ranks = []
    for process in run.processes():
        if b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes():
            ranks.append(process)
    assert len(ranks) == 2
    os.kill(ranks[-1], signal.SIGKILL)
    status, rest = run.wait(30)
    assert status == 1 and rest.count("error: a rank ended") == 1 and "Traceback" not in rest, rest
    assert "model" in rest and (tmp_path / "a.png").exists()
