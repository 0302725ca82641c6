"""Stage 05: BucketedDDP against single-process training, and the script from outside."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bucketed import BucketedDDP, main
from torch import nn

from common.testing import harness, wrapper_checks

SCRIPT = Path(__file__).with_name("bucketed.py")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "model",
    [
        wrapper_checks.Tied,
        wrapper_checks.Frozen,
        wrapper_checks.Branches,
        wrapper_checks.MixedTypes,
        wrapper_checks.ChannelsLast,
    ],
)
def test_trains_like_one_process(ranks, world_size, model):
    ranks(world_size).run(wrapper_checks.trains_like_one_process, BucketedDDP, model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulates_gradients(ranks, world_size, set_to_none):
    ranks(world_size).run(
        wrapper_checks.trains_like_one_process, BucketedDDP, wrapper_checks.Branches, 3, set_to_none
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_broadcasts_parameters_and_buffers(ranks, world_size):
    ranks(world_size).run(wrapper_checks.broadcasts_parameters_and_buffers, BucketedDDP)


@pytest.mark.parametrize("check", wrapper_checks.UNUSUAL_USE + wrapper_checks.UNUSUAL_USE_OF_HOOKS)
def test_unusual_use(ranks, check):
    ranks(2).run(check, BucketedDDP)


@pytest.mark.parametrize("model, inputs, variation", wrapper_checks.VARIATIONS)
def test_equals_torch_ddp(ranks, model, inputs, variation):
    ranks(2).run(wrapper_checks.equals_torch_ddp, BucketedDDP, model, inputs, variation)


@pytest.mark.full
@pytest.mark.parametrize("model, inputs, variation", wrapper_checks.REAL_MODELS)
def test_real_models(ranks, model, inputs, variation):
    ranks(2).run(
        wrapper_checks.equals_torch_ddp, BucketedDDP, model, inputs, variation, timeout=300
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("bucket_size_mb", [0.0001, 0.001, 1.0, float("inf")])
@pytest.mark.parametrize("model", [wrapper_checks.Branches, wrapper_checks.MixedTypes])
def test_bucket_sizes(ranks, world_size, model, bucket_size_mb):
    ranks(world_size).run(
        wrapper_checks.trains_like_one_process,
        BucketedDDP,
        model,
        1,
        True,
        {"bucket_size_mb": bucket_size_mb},
    )


def buckets_of_layers(bucket_size_mb):
    layers = [nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(7)]
    layers[2], layers[4] = (
        nn.Linear(40, 40, bias=False, dtype=torch.float64),
        nn.Linear(4, 4, bias=False),
    )
    model = BucketedDDP(nn.Sequential(*layers), bucket_size_mb)
    number = {
        parameter: int(name.split(".")[0]) for name, parameter in model.module.named_parameters()
    }
    return [[number[parameter] for parameter in bucket] for bucket in model.buckets]


@pytest.mark.parametrize(
    "bytes_per_bucket, expected",
    [
        # Layers of 128 bytes; layer 2 is larger than a bucket, layer 4 is of another dtype.
        (256, [[6], [5, 3], [4], [2], [1, 0]]),
        (25 * 256, [[6, 5], [4], [3], [2], [1, 0]]),
        (float("inf"), [[6, 5, 3, 2, 1, 0], [4]]),
    ],
)
def test_buckets_are_filled_in_reverse_order(ranks, bytes_per_bucket, expected):
    assert ranks(1).run(buckets_of_layers, bytes_per_bucket / 2**20) == [expected]


def drops_a_step_of_single_buckets():
    """A gradient that waits for an unused one before it, in a bucket of its own, is zeroed away."""
    net = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    net.forward = lambda x: net["used"](x)
    model = BucketedDDP(net, 0.00001)
    model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    model.finish_gradient_synchronization()
    assert all(p.grad is None or not p.grad.any() for p in net.parameters())


def test_drops_a_step_of_single_buckets(ranks):
    ranks(2).run(drops_a_step_of_single_buckets)


def sizes_of_buckets(bucket_size_mb):
    net = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    return [len(bucket) for bucket in BucketedDDP(net, bucket_size_mb).buckets]


def refused_bucket_size(bucket_size_mb):
    with pytest.raises(ValueError, match=f"bucket_size_mb={bucket_size_mb} is not above 0"):
        BucketedDDP(nn.Linear(3, 3), bucket_size_mb)


def test_bucket_size_is_a_number_above_0_or_none(ranks):
    assert ranks(1).run(sizes_of_buckets, None) == ranks(1).run(sizes_of_buckets, float("inf"))
    assert ranks(1).run(sizes_of_buckets, None) == [[4]]
    for size in (0, -1.0, float("nan")):
        ranks(1).run(refused_bucket_size, size)


def refuses_changes_of_memory(change):
    """The views would have another dtype or layout than the parameters, or no buffer in common."""
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    changed = change(BucketedDDP(convolutions))
    with pytest.raises(RuntimeError, match="copied, moved or cast: wrap the module again"):
        changed(torch.ones(1, 3, 8, 8, dtype=next(changed.parameters()).dtype))
    images = torch.ones(1, 3, 8, 8, dtype=next(changed.parameters()).dtype)
    BucketedDDP(changed.module)(images).sum().backward()


def cast(model):
    return model.double()


def turn(model):
    return model.to(memory_format=torch.channels_last)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("change", [cast, turn, pickled, copy.deepcopy])
def test_refuses_changes_of_memory(ranks, change):
    ranks(2).run(refuses_changes_of_memory, change)


def averages_gradients_of_another_dtype():
    """bfloat16 weights, float32 gradients (torch 2.9 and newer), one of them unused on rank 1."""
    rank = dist.get_rank()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    for parameter in net.parameters():
        parameter.grad_dtype = torch.float32
    model = BucketedDDP(net)
    model.module.forward = lambda x: net[rank](x)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    model.finish_gradient_synchronization()
    assert [p.grad.dtype for p in net.parameters()] == 6 * [torch.float32]
    assert [p.grad.unique().tolist() for p in net.parameters()] == [[0.5]] * 4 + [[0.0]] * 2


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs a newer torch")
def test_averages_gradients_of_another_dtype(ranks):
    ranks(2).run(averages_gradients_of_another_dtype)


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)],
)
def test_run(forked, tmp_path, world_size):
    harness.check_run(forked, SCRIPT, tmp_path, world_size)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "world_size", [1, 2]
)  # with one GPU: nccl, then gloo with two ranks that share it
def test_on_a_gpu(launched, tmp_path, world_size):
    harness.check_run(launched, SCRIPT, tmp_path, world_size, "cuda")


@harness.needs_proc
def test_killed_rank(script, tmp_path):
    command = harness.torchrun(2, SCRIPT, "--no-verify", "--no-baseline", *harness.LONG)
    harness.check_fault(script, command, "tiny model: ", "SIGKILL of a rank", tmp_path)


@pytest.mark.full
@harness.needs_proc
@pytest.mark.parametrize("fault", harness.FAULTS)
@pytest.mark.parametrize("moment", harness.LADDER_MOMENTS)
def test_faults(script, moment, fault, tmp_path):
    harness.check_fault(script, harness.torchrun(2, SCRIPT, *harness.LONG), moment, fault, tmp_path)


@pytest.mark.full
@harness.needs_proc
def test_stopped_rank(script):
    harness.check_stopped_rank(script, SCRIPT, "--no-verify", *harness.LONG)


@pytest.mark.parametrize(
    "option, value",
    [
        *harness.WRONG_INPUT,
        *(("--bucket-size-mb", value) for value in ("0", "-1", "x", "", "nan")),
        ("--trace", "/no/such/folder/x.json"),
        ("--save", "/"),
    ],
)
def test_wrong_input(option, value, monkeypatch, capsys):
    harness.check_wrong_input(main, SCRIPT, option, value, monkeypatch, capsys)


def test_not_started_by_torchrun(monkeypatch, capsys):
    harness.check_not_started_by_torchrun(main, SCRIPT, monkeypatch, capsys)


@pytest.mark.full
def test_wrong_input_under_torchrun(script):
    harness.check_wrong_input_under_torchrun(script, SCRIPT)
