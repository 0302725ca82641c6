"""resnet_ddp.py: the loss curve against one device, evaluation, kill and resume, bad input.

And images.py, compare_runs.py and waterfall.py.
"""

import copy
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
from torch.utils.data import TensorDataset
from torchvision.datasets import cifar
from torchvision.models import resnet18
from torchvision.ops import FrozenBatchNorm2d

from tools.record import output_of
from tools import harness
from tools.harness import ONLY_RANK, masked, torchrun

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import compare_runs  # noqa: E402
import images  # noqa: E402
import resnet_ddp  # noqa: E402
import waterfall  # noqa: E402

from common.timing import CollectiveCounter, Stopwatch  # noqa: E402

SCRIPT = Path(resnet_ddp.__file__)
TINY = "--image-size 16 --global-batch 16 --steps-per-epoch 3 --device cpu --log-every 1".split()
CPU = torch.device("cpu")


# Training


def random_images(count):
    """In float64, with labels."""
    random = torch.Generator().manual_seed(3)
    images = torch.randn(count, 3, 16, 16, dtype=torch.float64, generator=random)
    return TensorDataset(images, torch.randint(10, (count,), generator=random))


def loss_curve(batch_size):
    """Loss of each step over all ranks, and the final weights.

    Of a ResNet-18 in float64 with frozen statistics.
    """
    data = random_images(43)  # each epoch drops the last three
    batches, _ = resnet_ddp.sharded_loaders(data, data, batch_size, seed=0)
    torch.manual_seed(dist.get_rank())  # DDP must hand out rank 0's weights
    network = resnet18(num_classes=10, norm_layer=FrozenBatchNorm2d).double()
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    args = SimpleNamespace(scaling="strong", lr=1e-3)
    optimizer, scheduler = resnet_ddp.build_optimizer(args, model, steps_per_epoch=5)
    losses = []
    for epoch in range(2):
        batches.sampler.set_epoch(epoch)
        for batch in batches:
            watch = Stopwatch(CPU)
            loss, _ = resnet_ddp.train_step(model, *batch, optimizer, scheduler, watch)
            dist.all_reduce(loss)
            losses.append(loss.item() / dist.get_world_size())
    return losses, [parameter.detach() for parameter in network.parameters()]


def test_the_loss_curve_and_the_weights_are_those_of_one_device(ranks):
    """So the ranks' batches together are its batches.

    With frozen statistics: live ones are of a rank's own batch, which is other mathematics.
    """
    [(single, single_weights)] = ranks(1).run(loss_curve, 8)
    results = ranks(2).run(loss_curve, 4)
    assert len(single) == 10 and single[-1] < single[0]
    for losses, weights in results:
        torch.testing.assert_close(losses, single, rtol=1e-10, atol=0)
        torch.testing.assert_close(weights, single_weights, rtol=1e-8, atol=1e-12)
    assert all(map(torch.equal, results[0][1], results[1][1]))


def warm_up_between(network):
    """Its state before and after."""
    before = copy.deepcopy(network.state_dict())
    resnet_ddp.warm_up(DistributedDataParallel(network, gradient_as_bucket_view=True), 16, CPU)
    for parameter in network.parameters():
        assert parameter.grad is None or not parameter.grad.any()
    return before, network.state_dict()


def test_warming_up_leaves_no_trace(ranks):
    for before, after in ranks(2).run(warm_up_between, resnet18(num_classes=10)):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


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
    data, network = random_images(count), Classifier()
    images, labels = data.tensors
    _, batches = resnet_ddp.sharded_loaders(data, data, 2, seed=0)
    found = resnet_ddp.evaluate(network, batches, CPU)
    logits = nn.functional.linear(images.flatten(1), network.weight, network.bias)
    return found, {
        "loss": nn.functional.cross_entropy(logits, labels).item(),
        "accuracy": (logits.argmax(1) == labels).double().mean().item(),
        "images": count,
    }


# Shares of 3 + 2, so that one rank has a batch more; of 1 + 0.
@pytest.mark.parametrize("count", [5, 1])
def test_evaluation_counts_each_image_once_and_is_the_same_everywhere(ranks, count):
    for found, expected in ranks(2).run(evaluation, count):
        assert found == pytest.approx(expected, rel=1e-12)


