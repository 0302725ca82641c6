r"""07: ResNet-18 on one device against torch's DDP on N, and where the time goes.

The same script does both: started by torchrun it trains with DDP on that many ranks, started by
plain python it trains on a single device. As soon as the results of both are in results/ (or where
--results says), compare_runs.py compares and draws them. The images come from images.py; what
--checkpoint does is in checkpoints.py.

    make 07_resnet_ddp NPROC=2                          (single, then DDP, then a picture)
    python 07_resnet_ddp/resnet_ddp.py --threads 1                                    (single)
    torchrun --standalone --nproc-per-node 2 07_resnet_ddp/resnet_ddp.py --threads 1  (DDP)
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 \
        07_resnet_ddp/resnet_ddp.py --checkpoint FILE        (DDP; restarts, see the README)
    torchrun --nnodes 2 --node-rank R --nproc-per-node 8 --master-addr HOST0 \
        --master-port 29400 07_resnet_ddp/resnet_ddp.py      (two hosts; R is 0 on HOST0, else 1)

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020; learning rate: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
2017, sections 2.1 and 2.2.
"""

import copy
import importlib.util
import math
import os
import sys
import time
from contextlib import nullcontext
from itertools import islice
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


def train(
    model: nn.Module, batches, optimizer, scheduler, device, stopwatch, amp=False, synchronize=True
):
    """Take one step per batch of (images, labels); yield its times, its loss and its accuracy.

    The times are a stopwatch(device) with the marks start, data, forward, last gradient, backward,
    end; loss and accuracy are this rank's, on the device. Nothing here waits for a GPU: the marks
    are events in its stream, read by whoever wants the numbers, when convenient. With
    synchronize=False a DDP model leaves out its all-reduces (to see what they cost; the ranks then
    drift apart).
    """
    model.train()
    watch = stopwatch(device)
    # Backward reaches the first weight last. What DDP still has to wait for then is exposed.
    first_weight = next(model.parameters())
    hook = first_weight.register_post_accumulate_grad_hook(lambda _: watch.mark("last gradient"))
    watch.mark("start")
    for images, labels in batches:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        watch.mark("data")
        communication = nullcontext() if synchronize else model.no_sync()
        with communication:
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                logits = model(images)  # DDP first gives every rank the buffers of rank 0
                loss = F.cross_entropy(logits, labels)
            watch.mark("forward")
            loss.backward()  # DDP averages the gradients over the ranks meanwhile, bucket by bucket
            watch.mark("backward")
        optimizer.step()  # the same gradients on all ranks, so the same weights
        optimizer.zero_grad()
        scheduler.step()
        watch.mark("end")
        yield watch, loss.detach(), (logits.argmax(1) == labels).double().mean()
        watch = stopwatch(device)
        watch.mark("start")
    hook.remove()


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


def build_model(args, distributed: bool, device) -> tuple[nn.Module, nn.Module]:
    """ResNet-18, and what to train: its DDP wrapper, or the network itself on a single device."""
    from torchvision.models import resnet18

    torch.manual_seed(args.seed)
    network = resnet18(num_classes=10).to(device)
    if not distributed:
        return network, network
    # With views a gradient lies in its bucket from the start. find_unused_parameters stays off: it
    # would walk through the graph in every step, and ResNet uses all its parameters.
    devices = [device] if device.type == "cuda" else None
    return network, DistributedDataParallel(network, devices, gradient_as_bucket_view=True)


def build_optimizer(args, model: nn.Module, steps_per_epoch: int):
    """SGD and its schedule. Weak scaling: Goyal et al., a little more each step, up to N * lr."""
    factor = dist.get_world_size() if args.scaling == "weak" else 1
    warmup_steps = max(1, args.warmup_epochs * steps_per_epoch)

    def scale(step: int) -> float:
        return 1 + (factor - 1) * min(1.0, step / warmup_steps)

    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


SECONDS = {  # what is measured of a step: from one of train's marks to another
    "data_seconds": ("start", "data"),
    "compute_sync_seconds": ("data", "end"),
    "forward_seconds": ("data", "forward"),
    "backward_seconds": ("forward", "last gradient"),
    "exposed_comm_seconds": ("last gradient", "backward"),
    "optimizer_seconds": ("backward", "end"),
}
MEASURED = [*SECONDS, "loss", "accuracy"]  # of a rank's step


def count_steps(args, train_set: Dataset, world_size: int) -> int:
    """Steps of an epoch; ends the run if there are too few images for one."""
    from common.setup import fail

    needed = batch_per_rank(args, world_size) * world_size
    if needed > len(train_set):
        problem = f"needs {needed} training images a step, and there are {len(train_set)}"
        fail(f"argument --global-batch: '{args.global_batch}' {problem}")
    steps = len(train_set) // needed
    return min(steps, args.steps_per_epoch or steps)


