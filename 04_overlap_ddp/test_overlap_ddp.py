"""Stage 04: OverlapDDP against single-process training, and the script from outside."""

from pathlib import Path

import pytest
from overlap_ddp import OverlapDDP, main

from common.testing import harness, wrapper_checks

SCRIPT = Path(__file__).with_name("overlap_ddp.py")


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
    ranks(world_size).run(wrapper_checks.trains_like_one_process, OverlapDDP, model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulates_gradients(ranks, world_size, set_to_none):
    ranks(world_size).run(
        wrapper_checks.trains_like_one_process, OverlapDDP, wrapper_checks.Branches, 3, set_to_none
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_broadcasts_parameters_and_buffers(ranks, world_size):
    ranks(world_size).run(wrapper_checks.broadcasts_parameters_and_buffers, OverlapDDP)


@pytest.mark.parametrize("check", wrapper_checks.UNUSUAL_USE + wrapper_checks.UNUSUAL_USE_OF_HOOKS)
def test_unusual_use(ranks, check):
    ranks(2).run(check, OverlapDDP)


@pytest.mark.parametrize("model, inputs, variation", wrapper_checks.VARIATIONS)
def test_equals_torch_ddp(ranks, model, inputs, variation):
    ranks(2).run(wrapper_checks.equals_torch_ddp, OverlapDDP, model, inputs, variation)


@pytest.mark.full
@pytest.mark.parametrize("model, inputs, variation", wrapper_checks.REAL_MODELS)
def test_real_models(ranks, model, inputs, variation):
    ranks(2).run(wrapper_checks.equals_torch_ddp, OverlapDDP, model, inputs, variation, timeout=300)


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)


@pytest.mark.full  # in the fast part common/test_rungs.py runs it
@pytest.mark.parametrize("world_size", [1, 2])
def test_run(launched, tmp_path, world_size):
    harness.check_run(launched, SCRIPT, tmp_path, world_size)


@pytest.mark.cuda
@pytest.mark.parametrize(
    "world_size", [1, 2]
)  # with one GPU: nccl, then gloo with two ranks that share it
def test_on_a_gpu(launched, tmp_path, world_size):
    harness.check_run(launched, SCRIPT, tmp_path, world_size, "cuda")


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


@pytest.mark.parametrize("option, value", harness.WRONG_INPUT)
def test_wrong_input(option, value, monkeypatch, capsys):
    harness.check_wrong_input(main, SCRIPT, option, value, monkeypatch, capsys)


def test_not_started_by_torchrun(monkeypatch, capsys):
    harness.check_not_started_by_torchrun(main, SCRIPT, monkeypatch, capsys)


@pytest.mark.full
def test_wrong_input_under_torchrun(script):
    harness.check_wrong_input_under_torchrun(script, SCRIPT)
