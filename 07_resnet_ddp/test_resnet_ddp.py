"""resnet_ddp.py: shards, the loss curve against one device, evaluation, kill and resume, bad input.

Of images.py CIFAR-10 and noise; of compare_runs.py the table and the picture.
"""

import hashlib
import json
import os
import pickle
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from matplotlib.image import imread
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18
from torchvision.ops import FrozenBatchNorm2d

from common.recordings.record import output_of
from common.testing import harness
from common.testing.harness import masked, torchrun

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import checkpoints  # noqa: E402
import compare_runs  # noqa: E402
import images  # noqa: E402
import resnet_ddp  # noqa: E402

from common.timing import Stopwatch  # noqa: E402

SCRIPT = Path(resnet_ddp.__file__)
TINY = "--image-size 16 --global-batch 16 --steps-per-epoch 3 --device cpu --log-every 1".split()
CPU = torch.device("cpu")


# Shards


def shares(images, batch_size):
    """Of epochs 1 and 2: this rank's training batches; and its share for evaluation."""
    train_batches, test_batches = resnet_ddp.sharded_loaders(
        range(images), range(images), batch_size, seed=7
    )
    epochs = []
    for epoch in (1, 2):
        train_batches.sampler.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in train_batches])
    return epochs, torch.cat(list(test_batches)).tolist()


@pytest.mark.parametrize("images", [96, 103])
def test_shards_are_disjoint_and_complete_and_make_up_the_batches_of_one_device(ranks, images):
    [(single, single_evaluation)] = ranks(1).run(shares, images, 8)
    (first, first_evaluation), (second, second_evaluation) = ranks(2).run(shares, images, 4)
    for epoch in range(2):
        assert len(single[epoch]) == images // 8
        for whole, a, b in zip(single[epoch], first[epoch], second[epoch], strict=True):
            assert not set(a) & set(b)
            assert sorted(a + b) == sorted(whole)
        used = sum(single[epoch], [])
        assert len(set(used)) == len(used) == images // 8 * 8
    assert single[0] != single[1], "the second epoch has another order"
    both = sorted(first_evaluation + second_evaluation)
    assert both == sorted(single_evaluation) == list(range(images))


# Training


class Numbers(torch.utils.data.Dataset):
    """Random images in float64."""

    def __init__(self, count):
        random = torch.Generator().manual_seed(3)
        self.images = torch.randn(count, 3, 16, 16, dtype=torch.float64, generator=random)
        self.labels = torch.randint(10, (count,), generator=random)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


def loss_curve(batch_size, synchronize=True):
    """Loss of each step over all ranks, and the final weights.

    Of a ResNet-18 in float64 with frozen statistics.
    """
    data = Numbers(40)
    batches, _ = resnet_ddp.sharded_loaders(data, data, batch_size, seed=0)
    torch.manual_seed(dist.get_rank())  # DDP must hand out rank 0's weights
    network = resnet18(num_classes=10, norm_layer=FrozenBatchNorm2d).double()
    model = network
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, 0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    losses = []
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for batch in batches:
            watch = Stopwatch(CPU)
            loss, _ = resnet_ddp.train_step(
                model, *batch, optimizer, scheduler, watch, synchronize=synchronize
            )
            dist.all_reduce(loss)
            losses.append(loss.item() / dist.get_world_size())
    return losses, [parameter.detach() for parameter in network.parameters()]


def test_the_loss_curve_and_the_weights_are_those_of_one_device(ranks):
    """With frozen statistics: live ones are of a rank's own batch, which is other mathematics."""
    [(single, single_weights)] = ranks(1).run(loss_curve, 8)
    results = ranks(2).run(loss_curve, 4)
    assert len(single) == 10 and single[-1] < single[0]
    for losses, weights in results:
        torch.testing.assert_close(losses, single, rtol=1e-10, atol=0)
        torch.testing.assert_close(weights, single_weights, rtol=1e-8, atol=1e-12)
    assert all(map(torch.equal, results[0][1], results[1][1]))


