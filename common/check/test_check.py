"""The checks on classes that are right and wrong, the command, and the page about wrong runs.

Our four wrappers and torch's DDP: common/testing/test_wrappers.py.
"""

import json
import re
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from common import setup
from common.check import checks_of_fsdp, checks_of_optimizers, checks_of_wrappers, mistakes
from common.check.check import kind_of
from common.testing import harness
from common.testing.harness import ROOT, failed, judged

sys.path[:0] = [str(ROOT / "06_sharded_optimizer" / "fsdp"), str(ROOT / "06_sharded_optimizer")]

from fsdp import FSDP  # noqa: E402
from sharded_optimizer import ShardedOptimizer  # noqa: E402

CHECK = ROOT / "common" / "check" / "check.py"
PAGE = (ROOT / "common" / "docs" / "wrong.md").read_text()
OF_WRAPPERS = [*checks_of_wrappers.HAS_TO_HOLD, *checks_of_wrappers.BEYOND]
OF_WRAPPERS.remove(checks_of_wrappers.keeps_buffers_equal)  # which no wrapper of ours does
PARAMETERS = "starts_with_the_parameters_of_rank_0"
BUFFERS = "starts_with_the_buffers_of_rank_0"
ONE_FINISH = {"accumulates_before_one_finish"}  # of hooks: the first all-reduces are in flight
ALSO_RANKS = {check.__name__ for check in OF_WRAPPERS}  # what a gradient that no rank shares fails
ALSO_RANKS -= {PARAMETERS, BUFFERS, "waits_for_the_other_ranks", "accumulates_with_no_sync"}
GRADIENTS = ALSO_RANKS - {"ranks_stay_equal"}
LAST_UNUSED = {"skips_what_nobody_uses"}  # its last parameter, for which hooks before it wait
HANGS = ["OrderOfArrival", "SkipsUnused"]  # where one rank uses a parameter alone: see below
FAILS = {  # class: what it fails, and what the first failure says
    "Right": (set(), ""),
    "RightHooks": (ONE_FINISH, ""),
    "SumForMean": (GRADIENTS, "summed, not averaged"),
    "NoBroadcast": ({PARAMETERS, BUFFERS}, "broadcast the parameters"),
    "ForgetsBuffers": ({BUFFERS}, "broadcast the buffers"),
    "HookBeforeGradient": (ALSO_RANKS - LAST_UNUSED, "never reduced"),
    "OrderOfArrival": ({"keeps_one_order_on_any_branch", *ONE_FINISH}, "call in different orders"),
    "LeavesLastOut": (ALSO_RANKS - LAST_UNUSED, "never reduced"),
    "TiedTwice": ({"reduces_tied_weights_once"}, "divided twice"),
    "SkipsUnused": (set(), ""),
    "FailsWhenFrozen": ({"leaves_frozen_parameters_alone", *ONE_FINISH}, "see mistakes.py"),
    "RoundsToFloat32": (GRADIENTS, "rounded to float32"),
    "OverwritesAccumulated": ({"accumulates_without_no_sync", *ONE_FINISH}, "overwritten"),
    "SwapsGradients": (GRADIENTS, "another order than they were taken"),
    "AfterBackward": (set(), ""),
}
STEPS = {check.__name__ for check in checks_of_optimizers.HAS_TO_HOLD}  # what a wrong step fails
STEPS -= {"shares_the_state_out", "zeroes_all_gradients"}