def fit(args, distributed: bool, device: torch.device, settings: dict, sets: tuple) -> dict:
    """Train, evaluating and saving after each epoch; returns what was measured, the progress."""
    import checkpoints

    from common import setup
    from common.timing import Stopwatch

    options = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}
    batch = batch_per_rank(args, dist.get_world_size())
    train_set, test_set = sets
    if args.held_out:
        test_set = Subset(test_set, range(min(args.held_out, len(test_set))))
    train_batches, test_batches = sharded_loaders(train_set, test_set, batch, args.seed, **options)
    steps = count_steps(args, train_set, dist.get_world_size())

    network, model = build_model(args, distributed, device)
    optimizer, scheduler = build_optimizer(args, model, steps)
    warm_up(model, args.image_size, device)
    # From here on, what is random should differ between ranks.
    torch.manual_seed(args.seed + dist.get_rank())
    parts = {"model": network, "optimizer": optimizer, "scheduler": scheduler}
    start = {"epoch": 0, "step": 0, "train_seconds": 0.0, "evaluations": []}
    for name in MEASURED:
        start[name] = [[] for _ in range(dist.get_world_size())]
    progress = checkpoints.resume(args.checkpoint, start, settings, parts, device)

    for epoch in range(progress["epoch"] + 1, args.epochs + 1):
        train_batches.sampler.set_epoch(epoch)  # else every epoch has the same order
        batches = islice(train_batches, steps)
        outcomes = train(
            model, batches, optimizer, scheduler, device, Stopwatch, args.amp, not args.no_sync
        )
        measure_epoch(outcomes, args, progress, epoch, steps, device)
        setup.progress(f"epoch {epoch}: images held out")
        held_out = evaluate(network, test_batches, device, args.amp)
        progress["evaluations"].append(held_out)
        progress["epoch"] = epoch
        found = f"loss {held_out['loss']:.4f}, accuracy {held_out['accuracy']:.2%}"
        setup.say(
            f"epoch {epoch} of {args.epochs} done, held out: {found} of {held_out['images']} images"
        )
        if args.checkpoint:
            checkpoints.save(args.checkpoint, settings, progress, parts, device)
    return progress


def measure_epoch(outcomes, args, progress: dict, epoch: int, steps: int, device) -> None:
    """Run an epoch of `train`, with a line every --log-every steps; adds to `progress`."""
    from common import setup

    world_size = dist.get_world_size()
    global_batch = batch_per_rank(args, world_size) * world_size
    samples = []
    unread = []
    dist.barrier()  # rank 0 may still be saving, and nobody's first batch should count that
    began = time.perf_counter()
    line_began = began
    ended = began
    for step, outcome in enumerate(outcomes, 1):
        place = f"epoch {epoch} step {step:3}/{steps}"
        setup.progress(place)
        unread.append(outcome)
        if len(unread) < args.log_every and step < steps:
            continue
        for watch, loss, accuracy in unread:
            samples.append(read(watch, loss, accuracy))
        ended = time.perf_counter()
        rate = global_batch * len(unread) / (ended - line_began)
        training_began = began - progress["train_seconds"]  # as if all epochs had come in a row
        left = setup.time_left(training_began, progress["step"] + step, args.epochs * steps)
        print_step(place, samples[-1], rate, left, device)
        unread = []
        line_began = time.perf_counter()
    of_ranks = [None] * world_size
    dist.all_gather_object(of_ranks, samples)
    for rank, samples_of_rank in enumerate(of_ranks):
        for name in MEASURED:
            progress[name][rank] += [sample[name] for sample in samples_of_rank]
    progress["step"] += steps
    progress["train_seconds"] += ended - began


def read(watch, loss: torch.Tensor, accuracy: torch.Tensor) -> dict:
    """The numbers of a step that `train` yielded. Here, and only here, we wait for a GPU."""
    sample = {name: watch.seconds(start, end) for name, (start, end) in SECONDS.items()}
    return sample | {"loss": loss.item(), "accuracy": accuracy.item()}


def print_step(place: str, sample: dict, rate: float, left: str, device) -> None:
    """Rank 0's times of a step; loss and accuracy over all ranks, so all have to call this."""
    from common.setup import say

    over_ranks = torch.tensor([sample["loss"], sample["accuracy"]], device=device)
    dist.all_reduce(over_ranks)
    loss, accuracy = (over_ranks / dist.get_world_size()).tolist()
    data = 1000 * sample["data_seconds"]
    compute = 1000 * sample["compute_sync_seconds"]
    say(
        f"{place}  data {data:.1f} ms  compute+sync {compute:.1f} ms  {rate:.1f} images/s  "
        f"loss {loss:.4f}  accuracy {accuracy:.1%}{left}"
    )


