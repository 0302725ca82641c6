"""The adapter lines of the page for courses are executed: two ranks train through them."""

import re
import sys
from pathlib import Path

import pytest

from tools.check.adapters import prepare
from tools.check.checks_of_fsdp import computes_in_another_dtype, gathers_full_parameters
from tools.check.checks_of_optimizers import shares_the_state_out, steps_like_adamw
from tools.check.checks_of_wrappers import reduces_tied_weights_once, trains_with_sgd
from tools.harness import ROOT

PAGE = (ROOT / "common" / "docs" / "courses.md").read_text()
OF_WRAPPERS, *OTHERS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
OF_BUCKETS, OF_OPTIMIZERS, OF_FSDP = OTHERS
WRAPPER = "from overlap_ddp import OverlapDDP as Wrapper"  # as the page has it
COURSES = ["ddp_individual_parameters", "ddp"]  # of 2025 and of 2026
TRAINS = [trains_with_sgd, reduces_tied_weights_once]


def with_wrapper(line: str) -> str:
    assert WRAPPER in OF_WRAPPERS
    return OF_WRAPPERS.replace(WRAPPER, f"{line} as Wrapper")


@pytest.mark.parametrize(
    "folder, code, names, checks",
    [
        ("02_naive_ddp", with_wrapper("from naive_ddp import NaiveDDP"), COURSES, TRAINS),
        ("03_flat_ddp", with_wrapper("from flat_ddp import FlatDDP"), COURSES, TRAINS),
        ("04_overlap_ddp", OF_WRAPPERS, COURSES, TRAINS),
        ("05_bucketed", with_wrapper("from bucketed import BucketedDDP"), COURSES, TRAINS),
        ("05_bucketed", OF_BUCKETS, ["ddp_bucketed"], TRAINS),
        (
            "06_sharded_optimizer",
            OF_OPTIMIZERS,
            ["sharded_optimizer"],
            [steps_like_adamw, shares_the_state_out],
        ),
        (
            "06_sharded_optimizer/fsdp",
            OF_FSDP,
            ["fsdp"],
            [*TRAINS, gathers_full_parameters, computes_in_another_dtype],
        ),
    ],
)
def test_adapter_lines(ranks, tmp_path, folder, code, names, checks):
    path = tmp_path / "adapters.py"
    path.write_text(code)
    ranks(2).run(check_adapters, str(ROOT / folder), path, names, checks)


def check_adapters(folder: str, path: Path, names: list[str], checks: list) -> None:
    """On a rank; a check raises what it has found."""
    sys.path.insert(0, folder)
    for name in names:
        mine = prepare(f"{path}:get_{name}", "wrapper")
        for check in checks:
            check(mine)
