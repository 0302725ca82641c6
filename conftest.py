"""What the tests share: real ranks that run a function, and a way to run a script and see that nothing is left of it."""

import contextlib
import copy
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).resolve().parent
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a job in the background inherits that Ctrl-C is ignored


def pytest_collection_modifyitems(items):
    for item in items:
        if {"ranks", "script"} & set(item.fixturenames):
            item.add_marker("distributed")
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


class Ranks:
    """`world_size` processes joined by gloo that stay alive between tests, so that torch is imported only once."""

    def __init__(self, world_size: int):
        context = mp.get_context(
            "forkserver" if sys.platform == "linux" else "spawn"
        )  # macOS: libraries that hate fork
        context.set_forkserver_preload(["torch", "torchvision"])
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            self.processes.append(
                context.Process(
                    target=_serve,
                    args=(rank, world_size, f"{self.folder.name}/store", theirs),
                    daemon=True,
                )
            )
            self.processes[-1].start()
            theirs.close()  # so that recv() ends with EOFError when the rank dies
            self.pipes.append(mine)

    def run(self, function, *arguments, timeout: float = 60) -> list:
        """Call function(*arguments) on every rank; the results by rank. Any rank's exception fails the test."""
        for pipe in self.pipes:
            pipe.send(sys.path)  # first, for it may be needed to find the function
            pipe.send((function, arguments))
        results, failures = [], []
        deadline = time.monotonic() + timeout
        for rank, pipe in enumerate(self.pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no answer within {timeout} s")
                result, failure = pipe.recv()
            except (EOFError, TimeoutError) as error:
                result, failure = None, repr(error)
            results.append(result)
            if failure:
                failures.append(f"rank {rank}: {failure}")
                deadline = min(
                    deadline, time.monotonic() + 5
                )  # the others may wait for this one in vain
        if failures:
            self.end()
            pytest.fail("\n".join(failures), pytrace=False)
        return results

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes = []
        self.folder.cleanup()


def _serve(rank: int, world_size: int, store: str, pipe) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    while True:
        try:
            sys.path[:] = pipe.recv()
            function, arguments = pipe.recv()
            answer = function(*arguments), None
        except EOFError:
            return
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send(answer)


@pytest.fixture(scope="session")
def ranks():
    """ranks(n).run(function, *arguments): call a module-level function on n ranks of one gloo process group."""
    started = {}

    def get(world_size: int) -> Ranks:
        if world_size not in started or not started[world_size].processes:
            started[world_size] = Ranks(world_size)
        return started[world_size]

    yield get
    for group in started.values():
        group.end()


class Script:
    """A command that is running; everything it starts can be found again by a mark in the environment."""

    def __init__(self, command: list, **options):
        self.mark = f"TEST_MARK={os.getpid()}.{time.monotonic_ns()}"
        name, value = self.mark.split("=")
        environment = (
            os.environ
            | {name: value, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
            | options.pop("env", {})
        )
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )

    def processes(self) -> list[int]:
        """The processes of this command that are alive now (Linux; elsewhere only the first one is known)."""
        if not Path("/proc/self/environ").exists():
            return [] if self.process.poll() is not None else [self.process.pid]
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                pass  # it ended meanwhile
        return found

    def wait(self, timeout: float = 120) -> tuple[int, str]:
        """Exit status and output, once it has ended. Fails if it does not end in time or leaves a process behind."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(
                f"still running after {timeout} s: {self.process.args}\n{self.process.communicate()[0]}"
            )
        deadline = time.monotonic() + 5
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = self.processes()
        self.kill()
        assert not left, f"processes left behind: {left}\n{output}"
        return self.process.returncode, output

    def kill(self) -> None:
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


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


def torchrun(world_size: int, *words) -> list:
    """The command line that starts a script on this many ranks of this host."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        world_size,
        *words,
    ]


def masked(output: str) -> list[str]:
    """The lines of an output with every number as # and blanks folded: its shape, which a recorded output shares."""
    return [
        " ".join(re.sub(r"[-+]?\d[\d.,]*(e[-+]\d+)?(\+cu\d+)?", "#", line).split())
        for line in output.splitlines()
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Stages 02 to 05 promise the same of their wrappers. Each check below runs on every rank; `wrapper` is the class.


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = (
            nn.Embedding(6, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 6, bias=False),
        )
        self.head.weight = self.embedding.weight

    def forward(self, x, rank):
        return self.head(self.hidden(self.embedding(x.abs().long().clamp(max=5))))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 4)

    def forward(self, x, rank):
        return self.second(self.first(x))


