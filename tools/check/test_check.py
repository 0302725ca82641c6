"""The checks on classes that are right and wrong, the command, and the page about wrong runs.

Our four wrappers and torch's DDP: tools/test_wrappers.py.
"""

import json
import re
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from fsdp import FSDP
from sharded_optimizer import ShardedOptimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from common.setup import ROOT
from tools import testing
from tools.check import (
    checks_of_fsdp,
    checks_of_losses,
    checks_of_optimizers,
    checks_of_wrappers,
    mistakes,
    models,
)
from tools.check.adapters import kind_of
from tools.check.runner import judge
from tools.testing import failed, judged

CHECK = ROOT / "tools" / "check" / "check.py"
MISTAKES = CHECK.with_name("mistakes.py")
ROWS = (ROOT / "docs" / "wrong.md").read_text().splitlines()
OF_WRAPPERS = [*checks_of_wrappers.HAS_TO_HOLD, *checks_of_wrappers.BEYOND]
OF_WRAPPERS.remove(checks_of_wrappers.keeps_buffers_equal)  # which no wrapper of ours does
OF_WRAPPERS.remove(checks_of_wrappers.averages_what_one_rank_uses)  # some hang there: see below
OF_WRAPPERS.remove(checks_of_wrappers.averages_all_of_a_large_model)  # a second each: see below
LARGE = "averages_all_of_a_large_model"
PARAMETERS = "starts_with_the_parameters_of_rank_0"
BUFFERS = "starts_with_the_buffers_of_rank_0"
WEIGHTS = "leaves_weights_to_the_optimizer"
MEAN = "gradients_are_the_mean"
ONE_FINISH = "accumulates_before_one_finish"
UNEQUAL = {check.__name__ for check in OF_WRAPPERS}  # what a gradient that no rank shares fails
UNEQUAL -= {PARAMETERS, BUFFERS, WEIGHTS, "can_be_used", "accumulates_with_no_sync"}
WRONG = UNEQUAL - {"ranks_stay_equal"}
FAILS = {  # class: what it fails, and what the first failure says
    "Right": (set(), ""),
    "SumForMean": (WRONG, "summed, not averaged"),
    "NoBroadcast": ({PARAMETERS, BUFFERS}, "broadcast the parameters"),
    "ForgetsBuffers": ({BUFFERS}, "broadcast the buffers"),
    "HookBeforeGradient": (UNEQUAL, "never reduced"),
    "DoesNotWait": (UNEQUAL | {WEIGHTS}, "not waited for"),
    "BarrierForWait": (UNEQUAL | {WEIGHTS}, "not waited for"),
    "WaitsForTheLast": (UNEQUAL | {WEIGHTS}, "not waited for"),
    "DividesInFlight": (UNEQUAL | {WEIGHTS, "can_be_used"}, "see mistakes.py"),
    "AveragesWeights": (UNEQUAL | {WEIGHTS}, "weights, not gradients"),
    # In its two backward() before one finish the first all-reduces are in flight.
    "OrderOfArrival": ({"keeps_one_order_on_any_branch", ONE_FINISH}, "call in different orders"),
    # Where nobody uses the last parameter, it is no mistake.
    "LeavesLastOut": (UNEQUAL - {"skips_what_nobody_uses"}, "never reduced"),
    "TiedTwice": ({"reduces_tied_weights_once"}, "divided twice"),
    "FailsWhenFrozen": ({"leaves_frozen_parameters_alone"}, "see mistakes.py"),
    "RoundsToFloat32": (WRONG, "rounded to float32"),
    "OverwritesAccumulated": ({"accumulates_without_no_sync", ONE_FINISH}, "overwritten"),
    "SwapsGradients": (WRONG, "another order than they were taken"),
}
SPLIT = {"splits_weights", "keeps_a_part_of_the_parameters"}
STEPS = {check.__name__ for check in checks_of_optimizers.HAS_TO_HOLD}  # what a wrong step fails
STEPS -= {"can_be_used", "shares_the_state_out", "zeroes_all_gradients"}


class Everything(models.Branches):
    """Ranks go through two layers in turn, two weights are tied, and a buffer is used."""

    def __init__(self):
        super().__init__()
        self.last.weight = self.embedding.weight
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))

    def between(self, x):
        return super().between(self.factor * x)


