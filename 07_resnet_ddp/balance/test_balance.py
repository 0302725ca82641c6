"""balance.py: shares, the weights that make uneven ones right, a run, bad input."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.testing.harness import check_script_alone, masked, read_json

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
    assert sum(balance.even_shares(images, len(speeds))) <= images


def deviation_with_idle_images():
    """`step` of uneven shares, with images that do not count, against one device; all ranks' worst.

    Also without all-reduce, where a rank has its own gradient.
    """
    torch.manual_seed(0)
    rank = dist.get_rank()
    shares = [5, 3]
    computed = [5, 9]
    network = nn.Linear(6, 4).double()
    images = torch.randn(8, 6).double()
    labels = torch.randint(4, (8,))
    mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    padded = torch.cat([images[mine], torch.randn(computed[rank] - shares[rank], 6).double()])
    padded_labels = torch.cat([labels[mine], labels[: computed[rank] - shares[rank]]])
    loss = nn.functional.cross_entropy(network(images), labels)
    (expected,) = torch.autograd.grad(loss, network.weight)
    loss = 2 * nn.functional.cross_entropy(network(images[mine]), labels[mine], reduction="sum") / 8
    (own,) = torch.autograd.grad(loss, network.weight)
    model = DistributedDataParallel(network)
    found = []
    zero_grad = model.zero_grad

    def remember_and_zero():
        found.append(network.weight.grad.clone())
        zero_grad()

    model.zero_grad = remember_and_zero
    for synchronize in (True, False):
        balance.step(model, padded, padded_labels, shares[rank], 8, synchronize)
    differences = [(found[0] - expected).abs().max(), (found[1] - own).abs().max()]
    return max(differences).item(), (own - expected).abs().max().item()


def test_uneven_shares_give_the_gradient_of_all_images(ranks):
    for deviation, own in ranks(2).run(deviation_with_idle_images):
        assert deviation < 1e-14 and own > 1e-3


def test_a_run(forked, tmp_path):
    words = [*TINY, "--slow-rank", 1, "--slow-factor", 3, "--json", tmp_path / "json"]
    status, output = forked(2, SCRIPT, *words)
    assert status == 0, output
    recorded = masked(SCRIPT.with_name("reference_output.txt").read_text())
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
    "words, flag",
    [
        (["--slow-rank", "1"], "--slow-rank"),
        (["--slow-factor", "0.5"], "--slow-factor"),
        (["--slow-factor", "nan"], "--slow-factor"),
        (["--slow-rank", "0", "--global-batch", "1"], "--global-batch"),
        (["--image-size", "16"], "--image-size"),
    ],
)
def test_bad_input_is_one_line(words, flag, monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr(sys, "argv", ["balance.py", "--device", "cpu", *words])
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as end:
        balance.main()
    torch.set_num_threads(threads)
    [line] = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith(f"balance.py: error: argument {flag}: "), line
    assert not dist.is_initialized()


def test_too_few_images_for_a_slow_rank_is_one_line(forked):
    words = ["--device", "cpu", "--slow-factor", 100, "--global-batch", 64]
    status, output = forked(2, SCRIPT, *words)
    line = "balance.py: error: argument --global-batch: '64' leaves a rank 1 images, and BatchNorm"
    assert status == 2 and output.startswith(line) and output.count("\n") == 1, output


def test_copied_alone(tmp_path):
    check_script_alone(SCRIPT, tmp_path)
