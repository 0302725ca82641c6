"""05/predict: the experiments behind the prediction, the prediction, and the extrapolation."""

import dataclasses
import json
import math
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.recordings.record import output_of
from common.setup import SIZES
from common.testing import harness

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import bucketed  # noqa: E402
import calibrate  # noqa: E402
import predict  # noqa: E402
from simulate import Network, Step  # noqa: E402

SCRIPT = FOLDER / "predict.py"
MB = 2**20


# The experiments


def samples_of(step: Step, network: Network) -> dict:
    """What the experiments would measure on a machine that is exactly so."""
    per_byte = 2 * (network.ranks - 1) / network.ranks / network.bandwidth

    def everywhere(**times):
        return {name: [[value] * 4] * network.ranks for name, value in times.items()}

    ready = [moment for _, moment in step.gradients]
    copies = 2 * sum(size for size, _ in step.gradients) / step.copy_bandwidth
    samples = {
        "alone": everywhere(forward=step.forward, backward=step.backward, ready=ready),
        "hooks": everywhere(scale=step.hook, launch=step.launch),
        "large": everywhere(seconds=network.call_alone + per_byte * calibrate.LARGE_CALL),
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
        blocking = number * network.call_alone + sending
        at_once = network.latency + number * network.call + sending
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
    step = calibrate.step_of(samples, GRADIENT_BYTES)
    found = calibrate.network_of(samples, step, ranks)
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
    found = calibrate.network_of(samples, STEP, 2)
    assert found.hop >= 0 and found.call > 0 and found.bandwidth > 0 and found.transfer_speed > 0


def test_the_slower_rank_sets_the_pace():
    samples = {"alone": {"seconds": [[1.0, 5.0, 1.0, 5.0], [2.0, 1.0, 2.0, 1.0]]}}
    assert calibrate.typical(samples, "alone") == calibrate.middle([2.0, 5.0, 2.0, 5.0]) == 3.5


# The prediction


def entry_with(measured: list[float]) -> dict:
    """An entry of "models" whose rows took so many seconds, and what is predicted."""
    rows = []
    for row, seconds in zip(predict.ROWS, measured, strict=True):
        rows.append({"name": predict.label(*row), "step_seconds": [[seconds] * 4] * 2})
    experiments = samples_of(STEP, network_of(2))
    entry = {"gradient_bytes": GRADIENT_BYTES, "experiments": experiments, "rows": rows}
    predict.predict(entry, 2)
    return entry


def test_what_is_measured_does_not_change_what_is_predicted():
    """Nothing is fitted to the rows: permute them, and every prediction stays."""
    measured = [0.2 + 0.01 * number for number in range(len(predict.ROWS))]
    entry = entry_with(measured)
    random.Random(0).shuffle(measured)
    permuted = entry_with(measured)
    assert entry["network"] == permuted["network"] and entry["step"] == permuted["step"]
    for before, after in zip(entry["rows"], permuted["rows"], strict=True):
        assert before["predicted_seconds"] == after["predicted_seconds"]
    errors = [row["predicted_seconds"] / row["measured_seconds"] - 1 for row in permuted["rows"]]
    assert [row["error"] for row in permuted["rows"]] == errors


def test_table_and_best_bucket(capsys):
    """A step alone takes 170 ms; of the buckets 10 MB are measured to be the best."""
    rows = entry_with([0.34, 0.3, 0.3, 0.30, 0.25, 0.26, 0.27, 0.28])["rows"]
    for row, seconds in zip(rows[3:], (0.5, 0.4, 0.2, 0.3, 0.4), strict=True):
        row["predicted_seconds"] = seconds
    predict.print_rows(rows, seconds_alone=0.17)
    _, first, *_, last = capsys.readouterr().out.splitlines()
    predicted = rows[0]["predicted_seconds"]
    in_ms, error = f"{1000 * predicted:.1f}", f"{100 * (predicted / 0.34 - 1):+.1f}"
    assert first.split() == ["02", in_ms, "340.0", f"{predicted / 0.17:.3f}", "2.000", error, "%"]
    assert "predicted 25 MB, measured 10 MB; the predicted one is 4.0 % slower" in last


FREE = {"compute_speed": 1.0, "transfer_speed": 1.0, "call_speeds": None}


@pytest.mark.parametrize(
    "cause, of_step, of_network",
    [
        ("each slows the other", {}, FREE),
        ("Python", {"hook": 0.0, "launch": 0.0}, {}),
        ("copies", {"copy_bandwidth": math.inf}, {}),
    ],
)
def test_where_it_goes(cause, of_step, of_network, capsys):
    """The shares add up, and a cause that is not there has none."""
    step = dataclasses.replace(STEP, **of_step)
    predict.say_where_it_goes(step, dataclasses.replace(network_of(2), **of_network))
    said = capsys.readouterr().out.partition(": ")[2]
    above, *shares = map(float, re.findall(r"-?\d+\.\d", said))
    assert len(shares) == 4 and sum(shares) == pytest.approx(above, abs=0.3)
    assert f"{cause} 0.0" in said and shares.count(0.0) == 1


@pytest.mark.full
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_run(forked, tmp_path, device):
    words = [*harness.SHORT, "--size", "deep", "--device", device, "--json", tmp_path / "json"]
    status, output = forked(2, SCRIPT, *words, cwd=tmp_path)
    assert status == 0, output
    result = harness.read_json(tmp_path / "json", "05_bucketed/predict")
    deep = result["models"]["deep"]
    assert [row["name"] for row in deep["rows"]] == [predict.label(*row) for row in predict.ROWS]
    assert len(deep["gradient_bytes"]) == 195 == len(deep["step"]["gradients"])
    before = [row["predicted_seconds"] for row in deep["rows"]]
    predict.predict(deep, 2)  # again, from what is in the file
    assert [row["predicted_seconds"] for row in deep["rows"]] == before


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
    step = predict.build_step(model, tokens.numel(), operations_per_second=1.0)
    assert step.backward == 2 * step.forward
    assert 0.8 * counted < step.forward + step.backward <= counted
    assert len(step.gradients) == 195
    assert step.gradients[-1][1] == step.backward


def test_closed_form_is_where_the_ring_is_as_long_as_backward():
    parameters, bandwidth, operations = 10**9, 1e10, 1e13
    ranks = predict.closed_form(bandwidth, operations)
    ring = 2 * (ranks - 1) / ranks * 4 * parameters / bandwidth
    assert ring == pytest.approx(4 * predict.GLOBAL_BATCH * parameters / (ranks * operations))


def test_extrapolation(forked, tmp_path):
    """The numbers that are recorded, which fall with the ranks and rise with the bandwidth."""
    words = ["--extrapolate", "10,400", "--json", tmp_path / "json"]
    status, output = forked(1, SCRIPT, *words, cwd=tmp_path)
    assert status == 0, output
    recorded = output_of(FOLDER / "reference_output_extrapolate.txt")
    head, *tables = output.split("\n\n")
    assert head.splitlines()[-1] in recorded and len(tables) == 3
    for table in tables[:2]:
        assert table in recorded
    slow, fast = json.loads((tmp_path / "json").read_text())["networks"]
    for rows in zip(slow["rows"], fast["rows"], strict=True):
        of_slow, of_fast = (row["efficiencies"] for row in rows)
        assert of_slow == sorted(of_slow, reverse=True)
        assert all(less <= more for less, more in zip(of_slow, of_fast, strict=True))


# The command line


@pytest.mark.parametrize(
    "option, value",
    [("--size", "tiny,deep"), ("--tflops", "inf"), ("--extrapolate", "nan"), ("--extrapolate", "")],
)
def test_wrong_input(option, value, monkeypatch, capsys):
    harness.check_wrong_input(predict.main, SCRIPT, option, value, monkeypatch, capsys)