def print_report(result: dict, images: int) -> None:
    """Where the time of a batch went, over all steps of all ranks, and what came out."""
    from common import report, setup

    of_step = {}
    for name in SECONDS:
        of_step[name] = torch.tensor(result[name], dtype=torch.float64)
    batch = of_step["data_seconds"] + of_step["compute_sync_seconds"]
    shown = {
        "data": of_step["data_seconds"],
        "compute+sync": of_step["compute_sync_seconds"],
        "- forward": of_step["forward_seconds"],
        "- backward": of_step["backward_seconds"],
        "- exposed": of_step["exposed_comm_seconds"],
        "- optimizer": of_step["optimizer_seconds"],
        "batch": batch,
    }
    rows = []
    for name, seconds in shown.items():
        total = seconds.sum() / result["world_size"]
        share = seconds.sum() / batch.sum()
        row = [name, f"{total:.1f}", f"{share:.1%}", f"{1000 * seconds.mean():.1f}"]
        row += report.milliseconds(seconds.tolist())
        rows.append(row)
    report.print_table(["", "total s", "share", "mean ms", "p50", "p75", "p90", "p95"], rows)
    rate = f"{result['images_per_second']:.1f} images/s over all ranks"
    accuracy = result["evaluations"][-1]["accuracy"]
    setup.say(
        f"{images} images in {result['train_seconds']:.2f} s: {rate}; "
        f"held-out accuracy {accuracy:.2%}"
    )


def add_arguments(parser) -> None:
    from common import setup
    from common.setup import whole_number as whole

    add = parser.add_argument
    file = {"type": setup.output_file, "metavar": "FILE"}
    add("--image-size", type=whole(8, 1024), help="pixels (default: 64 on CPU, 224 on CUDA)")
    add("--global-batch", type=whole(1), help="images per step (default: 64 on CPU, 512 on CUDA)")
    scaling = "strong: the ranks share --global-batch; "
    scaling += "weak: each has so many, and lr grows with their number"
    add("--scaling", choices=["strong", "weak"], default="strong", help=scaling)
    add("--epochs", type=whole(1), default=3)
    add("--steps-per-epoch", type=whole(1), help="end each epoch after so many (default: all)")
    add("--held-out", type=whole(1), help="evaluate on so many images (default: all)")
    rate = setup.checked(float, lambda number: 0 < number < math.inf, "a finite number above 0")
    add("--lr", type=rate, default=0.02, help="learning rate of one device")
    momentum = setup.checked(float, lambda number: 0 <= number < 1, "a number from 0 to below 1")
    add("--momentum", type=momentum, default=0.9)
    add("--warmup-epochs", type=whole(0), default=1, help="of the learning rate in weak scaling")
    add("--amp", action="store_true", help="bfloat16 where autocast holds it safe")
    add("--seed", type=whole(0), default=0)
    workers = "loading processes per rank (default: 0 on CPU, 4 on CUDA)"
    add("--workers", type=whole(0, 64), help=workers)
    add("--threads", type=whole(1, 1024), help="per process (default: cores / ranks of this host)")
    add("--log-every", type=whole(1), default=5, metavar="STEPS", help="between lines")
    add("--no-sync", action="store_true", help="DDP without its all-reduces, to see their cost")
    images = "CIFAR-10 from this folder instead of the digits; synthetic: noise of its shapes"
    add("--data", metavar="DIR|synthetic", help=images)
    decode = "synthetic: JPEGs of N × N pixels, decoded when they are asked for"
    add("--decode", type=whole(8, 4096), metavar="N", help=decode)
    add("--download", action="store_true", help="fetch CIFAR-10 into --data first")
    add("--checkpoint", **file, help="saved after each epoch, resumed from if there")
    add("--json", **file, help="everything measured, raw")
    results = setup.ROOT / "results"
    default = results if setup.can_write_into(results) else None
    where = "the same as 07_single.json or 07_ddp_N.json; the comparison's picture goes there, too"
    add("--results", type=setup.output_folder, default=default, metavar="DIR", help=where)
    add("--check", action="store_true", help="only check the flags, for both runs that make starts")
    setup.add_process_group_arguments(parser)


