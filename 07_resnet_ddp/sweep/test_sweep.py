"""Tests of sweep.py and sweep_diff.py.

The plan, real sweeps on one and on two "hosts", the JSON, the diff, bad input.
"""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch

from common import setup
from common.testing.harness import masked, read_json
from common.timing import Stopwatch

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]
import sweep  # noqa: E402
import sweep_diff  # noqa: E402
import sweep_models  # noqa: E402

TINY = ["--model", "squeezenet1_1", "--batch-size", 2, "--image-size", 32]
TINY += ["--warmup", 1, "--steps", 3, "--device", "cpu"]


@pytest.mark.parametrize(
    "ranks, local_size, labels",
    [
        (1, 1, ["1M/1G"]),
        (2, 2, ["1M/1G", "1M/2G"]),
        (16, 8, ["1M/1G", "1M/2G", "1M/4G", "1M/8G", "2M/8G"]),
        (4, 2, ["1M/1G", "1M/2G", "2M/2G"]),
        (12, 6, ["1M/1G", "1M/2G", "1M/4G", "1M/6G", "2M/6G"]),
        (3, 1, ["1M/1G", "2M/1G", "3M/1G"]),
    ],
)
def test_plan(ranks, local_size, labels):
    found = sweep.plan(ranks, local_size)
    assert found[0] == ("no ddp", [0], False)
    assert [label for label, _, _ in found[1:]] == labels
    for label, members, use_ddp in found[1:]:
        machines, size = (int(part[:-1]) for part in label.split("/"))
        # torchrun gives every machine consecutive ranks: these are the machines of the label.
        assert members == list(range(machines * size)) and use_ddp
    assert len(found[-1][1]) == ranks


def measured(output):
    """The subsets in the table of an output."""
    lines = [line.split() for line in output.splitlines() if line.count("/s") == 4]
    return [words[1] for words in lines if words[0].isdigit()]


def test_one_host(forked, tmp_path, diff):
    words = [*TINY, "--json", tmp_path / "a.json"]
    status, output = forked(2, FOLDER / "sweep.py", *words)
    assert status == 0, output
    report = read_json(tmp_path / "a.json", "07_resnet_ddp/sweep")
    upstreams = "pytorch_version cuda_version distributed_backend bucket_size benchmark_results"
    assert set(upstreams.split()) <= report.keys()
    assert report["options"]["steps"] == 3
    assert report["options"]["device"] == "cpu" and report["options"]["backend"] == "gloo"
    assert report["distributed_backend"] == "gloo" and report["bucket_size"] == 25
    (benchmark,) = report["benchmark_results"]
    assert list(benchmark) == ["model", "batch_size", "result"]
    assert (benchmark["model"], benchmark["batch_size"]) == ("squeezenet1_1", 2)
    assert all(list(entry) == ["ranks", "measurements"] for entry in benchmark["result"])
    # First without DDP.
    assert [entry["ranks"] for entry in benchmark["result"]] == [[0], [0], [0, 1]]
    # Of all ranks together, without warm-up.
    assert [len(entry["measurements"]) for entry in benchmark["result"]] == [3, 3, 6]
    for entry in benchmark["result"]:
        assert all(0 < seconds < 60 for seconds in entry["measurements"])
    assert measured(output) == ["no", "1M/1G", "1M/2G"], output
    assert f"written: {tmp_path / 'a.json'}\n" in output
    recorded = masked((FOLDER / "reference_output.txt").read_text())
    starts = ("#_resnet", "subsets", "ranks", "# no", "# #M", "percentiles")
    for line in masked(output):  # what the recorded output shows is what the script prints today
        assert line in recorded or not line.startswith(starts)
    # A result as older versions and PyTorch's benchmark have it, against a new one.
    older = {name: report[name] for name in upstreams.split()}
    (tmp_path / "older.json").write_text(json.dumps(older))
    for baseline in ("a.json", "older.json"):
        _, compared, _ = diff(tmp_path / baseline, tmp_path / "a.json")
        assert compared.count("+0.0%") == 6
        rows = [line.split() for line in compared.splitlines()]
        assert ["--steps", "3" if baseline == "a.json" else "-", "3"] in rows
        assert ["bucket_size", "25", "25"] in rows and "options" not in compared


