"""05/predict: the model of a step, against cases that are worked out by hand.

The numbers are sums of powers of two wherever possible, which floating point adds up exactly.
"""

import dataclasses
import itertools
import math
import random
import sys
from pathlib import Path

import pytest
import torch

from common.testing import harness

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import bucketed  # noqa: E402
import simulate as model  # noqa: E402
from simulate import Network, Step, simulate  # noqa: E402

RUNGS = ["02", "03", "04", "05"]
SYNCHRONOUS = ["02", "03"]
MB = 2**20
FREE = Network(ranks=2, hop=0.0, bandwidth=math.inf)
# A call of two ranks takes 0.5 s of latency, and 0.125 s and bytes / 16 of transfer.
NETWORK = Network(ranks=2, hop=0.25, bandwidth=16.0, call=0.125)


def step(*gradients, **costs) -> Step:
    """1 s of forward, 4 s of backward, 0.5 s of optimizer."""
    return Step(1.0, 4.0, 0.5, list(gradients), **costs)


def calls(result) -> list[tuple[float, float]]:
    """Start and end of the all-reduces, in launch order."""
    found = [block for block in result.timeline if block[0].startswith("all-reduce")]
    return [times for _, *times in sorted(found, key=lambda block: int(block[0].split()[1]))]


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("ready", [1.0, 4.0])
def test_one_gradient(rung, ready):
    """Backward, which ends at 5, hides it from 2 on, or nothing does."""
    result = simulate(step((8.0, ready)), NETWORK, rung)
    hidden = ready == 1.0 and rung not in SYNCHRONOUS
    exposed = 0.0 if hidden else 1.125
    assert calls(result) == [[2.0, 3.125] if hidden else [5.0, 6.125]]
    assert (result.step_seconds, result.exposed_seconds) == (5.5 + exposed, exposed)


def test_timeline():
    assert simulate(step((8.0, 1.0)), NETWORK, "05").timeline == [
        ("forward", 0.0, 1.0),
        ("backward", 1.0, 2.0),
        ("all-reduce 1", 2.0, 3.125),
        ("backward", 2.0, 5.0),
        ("optimizer", 5.0, 5.5),
    ]


@pytest.mark.parametrize(
    "rung, calls_at_once, exposed",
    [
        ("02", 2, 3 * 0.625),
        ("03", 2, 0.625),
        ("04", None, 0.5 + 3 * 0.125),
        ("04", 1, 3 * 0.625),  # one after another
        ("04", 2, 0.5 + 2 * 0.125 + 0.5 + 0.125),  # two share the network, then comes the third
        ("05", 2, 0.5 + 2 * 0.125),  # two buckets: the first has room for no second gradient
    ],
)
def test_latency_alone(rung, calls_at_once, exposed):
    network = dataclasses.replace(NETWORK, bandwidth=math.inf, calls_at_once=calls_at_once)
    result = simulate(step((MB, 4.0), (MB, 4.0), (MB, 4.0)), network, rung)
    assert (result.step_seconds, result.exposed_seconds) == (5.5 + exposed, exposed)


@pytest.mark.parametrize("calls_at_once", [1, 2, None])
@pytest.mark.parametrize("rung", RUNGS)
def test_bandwidth_alone(rung, calls_at_once):
    """However many calls: all bytes have to pass."""
    network = Network(2, 0.0, 16.0, calls_at_once=calls_at_once)
    result = simulate(step((8.0, 4.0), (4.0, 4.0), (20.0, 4.0)), network, rung)
    assert (result.step_seconds, result.exposed_seconds) == (7.5, 2.0)


def test_two_buckets():
    """Of 1 and 25 MB at 8 MB/s: the first is hidden, the second waits for its last gradient."""
    network = Network(2, 0.25, 8.0 * MB)
    result = simulate(step((MB, 1.0), (10 * MB, 2.0), (15 * MB, 4.0)), network, "05")
    assert calls(result) == [[2.0, 2.625], [5.0, 5.0 + 0.5 + 3.125]]
    assert (result.step_seconds, result.exposed_seconds) == (5.5 + 3.625, 3.625)
    result = simulate(step((MB, 1.0), (10 * MB, 2.0), (15 * MB, 3.5)), network, "05")
    assert calls(result)[1] == [4.5, 8.125] and result.exposed_seconds == 3.125


def test_calls_in_flight_share_the_bandwidth():
    """2 s each: one is alone for a second, and has the other one beside it for the next two."""
    network = Network(2, 0.0, 4.0)
    two = step((8.0, 2.0), (8.0, 3.0))
    result = simulate(two, network, "04")
    assert calls(result) == [[3.0, 6.0], [4.0, 7.0]] and result.exposed_seconds == 2.0
    result = simulate(two, dataclasses.replace(network, calls_at_once=1), "04")
    assert calls(result) == [[3.0, 5.0], [5.0, 7.0]] and result.exposed_seconds == 2.0


