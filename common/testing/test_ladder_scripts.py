"""The scripts of stages 02 to 05 from outside: runs, faults, wrong input."""

import importlib

import pytest

from common.testing import harness
from common.testing.harness import ROOT

STAGES = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
SCRIPTS = [ROOT / stage / f"{stage[3:]}.py" for stage in STAGES]
each = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)


def main_of(path, monkeypatch):
    monkeypatch.syspath_prepend(path.parent)
    return importlib.import_module(path.stem).main


@each
def test_file_alone(path, tmp_path):
    harness.check_script_alone(path, tmp_path)


@pytest.mark.full  # the next two are the fast part
@each
@pytest.mark.parametrize("world_size", [1, 2])
def test_run(launched, tmp_path, path, world_size):
    harness.check_run(launched, path, tmp_path, world_size)


@pytest.mark.parametrize("path", SCRIPTS[:-1], ids=lambda path: path.stem)
def test_run_on_a_small_mnist(forked, tmp_path, path):
    harness.write_mnist(tmp_path / "data", 320, 10)
    words = [*harness.QUICK, "--device", "cpu", "--data", tmp_path / "data"]
    status, output = forked(2, path, *words, *harness.files_in(tmp_path), cwd=tmp_path)
    assert status == 0, output
    harness.check_output(output, path, tmp_path, 2, "cpu")


@pytest.mark.parametrize("name, status", [("Right", 0), ("SumForMean", 1)])
def test_a_class_of_the_users_own_is_verified_and_has_a_row(forked, tmp_path, name, status):
    mine = f"{ROOT}/common/check/mistakes.py:{name}"
    words = [*harness.QUICK, "--device", "cpu", "--json", tmp_path / "json", "--mine", mine]
    found, output = forked(2, SCRIPTS[1], *words, cwd=tmp_path)
    assert found == status and f"verify: {name} (mine)\n" in output, output
    if status == 1:
        assert "verify: FAILED, a weight is" in output, output
        return
    result = harness.read_json(tmp_path / "json", "03_flat_ddp")
    names = [candidate["name"] for candidate in result["candidates"]]
    assert names == ["no sync", "FlatDDP", "Right (mine)", "torch DDP", "torch DDP, tuned"]
    assert result["candidates"][2]["collectives_per_step"] == harness.NANO_CALLS["NaiveDDP"]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_run_without_torchrun(forked, tmp_path, world_size):
    harness.check_run(forked, SCRIPTS[-1], tmp_path, world_size)


@pytest.mark.cuda
@each
@pytest.mark.parametrize("world_size", [1, 2])  # with one GPU: nccl, then gloo, which can share it
def test_on_a_gpu(launched, tmp_path, path, world_size):
    harness.check_run(launched, path, tmp_path, world_size, "cuda")


@harness.needs_proc
def test_killed_rank(script, tmp_path):
    command = harness.torchrun(2, SCRIPTS[-1], "--no-verify", "--no-baseline", *harness.LONG)
    harness.check_fault(script, command, "tiny model: ", "SIGKILL of a rank", tmp_path)


@pytest.mark.full
@harness.needs_proc
@each
@pytest.mark.parametrize("fault", harness.FAULTS)
@pytest.mark.parametrize("moment", harness.LADDER_MOMENTS)
def test_faults(script, path, moment, fault, tmp_path):
    harness.check_fault(script, harness.torchrun(2, path, *harness.LONG), moment, fault, tmp_path)


@pytest.mark.full
@harness.needs_proc
@each
def test_stopped_rank(script, path):
    harness.check_stopped_rank(script, path, "--no-verify", *harness.LONG)


OTHERS = [(SCRIPTS[-1], "--bucket-size-mb", "nan"), (SCRIPTS[0], "--mine", "nowhere.py:X")]


@pytest.mark.parametrize(
    "path, option, value", [*((path, "--size", "huge") for path in SCRIPTS), *OTHERS]
)
def test_wrong_input(path, option, value, monkeypatch, capsys):
    """One of many: test_setup.py has what the parser refuses."""
    main = main_of(path, monkeypatch)
    harness.check_wrong_input(main, path, option, value, monkeypatch, capsys)


def test_save_without_verify(monkeypatch, capsys, tmp_path):
    main = main_of(SCRIPTS[0], monkeypatch)
    monkeypatch.setattr("sys.argv", ["naive_ddp.py", "--no-verify", "--save", str(tmp_path / "x")])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert end.value.code == 2 and "argument --save: not with --no-verify" in said, said


@each
def test_not_started_by_torchrun(path, monkeypatch, capsys):
    main = main_of(path, monkeypatch)
    harness.check_not_started_by_torchrun(main, path, monkeypatch, capsys)


@pytest.mark.full
@each
def test_wrong_input_under_torchrun(script, path):
    harness.check_wrong_input_under_torchrun(script, path)
