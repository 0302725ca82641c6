"""08: DDP for the dense part of a model, parameter servers behind RPC for its embedding tables.

Tables too large for one process are not replicated: every parameter server keeps its own, and
trainers ask for the rows they need by remote procedure call. The dense net is small: every trainer
has a replica, and DDP keeps them equal. One distributed backward pass serves both. All servers are
asked at once, and their answers are awaited together.

    make 08_ddp_rpc                                     (2 trainers and 2 servers)
    make 08_ddp_rpc NPROC=8                             (8 and 8, as upstream)
    python 08_ddp_rpc/ddp_rpc.py --nproc 8 --lookup both
                                        (both kinds of lookup, epoch by epoch in turn)

launcher.py starts all processes, on this host. Source: PyTorch,
torch/distributed/benchmarks/benchmark_ddp_rpc.py; Li et al., "Scaling Distributed Machine Learning
with the Parameter Server", OSDI 2014.
"""

import copy
import math
import os
import sys
import time
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
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

# Four functions that run on a parameter server when somebody calls them from afar.
table = None  # this server's nn.EmbeddingBag


def create_table(embeddings: int, embedding_dim: int, seed: int) -> None:
    """Make this server's table, float32 [embeddings, embedding_dim]; it replaces an older one."""
    global table
    torch.manual_seed(seed + rpc.get_worker_info().id)  # each server's table is another one
    table = nn.EmbeddingBag(embeddings, embedding_dim, mode="sum")


def look_up(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The sum over each bag, float32 [bags, embedding_dim], of this server's columns."""
    return table(indices, offsets)


def weight_reference() -> rpc.RRef:
    """A reference to the table's parameter, which stays here."""
    return rpc.RRef(table.weight)


def weight_copy() -> torch.Tensor:
    """The table itself, which `verify` looks at."""
    return table.weight.detach()


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

    servers: their RPC names. process_group: joins the trainers and nobody else; without it DDP
    takes the default group.
    """

    def __init__(
        self,
        servers: list[str],
        device: torch.device,
        process_group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        self.servers = [rpc.get_worker_info(name) for name in servers]
        self.device = device
        self.dense = DistributedDataParallel(dense_net().to(device), process_group=process_group)
        self.lookup_seconds = 0.0

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
        # No RRef among the arguments: handing one to its owner costs a second message, because
        # its references are counted. look_up finds the table by itself.
        bags = (indices, offsets)
        if lookup == "parallel":
            answers = [rpc.rpc_async(server, look_up, bags) for server in self.servers]
            columns = torch.futures.wait_all(answers)
        else:  # the naive loop: a round trip, then the next one
            columns = [rpc.rpc_sync(server, look_up, bags) for server in self.servers]
        self.lookup_seconds += time.perf_counter() - start
        return columns

    def optimizer(self) -> DistributedOptimizer:
        """SGD that updates each parameter where it lives: here and on all servers, all at once."""
        answers = [rpc.rpc_async(server, weight_reference) for server in self.servers]
        remote = torch.futures.wait_all(answers)
        local = [rpc.RRef(parameter) for parameter in self.dense.parameters()]
        return DistributedOptimizer(torch.optim.SGD, remote + local, lr=LEARNING_RATE)


def training_step(
    model: HybridModel, optimizer: DistributedOptimizer, batch: tuple, lookup: str
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
# Below this line: the command line, what verify and training do, and the master, who prints it all.


def read_arguments():
    """The command line, checked and completed; upstream's names of flags are understood, too."""
    from common import setup
    from common.setup import checked, whole_number

    def steps_of(epochs: str) -> int:
        return EPOCH * whole_number(0)(epochs)

    count = whole_number(1, 64)
    one = whole_number(1)
    steps = checked(int, lambda n: n > 0 and n % EPOCH == 0, f"a multiple of {EPOCH} above 0")
    warmup = checked(int, lambda n: n >= 0 and n % EPOCH == 0, f"0 or a multiple of {EPOCH}")
    rows = "rows of each server's table"
    columns = f"its columns (default: the fewest that give all servers {DENSE_INPUT} together)"
    lookup = "ask all servers at once, or one after another; both: epoch by epoch in turn"
    parser = setup.Parser(__doc__)
    add = parser.add_argument
    add("--nproc", type=count, default=2, help="so many trainers, and as many servers")
    add("--trainers", type=count, old_names=["--number-trainers"], help="(default: --nproc)")
    add("--servers", type=count, old_names=["--number-ps"], help="(default: --nproc)")
    add("--embeddings", old_names=["--number-embeddings"], type=one, default=300, help=rows)
    add("--embedding-dim", type=one, help=columns)
    add("--steps", type=steps, default=1000, help=f"measured; {EPOCH} are an epoch")
    add("--warmup", type=warmup, default=50, help="steps before them, not measured")
    add("--warmup-cycles", dest="warmup", type=steps_of, help="upstream's, in epochs")
    add("--lookup", choices=[*LOOKUPS, "both"], default="parallel", help=lookup)
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="of the dense net")
    add("--timeout", type=setup.positive_number, default=300.0, help="seconds to wait for others")
    add("--seed", type=whole_number(0), default=0)
    add("--no-verify", action="store_true", help="only measure")
    add("--json", type=setup.output_file, metavar="FILE", help="everything measured, raw")
    args = parser.parse_args()
    args.trainers = args.trainers or args.nproc
    args.servers = args.servers or args.nproc
    args.timeout = min(args.timeout, 1e6)  # infinity is no timedelta
    choose_device(args)
    choose_sizes(args)
    return args