def consequences(mistake):
    """does the loss fall, are the ranks equal, are the weights those of one process?"""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    twin, module = models.new(Everything), models.new(Everything, seed=rank)
    module.rank = rank
    module.factor *= 1 + rank
    model = mistake(module)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9) for net in (twin, model)]
    losses = []
    for step in range(30):
        for part in range(2):
            for twin.rank in range(world_size):
                (models.loss_of(twin, step, part, twin.rank) / world_size).backward()
            loss = models.loss_of(model, step, part, rank)
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
    falls = "falls" if losses[-1] < losses[0] / 2 else "does not"
    return f"{falls} | {'equal' if are_equal else 'differ'} | {'equal' if is_same else 'differ'}"


def fully_sharded(module):
    return fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


def check_failures(verdicts: dict, expected: set, means: str) -> None:
    assert failed(verdicts) == expected
    first = [verdict["means"] for verdict in verdicts.values() if verdict["verdict"] == "failed"]
    assert means in "".join(first[:1]), first


@pytest.mark.parametrize("name", FAILS)
def test_a_wrong_wrapper_fails_what_sees_its_mistake(ranks, late_ranks, name):
    """And has the consequences that the page says, if it does not end in an error (a dash)."""
    expected, means = FAILS[name]
    mistake = getattr(mistakes, name)
    check_failures(judged(late_ranks, mistake, OF_WRAPPERS), expected, means)
    [row] = [row for row in ROWS if row.startswith(f"| `{name}` |")]
    then, said = re.fullmatch(r"\| `\w+` \| (.* \| .* \| .*) \| (.*) \|", row).groups()
    assert means in said
    if "-" not in then and "luck" not in then:
        verdict = judged(ranks, mistake, [consequences])["consequences"]
        assert verdict["seen"] == then, verdict


def test_the_page_has_a_row_of_every_wrong_wrapper():
    names = re.findall(r"^\| `(\w+)` \|", "\n".join(ROWS), re.MULTILINE)
    assert sorted(names) == sorted([*FAILS, "SkipsUnused"])  # which hangs


class NamesOfItsOwn(mistakes.SplitsNothing):
    def gather_full_params(self):
        return self.state_dict()


@pytest.mark.parametrize(
    "module, mine, expected, means",
    [
        (checks_of_optimizers, mistakes.RightShards, set(), ""),
        (
            checks_of_optimizers,
            mistakes.ForgetsOptions,
            STEPS - {"follows_a_scheduler"},
            "learning rate",
        ),
        (
            checks_of_optimizers,
            mistakes.KeepsAllState,
            {"shares_the_state_out"},
            "every rank steps all",
        ),
        (checks_of_fsdp, mistakes.SplitsNothing, SPLIT, "are not split"),
        (checks_of_optimizers, ShardedOptimizer, set(), ""),
        (checks_of_optimizers, ZeroRedundancyOptimizer, set(), ""),
        (checks_of_fsdp, FSDP, set(), ""),
        (checks_of_fsdp, fully_sharded, set(), ""),
    ],
)
def test_optimizers_and_fsdp(late_ranks, module, mine, expected, means):
    """Ours and torch's pass; small wrong ones fail what sees their mistake."""
    check_failures(judged(late_ranks, mine, module.HAS_TO_HOLD), expected, means)


def test_full_parameters_have_names_of_the_module(late_ranks):
    checks = [checks_of_fsdp.gathers_full_parameters]
    [verdict] = judged(late_ranks, NamesOfItsOwn, checks).values()
    assert "has no embedding.weight of the shape" in verdict["seen"], verdict


class FirstBucketAlone(mistakes.Right):
    """Averages what fits into one bucket, whatever else there is."""

    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module)
        self.size = bucket_cap_mb * 2**20

    def trained(self):
        bucket, size = [], 0
        for parameter in super().trained():
            size += parameter.nbytes
            if size <= self.size:
                bucket.append(parameter)
        return bucket


class OfAnotherName(FirstBucketAlone):
    def __init__(self, module, capacity=25):
        super().__init__(module, capacity)


class AsksForGloo(mistakes.Right):
    def __init__(self, module):
        assert dist.get_backend() == "gloo" and dist.get_backend(dist.new_group()) == "gloo"
        super().__init__(module)


