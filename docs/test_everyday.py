"""The blocks of everyday.md are executed, by several ranks."""

import contextlib
import copy
import io
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tools.testing import ROOT

PAGE = "**.**" + Path(__file__).with_name("everyday.md").read_text()
BLOCKS = {}  # of code, by the words in bold in front of them; the imports are ""
for bold, part in re.findall(r"^\*\*(.*?)\*\*(.*?)(?=^\*\*|\Z)", PAGE, re.DOTALL | re.MULTILINE):
    for code in re.findall(r"```python\n(.*?)```", part, re.DOTALL)[:1]:
        BLOCKS[bold.strip(".?")] = code
INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.arange(24) % 3
DATA = TensorDataset(INPUTS, TARGETS)


def execute(title: str, **names) -> dict:
    """On a rank: the page's imports and one of its blocks, with these names; all names after it."""
    names |= {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    names |= {"device": torch.device("cpu")}
    exec(BLOCKS[""] + BLOCKS[title], names)
    return names


def ddp() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(4, 3).double())


def weighted_means():
    """Shares of unequal weight, in two micro-batches and in one; then all of it is masked."""
    class_weights = torch.tensor([1.0, 4.0, 10.0], dtype=torch.float64)
    targets = TARGETS.where(torch.arange(24) % 5 > 0, -100)
    of_targets = eval(re.search(r"`(class_weights\[.*?\])`", PAGE)[1])
    parts = [slice(7), slice(7, 9)] if dist.get_rank() == 0 else [slice(9, 24)]
    model, module = ddp(), ddp().module
    F.cross_entropy(module(INPUTS), targets, weight=class_weights).backward()
    for counts, times in ((targets != -100, 1), (torch.zeros(24), 0)):
        weight = counts * of_targets
        micro_batches = [(INPUTS[part], targets[part], weight[part]) for part in parts]
        model.zero_grad()
        execute("A weighted mean", model=model, micro_batches=micro_batches)
        found, expected = model.module.weight.grad, times * module.weight.grad
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def info_nce(out, targets):
    return F.cross_entropy(out @ out.roll(1, 1).T, torch.arange(len(targets)))


def losses_across_samples():
    """With two parameters in the loss: one of the wrapped module, and one of no module."""
    size = len(INPUTS) // dist.get_world_size()
    share = slice(size * dist.get_rank(), size * (dist.get_rank() + 1))
    gradients = []
    for whole in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(4, 3).double()
        module.scale, shift = (nn.Parameter(torch.tensor(0.3).double()) for _ in range(2))

        def of_parameters(out, y, scale=module.scale, shift=shift):
            return info_nce(scale.exp() * out + shift * torch.arange(3), y)

        if whole:
            of_parameters(module(INPUTS), TARGETS).backward()
        else:
            names = {"model": DistributedDataParallel(module), "inputs": INPUTS[share]}
            names |= {"targets": TARGETS[share], "loss_function": of_parameters}
            execute("A loss across samples", **names)
        gradients.append([module.weight.grad, module.scale.grad, shift.grad])
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def bad_batch():
    """Rank 1's third loss is NaN: two ranks train as a process that skips the third batch."""
    [line] = re.findall(r"`(if\s+clip_grad_norm_\(…\).*?)`", PAGE, re.DOTALL)
    code = " ".join(line.split()).replace("…", "model.parameters(), 1e9")
    model, module = ddp(), ddp().module
    names = {"model": model, "clip_grad_norm_": nn.utils.clip_grad_norm_}
    names["optimizer"] = torch.optim.Adam(model.parameters())
    single = torch.optim.Adam(module.parameters())
    for step in range(5):
        loss = F.cross_entropy(model(INPUTS[dist.get_rank() :: 2]), TARGETS[dist.get_rank() :: 2])
        (loss * (torch.nan if (dist.get_rank(), step) == (1, 2) else 1)).backward()
        exec(code, names)
        names["optimizer"].zero_grad()
        if step != 2:
            F.cross_entropy(module(INPUTS), TARGETS).backward()
            single.step()
            single.zero_grad()
    torch.testing.assert_close(model.module.weight, module.weight, rtol=0, atol=1e-12)


def test_stream():
    """No sample is left out, or seen by two workers."""
    share = re.search(r"`(itertools\.islice\(.*?\))`", PAGE)[1]
    seen = []
    for rank, number in itertools.product(range(3), range(2)):
        worker = SimpleNamespace(id=number)
        names = {"stream": range(17), "rank": rank, "worker": worker, "itertools": itertools}
        seen += eval(share, names | {"world_size": 3, "num_workers": 2})
    assert sorted(seen) == [*range(17)]


