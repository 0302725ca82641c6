"""08: DDP for the dense part of a model, parameter servers behind RPC for its embedding tables.

Tables too large for one process are not replicated: every parameter server keeps its own, and
trainers ask for the rows they need by remote procedure call. The dense net is small: every trainer
has a replica, and DDP keeps them equal. One distributed backward pass serves both. All servers are
asked at once, and their answers are awaited together.

    make 08_ddp_rpc                                     (2 trainers and 2 servers)
    make 08_ddp_rpc NPROC=8                             (8 and 8, as upstream)
    python 08_ddp_rpc/ddp_rpc.py --trainers 1 --servers 8 --lookup both --round-trip 2ms
                        (both kinds of lookup, epoch by epoch in turn; each takes at least 2 ms)

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
from statistics import fmean

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
        self.lookup_seconds = 0.0
        self.message_bytes = 0

    def forward(
        self, indices: torch.Tensor, offsets: torch.Tensor, lookup: str = "parallel"
    ) -> torch.Tensor:
        """Logits, float32 [bags * servers * embedding_dim / 512, 8].

        indices: int64 [n], rows of the tables; offsets: int64 [bags], where in it each bag starts.
        """
        columns = self.ask_servers(indices, offsets, lookup)
        # Side by side the columns make rows of the dense net's input, at least one per bag.
        rows = torch.cat(columns, dim=1).reshape(-1, DENSE_INPUT)
        return self.dense(rows.to(self.device))

    def ask_servers(
        self, indices: torch.Tensor, offsets: torch.Tensor, lookup: str
    ) -> list[torch.Tensor]:
        """Every server's columns of the same bags, float32 [bags, embedding_dim] each."""
        start = time.perf_counter()
        questions = [(table.owner(), look_up, (table, indices, offsets)) for table in self.tables]
        if lookup == "parallel":
            answers = [rpc.rpc_async(*question) for question in questions]
            columns = torch.futures.wait_all(answers)
            sleep_until(start + self.round_trip)
        else:  # the naive loop: a round trip, then the next one
            columns = []
            for number, question in enumerate(questions, 1):
                columns.append(rpc.rpc_sync(*question))
                sleep_until(start + number * self.round_trip)
        self.lookup_seconds += time.perf_counter() - start
        requests = len(questions) * (indices.nbytes + offsets.nbytes)
        # The gradients of the answers, which are as large, go back in the backward pass.
        self.message_bytes += requests + 2 * sum(column.nbytes for column in columns)
        return columns

    def optimizer(self) -> DistributedOptimizer:
        """SGD that updates each parameter where it lives: here and on all servers, all at once."""
        answers = [rpc.rpc_async(table.owner(), weight_of, (table,)) for table in self.tables]
        remote = torch.futures.wait_all(answers)
        local = [rpc.RRef(parameter) for parameter in self.dense.parameters()]
        return DistributedOptimizer(torch.optim.SGD, remote + local, lr=LEARNING_RATE)


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))


def training_step(
    model: HybridModel, optimizer: DistributedOptimizer, batch: tuple, lookup: str = "parallel"
) -> torch.Tensor:
    """One step of one trainer; returns its loss."""
    indices, offsets, targets = batch
    # The context holds the gradients of this step, on every process: there are none to zero.
    with dist_autograd.context() as context_id:
        logits = model(indices, offsets, lookup)
        loss = F.cross_entropy(logits, targets.to(model.device))
        # DDP averages the dense gradients, RPC takes the others to their servers.
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return loss.detach()


# ==================================================================================================
# Below this line: the processes, the command line, verify, training, and the master, who prints.