class NoModule:
    """It is called, and has parameters through .module."""

    def __init__(self, module):
        self.module, self.within = module, mistakes.Right(module)

    def __call__(self, *inputs):
        return self.within(*inputs)

    def finish_gradient_sync(self):
        self.within.finish_gradient_synchronization()


class FinishesAsFlush(NoModule):
    finish_gradient_sync = None

    def flush(self):
        super().finish_gradient_sync()


@pytest.mark.parametrize(
    "mine, name, means",
    [
        (AsksForGloo, MEAN, ""),
        (NoModule, MEAN, ""),
        (
            FinishesAsFlush,
            MEAN,
            "nobody calls its finish, finish_gradient_synchronization(): it has",
        ),
        (FirstBucketAlone, MEAN, "never reduced"),
        (OfAnotherName, MEAN, ""),
        (OfAnotherName, LARGE, "never reduced"),
        (mistakes.Right, LARGE, ""),
        (mistakes.OrderOfArrival, LARGE, "call in different orders"),
    ],
)
def test_what_courses_name_otherwise(late_ranks, mine, name, means):
    """Sizes of buckets, the finish, the backend; and wrappers that are no modules."""
    [verdict] = judged(late_ranks, mine, [getattr(checks_of_wrappers, name)]).values()
    assert verdict["verdict"] == ("failed" if means else "passed"), verdict
    assert means in verdict["means"], verdict


def floats(n):
    return [torch.randn(n, 5) for _ in range(3)]


cross_entropy = nn.functional.cross_entropy
weights = torch.arange(1.0, 11.0)


@pytest.mark.parametrize(
    "means, loss, batch",
    [
        ("", cross_entropy, checks_of_losses.batch),
        ("", nn.functional.triplet_margin_loss, floats),
        ("SUMMED", lambda o, t: cross_entropy(o, t, reduction="sum"), checks_of_losses.batch),
        ("UNEVEN", lambda o, t: cross_entropy(o, t, weight=weights), checks_of_losses.batch),
        ("UNEVEN", lambda o, t: cross_entropy(o, t, ignore_index=0), checks_of_losses.batch),
        ("UNEVEN", lambda o, t, m: ((o - t).square() * (m > 0)).sum() / (m > 0).sum(), floats),
        ("MEETS", lambda a, b, _: cross_entropy(a @ b.T, torch.arange(len(a))), floats),
        ("MEETS", lambda a, b, _: nn.functional.mse_loss(a, b).sqrt(), floats),
        ("MEETS", lambda o, t: (o[::2] - o[1::2]).square().mean(), checks_of_losses.batch),
    ],
)
def test_losses(loss, batch, means):
    verdict = judge(checks_of_losses.is_the_mean_of_its_shares, (loss, batch))
    assert verdict["means"] == (getattr(checks_of_losses, means) if means else ""), verdict


LOSSES = """
import torch
def pair(one, other):
    return (one - other).square().mean()
def batch(n):
    return torch.randn(n, 3), torch.randn(n, 3)
def two(one, other):
    return torch.stack([one.mean(), other.mean()])
"""


@pytest.mark.parametrize("name, status, said", [("pair", 0, "2 of 2"), ("two", 2, "batch(n)")])
def test_the_command_for_a_loss(forked, tmp_path, name, status, said):
    (tmp_path / "loss.py").write_text(LOSSES)
    found, output = forked(None, CHECK, f"{tmp_path}/loss.py:{name}", "--kind", "loss")
    assert found == status and said in output.splitlines()[-1], output