def test_older_names_of_flags_are_understood_and_not_shown(capsys):
    parser = setup.Parser("")
    sweep.add_arguments(parser)
    older = "--iterations 7 --bucket-size 9 --distributed-backend gloo"
    args = parser.parse_args(older.split())
    assert (args.steps, args.bucket_size_mb, args.backend) == (7, 9, "gloo")
    shown = parser.format_help()
    assert not any(name in shown for name in ("--iterations", "--bucket-size ", "--distributed"))


def test_small_is_the_default_and_full_is_upstreams():
    def sizes(*words):
        parser = setup.Parser("")
        sweep.add_arguments(parser)
        args = parser.parse_args(words)
        sweep.choose_sizes(args)
        return args.model, args.batch_size, args.image_size

    four = ["resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"]
    assert sizes() == (["resnet18"], 8, 64)
    assert sizes("--full") == (four, 32, 224)
    own = ["--model", "vgg11", "--model", "vgg13", "--model", "vgg11"]
    assert sizes("--full", *own) == (["vgg11", "vgg13"], 32, 224)
    assert sizes("--full", "--image-size", "96", "--batch-size", "2") == (four, 2, 96)
    assert sizes("--image-size", "96") == (["resnet18"], 8, 96)


def test_progress_within_a_subset_is_shown():
    shown = []
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 2 * 2, 1000))
    watch = Stopwatch(torch.device("cpu"))
    benchmark = sweep_models.TorchvisionBenchmark("cpu", "gloo", 25)
    benchmark.batch_size, benchmark.image_size = 1, 2
    assert len(sweep.train(network, benchmark, 2, 1, watch, shown.append)) == 2
    assert shown == ["step 1 of 3", "step 2 of 3", "step 3 of 3"]


MY_MODEL = """
import torch
from sweep_models import Benchmark

class Mine(Benchmark):
    def __init__(self, device, distributed_backend, bucket_size):  # as upstream's subclasses do
        super().__init__(device, distributed_backend, bucket_size)
        print("of", device, distributed_backend, bucket_size)
    def create_model(self):
        return torch.nn.Linear(5, 3).to(self.device)
    def generate_inputs(self):
        return [torch.rand([self.batch_size, 5], device=self.device)]
    def generate_target(self):
        return torch.tensor([1] * self.batch_size, dtype=torch.long, device=self.device)

class Half(Benchmark):
    create_model = None
"""


def upstreams_words(rank, world_size):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = ["--master-addr", "127.0.0.1", "--master-port", free.getsockname()[1]]
    return ["--rank", rank, "--world-size", world_size, *place]


def test_a_model_of_ones_own_started_as_upstream_is(forked, tmp_path):
    (tmp_path / "my_model.py").write_text(MY_MODEL)
    name = f"{tmp_path}/my_model.py:Mine"
    words = [*TINY[2:], "--bucket-size", 2, *upstreams_words(0, 1), "--json", tmp_path / "json"]
    status, output = forked(None, FOLDER / "sweep.py", *words, "--model", name)
    assert status == 0 and measured(output) == ["no", "1M/1G"], output
    assert "of cpu gloo 2\n" in output and f"Benchmark: {name} with batch size 2" in output
    [benchmark] = json.loads((tmp_path / "json").read_text())["benchmark_results"]
    assert (benchmark["model"], benchmark["batch_size"]) == (name, 2)


@pytest.mark.full
def test_two_ranks_started_as_upstreams_are(script):
    words = upstreams_words(0, 2)
    runs = []
    for rank in range(2):
        words[1] = rank
        runs.append(script([sys.executable, FOLDER / "sweep.py", *TINY, *words]))
    (status, output), (other_status, other_output) = [run.wait() for run in runs]
    assert status == other_status == 0, output + other_output
    assert measured(output) == ["no", "1M/1G", "1M/2G"] and not other_output, output


