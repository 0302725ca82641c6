"""05/predict: the event loop on cases worked out by hand, here and in step.html; a real run.

The numbers of the loop are sums of powers of two, which floating point adds up exactly.
"""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy
import predict
import pytest
import torch
from predict import Alone, Network, simulate
from rows import AFTER_BACKWARD, ONE_BY_ONE, WHEN_READY, BucketedDDP, Row, rows_of_stages
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tools import testing

FOLDER = Path(__file__).resolve().parent
NETWORK = Network(0.5, 16.0, calls_at_once=2, blocking_call_seconds=0.5)  # 8 bytes: 0.5 s
# Backward ends at second 4; a call is (bytes, the second when it is ready).
LATE = (8.0, 4.0)  # ready when backward ends, and half a second
CASES = [
    # Bytes take turns, o passes beside the second's: two take o and the bytes of both. Only then
    # the third begins.
    ([LATE] * 3, [(4.0, 5.0), (4.5, 5.5), (5.5, 6.5)]),
    ([LATE, (16.0, 1.0)], [(4.0, 5.0), (4.5, 6.0)]),  # launches keep their order
    ([(48.0, 1.0), (8.0, 3.0)], [(1.0, 4.5), (4.0, 5.0)]),  # the first delays the second
    ([(8.0, 1.0), (8.0, 3.75)], [(1.0, 2.0), (3.75, 4.75)]),  # the network is idle in between
]


def times(calls: list, launches: str, network: Network) -> list:
    """When each begins and arrives; backward ends at second 4."""
    return [(begins, arrived) for _, begins, arrived in simulate(calls, 4.0, launches, network)]


def test_calls_during_and_after_backward():
    """Two at a time, or each when the one before has arrived, or where the network takes one."""
    for calls, spans in CASES:
        assert times(calls, WHEN_READY, NETWORK) == spans
    early = [(8.0, 1.0)] * 3
    two = [(4.0, 5.0), (4.5, 5.5), (5.5, 6.5)]
    one = [(4.0, 5.0), (5.0, 6.0), (6.0, 7.0)]
    assert times(early, AFTER_BACKWARD, NETWORK) == two
    assert times(early, ONE_BY_ONE, NETWORK) == one
    assert times(early, AFTER_BACKWARD, NETWORK._replace(calls_at_once=1)) == one
    slower = NETWORK._replace(blocking_call_seconds=1.0)
    assert times(early[:2], ONE_BY_ONE, slower) == [(4.0, 5.5), (5.5, 7.0)]


def test_calls_during_backward_take_processor_time_from_it():
    """Each delays all gradients that come later; after backward there is nothing to delay."""
    network = NETWORK._replace(
        processor_per_call=0.25, processor_per_byte=1 / 32
    )  # 0.5 s for 8 bytes
    calls = [(8.0, 1.0), (8.0, 3.0), (8.0, 4.0)]
    launched = [span[0] for span in simulate(calls, 4.0, WHEN_READY, network)]
    assert launched == [1.0, 3.5, 5.0]
    for launches in (AFTER_BACKWARD, ONE_BY_ONE):
        slowed = simulate(calls, 4.0, launches, network)
        assert slowed == simulate(calls, 4.0, launches, NETWORK)


def gradients(*sizes_mb: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.empty(n * 2**18, device="meta")) for n in sizes_mb]


def test_buckets_are_those_of_stage_05_and_wait_for_their_last_gradient():
    for mb, expected in {0: [(1, 1), (2, 4), (3, 2)], None: [(6, 4)], 3: [(3, 4), (3, 2)]}.items():
        ready = dict(zip(gradients(1, 2, 3), [1.0, 4.0, 2.0], strict=True))
        calls = predict.calls_of(ready, mb)
        assert [(size / 2**20, ready) for size, ready in calls] == expected


def test_a_step():
    """One call of 2 MB after backward; torch's DDP has broadcast a buffer of 1 MB before."""
    network = Network(0.5, 2.0 * 2**20, blocking_call_seconds=0.25)
    ready = dict(zip(gradients(1, 1), [1.0, 4.0], strict=True))
    alone = Alone(ready, 0.5, 4.0, 0.25, network, buffers=(2**20,))
    assert alone.step(Row(None, None, AFTER_BACKWARD)) == 4.0 + 1.0 + 0.5 + 0.25
    exposed = 1.0 + 0.5 + 0.125 + 0.5
    assert alone.step_of_torch(2, network) == 4.0 + 0.25 + exposed


