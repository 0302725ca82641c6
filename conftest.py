"""The fixtures of all tests; what else they share is in common/testing.py and wrapper_checks.py."""

import signal

import pytest
import torch

pytest.register_assert_rewrite("common.testing", "common.wrapper_checks")
from common.testing import Ranks, Script  # noqa: E402

# A job in the background inherits that Ctrl-C is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    for item in items:
        if {"ranks", "script"} & set(item.fixturenames):
            item.add_marker("distributed")
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def ranks():
    """ranks(n).run(function, *arguments): call a module-level function on n ranks of gloo."""
    started = {}

    def get(world_size: int) -> Ranks:
        if world_size not in started or not started[world_size].processes:
            started[world_size] = Ranks(world_size)
        return started[world_size]

    yield get
    for group in started.values():
        group.end()


@pytest.fixture
def script():
    """script(command, …) starts a command as a Script and ends it with the test."""
    started = []

    def start(command: list, **options) -> Script:
        started.append(Script(command, **options))
        return started[-1]

    yield start
    for one in started:
        one.kill()