@pytest.mark.cuda
@pytest.mark.parametrize("world_size", [1, 2])
def test_on_a_gpu(launched, tmp_path, world_size):
    words = [*TINY, "--device", "cuda", "--json", tmp_path / "a.json"]
    status, output = launched(world_size, FOLDER / "sweep.py", *words)
    assert status == 0, output
    report = json.loads((tmp_path / "a.json").read_text())
    gpu_per_rank = torch.cuda.device_count() >= world_size
    assert (report["distributed_backend"] == "nccl") == gpu_per_rank
    subsets = [entry["ranks"] for entry in report["benchmark_results"][0]["result"]]
    assert subsets == [[0], [0], [0, 1]][: world_size + 1]


def two_hosts(script, *words, local_size=1, second_environment=None):
    """Two launchers that find each other at a port of this machine, as on two machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = []
    for node_rank, environment in enumerate([{}, second_environment or {}]):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2]
        launcher += ["--node-rank", node_rank, "--nproc-per-node", local_size]
        launcher += ["--master-addr", "127.0.0.1", "--master-port", port]
        hosts.append(script([*launcher, FOLDER / "sweep.py", *TINY, *words], env=environment))
    return [host.wait() for host in hosts]


@pytest.mark.full
def test_two_hosts(script, tmp_path):
    first, second = two_hosts(script, "--json", tmp_path / "two.json", local_size=2)
    (status, output), (second_status, second_output) = first, second
    assert status == second_status == 0, output + second_output
    assert measured(output) == ["no", "1M/1G", "1M/2G", "2M/2G"], output
    result = json.loads((tmp_path / "two.json").read_text())["benchmark_results"][0]["result"]
    assert [entry["ranks"] for entry in result] == [[0], [0], [0, 1], [0, 1, 2, 3]]


@pytest.mark.full
def test_hosts_that_differ(script, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU0 is somewhere else\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"}
    results = two_hosts(script, second_environment=path)
    assert all(status != 0 for status, _ in results)
    assert "GPU0 is somewhere else" in results[0][1] and "cores" in results[0][1]
    assert sum(line.startswith("sweep.py: error: ") for line in results[0][1].splitlines()) == 1
    [(status, output), _] = two_hosts(script, "--allow-mixed", second_environment=path)
    assert status == 0 and "GPU0 is somewhere else" in output and "2M/1G" in output, output


NCCL_ON_CPU = ["--backend", "nccl", "--device", "cpu"]


@pytest.mark.parametrize(
    "words, named",
    [
        (["--model", "resnet1"], "--model"),
        (["--batch-size", "0"], "--batch-size"),
        (["--model", "alexnet", "--image-size", "8"], "--image-size"),
        (["--model", "vit_b_16", "--image-size", "64"], "--image-size"),
        (["--bucket-size", "2.5"], "--bucket-size-mb"),
        (["--iterations", "0"], "--steps"),
        (["--distributed-backend", "mpi"], "--backend"),
        (["--model", "alexnet", *NCCL_ON_CPU], "--backend"),
        (["--model", "alexnet"], "torchrun"),
        (["--model", "no_such.py:Mine"], "'no_such.py'"),
        (["--model", "my_model.py:Yours"], "no class or function 'Yours'"),
        (["--model", "my_model.py:Half"], "no method create_model()"),
        (["--model", "broken.py:Mine"], "broken.py cannot be imported (NameError: "),
        (["--rank", "0"], "--world-size"),
        (["--world-size", "2", "--master-addr", "x", "--master-port", "1"], "--rank"),
        (["--rank", "2", *"--world-size 2 --master-addr x --master-port 1".split()], "--rank"),
        (["--master-port", "0"], "--master-port"),
    ],
)
def test_bad_values(words, named, monkeypatch, capsys, tmp_path):
    (tmp_path / "my_model.py").write_text(MY_MODEL)
    (tmp_path / "broken.py").write_text("what")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(setup.time, "sleep", lambda seconds: None)  # of other ranks than 0
    monkeypatch.setattr(sys, "argv", ["sweep.py", *words])
    with pytest.raises(SystemExit) as end:
        sweep.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("sweep.py: error: ") and named in line


def test_what_contradicts_torchrun_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--world-size", "4"])
    with pytest.raises(SystemExit) as end:
        sweep.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert line == "sweep.py: error: argument --world-size: '4', but torchrun's WORLD_SIZE is '2'"


@pytest.fixture
def diff(monkeypatch, capsys):
    """diff(baseline, test): exit status, output and errors of sweep_diff.py."""

    def run(*files):
        monkeypatch.setattr(sys, "argv", ["sweep_diff.py", *map(str, files)])
        try:
            sweep_diff.main()
            status = 0
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def write(path, results, **header):
    """A result file by hand: {(model, batch size): [(ranks, seconds of every measurement)]}."""
    benchmarks = []
    for (model, batch_size), result in results.items():
        entries = []
        for ranks, seconds in result:
            entries.append({"ranks": list(range(ranks)), "measurements": [seconds] * 10})
        benchmarks.append({"model": model, "batch_size": batch_size, "result": entries})
    content = {"pytorch_version": "2.6.0", "bucket_size": 25} | header
    path.write_text(json.dumps(content | {"benchmark_results": benchmarks}))
    return path


def test_diff_of_equal_and_slower(tmp_path, diff):
    baseline = write(tmp_path / "a", {("resnet18", 8): [(1, 0.10), (1, 0.10), (2, 0.20)]})
    times = {("resnet18", 8): [(1, 0.10), (1, 0.05), (2, 0.25)]}
    test = write(tmp_path / "b", times, pytorch_version="2.7.0", extra="x")
    _, output, _ = diff(baseline, test)
    lines = [line.split() for line in output.splitlines()]
    assert ["pytorch_version", "2.6.0", "2.7.0"] in lines and ["extra", "-", "x"] in lines
    assert ["no", "ddp", "0.1000s", "80.0/s", "+0.0%", "0.1000s", "80.0/s", "+0.0%"] in lines
    assert ["1", "ranks", "0.0500s", "160.0/s", "+50.0%", "0.0500s", "160.0/s", "+50.0%"] in lines
    assert ["2", "ranks", "0.2500s", "32.0/s", "-25.0%", "0.2500s", "32.0/s", "-25.0%"] in lines


def test_diff_names_what_does_not_match(tmp_path, diff):
    one, two, four = (1, 1.0), (2, 1.0), (4, 1.0)
    times = {("alexnet", 8): [one], ("resnet18", 8): [one, one, two], ("vgg11", 8): [one]}
    baseline = write(tmp_path / "a", times)
    times = {("vgg11", 16): [one], ("resnet18", 8): [one, one, four]}
    test = write(tmp_path / "b", times)
    status, output, _ = diff(baseline, test)
    assert status == 0
    for line in (
        "only in the baseline: alexnet with batch size 8",
        "only in the baseline: vgg11 with batch size 8",
        "only in the test: vgg11 with batch size 16",
        "only in the baseline: 2 ranks",
        "only in the test: 4 ranks",
        "Benchmark: resnet18 with batch size 8",
    ):
        assert line in output.splitlines()
    assert "Benchmark: vgg11" not in output


def test_diff_of_bad_files(tmp_path, diff):
    good = write(tmp_path / "good", {("resnet18", 8): [(1, 1.0)]})
    (tmp_path / "text").write_text("no JSON\n")
    (tmp_path / "list").write_text("[1, 2]")
    (tmp_path / "other").write_text('{"stage": "05_bucketed"}')
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    empty = write(tmp_path / "empty", {("resnet18", 8): []})
    entry = '"result": [{"ranks": [0], "measurements": []}]'
    empty.write_text(empty.read_text().replace('"result": []', entry))
    for bad in ("text", "list", "other", "bytes", "empty", "missing", "."):
        status, _, errors = diff(good, tmp_path / bad)
        assert status == 2 and errors.count("\n") == 1, (bad, errors)
        assert errors.startswith("sweep_diff.py: error: ")
        assert str(tmp_path / bad) in errors
    for files in ([], [good], [good, good, good]):
        status, _, errors = diff(*files)
        assert status == 2 and errors.count("\n") == 1, errors