# The whole script; `forked` starts it without torchrun, and without importing torch again


def check_result(path, world_size, batch_per_rank):
    """What a run of TINY, one epoch of three steps, has written."""
    result = harness.read_json(path, "07_resnet_ddp")
    assert result["world_size"] == world_size
    assert result["options"]["batch_per_rank"] == batch_per_rank
    assert result["evaluations"][0]["images"] == 297
    images = 3 * world_size * batch_per_rank
    assert result["images_per_second"] == pytest.approx(images / result["train_seconds"])
    measured = {name: numpy.array(result[name]) for name in resnet_ddp.MEASURED}
    assert {times.shape for times in measured.values()} == {(world_size, 3)}
    phases = ["forward_seconds", "backward_seconds", "exposed_comm_seconds", "optimizer_seconds"]
    compute = measured["compute_sync_seconds"]
    assert sum(measured[name] for name in phases) == pytest.approx(compute)
    took = (compute + measured["data_seconds"]).sum(1)
    assert all(0 < took) and all(took < 1.05 * result["train_seconds"] + 0.1)
    return result


def test_ddp_then_single_then_a_picture(forked, tmp_path):
    words = [*TINY, "--epochs", 1, "--held-out", 1000, "--results", tmp_path / "new"]
    status, output = forked(2, SCRIPT, *words)
    assert status == 0 and "speed-up" not in output, "nothing to compare yet"
    losses = check_result(tmp_path / "new" / "07_resnet_ddp_2.json", 2, 8)["loss"]
    printed = re.findall(r"^epoch 1 step .* loss ([\d.]+) ", output, re.MULTILINE)
    assert [float(loss) for loss in printed] == pytest.approx(numpy.mean(losses, 0), abs=1e-4)
    status, single_output = forked(None, SCRIPT, *words)
    assert status == 0, single_output
    check_result(tmp_path / "new" / "07_resnet_ddp_1.json", 1, 16)
    assert (tmp_path / "new" / "speedup.png").exists()
    output += single_output
    assert " s left\n" in output and "speed-up  in time" in output
    recorded = output_of(SCRIPT.with_name("reference_output.txt"))
    starts = ("#_resnet", "DDP", "epoch", "total", "data", "compute", "batch", "single")
    for line in masked(output):  # what the recorded output shows is what the script prints today
        if line.startswith(starts) or "images in" in line:
            assert line in masked(recorded)


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
    words = [*TINY, "--scaling", "weak", "--epochs", 1, "--lr", 0.01, "--amp", "--threads", 2]
    words += ["--log-every", 3, "--results", tmp_path]
    status, output = forked(2, SCRIPT, *words)
    assert status == 0 and "learning rate 0.01 to 0.02 in the first epoch\n" in output, output
    assert "step   3/3" in output and "step   2/3" not in output
    assert check_result(tmp_path / "07_resnet_ddp_2.json", 2, 16)["threads_per_rank"] == 2


def check_equal_checkpoints(whole, resumed):
    """All but the times is the same to the last bit."""
    whole = torch.load(whole, weights_only=True)
    resumed = torch.load(resumed, weights_only=True)
    assert resumed["settings"] == whole["settings"]
    for name in ("evaluations", "loss", "accuracy"):
        assert resumed["progress"][name] == whole["progress"][name], name
    for name in ("model", "optimizer", "scheduler"):
        torch.testing.assert_close(resumed[name], whole[name], rtol=0, atol=0)


def test_a_save_that_is_cut_short_leaves_the_last_checkpoint(tmp_path):
    path = tmp_path / "c"
    module = SimpleNamespace(state_dict=lambda: {"weight": torch.ones(3)})
    resnet_ddp.save(path, {}, {"epoch": 1}, {"model": module})
    module.state_dict = lambda: module.state_dict  # which nobody can pickle
    with pytest.raises((AttributeError, pickle.PicklingError)):
        resnet_ddp.save(path, {}, {"epoch": 2}, {"model": module})
    assert torch.load(path, weights_only=True)["progress"] == {"epoch": 1}


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

    check_equal_checkpoints(tmp_path / "whole", tmp_path / "killed")


