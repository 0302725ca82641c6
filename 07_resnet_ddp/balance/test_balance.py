"""balance.py: shares, the weights that make uneven ones right, a run, bad input."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.recordings.record import output_of
from common.testing import harness
from common.testing.harness import masked, read_json

sys.path[:0] = [str(Path(__file__).resolve().parent)]
import balance  # noqa: E402

SCRIPT = Path(balance.__file__)
TINY = "--image-size 32 --global-batch 8 --steps 2 --warmup 1 --device cpu".split()


@pytest.mark.parametrize(
    "images, speeds, shares",
    [
        (64, [1, 1], [32, 32]),
        (64, [1, 1 / 1.5], [38, 26]),
        (10, [1, 1, 1], [4, 3, 3]),
        (7, [3, 1, 1], [4, 2, 1]),
        (100, [1, 1 / 3], [75, 25]),
    ],
)
def test_balanced_shares(images, speeds, shares):
    assert balance.balanced_shares(images, speeds) == shares


def deviation_with_idle_images():
    """`step` of uneven shares, with images that do not count: the largest deviations.

    From one device that has all images; without all-reduce, from this rank's own gradient; and of
    the two from each other.
    """
    torch.manual_seed(0)
    rank = dist.get_rank()
    shares = [5, 3]
    idle = [0, 6][rank]
    network = nn.Linear(6, 4).double()
    images = torch.randn(8, 6).double()
    labels = torch.randint(4, (8,))
    mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    padded = torch.cat([images[mine], torch.randn(idle, 6).double()])
    padded_labels = torch.cat([labels[mine], labels[:idle]])
    loss = nn.functional.cross_entropy(network(images), labels)
    (expected,) = torch.autograd.grad(loss, network.weight)
    loss = 2 * nn.functional.cross_entropy(network(images[mine]), labels[mine], reduction="sum") / 8
    (own,) = torch.autograd.grad(loss, network.weight)
    model = DistributedDataParallel(network)
    deviations = []
    for synchronize, gradient in ((True, expected), (False, own)):
        balance.step(model, padded, padded_labels, shares[rank], 8, synchronize)
        deviations.append((network.weight.grad - gradient).abs().max().item())
    return [*deviations, (own - expected).abs().max().item()]


def test_uneven_shares_give_the_gradient_of_all_images(ranks):
    for with_all, alone, apart in ranks(2).run(deviation_with_idle_images):
        assert max(with_all, alone) < 1e-14 and apart > 1e-3


def test_a_run(forked, tmp_path):
    words = [*TINY, "--slow-rank", 1, "--slow-factor", 3, "--json", tmp_path / "json"]
    status, output = forked(2, SCRIPT, *words)
    assert status == 0, output
    recorded = masked(output_of(SCRIPT.with_name("reference_output.txt")))
    assert set(masked(output)) <= set(recorded), output
    result = read_json(tmp_path / "json", "07_resnet_ddp/balance")
    assert result["weighted_deviation"] < 1e-12 and result["plain_deviation"] > 1e-2
    nobody, even, balanced = result["candidates"]
    assert (nobody["shares"], nobody["computed"]) == ([4, 4], [4, 4])
    assert (even["shares"], even["computed"]) == ([4, 4], [4, 12])
    assert (balanced["shares"], balanced["computed"]) == ([6, 2], [6, 6])
    for candidate in result["candidates"]:
        for times in ("alone_seconds", "step_seconds"):
            assert [len(of_rank) for of_rank in candidate[times]] == [2, 2]


@pytest.mark.parametrize(
    "option, value",
    [
        ("--slow-rank", "1"),
        ("--slow-factor", "0.5"),
        ("--slow-factor", "nan"),
        ("--global-batch", "1"),
        ("--image-size", "16"),
    ],
)
def test_bad_input_is_one_line(option, value, monkeypatch, capsys):
    harness.check_wrong_input(balance.main, SCRIPT, option, value, monkeypatch, capsys)


def test_too_few_images_for_a_slow_rank_is_one_line(forked):
    words = ["--device", "cpu", "--slow-factor", 100, "--global-batch", 64]
    status, output = forked(2, SCRIPT, *words)
    line = "balance.py: error: argument --global-batch: '64' leaves a rank 1 images, and BatchNorm"
    assert status == 2 and output.startswith(line) and output.count("\n") == 1, output


def test_copied_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)
