"""08: DDP for the dense part of a model, parameter servers behind RPC for its embedding tables.

Tables too large for one process are not replicated: every parameter server keeps its own, and
trainers ask for the rows they need by remote procedure call. The dense net is small: every trainer
has a replica, and DDP keeps them equal. One distributed backward pass serves both. Epochs that ask
all servers at once take turns with epochs that ask one after another.

    make 08_ddp_rpc                                     (2 trainers and 2 servers)
    make 08_ddp_rpc NPROC=8                             (8 and 8, as upstream)

The processes, all on this host, are a master, the trainers and the servers, in this order of ranks.
All join one RPC world, and the trainers a process group, too. Only the master acts by itself: the
others do what they are asked to.

Source: PyTorch, torch/distributed/benchmarks/benchmark_ddp_rpc.py; Li et al., "Scaling Distributed
Machine Learning with the Parameter Server", OSDI 2014.
"""

import copy
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
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
QUANTITIES = ["seconds", "lookup_seconds", "examples"]  # of an epoch; examples are bags


# Three functions that run on a parameter server when a trainer calls them. A table is an object on
# its server; all others hold a remote reference (RRef) to it.
def new_table(embeddings: int, embedding_dim: int) -> nn.EmbeddingBag:
    """Make this server's table, float32 [embeddings, embedding_dim]."""
    torch.manual_seed(rpc.get_worker_info().id)  # each server's table is another one
    return nn.EmbeddingBag(embeddings, embedding_dim, mode="sum")


