"""Stage 02: NaiveDDP against single-process training, and the script from outside."""

from pathlib import Path

import conftest as checks
import pytest
from naive_ddp import NaiveDDP, main

SCRIPT = Path(__file__).with_name("naive_ddp.py")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "model", [checks.Tied, checks.Frozen, checks.Branches, checks.MixedTypes, checks.ChannelsLast]
)
def test_trains_like_one_process(ranks, world_size, model):
    ranks(world_size).run(checks.trains_like_one_process, NaiveDDP, model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulates_gradients(ranks, world_size, set_to_none):
    ranks(world_size).run(checks.trains_like_one_process, NaiveDDP, checks.Branches, 3, set_to_none)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_broadcasts_parameters_and_buffers(ranks, world_size):
    ranks(world_size).run(checks.broadcasts_parameters_and_buffers, NaiveDDP)


def test_names_the_difference_between_models(ranks):
    ranks(2).run(checks.names_the_difference_between_models, NaiveDDP)


def test_refuses_sparse_gradients(ranks):
    ranks(2).run(checks.refuses_sparse_gradients, NaiveDDP)


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