ODD = f"""
import os, sys, warnings
import torch.distributed as dist
sys.path.insert(0, {str(CHECK.parent)!r})
from mistakes import *

class Odd(Right):
    def finish_gradient_synchronization(self):
        CODE
        super().finish_gradient_synchronization()
"""
RUN_ONE = f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from tools.check import adapters, checks_of_wrappers, runner
check = getattr(checks_of_wrappers, sys.argv[1])
print(json.dumps(runner.run(2, 2.0, adapters.call, check, sys.argv[2], "wrapper")))
"""
PLACE = "see odd.py:9 in finish_gradient_synchronization: "
PRINTS = "warnings.warn('torch has renamed it', FutureWarning); print('a'); print('b')"


@pytest.mark.parametrize(
    "name, check, code, seen, means",
    [
        ("SkipsUnused", "averages_what_one_rank_uses", "", "rank ", ""),
        ("Odd", MEAN, "if dist.get_rank() == 0: dist.barrier()", "rank 0: hangs at odd.py", PLACE),
        ("Odd", MEAN, "while dist.get_rank() == 1: pass", "rank 1: hangs at odd.py:9", "waits for"),
        ("Odd", MEAN, "assert dist.get_rank() == 0, 'no'", "rank 1: AssertionError: no", PLACE),
        ("Odd", MEAN, "sys.exit(3)", "SystemExit: 3", PLACE),
        ("Odd", MEAN, "os._exit(3)", "it ended with status 3", "ended in the class"),
        ("Odd", MEAN, "os.kill(os.getpid(), 9)", "it ended with SIGKILL", "ended in the class"),
        ("Odd", MEAN, PRINTS, "", ""),
    ],
)
def test_a_class_that_hangs_fails_prints_or_ends(forked, tmp_path, name, check, code, seen, means):
    (tmp_path / "odd.py").write_text(ODD.replace("CODE", code))
    script = tmp_path / "run_one.py"
    script.write_text(RUN_ONE)
    status, output = forked(None, script, check, f"{tmp_path}/odd.py:{name}")
    assert status == 0, output
    result = json.loads(output)
    assert result["verdict"] == ("failed" if seen else "passed"), result
    assert seen in result["seen"] and means in result["means"], result
    if code == PRINTS:  # the last line first, and no warning
        lines = [f"rank {rank} printed: {text}" for rank in (0, 1) for text in "ba"]
        assert result["lines"] == lines


@pytest.mark.parametrize(
    "name, status, said",
    [
        ("SendsNothing", 1, "usually: the owners' new values do not reach all ranks"),
        ("SplitsNothing", 1, "nothing else was tried"),
        pytest.param("Right", 0, "has to hold: 18 of 18 passed", marks=pytest.mark.full),
    ],
)
def test_the_command(forked, name, status, said):
    found, output = forked(None, CHECK, f"{MISTAKES}:{name}")
    assert found == status and said in output, output
    assert name != "SendsNothing" or "AdamW with all its options: the same (as above" in output


@pytest.mark.parametrize(
    "text, name, said",
    [
        ("class X(:", "X", "SyntaxError: invalid syntax (odd.py, line 1)"),
        ("import os; os._exit(0)", "X", "it ended with status 0"),
        ("X = 3", "X", "has no class or function X"),
        ("def X(module, size): pass", "X", "missing 1 required positional argument: 'size'"),
        ("raise OSError('no disk')", "X", "OSError: no disk"),
        ("", "", "is not FILE.py:NAME"),
        ("def X(module): pass", "X", "returns NoneType, and no torch.nn.Module"),
    ],
)
def test_what_cannot_be_used_is_one_line(forked, tmp_path, text, name, said):
    (tmp_path / "odd.py").write_text(text)
    status, output = forked(None, CHECK, f"{tmp_path}/odd.py:{name}")
    last = output.splitlines()[-1]
    assert status == 2 and last.startswith("check.py: error: argument MINE: "), output
    assert said in last and "Traceback" not in output, output


def test_the_kind_is_found():
    for mine, kind in [
        (mistakes.Right, "wrapper"),
        (lambda module, bucket_size_mb: module, "wrapper"),
        (partial(mistakes.Right), "wrapper"),
        (ZeroRedundancyOptimizer, "optimizer"),
        (lambda params, optimizer_cls, **options: None, "optimizer"),
        (mistakes.SplitsNothing, "fsdp"),
        (lambda module, compute_dtype=None: module, "fsdp"),
    ]:
        assert kind_of(mine) == kind


@pytest.mark.parametrize(
    "fault", ["Ctrl-C", pytest.param("SIGTERM of the launcher", marks=pytest.mark.full)]
)
def test_nothing_is_left(script, tmp_path, fault):
    (tmp_path / "odd.py").write_text(ODD.replace("CODE", "while True: pass"))
    command = [sys.executable, CHECK, f"{tmp_path}/odd.py:Odd"]
    testing.check_fault(script, command, f"{tmp_path}/odd.py:Odd, as wrapper", fault, id)
