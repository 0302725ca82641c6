"""What the stages share: files that are read and written, the process group, and the two tools.

The comparison works on hand-written results, the timeline on a hand-written trace.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import runpy
import shutil
import socket
import sys

import pytest
import torch

import common.ladder.compare
from common.ladder.compare import read, summarize
from common.ladder.timeline import PHASES, draw, read_step
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


def result(stage="05_bucketed", name="BucketedDDP", step=0.8, **changes):
    """What --json writes, by hand: three candidates, ten samples each."""

    def candidate(name, step, exposed):
        return {
            "name": name,
            "step_seconds": [step] * 10,
            "exposed_comm_seconds": [exposed] * 10,
            "optimizer_seconds": [0.1] * 10,
            "collectives_per_step": 4,
        }

    return {
        "stage": stage,
        "world_size": 2,
        "device": "cpu",
        "backend": "gloo",
        "model": {"size": "tiny"},
        "candidates": [
            candidate("no sync", 0.5, 0.0),
            candidate(name, step, 0.2),
            candidate("torch DDP", 1.0, 0.3),
        ],
        **changes,
    }


@pytest.fixture
def compare(tmp_path, monkeypatch, capsys):
    """compare(result, …): what the command line does with these: exit status, output, errors."""

    def run(*results, words=()):
        files = []
        for number, content in enumerate(results):
            files.append(tmp_path / f"{number}.json")
            files[-1].write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, files), *words])
        try:
            status = common.ladder.compare.main()
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


LADDER = ["02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]


@pytest.mark.parametrize("stage", ["01_allreduce", *LADDER, "06_sharded_optimizer"])
def test_readme_shows_the_recorded_output(stage):
    recorded = (ROOT / stage / "reference_output.txt").read_text()
    assert recorded in (ROOT / stage / "README.md").read_text()


def test_summary():
    row = summarize("a.json", result())
    assert row["name"] == "BucketedDDP" and row["collectives"] == 4
    times = [round(row[key], 6) for key in ("step", "exposed", "optimizer", "compute")]
    assert times == [800, 200, 100, 500]
    assert (row["no sync"], row["torch DDP"]) == (1.6, 0.8)


def test_summary_without_baselines():
    row = summarize("a.json", result(candidates=result()["candidates"][1:2]))
    assert row["no sync"] is None and row["torch DDP"] is None


def test_compare_draws_and_says_the_change(compare, tmp_path):
    results = [result(), result(stage="02_naive_ddp", name="NaiveDDP"), result(step=0.6)]
    words = ["--plot", str(tmp_path / "compare.png")]
    status, output, errors = compare(*results, words=words)
    assert not status, errors
    rows = [line.split() for line in output.splitlines()]
    assert rows[1] == ["0.json", "BucketedDDP", "800.0", "1.600", "0.800", "200.0", "4", "-"]
    assert rows[2][:2] == ["1.json", "NaiveDDP"] and rows[2][-1] == "-"
    assert rows[3][0] == "2.json" and rows[3][-2:] == ["-25.0", "%"]
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "other, what",
    [
        (result(world_size=3), "world_size differ: 3 and 2"),
        (result(device="cuda"), "device differ: cuda and cpu"),
        (result(model={"size": "xl"}), "model differ"),
        ({"stage": "05"}, "no 'candidates'"),
        ("{", "cannot be read"),
    ],
)
def test_compare_names_what_differs(compare, other, what):
    status, _, errors = compare(result(), other)
    assert status == 2 and what in errors and "1.json" in errors and len(errors.splitlines()) == 1


def test_compare_says_first_what_else_differs(compare):
    before = result(torch="2.9", threads_per_rank=1, options={"bucket_size_mb": 25.0, "json": "a"})
    after = result(torch="2.9", threads_per_rank=2, options={"bucket_size_mb": 1.0, "json": "b"})
    _, output, _ = compare(before, after)
    assert output.splitlines()[:3] == [
        "threads_per_rank differs: 0.json: 1; 1.json: 2",
        "--bucket-size-mb differs: 0.json: 25.0; 1.json: 1.0",
        "file        wrapper  step ms  /no sync  /torch DDP  exposed ms  collectives  change",
    ]


def test_compare_per_rank(compare):
    by_rank = {"step_seconds": [[0.1, 0.3], [0.2, 0.6]], "exposed_comm_seconds": [[0, 0.2], [0, 0]]}
    own = result()["candidates"][1] | by_rank
    floor = own | {"name": "no sync"}
    del floor["exposed_comm_seconds"]
    status, output, _ = compare(result(candidates=[floor, own]), words=["--per-rank"])
    rows = [line.split() for line in output.splitlines()]
    rows = rows[rows.index(["0.json,", "by", "rank,", "in", "ms"]) + 1 :]
    assert not status and rows[0] == "rank step min max exposed min max".split()
    assert rows[1] == ["no", "sync", "0", "200.0", "100.0", "300.0", "-", "-", "-"]
    assert rows[3] == ["BucketedDDP", "0", "200.0", "100.0", "300.0", "100.0", "0.0", "200.0"]
    assert rows[4] == ["BucketedDDP", "1", "400.0", "200.0", "600.0", "0.0", "0.0", "0.0"]


def test_compare_per_rank_needs_samples_by_rank(compare):
    status, _, errors = compare(result(), words=["--per-rank"])
    assert status == 2 and "argument --per-rank: 0.json holds no samples by rank\n" in errors


def test_compare_refuses_a_missing_file(tmp_path):
    with pytest.raises(SystemExit):
        read([tmp_path / "nothing.json"])


def span(name, ts, dur, tid=1, cat="user_annotation"):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "tid": tid, "cat": cat}


def trace_of_two_steps():
    """Two steps of 100 µs: each has two collectives on thread 7 and one on thread 8."""
    events = [{"ph": "M", "name": "process_name"}]
    for start in (0, 1000):
        events += [
            span("forward", start, 30),
            span("backward", start + 30, 40),
            span("sync", start + 70, 20),
            span("optimizer", start + 90, 10),
            span("gloo:all_reduce", start + 40, 20, 7),
            span("gloo:all_reduce", start + 65, 20, 7),
            span("gloo:all_reduce", start + 50, 30, 8),
            span("aten::mm", start + 5, 20, cat="cpu_op"),
        ]
    return {"traceEvents": events}


def test_timeline_reads_a_step():
    phases, lanes = read_step(trace_of_two_steps())
    assert [name for name, _, _ in phases] == ["forward", "backward", "sync", "optimizer"]
    assert phases[0][1:] == (0.0, 0.03) and phases[3][1:] == (0.09, 0.01)
    assert lanes == {7: [(0.04, 0.02), (0.065, 0.02)], 8: [(0.05, 0.03)]}
    for blocks in lanes.values():
        for (start, duration), (following, _) in itertools.pairwise(blocks):
            assert start + duration <= following


def test_timeline_takes_the_gpu_s_own_spans():
    trace = trace_of_two_steps()
    kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    trace["traceEvents"] += [
        span("forward", 1010, 50, 20, "gpu_user_annotation"),
        span("backward", 1060, 80, 20, "gpu_user_annotation"),
        span("optimizer", 1150, 10, 20, "gpu_user_annotation"),
        span(kernel, 1080, 30, 21, "kernel"),
    ]
    phases, lanes = read_step(trace)
    assert phases[0] == ("forward", 0.0, 0.05) and lanes == {21: [(0.07, 0.03)]}


def test_timeline_takes_the_quickest_step():
    trace = trace_of_two_steps()
    trace["traceEvents"][4] = span("optimizer", 190, 10)  # the first is held up for 100 µs
    phases, lanes = read_step(trace)
    assert phases[3] == ("optimizer", 0.09, 0.01) and sum(map(len, lanes.values())) == 3


def test_timeline_marks_packing_and_draws(tmp_path):
    """Of a sync with aten::cat: what comes before its collective, and what after it."""
    trace = trace_of_two_steps()
    steps = {"no sync": ([(name, i, 1) for i, name in enumerate(PHASES)], {})}
    trace["traceEvents"] += [
        span("gloo:all_reduce", 75, 10, 7),
        span("aten::cat", 71, 3, cat="cpu_op"),
        span("aten::cat", 5, 3, cat="cpu_op"),
    ]
    steps["03"] = read_step(trace)
    names = ["forward", "backward", "sync", "pack", "unpack", "optimizer"]
    assert [name for name, _, _ in steps["03"][0]] == names
    assert steps["03"][0][3:5] == [("pack", 0.07, 0.005), ("unpack", 0.085, 0.005)]
    draw(steps, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_timeline_of_something_else_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    words = [tmp_path / "other.json", "--plot", tmp_path / "x.png"]
    monkeypatch.setenv("RANK", "0")  # which main sets, and monkeypatch puts back
    monkeypatch.setattr(sys, "argv", ["timeline.py", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "common" / "ladder" / "timeline.py"), run_name="__main__")
    said = capsys.readouterr().err
    assert end.value.code == 2 and len(said.splitlines()) == 1
    assert "no span named 'forward'" in said


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