def run_rank(rank: int, args, names: list[str]) -> None:
    """In a process of its own: join in this rank's role, serve until the master is done, leave."""
    from common.setup import threads_per_rank, without_gloo_greeting

    logging.captureWarnings(True)  # torch deprecates what its own RPC and optimizer are made of
    torch.set_num_threads(threads_per_rank(len(names) - 1))  # the master only waits
    is_trainer = names[rank].startswith("trainer")
    options = rpc.TensorPipeRpcBackendOptions(
        # A trainer has a thread that trains and others that take the answers. A server has one in
        # all, so that updates of one table by several trainers follow one another: the optimizer
        # takes no lock.
        num_worker_threads=1 if names[rank].startswith("ps") else 4,
        rpc_timeout=args.timeout,
        # Plain TCP. What torch adds to it on one host (shared memory, 16 more connections per pair)
        # took more CPU time with messages as small as these.
        _transports=["uv"],
        _channels=["basic"],
    )
    with without_gloo_greeting():  # RPC has a group of gloo's, too
        if is_trainer:
            group = {"rank": rank - 1, "world_size": args.trainers}
            limit = timedelta(seconds=args.timeout)
            dist.init_process_group(args.backend, timeout=limit, **group)
        world = {"rank": rank, "world_size": len(names), "rpc_backend_options": options}
        rpc.init_rpc(names[rank], **world)
    if rank == 0:
        try:
            run_master(args, names)
        except RuntimeError as error:
            if "imed out" in str(error) or "timeout" in str(error):
                name_the_missing(names[1:], args.timeout)
            raise
    rpc.shutdown()
    if is_trainer:
        dist.destroy_process_group()


def name_the_missing(names: list[str], timeout: float) -> None:
    """End the master, after somebody has waited too long, with the names of all who are silent."""
    signs = {name: rpc.rpc_async(name, os.getpid, timeout=5) for name in names}
    missing = []
    for name, sign in signs.items():
        try:
            sign.wait()
        except RuntimeError:
            missing.append(name)
    silent = ", ".join(missing) or "nobody: all answer again"
    sys.exit(f"error: --timeout {timeout:g} s are over; no sign of life from {silent}")


def read_arguments():
    """The command line, checked and completed; upstream's names of flags are understood, too."""
    from common import setup
    from common.setup import checked, fail, whole_number

    def epochs_from(low: int):
        allowed = f"a multiple of {EPOCH} from {low}"
        return checked(int, lambda n: n >= low and n % EPOCH == 0, allowed)

    count, one = whole_number(1, 64), whole_number(1)
    milliseconds = checked(
        lambda text: float(text.removesuffix("ms")),
        lambda number: 0 <= number <= 1000,
        "a number of milliseconds up to 1000, such as 2ms",
    )
    columns = f"its columns (default: the fewest that give all servers {DENSE_INPUT} together)"
    lookup = "ask all servers at once, or one after another; both: epoch by epoch in turn"
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("--nproc", type=count, default=2, help="so many trainers, and as many servers")
    add("--trainers", "--number-trainers", type=count, help="(default: --nproc)")
    add("--servers", "--number-ps", type=count, help="(default: --nproc)")
    rows = "rows of each server's table"
    add("--embeddings", "--number-embeddings", type=one, default=300, help=rows)
    add("--embedding-dim", type=one, help=columns)
    add("--steps", type=epochs_from(EPOCH), default=1000, help=f"measured; {EPOCH} are an epoch")
    add("--warmup", type=epochs_from(0), default=50, help="steps before them, not measured")
    add("--warmup-cycles", type=whole_number(0), help="the same, in epochs, as upstream")
    add("--lookup", choices=[*LOOKUPS, "both"], default="parallel", help=lookup)
    add("--round-trip", type=milliseconds, default="0ms", help="a lookup takes at least as long")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="of the dense net")
    add("--timeout", type=setup.positive_number, default=300.0, help="seconds to wait for others")
    add("--no-verify", action="store_true", help="only measure")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    args = parser.parse_args()
    args.trainers = args.trainers or args.nproc
    args.servers = args.servers or args.nproc
    if args.warmup_cycles is not None:
        args.warmup = EPOCH * args.warmup_cycles

    gpus = torch.cuda.device_count()
    args.device = args.device.replace("auto", "cuda" if gpus > 0 else "cpu")
    if args.device == "cuda" and gpus == 0:
        fail("argument --device: 'cuda' needs a GPU that torch can use, and there is none; use cpu")
    gpu_per_trainer = args.device == "cuda" and gpus >= args.trainers
    args.backend = "nccl" if gpu_per_trainer else "gloo"  # of the trainers' process group

    multiple = DENSE_INPUT // math.gcd(DENSE_INPUT, args.servers)
    args.embedding_dim = args.embedding_dim or multiple
    if args.embedding_dim % multiple:
        fail(
            f"argument --embedding-dim: '{args.embedding_dim}' is not a multiple of {multiple}: "
            f"the columns of {args.servers} servers have to make rows of {DENSE_INPUT}"
        )
    return args