def test_an_unused_parameter_of_05_is_there_when_backward_is_over():
    """Of three buckets of 1 MB, 0.5 s each; torch's DDP knows at the end of forward, second 0.5."""
    network = Network(0.0, 2.0 * 2**20)
    last, middle, first = gradients(1, 1, 1)
    row = Row(None, 1, WHEN_READY)
    alone = Alone({last: 1.0, middle: 4.0, first: 3.0}, 0.5, 4.0, 0.25, network, (middle,))
    assert alone.step(row) == 4.0 + 0.5 + 0.5 + 0.25
    assert alone.step_of_torch(1, network) == 4.0 + 0.25


class Crossed(nn.Module):
    """It calls its layers, 4 MB each, in another order than it has them; perhaps not all."""

    def __init__(self, uses: list[int]):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(9))
        self.uses = uses

    def forward(self, x):
        for number in self.uses:
            x = self.layers[number](x)
        return x


def buckets_of_torch(uses: list[int], bucket_size_mb) -> tuple[list, list]:
    """Bytes of each bucket, as predicted and in the log of torch's DDP after two steps."""
    model = Crossed(uses)
    is_unused = len(uses) < len(model.layers)
    options = {"bucket_cap_mb": bucket_size_mb, "find_unused_parameters": is_unused}
    wrapped = DistributedDataParallel(model, **options)
    came = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(came.append)
    for _ in range(3):
        came.clear()
        wrapped(torch.ones(1, 1024)).sum().backward()
    moments = {parameter: moment for moment, parameter in enumerate(came)}
    ready = {parameter: moments.get(parameter, 0) for parameter in list(model.parameters())[::-1]}
    calls = predict.calls_of_torch(ready, bucket_size_mb, rebuilt=not is_unused)
    log = wrapped._get_ddp_logging_data()
    sizes = log["bucket_sizes" if is_unused else "rebuilt_bucket_sizes"]
    return [size for size, _ in calls], [int(size) for size in sizes.split(",")]


def test_buckets_are_those_of_torch(ranks):
    """By default and with a size; without the last layer they stay those of the model."""
    for uses in ([4, 0, 8, 2, 6, 1, 3, 7, 5], [4, 0, 2, 6, 1, 3, 7, 5]):
        for bucket_size_mb in (None, 5, 100):
            for predicted, of_torch in ranks(2).run(buckets_of_torch, uses, bucket_size_mb):
                assert predicted == of_torch and len(predicted) > (bucket_size_mb != 100)


def launched_in_backward(uses: list[int]) -> tuple[int, int]:
    """How many buckets of 05 are launched before backward ends: predicted, and as it is."""
    model = Crossed(uses)
    wrapped = BucketedDDP(model, bucket_size_mb=5)
    came = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(came.append)
    wrapped(torch.ones(1, 1024)).sum().backward()
    launched = len(wrapped.works)
    wrapped.finish_gradient_synchronization()
    moments = {parameter: moment for moment, parameter in enumerate(came)}
    ends = len(came)
    ready = {p: moments.get(p, ends) for p in list(model.parameters())[::-1]}
    calls = predict.calls_of(ready, 5)
    spans = simulate(calls, ends, WHEN_READY, Network(0.0, float("inf")))
    return sum(begins < ends for _, begins, _ in spans), launched


def test_buckets_that_05_launches_in_backward(ranks):
    """All nine; without a layer those before the one with its bias; without the last layer none."""
    for uses, expected in ((range(9), 9), ([0, 1, 2, 3, 5, 6, 7, 8], 3), (range(8), 0)):
        for predicted, launched in ranks(2).run(launched_in_backward, list(uses)):
            assert predicted == launched == expected


def asked_of_the_page(*expressions: str) -> list:
    """Return what expressions are on the page, with its first script."""
    page = (FOLDER / "step.html").read_text(encoding="utf-8")
    model = re.search(r"<script.*?>(.*?)</script>", page, re.DOTALL)[1]
    program = f"{model}\nconsole.log(JSON.stringify([{', '.join(expressions)}]))"
    command = [shutil.which("node") or pytest.skip("no node"), "-e", program]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


NAMES_ON_THE_PAGE = "callSeconds bytesPerSecond callsAtOnce blockingCallSeconds".split()
NAMES_ON_THE_PAGE += ["processorPerCall", "processorPerByte"]
MORE = 0.0045, 0.001, 6e-10  # of a network


