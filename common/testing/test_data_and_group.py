"""What the stages share: files that are read and written, and the process group."""

import argparse
import contextlib
import io
import os
import re
import shutil
import socket

import pytest
import torch

from common.setup import load_images, output_file, process_group
from common.testing.harness import ROOT, write_mnist


@pytest.fixture
def mnist(tmp_path):
    """A folder with a small MNIST, and its raw files: five images to train on, three to test."""
    return tmp_path, write_mnist(tmp_path, 5, 3)


def shapes_of_mnist(folder):
    """On a rank: the shapes that were read, or the exit status and what was said."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return [tuple(part.shape) for part in load_images(folder, False)]
    except SystemExit as end:
        return end.code, said.getvalue()


def test_mnist_cut_short_is_one_line(ranks, mnist):
    folder, files = mnist
    assert ranks(1).run(shapes_of_mnist, str(folder)) == [[(5, 784), (5,), (3, 784), (3,)]]
    for file in files:
        whole = file.read_bytes()
        for length in (0, 3, 9, len(whole) - 1):
            file.write_bytes(whole[:length])
            [(status, said)] = ranks(1).run(shapes_of_mnist, str(folder))
            message = f"error: argument --data: '{folder}' holds no readable MNIST ("
            assert status == 2 and message in said, (file, length, said)
            assert said.count("\n") == 1 and " ()" not in said, said
        file.write_bytes(whole)


def load_my_folder(folders, numbered):
    """On a rank: what was said while its own folder was read, and the images or the exit status.

    `numbered`: the ranks know their numbers, as under torchrun, so that rank 0 speaks for all.
    """
    rank = torch.distributed.get_rank()
    said = io.StringIO()
    os.environ["RANK"] = str(rank) if numbered else "0"
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            result = len(load_images(str(folders[rank]), False)[0])
    except SystemExit as end:
        result = end.code
    del os.environ["RANK"]
    return said.getvalue(), result


@pytest.mark.parametrize("part", range(4))
def test_unlike_data_on_two_hosts_is_one_warning(ranks, mnist, tmp_path, part):
    """The other host's images and labels are as many, but one byte differs in one file."""
    folder, files = mnist
    other = shutil.copytree(folder / "MNIST", tmp_path / "other" / "MNIST").parent
    file = other / files[part].relative_to(folder)
    file.write_bytes(file.read_bytes()[:-1] + b"\x09")
    assert ranks(2).run(load_my_folder, [folder, folder], True) == [("", 5), ("", 5)]
    said = "warning: --data on ranks [1] is not that of rank 0, so that verify may fail\n"
    assert ranks(2).run(load_my_folder, [folder, other], True) == [(said, 5), ("", 5)]


def test_more_data_on_one_host_ends_the_run(ranks, mnist, tmp_path):
    """Else it would take more steps than the others, and wait for them."""
    folder, _ = mnist
    other = tmp_path / "other"
    write_mnist(other, 6, 3)
    for said, status in ranks(2).run(load_my_folder, [folder, other], False):
        assert status == 2 and said.count("\n") == 1, said
        assert "error: argument --data: " in said and "holds [5, 6] images, by rank" in said


def verified(folder, log_every):
    """On a rank: what verify of stage 02 says, and how far the weights are from the twin's."""
    import naive_ddp

    words = {"data": str(folder), "download": False, "seed": 0, "save": None}
    args = argparse.Namespace(**words, log_every=log_every)
    said = io.StringIO()
    os.environ["RANK"] = str(torch.distributed.get_rank())
    with contextlib.redirect_stdout(said):
        result = naive_ddp.verify(args, {}, torch.device("cpu"))
    del os.environ["RANK"]
    return said.getvalue().splitlines(), result["max_abs_diff"]


def test_verify_logs_every_nth_step(ranks, tmp_path, monkeypatch):
    """Five steps in each of two epochs; what is printed changes nothing of what is computed."""
    monkeypatch.syspath_prepend(ROOT / "02_naive_ddp")
    write_mnist(tmp_path, 700, 3)
    (lines, difference), (of_rank_1, _) = ranks(2).run(verified, tmp_path, 2)
    logged = [line for line in lines if " step " in line]
    number = r"(\d+\.\d+)"
    form = rf"verify: epoch (\d), step (\d): loss {number}, {number} ms, exposed {number} ms"
    rows = [re.fullmatch(form, line).groups() for line in logged]
    assert [row[:2] for row in rows] == [("1", "2"), ("1", "4"), ("2", "2"), ("2", "4")]
    assert 2 < float(rows[0][2]) < 5, "of ten classes, before anything is learned"
    assert all(0 < float(exposed) < float(step) for *_, step, exposed in rows)
    assert of_rank_1 == []
    [silent, _] = ranks(2).run(verified, tmp_path, 0)
    assert silent == ([line for line in lines if line not in logged], difference)


@pytest.mark.skipif(not hasattr(os, "setreuid"), reason="needs users")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path):
    assert output_file(str(tmp_path / "x.json")) == tmp_path / "x.json"
    tmp_path.chmod(0o555)
    root = os.getuid() == 0
    try:
        if root:
            os.setreuid(65534, 0)  # os.access asks for the real user, and root may write anywhere
        message = "x.json' is not a file that can be written"
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            output_file(str(tmp_path / "x.json"))
    finally:
        if root:
            os.setreuid(0, 0)
        tmp_path.chmod(0o755)


def test_more_nccl_ranks_than_gpus_is_one_line(monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = argparse.Namespace(device="auto", backend="nccl", timeout=1.0)
    with pytest.raises(SystemExit) as end, process_group(args):
        pytest.fail("joined")
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1
    assert "error: argument --backend: 'nccl' needs --device cuda and a GPU per rank; " in said
    assert "; this host has 2 GPUs for 3 ranks" in said


def test_a_rank_whose_torchrun_is_gone_ends_too(forked):
    """Ctrl-C in the very moment in which torchrun starts a rank ends torchrun, but not that rank.

    torchrun does not know it yet.
    """
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    script = ROOT / "02_naive_ddp" / "naive_ddp.py"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        port = nobody.getsockname()[1]
        status, output = forked(None, script, timeout=30, MASTER_PORT=port, **environment)
    assert status == 2 and output.count("\n") == 1, output
    assert f"cannot join the process group at 127.0.0.1:{port}" in output