def test_without_synchronisation_the_ranks_drift_apart(ranks):
    (_, first), (_, second) = ranks(2).run(loss_curve, 4, False)
    assert not any(map(torch.equal, first, second))


def weights_around_warm_up():
    torch.manual_seed(0)
    network = resnet18(num_classes=10)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    resnet_ddp.warm_up(DistributedDataParallel(network, gradient_as_bucket_view=True), 16, CPU)
    left = []
    for name, parameter in network.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            left.append(name)
    for name, tensor in network.state_dict().items():
        if not torch.equal(tensor, before[name]):
            left.append(name)
    return left


def test_warming_up_leaves_no_trace(ranks):
    assert ranks(2).run(weights_around_warm_up) == [[], []]


class Classifier(nn.Module):
    """A linear classifier of 3 × 16 × 16 images; its buffer is another one on each rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(3 * 16 * 16, 10, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor(1.0 + dist.get_rank(), dtype=torch.float64))

    def forward(self, images):
        return self.linear(images.flatten(1)) * self.scale


def evaluation(count):
    """What `evaluate` finds, in batches of 2, and should: all images at once, rank 0's buffer."""
    data, network = Numbers(count), Classifier()
    _, batches = resnet_ddp.sharded_loaders(data, data, 2, seed=0)
    found = resnet_ddp.evaluate(network, batches, CPU)
    logits = network.linear(data.images.flatten(1))
    return found, {
        "loss": nn.functional.cross_entropy(logits, data.labels).item(),
        "accuracy": (logits.argmax(1) == data.labels).double().mean().item(),
        "images": count,
    }


# Shares of 3 + 2, so that one rank has a batch more; of 1 + 0.
@pytest.mark.parametrize("count", [5, 1])
def test_evaluation_counts_each_image_once_and_is_the_same_everywhere(ranks, count):
    for found, expected in ranks(2).run(evaluation, count):
        assert found == pytest.approx(expected, rel=1e-12)


