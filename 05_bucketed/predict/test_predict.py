"""05/predict: the experiments behind the prediction, the prediction, and the extrapolation."""

import dataclasses
import itertools
import math
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from common.recordings.record import output_of
from common.setup import SIZES
from common.testing import harness

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import bucketed  # noqa: E402
import calibrate  # noqa: E402
import extrapolate  # noqa: E402
import predict  # noqa: E402
from simulate import Network, Step  # noqa: E402

MB = 2**20


# The experiments


def samples_of(step: Step, network: Network) -> dict:
    """What the experiments would measure on a machine that is exactly so."""
    per_byte = 2 * (network.ranks - 1) / network.ranks / network.bandwidth
    hops = 2 * (network.ranks - 1) * network.hop

    def everywhere(**times):
        return {name: [[value] * 4] * network.ranks for name, value in times.items()}

    ready = [moment for _, moment in step.gradients]
    copies = 2 * sum(size for size, _ in step.gradients) / step.copy_bandwidth
    samples = {
        "alone": everywhere(forward=step.forward, backward=step.backward, ready=ready),
        "hooks": everywhere(scale=step.hook, launch=step.launch),
        "large": everywhere(seconds=hops + network.call + per_byte * calibrate.LARGE_CALL),
    }
    for name, size in calibrate.BESIDE.items():
        on_call = network.call / network.call_speeds[1]
        on_bytes = per_byte * size / network.transfer_speed
        per_call = on_call + on_bytes
        speed = (on_call * network.call_speeds[0] + on_bytes * network.compute_speed) / per_call
        compute = (step.forward + step.backward) / speed
        times = {"seconds": compute, "calls": compute / per_call, "copies": copies}
        samples[f"beside {name}"] = everywhere(optimizer=step.optimizer, **times)
    number = len(calibrate.SMALL_CALLS)
    sending = per_byte * sum(calibrate.SMALL_CALLS)
    for place in ("02", "05, 1 MB"):
        blocking = number * (hops + network.call) + sending
        at_once = hops + number * network.call + sending
        samples[f"blocking, after {place}"] = everywhere(seconds=blocking)
        samples[f"in flight, after {place}"] = everywhere(seconds=at_once)
    return samples


GRADIENTS = [(2.0 * MB, 0.01), (5.0 * MB, 0.05), (1.0 * MB, 0.1)]
GRADIENT_BYTES = [size for size, _ in GRADIENTS]
STEP = Step(0.05, 0.1, 0.02, GRADIENTS, copy_bandwidth=5e9, hook=2e-5, launch=5e-5)


def network_of(ranks: int) -> Network:
    speeds = {"compute_speed": 0.6, "transfer_speed": 0.5, "call_speeds": (0.7, 0.8)}
    return Network(ranks, 2e-4, 1e9, call=5e-4, calls_at_once=None, **speeds)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_experiments_say_what_the_machine_is(ranks):
    network = network_of(ranks)
    samples = samples_of(STEP, network)
    step, found = calibrate.step_and_network(samples, GRADIENT_BYTES, ranks)
    for expected, result in ((STEP, step), (network, found)):
        for name, value in vars(expected).items():
            if value is not None and name != "gradients":
                assert getattr(result, name) == pytest.approx(value, rel=1e-9), name
    assert [size for size, _ in step.gradients] == GRADIENT_BYTES
    assert [moment for _, moment in step.gradients] == pytest.approx([0.01, 0.05, 0.1])


def test_noise_makes_no_cost_negative():
    """A large call that seems faster than a small one, calls at once slower than one by one."""
    samples = samples_of(STEP, network_of(2))
    samples["large"]["seconds"] = [[1e-6] * 4] * 2
    samples["in flight, after 02"]["seconds"] = [[10.0] * 4] * 2
    _, found = calibrate.step_and_network(samples, GRADIENT_BYTES, 2)
    assert found.hop >= 0 and found.call > 0 and found.bandwidth > 0 and found.transfer_speed > 0


def test_the_slower_rank_sets_the_pace():
    samples = {"alone": {"seconds": [[1.0, 5.0, 1.0, 5.0], [2.0, 1.0, 2.0, 1.0]]}}
    assert calibrate.typical(samples, "alone") == calibrate.middle([2.0, 5.0, 2.0, 5.0]) == 3.5


