"""What the command line of every script refuses, in one line; and that files stay whole."""

import json
import os
import sys
from datetime import datetime, timezone

import pytest
import torch

from common import report, setup

WRONG_INPUT = [
    ("--size", "huge"),
    ("--size", ""),
    ("--batch-size", "0"),
    ("--batch-size", "-1"),
    ("--batch-size", "x"),
    ("--batch-size", ""),
    ("--batch-size", "99999999999999"),
    ("--context-length", "0"),
    ("--context-length", "1.5"),
    ("--steps", "0"),
    ("--steps", "-3"),
    ("--steps", "many"),
    ("--warmup", "-1"),
    ("--warmup", ""),
    ("--seed", "-1"),
    ("--seed", "x"),
    ("--dtype", "float16"),
    ("--device", "tpu"),
    ("--backend", "mpi"),
    ("--timeout", "0"),
    ("--timeout", "soon"),
    ("--timeout", "nan"),
    ("--json", ""),
    ("--json", "/"),
    ("--json", "/no/such/folder/x.json"),
    ("--json", "/dev/null/x"),
    ("--trace", "/no/such/folder/x.json"),
    ("--save", "/"),
    ("--plot", "/no/such/folder/x.png"),
]


def parse(monkeypatch, *words):
    parser = setup.Parser("what it does")
    setup.add_training_arguments(parser, {"tiny": ()}, steps=3)
    setup.add_verify_arguments(parser)
    setup.add_plot_arguments(parser, "x.png")
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    return parser.parse_args()


@pytest.mark.parametrize("option, value", WRONG_INPUT)
def test_wrong_input(option, value, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        parse(monkeypatch, option, value)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1, said
    assert said.startswith(f"script.py: error: argument {option}: ") and value in said, said


def joined(monkeypatch, capsys, *words) -> str:
    """What a run of one rank says that is refused when it joins the process group."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end, setup.process_group(parse(monkeypatch, *words)):
        pytest.fail("joined")
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(monkeypatch, capsys):
    said = joined(monkeypatch, capsys, "--device", "cuda")
    assert said.startswith("script.py: error: argument --device: 'cuda' needs a GPU"), said
    said = joined(monkeypatch, capsys, "--backend", "nccl")
    assert said.startswith("script.py: error: argument --backend: 'nccl' needs --device cuda"), said


@pytest.mark.parametrize("data", ["/no/such/folder", ""])
def test_data_that_is_not_there(data, ranks):
    [(status, said)] = ranks(1).run(read_data, data)
    assert status == 2 and said.count("\n") == 1
    assert f"error: argument --data: {data!r} holds no readable MNIST" in said, said


def read_data(data):
    """On a rank: the exit status, and what was said."""
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            setup.load_images(data, False)
        except SystemExit as end:
            return end.code, said.getvalue()


def test_plot_has_a_default_and_can_be_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    assert parse(monkeypatch).plot == tmp_path / "results" / "x.png"
    assert parse(monkeypatch, "--plot", str(tmp_path / "y.png")).plot == tmp_path / "y.png"
    assert parse(monkeypatch, "--no-plot").plot is None
    monkeypatch.setattr(setup, "ROOT", tmp_path / "is" / "not" / "there")
    assert parse(monkeypatch).plot is None


def result(**values) -> dict:
    return {"started": datetime.now(timezone.utc), **values}


def test_json_is_replaced_only_by_a_whole_one(monkeypatch, tmp_path):
    path = tmp_path / "x.json"
    report.write_json(path, result(value=float("inf")))
    assert json.loads(path.read_text())["value"] is None

    def disk_is_full(self, text):
        raise OSError("no space left")

    before = path.read_text()
    monkeypatch.setattr(type(path), "write_text", disk_is_full)
    with pytest.raises(OSError):
        report.write_json(path, result(value=1))
    assert path.read_text() == before


def test_json_goes_through_a_link_and_into_a_device(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "x.json")
    report.write_json(link, result(value=1))
    assert link.is_symlink() and json.loads((tmp_path / "x.json").read_text())["value"] == 1
    assert setup.output_file("/dev/null")
    report.write_json(setup.output_file(os.devnull), result(value=1))
    assert not os.path.isfile(os.devnull)


def test_list_of():
    assert setup.list_of(int)("1,20,3") == [1, 20, 3]


def test_time_left(monkeypatch):
    monkeypatch.setattr(setup.time, "perf_counter", lambda: 10.0)
    assert setup.time_left(began=4.0, done=0, total=5) == ""
    assert setup.time_left(began=4.0, done=2, total=5) == ", 9 s left"


def test_topology(tmp_path, monkeypatch):
    said = report.topology()
    assert f"{os.cpu_count()} cores, " in said or "GPU" in said
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\necho GPU0 beside GPU1 $*\n")
    nvidia_smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert report.topology() == "\nGPU0 beside GPU1 topo -m"
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")  # no driver
    assert "NUMA " in report.topology()
