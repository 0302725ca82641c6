"""common/setup.py and common/report.py: command line, data, process group, files."""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import socket
import sys
from datetime import datetime, timezone

import pytest
import torch
import torch.distributed as dist

from common import report, setup
from common.testing.harness import ROOT, write_mnist

WRONG_INPUT = {
    "--size": ["huge", ""],
    "--batch-size": ["0", "-1", "x", "", "99999999999999"],
    "--context-length": ["0", "1.5"],
    "--steps": ["0", "-3", "many"],
    "--warmup": ["-1", ""],
    "--seed": ["-1", "x"],
    "--dtype": ["float16"],
    "--device": ["tpu"],
    "--backend": ["mpi"],
    "--timeout": ["0", "soon", "nan"],
    "--json": ["", "/", "/no/such/folder/x.json", "/dev/null/x"],
    "--trace": ["/no/such/folder/x.json"],
    "--save": ["/"],
    "--plot": ["/no/such/folder/x.png"],
}


def parse(monkeypatch, *words):
    parser = setup.Parser("what it does")
    setup.add_training_arguments(parser, steps=3)
    setup.add_verify_arguments(parser)
    setup.add_plot_arguments(parser, "x.png")
    monkeypatch.setattr(sys, "argv", ["script.py", *words])
    return parser.parse_args()


@pytest.mark.parametrize("option", WRONG_INPUT)
def test_wrong_input(option, monkeypatch, capsys):
    for value in WRONG_INPUT[option]:
        with pytest.raises(SystemExit) as end:
            parse(monkeypatch, option, value)
        said = capsys.readouterr().err
        assert end.value.code == 2 and said.count("\n") == 1, said
        assert said.startswith(f"script.py: error: argument {option}: ") and value in said, said


def test_old_names_are_understood_and_not_shown(monkeypatch, capsys):
    parser = setup.Parser("docstring")
    parser.add_argument("--steps", old_names=["--iters"], type=setup.whole_number(1), default=3)
    monkeypatch.setattr(sys, "argv", ["x", "--iters", "5"])
    assert parser.parse_args().steps == 5
    monkeypatch.setattr(sys, "argv", ["x", "--iters=0"])
    with pytest.raises(SystemExit):
        parser.parse_args()
    assert "argument --steps: '0' is not a whole number" in capsys.readouterr().err
    shown = parser.format_help()
    assert "(default: 3)" in shown and "--iters" not in shown


def test_plot_has_a_default_and_can_be_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    assert parse(monkeypatch).plot == tmp_path / "results" / "x.png"
    assert parse(monkeypatch, "--plot", str(tmp_path / "y.png")).plot == tmp_path / "y.png"
    assert parse(monkeypatch, "--no-plot").plot is None
    monkeypatch.setattr(setup, "ROOT", tmp_path / "is" / "not" / "there")
    assert parse(monkeypatch).plot is None


@pytest.mark.skipif(not hasattr(os, "setreuid"), reason="needs users")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path):
    assert setup.output_file(str(tmp_path / "x.json")) == tmp_path / "x.json"
    tmp_path.chmod(0o555)
    root = os.getuid() == 0
    try:
        if root:
            os.setreuid(65534, 0)  # os.access asks for the real user, and root may write anywhere
        with pytest.raises(argparse.ArgumentTypeError, match="is not a file that can be written"):
            setup.output_file(str(tmp_path / "x.json"))
    finally:
        if root:
            os.setreuid(0, 0)
        tmp_path.chmod(0o755)


def test_list_of():
    assert setup.list_of(int)("1,20,3") == [1, 20, 3]


def test_time_left(monkeypatch):
    monkeypatch.setattr(setup.time, "perf_counter", lambda: 10.0)
    assert setup.time_left(began=4.0, done=0, total=5) == ""
    assert setup.time_left(began=4.0, done=2, total=5) == ", 9 s left"