class Classifier(nn.Module):
    """Of 64 pixels. Two weights are tied, a buffer is used, ranks go through two layers in turn."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(64, 64)
        self.right = nn.Linear(64, 64)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.left.weight
        self.last = nn.Linear(64, 10)
        self.register_buffer("scale", torch.full((), 0.2))

    def forward(self, x, rank):
        layers = [self.left, self.right] if rank % 2 == 0 else [self.right, self.left]
        x = self.scale * x
        for layer in [*layers, self.tied]:
            x = layer(x).tanh()
        return self.last(x)


def consequences(mistake):
    """does the loss fall, are the ranks equal, are the weights those of one process?"""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    images, labels, *_ = setup.load_images(None, False)

    def build(seed):
        torch.manual_seed(seed)
        model = Classifier().double()
        model.scale *= 1 + seed
        model.right.requires_grad_(mistake is not mistakes.FailsWhenFrozen)
        return model

    def loss_of(model, batch, rank):
        share = batch[rank::world_size]
        return F.cross_entropy(model(images[share], rank), labels[share])

    twin = build(0)
    model = mistake(build(rank))
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    optimizers = [sgd(net.parameters()) for net in (twin, model)]
    losses = []
    for batches in torch.arange(60 * 2 * 60).view(60, 2, 60):  # two micro-batches in every step
        for batch in batches:
            for other in range(world_size):
                (loss_of(twin, batch, other) / world_size).backward()
            loss = loss_of(model, batch, rank)
            loss.backward()
            model.finish_gradient_synchronization()
        losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    expected = nn.utils.parameters_to_vector(twin.parameters())
    of_ranks = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(of_ranks, mine)
    are_equal = all(torch.equal(each, mine) for each in of_ranks)
    is_same = (mine - expected).norm() < 1e-10 * expected.norm()
    return [
        "falls" if losses[-1] < losses[0] / 2 else "does not",
        "equal" if are_equal else "differ",
        "equal" if is_same else "differ",
    ]


def check_row(name: str, verdict: dict, means: str) -> None:
    """The page has a row of this class, with what was seen; with dashes where there was no run."""
    cells = verdict["seen"].split("; ") if verdict["verdict"] == "fact" else ["-", "-", "-"]
    start = f"| `{name}` | {' | '.join(cells)} | "
    row = re.search(f"^{re.escape(start)}.*", PAGE, re.MULTILINE)
    assert row and means in row[0], start


def fully_sharded(module):
    return fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


def check_failures(verdicts: dict, expected: set, means: str) -> None:
    assert failed(verdicts) == expected
    first = [verdict["means"] for verdict in verdicts.values() if verdict["verdict"] == "failed"]
    assert means in "".join(first[:1]), first


@pytest.mark.parametrize("name", FAILS)
def test_a_wrong_wrapper_fails_what_sees_its_mistake(ranks, name):
    checks = list(OF_WRAPPERS)
    if name in HANGS:
        checks.remove(checks_of_wrappers.averages_what_one_rank_uses)
    if name not in ("RightHooks", "SkipsUnused"):
        checks.append(consequences)
    verdicts = judged(ranks, getattr(mistakes, name), checks)
    if consequences in checks:
        check_row(name, verdicts.pop("consequences"), FAILS[name][1])
    check_failures(verdicts, *FAILS[name])


@pytest.mark.parametrize(
    "name, check, said",
    [
        ("OrderOfArrival", "averages_what_one_rank_uses", ""),
        ("SkipsUnused", "averages_what_one_rank_uses", ""),
        ("DistributedDataParallel", "averages_what_one_rank_uses", ""),
        ("DoesNotWait", "waits_for_the_other_ranks", "not waited for"),
    ],
)
def test_what_hangs_mixes_calls_or_does_not_wait(forked, tmp_path, name, check, said):
    mine = f"{CHECK.with_name('mistakes.py')}:{name}"
    if not hasattr(mistakes, name):
        (tmp_path / "torchs.py").write_text(f"from torch.nn.parallel import {name}")
        mine = f"{tmp_path}/torchs.py:{name}"
    result = run_one(forked, tmp_path, mine, check)
    assert result["verdict"] == "failed" and said in result["means"], result


def test_the_page_has_a_row_of_every_wrong_wrapper(ranks):
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert rows == ["Right", *[mistake.__name__ for mistake in mistakes.WRAPPERS]]
    seen = judged(ranks, mistakes.DoesNotWait, [consequences])["consequences"]
    check_row("DoesNotWait", seen, "not waited for")
    check_row("SkipsUnused", {"verdict": "failed"}, "only one rank uses")


@pytest.mark.parametrize(
    "module, name, expected, means",
    [
        (checks_of_optimizers, "RightShards", set(), ""),
        (checks_of_optimizers, "ForgetsOptions", STEPS, "the learning rate"),
        (checks_of_optimizers, "KeepsAllState", {"shares_the_state_out"}, "every rank steps all"),
        (checks_of_fsdp, "SplitsNothing", {"keeps_a_part_of_the_parameters"}, "are not split"),
    ],
)
def test_a_wrong_optimizer_or_fsdp_fails_too(ranks, module, name, expected, means):
    verdicts = judged(ranks, getattr(mistakes, name), module.HAS_TO_HOLD)
    check_failures(verdicts, expected, means)


OF_ZERO = {"takes_several_dtypes", "collects_its_state"}


@pytest.mark.parametrize(
    "module, mine, beyond",
    [
        (checks_of_optimizers, ShardedOptimizer, set()),
        (checks_of_optimizers, ZeroRedundancyOptimizer, OF_ZERO),
        (checks_of_fsdp, FSDP, set()),
        (checks_of_fsdp, fully_sharded, {PARAMETERS}),
    ],
)
def test_ours_and_torchs_pass(ranks, module, mine, beyond):
    assert not failed(judged(ranks, mine, module.HAS_TO_HOLD))
    assert failed(judged(ranks, mine, module.BEYOND)) == beyond


def run_one(forked, folder, mine, check) -> dict:
    """The result of one check on ranks of its own."""
    script = folder / "run_one.py"
    script.write_text(f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from common.check import checks_of_wrappers, runner
print(json.dumps(runner.run(checks_of_wrappers.{check}, {str(mine)!r}, 2, "gloo", 2.0)))
""")
    status, output = forked(None, script)
    assert status == 0, output
    return json.loads(output)