def test_batches_of_like_lengths():
    """Each rank gets as many, and in a step the ranks get neighbours; what is too many is left."""
    share = re.search(r"`(batches\[:.*?\])`", PAGE)[1]
    names = [{"batches": range(11), "rank": rank, "world_size": 3} for rank in range(3)]
    assert [[*eval(share, each)] for each in names] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def mixed_precision():
    """As one process in float32; in float16 both ranks skip a step, because of rank 1's batch."""
    share = slice(dist.get_rank(), None, dist.get_world_size())
    bad = torch.inf if dist.get_rank() == 1 else 1.0
    for dtype, scale_of_inputs in ((torch.bfloat16, 4), (torch.float16, 2)):  # 4 is clipped
        inputs = scale_of_inputs * INPUTS.float()
        module = ddp().module.float()
        model = DistributedDataParallel(copy.deepcopy(module))
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, module)]
        batches = 3 * [(inputs[share], TARGETS[share])]
        if dtype == torch.float16:
            batches.insert(1, (bad * inputs[share], TARGETS[share]))
        names = {"model": model, "optimizer": optimizers[0], "loader": batches, "dtype": dtype}
        scaler = execute("Mixed precision", **names)["scaler"]
        for _ in range(3):
            F.cross_entropy(module(inputs), TARGETS).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizers[1].step()
            optimizers[1].zero_grad()
        assert scaler.get_scale() == (1 if dtype == torch.bfloat16 else 2**15)
        torch.testing.assert_close(model.module.weight, module.weight, rtol=0, atol=0.02)


def metric_of_all():
    """Ranks have 13 and 12 predictions."""
    scores = torch.rand(25, generator=torch.Generator().manual_seed(0))
    share = slice(dist.get_rank(), None, dist.get_world_size())
    names = {"scores": scores[share], "targets": torch.arange(25)[share]}
    names = execute("A metric that isn't a sum", **names)
    assert len(names["targets"]) == 25
    torch.testing.assert_close(names["scores"], scores[names["targets"]])


def preempted():
    """The signal reaches rank 1 and its loader's workers in the second step: both ranks stop.

    Then they go on with the rest.
    """
    handler = signal.getsignal(signal.SIGTERM)
    sampler = DistributedSampler(DATA, drop_last=True)
    seen = []

    def train_step(batch):
        seen.append(batch[0])
        if len(seen) == 2 and dist.get_rank() == 1:
            processes = [os.getpid(), *(each.pid for each in multiprocessing.active_children())]
            subprocess.run(["kill", *map(str, processes)], check=True)

    loader = partial(DataLoader, num_workers=2, multiprocessing_context="fork")
    names = {"sampler": sampler, "train_set": DATA, "batch_size": 3, "epoch": 5}
    names |= {"train_step": train_step, "done": 0}
    BLOCKS["Preempted"] = BLOCKS["Preempted"].replace("in DataLoader(", "in loader(")
    names["done"] = execute("Preempted", loader=loader, **names)["done"]
    assert len(seen) == names["done"] == 2
    assert execute("Preempted", loader=loader, **names)["done"] == 4
    signal.signal(signal.SIGTERM, handler)
    sampler.set_epoch(5)
    torch.testing.assert_close(torch.cat(seen), INPUTS[[*sampler]])


class Blocks(nn.Module):
    """A model of blocks, which notes the dtypes in which it computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.dtypes = set()

    def forward(self, inputs):
        outputs = self.blocks(inputs)
        self.dtypes.add(outputs.dtype)
        return outputs


def sharded(path: Path, steps: range):
    """Some of four steps: afterwards the weights are those of one process that did all so far."""
    module, whole = Blocks(), Blocks()
    share = slice(dist.get_rank(), None, dist.get_world_size())
    batches = [4**step * INPUTS.float() for step in range(4)]  # most are clipped
    names = {"module": module, "path": path}
    names["loader"] = [(batches[step][share], TARGETS[share]) for step in steps]
    code = BLOCKS[""] + BLOCKS["Shard"]
    exec(code.replace("torch.bfloat16", "torch.float64"), names)  # as exact as the other's float32
    optimizer = torch.optim.AdamW(whole.parameters())
    for inputs in batches[: steps.stop]:
        F.cross_entropy(whole(inputs), TARGETS).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert module.dtypes == {torch.float64}
    for ours, expected in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), expected, rtol=0, atol=1e-5)


def test_shards_are_saved_for_any_number_of_ranks(ranks, tmp_path):
    ranks(2).run(sharded, tmp_path / "saved", range(2))
    ranks(3).run(sharded, tmp_path / "saved", range(2, 4))


def mean_losses():
    """So a scheduler decides alike on all ranks, though only rank 1's loss gets worse."""
    for epoch in range(3):
        loss = torch.tensor(2.0 * epoch if dist.get_rank() == 1 else -1.0 * epoch)
        assert execute("Print the mean loss", loss=loss, epoch=epoch)["mean_loss"] == epoch / 2


