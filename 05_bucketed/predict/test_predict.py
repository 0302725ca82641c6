"""05/predict: the event loop on cases worked out by hand, a real run, the extrapolation.

The numbers of the loop are sums of powers of two, which floating point adds up exactly.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tools.record import output_of
from common.setup import SIZES
from tools import harness

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

import predict  # noqa: E402
from predict import simulate  # noqa: E402

SCRIPT = FOLDER / "predict.py"
NETWORK = {"call_seconds": 0.5, "bytes_per_second": 16.0}  # 8 bytes: half a second on the wire


# The event loop. Backward ends at second 4; a call is (bytes, the second when it is ready).


LATE = (8.0, 4.0)  # ready when backward ends, and half a second on the wire


@pytest.mark.parametrize(
    "calls, averaged",
    [
        ([], 4.0),
        ([(8.0, 1.0)], 4.0),  # over before backward is
        ([LATE] * 2, 4.0 + 2 * 0.5 + 0.5),  # bytes take turns, o passes beside the second's
        ([LATE] * 3, 4.0 + 3 * 0.5 + 0.5),  # the third begins when the first has arrived
        ([(0.0, 4.0)] * 5, 4.0 + 3 * 0.5),  # two at a time
        ([LATE, (16.0, 1.0)], 4.0 + 0.5 + 1.0 + 0.5),  # launches keep their order
        ([(48.0, 1.0), (8.0, 3.0)], 1.0 + 3.0 + 0.5 + 0.5),  # the first delays the second
        ([(8.0, 1.0), (8.0, 3.75)], 3.75 + 0.5 + 0.5),  # the wire is idle in between
    ],
)
def test_calls_during_backward(calls, averaged):
    assert simulate(calls, 4.0, True, **NETWORK) == averaged


def test_calls_one_at_a_time():
    """After backward each waits for the one before; during it where the network takes one."""
    assert simulate([(8.0, 1.0)] * 3, 4.0, False, **NETWORK) == 4.0 + 3 * (0.5 + 0.5)
    assert simulate([LATE] * 3, 4.0, True, **NETWORK, at_once=1) == 4.0 + 3 * (0.5 + 0.5)


MB = 2**18  # elements of 4 bytes


@pytest.mark.parametrize(
    "bucket_size_mb, expected",
    [
        (predict.ONE_EACH, [(1, 1.0), (2, 4.0), (3, 2.0)]),
        (None, [(6, 4.0)]),
        (25, [(1, 1.0), (5, 4.0)]),
    ],
)
def test_buckets_are_those_of_stage_05_and_wait_for_their_last_gradient(bucket_size_mb, expected):
    """The first has a 25th of the size, and here takes its gradient alone."""
    gradients = [torch.nn.Parameter(torch.empty(n * MB, device="meta")) for n in (1, 2, 3)]
    calls = predict.calls_of(gradients, [1.0, 4.0, 2.0], bucket_size_mb)
    assert [(size / 2**20, ready) for size, ready in calls] == expected


def test_a_call_waits_for_the_last_rank():
    """Of two ranks and three steps: each rank is the later one of a gradient."""
    gradients = [torch.nn.Parameter(torch.empty(2, device="meta")) for _ in range(2)]
    alone = {"ready": [[[1.0, 3.0]] * 3, [[2.0, 2.5]] * 3], "backward_ends": [[4.0] * 3, [3.5] * 3]}
    alone["optimizer_seconds"] = [[0.25] * 3] * 2
    result = {"candidates": [alone], "all_reduce": NETWORK | {"bytes_per_second": 8.0}}
    ways = {"04": (predict.ONE_EACH, True), "03": (None, False)}
    predicted = predict.predict(gradients, result, ways)
    assert predicted == {"04": 3.0 + 1.0 + 0.5 + 0.25, "03": 4.0 + 2.0 + 0.5 + 0.25}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_run(forked, tmp_path, device):
    words = [*harness.QUICK, "--device", device, "--json", tmp_path / "json"]
    status, output = forked(2, SCRIPT, *words, cwd=tmp_path)
    assert status == 0, output
    recorded = output_of(FOLDER / "reference_output.txt").replace("mini model", "nano model")
    table = harness.masked(recorded)[1:-1]  # the last line names a row
    assert harness.masked(output)[1:-1] == table, output
    result = harness.read_json(tmp_path / "json", "05_bucketed/predict")
    alone, *candidates = result["candidates"]
    assert [one["name"] for one in candidates] == list(predict.WAYS)
    calls = [alone["collectives_per_step"], *(one["collectives_per_step"] for one in candidates)]
    assert calls == [0, 15, 1, 15, 2, 2, 2, 1]
    for ready, ends in zip(alone["ready"], alone["backward_ends"], strict=True):
        assert max(map(max, ready)) <= max(ends) and {len(moments) for moments in ready} == {15}
    assert list(result["predicted"]) == list(predict.WAYS)


# Many ranks


def nano():
    *shape, batch_size, context_length = SIZES["nano"]
    with torch.device("meta"):
        model = predict.LanguageModel(*shape)
        return model, torch.zeros(batch_size, context_length, dtype=torch.int64)


def test_floating_point_operations_are_those_that_torch_counts():
    """But for the attention scores, which are left out."""
    model, tokens = nano()
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    ready = predict.backward_times(model, tokens.numel(), operations_per_second=1.0)
    assert 0.8 * counter.get_total_flops() < ready[-1] <= counter.get_total_flops()
    assert len(ready) == 15 and ready == sorted(ready)


def test_a_flat_ring():
    """03 after backward: 2(n-1)/n of the bytes, 2(n-1) times the latency."""
    model, _ = nano()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    compute = predict.backward_times(model, predict.GLOBAL_BATCH / 8, 1e12)[-1]
    update = predict.UPDATE * parameters
    ring = 2 * 7 / 8 * 4 * parameters / 1e9 + predict.CALL + 2 * 7 * predict.LATENCY
    kept = (compute + update) / (compute + update + ring)
    assert predict.efficiency(model, (None, False), 8.0, 1.0, 8) == pytest.approx(kept)


def test_extrapolation(forked, tmp_path):
    """The numbers that are recorded."""
    status, output = forked(1, SCRIPT, "--extrapolate", "10,400", cwd=tmp_path)
    assert status == 0, output
    recorded = output_of(FOLDER / "reference_output_extrapolate.txt")
    head, *tables = output.split("\n\n")
    assert head.splitlines()[-1] in recorded and len(tables) == 3
    for table in tables[:2]:
        assert table in recorded


@pytest.mark.parametrize(
    "option, value", [("--tflops", "inf"), ("--extrapolate", "nan"), ("--extrapolate", "")]
)
def test_wrong_input(refusal, option, value):
    said = refusal(predict.main, SCRIPT, option, value)
    assert said.startswith(f"argument {option}: ") and value in said
