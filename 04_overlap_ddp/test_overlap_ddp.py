"""Stage 04: OverlapDDP against single-process training, and the script from outside."""

from pathlib import Path

import conftest as checks
import pytest
from overlap_ddp import OverlapDDP, main

SCRIPT = Path(__file__).with_name("overlap_ddp.py")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "model", [checks.Tied, checks.Frozen, checks.Branches, checks.MixedTypes, checks.ChannelsLast]
)
def test_trains_like_one_process(ranks, world_size, model):
    ranks(world_size).run(checks.trains_like_one_process, OverlapDDP, model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulates_gradients(ranks, world_size, set_to_none):
    ranks(world_size).run(
        checks.trains_like_one_process, OverlapDDP, checks.Branches, 3, set_to_none
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_broadcasts_parameters_and_buffers(ranks, world_size):
    ranks(world_size).run(checks.broadcasts_parameters_and_buffers, OverlapDDP)


@pytest.mark.parametrize("check", checks.WRONG_OR_UNUSUAL_USE)
def test_wrong_or_unusual_use(ranks, check):
    ranks(2).run(check, OverlapDDP)


@pytest.mark.parametrize("model, inputs, variation", checks.VARIATIONS)
def test_equals_torch_ddp(ranks, model, inputs, variation):
    ranks(2).run(checks.equals_torch_ddp, OverlapDDP, model, inputs, variation)


@pytest.mark.full
@pytest.mark.parametrize("model, inputs, variation", checks.REAL_MODELS)
def test_real_models(ranks, model, inputs, variation):
    ranks(2).run(checks.equals_torch_ddp, OverlapDDP, model, inputs, variation, timeout=300)


def test_file_alone(tmp_path):
    checks.check_script_alone(SCRIPT, tmp_path)


@pytest.mark.parametrize("world_size", [2])
def test_run(script, tmp_path, world_size):
    checks.check_run(script, SCRIPT, tmp_path, world_size)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "world_size", [1, 2]
)  # with one GPU: nccl, then gloo with two ranks that share it
def test_on_a_gpu(script, tmp_path, world_size):
    checks.check_run(script, SCRIPT, tmp_path, world_size, "cuda")


@pytest.mark.full
@checks.needs_proc
@pytest.mark.parametrize("fault", checks.FAULTS)
@pytest.mark.parametrize("moment", checks.LADDER_MOMENTS)
def test_faults(script, moment, fault, tmp_path):
    checks.check_fault(script, checks.torchrun(2, SCRIPT, *checks.LONG), moment, fault, tmp_path)


@pytest.mark.full
@checks.needs_proc
def test_stopped_rank(script):
    checks.check_stopped_rank(script, SCRIPT, "--no-verify", *checks.LONG)


@pytest.mark.parametrize("option, value", checks.WRONG_INPUT)
def test_wrong_input(option, value, monkeypatch, capsys):
    checks.check_wrong_input(main, SCRIPT, option, value, monkeypatch, capsys)


def test_not_started_by_torchrun(monkeypatch, capsys):
    checks.check_not_started_by_torchrun(main, SCRIPT, monkeypatch, capsys)


@pytest.mark.full
def test_wrong_input_under_torchrun(script):
    checks.check_wrong_input_under_torchrun(script, SCRIPT)
