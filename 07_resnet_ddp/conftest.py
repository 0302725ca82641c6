"""The fixture that runs a script's main on several ranks without starting an interpreter each."""

import multiprocessing
import multiprocessing.connection
import socket
import sys
import time

import pytest
from forked_script import run_script


@pytest.fixture
def forked(tmp_path_factory):
    """forked(world_size, path, *words, …) runs a script as torchrun would; (status, output).

    world_size None: as plain python would. Its processes are forked from one that has torch, which
    saves seconds each. When one fails the others are ended. Options: timeout in seconds; cwd;
    stderr, a file or terminal to open; any other becomes an environment variable.
    """
    started = []

    def run(world_size, path, *words, timeout=100, cwd=None, stderr=None, **variables):
        context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        context.set_forkserver_preload(["torch", "torchvision"])  # as in common/testing.py
        output = tmp_path_factory.mktemp("output") / "output"
        output.touch()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        own = []
        for rank in range(world_size or 1):
            environment = variables | {"OMP_NUM_THREADS": "1"}
            if world_size is not None:
                environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
                environment |= {"LOCAL_WORLD_SIZE": world_size}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            arguments = [str(word) for word in words]
            options = (str(path), arguments, environment, cwd, str(output), stderr)
            own.append(context.Process(target=run_script, args=options))
            own[-1].start()
        started.extend(own)
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in own) and time.monotonic() < deadline:
            multiprocessing.connection.wait(
                [process.sentinel for process in own if process.is_alive()], 1
            )
            failed = [process.exitcode for process in own if process.exitcode]
            if failed:
                break
        else:
            failed = []
        late = not failed and any(process.is_alive() for process in own)
        for process in own:
            if process.is_alive():
                process.kill()
            process.join()
        assert not late, f"still running after {timeout} s\n{output.read_text()}"
        return (failed or [0])[0], output.read_text()

    yield run
    for process in started:
        process.kill()
