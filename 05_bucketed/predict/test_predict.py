"""Stage 05: the experiments behind the prediction, the prediction, and the extrapolation."""

import copy
import itertools
import random
import sys
from pathlib import Path

import bucketed
import calibrate
import extrapolate
import predict
import pytest
import torch
from simulate import Network, Step
from torch.utils.flop_counter import FlopCounterMode

from common.testing import harness

FOLDER = Path(predict.__file__).parent
MB = 2**20


def samples_of(step: Step, network: Network) -> dict:
    """What the experiments would measure on a machine that is exactly so."""
    factor = 2 * (network.ranks - 1) / network.ranks / network.bandwidth  # seconds per byte
    hops = 2 * (network.ranks - 1) * network.hop

    def everywhere(**times):
        return {name: [[value] * 4] * network.ranks for name, value in times.items()}

    ready = [moment for _, moment in step.gradients]
    small, total = len(calibrate.SMALL_CALLS), sum(calibrate.SMALL_CALLS)
    copies = 3 * sum(size for size, _ in step.gradients) / step.copy_bandwidth
    samples = {
        "alone": everywhere(forward=step.forward, backward=step.backward, ready=ready),
        "hooks": everywhere(scale=step.hook, launch=step.launch),
        "large": everywhere(seconds=hops + network.call + factor * calibrate.LARGE_CALL),
    }
    for name, size in calibrate.BESIDE.items():
        on_call = network.call / network.call_speeds[1]
        on_bytes = factor * size / network.transfer_speed
        per_call = on_call + on_bytes
        speed = (on_call * network.call_speeds[0] + on_bytes * network.compute_speed) / per_call
        compute = (step.forward + step.backward) / speed
        times = {"seconds": compute, "calls": compute / per_call, "copies": copies}
        samples[f"beside {name}"] = everywhere(optimizer=step.optimizer, **times)
    for place in ("02", "05, 1 MB"):
        blocking = small * (hops + network.call) + factor * total
        at_once = hops + small * network.call + factor * total
        samples[f"blocking, after {place}"] = everywhere(seconds=blocking)
        samples[f"in flight, after {place}"] = everywhere(seconds=at_once)
    return samples


GRADIENTS = [(2.0 * MB, 0.01), (5.0 * MB, 0.05), (1.0 * MB, 0.1)]
STEP = Step(0.05, 0.1, 0.02, GRADIENTS, copy_bandwidth=5e9, hook=2e-5, launch=5e-5)
SPEEDS = {"compute_speed": 0.6, "transfer_speed": 0.5, "call_speeds": (0.7, 0.8)}


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_experiments_say_what_the_machine_is(ranks):
    network = Network(ranks, 2e-4, 1e9, call=5e-4, calls_at_once=None, **SPEEDS)
    sizes = [size for size, _ in STEP.gradients]
    step, found = calibrate.step_and_network(samples_of(STEP, network), sizes, ranks)
    for expected, result in ((STEP, step), (network, found)):
        for name, value in vars(expected).items():
            if value is not None and name != "gradients":
                assert getattr(result, name) == pytest.approx(value, rel=1e-9), name
    for (size, moment), (expected_size, expected) in zip(step.gradients, GRADIENTS, strict=True):
        assert size == expected_size and moment == pytest.approx(expected)


def test_noise_makes_no_cost_negative():
    """A large call that seems faster than a small one, calls at once slower than one by one."""
    network = Network(2, 2e-4, 1e9, call=5e-4, calls_at_once=None, **SPEEDS)
    samples = samples_of(STEP, network)
    samples["large"]["seconds"] = [[1e-6] * 4] * 2
    samples["in flight, after 02"]["seconds"] = [[10.0] * 4] * 2
    sizes = [size for size, _ in STEP.gradients]
    _, found = calibrate.step_and_network(samples, sizes, 2)
    assert found.hop >= 0 and found.call > 0 and found.bandwidth > 0 and found.transfer_speed > 0


def test_the_slower_rank_sets_the_pace():
    samples = {"alone": {"seconds": [[1.0, 5.0, 1.0, 5.0], [2.0, 1.0, 2.0, 1.0]]}}
    assert calibrate.typical(samples, "alone") == calibrate.middle([2.0, 5.0, 2.0, 5.0]) == 3.5


def result_with(measured: list[float]) -> dict:
    network = Network(2, 2e-4, 1e9, call=5e-4, calls_at_once=None, **SPEEDS)
    rows = []
    for row, seconds in zip(predict.ROWS, measured, strict=True):
        rows.append({"name": predict.label(*row), "step_seconds": [[seconds] * 4] * 2})
    sizes = [size for size, _ in STEP.gradients]
    experiments = samples_of(STEP, network)
    return {"gradient_bytes": sizes, "experiments": experiments, "rows": rows}