def choose_device(args):
    """Replace "auto" in args.device; set args.backend, that of the trainers' process group."""
    from common.setup import fail

    gpus = torch.cuda.device_count()
    args.device = args.device.replace("auto", "cuda" if gpus > 0 else "cpu")
    if args.device == "cuda" and gpus == 0:
        fail("argument --device: 'cuda' needs a GPU that torch can use, and there is none; use cpu")
    gpu_per_trainer = args.device == "cuda" and gpus >= args.trainers
    args.backend = "nccl" if gpu_per_trainer else "gloo"


def choose_sizes(args):
    """Complete args.embedding_dim; refuse what doesn't fit together, or into this host's memory."""
    from common.setup import available_memory, fail

    multiple = DENSE_INPUT // math.gcd(DENSE_INPUT, args.servers)
    args.embedding_dim = args.embedding_dim or multiple
    if args.embedding_dim % multiple:
        fail(
            f"argument --embedding-dim: '{args.embedding_dim}' is not a multiple of {multiple}: "
            f"the columns of {args.servers} servers have to make rows of {DENSE_INPUT}"
        )
    tables = 4 * args.servers * args.embeddings * args.embedding_dim
    needed = tables * (1 + args.trainers)  # each trainer has a gradient there
    available = available_memory()
    if needed > available:
        fail(
            f"argument --embeddings: '{args.embeddings}' rows of {args.embedding_dim} columns need "
            f"{needed / 1e9:.0f} GB, and this host has {available / 1e9:.0f} left: use fewer"
        )


