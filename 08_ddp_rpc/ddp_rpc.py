"""08: DDP for the dense part of a model, parameter servers behind RPC for its embedding tables.

Tables too large for one process are not replicated: every parameter server keeps its own, and
trainers ask for the rows they need by remote procedure call. The dense net is small: every trainer
has a replica, and DDP keeps them equal. One distributed backward pass serves both. Asking
all servers at once is measured against asking one after another, epoch by epoch in turn.

    make 08_ddp_rpc                                     (2 trainers and 2 servers)
    make 08_ddp_rpc NPROC=8                             (8 and 8, as upstream)
    python 08_ddp_rpc/ddp_rpc.py --trainers 1 --servers 8 --round-trip-ms 2
                                                        (each lookup takes at least 2 ms)

The processes, all on this host, are a master, the trainers, and the servers. All join one RPC
world, the trainers a process group besides. The master alone acts by itself: the others do what
they are called for.

Source: PyTorch, torch/distributed/benchmarks/benchmark_ddp_rpc.py; Li et al., "Scaling Distributed
Machine Learning with the Parameter Server", OSDI 2014.
"""

import copy
import logging
import math
import os
import shutil
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

CLASSES = 8
DENSE_INPUT = 512
LEARNING_RATE = 0.05
EPOCH = 10  # steps, as upstream: it is timed as a whole
VERIFY_STEPS = 20
LOOKUPS = ["parallel", "sequential"]


# Three functions that run on a parameter server when somebody calls them from afar. A table is an
# object on its server; all others hold a remote reference (RRef) to it.
def new_table(embeddings: int, embedding_dim: int) -> nn.EmbeddingBag:
    """This server's table, float32 [embeddings, embedding_dim]."""
    torch.manual_seed(rpc.get_worker_info().id)  # each server's table is another one
    return nn.EmbeddingBag(embeddings, embedding_dim, mode="sum")


