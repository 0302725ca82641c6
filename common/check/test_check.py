"""The checks on classes that are right and wrong, the command, and the page about wrong runs.

Our four wrappers and torch's DDP: common/testing/test_wrappers.py.
"""

import json
import sys

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from common.check import checks_of_fsdp, checks_of_optimizers, checks_of_wrappers, mistakes
from common.check.check import kind_of
from common.testing import harness
from common.testing.harness import ROOT, failed, judged

sys.path[:0] = [str(ROOT / "06_sharded_optimizer" / "fsdp"), str(ROOT / "06_sharded_optimizer")]

from fsdp import FSDP  # noqa: E402
from sharded_optimizer import ShardedOptimizer  # noqa: E402

CHECK = ROOT / "common" / "check" / "check.py"
GRADIENTS = {  # what a wrong gradient fails
    "gradients_are_the_mean",
    "trains_with_sgd",
    "trains_with_adam",
    "reduces_tied_weights_once",
    "leaves_frozen_parameters_alone",
    "trains_a_module_that_is_used_twice",
    "trains_several_dtypes",
    "trains_channels_last",
    "keeps_one_order_on_any_branch",
    "accumulates_without_no_sync",
    "trains_after_two_forwards",
    "evaluates_in_between",
    "zeroes_in_place",
    "accumulates_before_one_finish",
    "skips_what_nobody_uses",
    "averages_what_one_rank_uses",
}
ALSO_RANKS = GRADIENTS | {"ranks_stay_equal"}
NO_NEIGHBOUR = {  # whose model has no two parameters of the same shape
    "reduces_tied_weights_once",
    "leaves_frozen_parameters_alone",
    "trains_a_module_that_is_used_twice",
    "trains_channels_last",
}
BUFFERS = "starts_with_the_buffers_of_rank_0"
ONE_FINISH = {"accumulates_before_one_finish"}  # of hooks: the first all-reduces are in flight
FAILS = {  # class: what it fails, and what the first failure says
    "Right": (set(), ""),
    "RightHooks": (ONE_FINISH, ""),
    "SumForMean": (GRADIENTS, "summed, not averaged"),
    "DividesTwice": (GRADIENTS, "divided twice"),
    "NeverReduces": (ALSO_RANKS, "never reduced"),
    "NoBroadcast": ({"starts_with_the_parameters_of_rank_0", BUFFERS}, "broadcast the parameters"),
    "ForgetsBuffers": ({BUFFERS}, "broadcast the buffers"),
    "HookBeforeGradient": (ALSO_RANKS, "never reduced"),
    "OrderOfArrival": ({"keeps_one_order_on_any_branch", *ONE_FINISH}, "call in different orders"),
    "LeavesLastOut": (ALSO_RANKS, "never reduced"),
    "TiedTwice": ({"reduces_tied_weights_once"}, "divided twice"),
    "SkipsUnused": (set(), ""),
    "FailsWhenFrozen": ({"leaves_frozen_parameters_alone", *ONE_FINISH}, "see mistakes.py"),
    "RoundsToFloat32": (GRADIENTS, "rounded to float32"),
    "OverwritesAccumulated": ({"accumulates_without_no_sync", *ONE_FINISH}, "overwritten"),
    "RemembersGradients": (
        ALSO_RANKS - {"gradients_are_the_mean", "zeroes_in_place"},
        "never reduced",
    ),
    "SwapsGradients": (GRADIENTS - NO_NEIGHBOUR, "another order than they were taken"),
    "AfterBackward": (set(), ""),
}
STEPS = {  # what a wrong step of an optimizer fails
    "steps_like_sgd",
    "steps_like_adamw",
    "keeps_groups_apart",
    "takes_a_group_later",
    "follows_a_scheduler",
    "skips_frozen_parameters",
    "takes_fewer_parameters_than_ranks",
}
TRAINING = {  # what a wrong gradient of FSDP fails
    "trains_with_sgd",
    "trains_with_adam",
    "trains_tied_weights",
    "leaves_frozen_parameters_alone",
    "trains_a_module_that_is_used_twice",
    "accumulates",
    "trains_after_two_forwards",
    "evaluates_in_between",
}
OTHERS_FAIL = {  # of what has to hold
    "RightShards": (set(), ""),
    "ForgetsOptions": (STEPS, "the learning rate"),
    "IgnoresSchedulers": ({"follows_a_scheduler"}, "other options"),
    "KeepsAllState": ({"shares_the_state_out"}, "every rank steps all"),
    "RightFSDP": (set(), ""),
    "SumsShards": (TRAINING, "summed, not averaged"),
    "SplitsNothing": ({"keeps_a_part_of_the_parameters"}, "are not split"),
}


OF_ZERO = {"takes_several_dtypes", "collects_its_state"}


def fully_sharded(module):
    return fully_shard(module, mesh=init_device_mesh("cpu", (2,)))


def check_failures(verdicts: dict, expected: set, means: str) -> None:
    assert failed(verdicts) == expected
    first = [verdict["means"] for verdict in verdicts.values() if verdict["verdict"] == "failed"]
    assert means in "".join(first[:1]), first