def begin(args) -> dict:
    """Print what runs, where, and which rank is what; returns the head of the JSON."""
    from common.report import processor_name, topology
    from common.setup import say

    last = args.trainers + args.servers
    name = torch.cuda.get_device_name() if args.device == "cuda" else processor_name()
    result = {"stage": "08_ddp_rpc", "torch": torch.__version__, "backend": args.backend}
    result |= {"device": args.device, "device_name": name, "world_size": last + 1}  # with master
    result |= {"threads_per_rank": torch.get_num_threads(), "options": dict(vars(args))}
    line = "{stage}: torch {torch}, {backend} on {device}, {world_size} ranks, "
    say((line + "threads per rank: {threads_per_rank}").format(**result))
    say(f"CUDA {torch.version.cuda or 'none'}, {torch.cuda.device_count()} GPUs; {topology()}")
    parameters = sum(parameter.numel() for parameter in dense_net().parameters())
    dense = f"{parameters} dense parameters on {args.device}, DDP over {args.backend}"
    say(f"rank 0 to {args.trainers - 1}: trainers, {dense}")
    tables = f"a table of {args.embeddings} × {args.embedding_dim} each"
    say(f"rank {args.trainers} to {last - 1}: parameter servers, {tables}")
    meeting = "{MASTER_ADDR} port {MASTER_PORT}".format(**os.environ)
    say(f"rank {last}: master; RPC over TensorPipe (TCP); all meet at {meeting}")
    measured = f"{args.steps} steps are measured, after {args.warmup} to warm up"
    say(f"{measured}; an epoch is {EPOCH} steps")
    return result | {"started": datetime.now(timezone.utc)}


def random_batches(args, embeddings: int, seed: int):
    """Yield (indices, offsets, targets) without end: 20 to 50 indices in bags of 1 to 10.

    There is a target per row of the dense net's input.
    """
    rows_of_bag = args.servers * args.embedding_dim // DENSE_INPUT
    generator = torch.Generator().manual_seed(seed)
    while True:
        length = int(torch.randint(20, 51, (), generator=generator))
        sizes = torch.randint(1, 11, (length,), generator=generator)
        starts = sizes.cumsum(0) - sizes
        offsets = starts[starts < length]
        indices = torch.randint(embeddings, (length,), generator=generator)
        rows = len(offsets) * rows_of_bag
        targets = torch.randint(CLASSES, (rows,), generator=generator)
        yield indices, offsets, targets


def new_model(args, servers, seed, process_group=None):
    """On a trainer: the model and its optimizer. Trainers share the GPUs if these are fewer."""
    torch.manual_seed(seed)
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)  # of this thread: RPC calls us on any of its own
    model = HybridModel(servers, device, process_group)
    return model, model.optimizer()


def call_all(names, function, *arguments, **limit):
    """Call a function on many processes at once; the results in their order.

    limit: timeout=0 for what may take longer than --timeout. Who trains is missed by the others.
    """
    answers = [rpc.rpc_async(name, function, arguments, **limit) for name in names]
    return torch.futures.wait_all(answers)


