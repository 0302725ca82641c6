"""resnet_ddp.py: the loss curve against one device, evaluation, kill and resume, bad input.

And images.py and compare_runs.py.
"""

import json
import os
import pickle
import re
import shutil
import signal
from pathlib import Path

import compare_runs
import images
import numpy
import pytest
import resnet_ddp
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torchvision.datasets import cifar
from torchvision.models import resnet18
from torchvision.ops import FrozenBatchNorm2d

from common.timing import Stopwatch
from tools import testing

SCRIPT = Path(resnet_ddp.__file__)
TINY = "--image-size 8 --global-batch 12 --steps-per-epoch 3 --device cpu --log-every 1".split()
CPU = torch.device("cpu")


# Training


def random_images(count):
    """In float64, with labels."""
    random = torch.Generator().manual_seed(3)
    images = torch.randn(count, 3, 16, 16, dtype=torch.float64, generator=random)
    return TensorDataset(images, torch.randint(10, (count,), generator=random))


def loss_curve(batch_size):
    """Loss of each step over all ranks and the first layer's weights, of a ResNet-18 in float64
    with frozen statistics."""
    data = random_images(27)  # each epoch drops the last three
    batches, _ = resnet_ddp.loaders_of_shares(data, data, batch_size)
    torch.manual_seed(dist.get_rank())  # DDP must hand out rank 0's weights
    module = resnet18(num_classes=10, norm_layer=FrozenBatchNorm2d).double()
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    training = resnet_ddp.Training(module, model, optimizer, CPU)
    losses = []
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for batch in batches:
            loss, _ = resnet_ddp.train_step(training, *batch, Stopwatch(CPU))
            dist.all_reduce(loss)
            losses.append(loss.item() / dist.get_world_size())
    return losses, module.conv1.weight.detach()


def test_the_loss_curve_and_the_weights_are_those_of_one_device(ranks):
    """So the ranks' batches together are its batches.

    With frozen statistics: live ones are of a rank's own batch, which is other mathematics.
    """
    [(single, single_weights)] = ranks(1).run(loss_curve, 8)
    assert len(single) == 6 and min(single[1:]) < single[0]
    for losses, weights in ranks(2).run(loss_curve, 4):
        torch.testing.assert_close(losses, single, rtol=1e-10, atol=0)
        torch.testing.assert_close(weights, single_weights, rtol=1e-8, atol=1e-12)


class Classifier(nn.Linear):
    """Of 3 × 16 × 16 pixels; its buffer is another one on each rank."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(3 * 16 * 16, 10, dtype=torch.float64)
        self.register_buffer("scale", torch.tensor(1.0 + dist.get_rank(), dtype=torch.float64))

    def forward(self, images):
        return super().forward(images.flatten(1)) * self.scale


def evaluation(count):
    """What `evaluate` finds, in batches of 2, and should: all images at once, rank 0's buffer."""
    data, module = random_images(count), Classifier()
    images, labels = data.tensors
    _, batches = resnet_ddp.loaders_of_shares(data, data, 2)
    found = resnet_ddp.evaluate(resnet_ddp.Training(module, None, None, CPU), batches)
    logits = nn.functional.linear(images.flatten(1), module.weight, module.bias)
    loss = nn.functional.cross_entropy(logits, labels).item()
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    return found, {"loss": loss, "accuracy": accuracy, "images": count}


def test_evaluation_counts_each_image_once_and_is_the_same_everywhere(ranks):
    for count in (5, 1):  # shares of 3 + 2, so that one rank has a batch more; of 1 + 0
        for found, expected in ranks(2).run(evaluation, count):
            assert found == pytest.approx(expected, rel=1e-12)


# The whole script; `forked` starts it without torchrun, and without importing torch again


def check_result(path, world_size, resumed_epochs=1):
    """What a run of TINY has written: the phases of a step add up to it, and the steps to all."""
    result = testing.read_json(path, "07_resnet_ddp")
    assert result["world_size"] == world_size
    assert result["images"] == 3 * 12
    assert [one["images"] for one in result["evaluations"]] == [297] * (1 + resumed_epochs)
    measured = {name: numpy.array(result[name]) for name in resnet_ddp.SECONDS}
    steps = measured["batch_seconds"]
    assert steps.shape == (world_size, 3)
    assert sum(measured[name] for name in compare_runs.PHASES) == pytest.approx(steps)
    of_ranks = steps.sum(axis=1)
    assert 0 < of_ranks.min()
    assert of_ranks.max() < 1.05 * result["train_seconds"] + 0.1


def test_single_then_ddp_both_resumed_then_a_picture(forked, refusal, tmp_path):
    """From a checkpoint alone a run goes on, to the same bits, and also on one rank more."""

    def run(ranks, *words) -> str:
        status, output = forked(ranks, SCRIPT, *TINY, "--results", tmp_path, *words)
        assert status == 0, output
        return output

    run(None, "--epochs", 2, "--checkpoint", tmp_path / "whole")
    run(None, "--epochs", 1, "--checkpoint", tmp_path / "resumed")
    shutil.copy(tmp_path / "resumed", tmp_path / "by two")
    words = "--epochs", 2, "--workers", 1, "--checkpoint"
    for ranks, name in ((None, "resumed"), (2, "by two")):
        output = run(ranks, *words, tmp_path / name)
        assert "epoch 1 step" not in output and "epoch 2 step" in output, output
        check_result(tmp_path / f"07_resnet_ddp_{ranks or 1}.json", ranks or 1)
    check_equal_checkpoints(tmp_path / "whole", tmp_path / "resumed")
    assert re.search(r"^DDP × 2 .*%", output, re.MULTILINE), output
    testing.assert_png(tmp_path / "speedup.png")
    for words in (["--epochs", 3, "--lr", 0.5], ["--epochs", 2]):
        words += ["--checkpoint", tmp_path / "resumed"]
        said = refusal(resnet_ddp.main, SCRIPT, *TINY, *words)
        assert "2 epochs of digits" in said and "0.02" in said