def test_latency_of_a_call_passes_while_another_transfers():
    """The second launch is at 3.5; its 0.5 s of latency ends when the first has half a second."""
    network = Network(2, 0.25, 4.0)
    result = simulate(step((4.0, 2.0), (4.0, 2.5)), network, "04")
    assert calls(result) == [[3.0, 5.0], [3.5, 5.5]]  # 3.5…4.0 alone, 4.0…5.0 shared, 5.0…5.5


@pytest.mark.parametrize(
    "ready, call, exposed",
    [
        (2.0, [3.0, 5.0], 0.0),  # 2 s at half speed move 1 s of the 2 of backward
        (3.0, [4.0, 6.0], 0.0),  # both end at once
        (3.5, [4.5, 6.0], 0.5),  # backward ends at 5.5; the other half second is undisturbed
        (4.0, [5.0, 6.0], 1.0),
    ],
)
def test_interference_of_a_half(ready, call, exposed):
    network = Network(2, 0.0, 8.0, compute_speed=0.5, transfer_speed=0.5)
    result = simulate(step((8.0, ready)), network, "04")
    assert calls(result) == [call]
    assert (result.step_seconds, result.exposed_seconds) == (6.5, exposed)


def test_interference_slows_compute_during_latency_and_not_the_latency():
    network = Network(2, 0.5, math.inf, compute_speed=0.5, transfer_speed=0.25)
    result = simulate(step((8.0, 2.0)), network, "04")
    assert calls(result) == [[3.0, 4.0]] and result.step_seconds == 6.0
    result = simulate(step((8.0, 2.0)), dataclasses.replace(network, call=0.25), "04")
    assert calls(result) == [[3.0, 5.0]] and result.step_seconds == 6.5


def test_synchronous_rungs_know_no_interference():
    slow = dataclasses.replace(NETWORK, compute_speed=0.5, transfer_speed=0.25)
    some = step((8.0, 1.0), (4.0, 2.0), copy_bandwidth=32.0)
    for rung in SYNCHRONOUS:
        assert simulate(some, NETWORK, rung) == simulate(some, slow, rung)


@pytest.mark.parametrize("ranks, hops, traffic", [(2, 2, 1.0), (4, 6, 1.5), (8, 14, 1.75)])
@pytest.mark.parametrize("together", [1, 2, 64])
def test_calls_at_once_add_up(together, ranks, hops, traffic):
    """2(n-1)·hop + k·call + 2(n-1)/n · (bytes of all)/bandwidth."""
    network = dataclasses.replace(NETWORK, ranks=ranks, calls_at_once=None)
    result = simulate(step(*[(8.0, 4.0)] * together), network, "04")
    assert result.exposed_seconds == hops * 0.25 + together * (0.125 + traffic * 8.0 / 16.0)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("gradients", [[], [(8.0, 1.0), (MB, 4.0)]])
def test_one_rank_sends_nothing(rung, gradients):
    result = simulate(step(*gradients), dataclasses.replace(NETWORK, ranks=1), rung)
    assert (result.step_seconds, result.exposed_seconds) == (5.5, 0.0)
    assert calls(result) == []


@pytest.mark.parametrize(
    "rung, step_seconds, exposed",
    [
        ("02", 5.5 + 3.0, 3.0),  # scaled, one pass
        ("03", 5.5 + 6.0, 6.0),  # packed and scaled, unpacked
        ("04", 5.5 + 3.0 + 2 * 0.25 + 2 * 0.5, 0.0),  # a hook that scales, within backward
        ("05", 5.5 + 3.0 + 2 * 0.25 + 0.5, 0.0),  # a hook that scales into the only bucket
    ],
)
def test_passes_over_memory_hooks_and_launches(rung, step_seconds, exposed):
    some = step((8.0, 2.0), (16.0, 4.0), copy_bandwidth=8.0, hook=0.25, launch=0.5)
    result = simulate(some, FREE, rung)
    assert (result.step_seconds, result.exposed_seconds) == (step_seconds, exposed)


def test_a_hook_delays_what_comes_after_it():
    """Ready at 3, and launched a second later, for packing; backward goes on by then."""
    result = simulate(step((8.0, 2.0), copy_bandwidth=8.0), NETWORK, "05")
    assert calls(result) == [[4.0, 5.125]] and ("hook", 3.0, 4.0) in result.timeline
    assert (result.step_seconds, result.exposed_seconds) == (6.5, 0.0)


def test_launches_keep_their_order():
    """The first of the order is ready last: 04 launches both then, and nothing is hidden."""
    result = simulate(step((8.0, 4.0), (16.0, 1.0)), Network(2, 0.0, 16.0), "04")
    assert calls(result) == [[5.0, 6.0], [5.0, 6.5]]  # shared until the smaller one is through
    result = simulate(step((8.0, 4.0), (16.0, 1.0)), Network(2, 0.0, 16.0), "05", math.inf)
    assert calls(result) == [[5.0, 6.5]]