def look_up(table: rpc.RRef, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The sum over each bag, float32 [bags, embedding_dim], of this server's columns."""
    return table.local_value()(indices, offsets)


def weight_of(table: rpc.RRef) -> rpc.RRef:
    """A reference to the table's parameter, which stays here."""
    return rpc.RRef(table.local_value().weight)


def dense_net() -> nn.Sequential:
    """Rows of 512 features -> logits of 8 classes; the layers of the upstream benchmark."""
    return nn.Sequential(
        nn.Linear(DENSE_INPUT, 256),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.Linear(64, 32),
        nn.Linear(32, CLASSES),
    )


class HybridModel(nn.Module):
    """Embedding tables on the parameter servers, and this trainer's replica of the dense net.

    tables: a reference to each. process_group: joins the trainers and nobody else; without it DDP
    takes the default group. round_trip: seconds that a lookup takes at least.
    """

    def __init__(self, tables: list[rpc.RRef], device, process_group=None, round_trip=0.0):
        super().__init__()
        self.tables = tables
        self.device = device
        self.dense = DistributedDataParallel(dense_net().to(device), process_group=process_group)
        self.round_trip = round_trip
        self.lookup = "parallel"
        self.lookup_seconds = 0.0
        self.message_bytes = 0

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [bags * servers * embedding_dim / 512, 8].

        indices: int64 [n], rows of the tables; offsets: int64 [bags], where in it each bag starts.
        """
        columns = self.ask_servers(indices, offsets)
        # Side by side the columns make rows of the dense net's input, at least one per bag.
        rows = torch.cat(columns, dim=1).reshape(-1, DENSE_INPUT)
        return self.dense(rows.to(self.device))

    def ask_servers(self, indices: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
        """Every server's columns of the same bags, float32 [bags, embedding_dim] each."""
        start = time.perf_counter()
        questions = [(table.owner(), look_up, (table, indices, offsets)) for table in self.tables]
        if self.lookup == "parallel":
            answers = [rpc.rpc_async(*question) for question in questions]
            columns = torch.futures.wait_all(answers)
            round_trips = 1
        else:  # the naive loop: a round trip, then the next one
            columns = [rpc.rpc_sync(*question) for question in questions]
            round_trips = len(questions)
        end = start + round_trips * self.round_trip
        time.sleep(max(0.0, end - time.perf_counter()))
        self.lookup_seconds += time.perf_counter() - start
        self.message_bytes += len(questions) * (indices.nbytes + offsets.nbytes)
        # The gradients of the answers, which are as large, go back in the backward pass.
        self.message_bytes += 2 * sum(column.nbytes for column in columns)
        return columns

    def optimizer(self) -> DistributedOptimizer:
        """SGD that updates each parameter where it lives: here and on all servers, all at once."""
        remote = [rpc.rpc_sync(table.owner(), weight_of, (table,)) for table in self.tables]
        local = [rpc.RRef(parameter) for parameter in self.dense.parameters()]
        return DistributedOptimizer(torch.optim.SGD, remote + local, lr=LEARNING_RATE)


def training_step(model: HybridModel, optimizer: DistributedOptimizer, batch: tuple):
    """One step of one trainer; returns its loss."""
    indices, offsets, targets = batch
    # The context holds the gradients of this step, on every process: there are none to zero.
    with dist_autograd.context() as context_id:
        loss = F.cross_entropy(model(indices, offsets), targets.to(model.device))
        # DDP averages the dense gradients, RPC takes the others to their servers.
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss.detach()


# ==================================================================================================
# Below this line: the processes, the command line, verify, training, and the master, who prints.


def run_rank(rank, args, names):
    """In a process of its own: join in this rank's role, serve until the master is done, leave."""
    from common.setup import threads_per_rank, without_gloo_greeting

    logging.captureWarnings(True)  # torch deprecates what its own RPC and optimizer are made of
    torch.set_num_threads(threads_per_rank(len(names) - 1))  # the master only waits
    role = names[rank].rstrip("0123456789")
    options = rpc.TensorPipeRpcBackendOptions(
        # A trainer has a thread that trains and others that take the answers. A server has one in
        # all, so that updates of one table by several trainers follow one another: the optimizer
        # takes no lock.
        num_worker_threads=1 if role == "ps" else 4,
        rpc_timeout=args.timeout,
        # Plain TCP. What torch adds to it on one host (shared memory, 16 more connections per pair)
        # took more CPU time with messages as small as these.
        _transports=["uv"],
        _channels=["basic"],
    )
    with without_gloo_greeting():  # RPC has a group of gloo's, too
        if role == "trainer":
            limit = timedelta(seconds=args.timeout)
            dist.init_process_group(args.backend, None, limit, args.trainers, rank - 1)
        rpc.init_rpc(names[rank], None, rank, len(names), options)
    if role == "master":
        try:
            run_master(args, names)
        except RuntimeError:
            gone = [name for name in names[1:] if is_silent(name)]
            if not gone:
                raise
            sys.exit(f"error: no answer within --timeout {args.timeout:g} s from {', '.join(gone)}")
    rpc.shutdown()
    if role == "trainer":
        dist.destroy_process_group()


def is_silent(name):
    """Whether another process does not answer within 5 seconds."""
    try:
        return not rpc.rpc_sync(name, os.getpid, timeout=5)
    except RuntimeError:
        return True


def read_arguments():
    """The command line, checked and completed; upstream's names of flags are understood, too."""
    from common import setup

    count, one = setup.whole_number(1, 64), setup.whole_number(1)
    gpus = torch.cuda.device_count()
    devices = ["auto", "cpu", "cuda"] if gpus else ["auto", "cpu"]
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("--nproc", type=count, default=2, help="so many trainers, and as many servers")
    add("--trainers", "--number-trainers", type=count, help="(default: --nproc)")
    add("--servers", "--number-ps", type=count, help="(default: --nproc)")
    add("--embeddings", "--number-embeddings", type=one, default=300, help="rows of each table")
    add("--embedding-dim", type=one, help="its columns (default: the fewest that are enough)")
    add("--steps", type=one, default=500, help=f"of each lookup, in epochs of {EPOCH}")
    add("--warmup-cycles", type=setup.whole_number(0), default=5, help="epochs before them")
    add("--round-trip-ms", type=float, default=0.0, help="a lookup takes at least as long")
    add("--device", choices=devices, default="auto", help="of the dense net")
    add("--timeout", type=setup.positive_number, default=300.0, help="seconds to wait for others")
    add("--no-verify", action="store_true", help="only measure: verify copies all tables")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    args = parser.parse_args()
    args.trainers = args.trainers or args.nproc
    args.servers = args.servers or args.nproc
    if args.device == "auto":
        args.device = "cuda" if gpus else "cpu"
    gpu_per_trainer = args.device == "cuda" and gpus >= args.trainers
    args.backend = "nccl" if gpu_per_trainer else "gloo"  # of the trainers' process group
    multiple = DENSE_INPUT // math.gcd(DENSE_INPUT, args.servers)
    args.embedding_dim = args.embedding_dim or multiple
    if args.embedding_dim % multiple:
        setup.fail(
            f"argument --embedding-dim: '{args.embedding_dim}' is not a multiple of {multiple}: "
            f"the columns of {args.servers} servers have to make rows of {DENSE_INPUT}"
        )
    return args


def begin(args):
    """Print what runs, where, and which rank is what; returns the head of the JSON."""
    from common.report import processor_name
    from common.setup import say

    threads, world_size = torch.get_num_threads(), 1 + args.trainers + args.servers
    cuda = f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs"
    say(
        f"08_ddp_rpc: torch {torch.__version__}, {cuda}, {args.backend} on {args.device}, "
        f"{world_size} ranks, threads per rank: {threads}"
    )
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", "topo", "-m"])  # how the GPUs are connected
    say(
        f"{args.trainers} trainers, DDP over {args.backend}; {args.servers} servers, "
        f"a table of {args.embeddings} × {args.embedding_dim} each"
    )
    return {
        "stage": "08_ddp_rpc",
        "torch": torch.__version__,
        "backend": args.backend,
        "network": None,
        "dilation": 1.0,
        "device": args.device,
        "device_name": torch.cuda.get_device_name() if args.device == "cuda" else processor_name(),
        "world_size": world_size,
        "threads_per_rank": threads,
        "options": dict(vars(args)),
        "started": datetime.now(timezone.utc),
    }


def random_batches(args, seed):
    """Yield (indices, offsets, targets) without end: 20 to 50 indices in bags of 1 to 10.

    There is a target per row of the dense net's input.
    """
    rows_per_bag = args.servers * args.embedding_dim // DENSE_INPUT
    generator = torch.Generator().manual_seed(seed)
    while True:
        length = int(torch.randint(20, 51, (), generator=generator))
        sizes = torch.randint(1, 11, (length,), generator=generator)
        starts = sizes.cumsum(0) - sizes
        offsets = starts[starts < length]
        indices = torch.randint(args.embeddings, (length,), generator=generator)
        rows = len(offsets) * rows_per_bag
        targets = torch.randint(CLASSES, (rows,), generator=generator)
        yield indices, offsets, targets


def new_model(args, tables, process_group=None):
    """On a trainer: the model and its optimizer. Trainers share the GPUs if these are fewer."""
    torch.manual_seed(dist.get_rank())  # so that DDP must make the replicas equal
    if args.device == "cuda":  # of this thread: RPC calls us on any of its own
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = torch.device(args.device)
    model = HybridModel(tables, device, process_group, args.round_trip_ms / 1000)
    return model, model.optimizer()


def verify_one_trainer(args, tables):
    """Runs on trainer0: 20 steps with the servers, and 20 of a plain model in this process.

    Returns the largest difference between their weights.
    """
    from common.setup import without_gloo_greeting

    with without_gloo_greeting():
        alone = dist.new_group([0], use_local_synchronization=True)
    model, optimizer = new_model(args, tables, process_group=alone)
    # The same model without DDP and RPC: a copy of all its weights.
    dense = copy.deepcopy(model.dense.module)
    copies = [table.to_here() for table in tables]
    plain = nn.ModuleList([dense, *copies])
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    batches = random_batches(args, seed=0)
    for step, batch in enumerate(islice(batches, VERIFY_STEPS)):
        model.lookup = LOOKUPS[step % 2]
        training_step(model, optimizer, batch)
        indices, offsets, targets = batch
        columns = [table(indices, offsets) for table in copies]
        logits = dense(torch.cat(columns, dim=1).reshape(-1, DENSE_INPUT).to(model.device))
        F.cross_entropy(logits, targets.to(model.device)).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    weights = [*model.dense.parameters(), *[table.to_here().weight for table in tables]]
    pairs = zip(weights, plain.parameters(), strict=True)
    return max((weight - other).abs().max().item() for weight, other in pairs)


def verify(args, trainer, tables):
    """Runs on the master, before anything is measured. Ends the run if the training is wrong."""
    from common.setup import say

    tolerance = 1e-5
    difference = rpc.rpc_sync(trainer, verify_one_trainer, (args, tables), timeout=0)
    found = (
        f"one trainer and {args.servers} servers are at most {difference:.1e} away from a plain "
        f"model in one process after {VERIFY_STEPS} steps; allowed: {tolerance}"
    )
    if not difference <= tolerance:
        sys.exit(f"verify FAILED: {found}")
    say(f"verify: passed, {found}\n")
    return {"max_abs_diff": difference}


def train(args, tables):
    """Runs on every trainer. Returns float64 [epoch, lookup, 4], and the weights of its replica.

    The four: seconds, seconds in lookups, bytes of messages, examples (bags).
    """
    from common.setup import progress

    rank = dist.get_rank()
    rounds = args.warmup_cycles + math.ceil(args.steps / EPOCH)
    model, optimizer = new_model(args, tables)
    all_batches = random_batches(args, seed=rank)
    epochs = []
    for number in range(rounds):
        if rank == 0:
            rpc.rpc_async("master", progress, (f"training: epoch {number + 1} of {rounds}",))
        for lookup in LOOKUPS:
            model.lookup = lookup
            batches = list(islice(all_batches, EPOCH))
            model.lookup_seconds, model.message_bytes = 0.0, 0
            start = time.perf_counter()
            losses = [training_step(model, optimizer, batch) for batch in batches]
            losses[-1].item()  # waits for the GPU, if any
            seconds = time.perf_counter() - start
            examples = sum(len(offsets) for _, offsets, _ in batches)
            epochs.append([seconds, model.lookup_seconds, model.message_bytes, examples])
    weights = nn.utils.parameters_to_vector(model.dense.parameters())
    samples = torch.tensor(epochs, dtype=torch.float64).view(rounds, len(LOOKUPS), 4)
    return samples[args.warmup_cycles :], weights.detach().cpu()


def run_master(args, names):
    """Verify, have the trainers train, print and write what they measured."""
    from common import report
    from common.setup import say

    trainers, servers = names[1 : 1 + args.trainers], names[1 + args.trainers :]
    result = begin(args)
    shape = (args.embeddings, args.embedding_dim)
    tables = [rpc.remote(name, new_table, shape) for name in servers]
    result["verify"] = None if args.no_verify else verify(args, trainers[0], tables)
    # Without a time limit, because a trainer misses whoever ends, and says so.
    answers = [rpc.rpc_async(name, train, (args, tables), timeout=0) for name in trainers]
    samples, replicas = zip(*torch.futures.wait_all(answers), strict=True)
    samples = torch.stack(samples)  # [trainer, epoch, lookup, 4]
    print_result(trainers, samples)
    if not all(torch.equal(replica, replicas[0]) for replica in replicas):
        sys.exit("verify FAILED: the trainers hold different dense weights")
    say(f"verify: passed, dense weights of {len(trainers)} trainers bitwise equal")
    result["epochs"] = samples.tolist()
    report.write_json(args.json, result)


def print_result(trainers, samples):
    """A row of the table per trainer and lookup, and of all trainers together."""
    from common.report import percentiles, print_table
    from common.setup import say

    rows = []
    for name, group in zip([*trainers, "all"], [*samples.split(1), samples], strict=True):
        for number, lookup in enumerate(LOOKUPS):
            seconds, waits, _, examples = group[:, :, number].flatten(0, 1).T
            in_an_epoch = len(group) * examples.mean()
            cells = [f"{name} {lookup}"]
            for percentile in percentiles(seconds):
                cells += [f"{percentile:.3f}", f"{in_an_epoch / percentile:.0f}"]
            rows.append([*cells, f"{100 * waits.sum() / seconds.sum():.0f} %"])
    header = ["", "p50", "ex./s", "p75", "ex./s", "p90", "ex./s", "p95", "ex./s", "lookups"]
    print_table(header, rows)
    say(
        "seconds per epoch (ten steps) at each percentile, and examples (bags) per second at that\n"
        "pace; lookups: their share of the time; all: samples pooled, examples summed"
    )
    parallel, sequential = samples.sum(dim=(0, 1))
    faster = parallel[3] / parallel[0] * sequential[0] / sequential[3]
    say(f"parallel / sequential: {faster:.3f} × the examples per second, all epochs")
    kilobytes = samples[..., 2].mean() / EPOCH / 1000
    say(
        f"a trainer and all servers exchange {kilobytes:.1f} kB per step (1 kB = 1000 bytes):\n"
        "the tensors in requests (indices), answers (sums), and backward (the sums' gradients)"
    )


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common import setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside {folder} or into it")

    args = read_arguments()
    trainers = [f"trainer{number}" for number in range(args.trainers)]
    names = ["master", *trainers, *[f"ps{number}" for number in range(args.servers)]]
    setup.progress(f"starting {len(names)} processes")
    try:
        setup.spawn(len(names), run_rank, args, names)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        reason = str(error).strip().splitlines()[-1]
        sys.exit(f"error: {names[error.error_index]} failed, and all others were ended: {reason}")


if __name__ == "__main__":
    main()