def describe_libraries() -> dict:
    """Print torchvision's and CUDA's version and the number of GPUs; returns them for the JSON."""
    import torchvision

    from common.setup import say

    found = {"torchvision": torchvision.__version__, "cuda": torch.version.cuda}
    found["gpus"] = torch.cuda.device_count()
    cuda = f"CUDA {found['cuda']}" if found["cuda"] else "no CUDA"
    say(f"torchvision {found['torchvision']}, {cuda}, {found['gpus']} GPUs on this host")
    return found


def batch_per_rank(args, world_size: int) -> int:
    return args.global_batch // (world_size if args.scaling == "strong" else 1)


def complete(args, parser, distributed: bool, world_size: int) -> None:
    """Fill in the defaults that depend on the device, and refuse what does not go together."""
    on_cuda = args.device != "cpu" and torch.cuda.is_available()
    if args.image_size is None:
        args.image_size = 224 if on_cuda else 64
    if args.global_batch is None:
        args.global_batch = 512 if on_cuda else 64
    if args.workers is None:
        args.workers = 4 if on_cuda else 0
    flag = f"argument --global-batch: '{args.global_batch}'"
    if args.scaling == "strong" and args.global_batch % world_size:
        problem = f"cannot be divided by {world_size} ranks; allowed are multiples of {world_size}"
        parser.error(f"{flag} {problem}")
    if batch_per_rank(args, world_size) < 2:
        parser.error(f"{flag} is one image per rank, and BatchNorm needs at least two")
    if args.no_sync and (args.check or not distributed):
        problem = "a single device has nothing to leave out; start with torchrun"
        parser.error(f"argument --no-sync: {problem}")
    if args.check and (args.checkpoint or args.json):
        flag = "--checkpoint" if args.checkpoint else "--json"
        problem = "one device and DDP cannot share one; start them one by one, without make"
        parser.error(f"argument {flag}: {problem}")
    if args.download and args.data in (None, "synthetic"):
        parser.error("argument --download: needs --data DIR, the folder for CIFAR-10")
    if args.decode and args.data != "synthetic":
        parser.error("argument --decode: needs --data synthetic, because other images are no JPEGs")
    if not importlib.util.find_spec("torchvision"):
        parser.error("ResNet-18 is torchvision's, which is not installed: pip install torchvision")


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import checkpoints  # noqa: F401 (fit needs it; what is missing is said here)
        import compare_runs
        from images import load_images, name_of

        from common import report, setup
    except ModuleNotFoundError as error:
        needed = "the repository's folder common/, checkpoints.py, compare_runs.py and images.py"
        sys.exit(f"error: {error}: copy {needed} into {folder}")

    parser = setup.Parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    distributed = "RANK" in os.environ  # torchrun sets it
    if not distributed:
        # A group of one, on a free port: it makes one code of both, and training does without it.
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    world_size = int(os.environ["WORLD_SIZE"])
    complete(args, parser, distributed, world_size)
    if args.check:
        setup.choose_device(args)
        if not args.download:
            train_set, _ = load_images(args.data, False, args.image_size)
            count_steps(args, train_set, world_size)
        return

    with setup.process_group(args) as device:
        torch.set_num_threads(args.threads or torch.get_num_threads())
        result = report.begin(folder.name, args, device)
        name = f"DDP × {world_size}" if distributed else "single"
        file = f"07_ddp_{world_size}.json" if distributed else "07_single.json"
        batch = batch_per_rank(args, world_size)
        data = name_of(args.data, args.decode)
        result |= describe_libraries()
        size = f"batch {world_size} × {batch}, {args.image_size} pixels"
        rate = f"learning rate {args.lr:g}"
        if args.scaling == "weak":
            rate += f" to {args.lr * world_size:g} in {args.warmup_epochs} epochs"
        setup.say(f"{name}: {args.scaling} scaling, {size}, {data}, {rate}")

        settings = {"data": data, "scaling": args.scaling}
        settings |= {option: getattr(args, option) for option in compare_runs.OPTIONS}
        settings |= {key: result[key] for key in ("world_size", "device", "threads_per_rank")}
        sets = load_images(args.data, args.download, args.image_size, args.decode)
        progress = fit(args, distributed, device, settings, sets)
        if dist.get_rank() != 0:
            return
        images = progress["step"] * batch * world_size
        result |= {"name": name, "data": data, "batch_per_rank": batch}
        result |= {"images_per_second": images / progress["train_seconds"], **progress}
        print_report(result, images)
        report.write_json(args.json, result)
        if args.results is None or args.no_sync:
            needed = "single and DDP, both without --no-sync and with a --results that is writable"
            setup.say(f"no comparison: it needs a run of {needed}")
            return
        results = Path(args.results)
        report.write_json(results / file, result)
        compare_runs.compare(results)


if __name__ == "__main__":
    main()
