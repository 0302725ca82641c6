"""Five public ways to write ZeRO and FSDP, each right and with a mistake: see fixtures/."""

import shutil

import pytest

from tools.check.adapters import kind_of, named_by, prepare
from tools.check.check import KINDS, ROOT
from tools.check.findings import Answer, judge, verdict_of

FIXTURES = ROOT / "tools" / "check" / "fixtures"


def judge_file(text: str, last: str) -> tuple[str, dict[str, Answer]]:
    """On a rank: the kind of what FILE.py:NAME names, and what comes of each check up to one."""
    kind, answers = kind_of(named_by(text)[1]), {}
    for check in KINDS[kind].HAS_TO_HOLD:
        if last not in answers:  # what has failed may leave calls behind
            answers[check.__name__] = judge(check, *prepare(text, kind))
    return kind, answers


@pytest.mark.parametrize(
    "text, kind, fails, said",
    [
        ("course_2025.py:ShardedOptimizer", "optimizer", "", "give it averaged gradients"),
        ("course_2025.py:DropsHandles", "optimizer", "steps_like_adamw", "not waited for"),
        ("course_2026.py:FSDP", "fsdp", "", "no clip_grad_norm_()"),
        ("course_2026.py:SumsIn16Bits", "fsdp", "computes_in_another_dtype", "summed"),
        ("picotron.py:DataParallel", "wrapper", "", "main gradients are float32"),
        ("picotron.py:NeverResets", "wrapper", "trains_with_sgd", "not the mean"),
        ("nanochat.py:DistAdamW", "optimizer", "", "step() averages"),
        ("nanochat.py:WaitsForNoReduction", "optimizer", "steps_like_adamw", "not waited for"),
        ("deepspeed.py:zero", "optimizer", "", "it steps in float32"),
        ("deepspeed.py:loses_the_rest", "optimizer", "steps_sizes_that_ranks_cannot_divide", ""),
    ],
)
def test_public_ways(late_ranks, tmp_path, text, kind, fails, said):
    """Copied, as a user's files are: a line in them is no line of the checks."""
    shutil.copytree(FIXTURES, tmp_path / "mine")
    of_ranks = late_ranks(2).run(judge_file, f"{tmp_path}/mine/{text}", fails)
    assert {found for found, _ in of_ranks} == {kind}
    verdicts = {}
    for name in of_ranks[0][1]:
        verdicts[name] = verdict_of(
            {rank: answers[name] for rank, (_, answers) in enumerate(of_ranks)}
        )
    failed = [name for name, answer in verdicts.items() if answer.verdict == "failed"]
    assert fails in failed if fails else not failed, verdicts
    assert said in " ".join(f"{answer.seen} {answer.means}" for answer in verdicts.values()), (
        verdicts
    )