def test_the_page_computes_the_same():
    """Every row on random calls, one and two at once; the buckets; the ring.

    The ring is of a network of 1 GB/s and 1 ms, and of 8 ranks.
    """
    torch.manual_seed(0)
    calls = torch.rand(30, 2).mul(torch.tensor([1e7, 0.3])).tolist()
    ways = list(itertools.product((1, 2), (WHEN_READY, AFTER_BACKWARD, ONE_BY_ONE)))
    asked = ["DATA.gradients", "ring(8, 1e9, 0.001, 1)"]
    asked += [f"callsOf(DATA.gradients, {mb})" for mb in ("0", "1", "5", "Infinity")]
    asked += [f"callsOfTorch(DATA.gradients, {mb})" for mb in (1, 5)]
    for calls_at_once, launches in ways:
        kind = {"overlap": launches == WHEN_READY, "blocking": launches == ONE_BY_ONE}
        of_page = dict(zip(NAMES_ON_THE_PAGE, (0.0041, 1.25e8, calls_at_once, *MORE), strict=True))
        asked.append(f"simulate({calls}, 0.3, {json.dumps(kind)}, {json.dumps(of_page)})")
    data, ring, *said = asked_of_the_page(*asked)
    # 14 steps of two delays, and 14/8 of the bytes.
    assert 0.028 < ring["callSeconds"] < ring["blockingCallSeconds"] < 0.029
    assert ring["bytesPerSecond"] == pytest.approx(1e9 / 1.75)
    assert ring.keys() == {*NAMES_ON_THE_PAGE}
    here = predict.ring(8, 1e9, 0.002, Network(0.0, 1.0, 1), ranks_here=2)
    assert ring["callSeconds"] == pytest.approx(here.call_seconds)
    assert ring["bytesPerSecond"] == pytest.approx(here.bytes_per_second)
    assert ring["blockingCallSeconds"] == pytest.approx(here.blocking_call_seconds)
    sizes, ready = zip(*data, strict=True)
    parameters = [torch.nn.Parameter(torch.empty(n // 4, device="meta")) for n in sizes]
    ready = dict(zip(parameters, ready, strict=True))
    here = [predict.calls_of(ready, mb) for mb in (0, 1, 5, None)]
    here += [predict.calls_of_torch(ready, mb) for mb in (1, 5)]
    here += [simulate(calls, 0.3, way, Network(0.0041, 1.25e8, n, *MORE)) for n, way in ways]
    assert said == [[list(times) for times in of_calls] for of_calls in here]


def test_zero2_on_the_page():
    """Four buckets. Forward takes 4 seconds, backward 8; half a call is 0.5 s and 1 s for bytes.

    Gathers arrive at seconds 1.5, 3, 4.5 and 6; a forward that never waits needs one each second.
    """
    calls = [[32.0, 6.0], [32.0, 8.0], [32.0, 10.0], [32.0, 12.0]]
    network = dict(zip(NAMES_ON_THE_PAGE, (1.0, 16.0, 1, 1.0, 0.0, 0.0), strict=True))
    [zero2] = asked_of_the_page(f"simulateZero2({calls}, 4, 12, {json.dumps(network)})")
    assert [span[2] for span in zero2["gathers"]] == [1.5, 3.0, 4.5, 6.0]
    assert zero2["waits"] == [[0.0, 1.5], [2.5, 3.0], [4.0, 4.5], [5.5, 6.0]]
    assert zero2["late"] == 3.0
    half = Network(0.5, 32.0, calls_at_once=1)
    spans = simulate([(size, ready + 3.0) for size, ready in calls], 15.0, WHEN_READY, half)
    assert [tuple(span) for span in zero2["spans"]] == spans


def test_the_page_in_a_browser(tmp_path):
    """From a file: its sliders move, a preset hides some, and nothing is fetched."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        pytest.skip("no browser")
    try_it = """<script>
    const before = document.getElementById("rows").innerText;
    const slider = document.getElementById("rate");
    slider.value = 0;
    slider.dispatchEvent(new Event("input"));
    const moved = document.getElementById("rows").innerText !== before;
    const isShown = (label) => label.getBoundingClientRect().height > 0;
    window.addEventListener("hashchange", () => {
      const shown = [...document.querySelectorAll("label")].filter(isShown).length;
      const bars = document.querySelectorAll("svg rect[width]").length;
      const fetched = performance.getEntriesByType("resource").length;
      document.title = JSON.stringify({ moved, shown, bars: bars > 99, fetched });
    });
    location.hash = "#02";
    </script>"""
    page = (FOLDER / "step.html").read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(page + try_it, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    options += ["--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path}/page.html"]
    run = subprocess.run([browser, *options], capture_output=True)
    title = re.search(r"<title>(.*)</title>", run.stdout.decode())[1]
    assert json.loads(title) == {"moved": True, "shown": 3, "bars": True, "fetched": 0}


def test_run(forked, tmp_path):
    words = [*testing.QUICK, "--device", "cpu", "--json", "json"]
    status, output = forked(2, FOLDER / "predict.py", *words, cwd=tmp_path)
    assert status == 0, output
    result = testing.read_json(tmp_path / "json", "05_bucketed/predict")
    alone, *rows = result["rows"]
    assert [one["name"] for one in rows] == list(rows_of_stages(5.0))
    for ready, ends in zip(alone["ready"], alone["backward_ends"], strict=True):
        assert max(map(max, ready)) <= max(ends) and {len(moments) for moments in ready} == {15}
    assert list(result["predicted"]) == list(rows_of_stages(5.0))
    assert result["all_reduce"]["processor_per_call"] > 0
    testing.assert_png(tmp_path / "gradients.png")
    data = re.search(r"const DATA = (.*);", (tmp_path / "step.html").read_text())[1]
    assert len(json.loads(data)["gradients"]) == 15


MINE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)
        self.unused = nn.Linear(8, 8)

    def forward(self, x, *, scale):
        return self.head(nn.functional.relu(self.norm(self.frozen(x)), inplace=True)) * scale

def build():
    x, y = torch.randn(4, 8), torch.tensor([0, 1, 0, 1])
    return Model(), lambda model: nn.functional.cross_entropy(model(x, scale=2), y)

def loss_of_each():
    return Model(), lambda model: model(torch.randn(4, 8), scale=2)
"""
GRADIENT_BYTES = 4 * (8 + 8 + 8 * 2 + 2 + 8 * 8 + 8)  # of norm, head and unused
ROWS = ["no communication", "no communication again", "torch DDP", "torch DDP, 5 MB", "BucketedDDP"]


def of_the_last_rank(samples: list[list[float]]) -> float:
    return float(numpy.median(numpy.max(samples, axis=0)))


def test_a_model_of_the_users_own(forked, tmp_path):
    """Four of its six gradients come; 05 sends them with the others when backward is over.

    Then all that is printed, and the page.
    """
    (tmp_path / "mine.py").write_text(MINE)
    words = "--mine mine.py:build --steps 2 --warmup 1 --device cpu --json json".split()
    status, output = forked(
        2, testing.OVER, "1gbit,1ms", FOLDER / "predict.py", *words, cwd=tmp_path
    )
    assert status == 0, output
    result = testing.read_json(tmp_path / "json", "05_bucketed/predict")
    alone, again, *rows = result["rows"]
    assert [row["name"] for row in result["rows"]] == ROWS
    assert {len(moments) for moments in alone["ready"][0]} == {4}
    assert list(result["predicted"]) == ROWS[2:]
    slowest = max(result["predicted"].values())
    assert 0.004 < slowest < 1 and all(name in output for name in ROWS[2:])
    ends, optimizer = [
        of_the_last_rank(alone[key]) for key in ("backward_ends", "optimizer_seconds")
    ]
    network = result["all_reduce"]
    call = network["call_seconds"] + GRADIENT_BYTES / network["bytes_per_second"]
    assert result["predicted"]["BucketedDDP"] == pytest.approx(ends + call + optimizer, rel=1e-9)
    networks = [(row["network"], row["ranks"]) for row in result["calculated"]]
    names = ["1gbit,1ms", "10gbit,50us", "100gbit,10us"]
    assert networks == [(name, ranks) for name in names for ranks in (2, 8, 64)]
    data = re.search(r"const DATA = (.*);", (tmp_path / "step.html").read_text())[1]
    data = json.loads(data)
    assert data["model"] == "mine.py:build" and len(data["gradients"]) == 6


def test_one_rank_has_only_what_is_calculated(forked, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    words = "--mine mine.py:build --steps 1 --warmup 1 --device cpu --json json".split()
    status, output = forked(1, FOLDER / "predict.py", *words, cwd=tmp_path)
    assert status == 0, output
    result = testing.read_json(tmp_path / "json", "05_bucketed/predict")
    assert len(result["calculated"]) == 6 and "predicted" not in result
    assert all(0 < row["speed-up"] <= row["ranks"] for row in result["calculated"])


@pytest.mark.parametrize("name", ["nowhere", "loss_of_each"])
def test_what_is_no_model_is_one_line(refusal, tmp_path, name):
    (tmp_path / "mine.py").write_text(MINE)
    mine = f"{tmp_path}/mine.py:{name}"
    said = refusal(predict.main, FOLDER / "predict.py", "--mine", mine, "--device", "cpu")
    assert said.startswith("argument --mine: ") and mine in said
