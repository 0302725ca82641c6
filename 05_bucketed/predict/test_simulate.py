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

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import bucketed  # noqa: E402
import simulate as model  # noqa: E402
from simulate import Network, Rank, Step, simulate  # noqa: E402

RUNGS = ["02", "03", "04", "05"]
MB = 2**20
ALONE = 5.5  # seconds of the step below
# A call of two ranks takes 0.5 s of latency, and 0.125 s and bytes / 16 of transfer.
NETWORK = Network(ranks=2, hop=0.25, bandwidth=16.0, call=0.125)


def step(*gradients, **costs) -> Step:
    """1 s of forward, 4 s of backward, 0.5 s of optimizer."""
    return Step(1.0, 4.0, 0.5, list(gradients), **costs)


def seconds(given: Step, network: Network, rung: str, bucket_size_mb: float = 25.0) -> float:
    """By which a step of the rung is longer than alone."""
    return simulate(given, network, rung, bucket_size_mb) - ALONE


def changed(network: Network, **fields) -> Network:
    return dataclasses.replace(network, **fields)


# A rank


def ends(network: Network, *works) -> list[float]:
    """The clock after each work: ("compute", seconds), ("launch", bytes), or ("wait",)."""
    rank = Rank(network)
    found = []
    for name, *arguments in works:
        getattr(rank, name)(*arguments)
        found.append(rank.now)
    return found


def test_a_call_goes_on_beside_compute_until_it_is_waited_for():
    works = [("compute", 1.0), ("launch", 8.0), ("compute", 0.5), ("wait",), ("wait",)]
    assert ends(NETWORK, *works) == [1.0, 1.0, 1.5, 2.125, 2.125]


def test_calls_in_flight_share_the_bandwidth():
    """2 s each: one is alone for a second, and has the other one beside it for the next two."""
    network = Network(2, 0.0, 4.0)
    rank = Rank(network)
    for _ in range(2):
        rank.launch(8.0)
        rank.compute(1.0)
    rank.compute(0.75)
    assert len(rank.calls) == 2  # one after another, the first were over at 2.0
    rank.compute(0.25)
    assert len(rank.calls) == 1 and rank.now == 3.0
    rank.wait()
    assert rank.now == 4.0


def test_calls_take_their_turn_in_launch_order():
    rank = Rank(Network(2, 0.0, 8.0, calls_at_once=1))
    rank.launch(8.0)
    rank.launch(16.0)
    rank.compute(1.0)
    assert [call.seconds_left for call in rank.calls] == [2.0]


def test_latency_of_a_call_passes_while_another_transfers():
    """The second latency ends half a second before the first transfer; then they share."""
    works = [("launch", 4.0), ("compute", 0.5), ("launch", 4.0), ("wait",)]
    assert ends(Network(2, 0.25, 4.0), *works)[-1] == 2.5


@pytest.mark.parametrize(
    "before, computed, waited",
    [
        (0.0, 3.0, 3.0),  # the call is over at 2.0; half of compute is left
        (1.0, 3.0, 3.0),  # both end at once
        (1.5, 2.5, 3.0),  # the other half of the transfer is undisturbed
        (2.0, 2.0, 3.0),
    ],
)
def test_compute_and_transfer_slow_each_other(before, computed, waited):
    network = Network(2, 0.0, 8.0, compute_speed=0.5, transfer_speed=0.5)
    works = [("compute", before), ("launch", 8.0), ("compute", 2.0 - before), ("wait",)]
    assert ends(network, *works)[-2:] == [computed, waited]


def test_compute_is_slowed_during_latency_and_the_latency_is_not():
    network = Network(2, 0.5, math.inf, compute_speed=0.5, transfer_speed=0.25)
    assert ends(network, ("launch", 8.0), ("compute", 2.0)) == [0.0, 2.5]
    network = changed(network, call=0.25)  # one more second in which compute has half its speed
    assert ends(network, ("launch", 8.0), ("compute", 2.0)) == [0.0, 3.0]


def test_the_fixed_cost_of_a_call_has_speeds_of_its_own():
    """0.5 s of latency, 0.5 s of the call with compute at 0.5, 0.5 s of bytes with it at 0.25.

    So of the 1.5 s that the call is in flight, 0.375 of each are computed.
    """
    network = changed(NETWORK, compute_speed=0.25, call_speeds=(0.5, 0.25))
    assert ends(network, ("launch", 8.0), ("compute", 2.0)) == [0.0, 1.5 + 2.0 - 0.5625]
    assert ends(network, ("launch", 8.0), ("wait",)) == [0.0, 1.125]  # beside no compute: as ever


# A step


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("ready", [1.0, 4.0])
def test_one_gradient(rung, ready):
    """It is ready at second 2 or 5; backward, which ends at 5, hides it, or nothing does."""
    hidden = ready == 1.0 and rung in ("04", "05")
    assert seconds(step((8.0, ready)), NETWORK, rung) == (0.0 if hidden else 1.125)


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
    network = changed(NETWORK, bandwidth=math.inf, calls_at_once=calls_at_once)
    assert seconds(step((MB, 4.0), (MB, 4.0), (MB, 4.0)), network, rung) == exposed


@pytest.mark.parametrize("last, exposed", [(4.0, 3.625), (3.5, 3.125)])
def test_two_buckets(last, exposed):
    """Of 1 and 25 MB at 8 MB/s: the first is hidden, the second waits for its last gradient."""
    given = step((MB, 1.0), (10 * MB, 2.0), (15 * MB, last))
    assert seconds(given, Network(2, 0.25, 8.0 * MB), "05") == exposed


def test_launches_keep_their_order():
    """The first of the order is ready last: nothing is hidden."""
    given = step((8.0, 4.0), (16.0, 1.0))
    for rung, size in (("04", None), ("05", math.inf)):
        assert seconds(given, Network(2, 0.0, 16.0), rung, size) == 1.5


@pytest.mark.parametrize("ranks, hops, traffic", [(2, 2, 1.0), (4, 6, 1.5), (8, 14, 1.75)])
@pytest.mark.parametrize("together", [1, 2, 64])
def test_calls_at_once_add_up(together, ranks, hops, traffic):
    """2(n-1)·hop + k·call + 2(n-1)/n · (bytes of all)/bandwidth."""
    network = changed(NETWORK, ranks=ranks, calls_at_once=None)
    exposed = hops * 0.25 + together * (0.125 + traffic * 8.0 / 16.0)
    assert seconds(step(*[(8.0, 4.0)] * together), network, "04") == exposed


@pytest.mark.parametrize(
    "rung, longer",
    [
        ("02", 3.0),  # scaled, one pass
        ("03", 6.0),  # packed and scaled, unpacked
        ("04", 3.0 + 2 * 0.25 + 2 * 0.5),  # a hook that scales
        ("05", 3.0 + 2 * 0.25 + 0.5),  # a hook that scales into the only bucket
    ],
)
def test_passes_over_memory_hooks_and_launches(rung, longer):
    given = step((8.0, 2.0), (16.0, 4.0), copy_bandwidth=8.0, hook=0.25, launch=0.5)
    assert seconds(given, Network(2, 0.0, math.inf), rung) == longer


def test_a_hook_delays_the_launch():
    """Ready half a second before the end of backward, and launched a second later, for packing."""
    assert seconds(step((8.0, 3.5), copy_bandwidth=8.0), NETWORK, "05") == 1.0 + 0.625


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