def wrappers():
    rungs = ["02", "03", "04", "05"]
    return [type(calibrate.wrap(nn.Linear(1, 1), rung, 25.0)).__name__ for rung in rungs]


def test_wrapper_of_each_rung(ranks):
    assert ranks(1).run(wrappers) == [["NaiveDDP", "FlatDDP", "OverlapDDP", "BucketedDDP"]]


# The prediction


def entry_with(measured: list[float], step: Step = STEP) -> dict:
    """An entry of "models" whose rows took so many seconds, and what is predicted."""
    rows = []
    for row, seconds in zip(predict.ROWS, measured, strict=True):
        rows.append({"name": predict.label(*row), "step_seconds": [[seconds] * 4] * 2})
    experiments = samples_of(step, network_of(2))
    entry = {"gradient_bytes": GRADIENT_BYTES, "experiments": experiments, "rows": rows}
    predict.predict(entry, 2)
    return entry


def values(entry: dict, key: str) -> list[float]:
    return [row[key] for row in entry["rows"]]


def test_what_is_measured_does_not_change_what_is_predicted():
    """Nothing is fitted to the rows: permute them, and every prediction stays."""
    measured = [0.2 + 0.01 * number for number in range(len(predict.ROWS))]
    entry = entry_with(measured)
    random.Random(0).shuffle(measured)
    permuted = entry_with(measured)
    assert values(entry, "predicted_seconds") == values(permuted, "predicted_seconds")
    assert entry["network"] == permuted["network"] and entry["step"] == permuted["step"]
    assert values(entry, "error") != values(permuted, "error")
    slower = entry_with(measured, dataclasses.replace(STEP, backward=0.2))
    before, after = values(entry, "predicted_seconds"), values(slower, "predicted_seconds")
    assert all(short < long for short, long in zip(before, after, strict=True))


def test_table_and_best_bucket(capsys):
    """A step alone takes 170 ms; the best bucket is named with its noise."""
    entry = entry_with([0.34, 0.3, 0.3, 0.30, 0.25, 0.26, 0.27, 0.28])
    predict.print_rows(entry)
    _, first, *_, last = capsys.readouterr().out.splitlines()
    predicted = entry["rows"][0]["predicted_seconds"]
    in_ms, error = f"{1000 * predicted:.1f}", f"{100 * (predicted / 0.34 - 1):+.1f}"
    assert first.split() == ["02", in_ms, "340.0", f"{predicted / 0.17:.3f}", "2.000", error, "%"]
    assert "measured 10 MB" in last and ("the noise" in last) == ("predicted 10 MB" not in last)


FREE = {"compute_speed": 1.0, "transfer_speed": 1.0, "call_speeds": None}


@pytest.mark.parametrize(
    "cause, of, changes",
    [
        ("each slows the other", "network", FREE),
        ("Python", "step", {"hook": 0.0, "launch": 0.0}),
        ("copies", "step", {"copy_bandwidth": math.inf}),
    ],
)
def test_where_it_goes(cause, of, changes, capsys):
    """The shares add up, and a cause that is not there has none."""
    entry = entry_with([0.3] * len(predict.ROWS))
    entry[of] |= changes
    predict.say_where_it_goes(entry)
    said = capsys.readouterr().out.partition(": ")[2]
    above, *shares = map(float, re.findall(r"-?\d+\.\d", said))
    assert len(shares) == 4 and sum(shares) == pytest.approx(above, abs=0.3)
    assert f"{cause} 0.0" in said and shares.count(0.0) == 1


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_run(forked, tmp_path, device):
    files = ["--json", tmp_path / "predict.json", "--plot", tmp_path / "predict.png"]
    words = [*harness.SHORT, "--size", "deep", "--device", device, *files]
    status, output = forked(2, FOLDER / "predict.py", *words, cwd=tmp_path)
    assert status == 0, output
    result = harness.read_json(tmp_path / "predict.json", "05_bucketed/predict")
    deep = result["models"]["deep"]
    assert [row["name"] for row in deep["rows"]] == [predict.label(*row) for row in predict.ROWS]
    assert len(deep["gradient_bytes"]) == 195 == len(deep["step"]["gradients"])
    before = [row["predicted_seconds"] for row in deep["rows"]]
    predict.predict(deep, 2)  # again, from what is in the file
    assert [row["predicted_seconds"] for row in deep["rows"]] == before
    assert result["mean_abs_error"] <= result["max_abs_error"]
    assert (tmp_path / "predict.png").read_bytes().startswith(b"\x89PNG")