def evaluation():
    """With BatchNorm's statistics of rank 0, and its cache, as long as it has needed it."""
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    model = DistributedDataParallel(module)
    for statistic in (module[0].running_mean, module[0].running_var):
        statistic.fill_(5 + dist.get_rank())
    module.register_buffer("cache", torch.ones(1 + dist.get_rank()), persistent=False)
    right = execute("Evaluate", model=model, test_set=DATA)["right"]
    assert right == (module(INPUTS).argmax(1) == TARGETS).sum()
    for statistic in (module[0].running_mean, module[0].running_var):
        assert statistic.tolist() == 4 * [5.0]
    assert module.cache.tolist() == [1.0]


def printed(title: str, bypassed=False) -> str:
    """On a rank: what is printed in five steps after one of the page's blocks."""
    from tools import same

    sys.modules["same"] = same  # a second copy would use the first one's keys again
    sys.path.append(str(ROOT / "tools"))
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = model.module if bypassed else model
    share = slice(dist.get_rank(), None, dist.get_world_size())
    with contextlib.redirect_stdout(io.StringIO()) as output:
        execute(title, model=model, optimizer=optimizer)
        for _ in range(5):
            F.cross_entropy(forward(INPUTS[share]), TARGETS[share]).backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()  # else rank 0 may not find rank 1's numbers yet
    return output.getvalue()


def watched():
    """Rank 0 is told that the loss bypasses the wrapper."""
    output = printed("Watch it", bypassed=True)
    assert dist.get_rank() > 0 or "model.module" in output, output


def compared():
    """Rank 0 says that two runs are the same; the first one recorded."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        printed("Compare with one process")
        output = printed("Compare with one process")
        os.chdir(here)
    assert dist.get_rank() > 0 or "The same as 2 ranks" in output, output


OF_TWO_RANKS = [losses_across_samples, weighted_means]
OF_TWO_RANKS += [bad_batch, mean_losses, evaluation, watched, compared]
OF_TWO_RANKS += [mixed_precision, metric_of_all, preempted]
DRILLS = [(losses_across_samples, 3), *((drill, 2) for drill in OF_TWO_RANKS)]


@pytest.mark.parametrize("drill, world_size", DRILLS)
def test_blocks(ranks, drill, world_size):
    ranks(world_size).run(drill)


def test_no_block_is_left_out():
    code = Path(__file__).read_text()
    assert [title for title in BLOCKS if f'"{title}"' not in code] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would take GPUs")
def test_start(forked, tmp_path):
    program = BLOCKS[""] + "module = torch.nn.Linear(4, 1)\n" + BLOCKS["Start"]
    program += "print(rank, model.device_ids)\ndist.destroy_process_group()\n"
    (tmp_path / "train.py").write_text(program)
    status, output = forked(2, tmp_path / "train.py")
    assert status == 0 and {"0 None", "1 None"} <= {*output.split("\n")}, output


LINEAR = "torch.nn.Linear(4, 1)"
DROPOUT = f"torch.nn.Sequential(torch.nn.Dropout(), {LINEAR})"


@pytest.mark.parametrize("changes, ranks_in_the_end", [({}, 3), ({LINEAR: DROPOUT}, 2)])
def test_training_goes_on(forked, tmp_path, changes, ranks_in_the_end):
    """Four epochs against two and two more, in float64; as many ranks end with the same bits.

    Each rank has a disk of its own.
    """
    program = BLOCKS[""] + BLOCKS["Save and resume"]
    always = {
        "torch.manual_seed(0)": "torch.set_default_dtype(torch.float64); torch.manual_seed(0)",
        "module.weight.tolist()": "''",
        "epoch, saved = 0,": "path += f'_of_{rank}'; epoch, saved = 0,",
    }
    for old, new in {**always, **changes}.items():
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    (tmp_path / "train.py").write_text(program)
    for world_size, last_epoch, name in (
        (2, 4, "undisturbed"),
        (2, 2, "resumed"),
        (ranks_in_the_end, 4, "resumed"),
    ):
        status, output = forked(world_size, tmp_path / "train.py", last_epoch, tmp_path / name)
        assert status == 0 and f"epoch {last_epoch}: " in output, output
    names = "undisturbed_of_0", "resumed_of_0"
    undisturbed, resumed = (torch.load(tmp_path / name)["module"] for name in names)
    apart = 0 if ranks_in_the_end == 2 else 1e-12
    torch.testing.assert_close(resumed, undisturbed, rtol=0, atol=apart)
