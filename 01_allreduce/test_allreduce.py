"""Tests of 01_allreduce: what the rings promise, the fit, the script from outside."""

import itertools
import os
import signal
import sys
import time
from pathlib import Path

import allreduce
import pytest
import torch
import torch.distributed as dist
from allreduce import IN_FLIGHT, PIECE_BYTES, RINGS
from cost_model import fit
from ring import TENSORS, draw, schedule

from tools import testing
from tools.testing import read_json, wait_for_line

SCRIPT = Path(__file__).with_name("allreduce.py")
SHORT = ["--nproc", "2", "--steps", "3", "--warmup", "1"]


FILES = ["--json", "a.json", "--plot", "a.png"]


# What the rings promise

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


def differing_sums() -> list[tuple]:
    """Those whose sum is not bitwise that of torch: of integers, exact in any order."""
    allreduce.PIECE_BYTES = 4096  # so that a small tensor has many pieces
    world_size = dist.get_world_size()
    shapes = [(), (0,), (1,), (world_size - 1,), (world_size + 1,), (3, 5, 7)]
    shapes += [(1023,), (1024,), (1025,), (9973,)]
    numbers = torch.Generator().manual_seed(dist.get_rank())
    differing = []
    for name, dtype, shape in itertools.product(RINGS, DTYPES, shapes):
        tensor = torch.randint(0, 10, shape, generator=numbers).to(dtype)
        expected = tensor.clone()
        RINGS[name](tensor.requires_grad_(dtype.is_floating_point))
        dist.all_reduce(expected)
        if not torch.equal(tensor, expected):
            differing.append((name, dtype, shape))
    allreduce.PIECE_BYTES = PIECE_BYTES
    return differing


def check_random_numbers():
    """The backend's sum is near (the order rounds differently); all ranks' own are the same.

    The second ring uses every buffer more than once; chunks differ in length and number of pieces.
    """
    numbers = torch.Generator().manual_seed(dist.get_rank())
    length = 3 * (IN_FLIGHT + 1) * PIECE_BYTES // 8 + 1
    for ring in RINGS.values():
        ours = torch.randn(length, dtype=torch.float64, generator=numbers)
        backends = ours.clone()
        ring(ours)
        dist.all_reduce(backends)
        assert (ours - backends).abs().max() < 1e-14
        first = ours.clone()
        dist.broadcast(first, 0)
        assert torch.equal(ours, first)


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_sums_equal_all_reduce_and_are_the_same_on_all_ranks(ranks, world_size):
    assert ranks(world_size).run(differing_sums) == [[]] * world_size
    ranks(world_size).run(check_random_numbers)


# The measurement and the model