def test_buckets_are_those_of_bucketed_py():
    numbers = random.Random(0)
    for _ in range(50):
        counts = [numbers.choice([1, 7, 100, 1000, 5000]) for _ in range(numbers.randint(1, 40))]
        parameters = [torch.nn.Parameter(torch.empty(n, device="meta")) for n in counts]
        for megabytes in (1e-6, 0.001, 0.004, 0.02, 0.1, math.inf):
            theirs = bucketed.fill_buckets(parameters, megabytes)
            ours = model.fill_buckets([4 * n for n in counts], megabytes * MB)
            assert [len(bucket) for bucket in ours] == [len(bucket) for bucket in theirs]
            assert list(itertools.chain(*ours)) == list(range(len(counts)))


def some_step(numbers: random.Random) -> Step:
    moments = sorted(numbers.uniform(0.0, 0.1) for _ in range(30))
    if numbers.random() < 0.5:
        numbers.shuffle(moments)
    gradients = [(numbers.choice([512, 65536, 3 * MB]), moment) for moment in moments]
    return Step(0.05, 0.1, 0.01, gradients, copy_bandwidth=8e9, hook=1e-5)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("seed", range(10))
def test_what_holds_of_every_step(rung, seed):
    numbers = random.Random(seed)
    given = some_step(numbers)
    calls_at_once = numbers.choice([1, 2, 5, None])
    network = Network(numbers.choice([2, 3, 64]), 2e-5, 1e9, 5e-5, calls_at_once, 0.8, 0.7)
    result = simulate(given, network, rung, 5.0)
    assert result == simulate(given, network, rung, 5.0)  # deterministic, to the bit
    compute = [block for block in result.timeline if not block[0].startswith("all-reduce")]
    assert compute[0][1] == 0.0 and compute[-1][2] == result.step_seconds
    assert all(before[2] == after[1] for before, after in itertools.pairwise(compute))
    most = calls_at_once or len(given.gradients)
    for moment, _ in calls(result):
        assert sum(start <= moment < end for start, end in calls(result)) <= most
    starts = [start for start, _ in calls(result)]
    assert starts == sorted(starts)
    buckets = len(model.fill_buckets([size for size, _ in given.gradients], 5 * MB))
    assert len(starts) == {"02": 30, "03": 1, "04": 30, "05": buckets}[rung]

    # Work that is done at one lane at a time is a bound from above; either lane's, from below.
    traffic = 2 * (network.ranks - 1) / network.ranks * sum(size for size, _ in given.gradients)
    transfer = len(starts) * network.call + traffic / network.bandwidth
    latency = len(starts) * 2 * (network.ranks - 1) * network.hop
    program = model.program(given, rung, 5.0)
    compute_seconds = sum(work for what, work in program if what not in ("launch", "wait"))
    assert result.step_seconds >= max(compute_seconds, given.forward + transfer) - 1e-12
    assert result.step_seconds <= compute_seconds / 0.8 + latency + transfer / 0.7 + 1e-12


def test_fixed_cost_of_a_call_has_a_speed_of_its_own_beside_compute():
    """0.5 s of latency, 0.125 s at a quarter of the speed, 0.5 s of transfer at half of it."""
    network = dataclasses.replace(NETWORK, transfer_speed=0.5, call_speeds=(1.0, 0.25))
    result = simulate(step((8.0, 1.0)), network, "04")
    assert calls(result) == [[2.0, 2.0 + 0.5 + 0.5 + 1.0]] and result.step_seconds == 5.5
    result = simulate(step((8.0, 4.0)), network, "04")  # beside no compute: as ever
    assert result.exposed_seconds == 1.125


def test_compute_beside_a_call_and_beside_its_bytes():
    """Beside: 0.5 s of latency, 0.5 s of the call at 0.5, 0.5 s of bytes at 0.25: 0.375 on average.

    So of the 1.5 s that the call is in flight, 0.5625 s of compute are done.
    """
    network = dataclasses.replace(NETWORK, compute_speed=0.25, call_speeds=(0.5, 0.25))
    result = simulate(step((8.0, 1.0)), network, "04")
    assert calls(result) == [[2.0, 3.5]] and result.step_seconds == 5.5 + 1.5 - 0.5625


def test_command_line(monkeypatch, capsys):
    words = ["--ranks", "4", "--bucket-size-mb", "10", "--hop", "100", "--bandwidth", "3"]
    monkeypatch.setattr(sys, "argv", ["simulate.py", *words])
    model.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:3] for line in lines[:-2:3]] == ["02:", "03:", "04:", "05:"]
    assert all(len(line) <= 100 for line in lines)
    network = [line.split(maxsplit=1)[1] for line in lines[2:-2:3]]
    assert network[1].strip("1") == "" and set("123456") <= set(network[0]) & set(network[2])


@pytest.mark.parametrize("option, value", [("--ranks", "0"), ("--bandwidth", "nan")])
def test_wrong_input(option, value, monkeypatch, capsys):
    harness.check_wrong_input(model.main, Path(model.__file__), option, value, monkeypatch, capsys)