class Branches(nn.Module):
    """Ranks take other ways: even ones through left then right, odd ones right then left; some layers not at all."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.only_rank_0 = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.never, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(()))

    def forward(self, x, rank):
        x = self.right(self.left(x)) if rank % 2 == 0 else self.left(self.right(x))
        return self.scale * (self.only_rank_0(x) if rank == 0 else x)


class MixedTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(6, 6, dtype=dtype) for dtype in 2 * [torch.float32, torch.float64]
        )

    def forward(self, x, rank):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)).tanh()
        return x.double()


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 3)).to(
            memory_format=torch.channels_last
        )

    def forward(self, x, rank):
        return self.convolutions(x.repeat(1, 32)[:, :147].view(-1, 3, 7, 7))


def trains_like_one_process(wrapper, build, micro_batches=1, set_to_none=True, options=None):
    """Three steps over all ranks give the gradients and weights of one process that sees all ranks' batches."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tolerance = (
        1e-6 if build is MixedTypes else 1e-12
    )  # where a float32 layer is on the way, and in float64

    def loss(model, step, micro_batch, rank):
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
        return (
            model(3 * torch.randn(8, 6, generator=generator, dtype=torch.float64), rank)
            .square()
            .mean()
        )

    torch.manual_seed(0)
    twin = build() if build is MixedTypes else build().double()
    torch.manual_seed(1 + rank)
    inner = build() if build is MixedTypes else build().double()
    inner.load_state_dict(twin.state_dict()) if rank == 0 else None
    model = wrapper(inner, **(options or {}))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, twin)]
    for step in range(3):
        for micro_batch in range(micro_batches):
            last = micro_batch == micro_batches - 1
            with (
                contextlib.nullcontext()
                if last or not hasattr(model, "no_sync")
                else model.no_sync()
            ):
                loss(model, step, micro_batch, rank).backward()
            for other in range(world_size):
                (loss(twin, step, micro_batch, other) / world_size).backward()
        model.finish_gradient_synchronization()
        for (name, mine), expected in zip(inner.named_parameters(), twin.parameters(), strict=True):
            if mine.requires_grad:
                assert mine.grad.stride() == mine.stride(), (
                    "fused optimizers read both front to back, whatever the strides"
                )
                torch.testing.assert_close(
                    mine.grad,
                    torch.zeros_like(mine) if expected.grad is None else expected.grad,
                    rtol=0,
                    atol=tolerance,
                    msg=lambda text, name=name: f"{name}: {text}",
                )
            else:
                assert mine.grad is None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    for mine, expected in zip(inner.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=tolerance)
        replicas = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(replicas, mine.detach())
        assert all(torch.equal(replica, replicas[0]) for replica in replicas)


def broadcasts_parameters_and_buffers(wrapper):
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(
        memory_format=torch.channels_last
    )
    module[1].running_mean.fill_(7 + dist.get_rank())
    module[1].num_batches_tracked.fill_(7 + dist.get_rank())
    module.register_buffer("strided", torch.randn(6, 6)[:, ::2])
    module.weight = nn.Parameter(torch.randn(6, 6)[:, :3])  # not dense in memory
    wrapper(module)
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3)
    assert torch.equal(module[0].weight, conv.weight) and torch.equal(module[0].bias, conv.bias)
    assert torch.equal(module.strided, torch.randn(6, 6)[:, ::2]) and torch.equal(
        module.weight, torch.randn(6, 6)[:, :3]
    )
    assert (
        module[1].running_mean.tolist() == [7, 7, 7] and module[1].num_batches_tracked.item() == 7
    )


def names_the_difference_between_models(wrapper):
    rank = dist.get_rank()
    for build, difference in [
        (
            lambda: nn.Linear(4, 3 if rank == 0 else 2),
            r"rank 0 has weight \(3, 4\).* rank 1 has weight \(2, 4\)",
        ),
        (
            lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + rank))),
            "rank 0 has nothing, rank 1 has 1.weight",
        ),
        (
            lambda: nn.Linear(2, 2).requires_grad_(rank == 0),
            "requires_grad=True, rank 1 has .*requires_grad=False",
        ),
    ]:
        with pytest.raises(ValueError, match=difference):
            wrapper(build())
    dist.barrier()  # all ranks got here: nobody hangs in a collective that another rank did not enter