def verify_one_trainer(args, servers, embeddings):
    """Runs on trainer0: 20 steps with the servers, and 20 of a plain model in this process.

    Returns the largest difference between their weights.
    """
    from common.setup import without_gloo_greeting

    with without_gloo_greeting():
        alone = dist.new_group([0], use_local_synchronization=True)
    model, optimizer = new_model(args, servers, args.seed, alone)
    # The same model without DDP and RPC: a copy of all its weights.
    dense = copy.deepcopy(model.dense.module)
    tables = nn.ModuleList()
    for weight in call_all(servers, weight_copy):
        tables.append(nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum"))
    plain = nn.ModuleList([dense, tables])
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    batches = random_batches(args, embeddings, args.seed)
    for step, batch in enumerate(islice(batches, VERIFY_STEPS)):
        training_step(model, optimizer, batch, LOOKUPS[step % 2])
        indices, offsets, targets = batch
        columns = [embedding(indices, offsets) for embedding in tables]
        rows = torch.cat(columns, dim=1).reshape(-1, DENSE_INPUT)
        logits = dense(rows.to(model.device))
        F.cross_entropy(logits, targets.to(model.device)).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    weights = [*model.dense.parameters(), *call_all(servers, weight_copy)]
    pairs = zip(weights, plain.parameters(), strict=True)
    return max((weight - other).abs().max().item() for weight, other in pairs)


def verify_replicas(args, servers, embeddings):
    """Runs on all trainers at once: 20 steps that look up even rows only.

    Returns this replica's weights and the rows that it has looked up.
    """
    seed = args.seed + dist.get_rank()
    model, optimizer = new_model(args, servers, seed)  # DDP must make them equal
    looked_up = set()
    batches = random_batches(args, max(1, embeddings // 2), seed)
    for indices, offsets, targets in islice(batches, VERIFY_STEPS):
        even = 2 * indices
        training_step(model, optimizer, (even, offsets, targets), "parallel")
        looked_up.update(even.tolist())
    weights = [parameter.detach().cpu().flatten() for parameter in model.dense.parameters()]
    return torch.cat(weights), looked_up


def verify(args, trainers, servers):
    """Runs on the master, before anything is measured. Ends the run if the training is wrong."""
    from common.setup import progress, say

    progress("verify: one trainer with all servers, against a plain model in one process")
    embeddings = min(args.embeddings, 300)  # the plain model has all tables in one process
    tolerance = 1e-5
    tables = (create_table, embeddings, args.embedding_dim, args.seed)
    call_all(servers, *tables)
    arguments = (args, servers, embeddings)
    [difference] = call_all(trainers[:1], verify_one_trainer, *arguments, timeout=0)
    away = f"{difference:.1e} away from a plain model in one process"
    if not difference <= tolerance:
        sys.exit(f"verify FAILED: one trainer is {away}")
    passed = f"one trainer and {len(servers)} servers at most {away} after {VERIFY_STEPS} steps"
    say(f"verify: passed, {passed}; allowed: {tolerance}")

    progress("verify: all trainers with all servers")
    call_all(servers, *tables)
    before = call_all(servers, weight_copy)
    replicas, rows = zip(*call_all(trainers, verify_replicas, *arguments, timeout=0), strict=True)
    if not all(torch.equal(replica, replicas[0]) for replica in replicas):
        sys.exit("verify FAILED: the trainers hold different dense weights")
    looked_up = set().union(*rows)
    for name, old, new in zip(servers, before, call_all(servers, weight_copy), strict=True):
        moved = (old != new).any(dim=1).nonzero().flatten().tolist()
        if set(moved) != looked_up:
            sys.exit(f"verify FAILED: the rows of {name} that moved are not those looked up")
    exactly = f"of {embeddings} rows per server exactly the {len(looked_up)} that were looked up"
    say(
        f"verify: passed, dense weights of {len(trainers)} trainers bitwise equal; "
        f"{exactly} have moved\n"
    )
    result = {"max_abs_diff": difference, "tolerance": tolerance, "passed": True}
    return result | {"rows": embeddings, "rows_moved": len(looked_up)}


def train(args, servers):
    """Runs on every trainer. Returns its name, what it measured and the loss of every epoch.

    What it measured: {lookup: [{"seconds", "lookup_seconds", "examples"} of an epoch]}.
    """
    from common.setup import progress, say, time_left

    rank = dist.get_rank()
    warmup = args.warmup // EPOCH
    epochs = warmup + args.steps // EPOCH
    between_reports = math.ceil(epochs / 5)
    lookups = LOOKUPS if args.lookup == "both" else [args.lookup]
    model, optimizer = new_model(args, servers, args.seed)
    all_batches = random_batches(args, args.embeddings, args.seed + rank)
    losses = []
    measured = {lookup: [] for lookup in lookups}
    began = time.perf_counter()
    for epoch in range(1, epochs + 1):
        if rank == 0:
            left = time_left(began, epoch - 1, epochs)
            progress(f"training: epoch {epoch} of {epochs}{left}")
        for lookup in lookups:
            batches = list(islice(all_batches, EPOCH))
            model.lookup_seconds = 0.0
            start = time.perf_counter()
            step_losses = [training_step(model, optimizer, batch, lookup) for batch in batches]
            loss = torch.stack(step_losses).mean().item()  # waits for the GPU, if there is one
            sample = {"seconds": time.perf_counter() - start}
            sample["lookup_seconds"] = model.lookup_seconds
            sample["examples"] = sum(len(offsets) for _, offsets, _ in batches)
            losses.append(loss)
            if epoch > warmup:
                measured[lookup].append(sample)
        if rank == 0 and epoch % between_reports == 0 and epoch < epochs:
            say(f"epoch {epoch} of {epochs}, loss of trainer0 {loss:.3f}")
    return {"name": f"trainer{rank}", "lookups": measured, "loss": losses}


def run_master(args, names):
    """What the master does: verify, have the trainers train, print and write what they measured.

    names: of all ranks, for RPC.
    """
    from common import report
    from common.setup import say

    trainers = names[: args.trainers]
    servers = names[args.trainers : -1]
    result = begin(args)
    result["verify"] = None if args.no_verify else verify(args, trainers, servers)
    call_all(servers, create_table, args.embeddings, args.embedding_dim, args.seed)
    result["trainers"] = call_all(trainers, train, args, servers, timeout=0)
    say()
    result |= summarize(args, result["trainers"])
    report.write_json(args.json, result)


def total(epochs: list[dict], quantity: str) -> float:
    """The sum of one quantity over epochs."""
    return sum(epoch[quantity] for epoch in epochs)


def row(args, name: str, epochs: list[dict]) -> list[str]:
    """A row of the table, of the epochs of one trainer or of all."""
    from common.report import percentiles

    examples = total(epochs, "examples") / (args.steps // EPOCH)  # of all in the same epoch
    cells = [name]
    for seconds in percentiles([epoch["seconds"] for epoch in epochs]):
        cells += [f"{seconds:.3f}", f"{examples / seconds:.0f}"]
    share = total(epochs, "lookup_seconds") / total(epochs, "seconds")
    return [*cells, f"{100 * share:.0f} %"]


def summarize(args, results):
    """Print what the trainers measured, each and all together; returns the latter for the JSON."""
    from common.report import print_table
    from common.setup import say

    rows = []
    pooled = {}
    for result in results:
        for lookup, epochs in result["lookups"].items():
            pooled.setdefault(lookup, []).extend(epochs)
            rows.append(row(args, f"{result['name']} {lookup}", epochs))
    rates = {}
    for lookup, epochs in pooled.items():
        rows.append(row(args, f"all {lookup}", epochs))
        seconds = total(epochs, "seconds") / args.trainers  # they train at the same time
        rates[lookup] = total(epochs, "examples") / seconds
    header = ["", "p50", "ex./s", "p75", "ex./s", "p90", "ex./s", "p95", "ex./s", "lookups"]
    print_table(header, rows)
    say("seconds per epoch at each percentile, and examples (bags) per second at that pace;")
    say("lookups: their share of the time; all: samples pooled, examples summed")
    if args.lookup == "both":
        faster = rates["parallel"] / rates["sequential"]
        waits = {lookup: total(epochs, "lookup_seconds") for lookup, epochs in pooled.items()}
        longer = waits["sequential"] / waits["parallel"]
        say(
            f"parallel / sequential: {faster:.3f} × the examples per second, all epochs; "
            f"sequential / parallel: {longer:.2f} × the time in lookups"
        )
    first = sum(result["loss"][0] for result in results) / args.trainers
    last = sum(result["loss"][-1] for result in results) / args.trainers
    say(
        f"loss: {first:.3f} in the first epoch, {last:.3f} in the last; the targets are random, so "
        f"that ln {CLASSES} = {math.log(CLASSES):.3f} is all there is to learn"
    )
    return {"examples_per_second": rates, "loss": [first, last]}


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import launcher

        from common.setup import forget_launcher
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error}: copy the repository's folder common/ beside {folder} or into it, "
            "and 08_ddp_rpc/launcher.py beside this file"
        )

    forget_launcher()
    launcher.run(read_arguments(), run_master)


if __name__ == "__main__":
    main()
