"""common/: the figures that every page quotes, and the command line."""

import time
from pathlib import Path
from types import SimpleNamespace

import images
import pytest
import torch
import torch.distributed as dist
import torchvision
from naive_ddp import train_step

from common import ladder, report, setup
from tools.testing import ONLY_RANK, QUICK, ROOT, write_mnist

CPU = torch.device("cpu")
NAIVE = ROOT / "02_naive_ddp" / "naive_ddp.py"
ARGS = SimpleNamespace(size="nano", seed=0, dtype="float32", batch_size=1, context_length=8)


def exposed_by_the_marks():
    """From the last gradient to the finish's end: a step that is late before it is not exposed."""
    way = ladder.torch_ddp()["torch DDP"]
    trainee = ladder.language_trainee(way, train_step, ARGS, CPU)
    times, between = trainee.step(), trainee.watch.seconds
    assert times["exposed_comm_seconds"] == between("last gradient", "finish ends")
    assert times["step_seconds"] == between("step starts", "step ends")
    del trainee.watch.marks["last gradient"]
    with pytest.raises(KeyError):  # nothing stands in for a mark that is missing
        between("last gradient", "finish ends")


def test_exposed_communication_begins_with_the_last_gradient(ranks):
    ranks(2).run(exposed_by_the_marks)


def test_what_a_wrapper_launches_with_the_last_gradient_is_exposed():
    launched = []

    def wrap(module):
        first = next(module.parameters())
        first.register_post_accumulate_grad_hook(lambda _: launched.append(time.perf_counter()))
        return torch.nn.Sequential(module)

    trainee = ladder.Trainee(ladder.Way(wrap), torch.nn.Linear(2, 2), train_step, lr=1.0)
    trainee.train(torch.ones(1, 2), torch.tensor([0]))
    assert trainee.watch.marks["last gradient"] < launched[0]


def verify_fails_when_a_rank_has_nan():
    rank = dist.get_rank()
    weights = {"w": torch.tensor([0.0, torch.nan if rank == 1 else 0.0])}
    with pytest.raises(SystemExit, match="FAILED"):
        ladder.compare_weights(weights, {"w": torch.zeros(2)})


def test_verify_fails_when_a_rank_has_nan(ranks):
    ranks(2).run(verify_fails_when_a_rank_has_nan)


def table_of(rows: dict[str, dict], capsys) -> tuple[dict[str, list[str]], str]:
    """The cells of each row, two ranks with 5 tokens each, and all that is printed."""
    each = [{"name": name, "optimizer_seconds": [[0.001]], **row} for name, row in rows.items()]
    model = {"batch_size": 1, "context_length": 5}
    ladder.print_steps({"model": model, "rows": each, "world_size": 2})
    printed = capsys.readouterr().out
    lines = printed.splitlines()[1 : len(rows) + 1]
    return {line[:16].strip(): line[16:].split() for line in lines}, printed


def test_the_table_of_steps(capsys):
    """One that waits anywhere has no parts of its communication."""
    steps = {"step_seconds": [[0.05, 0.05]], "collectives": 3}
    rows = {
        "no communication": steps | {"exposed_comm_seconds": [[0.0, 0.0]], "collectives": 0},
        "X": steps | {"exposed_comm_seconds": [[0.04, 0.04], [0.03, 0.05]]},
        "Y": steps | {"waits_seconds": [[0.02, 0.02]]},
        "torch DDP": {"step_seconds": [[0.02]], "exposed_comm_seconds": [[0.01]], "collectives": 1},
    }
    cells, _ = table_of(rows, capsys)
    step = ["50.0"] * 4 + ["200"]
    assert cells["no communication"] == [*step, "0.0", "0", "%", "-", "-", "0", "2.500"]
    # The least of both ranks is 30 ms in one step, 40 in the other; they wait for 10, 0, 0, 10.
    assert cells["X"] == [*step, "40.0", "80", "%", "35.0", "5.0", "3", "2.500"]
    assert cells["Y"] == [*step, "20.0", "40", "%", "-", "-", "3", "2.500"]
    assert cells["torch DDP"] == ["20.0"] * 4 + "500 10.0 50 % 10.0 0.0 1 1.000".split()