ODD = """
import os, sys, torch
import torch.distributed as dist
sys.path.insert(0, {folder!r})
from mistakes import Right

class Odd(Right):
    def finish_gradient_synchronization(self):
        {code}
        super().finish_gradient_synchronization()
"""


@pytest.mark.parametrize(
    "code, verdict, said",
    [
        ("if dist.get_rank() == 0: dist.barrier()", "failed", "rank 0 stands at odd.py:9"),
        ("while dist.get_rank() == 1: pass", "failed", "rank 1 stands at odd.py:9"),
        ("assert dist.get_rank() == 0, 'no'", "failed", "rank 1: AssertionError: no"),
        ("sys.exit(3)", "failed", "SystemExit: 3"),
        ("os._exit(3)", "failed", "it ended with status 3"),
        ("os.kill(os.getpid(), 9)", "failed", "it was ended by SIGKILL"),
        ("print('a'); print('b')", "passed", ""),
    ],
)
def test_a_class_that_hangs_fails_prints_or_ends(forked, tmp_path, code, verdict, said):
    text = ODD.format(folder=str(CHECK.parent), code=code)
    (tmp_path / "odd.py").write_text(text)
    result = run_one(forked, tmp_path, f"{tmp_path}/odd.py:Odd", "gradients_are_the_mean")
    assert result["verdict"] == verdict and said in result["seen"], result
    if "print" in code:  # the last line first
        assert result["lines"][:2] == ["rank 0 printed: b", "rank 0 printed: a"]
    if "assert" in code:
        assert result["lines"][0] == f"odd.py:9 in finish_gradient_synchronization: {code}"


@pytest.mark.parametrize(
    "name, status, said",
    [
        pytest.param("AfterBackward", 0, "hold: 17 of 17 passed", marks=pytest.mark.full),
        ("SumForMean", 1, "FAILED     after one backward the gradients are the mean"),
        ("SendsNothing", 1, "mostly: the owners' new values do not reach all ranks"),
    ],
)
def test_the_command(forked, tmp_path, name, status, said):
    words = [f"{CHECK.with_name('mistakes.py')}:{name}", "--json", tmp_path / "json"]
    found, output = forked(None, CHECK, *words)
    assert found == status and said in output, output
    result = harness.read_json(tmp_path / "json", "check")
    assert result["passed"] == (status == 0)
    checks = {check["check"]: check for check in result["checks"]}
    if name == "SendsNothing":  # its ranks fail one by one, so each check needs ranks of its own
        has_to_hold = [check.__name__ for check in checks_of_optimizers.HAS_TO_HOLD]
        assert failed({check: checks[check] for check in has_to_hold}) == STEPS
        return
    assert checks["trains_with_sgd"]["as_in"] == (status == 1 and "gradients_are_the_mean" or None)
    assert checks["overlap"]["seen"].startswith("calls before the last gradient is there: 0 of 24")


@pytest.mark.parametrize(
    "text, name, said",
    [
        ("class X(:", "X", "SyntaxError: invalid syntax in line 1"),
        ("import os; os._exit(0)", "X", "it ended with status 0"),
        ("X = 3", "X", "has no class or function X"),
        ("def X(module, bucket): pass", "X", "missing a required argument: 'bucket'"),
        ("raise OSError('no disk')", "X", "OSError: no disk"),
        ("", "", "is not FILE.py:NAME"),
    ],
)
def test_what_cannot_be_used_is_one_line(forked, tmp_path, text, name, said):
    (tmp_path / "odd.py").write_text(text)
    status, output = forked(None, CHECK, f"{tmp_path}/odd.py:{name}")
    last = output.splitlines()[-1]
    assert status == 2 and last.startswith("check.py: error: argument MINE: "), output
    assert said in last and "Traceback" not in output, output


@pytest.mark.parametrize(
    "mine, kind",
    [
        (mistakes.Right, "wrapper"),
        (lambda module, bucket_size_mb: module, "wrapper"),
        (mistakes.RightShards, "optimizer"),
        (ZeroRedundancyOptimizer, "optimizer"),
        (lambda params, optimizer_cls, **options: None, "optimizer"),
        (FSDP, "fsdp"),
        (mistakes.SplitsNothing, "fsdp"),
        (lambda module, compute_dtype=None: module, "fsdp"),
    ],
)
def test_the_kind_is_found(mine, kind):
    assert kind_of(mine, None) == [kind]


@harness.needs_proc
@pytest.mark.parametrize("fault", ["Ctrl-C", "SIGTERM of the launcher"])
def test_nothing_is_left(script, tmp_path, fault):
    (tmp_path / "odd.py").write_text(ODD.format(folder=str(CHECK.parent), code="while True: pass"))
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, CHECK, f"{tmp_path}/odd.py:Odd"]
    harness.check_fault(
        script, command, "passed     all ranks start with the buffers", fault, folder
    )