@pytest.mark.parametrize("name", FAILS)
def test_a_wrong_wrapper_fails_what_sees_its_mistake(ranks, name):
    module = checks_of_wrappers
    checks = [*module.HAS_TO_HOLD, *module.BEYOND]
    checks.remove(module.keeps_buffers_equal)  # which no wrapper of ours does
    if name in ("OrderOfArrival", "SkipsUnused"):  # it hangs: below
        checks.remove(module.averages_what_one_rank_uses)
    check_failures(judged(ranks, getattr(mistakes, name), checks), *FAILS[name])


@pytest.mark.parametrize("name", OTHERS_FAIL)
def test_a_wrong_optimizer_or_fsdp_fails_what_sees_its_mistake(ranks, name):
    mine = getattr(mistakes, name)
    is_optimizer = issubclass(mine, mistakes.RightShards)
    module = checks_of_optimizers if is_optimizer else checks_of_fsdp
    check_failures(judged(ranks, mine, module.HAS_TO_HOLD), *OTHERS_FAIL[name])


def test_an_optimizer_that_sends_nothing(forked, tmp_path):
    """Its ranks fail one by one, so each check needs ranks of its own."""
    words = [f"{CHECK.with_name('mistakes.py')}:SendsNothing", "--json", tmp_path / "json"]
    status, output = forked(None, CHECK, *words)
    result = harness.read_json(tmp_path / "json", "check")
    verdicts = {each["check"]: each for each in result["checks"] if each["group"] == "has to hold"}
    assert status == 1, output
    check_failures(verdicts, STEPS, "do not reach all ranks")


@pytest.mark.parametrize(
    "module, mine, beyond",
    [
        (checks_of_optimizers, ShardedOptimizer, set()),
        (
            checks_of_optimizers,
            ZeroRedundancyOptimizer,
            {"takes_several_dtypes", "collects_its_state"},
        ),
        (checks_of_fsdp, FSDP, set()),
        (checks_of_fsdp, fully_sharded, {"starts_with_the_parameters_of_rank_0"}),
    ],
)
def test_ours_and_torchs_pass(ranks, module, mine, beyond):
    assert not failed(judged(ranks, mine, module.HAS_TO_HOLD))
    assert failed(judged(ranks, mine, module.BEYOND)) == beyond


def run_one(forked, folder, mine, check, limit=2.0) -> dict:
    """The result of one check on ranks of its own."""
    script = folder / "run_one.py"
    script.write_text(f"""
import json, sys
sys.path.insert(0, {str(ROOT)!r})
from common.check import checks_of_wrappers, runner
result = runner.run(checks_of_wrappers.{check}, {str(mine)!r}, 2, "gloo", {limit})
print(json.dumps(result))
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


@pytest.mark.parametrize("name", ["OrderOfArrival", "SkipsUnused", "DistributedDataParallel"])
def test_what_one_rank_uses_mixes_calls_or_hangs(forked, tmp_path, name):
    mine = f"{CHECK.with_name('mistakes.py')}:{name}"
    if name not in FAILS:
        (tmp_path / "torchs.py").write_text(f"from torch.nn.parallel import {name}")
        mine = f"{tmp_path}/torchs.py:{name}"
    result = run_one(forked, tmp_path, mine, "averages_what_one_rank_uses")
    assert result["verdict"] == "failed", result


def test_a_missing_wait_is_seen(forked, tmp_path):
    mine = f"{CHECK.with_name('mistakes.py')}:DoesNotWait"
    result = run_one(forked, tmp_path, mine, "waits_for_the_other_ranks")
    assert result["verdict"] == "failed" and "work.wait()" in result["means"], result


@pytest.mark.parametrize(
    "name, status, said",
    [
        pytest.param("AfterBackward", 0, "hold: 17 of 17 passed", marks=pytest.mark.full),
        ("SumForMean", 1, "FAILED     after one backward the gradients are the mean"),
    ],
)
def test_the_command(forked, tmp_path, name, status, said):
    words = [f"{CHECK.with_name('mistakes.py')}:{name}", "--json", tmp_path / "json"]
    found, output = forked(None, CHECK, *words)
    assert found == status and said in output, output
    result = harness.read_json(tmp_path / "json", "check")
    assert result["passed"] == (status == 0)
    checks = {check["check"]: check for check in result["checks"]}
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
        (mistakes.RightFSDP, "fsdp"),
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


@pytest.mark.full
def test_the_page_shows_what_happens(forked, tmp_path):
    """Every row of the table, as consequences.py and the checks make it."""
    page = (ROOT / "common" / "docs" / "wrong.md").read_text()
    status, output = forked(None, CHECK.with_name("consequences.py"))
    assert status == 0 and output.count("\n") == 1 + len(mistakes.WRAPPERS), output
    for row in output.splitlines():
        assert row in page, output
        name = row.split("`")[1]
        rest = page.partition(row)[2].partition("\n")[0]
        assert FAILS.get(name, ((), "not waited for"))[1] in rest, rest