def refuses_sparse_gradients(wrapper):
    model = wrapper(nn.Embedding(5, 3, sparse=True))
    with pytest.raises(RuntimeError, match="sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()
        model.finish_gradient_synchronization()


def refuses_a_second_backward_or_forward_before_finish(wrapper):
    model, x = wrapper(nn.Linear(3, 1)), torch.ones(2, 3)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"finish_gradient_synchronization\(\) in between.*no_sync"
    ):
        loss.backward()
    with pytest.raises(
        RuntimeError, match=r"call finish_gradient_synchronization\(\) after backward"
    ):
        model(x)
    model.finish_gradient_synchronization()
    model(x)


def refuses_parameters_frozen_or_unfrozen_later(wrapper):
    for before in (True, False):
        model = wrapper(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1).requires_grad_(before)))
        model.module[1].requires_grad_(not before)
        with pytest.raises(RuntimeError, match="frozen or unfrozen after wrapping.*deepcopy"):
            model(torch.ones(2, 3))
        wrapper(copy.deepcopy(model.module))(torch.ones(2, 3)).sum().backward()


def refuses_to_be_wrapped_or_copied(wrapper):
    model = wrapper(nn.Linear(3, 1))
    for again in (model, model.module):
        with pytest.raises(ValueError, match="wrap a module only once"):
            wrapper(again)
    with pytest.raises(RuntimeError, match=r"wrap copy.deepcopy\(model.module\)"):
        copy.deepcopy(model)
    other = wrapper(copy.deepcopy(model.module))
    assert list(model.state_dict()) == list(DistributedDataParallel(nn.Linear(3, 1)).state_dict())
    model.module.weight.data += 1
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.module.weight, model.module.weight)
    pickle.dumps(model.module.state_dict())