def begin(args) -> dict:
    """Print what runs, where, and which rank is what; returns the head of the JSON."""
    from common.report import processor_name
    from common.setup import say

    on_cuda = args.device == "cuda"
    result = {
        "stage": "08_ddp_rpc",
        "torch": torch.__version__,
        "backend": args.backend,
        "device": args.device,
        "device_name": torch.cuda.get_device_name() if on_cuda else processor_name(),
        "world_size": 1 + args.trainers + args.servers,
        "threads_per_rank": torch.get_num_threads(),
        "options": dict(vars(args)),
        "started": datetime.now(timezone.utc),
    }
    say(
        f"08_ddp_rpc: torch {torch.__version__}, {args.backend} on {args.device}, "
        f"{result['world_size']} ranks, threads per rank: {result['threads_per_rank']}"
    )
    say(f"CUDA {torch.version.cuda or 'none'}, {torch.cuda.device_count()} GPUs")
    if shutil.which("nvidia-smi"):
        say(subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True).stdout)
    parameters = sum(parameter.numel() for parameter in dense_net().parameters())
    say(
        f"rank 0: master; {args.trainers} trainers, {parameters} dense parameters, DDP over "
        f"{args.backend}; {args.servers} parameter servers, a table of {args.embeddings} × "
        f"{args.embedding_dim} each"
    )
    say(f"a lookup takes at least {args.round_trip:g} ms; an epoch is {EPOCH} steps")
    say(f"{args.steps} steps are measured, after {args.warmup} to warm up")
    return result


def random_batches(args, embeddings: int, seed: int):
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
        indices = torch.randint(embeddings, (length,), generator=generator)
        rows = len(offsets) * rows_per_bag
        targets = torch.randint(CLASSES, (rows,), generator=generator)
        yield indices, offsets, targets


def new_model(args, tables, seed=0, process_group=None):
    """On a trainer: the model and its optimizer. Trainers share the GPUs if these are fewer."""
    torch.manual_seed(seed)
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)  # of this thread: RPC calls us on any of its own
    model = HybridModel(tables, device, process_group, args.round_trip / 1000)
    return model, model.optimizer()


def new_tables(servers: list[str], embeddings: int, args) -> list[rpc.RRef]:
    """Make a table on each server; returns the references to them."""
    return [rpc.remote(name, new_table, (embeddings, args.embedding_dim)) for name in servers]


def weights_of(tables: list[rpc.RRef]) -> torch.Tensor:
    """Copies of all tables, float32 [servers, embeddings, embedding_dim]."""
    return torch.stack([table.to_here().weight.detach() for table in tables])


def call_all(names: list[str], function, *arguments) -> list:
    """Call a function on many processes at once; the results in their order.

    It may take longer than --timeout, because who trains is missed by the others.
    """
    answers = [rpc.rpc_async(name, function, arguments, timeout=0) for name in names]
    return torch.futures.wait_all(answers)


def verify_one_trainer(args, tables, embeddings):
    """Runs on trainer0: 20 steps with the servers, and 20 of a plain model in this process.

    Returns the largest difference between their weights.
    """
    from common.setup import without_gloo_greeting

    with without_gloo_greeting():
        alone = dist.new_group([0], use_local_synchronization=True)
    model, optimizer = new_model(args, tables, process_group=alone)
    # The same model without DDP and RPC: a copy of all its weights.
    dense = copy.deepcopy(model.dense.module)
    copies = nn.ModuleList([table.to_here() for table in tables])
    plain = nn.ModuleList([dense, copies])
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    batches = random_batches(args, embeddings, seed=0)
    for step, batch in enumerate(islice(batches, VERIFY_STEPS)):
        training_step(model, optimizer, batch, LOOKUPS[step % 2])
        indices, offsets, targets = batch
        columns = [table(indices, offsets) for table in copies]
        rows = torch.cat(columns, dim=1).reshape(-1, DENSE_INPUT)
        logits = dense(rows.to(model.device))
        F.cross_entropy(logits, targets.to(model.device)).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    weights = [*model.dense.parameters(), *weights_of(tables)]
    pairs = zip(weights, plain.parameters(), strict=True)
    return max((weight - other).abs().max().item() for weight, other in pairs)