def refusal(args, ranks: int, monkeypatch, capsys) -> str:
    """What rank 0 of this host's ranks says when it does not even try to join."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(ranks))
    with pytest.raises(SystemExit) as end, setup.process_group(args):
        pytest.fail("joined")
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    return said


def test_too_few_gpus(monkeypatch, capsys):
    nccl = parse(monkeypatch, "--backend", "nccl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = refusal(parse(monkeypatch, "--device", "cuda"), 1, monkeypatch, capsys)
    assert said.startswith("script.py: error: argument --device: 'cuda' needs a GPU"), said
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    said = refusal(nccl, 3, monkeypatch, capsys)
    assert said.startswith("script.py: error: argument --backend: 'nccl' needs --device cuda"), said
    assert "; this host has 2 GPUs for 3 ranks" in said


def test_a_rank_whose_torchrun_is_gone_ends_too(forked):
    """Ctrl-C in the very moment in which torchrun starts a rank ends torchrun, but not that rank.

    torchrun does not know it yet.
    """
    numbers = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    store = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        port = nobody.getsockname()[1]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        script = ROOT / "02_naive_ddp" / "naive_ddp.py"
        status, output = forked(None, script, timeout=30, **numbers, **store, **address)
    assert status == 2 and output.count("\n") == 1, output
    assert f"cannot join the process group at 127.0.0.1:{port}" in output


@pytest.fixture
def mnist(tmp_path):
    """A folder with a small MNIST, and its raw files: five images to train on, three to test."""
    return tmp_path, write_mnist(tmp_path, 5, 3)


def load(folders):
    """On a rank: what was said while its own folder was read, and the shapes or the exit status."""
    said = io.StringIO()
    os.environ["RANK"] = "0"  # each rank says what is wrong, at once
    try:
        with contextlib.redirect_stderr(said):
            parts = setup.load_images(folders[dist.get_rank()], False)
        result = [tuple(part.shape) for part in parts]
    except SystemExit as end:
        result = end.code
    del os.environ["RANK"]
    return said.getvalue(), result


def test_mnist_that_is_not_there_or_cut_short_is_one_line(ranks, mnist):
    folder, files = mnist
    shapes = [(5, 784), (5,), (3, 784), (3,)]
    assert ranks(1).run(load, [str(folder)]) == [("", shapes)]

    def check_refused(name):
        [(said, status)] = ranks(1).run(load, [name])
        assert status == 2 and said.count("\n") == 1 and " ()" not in said, said
        assert f"error: argument --data: {name!r} holds no readable MNIST (" in said, said

    for name in ("/no/such/folder", ""):
        check_refused(name)
    for file in files:
        whole = file.read_bytes()
        for length in (0, 3, 9, len(whole) - 1):
            file.write_bytes(whole[:length])
            check_refused(str(folder))
        file.write_bytes(whole)


@pytest.mark.parametrize("part", [0, 1, 2, 3, "more"])
def test_unlike_data_on_two_hosts_ends_the_run(ranks, mnist, tmp_path, part):
    """One byte differs in one file, or there are more images, whose steps the others lack."""
    folder, files = mnist
    other = tmp_path / "other"
    if part == "more":
        write_mnist(other, 6, 3)
    else:
        shutil.copytree(folder / "MNIST", other / "MNIST")
        file = other / files[part].relative_to(folder)
        file.write_bytes(file.read_bytes()[:-1] + b"\x09")
    for said, status in ranks(2).run(load, [str(folder), str(other)]):
        assert status == 2 and said.count("\n") == 1, said
        assert "holds other images on ranks [1] than on rank 0" in said, said


def verified(folder, log_every):
    """On a rank: what verify of stage 02 says, and how far the weights are from the twin's."""
    import naive_ddp

    words = {"data": str(folder), "download": False, "seed": 0, "save": None}
    args = argparse.Namespace(**words, log_every=log_every)
    said = io.StringIO()
    os.environ["RANK"] = str(dist.get_rank())
    with contextlib.redirect_stdout(said):
        result = naive_ddp.verify(naive_ddp.NaiveDDP, args, torch.device("cpu"))
    del os.environ["RANK"]
    return said.getvalue().splitlines(), result["max_abs_diff"]


def test_verify_logs_every_nth_step(ranks, tmp_path, monkeypatch):
    """Six steps in each of two epochs; what is printed changes nothing of what is computed."""
    monkeypatch.syspath_prepend(ROOT / "02_naive_ddp")
    write_mnist(tmp_path, 701, 3)
    (lines, difference), (of_rank_1, _) = ranks(2).run(verified, tmp_path, 2)
    assert lines[0] == "verify: rank r takes images r, r + 2, … of every 128; 700 of 701 are used"
    logged = [line for line in lines if " step " in line]
    number = r"(\d+\.\d+)"
    times = rf"step {number} ms, exposed {number} ms, optimizer {number} ms"
    form = rf"verify: epoch (\d), step (\d): loss {number}, {times}"
    rows = [re.fullmatch(form, line).groups() for line in logged]
    assert [row[:2] for row in rows] == [(epoch, step) for epoch in "12" for step in "246"]
    assert 2 < float(rows[0][2]) < 5, "of ten classes, before anything is learned"
    assert all(0 < float(exposed) < float(step) for *_, step, exposed, _ in rows)
    assert of_rank_1 == []
    [silent, _] = ranks(2).run(verified, tmp_path, 0)
    assert silent == ([line for line in lines if line not in logged], difference)


def result(**values) -> dict:
    return {"started": datetime.now(timezone.utc), **values}


def test_json_is_replaced_only_by_a_whole_one(monkeypatch, tmp_path):
    path = tmp_path / "x.json"
    report.write_json(path, result(value=float("inf")))
    assert json.loads(path.read_text())["value"] is None

    def disk_is_full(self, text):
        self.write_bytes(text.encode()[:5])
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
    report.write_json(setup.output_file(os.devnull), result(value=1))
    assert not os.path.isfile(os.devnull)


def test_percentiles_are_of_all_ranks():
    of_ranks = [[0.001, 0.002, 0.003], [0.003, 0.004, 0.005]]
    assert report.percentiles(of_ranks) == pytest.approx([0.003, 0.00375, 0.0045, 0.00475])
    assert report.milliseconds(of_ranks)[0] == "3.0"
    assert report.ratio(of_ranks, [[0.006]]) == "0.500" and report.ratio(of_ranks, None) == "-"


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