class Fails(nn.Module):
    """Its backward raises when told to, between the gradients of its two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.fail = nn.Linear(6, 6), nn.Linear(6, 6), False

    def forward(self, x, rank=0):
        x = self.first(x)
        if self.fail:
            x.register_hook(lambda _: (_ for _ in ()).throw(ArithmeticError("on purpose")))
        return self.second(x)


def goes_on_after_an_exception_in_backward(wrapper):
    """The step is given up on one rank or on all: finish and zero_grad, and the next one is clean."""
    for failing in ([1], [0, 1]):
        torch.manual_seed(0)
        model = wrapper(Fails().double())
        model.module.fail = dist.get_rank() in failing
        try:
            model(torch.ones(2, 6).double()).sum().backward()
        except ArithmeticError:
            with pytest.raises(RuntimeError, match="call finish_gradient_synchronization"):
                model(torch.ones(2, 6).double())
        model.finish_gradient_synchronization()
        model.zero_grad()
        model.module.fail = False
        equals_torch_ddp(
            None, None, models=(model, DistributedDataParallel(copy.deepcopy(model.module)))
        )


def small_net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def checkpointed():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    return Checkpointed()


def compiled():
    return torch.compile(small_net(), backend="aot_eager")


def equals_torch_ddp(wrapper, build, inputs=None, variation="", models=None):
    """Three training steps with the wrapper and with torch DDP give the same gradients, in float64 to 1e-12."""
    rank = dist.get_rank()
    if models is None:
        torch.manual_seed(rank)
        inner = build().double()
        models = (
            wrapper(inner),
            DistributedDataParallel(
                copy.deepcopy(inner), find_unused_parameters="unused" in variation
            ),
        )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        for model in models:
            torch.manual_seed(100 * step + rank)  # of the inputs and of dropout
            x = inputs() if inputs else torch.randn(4, 6, dtype=torch.float64)
            if "eval" in variation:
                with torch.no_grad():
                    model.eval()(x)
                model.train()
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in variation):
                output = model(x)
                outputs = (
                    output if isinstance(output, tuple) else (output,)
                )  # GoogLeNet: with those of its auxiliary heads
                loss = sum(
                    one.double().square().mean() for one in outputs if isinstance(one, torch.Tensor)
                )
            loss.backward()
            if model is models[0]:
                model.finish_gradient_synchronization()
            if "clip" in variation:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for (name, mine), expected in zip(
            models[0].named_parameters(), models[1].parameters(), strict=True
        ):
            torch.testing.assert_close(
                mine.grad,
                torch.zeros_like(mine) if expected.grad is None else expected.grad,
                rtol=1e-10,
                atol=1e-12,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        if (
            "autocast" not in variation
        ):  # there the last bit of a weight may decide the rounding to bfloat16
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none="keep" not in variation)
    return sum(parameter.numel() for parameter in models[0].parameters())


class Alternating(nn.Module):
    """Uses its two branches in turn."""

    def __init__(self):
        super().__init__()
        self.branches, self.calls = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), 0

    def forward(self, x):
        self.calls += 1
        return self.branches[self.calls % 2](x)


class TiedLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)))


def images():
    return torch.randn(2, 3, 64, 64, dtype=torch.float64)


def small_images():
    return torch.randn(2, 3, 32, 32, dtype=torch.float64)


def tokens():
    return torch.randint(50, (2, 7))


def resnet18():
    return torchvision.models.resnet18()


def mobilenet():
    return torchvision.models.mobilenet_v3_small()


def googlenet():
    return torchvision.models.googlenet(aux_logits=True, init_weights=False)


def vit():
    return torchvision.models.vit_b_16(image_size=32)


def lstm():
    return nn.LSTM(6, 8, num_layers=2, batch_first=True)


WRONG_OR_UNUSUAL_USE = [
    refuses_parameters_frozen_or_unfrozen_later,
    refuses_to_be_wrapped_or_copied,
    goes_on_after_an_exception_in_backward,
    refuses_sparse_gradients,
    refuses_a_second_backward_or_forward_before_finish,
    names_the_difference_between_models,
]
VARIATIONS = [
    (small_net, None, "eval"),
    (small_net, None, "clip"),
    (small_net, None, "keep"),
    (small_net, None, "autocast"),
    (small_net, None, "clip keep eval"),
    (checkpointed, None, ""),
    (compiled, None, ""),
    (Alternating, None, "unused"),
    (TiedLanguageModel, tokens, ""),
]
REAL_MODELS = [
    (resnet18, images, ""),
    (mobilenet, images, ""),
    (googlenet, images, ""),
    (vit, small_images, ""),
    (lstm, None, ""),
]


def check_script_alone(path: Path, folder: Path) -> None:
    """A stage's file copied into an empty folder imports with torch alone, and says what else a run needs."""
    (folder / path.name).write_text(path.read_text())
    code = f"""
import runpy, sys, torch
hidden = ["numpy", "matplotlib", "torchvision", "common"]
sys.modules.update(dict.fromkeys(hidden))  # None: importing it fails
import {path.stem}
for name in hidden:
    del sys.modules[name]
runpy.run_path("{path.name}", run_name="__main__")
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout == "" and run.stderr.count("\n") == 1, run.stderr
    assert (
        run.stderr.startswith("error: ") and "copy the repository's folder common/" in run.stderr
    ), run.stderr


QUICK = ["--steps", "2", "--warmup", "1", "--batch-size", "1", "--context-length", "8"]


def check_run(script, path: Path, folder: Path, world_size: int, device: str = "cpu") -> None:
    """The whole script, small: everything it prints has the shape of reference_output.txt, every file is written."""
    files = {name: folder / name for name in ("json", "trace", "save")}
    words = [
        *QUICK,
        "--device",
        device,
        *(word for name in files for word in (f"--{name}", files[name])),
    ]
    status, output = script(torchrun(world_size, path, *words), cwd=folder).wait()
    assert status == 0, output
    result = json.loads(files["json"].read_text())
    recorded = (
        (path.parent / "reference_output.txt")
        .read_text()
        .replace("gloo on cpu", f"{result['backend']} on {device}")
    )
    assert masked(output) == masked(recorded), output
    assert (result["backend"] == "nccl") == (
        device == "cuda" and torch.cuda.device_count() >= world_size
    )
    assert (
        result["stage"] == path.parent.name
        and result["world_size"] == world_size
        and result["verify"]["passed"]
    )
    assert result["verify"]["accuracy"] > 0.9
    assert [len(one["step_seconds"]) for one in result["candidates"]] == 3 * [2 * world_size]
    assert len(torch.load(files["save"], weights_only=True)) == 6
    spans = {event["name"] for event in json.loads(files["trace"].read_text())["traceEvents"]}
    assert {"forward", "backward", "sync", "optimizer"} <= spans


def wait_for_line(run: Script, start: str) -> None:
    """Read the run's output up to the line that begins so."""
    for line in run.process.stdout:
        if line.startswith(start):
            return
    pytest.fail(f"it ended without a line that starts with {start!r}")