def verify_replicas(args, tables, embeddings):
    """Runs on all trainers at once: 20 steps that look up even rows only.

    Returns this replica's weights and the rows that it has looked up.
    """
    rank = dist.get_rank()
    model, optimizer = new_model(args, tables, seed=rank)  # DDP must make them equal
    looked_up = set()
    batches = random_batches(args, max(1, embeddings // 2), seed=rank)
    for indices, offsets, targets in islice(batches, VERIFY_STEPS):
        even = 2 * indices
        training_step(model, optimizer, (even, offsets, targets))
        looked_up.update(even.tolist())
    weights = nn.utils.parameters_to_vector(model.dense.parameters())
    return weights.detach().cpu(), looked_up


def verify(args, trainers, servers):
    """Runs on the master, before anything is measured. Ends the run if the training is wrong."""
    from common.setup import progress, say

    progress("verify: one trainer with all servers, against a plain model in one process")
    embeddings = min(args.embeddings, 300)  # the plain model has all tables in one process
    tolerance = 1e-5
    tables = new_tables(servers, embeddings, args)
    [difference] = call_all(trainers[:1], verify_one_trainer, args, tables, embeddings)
    if not difference <= tolerance:
        sys.exit(
            f"verify FAILED: one trainer is {difference:.1e} away from a plain model in one process"
        )
    say(
        f"verify: passed, one trainer and {len(servers)} servers at most {difference:.1e} away "
        f"from a plain model in one process after {VERIFY_STEPS} steps; allowed: {tolerance}"
    )

    progress("verify: all trainers with all servers")
    tables = new_tables(servers, embeddings, args)
    before = weights_of(tables)
    replicas, rows = zip(
        *call_all(trainers, verify_replicas, args, tables, embeddings), strict=True
    )
    if not all(torch.equal(replica, replicas[0]) for replica in replicas):
        sys.exit("verify FAILED: the trainers hold different dense weights")
    looked_up = torch.zeros(embeddings, dtype=torch.bool)
    looked_up[list(set().union(*rows))] = True
    moved = (weights_of(tables) != before).any(dim=2)
    if not (moved == looked_up).all():
        sys.exit("verify FAILED: the rows that moved are not those that were looked up")
    say(
        f"verify: passed, dense weights of {len(trainers)} trainers bitwise equal; of {embeddings} "
        f"rows per server exactly the {looked_up.sum()} that were looked up have moved\n"
    )
    return {"max_abs_diff": difference, "tolerance": tolerance, "passed": True}


def train(args, tables):
    """Runs on every trainer. Returns what it measured, a dictionary per epoch.

    "lookup", "seconds", "lookup_seconds", "message_bytes", "examples" (bags), "loss", "is_counted"
    (no warm-up).
    """
    from common.setup import progress

    rank = dist.get_rank()
    warmup = args.warmup // EPOCH
    rounds = warmup + args.steps // EPOCH
    model, optimizer = new_model(args, tables)
    all_batches = random_batches(args, args.embeddings, seed=rank)
    epochs = []
    for number in range(rounds):
        if rank == 0:
            rpc.rpc_async("master", progress, (f"training: epoch {number + 1} of {rounds}",))
        for lookup in LOOKUPS if args.lookup == "both" else [args.lookup]:
            batches = list(islice(all_batches, EPOCH))
            model.lookup_seconds, model.message_bytes = 0.0, 0
            start = time.perf_counter()
            losses = [training_step(model, optimizer, batch, lookup) for batch in batches]
            loss = torch.stack(losses).mean().item()  # waits for the GPU, if any
            epochs.append(
                {
                    "lookup": lookup,
                    "seconds": time.perf_counter() - start,
                    "lookup_seconds": model.lookup_seconds,
                    "message_bytes": model.message_bytes,
                    "examples": sum(len(offsets) for _, offsets, _ in batches),
                    "loss": loss,
                    "is_counted": number >= warmup,
                }
            )
    return epochs


def run_master(args, names: list[str]) -> None:
    """Verify, have the trainers train, print and write what they measured."""
    from common import report

    trainers, servers = names[1 : 1 + args.trainers], names[1 + args.trainers :]
    result = begin(args)
    result["verify"] = None if args.no_verify else verify(args, trainers, servers)
    tables = new_tables(servers, args.embeddings, args)
    result["epochs"] = call_all(trainers, train, args, tables)
    print_result(result["epochs"])
    report.write_json(args.json, result)


def print_result(trainers: list[list[dict]]) -> None:
    """The epochs of each trainer, as `train` returns them, and of all together."""
    from common.report import percentiles, print_table
    from common.setup import say

    def counted(group: list[list[dict]], lookup: str, quantity: str) -> list[float]:
        epochs = [epoch for epochs in group for epoch in epochs if epoch["is_counted"]]
        return [epoch[quantity] for epoch in epochs if epoch["lookup"] == lookup]

    lookups = list(dict.fromkeys(epoch["lookup"] for epoch in trainers[0]))
    groups = {f"trainer{rank}": [epochs] for rank, epochs in enumerate(trainers)}
    rows, rates, waits = [], {}, {}
    for name, group in (groups | {"all": trainers}).items():
        for lookup in lookups:
            seconds = counted(group, lookup, "seconds")
            examples = sum(counted(group, lookup, "examples"))
            rates[lookup] = examples / sum(seconds)  # in the end those of all
            waits[lookup] = sum(counted(group, lookup, "lookup_seconds"))
            in_an_epoch = examples / len(seconds) * len(group)
            cells = [f"{name} {lookup}"]
            for percentile in percentiles(seconds):
                cells += [f"{percentile:.3f}", f"{in_an_epoch / percentile:.0f}"]
            rows.append([*cells, f"{100 * waits[lookup] / sum(seconds):.0f} %"])
    header = ["", "p50", "ex./s", "p75", "ex./s", "p90", "ex./s", "p95", "ex./s", "lookups"]
    print_table(header, rows)
    say("seconds per epoch at each percentile, and examples (bags) per second at that pace;")
    say("lookups: their share of the time; all: samples pooled, examples summed")
    if lookups == LOOKUPS:
        faster = rates["parallel"] / rates["sequential"]
        longer = waits["sequential"] / waits["parallel"]
        say(
            f"parallel / sequential: {faster:.3f} × the examples per second, all epochs; "
            f"sequential / parallel: {longer:.2f} × the time in lookups"
        )
    kilobytes = fmean(epoch["message_bytes"] for epoch in sum(trainers, [])) / EPOCH / 1000
    say(
        f"a trainer and all servers exchange {kilobytes:.1f} kB per step: indices, sums, and their "
        "gradients; 1 kB = 1000 bytes"
    )
    first = fmean(epochs[0]["loss"] for epochs in trainers)
    last = fmean(epochs[-1]["loss"] for epochs in trainers)
    say(
        f"loss: {first:.3f} in the first epoch, {last:.3f} in the last; the targets are random, so "
        f"that ln {CLASSES} = {math.log(CLASSES):.3f} is all there is to learn"
    )


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common import setup
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside {folder} or into it")

    args = read_arguments()
    names = ["master", *[f"trainer{i}" for i in range(args.trainers)]]
    names += [f"ps{i}" for i in range(args.servers)]
    setup.progress(f"starting {len(names)} processes")
    try:
        setup.spawn(len(names), run_rank, args, names)
    except KeyboardInterrupt:
        setup.progress()
        sys.exit("interrupted")
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        setup.progress()
        name = names[error.error_index]
        sys.exit(f"{str(error).strip()}\nerror: {name} failed; all other processes were ended")


if __name__ == "__main__":
    main()
