"""The fixtures of all tests; what else they share is in tools/."""

import os
import signal
import sys
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tools.harness", "tools.processes")
# Nothing here imports torch at once: it takes seconds, and one of pytest's processes runs no test.

# Several tests share the cores: no thread should wait for another one by spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A job in the background inherits that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    import torch

    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish(session):
    if any({"ranks", "late_ranks", "forked"} & set(item.fixturenames) for item in session.items):
        from tools.processes import ready_processes

        ready_processes()  # they import while the first tests run


@pytest.fixture(autouse=True)
def same_environment():
    """What a script's main() tells torch through the environment ends with the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def refusal(monkeypatch, capsys):
    """refusal(main, script, *words): what main() says of these words in one line, with status 2.

    Without `script.py: error: ` in front. It is torchrun's only rank, unless told otherwise.
    """
    from tools.harness import ONLY_RANK

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


def started_ranks(is_late: bool):
    from tools.processes import Ranks

    started = {}

    def get(world_size: int) -> Ranks:
        if world_size not in started or not started[world_size].processes:
            started[world_size] = Ranks(world_size, is_late)
        return started[world_size]

    yield get
    for group in started.values():
        group.end()


@pytest.fixture(scope="session")
def ranks():
    """ranks(n).run(function, *arguments): call a module-level function on n ranks of gloo."""
    yield from started_ranks(False)


@pytest.fixture(scope="session")
def late_ranks():
    """The same on the network that is late, for the checks of `make check`."""
    yield from started_ranks(True)


@pytest.fixture
def script():
    """script(command, …) starts a command as a Script and ends it with the test."""
    from tools.processes import Script

    started = []

    def start(command: list, **options) -> Script:
        started.append(Script(command, **options))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture
def launched(script):
    """launched(world_size, path, *words) is torchrun's run of a script: (exit status, output)."""
    from tools.harness import torchrun

    def run(world_size: int, *words, timeout: float = 120, **options) -> tuple[int, str]:
        return script(torchrun(world_size, *words), **options).wait(timeout)

    return run


@pytest.fixture
def forked(tmp_path_factory):
    """The same in 0.1 s instead of seconds, in processes that have torch: see Forked."""
    from tools.processes import Forked

    runs = Forked(tmp_path_factory.mktemp("forked"))
    yield runs
    runs.end()