def test_a_rank_that_is_late_is_named(capsys):
    """It is last in eight of ten steps; half of a per cent later, or once less, says nothing."""
    on_time, waits = [0.010] * 10, [0.016] * 8 + [0.004] * 2
    for others, is_late in ((waits, True), ([0.0145] * 10, False), (waits[1:] + [0.004], False)):
        exposed = [others, on_time, others]
        rows = {"X": {"step_seconds": [[0.1]], "exposed_comm_seconds": exposed, "collectives": 1}}
        _, printed = table_of(rows, capsys)
        assert ("X: rank 1 is late by 6.0 ms a step" in printed) == is_late, others


def test_a_machine_whose_speed_changes_is_told(monkeypatch, capsys):
    for highest, is_told in ((1.4, False), (1.6, True)):
        emulated = SimpleNamespace(lowest_stretch=1.0, highest_stretch=highest)
        monkeypatch.setattr(ladder, "network", lambda emulated=emulated: emulated)
        ladder.warn_of_drift()
        assert ("warning: " in capsys.readouterr().out) == is_told


def test_percentiles_are_of_all_ranks():
    of_ranks = [[0.001, 0.002, 0.003], [0.003, 0.004, 0.005]]
    assert report.percentiles(of_ranks) == pytest.approx([0.003, 0.00375, 0.0045, 0.00475])
    assert report.ratio(of_ranks, [[0.006]]) == "0.500" and report.ratio(of_ranks, None) == "-"


# The command line

WRONG_INPUT = {
    "--size": ["huge"],
    "--batch-size": ["0", "x", "", "99999999999999"],
    "--warmup": ["-1"],
    "--timeout": ["0", "soon", "nan"],
    "--json": ["", "/", "/no/x.json", "/dev/null/x"],
}


def parse():
    parser = setup.Parser("what it does")
    ladder.add_training_arguments(parser, steps=3)
    return parser.parse_args()


@pytest.mark.parametrize("option", WRONG_INPUT)
def test_wrong_input_is_one_line(option, refusal):
    for value in WRONG_INPUT[option]:
        said = refusal(parse, "script.py", option, value)
        assert said.startswith(f"argument {option}: ") and value in said, said


def test_mnist_that_is_cut_short_is_one_line_of_all_ranks(forked, tmp_path):
    files = write_mnist(tmp_path, 5, 3)
    files[0].write_bytes(files[0].read_bytes()[:-1])
    status, output = forked(2, NAIVE, *QUICK, "--data", tmp_path)
    assert status == 2 and output.count("error: ") == 1, output
    assert "argument --data: " in output and str(tmp_path) in output, output


def test_what_one_rank_alone_refuses_it_says_itself(refusal, monkeypatch):
    """After a while, in which rank 0 would have ended the run."""
    waits = []
    monkeypatch.setattr(setup.time, "sleep", waits.append)
    environment = ONLY_RANK | {"RANK": "3", "LOCAL_RANK": "1"}
    said = refusal(parse, "script.py", "--size", "huge", environment=environment)
    assert said.startswith("rank 3: argument --size: ") and sum(waits) >= 10, said


class SlowDownload:
    """A data set of torchvision whose download takes a while; an error if two write one folder."""

    def __init__(self, folder, train=True, transform=None, download=False):
        self.data, self.targets = torch.zeros(4, 28, 28), torch.zeros(4)
        whole = Path(folder, "whole")
        if download and not whole.exists():
            part = Path(folder, "part")
            part.touch(exist_ok=False)
            time.sleep(0.2)
            part.rename(whole)
        assert whole.exists()


def downloads_as_a_host(load: str, folders: list):
    """On a rank that is alone on its host, as is each of the others."""
    folder = folders[dist.get_rank()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        patch.setattr(torchvision.datasets, "MNIST", SlowDownload)
        patch.setattr(images, "CIFAR10", SlowDownload)
        if load == "02 to 06":
            ladder.load_images(SimpleNamespace(data=folder, download=True))
        else:
            images.image_sets(folder, True, 20)


@pytest.mark.parametrize("load", ["02 to 06", "07"])
@pytest.mark.parametrize("folders", [("shared", "shared"), ("of host 0", "of host 1")])
def test_each_folder_of_the_hosts_is_filled_once(ranks, tmp_path, load, folders):
    folders = [tmp_path / name for name in folders]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    ranks(2).run(downloads_as_a_host, load, folders)