# CIFAR-10


def test_cifar10_is_read_and_normalised(tmp_path, monkeypatch):
    """From small files in the format of cifar-10-python.tar.gz: {data: [n, 3072], labels: [n]}."""
    monkeypatch.setattr(cifar, "check_integrity", lambda *_: True)  # that of the real files
    pixels = numpy.zeros((8, 3, 1024), dtype=numpy.uint8)
    pixels[1, 2] = 255  # an image that is blue
    content = {"data": pixels.reshape(8, 3072), "labels": [*range(8)], "label_names": []}
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]:
        (folder / name).write_bytes(pickle.dumps(content))
    train_set, test_set = images.load_images(str(tmp_path), False, 20)
    assert (len(train_set), len(test_set)) == (40, 8)
    image, label = train_set[9]  # the second of the second batch
    colour = torch.tensor([-0.491 / 0.247, -0.482 / 0.244, (1 - 0.447) / 0.262])
    torch.testing.assert_close(image, colour[:, None, None].expand(3, 20, 20))
    assert label == 1


@pytest.mark.parametrize(
    "data, decode, sizes", [("digits", None, (1500, 297)), ("synthetic", 90, (50_000, 10_000))]
)
def test_images_are_normalised_of_any_size_and_always_the_same(data, decode, sizes):
    train_set, test_set = images.load_images(data, False, 48, decode)
    assert (len(train_set), len(test_set)) == sizes
    sample = torch.stack([train_set[i][0] for i in range(64)])
    again, _ = images.load_images(data, False, 48, decode)
    assert torch.equal(sample, torch.stack([again[i][0] for i in range(64)]))
    assert not torch.equal(sample[0], test_set[0][0])
    assert sample.shape[1:] == (3, 48, 48) and len(sample.unique(dim=0)) == 64
    assert abs(sample.mean()) < 0.1 and 0.5 < sample.std() < 1.5


def test_every_epoch_has_another_order_also_of_pictures_that_a_worker_decodes(forked, tmp_path):
    words = [*TINY, "--epochs", 2, "--workers", 1, "--held-out", 8, "--lr", 1e-30]
    words += ["--data", "synthetic", "--decode", 64, "--results", tmp_path]
    status, output = forked(None, SCRIPT, *words)
    assert status == 0, output
    result = json.loads((tmp_path / "07_resnet_ddp_1.json").read_text())
    assert result["evaluations"][0]["images"] == 8
    [losses] = result["loss"]  # of weights that stay: another order of images, other losses
    assert len(losses) == 6 and losses[:3] != losses[3:]


# The comparison


def result(world_size, ms):
    """A result as the script writes it, with steps of this many ms, a tenth of them for data."""
    tenths = {"data": 1, "compute_sync": 9, "forward": 3, "backward": 4, "exposed_comm": 1}
    seconds = {}
    for phase, count in (tenths | {"optimizer": 1}).items():
        seconds[f"{phase}_seconds"] = [[count * ms / 10_000] * 4 for _ in range(world_size)]
    return seconds | {
        "world_size": world_size,
        "options": dict.fromkeys(compare_runs.SETTINGS),
        "name": "single" if world_size == 1 else f"DDP × {world_size}",
        "train_seconds": 4 * ms / 1000,
        "images_per_second": 64_000 / ms,
        "evaluations": [{"accuracy": 0.95}],
    }


def test_the_report_is_of_all_steps_and_ranks(capsys):
    made = result(2, 400)
    made["data_seconds"][0][0] = 0.1
    made["data_seconds"][1][0] = 0.3
    resnet_ddp.print_report(made, images=256)
    _, *rows, last = capsys.readouterr().out.splitlines()
    # 0.1, 0.3 and 6 × 0.04 s, of which half are a rank's; 8 × 0.36 s; the sums of these two.
    assert rows[0].split()[:5] == ["data", "0.3", "18.2%", "80.0", "40.0"]
    assert rows[1].split()[:5] == ["compute+sync", "1.4", "81.8%", "360.0", "360.0"]
    assert rows[6].split()[:5] == ["batch", "1.8", "100.0%", "440.0", "400.0"]
    assert last == "256 images in 1.60 s: 160.0 images/s over all ranks; held-out accuracy 95.00%"