def seconds_and_wrong(elements: int):
    calls = dict.fromkeys(["gloo", "one out", "swapped"], 0)

    def gloo(tensor):
        calls["gloo"] += 1
        dist.all_reduce(tensor)

    def leaves_one_out(tensor):
        calls["one out"] += 1
        dist.all_reduce(tensor[:-1])
        time.sleep(0.02 * dist.get_rank())

    def swaps_chunks(tensor):
        calls["swapped"] += 1
        dist.all_reduce(tensor)
        tensor.copy_(tensor.roll(len(tensor) // 2))

    algorithms = {"gloo": gloo, "one out": leaves_one_out, "swapped": swaps_chunks}
    return allreduce.measure_size(algorithms, torch.empty(elements), 2, 1), calls


def test_wrong_elements_are_counted_and_the_slowest_rank_is_timed(ranks):
    """Small tensors are timed in twenty calls in a row, too, after twenty to warm up."""
    for (gloo, one_out, swapped), calls in ranks(2).run(seconds_and_wrong, 2**18):
        assert gloo["wrong"] == 0 and one_out["wrong"] == 2 * 2 and swapped["wrong"] > 2**18
        assert len(one_out["seconds"]) == 2 and min(one_out["seconds"]) > 0.02
        assert set(calls.values()) == {3} and "seconds_in_a_row" not in one_out

    for (gloo, one_out, _), calls in ranks(2).run(seconds_and_wrong, 2**10):
        assert set(calls.values()) == {3 + 2 * 20}
        assert gloo["wrong"] == 0 and len(gloo["seconds_in_a_row"]) == 1
        assert min(one_out["seconds_in_a_row"]) > 0.02


def test_a_row_of_the_table(capsys):
    """busbw of 4 ranks is algbw · 6/4; the ratio to the backend's, whose p50 is 50 ms here."""
    row = {"algorithm": "ring", "world_size": 4, "size_bytes": 10**8, "wrong": 7}
    allreduce.print_measured(row | {"seconds": [0.1] * 20, "p50": 0.1}, 0.05)
    cells = capsys.readouterr().out.split()
    assert cells[3] == "100.00" and cells[-5:] == ["-", "1.00", "1.50", "0.50", "7"]


def test_fit():
    """o and w of exact times; one that is twice as long moves them as far as one half as long."""
    sizes = [2**20 * megabytes for megabytes in (0.01, 0.1, 1, 10, 100)]
    times = [250e-6 + size / 2e9 for size in sizes]
    assert fit(sizes, times) == pytest.approx((250e-6, 2e9, 0), rel=0.01, abs=1e-3)
    long, _, _ = fit(sizes, [2 * times[0], *times[1:]])
    short, _, error = fit(sizes, [times[0] / 2, *times[1:]])
    assert long * short == pytest.approx(250e-6**2, rel=0.2) and 0.2 < error < 0.5


# The script


def test_the_moving_picture(tmp_path):
    """Its last step shows the sums."""
    *_, (sums, _) = schedule(TENSORS)
    assert sums == 3 * [[17, 6, 9]]
    draw(tmp_path / "ring.gif")
    testing.assert_movie(tmp_path / "ring.gif")


def test_script_measures_fits_and_draws(forked, tmp_path):
    status, output = forked(None, SCRIPT, *SHORT, "--sizes-mb", "0.5,8", *FILES, cwd=tmp_path)
    assert status == 0 and output.count("[23, 33, 15]") == 4, output
    testing.assert_png(tmp_path / "a.png")
    result = read_json(tmp_path / "a.json", "01_allreduce")
    assert [row["size_bytes"] for row in result["rows"]] == 3 * [2**19] + 3 * [2**23]
    for row in result["rows"]:
        assert row["wrong"] == 0 and len(row["seconds"]) == 3
        assert 0 < min(row["seconds"]) <= row["p50"] <= max(row["seconds"])
    assert [line["algorithm"] for line in result["fits"]] == ["gloo", "plain ring", "ring"]


def test_arguments(monkeypatch):
    """By default, and as upstream's benchmark is called."""
    theirs = "--world_size 4 --tensor_size_mb 10 --backend gloo --iters 7"
    for words, expected in (("", ([2, 4, 6], 20)), (theirs, ([4], 7))):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words.split()])
        args = allreduce.read_arguments()
        assert (args.world_sizes, args.steps) == expected
    assert (args.sizes_mb, args.backends) == ([10], ["gloo"])


@pytest.mark.full
@testing.needs_proc
@pytest.mark.parametrize("number, said", [(2, "interrupted"), (9, "a rank ended: ")])
def test_what_is_measured_is_kept(script, tmp_path, number, said):
    """The JSON is whole after Ctrl-C, and when the kernel kills a rank for its memory."""
    words = [*SHORT, "--sizes-mb", "0.5,1,400", *FILES]
    run = script([sys.executable, SCRIPT, *words], cwd=tmp_path)
    wait_for_line(run, "ring            2       1 ")
    if number == signal.SIGINT:
        os.killpg(run.process.pid, number)  # as a terminal does
    else:
        os.kill(max(run.processes()), number)
    status, output = run.wait()  # fails if a process is left
    assert status == 1 and said in output and "Traceback" not in output, output
    assert len(read_json(tmp_path / "a.json", "01_allreduce")["rows"]) == 6
