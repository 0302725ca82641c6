r"""07: ResNet-18 on one device against torch's DDP on N, and where the time goes.

The same script does both: started by torchrun it trains with DDP on that many ranks, started by
plain python it trains on a single device. Each writes results/07_resnet_ddp_N.json, N ranks. A run
with DDP then compares itself with one device, by compare_runs.py. The images come from images.py.

    make 07_resnet_ddp NPROC=2                                (single, then DDP, then a picture)
    python 07_resnet_ddp/resnet_ddp.py                                                 (single)
    torchrun --standalone --nproc-per-node 2 07_resnet_ddp/resnet_ddp.py               (DDP)
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 \
        07_resnet_ddp/resnet_ddp.py --checkpoint FILE        (DDP; restarts, see the README)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 \
        --master-port 29400 07_resnet_ddp/resnet_ddp.py      (two hosts; R is 0 on HOST0, else 1)

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020.
"""

import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Training(NamedTuple):
    """Holds what a step changes, and the device that takes it."""

    module: nn.Module  # ResNet-18
    model: nn.Module  # its DDP wrapper, or ResNet-18 itself on one device
    optimizer: torch.optim.Optimizer
    device: torch.device


def loaders_of_shares(
    train_set: Dataset, test_set: Dataset, batch_size: int, **options
) -> tuple[DataLoader, DataLoader]:
    """Return loaders of this rank's share of both sets, `batch_size` images at a time.

    Both get the `options`.
    The training order depends on the epoch alone, and rank r takes every world_size-th image of it
    from the r-th on. So the ranks' k-th batches together are the k-th batch of one device with a
    batch of world_size * batch_size.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    sampler = DistributedSampler(train_set, world_size, rank, drop_last=True)
    train_batches = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **options)
    # For evaluation a DistributedSampler would repeat images until the shares are equal, and those
    # would count twice.
    share = range(rank, len(test_set), world_size)
    test_batches = DataLoader(test_set, batch_size, sampler=share, **options)
    return train_batches, test_batches


def train_step(training: Training, images, labels, watch) -> torch.Tensor:
    """Take one step; return this rank's loss and accuracy, [2] on the batch's device.

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
    """Return loss, accuracy and number of images over the batches of all ranks, on every rank.

    It calls what DDP wraps and not the wrapper, whose forward may send buffers: a rank with one
    batch more than the others would wait in it for ever.
    """
    module = training.module.eval()
    # Since the last forward each rank has updated its own running statistics.
    for buffer in module.buffers():
        dist.broadcast(buffer, 0)
    sums = torch.zeros(3, dtype=torch.float64, device=training.device)  # losses, right ones, images
    for batch in batches:
        images, labels = (t.to(training.device, non_blocking=True) for t in batch)
        logits = module(images)
        sums[0] += F.cross_entropy(logits.double(), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return {"loss": loss / count, "accuracy": right / count, "images": int(count)}


# ==================================================================================================
# Below this line: building, the epochs, checkpoints, the report, the arguments, main.


def build(device: torch.device, ddp: bool, learning_rate: float) -> Training:
    """Return ResNet-18, the same on all ranks and wrapped if `ddp`, with its optimizer."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    module = model = resnet18(num_classes=10).to(device)
    if ddp:
        # With views a gradient lies in its bucket from the start. find_unused_parameters stays off:
        # it would walk through the graph in every step, and ResNet uses all its parameters.
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)
    return Training(module, model, optimizer, device)


SECONDS = {  # what is measured in a step: its row in the report, its first and its last mark
    "data_seconds": ("data", "start", "data"),
    "compute_sync_seconds": ("compute+sync", "data", "end"),
    "forward_seconds": ("- forward", "data", "forward"),
    "backward_seconds": ("- backward", "forward", "last gradient"),
    "exposed_comm_seconds": ("- exposed", "last gradient", "backward"),
    "optimizer_seconds": ("- optimizer", "backward", "end"),
    "batch_seconds": ("batch", "start", "end"),
}


def seconds_of(watch) -> dict[str, float]:
    """Return the SECONDS of a step. On a GPU this waits for its end."""
    return {name: watch.seconds(start, end) for name, (_, start, end) in SECONDS.items()}


def train_epoch(args, training: Training, batches, epoch: int) -> list[dict]:
    """Train for an epoch; return the SECONDS of each step.

    Every --log-every steps it prints loss and accuracy over all ranks, and rank 0's times.
    """
    from common import setup
    from common.timing import Stopwatch

    watches = []
    training.model.train()
    steps = min(len(batches), args.steps_per_epoch or len(batches))
    batches = iter(batches)
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
            loss, accuracy = (means / dist.get_world_size()).tolist()
            times = seconds_of(watch)
            setup.say(
                f"{name}  data {1000 * times['data_seconds']:.1f} ms  "
                f"compute+sync {1000 * times['compute_sync_seconds']:.1f} ms  "
                f"{args.global_batch / times['batch_seconds']:.1f} images/s  "
                f"loss {loss:.4f}  accuracy {accuracy:.1%}"
            )
    return [seconds_of(watch) for watch in watches]


def fit(args, training: Training, train_batches, test_batches) -> dict:
    """Train, evaluate and save after each epoch; return what was measured, as [rank][step].

    Epochs that a checkpoint brings along have only their evaluations there.
    """
    from common import setup, timing

    evaluations = resume(args, training) if args.checkpoint else []
    steps = []
    seconds = 0.0
    for epoch in range(len(evaluations) + 1, args.epochs + 1):
        train_batches.sampler.set_epoch(epoch)  # else every epoch has the same order
        dist.barrier()  # rank 0 may still be saving, and nobody's first batch should count that
        began = time.perf_counter()
        steps += train_epoch(args, training, train_batches, epoch)
        seconds += (time.perf_counter() - began) / setup.network().stretch
        setup.progress(f"epoch {epoch}: images held out")
        evaluations.append(evaluate(training, test_batches))
        held_out = "loss {loss:.4f}, accuracy {accuracy:.2%} of {images} images"
        held_out = held_out.format(**evaluations[-1])
        setup.say(f"epoch {epoch} of {args.epochs} done, held out: {held_out}")
        if args.checkpoint and dist.get_rank() == 0:
            save(args, evaluations, training)
    ranks = timing.gather(steps)
    result = {name: [[step[name] for step in rank] for rank in ranks] for name in SECONDS}
    result["images"] = len(steps) * args.global_batch
    result["evaluations"] = evaluations
    result["train_seconds"] = seconds
    return result


def save(args, evaluations: list[dict], training: Training) -> None:
    """Write all that the rest of the training depends on, after an epoch, on rank 0.

    Only the order of the images is random, and the epoch determines it. With dropout or
    augmentation, save every rank's torch.get_rng_state(), too.
    """
    checkpoint = {
        "settings": settings_of(args),
        "evaluations": evaluations,
        "module": training.module.state_dict(),
        "optimizer": training.optimizer.state_dict(),
    }
    beside = args.checkpoint.with_name(args.checkpoint.name + ".part")
    torch.save(checkpoint, beside)
    beside.replace(args.checkpoint)  # at any time the old one or the new one is there, whole


def resume(args, training: Training) -> list[dict]:
    """Restore what `save` wrote; return the evaluations, one per epoch, [] if there is no file.

    Rank 0 reads and all get it. Ends the run if other settings wrote it.
    """
    from common import setup

    found = [None]
    if dist.get_rank() == 0 and args.checkpoint.exists():
        try:
            found = [torch.load(args.checkpoint, map_location="cpu", weights_only=True)]
            done = len(found[0]["evaluations"])
            settings = found[0]["settings"]
            if done >= args.epochs or settings != settings_of(args):
                raise ValueError(f"it has {done} epochs of {settings}")
        except Exception as error:  # torch.load has many kinds: cut short, not a checkpoint
            setup.fail(f"argument --checkpoint: cannot resume from '{args.checkpoint}': {error!r}")
    dist.broadcast_object_list(found)
    [checkpoint] = found
    if checkpoint is None:
        return []
    training.module.load_state_dict(checkpoint["module"])
    training.optimizer.load_state_dict(checkpoint["optimizer"])
    setup.say(f"resumed from {args.checkpoint} after epoch {len(checkpoint['evaluations'])}")
    return checkpoint["evaluations"]


def settings_of(args) -> str:
    """Say what is trained and how, whatever the number of ranks."""
    return (
        f"{args.data or 'digits'}, {args.image_size} pixels, batches of {args.global_batch}, "
        f"steps per epoch: {args.steps_per_epoch or 'all'}, learning rate {args.lr:g}"
    )


def print_report(result: dict) -> None:
    """Print where the time of a batch went, over all steps of all ranks, and what came out."""
    import numpy

    from common import report, setup

    batch = numpy.mean(result["batch_seconds"])
    rows = []
    for name, (row, _, _) in SECONDS.items():
        seconds = numpy.array(result[name])
        mean = seconds.mean()
        total = mean * seconds.shape[1]
        cells = [row, f"{total:.1f}", f"{mean / batch:.1%}", f"{1000 * mean:.1f}"]
        rows.append(cells + report.milliseconds(seconds))
    report.print_table(["", "total s", "share", "mean ms", "p50", "p75", "p90", "p95"], rows)
    seconds = result["train_seconds"]
    setup.say(
        f"{result['images']} images in {seconds:.2f} s: {result['images'] / seconds:.1f} images/s "
        f"over all ranks; held-out accuracy {result['evaluations'][-1]['accuracy']:.2%}"
    )


def add_arguments(parser) -> None:
    from common import setup
    from common.setup import whole_number as whole

    add = parser.add_argument
    add("--image-size", type=whole(8, 1024), help="pixels (default: 64 on CPU, 224 on CUDA)")
    add("--global-batch", type=whole(1), help="images per step (default: 64 on CPU, 512 on CUDA)")
    add("--epochs", type=whole(1), default=3)
    add("--steps-per-epoch", type=whole(1), help="end each epoch after so many (default: all)")
    add("--lr", type=setup.positive_number, default=0.02, help="learning rate")
    workers = "loading processes per rank (default: 0 on CPU; cores per GPU, at most 8, on CUDA)"
    add("--workers", type=whole(0, 64), help=workers)
    add("--log-every", type=whole(1), default=5, metavar="N", help="print a line every N steps")
    add("--data", metavar="DIR", help="CIFAR-10 from this folder instead of the digits")
    add("--download", action="store_true", help="fetch CIFAR-10 into --data first")
    saved = "save here after each epoch, and resume from it if it exists"
    add("--checkpoint", type=setup.output_file, metavar="FILE", help=saved)
    folder = setup.checked(Path, Path.is_dir, "a folder")
    written = "for JSON and picture (default: results/ of the repository)"
    add("--results", type=folder, metavar="DIR", help=written)
    setup.add_process_group_arguments(parser)


def choose_sizes(args, device: torch.device) -> int:
    """Fill in the defaults that depend on the device; return the images in a rank's batch."""
    from common import setup

    on_cuda = device.type == "cuda"
    args.image_size = args.image_size or (224 if on_cuda else 64)
    args.global_batch = args.global_batch or (512 if on_cuda else 64)
    if args.workers is None:
        args.workers = min(int(setup.cores() // torch.cuda.device_count()), 8) if on_cuda else 0
    batch_size, left = divmod(args.global_batch, dist.get_world_size())
    if left:
        ranks = f"{dist.get_world_size()} ranks"
        setup.fail(f"argument --global-batch: '{args.global_batch}' cannot be divided by {ranks}")
    return batch_size


def be_the_only_rank() -> None:
    """Set what torchrun would for a group of one, on a free port, so that one code serves both."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import compare_runs
        import torchvision
        from images import image_sets

        from common import report, setup
    except ModuleNotFoundError as error:
        files = "folder common/, compare_runs.py and images.py beside this script"
        sys.exit(f"error: {error}: pip install torchvision, and copy the repository's {files}")

    parser = setup.Parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    if "RANK" not in os.environ:  # torchrun sets it
        be_the_only_rank()
    with setup.process_group(args.device, args.backend, args.timeout) as device:
        torch.set_num_threads(1)  # a device is a GPU or a core
        batch_size = choose_sizes(args, device)
        data = image_sets(args.data, args.download, args.image_size)
        options = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}
        batches = loaders_of_shares(*data, batch_size, **options)
        if len(batches[0]) == 0:
            setup.fail(f"argument --global-batch: there are only {len(data[0])} images")

        result = report.begin("07_resnet_ddp", args, device)
        result |= {"torchvision": torchvision.__version__, "settings": settings_of(args)}
        setup.say(
            f"torchvision {torchvision.__version__}; {result['settings']}; per rank: {batch_size} "
            f"images, {args.workers} loader workers"
        )
        ddp = result["world_size"] > 1
        training = build(device, ddp, args.lr)
        with setup.network():
            result |= fit(args, training, *batches)
        if dist.get_rank() == 0:
            print_report(result)
            folder = args.results or setup.ROOT / "results"
            folder.mkdir(exist_ok=True)
            report.write_json(folder / f"07_resnet_ddp_{result['world_size']}.json", result)
            if ddp:
                compare_runs.show_median([folder], folder / "speedup.png")


if __name__ == "__main__":
    main()
