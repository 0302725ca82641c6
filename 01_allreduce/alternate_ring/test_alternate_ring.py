"""Tests of the alternate ring, and of the profile: sums, the formula, scripts from outside."""

import sys
from pathlib import Path

import pytest
import ring_profile
import torch
import torch.distributed as dist
from alternate_ring import alternate_ring_all_reduce, largest_size, main

from common.testing.harness import check_script_alone

SCRIPT = Path(__file__).with_name("alternate_ring.py")
PROFILE = SCRIPT.with_name("ring_profile.py")


def sums(lengths, dtype):
    equal = []
    for length in lengths:
        numbers = torch.Generator().manual_seed(1000 * length + dist.get_rank())
        mine = torch.randint(-9, 10, (length,), generator=numbers).to(dtype)
        theirs = mine.clone()
        assert alternate_ring_all_reduce(mine) is None
        dist.all_reduce(theirs)
        equal.append(torch.equal(mine, theirs))
    with pytest.raises(RuntimeError, match="contiguous CPU tensor"):
        alternate_ring_all_reduce(torch.ones(4, 6).t())
    return equal


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sum_equals_all_reduce(ranks, world_size):
    for dtype in (torch.float32, torch.int64):
        assert ranks(world_size).run(sums, [0, 1, 9973], dtype) == [[True] * 3] * world_size


def test_ranks_may_differ_in_the_last_bits(ranks):
    """What its docstring warns of."""
    results = ranks(4).run(random_sum)
    assert any(result != results[0] for result in results)


def random_sum():
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
    alternate_ring_all_reduce(tensor)
    return tensor.tolist()


def test_largest_size_is_where_both_take_the_same():
    for n in (3, 4, 6):
        size = largest_size(1e-3, 2e9, n)
        alternate = (n - 1) * (1e-3 + size / 2e9)
        assert alternate == pytest.approx(2 * (n - 1) * (1e-3 + size / n / 2e9))
    assert largest_size(1e-3, 2e9, 2) == float("inf")


def test_script(forked):
    words = ["--sizes-mb", "0.5", "--world-sizes", "2", "--steps", "3", "--warmup", "1"]
    status, output = forked(None, SCRIPT, *words)
    assert status == 0, output
    row = next(line for line in output.splitlines() if line.startswith("    2 ")).split()
    assert row[:2] == ["2", "0.5"] and row[-2:] == ["1.00", "0"], output


@pytest.mark.parametrize("words", [["--sizes-mb", "0"], ["--world-sizes", "two"]], ids=" ".join)
def test_bad_input_is_one_line(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    with pytest.raises(SystemExit) as end:
        main()
    output, error = capsys.readouterr()
    assert end.value.code == 2 and output == "" and error.count("\n") == 1
    assert error.startswith(f"alternate_ring.py: error: argument {words[0]}: ")


@pytest.mark.parametrize("path", [SCRIPT, PROFILE], ids=lambda path: path.name)
def test_file_alone(path, tmp_path):
    check_script_alone(path, tmp_path)


def test_profile(forked):
    words = ["--size-mb", "1", "--pieces-mb", "0.5", "--world-sizes", "2", "--steps", "2"]
    status, output = forked(None, PROFILE, *words)
    assert status == 0, output
    rows = {tuple(line.split()[:2]) for line in output.splitlines()}
    assert {("gloo", "2"), ("ring", "0.5"), ("shared", "2")} <= rows, output


@pytest.mark.parametrize(
    "words", [["--size-mb", "0"], ["--pieces-mb", "1,x"], ["--in-flight", "0"]], ids=" ".join
)
def test_bad_input_of_the_profile_is_one_line(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(PROFILE), *words])
    with pytest.raises(SystemExit) as end:
        ring_profile.main()
    output, error = capsys.readouterr()
    assert end.value.code == 2 and output == "" and error.count("\n") == 1
    assert error.startswith(f"ring_profile.py: error: argument {words[0]}: ")