def rank_1(run: Script) -> int:
    """The process of rank 1, once it is there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and run.process.poll() is None:
        for process in run.processes():
            with contextlib.suppress(OSError):
                if b"RANK=1" in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                    return process
    pytest.fail("there is no rank 1")


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finding the ranks needs /proc"
)
FAULTS = ["SIGKILL of a rank", "SIGTERM of the launcher", "Ctrl-C"]
LADDER_MOMENTS = ["", "verify: epoch 1", "benchmark: "]
LONG = ["--batch-size", "1", "--context-length", "8", "--steps", "1000000"]


def is_probe(path: Path) -> bool:
    """Python tries its temporary folder out with such a file, which stays if the process is killed in that very moment."""
    return (
        re.fullmatch("[a-z0-9_]{8}", path.name) is not None
        and path.is_file()
        and path.read_bytes() in (b"", b"blat")
    )


def check_fault(
    script, command: list, moment: str, fault: str, folder: Path, find_victim=rank_1
) -> None:
    """At that line of its output ("": when its ranks start) the run is hit: all of it ends within 30 s and leaves nothing."""
    memory = set(os.listdir("/dev/shm"))
    run = script(command, env={"TMPDIR": str(folder)})
    if moment:
        wait_for_line(run, moment)
    else:
        find_victim(run)
    if fault == "SIGKILL of a rank":
        os.kill(find_victim(run), signal.SIGKILL)
    elif fault == "SIGTERM of the launcher":
        run.process.send_signal(signal.SIGTERM)
    else:
        os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
    status, output = run.wait(timeout=30)
    assert status != 0, output
    assert set(os.listdir("/dev/shm")) <= memory
    left = [
        path.name
        for path in folder.iterdir()
        if not path.name.startswith("torchelastic_")  # torchrun's own logs
        and not is_probe(path)
    ]
    assert not left, left


def check_stopped_rank(
    script, path: Path, *words, moment: str = "benchmark: ", place: str = "main > benchmark > "
) -> None:
    """A rank that does not answer any more ends the run after --timeout, and the message names it and the place."""
    run = script(torchrun(2, path, "--timeout", "3", *words))
    victim = rank_1(run)
    wait_for_line(run, moment)
    os.kill(victim, signal.SIGSTOP)
    status, output = run.wait(timeout=60)
    assert status != 0
    message = rf"error: rank 0 waited more than --timeout 3 s in {place}.*; no answer from rank 1\n"
    assert re.search(message, output), output


WRONG_INPUT = [
    ("--size", "huge"),
    ("--size", ""),
    ("--batch-size", "0"),
    ("--batch-size", "-1"),
    ("--batch-size", "x"),
    ("--batch-size", ""),
    ("--batch-size", "99999999999999"),
    ("--context-length", "0"),
    ("--context-length", "1.5"),
    ("--steps", "0"),
    ("--steps", "-3"),
    ("--steps", "many"),
    ("--warmup", "-1"),
    ("--warmup", ""),
    ("--seed", "-1"),
    ("--seed", "x"),
    ("--dtype", "float16"),
    ("--device", "tpu"),
    ("--backend", "mpi"),
    ("--timeout", "0"),
    ("--timeout", "soon"),
    ("--timeout", "nan"),
    ("--json", ""),
    ("--json", "/"),
    ("--json", "/no/such/folder/x.json"),
    ("--json", "/dev/null/x"),
    ("--data", "/no/such/folder"),
    ("--data", ""),
]
if not torch.cuda.is_available():
    WRONG_INPUT += [("--device", "cuda"), ("--backend", "nccl")]


def check_wrong_input(main, path: Path, option: str, value: str, monkeypatch, capsys) -> None:
    """One line that names option and value, and exit status 2. Without torchrun, but as its only rank."""
    variables = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }
    for name, content in variables.items():
        monkeypatch.setenv(name, str(content))
    monkeypatch.setattr(sys, "argv", [str(path), option, value])
    with pytest.raises(SystemExit) as end:
        main()
    error = capsys.readouterr().err
    assert end.value.code == 2, error
    assert (
        error.startswith(f"{path.name}: error: argument {option}: ")
        and error.count("\n") == 1
        and value in error
    ), error


def check_wrong_input_under_torchrun(script, path: Path) -> None:
    """Said once for all ranks, and not a success; torchrun's own report may follow."""
    status, output = script(torchrun(3, path, "--size", "huge")).wait(60)
    assert (
        status != 0
        and output.count("error: argument --size: ") == 1
        and f'File "{path}"' not in output
    ), output


def check_not_started_by_torchrun(main, path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as end:
        main()
    error = capsys.readouterr().err
    assert (
        end.value.code == 2
        and error.count("\n") == 1
        and "start this script with torchrun: torchrun --standalone" in error
    )
