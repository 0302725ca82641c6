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
from torch.utils.data import DataLoader, Dataset, DistributedSampler


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


def seconds_of(watch) -> dict[str, float]:
    """Returns the SECONDS of a step. On a GPU this waits for its end."""
    return {name: watch.seconds(start, end) for name, (_, start, end) in SECONDS.items()}


def train_epoch(args, training: Training, batches, epoch: int) -> list[dict]:
    """Train on `args.steps` batches; returns the SECONDS of each.

    Prints a line every --log-every steps: rank 0's times, loss and accuracy over all ranks.
    """
    from common import setup
    from common.timing import Stopwatch

    watches = []
    training.model.train()
    batches = iter(batches)
    for step in range(1, args.steps + 1):
        name = f"epoch {epoch} step {step:3}/{args.steps}"
        setup.progress(name)
        watch = Stopwatch(training.device)
        watch.mark("start")
        images, labels = (t.to(training.device, non_blocking=True) for t in next(batches))
        watch.mark("data")
        means = train_step(training, images, labels, watch)
        watches.append(watch)
        if step % args.log_every == 0 or step == args.steps:
            dist.all_reduce(means)
            loss, accuracy = means / dist.get_world_size()
            times = seconds_of(watch)
            setup.say(
                f"{name}  data {1000 * times['data_seconds']:.1f} ms  "
                f"compute+sync {1000 * times['compute_sync_seconds']:.1f} ms  "
                f"{args.global_batch / times['batch_seconds']:.1f} images/s  "
                f"loss {loss:.4f}  accuracy {accuracy:.1%}"
            )
    return [seconds_of(watch) for watch in watches]


def fit(args, training: Training, train_batches, test_batches) -> dict:
    """Train, evaluating and saving after each epoch; returns what was measured, as [rank][step].

    Of epochs that a checkpoint brings along only the evaluations are there.
    """
    from common import setup

    evaluations = resume(args, training) if args.checkpoint else []
    steps = []
    seconds = 0.0
    for epoch in range(len(evaluations) + 1, args.epochs + 1):
        train_batches.sampler.set_epoch(epoch)  # else every epoch has the same order
        dist.barrier()  # rank 0 may still be saving, and nobody's first batch should count that
        began = time.perf_counter()
        steps += train_epoch(args, training, train_batches, epoch)
        seconds += time.perf_counter() - began
        setup.progress(f"epoch {epoch}: images held out")
        evaluations.append(evaluate(training, test_batches))
        held_out = "loss {loss:.4f}, accuracy {accuracy:.2%} of {images} images"
        held_out = held_out.format(**evaluations[-1])
        setup.say(f"epoch {epoch} of {args.epochs} done, held out: {held_out}")
        if args.checkpoint and dist.get_rank() == 0:
            save(args, evaluations, training)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, steps)
    result = {name: [[step[name] for step in rank] for rank in ranks] for name in SECONDS}
    result["images"] = len(steps) * args.global_batch
    return result | {"evaluations": evaluations, "train_seconds": seconds}


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
            done, settings = len(found[0]["evaluations"]), found[0]["settings"]
            if done >= args.epochs or settings != describe(args):
                raise ValueError(f"it has {done} epochs of {settings}")
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
        f"{args.steps} steps per epoch, learning rate {args.lr:g}, seed {args.seed}"
    )


def print_report(result: dict) -> None:
    """Where the time of a batch went, over all steps of all ranks, and what came out."""
    import numpy

    from common import report, setup

    batch = numpy.mean(result["batch_seconds"]) / result["dilation"]
    rows = []
    for name, (row, _, _) in SECONDS.items():
        seconds = numpy.array(result[name]) / result["dilation"]
        mean = seconds.mean()
        row = [row, f"{mean * seconds.shape[1]:.1f}", f"{mean / batch:.1%}", f"{1000 * mean:.1f}"]
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


def add_arguments(parser) -> None:
    from common import setup
    from common.setup import whole_number as whole

    add_size_arguments(parser)
    add = parser.add_argument
    add("--epochs", type=whole(1), default=3)
    add("--steps-per-epoch", type=whole(1), help="end each epoch after so many (default: all)")
    add("--lr", type=setup.positive_number, default=0.02, help="learning rate")
    add("--seed", type=whole(0), default=0)
    workers = "loading processes per rank (default: 0 on CPU; CUDA: cores per GPU, at most 8)"
    add("--workers", type=whole(0, 64), help=workers)
    add("--log-every", type=whole(1), default=5, metavar="STEPS", help="between lines")
    add("--data", metavar="DIR", help="CIFAR-10 from this folder instead of the digits")
    add("--download", action="store_true", help="fetch CIFAR-10 into --data first")
    saved = "saved after each epoch, resumed from if there"
    add("--checkpoint", type=setup.output_file, metavar="FILE", help=saved)
    folder = setup.checked(Path, Path.is_dir, "a folder")
    written = "where JSON and picture go (default: the repository's results)"
    add("--results", type=folder, metavar="DIR", help=written)
    setup.add_process_group_arguments(parser)


def choose_sizes(args, device: torch.device) -> None:
    """Fill in the defaults that depend on the device, and the batch of a rank."""
    from common.setup import fail

    on_cuda = device.type == "cuda"
    args.image_size = args.image_size or (224 if on_cuda else 64)
    args.global_batch = args.global_batch or (512 if on_cuda else 64)
    ranks = dist.get_world_size()
    args.batch_per_rank = args.global_batch // ranks
    if args.global_batch % ranks or args.batch_per_rank < 2:
        fail(
            f"argument --global-batch: '{args.global_batch}' cannot be divided by {ranks} ranks "
            "into batches of at least 2, as BatchNorm needs them"
        )


def be_the_only_rank() -> None:
    """Say what torchrun would of a group of one, on a free port: it makes one code of both."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def begin(args, device: torch.device) -> dict:
    """Print what is trained where and how; returns the head of the result."""
    import torchvision

    from common import report
    from common.setup import say

    result = report.begin("07_resnet_ddp", args, device)
    result |= {"torchvision": torchvision.__version__, "cuda": torch.version.cuda}
    result |= {"gpus": torch.cuda.device_count(), "settings": describe(args)}
    say("torchvision {torchvision}, CUDA {cuda}, {gpus} GPUs on this host".format(**result))
    say(f"{describe(args)}; per rank {args.batch_per_rank} images, {args.workers} loader workers")
    return result


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
    with setup.process_group(args.device, args.backend, args.timeout, args.network) as device:
        torch.set_num_threads(1)  # a device is a GPU or a core
        choose_sizes(args, device)
        on_cuda = device.type == "cuda"
        if args.workers is None:
            args.workers = min(int(setup.cores() // torch.cuda.device_count()), 8) if on_cuda else 0
        data = load_images(args.data, args.download, args.image_size)
        options = {"num_workers": args.workers, "pin_memory": on_cuda}
        batches = sharded_loaders(*data, args.batch_per_rank, args.seed, **options)
        args.steps = min(len(batches[0]), args.steps_per_epoch or len(batches[0]))
        if args.steps == 0:
            setup.fail(f"argument --global-batch: there are only {len(data[0])} images")

        result = begin(args, device)
        training = prepare(args, device, ddp=result["world_size"] > 1)
        with setup.wire() or nullcontext():
            result |= fit(args, training, *batches)
        if dist.get_rank() == 0:
            print_report(result)
            folder = args.results or setup.ROOT / "results"
            folder.mkdir(exist_ok=True)
            report.write_json(folder / f"07_resnet_ddp_{result['world_size']}.json", result)
            compare_runs.compare(folder)


if __name__ == "__main__":
    main()
