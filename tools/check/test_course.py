"""`make check` in a course's repository: adapters, packages, layers of its own."""

import re
import shutil

import pytest
from users_class import import_file

from common.setup import ROOT
from tools.check.models import layout_for

CHECK = ROOT / "tools" / "check"


@pytest.fixture
def adapters(tmp_path):
    """A copy of the course in fixtures/, which has our mistakes.py, too."""
    course = tmp_path / "course"
    shutil.copytree(CHECK / "fixtures" / "course", course)
    shutil.copy(CHECK / "mistakes.py", course / "course_systems")
    return course / "tests" / "adapters.py"


def test_all_that_is_written_is_checked_and_what_is_not_is_listed(forked, adapters):
    """What fails beyond the level of a course does not count."""
    words = "--level", "course", "--layers", "a_course.model", "--nproc", 2
    status, output = forked(None, CHECK / "check.py", adapters, *words)
    _, *parts = re.split(r"\n\S+adapters\.py:(\w+), as .*\n", output)
    failed = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        failed[name] = len(re.findall("^FAILED", text, re.MULTILINE))
        forgets = re.search("^warning .*\n?.*buffers of rank 0", text, re.MULTILINE)
        assert bool(forgets) == (name == "get_ddp"), text
        assert ("not written yet" in text) == (name == "get_ddp_bucketed")
    assert status == 0 and "5 of 5 passed" in output and not any(failed.values()), output
    assert list(failed)[1:] == ["get_sharded_optimizer", "get_fsdp", "get_ddp_bucketed"]
    assert "not installed, and left out: no_triton_here" in output


def test_own_layers_that_nobody_names(forked, adapters):
    """An FSDP that splits only them is not tried, and is told what to say; it does not pass."""
    status, output = forked(None, CHECK / "check.py", f"{adapters}:get_fsdp")
    assert status == 1 and "has to hold: 5 of 6 passed" in output, output
    assert re.search(r"^not tried .*\n.*\n? .*LAYERS=", output, re.MULTILINE), output
    assert "FAILED" not in output.partition("Beyond")[0], output


def test_own_layers_beside_the_class(tmp_path):
    """They are not imported a second time, as other classes of the same names."""
    (tmp_path / "own.py").write_text("from torch.nn import Linear")
    mine = import_file(f"{tmp_path}/own.py")
    assert layout_for("own", is_sharded=False).layers is mine
