"""common/setup.py and common/report.py: command line, data, process group, files."""

import contextlib
import importlib
import io
import json
import re
import socket
import sys

import pytest

from common import report, setup
from tools.harness import ONLY_RANK, QUICK, ROOT, write_mnist

WRONG_INPUT = {
    "--size": ["huge"],
    "--batch-size": ["0", "x", "", "99999999999999"],
    "--warmup": ["-1"],
    "--dtype": ["float16"],
    "--backend": ["mpi"],
    "--timeout": ["0", "soon", "nan"],
    "--json": ["", "/", "/no/such/folder/x.json", "/dev/null/x"],
    "--trace": ["/no/such/folder/x.json"],
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


def test_plot_has_a_default_and_can_be_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    assert parse(monkeypatch).plot == tmp_path / "results" / "x.png"
    assert parse(monkeypatch, "--plot", str(tmp_path / "y.png")).plot == tmp_path / "y.png"
    assert parse(monkeypatch, "--no-plot").plot is None
    monkeypatch.setattr(setup, "ROOT", tmp_path / "is" / "not" / "there")
    assert parse(monkeypatch).plot is None


def test_a_rank_whose_torchrun_is_gone_ends_too(forked):
    """Ctrl-C in the very moment in which torchrun starts a rank ends torchrun, but not that rank.

    torchrun does not know it yet.
    """
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        port = nobody.getsockname()[1]
        torchruns = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
        script = ROOT / "02_naive_ddp" / "naive_ddp.py"
        status, output = forked(None, script, timeout=30, **{**ONLY_RANK, **torchruns})
    assert status == 2 and output.count("\n") == 1, output
    assert f"cannot join the process group at 127.0.0.1:{port}" in output


def test_no_thread_of_gloo_is_there_at_the_end(script, tmp_path):
    """Python would be aborted at its end by one that does, now and then, after all work is done."""
    code = """
import atexit
import sys
from argparse import Namespace
from pathlib import Path
def say_threads():
    for thread in Path("/proc/self/task").glob("*/comm"):
        print(thread.read_text().strip())
atexit.register(say_threads)  # the first that registers is the last to be called
sys.path.append(sys.argv[1])
from common import setup
import torch
with setup.process_group(Namespace(device="cpu", backend="gloo", network=None, timeout=30)):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.optim.AdamW([parameter]).step()
"""
    (tmp_path / "leaves.py").write_text(code)
    run = script([sys.executable, tmp_path / "leaves.py", ROOT], env=ONLY_RANK)
    status, said = run.wait(60)
    assert status == 0 and "gloo" not in said, said


def load_mnist(folder):
    """On a rank: what was said meanwhile, and the shapes or the exit status."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            result = [tuple(part.shape) for part in setup.load_images(folder, False)]
    except SystemExit as end:
        result = end.code
    return said.getvalue(), result


def test_mnist_that_is_not_there_or_cut_short_is_one_line(ranks, tmp_path):
    files = write_mnist(tmp_path / "whole", 5, 3)
    shapes = [(5, 784), (5,), (3, 784), (3,)]
    assert ranks(1).run(load_mnist, str(tmp_path / "whole")) == [("", shapes)]
    files[0].write_bytes(files[0].read_bytes()[:-1])
    for name in ("/no/such/folder", str(tmp_path / "whole")):
        [(said, status)] = ranks(1).run(load_mnist, name)
        assert status == 2 and said.count("\n") == 1, said
        assert f"error: argument --data: {name!r} holds no readable MNIST (" in said, said


def test_verify_logs_every_nth_step(forked, tmp_path):
    """Six steps in each of two epochs."""
    write_mnist(tmp_path, 701, 3)
    words = ["--data", tmp_path, *QUICK, "--device", "cpu", "--no-baseline", "--log-every", 2]
    status, output = forked(2, ROOT / "02_naive_ddp" / "naive_ddp.py", *words)
    number = r"(\d+\.\d+)"
    times = rf"step {number} ms, exposed {number} ms, optimizer {number} ms"
    rows = re.findall(rf"verify: epoch (\d), step (\d): loss {number}, {times}\n", output)
    assert status == 0 and output.count(": loss ") == 6, output
    assert [row[:2] for row in rows] == [(epoch, step) for epoch in "12" for step in "246"]
    assert 2 < float(rows[0][2]) < 5, "of ten classes, before anything is learned"


def test_json_is_strict_and_keeps_the_old_file_on_a_full_disk(forked, tmp_path):
    """A limit of the system on the size of files stands for the disk."""
    code = """
import resource, sys
from datetime import datetime
from pathlib import Path
sys.path.append(sys.argv[1])
from common import report
result = {"started": datetime.now().astimezone(), "x": [float("inf")]}
report.write_json(Path("x.json"), result)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
report.write_json(Path("x.json"), result | {"x": [0] * 1000})
"""
    (tmp_path / "writes.py").write_text(code)
    status, said = forked(None, tmp_path / "writes.py", ROOT, cwd=tmp_path)
    error = "writes.py: error: cannot write x.json: File too large\n"
    assert (status, said) == (2, f"written: x.json\n{error}")
    assert {file.name for file in tmp_path.iterdir()} == {"writes.py", "x.json"}
    assert json.loads((tmp_path / "x.json").read_text())["x"] == [None]


def test_percentiles_are_of_all_ranks():
    of_ranks = [[0.001, 0.002, 0.003], [0.003, 0.004, 0.005]]
    assert report.percentiles(of_ranks) == pytest.approx([0.003, 0.00375, 0.0045, 0.00475])
    assert report.ratio(of_ranks, [[0.006]]) == "0.500" and report.ratio(of_ranks, None) == "-"


def test_a_container_has_the_cores_and_the_memory_of_its_cgroup(tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(setup, "CGROUP", tmp_path)
    for text, expected in (("max 100000", float("inf")), ("150000 100000", 1.5)):
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert setup.cgroup_limit("cpu.max") == expected
    assert setup.threads_per_rank(1) == 1
    (tmp_path / "memory.max").write_text("1000000\n")
    monkeypatch.syspath_prepend(ROOT / "02_naive_ddp")
    said = refusal(importlib.import_module("naive_ddp").main, "naive_ddp.py", "--device", "cpu")
    assert said.startswith(
        "1 ranks with 3 models each need 0.4 GB of memory, and this host has 0.0"
    )


def test_help_makes_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    parser = setup.Parser("x")
    setup.add_plot_arguments(parser, "x.png")
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert not (tmp_path / "results").exists()
    assert parser.parse_args([]).plot == tmp_path / "results" / "x.png"
