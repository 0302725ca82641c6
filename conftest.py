"""The fixtures of all tests; what else they share is in tools/testing.py."""

import os
import signal
import sys
from functools import cache, partial
from pathlib import Path
from unittest import mock

import pytest

pytest.register_assert_rewrite("tools.testing")
ROOT = Path(__file__).resolve().parent
LESSONS = sorted({page.parent for page in ROOT.glob("0?_*/**/README.md")})
sys.path[:0] = [str(folder) for folder in (ROOT, *LESSONS)]  # tests import scripts by their names
# Nothing here imports torch at once: it takes seconds, and one of pytest's processes runs no test.

# Several tests share the cores: no thread should wait for another one by spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A job in the background inherits that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item):
    import torch

    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def same_environment():
    """What a script's main() tells torch through the environment ends with the test."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def refusal(monkeypatch, capsys):
    """refusal(main, script, *words): what main() says of these words in one line, with status 2.

    Without `script.py: error: ` in front. It is torchrun's only rank, unless told otherwise.
    """
    from tools.testing import ONLY_RANK

    def run(main, script, *words, environment=ONLY_RANK) -> str:
        name = Path(script).name
        os.environ |= environment
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        monkeypatch.setattr(sys, "path", sys.path[:])
        with pytest.raises(SystemExit) as end:
            main()
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.count("\n") == 1, error
        assert error.startswith(f"{name}: error: "), error
        return error.removeprefix(f"{name}: error: ")

    return run


@pytest.fixture(scope="session")
def ranks():
    """ranks(n).run(function, *arguments): call a module-level function on n ranks of gloo."""
    from tools.testing import LastingRanks

    return cache(LastingRanks)


@pytest.fixture(scope="session")
def late_ranks():
    """The same on the network that is late, for the checks of `make check`."""
    from tools.check.late import late_network
    from tools.testing import LastingRanks

    return cache(partial(LastingRanks, network=late_network))


@pytest.fixture
def script():
    """script(command, …) starts a command as a Script, which ends with the test."""
    from tools.testing import Script

    started = []

    def start(*words, **options) -> Script:
        run = Script(*words, **options)
        started.append(run)
        return run

    yield start
    for one in started:
        one.kill()


@pytest.fixture
def forked():
    """forked(world_size, path, *words) is a script's run: (exit status, output). See Forked."""
    from tools.testing import Forked

    return lambda *words, **options: Forked(*words, **options).wait()