def check_equal_checkpoints(whole, resumed):
    whole = torch.load(whole, weights_only=True)
    resumed = torch.load(resumed, weights_only=True)
    assert whole["evaluations"] == resumed["evaluations"]
    for name in ("module", "optimizer"):
        torch.testing.assert_close(resumed[name], whole[name], rtol=0, atol=0)


@pytest.mark.full
@testing.needs_proc
def test_a_killed_worker_costs_at_most_its_epoch_and_no_bit_of_the_result(script, forked, tmp_path):
    words = [*TINY, "--epochs", 3, "--results", tmp_path]
    status, output = forked(2, SCRIPT, *words, "--checkpoint", tmp_path / "whole")
    assert status == 0, output
    new_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see the README
    words += ["--checkpoint", tmp_path / "killed"]
    killed = script(testing.torchrun(2, "--max-restarts", 3, SCRIPT, *words), env=new_store)
    testing.wait_for_line(killed, "epoch 2 step")
    os.kill(testing.rank_1(killed), signal.SIGKILL)
    status, output = killed.wait()
    assert status == 0, output
    assert "after epoch 1" in output and "epoch 1 step" not in output, output
    check_equal_checkpoints(tmp_path / "whole", tmp_path / "killed")


# Images


def test_cifar10_is_read_and_normalised(tmp_path, monkeypatch):
    """From small files in the format of cifar-10-python.tar.gz: {data: [n, 3072], labels: [n]}."""
    monkeypatch.setattr(cifar, "check_integrity", lambda *_: True)  # that of the real files
    pixels = numpy.zeros((8, 3, 1024), dtype=numpy.uint8)
    pixels[1, 2] = 255  # an image that is blue
    content = {"data": pixels.reshape(8, 3072), "labels": [*range(8)], "label_names": []}
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]:
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(content))
    train_set, test_set = images.image_sets(str(tmp_path), False, 20)
    assert (len(train_set), len(test_set)) == (40, 8)
    image, label = train_set[9]  # the second of the second batch
    colour = torch.tensor([-0.491 / 0.247, -0.482 / 0.244, (1 - 0.447) / 0.262])
    torch.testing.assert_close(image, colour[:, None, None].expand(3, 20, 20))
    assert label == 1


# The comparison


def result(world_size, ms, **changes):
    """A result as the script writes it, with steps of this many ms, a tenth of them for data."""
    tenths = {"data": 1, "compute_sync": 9, "forward": 3, "backward": 4, "exposed_comm": 1}
    seconds = {}
    for phase, count in (tenths | {"optimizer": 1, "batch": 10}).items():
        seconds[f"{phase}_seconds"] = [[count * ms / 10_000] * 4 for _ in range(world_size)]
    of_both = dict.fromkeys(compare_runs.COMMON) | {"images": 256, "options": {}}
    of_one = {"world_size": world_size, "train_seconds": 4 * ms / 1000}
    of_one["started"] = f"2026-11-27 10:{world_size:02}:00+00:00"
    shown = {"image_size": 64, "global_batch": 64, "evaluations": [{"accuracy": 0.95}]}
    return seconds | of_both | of_one | shown | changes


def test_runs_are_compared_where_all_that_matters_agrees(tmp_path, capsys):
    for run in result(1, 600), result(2, 400), result(8, 100), result(3, 200, workers=2):
        (tmp_path / f"07_resnet_ddp_{run['world_size']}.json").write_text(json.dumps(run))
    compare_runs.show_median([tmp_path], tmp_path / "speedup.png")
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line.split()[3:] for line in lines if line.startswith("DDP")}
    assert rows["DDP × 2"] == "1.6 400.0 10.0% 160.0 1.50 75.0% 95.00%".split(), lines
    assert rows["DDP × 8"] == "0.4 100.0 10.0% 640.0 6.00 75.0% 95.00%".split(), lines
    [line] = [line for line in lines if line.startswith("DDP × 3")]
    assert "not compared" in line and "workers" in line
    assert "began at 2026-11-27 10:01" in lines[-2] and "10:08" in lines[-2], lines
    testing.assert_png(tmp_path / "speedup.png")


# Bad input


@pytest.mark.parametrize("option", ["--global-batch", "--data", "--checkpoint", "--results"])
def test_bad_input_is_one_line(refusal, option, tmp_path):
    """A batch of more images than there are; neither a checkpoint nor a folder."""
    (tmp_path / "4096").write_text("no checkpoint")
    value = "4096" if option == "--global-batch" else tmp_path / "4096"
    words = "--device", "cpu", "--image-size", 8, "--results", tmp_path, option, value
    assert refusal(resnet_ddp.main, SCRIPT, *words).startswith(f"argument {option}: ")
    assert not dist.is_initialized()