# The extrapolation


def test_floating_point_operations_are_those_that_torch_counts():
    """But for the attention scores, which `build_step` leaves out."""
    *shape, batch_size, context_length = SIZES["deep"]
    with torch.device("meta"):
        model = bucketed.LanguageModel(*shape)
        tokens = torch.zeros(batch_size, context_length, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            model(tokens).sum().backward()
    counted = counter.get_total_flops()
    step = extrapolate.build_step(model, tokens.numel(), operations_per_second=1.0)
    assert step.backward == 2 * step.forward
    assert 0.8 * counted < step.forward + step.backward <= counted
    assert len(step.gradients) == 195
    assert step.gradients[-1][1] == step.backward


def test_closed_form_is_where_the_ring_is_as_long_as_backward():
    tokens, parameters, sent, bandwidth, operations = 2.0**19, 10**9, 4e9, 1e10, 1e13
    ranks = extrapolate.closed_form(tokens, parameters, sent, bandwidth, operations)
    ring = 2 * (ranks - 1) / ranks * sent / bandwidth
    assert ring == pytest.approx(4 * tokens * parameters / (ranks * operations))
    assert ranks == pytest.approx(1 + tokens * bandwidth / (2 * operations))


@pytest.mark.parametrize("limit", [1, 2, 3, 50, 40_000, extrapolate.MOST_RANKS])
def test_most_ranks(limit):
    assert extrapolate.most_ranks(lambda ranks: ranks <= limit) == limit


def test_extrapolation(monkeypatch, capsys, tmp_path):
    """The more ranks, the smaller the efficiency; the more bandwidth, the larger."""
    words = ["--size", "small", "--plot", str(tmp_path / "x.png")]
    monkeypatch.setattr(sys, "argv", ["extrapolate.py", *words])
    extrapolate.main()
    output = capsys.readouterr().out
    tables = {}
    for line in output.splitlines():
        if " %" in line and line[0] == "0":
            cells = [float(cell) for cell in line[12:].replace("%", "").split()[:5]]
            assert cells == sorted(cells, reverse=True), line
            tables.setdefault(line[:10].strip(), []).append(cells)
    assert list(tables) == list(extrapolate.ROWS)
    for rung, by_bandwidth in tables.items():
        assert len(by_bandwidth) == 3
        for slower, faster in itertools.pairwise(by_bandwidth):
            assert all(s <= f for s, f in zip(slower, faster, strict=True)), rung
    recorded = output_of(FOLDER / "reference_output_extrapolate.txt")
    recorded = recorded.replace("xl model", "small model").replace("≥ ", "")
    assert harness.masked(output.replace("≥ ", "")) == harness.masked(recorded)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# The command lines


@pytest.mark.parametrize("name", ["predict", "simulate", "extrapolate"])
def test_file_alone(name, tmp_path):
    harness.check_script_alone(FOLDER / f"{name}.py", tmp_path)


def test_one_rank_is_refused(forked):
    status, output = forked(1, FOLDER / "predict.py")
    assert status == 2 and output.count("error: ") == 1, output
    assert "'1' rank sends nothing; allowed are 2 and more" in output, output


@pytest.mark.parametrize("option, value", [("--size", "tiny,deep"), ("--steps", "0")])
def test_wrong_input(option, value, monkeypatch, capsys):
    path = FOLDER / "predict.py"
    harness.check_wrong_input(predict.main, path, option, value, monkeypatch, capsys)


@pytest.mark.parametrize(
    "option, value",
    [
        *itertools.product(["--bandwidth", "--tflops"], ["0", "nan", "inf", "10gbit", ""]),
        ("--size", "huge"),
    ],
)
def test_wrong_input_of_the_extrapolation(option, value, monkeypatch, capsys):
    path = FOLDER / "extrapolate.py"
    harness.check_wrong_input(extrapolate.main, path, option, value, monkeypatch, capsys)
