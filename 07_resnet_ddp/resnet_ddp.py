r"""07: ResNet-18 on one device against torch's DDP on N, and where the time goes.

The same script does both: started by torchrun it trains with DDP on that many ranks, started by
plain python it trains on a single device. Each writes results/07_resnet_ddp_N.json, N ranks, and
compare_runs.py compares and draws what is there. The images come from images.py.

    make 07_resnet_ddp NPROC=2                                (DDP, then single, then a picture)
    python 07_resnet_ddp/resnet_ddp.py                                                 (single)
    torchrun --standalone --nproc-per-node 2 07_resnet_ddp/resnet_ddp.py               (DDP)
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 \
        07_resnet_ddp/resnet_ddp.py --checkpoint FILE        (DDP; restarts, see the README)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 \
        --master-port 29400 07_resnet_ddp/resnet_ddp.py      (two hosts; R is 0 on HOST0, else 1)

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020.
"""

import math
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Training(NamedTuple):
    """What a step changes, and where and how it is taken."""

    network: nn.Module  # ResNet-18
    model: nn.Module  # its DDP wrapper, or the network itself on one device
    optimizer: torch.optim.Optimizer
    device: torch.device


def sharded_loaders(
    train_set: Dataset, test_set: Dataset, batch_size: int, seed: int, **options
) -> tuple[DataLoader, DataLoader]:
    """Returns this rank's share of both sets, `batch_size` images at a time; `options` go to both.

    The training order depends on the seed and the epoch alone, and rank r takes every world_size-th
    image of it from the r-th on. So the ranks' k-th batches together are the k-th batch of one
    device with a batch of world_size * batch_size.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    sampler = DistributedSampler(train_set, world_size, rank, seed=seed, drop_last=True)
    train_batches = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **options)
    # For evaluation a DistributedSampler would repeat images until the shares are equal, and those
    # would count twice.
    share = range(rank, len(test_set), world_size)
    test_batches = DataLoader(test_set, batch_size, sampler=share, **options)
    return train_batches, test_batches


def train_step(training: Training, images, labels, watch) -> torch.Tensor:
    """Take one step; returns this rank's loss and accuracy, [2] on the device, as the batch is.

    The stopwatch gets the marks forward, last gradient, backward and end. On a GPU those are events
    in its stream, and nothing here waits for them.
    """
    # Backward reaches the first weight last. What DDP still has to wait for then is exposed.
    first_weight = next(training.model.parameters())
    hook = first_weight.register_post_accumulate_grad_hook(lambda _: watch.mark("last gradient"))
    logits = training.model(images)  # DDP first gives every rank the buffers of rank 0
    loss = F.cross_entropy(logits, labels)
    watch.mark("forward")
    loss.backward()  # DDP averages the gradients over the ranks meanwhile, bucket by bucket
    watch.mark("backward")
    hook.remove()
    training.optimizer.step()  # the same gradients on all ranks, so the same weights
    training.optimizer.zero_grad()
    watch.mark("end")
    is_right = logits.argmax(1) == labels
    return torch.stack([loss.detach(), is_right.to(loss.dtype).mean()])


@torch.no_grad()
def evaluate(training: Training, batches) -> dict:
    """Returns loss, accuracy and number of images over the batches of all ranks, on every rank.

    Not the DDP wrapper is called but what it wraps: the wrapper's forward may send buffers, and
    then a rank with one batch more than the others would wait in it for ever.
    """
    network = training.network.eval()
    # Since the last forward each rank's running statistics went their own way.
    for buffer in network.buffers():
        dist.broadcast(buffer, 0)
    sums = torch.zeros(3, dtype=torch.float64, device=training.device)  # losses, right ones, images
    for batch in batches:
        images, labels = (t.to(training.device, non_blocking=True) for t in batch)
        logits = network(images)
        sums[0] += F.cross_entropy(logits.double(), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return {"loss": loss / count, "accuracy": right / count, "images": int(count)}


# ==================================================================================================
# Below this line: building, the epochs, checkpoints, the report, the arguments, main.


def prepare(args, device: torch.device, ddp: bool) -> Training:
    """Returns ResNet-18, the same on all ranks and wrapped if `ddp`, with its optimizer."""
    from torchvision.models import resnet18

    torch.manual_seed(args.seed)
    network = model = resnet18(num_classes=10).to(device)
    if ddp:
        # With views a gradient lies in its bucket from the start. find_unused_parameters stays off:
        # it would walk through the graph in every step, and ResNet uses all its parameters.
        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    return Training(network, model, optimizer, device)


SECONDS = {  # what is measured of a step: its row in the report, from one mark to another
    "data_seconds": ("data", "start", "data"),
    "compute_sync_seconds": ("compute+sync", "data", "end"),
    "forward_seconds": ("- forward", "data", "forward"),
    "backward_seconds": ("- backward", "forward", "last gradient"),
    "exposed_comm_seconds": ("- exposed", "last gradient", "backward"),
    "optimizer_seconds": ("- optimizer", "backward", "end"),
    "batch_seconds": ("batch", "start", "end"),
}


def train_epoch(args, training: Training, batches, epoch: int, steps: int) -> list[dict]:
    """Train on so many batches; returns the SECONDS of each.

    Prints a line every --log-every steps: rank 0's times, loss and accuracy over all ranks.
    """
    from common import setup
    from common.timing import Stopwatch

    watches = []
    training.model.train()
    batches = iter(batches)
    began = time.perf_counter()
    for step in range(1, steps + 1):
        name = f"epoch {epoch} step {step:3}/{steps}"
        setup.progress(name)
        watch = Stopwatch(training.device)
        watch.mark("start")
        images, labels = (t.to(training.device, non_blocking=True) for t in next(batches))
        watch.mark("data")
        means = train_step(training, images, labels, watch)
        watches.append(watch)
        if step % args.log_every == 0 or step == steps:
            dist.all_reduce(means)
            means /= dist.get_world_size()
            data, batch = watch.seconds("start", "data"), watch.seconds("start", "end")
            left = (time.perf_counter() - began) * ((args.epochs - epoch + 1) * steps / step - 1)
            setup.say(
                f"{name}  data {1000 * data:.1f} ms  compute+sync {1000 * (batch - data):.1f} ms  "
                f"{args.global_batch / batch:.1f} images/s  loss {means[0]:.4f}  "
                f"accuracy {means[1]:.1%}, {left:.0f} s left"
            )
    # Here we wait for a GPU.
    spans = {name: (start, end) for name, (_, start, end) in SECONDS.items()}
    return [{name: watch.seconds(*span) for name, span in spans.items()} for watch in watches]


def fit(args, training: Training, train_batches, test_batches, steps: int) -> dict:
    """Train, evaluating and saving after each epoch; returns what was measured, as [rank][step].

    Of epochs that a checkpoint brings along only the evaluations are there.
    """
    from common import setup

    evaluations = resume(args, training) if args.checkpoint else []
    first = len(evaluations) + 1
    taken = []
    seconds = 0.0
    for epoch in range(first, args.epochs + 1):
        train_batches.sampler.set_epoch(epoch)  # else every epoch has the same order
        dist.barrier()  # rank 0 may still be saving, and nobody's first batch should count that
        began = time.perf_counter()
        taken += train_epoch(args, training, train_batches, epoch, steps)
        seconds += time.perf_counter() - began
        setup.progress(f"epoch {epoch}: images held out")
        found = evaluate(training, test_batches)
        evaluations.append(found)
        setup.say(
            f"epoch {epoch} of {args.epochs} done, held out: loss {found['loss']:.4f}, "
            f"accuracy {found['accuracy']:.2%} of {found['images']} images"
        )
        if args.checkpoint and dist.get_rank() == 0:
            save(args, evaluations, training)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, taken)
    result = {name: [[step[name] for step in rank] for rank in ranks] for name in SECONDS}
    result |= {"evaluations": evaluations, "first_epoch": first, "train_seconds": seconds}
    return result | {"images": len(taken) * args.global_batch}


def save(args, evaluations: list[dict], training: Training) -> None:
    """Write all that the rest of the training depends on, after an epoch, on rank 0.

    Nothing is random but the order of the images, which comes from the seed and the epoch; with
    dropout or augmentation save torch.get_rng_state() of every rank, too.
    """
    checkpoint = {
        "settings": describe(args),
        "evaluations": evaluations,
        "network": training.network.state_dict(),
        "optimizer": training.optimizer.state_dict(),
    }
    beside = args.checkpoint.with_name(args.checkpoint.name + ".part")
    torch.save(checkpoint, beside)
    beside.replace(args.checkpoint)  # the old one or the new one, and at no time half of it


def resume(args, training: Training) -> list[dict]:
    """Restore what `save` wrote; returns the evaluations, one per epoch, [] if there is no file.

    Rank 0 reads and all get it. Ends the run if other settings wrote it.
    """
    from common import setup

    found = [None]
    if dist.get_rank() == 0 and args.checkpoint.exists():
        try:
            found = [torch.load(args.checkpoint, map_location="cpu", weights_only=True)]
            if found[0]["settings"] != describe(args):
                raise ValueError(f"it was written with {found[0]['settings']}")
            if len(found[0]["evaluations"]) >= args.epochs:
                raise ValueError(f"it has all {args.epochs} epochs: add some by --epochs")
        except Exception as error:  # torch.load has many kinds: cut short, not a checkpoint
            setup.fail(f"argument --checkpoint: cannot resume from '{args.checkpoint}': {error!r}")
    dist.broadcast_object_list(found)
    [checkpoint] = found
    if checkpoint is None:
        return []
    training.network.load_state_dict(checkpoint["network"])
    training.optimizer.load_state_dict(checkpoint["optimizer"])
    setup.say(f"resumed from {args.checkpoint} after epoch {len(checkpoint['evaluations'])}")
    return checkpoint["evaluations"]


def describe(args) -> str:
    """Returns what is trained and how, whatever the number of ranks."""
    return (
        f"{args.data or 'digits'}, {args.image_size} pixels, batches of {args.global_batch}, "
        f"{args.steps_per_epoch or 'all'} steps per epoch, learning rate {args.lr:g}, "
        f"seed {args.seed}"
    )


def print_report(result: dict) -> None:
    """Where the time of a batch went, over all steps of all ranks, and what came out."""
    import numpy

    from common import report, setup

    batch = numpy.mean(result["batch_seconds"])
    rows = []
    for name, (row, _, _) in SECONDS.items():
        seconds = numpy.array(result[name]) / result["dilation"]
        mean = seconds.mean()
        total, share = mean * seconds.shape[1], numpy.mean(result[name]) / batch
        row = [row, f"{total:.1f}", f"{share:.1%}", f"{1000 * mean:.1f}"]
        rows.append(row + report.milliseconds(seconds))
    report.print_table(["", "total s", "share", "mean ms", "p50", "p75", "p90", "p95"], rows)
    seconds = result["train_seconds"] / result["dilation"]
    setup.say(
        f"{result['images']} images in {seconds:.2f} s: {result['images'] / seconds:.1f} images/s "
        f"over all ranks; held-out accuracy {result['evaluations'][-1]['accuracy']:.2%}"
    )


def add_size_arguments(parser) -> None:
    from common.setup import whole_number as whole

    add = parser.add_argument
    add("--image-size", type=whole(8, 1024), help="pixels (default: 64 on CPU, 224 on CUDA)")
    add("--global-batch", type=whole(1), help="images per step (default: 64 on CPU, 512 on CUDA)")
    add("--threads", type=whole(1, 1024), default=1, help="per process: a device is a core")


def add_arguments(parser) -> None:
    from common import setup
    from common.setup import whole_number as whole

    add_size_arguments(parser)
    add = parser.add_argument
    add("--epochs", type=whole(1), default=3)
    add("--steps-per-epoch", type=whole(1), help="end each epoch after so many (default: all)")
    add("--held-out", type=whole(1), help="evaluate on so many images (default: all)")
    rate = setup.checked(float, lambda number: 0 < number < math.inf, "a finite number above 0")
    add("--lr", type=rate, default=0.02, help="learning rate")
    add("--seed", type=whole(0), default=0)
    workers = "loading processes per rank (default: 0 on CPU; CUDA: cores per GPU, at most 8)"
    add("--workers", type=whole(0, 64), help=workers)
    add("--log-every", type=whole(1), default=5, metavar="STEPS", help="between lines")
    add("--data", metavar="DIR", help="CIFAR-10 from this folder instead of the digits")
    add("--download", action="store_true", help="fetch CIFAR-10 into --data first")
    saved = "saved after each epoch, resumed from if there"
    add("--checkpoint", type=setup.output_file, metavar="FILE", help=saved)
    folder = setup.checked(Path, Path.is_dir, "a folder")
    where = (
        "for 07_resnet_ddp_N.json of N ranks and the picture (default: the repository's results)"
    )
    add("--results", type=folder, metavar="DIR", help=where)
    setup.add_process_group_arguments(parser)


def choose_sizes(args) -> None:
    """Fill in the defaults that depend on the device, and the batches of a rank and of all."""
    from common import setup

    gpus = torch.cuda.device_count() if args.device != "cpu" else 0
    args.image_size = args.image_size or (224 if gpus else 64)
    args.global_batch = args.global_batch or (512 if gpus else 64)
    if args.workers is None:
        args.workers = min(int(setup.cores() // gpus), 8) if gpus else 0
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    args.batch_per_rank = args.global_batch // ranks
    if args.global_batch % ranks or args.batch_per_rank < 2:
        setup.fail(
            f"argument --global-batch: '{args.global_batch}' cannot be divided by {ranks} ranks "
            "into batches of at least 2, as BatchNorm needs them"
        )


def be_the_only_rank() -> None:
    """Say what torchrun would of a group of one, on a free port: it makes one code of both."""
    from common.setup import fail

    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        fail(f"srun has started {tasks} tasks, and each would train alone: let srun start torchrun")
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def begin(args, device: torch.device) -> dict:
    """Print what is trained where and how; returns the head of the result."""
    import torchvision

    from common import report
    from common.setup import say

    result = report.begin("07_resnet_ddp", args, device)
    version, cuda, gpus = torchvision.__version__, torch.version.cuda, torch.cuda.device_count()
    say(f"torchvision {version}, CUDA {cuda or 'none'}, {gpus} GPUs on this host")
    say(f"{describe(args)}; per rank {args.batch_per_rank} images, {args.workers} loader workers")
    versions = {"torchvision": version, "cuda": cuda, "gpus": gpus}
    return result | versions | {"settings": describe(args)}


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import compare_runs
        from images import load_images

        from common import report, setup
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error}: pip install torchvision, and copy the repository's folder common/, "
            f"compare_runs.py and images.py into {folder}"
        )

    parser = setup.Parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    if "RANK" not in os.environ:  # torchrun sets it
        be_the_only_rank()
    choose_sizes(args)
    with setup.process_group(args.device, args.backend, args.timeout, args.network) as device:
        torch.set_num_threads(args.threads)
        train_set, test_set = load_images(args.data, args.download, args.image_size)
        test_set = Subset(test_set, range(len(test_set))[: args.held_out])
        options = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}
        train_batches, test_batches = sharded_loaders(
            train_set, test_set, args.batch_per_rank, args.seed, **options
        )
        steps = len(range(len(train_batches))[: args.steps_per_epoch])
        if steps == 0:
            setup.fail(f"argument --global-batch: there are only {len(train_set)} images")

        result = begin(args, device)
        training = prepare(args, device, ddp=result["world_size"] > 1)
        with setup.wire() or nullcontext():
            result |= fit(args, training, train_batches, test_batches, steps)
        if dist.get_rank() == 0:
            print_report(result)
            name = f"07_resnet_ddp_{result['world_size']}.json"
            file = args.results / name if args.results else setup.result_file(name)
            report.write_json(file, result)
            if file:
                compare_runs.compare(file.parent)


if __name__ == "__main__":
    main()