def test_what_is_measured_does_not_change_what_is_predicted():
    """Nothing is fitted to the rows: permute them, and every prediction stays."""
    measured = [0.2 + 0.01 * number for number in range(len(predict.ROWS))]
    result = result_with(measured)
    predict.predict(result, 2)
    random.Random(0).shuffle(measured)
    permuted = result_with(measured)
    predict.predict(permuted, 2)
    for row, other in zip(result["rows"], permuted["rows"], strict=True):
        for key in ("predicted_seconds", "predicted_exposed_seconds"):
            assert row[key] == other[key]
    assert result["network"] == permuted["network"] and result["step"] == permuted["step"]
    errors = [row["error"] for row in result["rows"]]
    assert errors != [row["error"] for row in permuted["rows"]]
    slower = copy.deepcopy(result)
    slower["experiments"]["alone"]["backward"] = [[0.2] * 4] * 2
    predict.predict(slower, 2)
    for row, other in zip(result["rows"], slower["rows"], strict=True):
        assert other["predicted_seconds"] > row["predicted_seconds"]


def test_best_bucket_is_named_with_its_noise(capsys):
    result = result_with([0.3, 0.3, 0.3, 0.30, 0.25, 0.26, 0.27, 0.28])
    predict.predict(result, 2)
    predict.print_rows(result)
    last = capsys.readouterr().out.splitlines()[-1]
    assert "measured 10 MB" in last and ("the noise" in last) == ("predicted 10 MB" not in last)


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_run(forked, tmp_path, device):
    files = {name: tmp_path / f"predict.{name}" for name in ("json", "plot")}
    words = [*harness.SHORT, "--sizes", "deep", "--device", device]
    words += [word for name in files for word in (f"--{name}", files[name])]
    status, output = forked(2, FOLDER / "predict.py", *words, cwd=tmp_path)
    assert status == 0, output
    result = harness.read_json(files["json"], "05_bucketed/predict")
    deep = result["models"]["deep"]
    assert [row["name"] for row in deep["rows"]] == [predict.label(*row) for row in predict.ROWS]
    assert len(deep["gradient_bytes"]) == 195 == len(deep["step"]["gradients"])
    predicted = [row["predicted_seconds"] for row in deep["rows"]]
    predict.predict(deep, 2)  # again, from what is in the file
    assert [row["predicted_seconds"] for row in deep["rows"]] == predicted
    assert result["mean_abs_error"] <= result["max_abs_error"]
    assert files["plot"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "option, value",
    [
        ("--sizes", "huge"),
        ("--sizes", "tiny,"),
        ("--plot", "/no/such/folder/x.png"),
        *((option, value) for option, value in harness.WRONG_INPUT if option == "--steps"),
    ],
)
def test_wrong_input(option, value, monkeypatch, capsys):
    path = FOLDER / "predict.py"
    harness.check_wrong_input(predict.main, path, option, value, monkeypatch, capsys)


def test_floating_point_operations_are_those_that_torch_counts():
    """But for the attention scores, which `build_step` leaves out."""
    *shape, batch_size, context_length = bucketed.SIZES["deep"]
    with torch.device("meta"):
        model = bucketed.LanguageModel(*shape)
        tokens = torch.zeros(batch_size, context_length, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            model(tokens).sum().backward()
    counted = counter.get_total_flops()
    step = extrapolate.build_step(model, tokens.numel(), 1.0, 0.0)
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


def test_most_ranks():
    for limit in (1, 2, 3, 50, 1000, 40_000):
        found = extrapolate.most_ranks(lambda ranks, limit=limit: ranks <= limit)
        assert found <= limit and limit - found <= limit / 100
    assert extrapolate.most_ranks(lambda _: True) == extrapolate.MOST_RANKS


def test_extrapolation(monkeypatch, capsys, tmp_path):
    """The more ranks, the smaller the efficiency; the more bandwidth, the larger."""
    words = ["--size", "small", "--ranks", "2,64,8", "--plot", str(tmp_path / "x.png")]
    monkeypatch.setattr(sys, "argv", ["extrapolate.py", *words])
    monkeypatch.setattr(extrapolate, "measure_core", lambda seed: CORE)
    extrapolate.main()
    lines = capsys.readouterr().out.splitlines()
    tables = {}
    for line in lines:
        if " %" in line and line[:2] in extrapolate.COLORS:
            cells = [float(cell) for cell in line[12:].replace("%", "").split()[:3]]
            assert cells == sorted(cells, reverse=True), line
            tables.setdefault(line[:10].strip(), []).append(cells)
    for rung, tables_of_rung in tables.items():
        for slower, faster in itertools.pairwise(tables_of_rung):
            assert all(s <= f for s, f in zip(slower, faster, strict=True)), rung
    assert sorted(tables) == ["02", "03", "04", "05, 25 MB", "05, 400 MB"]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


CORE = {"operations_per_second": 8e10, "optimizer_seconds_per_parameter": 1e-9}


@pytest.mark.parametrize(
    "option, value",
    [
        *itertools.product(["--bandwidth", "--latency"], ["10", "0gbit", "xgbit", ""]),
        ("--bandwidth", "10us"),
        ("--latency", "10gbit"),
        *itertools.product(["--compute", "--global-batch"], ["0", "-1", "x", "nan"]),
        ("--bucket-sizes-mb", "0"),
        *itertools.product(["--ranks"], ["1", "x", "", "99999999"]),
        ("--size", "huge"),
    ],
)
def test_wrong_input_of_the_extrapolation(option, value, monkeypatch, capsys):
    path = FOLDER / "extrapolate.py"
    harness.check_wrong_input(extrapolate.main, path, option, value, monkeypatch, capsys)
