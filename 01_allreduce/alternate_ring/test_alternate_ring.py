"""Tests of the alternate ring: sums, the formula, the script from outside."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from allreduce import differing_sums
from alternate_ring import alternate_ring_all_reduce, largest_size, main

from common.testing.harness import check_script_alone, masked

SCRIPT = Path(__file__).with_name("alternate_ring.py")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sum_equals_all_reduce(ranks, world_size):
    options = (alternate_ring_all_reduce, [0, 1, 9973], [torch.float32, torch.int64])
    assert ranks(world_size).run(differing_sums, *options) == [[]] * world_size


def refused_then_summed():
    with pytest.raises(RuntimeError, match="contiguous CPU tensor"):
        alternate_ring_all_reduce(torch.ones(4, 6).t())
    tensor = torch.ones(4, 6)
    alternate_ring_all_reduce(tensor)
    return tensor.unique().item()


def test_a_refused_tensor_leaves_nothing_behind(ranks):
    assert ranks(2).run(refused_then_summed) == [2.0] * 2


def sum_of_random_numbers():
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
    alternate_ring_all_reduce(tensor)
    return tensor.tolist()


def test_ranks_may_differ_in_the_last_bits(ranks):
    """What its docstring warns of."""
    results = ranks(4).run(sum_of_random_numbers)
    assert any(result != results[0] for result in results)


def test_largest_size_is_where_both_take_the_same():
    for world_size in (3, 4, 6):
        size = largest_size(1e-3, 2e9, world_size)
        alternate = (world_size - 1) * (1e-3 + size / 2e9)
        ring = 2 * (world_size - 1) * (1e-3 + size / world_size / 2e9)
        assert alternate == pytest.approx(ring)
    assert largest_size(1e-3, 2e9, 2) == float("inf")


def test_script(forked):
    words = ["--sizes-mb", "0.5", "--nproc", "2", "--steps", "3", "--warmup", "1"]
    status, output = forked(None, SCRIPT, *words)
    assert status == 0, output
    recorded = SCRIPT.with_name("reference_output.txt").read_text()
    assert set(masked(output)) == set(masked(recorded))
    row = output.splitlines()[2].split()
    assert row[:2] == ["2", "0.5"] and row[-2:] == ["1.00", "0"], output


@pytest.mark.parametrize("words", [["--sizes-mb", "0"], ["--nproc", "two"]], ids=" ".join)
def test_bad_input_is_one_line(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    with pytest.raises(SystemExit) as end:
        main()
    output, error = capsys.readouterr()
    assert end.value.code == 2 and output == "" and error.count("\n") == 1
    assert error.startswith(f"alternate_ring.py: error: argument {words[0]}: ")


def test_file_alone(tmp_path):
    check_script_alone(SCRIPT, tmp_path)