def test_results_of_the_same_settings_are_compared_and_drawn(tmp_path, capsys):
    def compare_with(world_size, ms, threads=1):
        written = result(world_size, ms)
        written["options"]["threads"] = threads
        (tmp_path / f"07_resnet_ddp_{world_size}.json").write_text(json.dumps(written))
        compare_runs.compare(tmp_path)
        return capsys.readouterr().out

    assert not compare_with(2, 400), "one result is nothing to compare"
    compare_with(4, 200, threads=2)
    compare_with(8, 100)
    output = compare_with(1, 600)
    for row in (
        "DDP × 2      1.6     400.0  10.0%     160.0      1.50     1.50       75.0%    95.00%",
        "DDP × 8      0.4     100.0  10.0%     640.0      6.00     6.00       75.0%    95.00%",
        "DDP × 4 is not compared: threads differ from one device's",
    ):
        assert row in output, output
    assert output.count("DDP × 4") == 1
    assert imread(tmp_path / "speedup.png").std() > 0.05


def test_waterfall(forked, tmp_path):
    """Its bars add up to DDP's step; one device is measured on rank 0 alone."""
    words = ["--image-size", 16, "--global-batch", 4, "--steps", 2, "--device", "cpu"]
    words += ["--json", tmp_path / "json", "--plot", tmp_path / "w.png"]
    status, output = forked(2, SCRIPT.with_name("waterfall.py"), *words)
    assert status == 0 and imread(tmp_path / "w.png").std() > 0.05, output
    rows = re.findall(r"^\S.* (-?\d+\.\d)$", output, re.MULTILINE)
    *parts, whole = [float(ms) for ms in rows]
    assert len(parts) == 5 and sum(parts) == pytest.approx(whole, abs=0.5), output
    candidates = harness.read_json(tmp_path / "json", "07_resnet_ddp/waterfall")["candidates"]
    ranks = [len(times["step_seconds"]) for times in candidates.values()]
    assert ranks == [1, 1, 2, 2]


def collectives_of_a_step(synchronize):
    args = SimpleNamespace(image_size=16)
    step = waterfall.make_step(args, CPU, 2, synchronize=synchronize)
    with CollectiveCounter() as counter:
        step()
    return counter.count


def test_without_all_reduces_there_are_none(ranks):
    assert ranks(1).run(collectives_of_a_step, False) < ranks(1).run(collectives_of_a_step, True)


# Bad input


@pytest.mark.parametrize(
    "words",
    [
        ["--global-batch", "1"],
        ["--global-batch", "4096", "--image-size", "8"],
        ["--lr", "inf"],
        ["--download"],
        ["--decode", "400"],
        ["--data", "no/such/folder"],
        ["--checkpoint", "file"],
        ["--results", "file"],
    ],
)
def test_bad_input_is_one_line(refusal, words, tmp_path, monkeypatch):
    """It names the first of these flags."""
    (tmp_path / "file").write_text("neither a checkpoint nor a folder")
    monkeypatch.chdir(tmp_path)
    said = refusal(resnet_ddp.main, SCRIPT, "--device", "cpu", "--results", tmp_path, *words)
    assert said.startswith(f"argument {words[0]}: ")
    assert not dist.is_initialized()


def test_a_batch_that_the_ranks_cannot_share(refusal, tmp_path):
    environment = ONLY_RANK | {"WORLD_SIZE": "3"}
    words = ["--device", "cpu", "--timeout", 5, "--results", tmp_path]
    said = refusal(resnet_ddp.main, SCRIPT, *words, environment=environment)
    assert said.startswith("argument --global-batch: '64' cannot be divided by 3 ranks")


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
@pytest.mark.parametrize("world_size", [1, 2])
def test_on_a_gpu(launched, tmp_path, world_size):
    words = [*TINY, "--device", "cuda", "--epochs", 1, "--amp", "--workers", 1]
    status, output = launched(world_size, SCRIPT, *words, "--results", tmp_path)
    assert status == 0, output
    check_result(tmp_path / f"07_resnet_ddp_{world_size}.json", world_size, 16 // world_size)