# The whole script; `forked` starts it without torchrun, and without importing torch again


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def check_result(path, world_size):
    """What a run of TINY, one epoch of three steps, has written."""
    result = harness.read_json(path, "07_resnet_ddp")
    assert (result["world_size"], result["batch_per_rank"]) == (world_size, 16 // world_size)
    assert result["step"] == 3 and result["evaluations"][0]["images"] == 297
    for name in resnet_ddp.MEASURED:  # [rank][step]
        assert [len(of_rank) for of_rank in result[name]] == [3] * world_size
    assert result["images_per_second"] == pytest.approx(3 * 16 / result["train_seconds"])
    parts = ["forward_seconds", "backward_seconds", "exposed_comm_seconds", "optimizer_seconds"]
    for rank in range(world_size):
        data = result["data_seconds"][rank]
        compute = result["compute_sync_seconds"][rank]
        assert 0 < sum(data) + sum(compute) < 1.05 * result["train_seconds"] + 0.1
        for step in range(3):
            of_step = [result[part][rank][step] for part in parts]
            assert min(of_step) > 0 and sum(of_step) == pytest.approx(compute[step])
    return result


def test_single_then_ddp_then_a_picture(forked, tmp_path):
    results = tmp_path / "new"
    words = [*TINY, "--epochs", 1, "--threads", 1, "--results", results]
    status, output = forked(None, SCRIPT, *words)
    assert status == 0, output
    assert names(results) == ["07_single.json"], "nothing to compare yet"
    status, output = forked(2, SCRIPT, *words)
    assert status == 0, output
    assert names(results) == ["07_ddp_2.json", "07_single.json", "speedup.png"]
    assert " s left\n" in output and "speed-up  in time" in output
    recorded = output_of(SCRIPT.with_name("reference_output.txt"))
    recorded = masked(re.sub(r"  ETA (\d+ s)", r", \1 left", recorded))  # as it was when recorded
    starts = ("#_resnet", "DDP", "epoch", "total", "data", "compute", "batch", "single")
    for line in masked(output):  # what the recorded output shows is what the script prints today
        if line.startswith(starts) or "images in" in line:
            assert line in recorded
    check_result(results / "07_single.json", 1)
    losses = check_result(results / "07_ddp_2.json", 2)["loss"]
    printed = re.findall(r"^epoch 1 step .* loss ([\d.]+) ", output, re.MULTILINE)
    means = [sum(of_ranks) / 2 for of_ranks in zip(*losses, strict=True)]
    assert [float(loss) for loss in printed] == pytest.approx(means, abs=1e-4), output


def test_without_its_all_reduces_a_run_is_not_compared(forked, tmp_path):
    words = [*TINY, "--epochs", 1, "--log-every", 3, "--held-out", 5, "--amp", "--no-sync"]
    status, output = forked(2, SCRIPT, *words, "--results", tmp_path, cwd=tmp_path)
    assert status == 0 and names(tmp_path) == ["07_no_sync_2.json"], output
    assert " of 5 images\n" in output and "step   3/3" in output and "step   2/3" not in output


def test_the_report_is_of_all_steps_and_ranks(capsys):
    made = result("ddp", 2, 400) | {"batch_per_rank": 32}
    made["data_seconds"][0][0] = 0.1
    made["data_seconds"][1][0] = 0.3
    resnet_ddp.print_report(made, images=256)
    _, *rows, last = capsys.readouterr().out.splitlines()
    # 0.1, 0.3 and 6 × 0.04 s, of which half are a rank's; 8 × 0.36 s; the sums of these two.
    assert rows[0].split()[:5] == ["data", "0.3", "18.2%", "80.0", "40.0"]
    assert rows[1].split()[:5] == ["compute+sync", "1.4", "81.8%", "360.0", "360.0"]
    assert rows[6].split()[:5] == ["batch", "1.8", "100.0%", "440.0", "400.0"]
    assert last == "256 images in 1.60 s: 160.0 images/s over all ranks; held-out accuracy 95.00%"


def test_alone_it_imports_and_says_what_to_copy(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)


def learning_rates(scaling):
    """Of the steps of an epoch of 2 and of one more."""
    model = nn.Linear(1, 1)
    args = SimpleNamespace(scaling=scaling, lr=0.01)
    optimizer, scheduler = resnet_ddp.build_optimizer(args, model, steps_per_epoch=2)
    rates = []
    for _ in range(4):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return rates


def test_weak_scaling_keeps_the_batch_per_rank_and_warms_the_learning_rate_up(
    forked, ranks, tmp_path
):
    assert ranks(2).run(learning_rates, "strong") == [[0.01] * 4] * 2
    for rates in ranks(2).run(learning_rates, "weak"):
        assert rates == pytest.approx([0.01, 0.015, 0.02, 0.02], rel=1e-12)
    words = [*TINY, "--scaling", "weak", "--epochs", 1, "--lr", 0.01, "--results", tmp_path]
    status, output = forked(2, SCRIPT, *words)
    assert status == 0 and "learning rate 0.01 to 0.02 in the first epoch\n" in output, output
    result = json.loads((tmp_path / "07_ddp_2.json").read_text())
    assert result["batch_per_rank"] == 16
    assert result["images_per_second"] == pytest.approx(3 * 32 / result["train_seconds"])


def check_equal_checkpoints(whole, resumed):
    """All but the times is the same to the last bit; returns the progress."""
    whole = torch.load(whole, weights_only=True)
    resumed = torch.load(resumed, weights_only=True)
    assert resumed["settings"] == whole["settings"]
    for name in ("epoch", "step", "evaluations", "loss", "accuracy"):
        assert resumed["progress"][name] == whole["progress"][name], name
    for part in ("model", "optimizer", "scheduler", "random_states"):
        torch.testing.assert_close(resumed[part], whole[part], rtol=0, atol=0)
    return resumed["progress"]


def save_but_fail(path):
    """A checkpoint, and a second one that ends in an error while it is written."""
    part = SimpleNamespace(state_dict=lambda: {"weight": torch.ones(3)})
    checkpoints.save(path, {}, {"epoch": 1}, {"model": part}, CPU)
    part.state_dict = lambda: part.state_dict  # which nobody can pickle
    with pytest.raises((AttributeError, pickle.PicklingError)):
        checkpoints.save(path, {}, {"epoch": 2}, {"model": part}, CPU)


def test_a_save_that_is_cut_short_leaves_the_last_checkpoint(ranks, tmp_path):
    ranks(1).run(save_but_fail, tmp_path / "c")
    assert torch.load(tmp_path / "c", weights_only=True)["progress"] == {"epoch": 1}


@pytest.mark.full
@harness.needs_proc
def test_a_killed_worker_costs_at_most_its_epoch_and_no_bit_of_the_result(
    script, launched, tmp_path
):
    # Three ranks: of two numbers the sum is the same in every order, of three it is not.
    words = [*TINY, "--global-batch", 12, "--epochs", 3, "--results", tmp_path]
    status, output = launched(3, SCRIPT, *words, "--checkpoint", tmp_path / "whole")
    assert status == 0, output

    new_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see the README
    words += ["--checkpoint", tmp_path / "killed"]
    killed = script(torchrun(3, "--max-restarts", 3, SCRIPT, *words), env=new_store)
    harness.wait_for_line(killed, "epoch 2 step")
    os.kill(harness.rank_1(killed), signal.SIGKILL)
    status, output = killed.wait()
    assert status == 0, output
    assert "after epoch 1" in output and "epoch 1 step" not in output, output

    progress = check_equal_checkpoints(tmp_path / "whole", tmp_path / "killed")
    assert [len(losses) for losses in progress["loss"]] == [9, 9, 9]
    assert not (tmp_path / "killed.part").exists()


# CIFAR-10


def test_cifar10_is_read_and_normalised(tmp_path, monkeypatch):
    """From a small folder in the format of cifar-10-python.tar.gz: {data: [n, 3072], labels: [n]}.

    torchvision knows the real files by their checksums, which here become the small ones'.
    """
    random = numpy.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    contents = {"batches.meta": {"label_names": [*"abcdefghij"]}}
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        pixels = random.integers(0, 256, (8, 3072), dtype=numpy.uint8)
        contents[name] = {"data": pixels, "labels": random.integers(0, 10, 8).tolist()}
    sums = []
    for name, content in contents.items():
        (folder / name).write_bytes(pickle.dumps(content))
        sums.append([name, hashlib.md5((folder / name).read_bytes()).hexdigest()])
    monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": sums[0][1]})
    monkeypatch.setattr(CIFAR10, "train_list", sums[1:6])
    monkeypatch.setattr(CIFAR10, "test_list", sums[6:])

    train_set, test_set = images.load_images(str(tmp_path), False, 32)
    assert (len(train_set), len(test_set)) == (40, 8)
    image, label = train_set[8]  # the first of the second batch
    raw = torch.tensor(contents["data_batch_2"]["data"][0]).view(3, 32, 32).double()
    assert label == contents["data_batch_2"]["labels"][0]
    for channel, (mean, std) in enumerate([(125.3, 63.0), (123.0, 62.1), (113.9, 66.7)]):
        expected = (raw[channel] - mean) / std
        torch.testing.assert_close(image[channel].double(), expected, rtol=1e-5, atol=1e-5)
    assert images.load_images(str(tmp_path), False, 64)[0][0][0].shape == (3, 64, 64)


def test_synthetic_images_have_the_shapes_of_cifar10_and_are_always_the_same():
    train_set, test_set = images.load_images("synthetic", False, 32)
    assert (len(train_set), len(test_set)) == (50_000, 10_000)
    assert set(train_set.labels.tolist()) == set(range(10))
    again, _ = images.load_images("synthetic", False, 32)
    assert torch.equal(train_set.images, again.images)
    assert torch.equal(train_set.labels, again.labels)
    sample = torch.stack([train_set[i][0] for i in range(1000)])
    assert sample.shape[1:] == (3, 32, 32)
    assert abs(sample.mean()) < 0.01 and abs(sample.std() - 1) < 0.01, "normalised"


def test_photographs_are_jpegs_that_are_decoded_when_asked_for():
    train_set, _ = images.load_images("synthetic", False, 32, decode=90)
    assert len(train_set) == 50_000 and train_set[0][0].shape == (3, 32, 32)
    assert all(file[:3] == b"\xff\xd8\xff" for file in train_set.images.files)
    assert train_set.images[65].shape == (3, 90, 90)


def test_every_epoch_has_another_order_also_of_pictures_that_a_worker_decodes(forked, tmp_path):
    words = [*TINY, "--epochs", 2, "--workers", 1, "--held-out", 8, "--lr", 1e-30]
    words += ["--data", "synthetic", "--decode", 64, "--results", tmp_path]
    status, output = forked(None, SCRIPT, *words)
    assert status == 0, output
    result = json.loads((tmp_path / "07_single.json").read_text())
    assert result["data"] == "synthetic JPEGs of 64 × 64 pixels"
    assert result["evaluations"][0]["images"] == 8
    [losses] = result["loss"]  # of weights that stay: another order of images, other losses
    assert len(losses) == 6 and losses[:3] != losses[3:]


# The comparison


def result(name, world_size, ms):
    """A result as the script writes it, with steps of this many ms, a tenth of them for data."""
    options = dict.fromkeys(compare_runs.OPTIONS) | {"image_size": 64, "global_batch": 64}
    tenths = {"data": 1, "compute_sync": 9, "forward": 3, "backward": 4, "exposed_comm": 1}
    seconds = {}
    for part, count in (tenths | {"optimizer": 1}).items():
        seconds[f"{part}_seconds"] = [[count * ms / 10_000] * 4 for _ in range(world_size)]
    return seconds | {
        "stage": "07_resnet_ddp",
        "device": "cpu",
        "world_size": world_size,
        "threads_per_rank": 1,
        "options": options | {"epochs": 1, "scaling": "strong"},
        "name": "single" if name == "single" else f"DDP × {world_size}",
        "data": "digits",
        "train_seconds": 4 * ms / 1000,
        "images_per_second": 64_000 / ms,
        "evaluations": [{"epoch": 1, "loss": 0.1, "accuracy": 0.95, "images": 297}],
    }


def test_two_results_are_compared_and_drawn(tmp_path, capsys):
    (tmp_path / "07_single.json").write_text(json.dumps(result("single", 1, 600)))
    compare_runs.compare(tmp_path)
    assert names(tmp_path) == ["07_single.json"], "one result is nothing to compare"
    assert not capsys.readouterr().out
    (tmp_path / "07_ddp_2.json").write_text(json.dumps(result("ddp", 2, 400)))
    other = result("ddp", 4, 200)
    other["options"]["image_size"] = 224
    (tmp_path / "07_ddp_4.json").write_text(json.dumps(other))
    compare_runs.compare(tmp_path)
    output = capsys.readouterr().out
    row = "DDP × 2      1.6     400.0  10.0%     160.0      1.50     1.50       75.0%    95.00%"
    assert row in output, output
    left_out = "07_ddp_4.json is left out of the comparison: 07_single.json has image_size 64"
    assert left_out in output and "DDP × 4" not in output
    picture = imread(tmp_path / "speedup.png")
    assert picture.shape[1] == 960 and picture.std() > 0.05


@pytest.mark.parametrize("name, content", [("07_single.json", "{"), ("07_ddp_2.json", "[1]")])
def test_a_broken_result_is_one_line(content, name, tmp_path, capsys):
    for good in ("07_single.json", "07_ddp_2.json"):
        (tmp_path / good).write_text(json.dumps(result("ddp", 2, 400)))
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as end:
        compare_runs.compare(tmp_path)
    errors = capsys.readouterr().err
    assert end.value.code == 2 and errors.count("\n") == 1, errors
    assert f"{name}: is not a result of resnet_ddp.py (" in errors


# Bad input


@pytest.mark.parametrize(
    "words",
    [
        ["--global-batch", "1"],
        ["--global-batch", "4096", "--image-size", "8"],
        ["--lr", "inf"],
        ["--no-sync"],
        ["--download"],
        ["--decode", "400"],
        ["--data", "no/such/folder"],
        ["--checkpoint", "file"],
        ["--global-batch", "64", "--compare-with", "1", "3"],
        ["--global-batch", "1024", "--scaling", "weak", "--compare-with", "2", "1"],
        ["--checkpoint", "new", "--compare-with", "1", "2"],
        ["--backend", "nccl", "--compare-with", "1", "2"],
        ["--results", "file"],
    ],
)
def test_bad_input_is_one_line(words, tmp_path, monkeypatch, capsys):
    """It names the first of these flags; on a single device."""
    (tmp_path / "file").write_text("neither a checkpoint nor a folder")
    command = ["resnet_ddp.py", "--device", "cpu", "--results", str(tmp_path), *words]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(SystemExit) as exit_status:
        resnet_ddp.main()
    [line] = capsys.readouterr().err.splitlines()
    assert exit_status.value.code == 2
    assert line.startswith(f"resnet_ddp.py: error: argument {words[0]}: "), line
    assert not dist.is_initialized()


def test_make_checks_the_flags_for_all_ranks_first(script):
    """And then nothing is started, and no result of an earlier run is removed."""
    command = ["make", "-C", SCRIPT.parent.parent, f"PYTHON={sys.executable}", "07_resnet_ddp"]
    status, output = script([*command, "NPROC=3", "ARGS="], env={"MAKEFLAGS": ""}).wait(60)
    assert status == 2 and "epoch" not in output and "07_resnet_ddp: torch" not in output, output
    assert "error: argument --global-batch: '64' cannot be divided by 3 ranks" in output


def test_a_single_device_takes_the_threads_of_a_rank_that_it_is_compared_with(forked, tmp_path):
    words = [*TINY, "--global-batch", 256, "--steps-per-epoch", 1, "--epochs", 1, "--held-out", 2]
    status, output = forked(None, SCRIPT, *words, "--compare-with", 2, 64, "--results", tmp_path)
    assert status == 0 and " 1 ranks, threads per rank: 1" in output, output
    assert json.loads((tmp_path / "07_single.json").read_text())["options"]["threads"] == 1


def test_a_run_resumes_from_its_own_checkpoint_only(forked, tmp_path):
    words = [*TINY, "--log-every", 3, "--results", tmp_path]
    resumed = [*words, "--checkpoint", tmp_path / "resumed"]
    for more in (
        [*words, "--checkpoint", tmp_path / "whole", "--epochs", 2],
        [*resumed, "--epochs", 1],
        [*resumed, "--epochs", 2],
    ):
        status, output = forked(None, SCRIPT, *more)
        assert status == 0 and f"written: {tmp_path}" in output, output
    assert f"resumed from {tmp_path / 'resumed'} after epoch 1\n" in output
    check_equal_checkpoints(tmp_path / "whole", tmp_path / "resumed")

    status, output = forked(None, SCRIPT, *resumed, "--epochs", 2, "--lr", 0.5)
    assert status == 2 and "it was written with lr 0.02, not 0.5" in output, output
    assert output.count("error") == 1 and "Traceback" not in output
    status, output = forked(None, SCRIPT, *resumed, "--epochs", 1)
    assert status == 2 and "it was written with epochs 2, not 1" in output, output


@pytest.mark.cuda
def test_on_a_gpu(script, launched, tmp_path):
    words = [*TINY, "--device", "cuda", "--epochs", 2, "--amp"]
    words += ["--workers", 1, "--results", tmp_path]
    single = script([sys.executable, SCRIPT, *words, "--checkpoint", tmp_path / "single"])
    status, output = single.wait()
    assert status == 0, output
    status, output = launched(2, SCRIPT, *words, "--checkpoint", tmp_path / "ddp")
    assert status == 0, output
    for name in ("07_single.json", "07_ddp_2.json"):
        result = json.loads((tmp_path / name).read_text())
        for seconds in result["data_seconds"] + result["compute_sync_seconds"]:
            assert all(second > 0 for second in seconds)