def look_up(table: rpc.RRef, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the sum over each bag, float32 [bags, embedding_dim], of this server's columns."""
    return table.local_value()(indices, offsets)


def weight_of(table: rpc.RRef) -> rpc.RRef:
    """Return a reference to the table's parameter, which stays here."""
    return rpc.RRef(table.local_value().weight)


def dense_net() -> nn.Sequential:
    """Make the net from rows of 512 features to logits of 8 classes, with upstream's layers."""
    return nn.Sequential(
        nn.Linear(DENSE_INPUT, 256),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.Linear(64, 32),
        nn.Linear(32, CLASSES),
    )


class HybridModel(nn.Module):
    """Joins embedding tables on the parameter servers to this trainer's replica of the dense net.

    tables: a reference to each. process_group: the trainers and nobody else; without it DDP takes
    the default group. round_trip: seconds that a network would add.
    """

    def __init__(self, tables: list[rpc.RRef], device, process_group=None, round_trip=0.0):
        super().__init__()
        self.tables = tables
        self.device = device
        self.dense = DistributedDataParallel(dense_net().to(device), process_group=process_group)
        self.round_trip = round_trip
        self.lookup = "parallel"
        self.lookup_seconds = 0.0

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [bags * servers * embedding_dim / 512, 8].

        indices: int64 [n], rows of the tables; offsets: int64 [bags], where in it each bag starts.
        """
        columns = self.ask_servers(indices, offsets)
        # Side by side the columns make rows of the dense net's input, at least one per bag.
        rows = torch.cat(columns, dim=1).reshape(-1, DENSE_INPUT)
        return self.dense(rows.to(self.device))

    def ask_servers(self, indices: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
        """Return every server's columns of the same bags, float32 [bags, embedding_dim] each."""
        start = time.perf_counter()
        questions = [(table.owner(), look_up, (table, indices, offsets)) for table in self.tables]
        if self.lookup == "parallel":
            answers = [rpc.rpc_async(*question) for question in questions]
            columns = torch.futures.wait_all(answers)
            time.sleep(self.round_trip)
        else:  # the naive loop: a round trip, then the next one
            columns = [rpc.rpc_sync(*question) for question in questions]
            time.sleep(len(questions) * self.round_trip)
        self.lookup_seconds += time.perf_counter() - start
        return columns

    def optimizer(self) -> DistributedOptimizer:
        """Make SGD that updates each parameter where it lives: here and on all servers, at once."""
        remote = [rpc.rpc_sync(table.owner(), weight_of, (table,)) for table in self.tables]
        local = [rpc.RRef(parameter) for parameter in self.dense.parameters()]
        return DistributedOptimizer(torch.optim.SGD, remote + local, lr=LEARNING_RATE)


def training_step(model: HybridModel, optimizer: DistributedOptimizer, batch: tuple):
    """Take one step of one trainer; return its loss."""
    indices, offsets, targets = batch
    # The context holds this step's gradients on every process, so there are none to zero.
    with dist_autograd.context() as context_id:
        loss = F.cross_entropy(model(indices, offsets), targets.to(model.device))
        # DDP averages the dense gradients, RPC takes the others to their servers.
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss.detach()


# ==================================================================================================
# Below this line: the processes, the command line, verify, training, and the master, who prints.


def run_rank(rank, args, names):
    """Join in this rank's role, serve until the master is done, and leave; a process calls this."""
    from common.setup import threads_per_rank, without_gloo_greeting

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all at once, also within C++
    logging.captureWarnings(True)  # torch deprecates what its own RPC and optimizer are made of
    torch.set_num_threads(threads_per_rank(len(names) - 1))  # the master only waits
    is_trainer = 1 <= rank <= args.trainers
    is_server = rank > args.trainers
    options = rpc.TensorPipeRpcBackendOptions(
        # A trainer has a thread that trains and others that take the answers. A server has a single
        # thread, so that several trainers update a table one after another: the optimizer takes no
        # lock.
        num_worker_threads=1 if is_server else 4,
        rpc_timeout=args.timeout,
        # Plain TCP. With messages as small as these, what torch adds on one host (shared memory, 16
        # more connections per pair) took more CPU time.
        _transports=["uv"],
        _channels=["basic"],
    )
    os.environ["RANK"] = str(rank)
    with without_gloo_greeting():  # RPC has a group of gloo's, too
        if is_trainer:
            limit = timedelta(seconds=args.timeout)
            dist.init_process_group("gloo", None, limit, args.trainers, rank - 1)
        rpc.init_rpc(names[rank], None, rank, len(names), options)
    if rank == 0:
        run_master(args, names)
    rpc.shutdown()
    if is_trainer:
        dist.destroy_process_group()


def read_arguments():
    """Read the command line, check and complete it; all of upstream's flags work, too."""
    from common import setup

    count = setup.whole_number(1, 64)
    one = setup.whole_number(1)
    milliseconds = setup.checked(float, lambda n: 0 <= n <= 1e6, "a number from 0 to 1e6")
    gpus = torch.cuda.device_count()
    devices = ["auto", "cpu", "cuda"] if gpus else ["auto", "cpu"]
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("--nproc", type=count, default=2, help="number of trainers, and of servers")
    add("--trainers", "--number-trainers", type=count, help="(default: --nproc)")
    add("--servers", "--number-ps", type=count, help="(default: --nproc)")
    add("--embeddings", "--number-embeddings", type=one, default=300, help="rows of each table")
    add("--embedding-dim", type=one, help="its columns (default: the fewest that are enough)")
    add("--steps", type=one, default=500, help=f"for each lookup, in epochs of {EPOCH}")
    add("--warmup-cycles", type=setup.whole_number(0), default=5, help="epochs before them")
    add("--round-trip-ms", type=milliseconds, default=0.0, help="what a network adds to each")
    add("--master-addr", default="127.0.0.1", help="where the processes meet on this host")
    add("--master-port", type=setup.whole_number(0, 65535), default=0, help="0: any free port")
    add("--device", choices=devices, default="auto", help="where the dense net is")
    add("--timeout", type=setup.positive_number, default=300.0, help="seconds to wait for others")
    add("--no-verify", action="store_true", help="only measure; verify copies all tables")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    args = parser.parse_args()
    args.trainers = args.trainers or args.nproc
    args.servers = args.servers or args.nproc
    if args.device == "auto":
        args.device = "cuda" if gpus else "cpu"
    multiple = DENSE_INPUT // math.gcd(DENSE_INPUT, args.servers)
    args.embedding_dim = args.embedding_dim or multiple
    if args.embedding_dim % multiple:
        setup.fail(
            f"argument --embedding-dim: '{args.embedding_dim}' is not a multiple of {multiple}: "
            f"the columns of {args.servers} servers have to make rows of {DENSE_INPUT}"
        )
    meeting_point = args.master_addr, args.master_port
    try:
        socket.create_server(meeting_point).close()
    except OSError as error:
        setup.fail(
            f"argument --master-addr, --master-port: this host cannot listen on {meeting_point}: "
            f"{error.strerror}"
        )
    return args


def random_batches(args, seed):
    """Yield (indices, offsets, targets) without end: 20 to 50 indices in bags of 1 to 10.

    There is a target for each row of the dense net's input.
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
    """Make the model and its optimizer on a trainer. Trainers share the GPUs if these are fewer."""
    torch.manual_seed(dist.get_rank())  # so that DDP must make the replicas equal
    if args.device == "cuda":  # torch keeps it for each thread, and RPC calls us on any of its own
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = torch.device(args.device)
    model = HybridModel(tables, device, process_group, args.round_trip_ms / 1000)
    return model, model.optimizer()


def largest_difference(tensors, others):
    """Return the largest difference between two lists of tensors; nan if there is one anywhere."""
    differences = []
    for tensor, other in zip(tensors, others, strict=True):
        differences.append((tensor - other).abs().max().cpu())
    return torch.stack(differences).max().item()  # Python's max() would lose a nan


def verify_one_trainer(args, tables):
    """Train 20 steps with the servers, on trainer0, and 20 with a plain model in this process.

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
        rows = torch.cat(columns, dim=1).reshape(-1, DENSE_INPUT)
        logits = dense(rows.to(model.device))
        F.cross_entropy(logits, targets.to(model.device)).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    weights = list(model.dense.parameters())
    weights += [table.to_here().weight for table in tables]
    return largest_difference(weights, plain.parameters())


def verify(args, trainer, tables):
    """Verify on the master before anything is measured; end the run if the training is wrong."""
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
    return {"max_abs_diff": difference, "tolerance": tolerance, "passed": True}


def train(args, tables):
    """Train on every trainer: return its QUANTITIES of every lookup, and its replica's weights."""
    from common.setup import progress

    rank = dist.get_rank()
    rounds = args.warmup_cycles + math.ceil(args.steps / EPOCH)
    model, optimizer = new_model(args, tables)
    all_batches = random_batches(args, seed=rank)
    measured = {}
    for lookup in LOOKUPS:
        measured[lookup] = {name: [] for name in QUANTITIES}
    for number in range(rounds):
        if rank == 0:
            rpc.rpc_async("master", progress, (f"training: epoch {number + 1} of {rounds}",))
        batches = list(islice(all_batches, EPOCH))  # the same for both
        examples = sum(len(offsets) for _, offsets, _ in batches)
        for lookup, epochs in measured.items():
            model.lookup = lookup
            model.lookup_seconds = 0.0
            start = time.perf_counter()
            for batch in batches:
                loss = training_step(model, optimizer, batch)
            loss.item()  # waits for the GPU, if any
            if number >= args.warmup_cycles:
                epochs["seconds"].append(time.perf_counter() - start)
                epochs["lookup_seconds"].append(model.lookup_seconds)
                epochs["examples"].append(examples)
    weights = nn.utils.parameters_to_vector(model.dense.parameters())
    return measured, weights.detach().cpu()


def run_master(args, names):
    """Verify, have the trainers train, print and write what they measured."""
    from common import report
    from common.setup import say

    trainers = names[1 : 1 + args.trainers]
    servers = names[1 + args.trainers :]
    threads = torch.get_num_threads()
    result = report.head("08_ddp_rpc", args, "gloo", args.device, len(names), threads)
    say(
        f"08_ddp_rpc: torch {torch.__version__}, gloo on {args.device}, "
        f"{len(names)} ranks, threads per rank: {threads}\n"
        f"CUDA: {torch.version.cuda}, GPUs of this host: {torch.cuda.device_count()}{topology()}\n"
        f"trainers: {args.trainers}, DDP over gloo; servers: {args.servers}, "
        f"each with a table of {args.embeddings} × {args.embedding_dim}"
    )
    shape = args.embeddings, args.embedding_dim
    tables = [rpc.remote(name, new_table, shape) for name in servers]
    result["verify"] = {}
    if not args.no_verify:
        result["verify"]["trainer0"] = verify(args, trainers[0], tables)
    # Without a time limit, because trainers notice a process that ends, and say so.
    answers = [rpc.rpc_async(name, train, (args, tables), timeout=0) for name in trainers]
    trained = torch.futures.wait_all(answers)
    result["rows"] = []
    for lookup in LOOKUPS:
        row = {"name": lookup}
        for name in QUANTITIES:
            row[name] = [measured[lookup][name] for measured, _ in trained]  # [trainer][epoch]
        result["rows"].append(row)
    print_result(result["rows"])
    replicas = [weights for _, weights in trained]
    for replica in replicas:
        if not torch.equal(replica, replicas[0]):
            sys.exit("verify FAILED: the trainers hold different dense weights")
    say("verify: passed, the dense weights of all trainers are bitwise equal")
    report.write_json(args.json, result)


def topology() -> str:
    """Return how this host's GPUs are connected, as `nvidia-smi topo -m` says; "" without it."""
    if not shutil.which("nvidia-smi"):
        return ""
    found = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
    return f"\nnvidia-smi topo -m:\n{found.stdout.rstrip()}"


def print_result(rows):
    """Print lines of the table for each row of the JSON: of each trainer, and of all together."""
    import numpy

    from common.report import percentiles, print_table
    from common.setup import say

    table = []
    for row in rows:
        seconds = numpy.array(row["seconds"])  # [trainer, epoch]
        lookups = numpy.array(row["lookup_seconds"])
        examples = numpy.array(row["examples"])
        everyone = list(range(len(seconds)))
        groups = {f"trainer{number}": [number] for number in everyone}
        groups["All"] = everyone
        for name, members in groups.items():
            cells = [f"{name}, {row['name']}"]
            in_epoch = len(members) * examples[members].mean()
            for percentile in percentiles(seconds[members]):
                cells += [f"{percentile:.3f}", f"{in_epoch / percentile:.0f}"]
            share = lookups[members].sum() / seconds[members].sum()
            table.append([*cells, f"{100 * share:.0f} %"])
    header = ["", "p50", "ex./s", "p75", "ex./s", "p90", "ex./s", "p95", "ex./s", "lookups"]
    print_table(header, table)
    say(
        "Seconds per epoch (ten steps) at each percentile, and examples (bags) per second at that\n"
        "pace; lookups: their share of the time. All: samples pooled, trainers' examples summed."
    )
    parallel, sequential = rows
    gain = numpy.sum(sequential["seconds"]) / numpy.sum(parallel["seconds"])  # of the same batches
    say(f"parallel / sequential: {gain:.3f} × the examples per second, all epochs")


def main():
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    try:
        from common import setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside this script")

    args = read_arguments()
    trainers = [f"trainer{number}" for number in range(args.trainers)]
    servers = [f"ps{number}" for number in range(args.servers)]
    names = ["master", *trainers, *servers]
    setup.progress(f"starting {len(names)} processes")
    # The ranks meet at a store that is there before them. Port 0: any free one.
    meeting_point = args.master_addr, args.master_port
    store = dist.TCPStore(*meeting_point, is_master=True, wait_for_workers=False)
    os.environ["MASTER_ADDR"] = args.master_addr
    os.environ["MASTER_PORT"] = str(store.port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    try:
        mp.spawn(run_rank, (args, names), len(names))
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        reason = str(error).strip().splitlines()[-1]
        sys.exit(f"error: {names[error.error_index]} failed, and all others were ended: {reason}")


if __name__ == "__main__":
    main()
