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
2020; learning rate: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
2017, sections 2.1 and 2.2.
"""

import copy
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


def sharded_loaders(
    train_set: Dataset, test_set: Dataset, batch_size: int, seed: int, **options
) -> tuple[DataLoader, DataLoader]:
    """This rank's share of both sets, `batch_size` images at a time; `options` go to both loaders.

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


def train_step(
    model: nn.Module, images, labels, optimizer, scheduler, watch, amp: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of a batch on the device; returns this rank's loss and accuracy, on the device, too.

    The stopwatch gets the marks forward, last gradient, backward and end. On a GPU those are events
    in its stream, and nothing here waits for them.
    """
    # Backward reaches the first weight last. What DDP still has to wait for then is exposed.
    first_weight = next(model.parameters())
    hook = first_weight.register_post_accumulate_grad_hook(lambda _: watch.mark("last gradient"))
    with torch.autocast(images.device.type, torch.bfloat16, enabled=amp):
        logits = model(images)  # DDP first gives every rank the buffers of rank 0
        loss = F.cross_entropy(logits, labels)
    watch.mark("forward")
    loss.backward()  # DDP averages the gradients over the ranks meanwhile, bucket by bucket
    watch.mark("backward")
    hook.remove()
    optimizer.step()  # the same gradients on all ranks, so the same weights
    optimizer.zero_grad()
    scheduler.step()
    watch.mark("end")
    return loss.detach(), (logits.argmax(1) == labels).double().mean()


@torch.no_grad()
def evaluate(model: nn.Module, batches, device: torch.device, amp: bool = False) -> dict:
    """Loss, accuracy and number of images over the batches of all ranks, equal on every rank.

    `model` is not the DDP wrapper but what it wraps: the wrapper's forward may send buffers, and
    then a rank with one batch more than the others would wait in it for ever.
    """
    model.eval()
    # Since the last forward each rank's running statistics went their own way.
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # of losses, right ones, images
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            logits = model(images)
        sums[0] += F.cross_entropy(logits.double(), labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return {"loss": loss / count, "accuracy": right / count, "images": int(count)}


def warm_up(model: nn.Module, image_size: int, device: torch.device) -> None:
    """One forward and backward on blank images; no trace in the weights, buffers and gradients.

    After its first backward DDP sorts its buckets anew, by the order in which gradients came. That
    order decides how an all-reduce of more than two ranks rounds. Done before training, it is the
    same in a run that starts and in one that resumes.
    """
    before = copy.deepcopy(model.state_dict())
    blank = torch.zeros(2, 3, image_size, image_size, device=device)
    model(blank).sum().backward()
    model.load_state_dict(before)
    model.zero_grad()


# ==================================================================================================
# Below this line: building, an epoch, the report, the arguments, main.


def build_model(seed: int, device: torch.device, ddp: bool) -> tuple[nn.Module, nn.Module]:
    """ResNet-18, and what to train: its DDP wrapper, or the network itself on a single device."""
    from torchvision.models import resnet18

    torch.manual_seed(seed)
    network = resnet18(num_classes=10).to(device)
    if not ddp:
        return network, network
    # With views a gradient lies in its bucket from the start. find_unused_parameters stays off: it
    # would walk through the graph in every step, and ResNet uses all its parameters.
    return network, DistributedDataParallel(network, gradient_as_bucket_view=True)


def build_optimizer(args, model: nn.Module, steps_per_epoch: int):
    """SGD and its schedule. Weak scaling: Goyal et al., up to N * lr, step by step in an epoch."""
    factor = dist.get_world_size() if args.scaling == "weak" else 1

    def scale(step: int) -> float:
        return 1 + (factor - 1) * min(1.0, step / steps_per_epoch)

    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


SECONDS = {  # what is measured of a step: its row in the report, from one mark to another
    "data_seconds": ("data", "start", "data"),
    "compute_sync_seconds": ("compute+sync", "data", "end"),
    "forward_seconds": ("- forward", "data", "forward"),
    "backward_seconds": ("- backward", "forward", "last gradient"),
    "exposed_comm_seconds": ("- exposed", "last gradient", "backward"),
    "optimizer_seconds": ("- optimizer", "backward", "end"),
}
MEASURED = [*SECONDS, "loss", "accuracy"]  # of a rank's step


def save(path: Path, settings: dict, progress: dict, modules: dict) -> None:
    """Write all that the rest of the training depends on, after an epoch, on rank 0.

    `modules`: what has a state_dict, by name. Nothing is random but the order of the images, which
    comes from the seed and the epoch; with dropout or augmentation save torch.get_rng_state() too.
    """
    checkpoint = {name: module.state_dict() for name, module in modules.items()}
    beside = path.with_name(path.name + ".part")
    torch.save({"settings": settings, "progress": progress, **checkpoint}, beside)
    beside.replace(path)  # the old one or the new one, and at no time half of it


def resume(path: Path, settings: dict, modules: dict) -> dict | None:
    """Restore what `save` wrote, and return its progress; None if rank 0 finds nothing there.

    Rank 0 reads and all get it. Ends the run if other settings wrote it; only epochs may be added.
    """
    from common.setup import fail, say

    checkpoint = None
    if dist.get_rank() == 0 and path.exists():
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            for name, value in settings.items():
                written = checkpoint["settings"][name]
                is_longer = name == "epochs" and written < value
                if written != value and not is_longer:
                    raise ValueError(f"it was written with {name} {written}, not {value}")
        except Exception as error:  # torch.load has many kinds: cut short, not a checkpoint
            reason = (str(error) or type(error).__name__).splitlines()[0]
            fail(f"argument --checkpoint: cannot resume from '{path}' ({reason})")
    found = [checkpoint]
    dist.broadcast_object_list(found)
    [checkpoint] = found
    if checkpoint is None:
        return None
    for name, module in modules.items():
        module.load_state_dict(checkpoint[name])
    say(f"resumed from {path} after epoch {checkpoint['progress']['epoch']}")
    return checkpoint["progress"]


def fit(args, network, model, train_set, test_set, device: torch.device) -> dict:
    """Train, evaluating and saving after each epoch; returns the progress, with what was measured.

    MEASURED are lists of it, [rank][step].
    """
    from compare_runs import SETTINGS

    from common import setup

    options = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}
    train_batches, test_batches = sharded_loaders(
        train_set, test_set, args.batch_per_rank, args.seed, **options
    )
    steps = min(len(train_batches), args.steps_per_epoch or len(train_batches))
    optimizer, scheduler = build_optimizer(args, model, steps)
    warm_up(model, args.image_size, device)
    modules = {"model": network, "optimizer": optimizer, "scheduler": scheduler}
    all_ranks = [None] * dist.get_world_size()
    progress = {"epoch": 0, "train_seconds": 0.0, "evaluations": []}
    progress |= {name: [[] for _ in all_ranks] for name in MEASURED}
    settings = {"world_size": len(all_ranks)} | {name: vars(args)[name] for name in SETTINGS}
    if args.checkpoint:
        progress = resume(args.checkpoint, settings, modules) or progress

    for epoch in range(progress["epoch"] + 1, args.epochs + 1):
        train_batches.sampler.set_epoch(epoch)  # else every epoch has the same order
        batches = iter(train_batches)
        measured = train_epoch(args, model, optimizer, scheduler, batches, steps, progress, device)
        dist.all_gather_object(all_ranks, measured)
        for rank, of_rank in enumerate(all_ranks):
            for name in MEASURED:
                progress[name][rank] += of_rank[name]
        setup.progress(f"epoch {epoch}: images held out")
        evaluation = evaluate(network, test_batches, device, args.amp)
        progress["evaluations"].append(evaluation)
        progress["epoch"] = epoch
        setup.say(
            f"epoch {epoch} of {args.epochs} done, held out: loss {evaluation['loss']:.4f}, "
            f"accuracy {evaluation['accuracy']:.2%} of {evaluation['images']} images"
        )
        if args.checkpoint and dist.get_rank() == 0:
            save(args.checkpoint, settings, progress, modules)
    return progress


def train_epoch(
    args, model, optimizer, scheduler, batches, steps: int, progress: dict, device: torch.device
) -> dict[str, list]:
    """Train on so many batches, with a line every --log-every steps; returns lists of MEASURED.

    A line has rank 0's times, and loss and accuracy over all ranks. Adds seconds to `progress`.
    """
    from common import setup
    from common.timing import Stopwatch

    ranks = dist.get_world_size()
    epoch = progress["epoch"]
    watches, losses, accuracies = [], [], []
    model.train()
    dist.barrier()  # rank 0 may still be saving, and nobody's first batch should count that
    began = time.perf_counter() - progress["train_seconds"]  # as if all epochs came in a row
    for step in range(1, steps + 1):
        name = f"epoch {epoch + 1} step {step:3}/{steps}"
        setup.progress(name)
        watch = Stopwatch(device)
        watch.mark("start")
        images, labels = next(batches)
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        watch.mark("data")
        loss, accuracy = train_step(model, images, labels, optimizer, scheduler, watch, args.amp)
        watches.append(watch)
        losses.append(loss)
        accuracies.append(accuracy)
        if step % args.log_every == 0 or step == steps:
            means = torch.tensor([loss, accuracy], device=device) / ranks
            dist.all_reduce(means)
            data, compute = watch.seconds("start", "data"), watch.seconds("data", "end")
            rate = args.batch_per_rank * ranks / (data + compute)
            done = epoch * steps + step
            left = (time.perf_counter() - began) / done * (args.epochs * steps - done)
            setup.say(
                f"{name}  data {1000 * data:.1f} ms  compute+sync {1000 * compute:.1f} ms  "
                f"{rate:.1f} images/s  loss {means[0]:.4f}  accuracy {means[1]:.1%}, "
                f"{left:.0f} s left"
            )
    # Here we wait for a GPU.
    measured = {"loss": torch.stack(losses).tolist(), "accuracy": torch.stack(accuracies).tolist()}
    for name, (_, start, end) in SECONDS.items():
        measured[name] = [watch.seconds(start, end) for watch in watches]
    progress["train_seconds"] = time.perf_counter() - began
    return measured


def print_report(result: dict, images: int) -> None:
    """Where the time of a batch went, over all steps of all ranks, and what came out."""
    from common import report, setup

    times = {}
    for name, (row, _, _) in SECONDS.items():
        times[row] = torch.tensor(result[name], dtype=torch.float64)
    times["batch"] = times["data"] + times["compute+sync"]
    rows = []
    for name, seconds in times.items():
        total = seconds.sum() / result["world_size"]
        share = seconds.sum() / times["batch"].sum()
        row = [name, f"{total:.1f}", f"{share:.1%}", f"{1000 * seconds.mean():.1f}"]
        rows.append(row + report.milliseconds(seconds.tolist()))
    report.print_table(["", "total s", "share", "mean ms", "p50", "p75", "p90", "p95"], rows)
    setup.say(
        f"{images} images in {result['train_seconds']:.2f} s: {result['images_per_second']:.1f} "
        f"images/s over all ranks; held-out accuracy {result['evaluations'][-1]['accuracy']:.2%}"
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
    scaling = "strong: the ranks share --global-batch; weak: each has so many, and lr grows"
    add("--scaling", choices=["strong", "weak"], default="strong", help=scaling)
    add("--epochs", type=whole(1), default=3)
    add("--steps-per-epoch", type=whole(1), help="end each epoch after so many (default: all)")
    add("--held-out", type=whole(1), help="evaluate on so many images (default: all)")
    rate = setup.checked(float, lambda number: 0 < number < math.inf, "a finite number above 0")
    add("--lr", type=rate, default=0.02, help="learning rate of one device")
    add("--amp", action="store_true", help="bfloat16 where autocast holds it safe")
    add("--seed", type=whole(0), default=0)
    workers = "loading processes per rank (default: 0 on CPU, 4 on CUDA)"
    add("--workers", type=whole(0, 64), help=workers)
    add("--log-every", type=whole(1), default=5, metavar="STEPS", help="between lines")
    images = "CIFAR-10 from this folder; synthetic: JPEGs of noise"
    add("--data", metavar="DIR|digits|synthetic", default="digits", help=images)
    decode = "synthetic: of N × N pixels, decoded when they are asked for (default: 32)"
    add("--decode", type=whole(8, 4096), metavar="N", help=decode)
    add("--download", action="store_true", help="fetch CIFAR-10 into --data first")
    saved = "saved after each epoch, resumed from if there"
    add("--checkpoint", type=setup.output_file, metavar="FILE", help=saved)
    where = "for what is measured, 07_resnet_ddp_N.json of N ranks, and the comparison's picture"
    add("--results", type=Path, default=setup.ROOT / "results", metavar="DIR", help=where)
    setup.add_process_group_arguments(parser)


def choose_sizes(args) -> None:
    """Fill in the defaults that depend on the device, and the batch of a rank."""
    from common.setup import fail

    has_gpu = args.device != "cpu" and torch.cuda.is_available()
    args.image_size = args.image_size or (224 if has_gpu else 64)
    args.global_batch = args.global_batch or (512 if has_gpu else 64)
    if args.workers is None:
        args.workers = 4 if has_gpu else 0
    ranks_that_share = int(os.environ["WORLD_SIZE"]) if args.scaling == "strong" else 1
    args.batch_per_rank = args.global_batch // ranks_that_share
    if args.global_batch % ranks_that_share or args.batch_per_rank < 2:
        fail(
            f"argument --global-batch: '{args.global_batch}' cannot be divided by "
            f"{ranks_that_share} ranks into batches of at least 2, as BatchNorm needs them"
        )


def check(args) -> None:
    """Refuse what does not go together, and make the folder of the results."""
    from common.setup import can_be_written, fail

    if args.download and args.data in ("digits", "synthetic"):
        fail("argument --download: needs --data DIR, the folder for CIFAR-10")
    if args.decode and args.data != "synthetic":
        fail("argument --decode: needs --data synthetic, because other images are no JPEGs")
    with suppress(OSError):
        args.results.mkdir(parents=True, exist_ok=True)
    if not can_be_written(args.results / "a file"):
        fail(f"argument --results: cannot write to '{args.results}'")


def be_the_only_rank() -> None:
    """Say what torchrun would of a group of one, on a free port: it makes one code of both."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def describe(args) -> str:
    """Print what is trained with what; returns a name for the run."""
    from common.setup import say

    ranks = dist.get_world_size()
    name = "single" if ranks == 1 else f"DDP × {ranks}"
    data, rate = args.data, f"{args.lr:g}"
    if args.decode:
        data += f" JPEGs of {args.decode} × {args.decode} pixels"
    if args.scaling == "weak":
        rate += f" to {args.lr * ranks:g} in the first epoch"
    say(
        f"{name}: {args.scaling} scaling, batch {ranks} × {args.batch_per_rank}, "
        f"{args.image_size} pixels, {data}, learning rate {rate}"
    )
    return name


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import compare_runs
        import torchvision  # noqa: F401 (what is missing is said here)
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
    if "LOCAL_RANK" not in os.environ:  # torchrun sets it
        be_the_only_rank()
    choose_sizes(args)
    check(args)
    with setup.process_group(args) as device:
        torch.set_num_threads(args.threads)
        train_set, test_set = load_images(args.data, args.download, args.image_size, args.decode)
        images_per_step = args.batch_per_rank * dist.get_world_size()
        if images_per_step > len(train_set):
            setup.fail(
                f"argument --global-batch: {images_per_step} a step are more than all "
                f"{len(train_set)}"
            )
        if args.held_out:
            test_set = Subset(test_set, range(min(args.held_out, len(test_set))))

        result = report.begin(folder.name, args, device) | {"name": describe(args)}
        network, model = build_model(args.seed, device, ddp=result["world_size"] > 1)
        with setup.on_the_network():
            result |= fit(args, network, model, train_set, test_set, device)
        if dist.get_rank() == 0:
            images = len(result["loss"][0]) * images_per_step
            result["images_per_second"] = images / result["train_seconds"]
            print_report(result, images)
            file = args.results / f"{folder.name}_{result['world_size']}.json"
            report.write_json(file, result)
            compare_runs.compare(args.results)


if __name__ == "__main__":
    main()
