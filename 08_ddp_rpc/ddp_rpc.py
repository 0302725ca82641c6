"""08: DDP for the dense part of a model, parameter servers behind RPC for its embedding tables.

Tables too large for one process are not replicated: every parameter server keeps its own, and
trainers ask for the rows they need by remote procedure call. The dense net is small: every trainer
has a replica, and DDP keeps them equal. One distributed backward pass serves both. All servers are
asked at once, and their answers are awaited together.

    make 08_ddp_rpc                                             (2 trainers and 2 servers)
    make 08_ddp_rpc ARGS="--trainers 8 --servers 8"             (the full layout)
    python 08_ddp_rpc/ddp_rpc.py --trainers 8 --servers 8 --lookup both
                                                (both kinds of lookup, epoch by epoch in turn)

launcher.py has the options and starts all processes, on this host. Source: PyTorch,
torch/distributed/benchmarks/benchmark_ddp_rpc.py; Li et al., "Scaling Distributed Machine Learning
with the Parameter Server", OSDI 2014.
"""

import math
import queue
import sys
import time
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

# Four functions that run on a parameter server when somebody calls them from afar.
table = None  # this server's nn.EmbeddingBag


def create_table(embeddings: int, embedding_dim: int, seed: int) -> None:
    """Make this server's table, float32 [embeddings, embedding_dim]; it replaces an older one."""
    global table
    torch.manual_seed(seed)
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
        rows = torch.cat(columns, dim=1).reshape(-1, DENSE_INPUT)
        return self.dense(rows.to(self.device))

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
# Below this line: what the trainers do, and what the master tells them.


def random_batches(steps: int, embeddings: int, rows_of_bag: int, generator: torch.Generator):
    """Yield (indices, offsets, targets): 20 to 50 indices in bags of 1 to 10.

    There is a target per row of the dense net's input.
    """
    for _ in range(steps):
        length = int(torch.randint(20, 51, (), generator=generator))
        sizes = torch.randint(1, 11, (length,), generator=generator)
        starts = sizes.cumsum(0) - sizes
        offsets = starts[starts < length]
        indices = torch.randint(embeddings, (length,), generator=generator)
        rows = len(offsets) * rows_of_bag
        targets = torch.randint(CLASSES, (rows,), generator=generator)
        yield indices, offsets, targets


def rows_per_bag(args) -> int:
    """How many rows of the dense net's input a bag makes."""
    return args.servers * args.embedding_dim // DENSE_INPUT


def lookups(args) -> list[str]:
    """The kinds of lookup to train with, in turn."""
    if args.lookup == "both":
        return ["parallel", "sequential"]
    return [args.lookup]


def new_model(args, servers, seed, process_group=None):
    """On a trainer: the model and its optimizer. Trainers share the GPUs if these are fewer."""
    torch.manual_seed(seed)
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)  # of this thread: RPC calls us on any of its own
    model = HybridModel(servers, device, process_group)
    return model, model.optimizer()


def train(args, servers):
    """Runs on every trainer. Returns its name, what it measured and the loss of every epoch.

    What it measured: {lookup: {quantity: one value per measured epoch}}.
    """
    from common.setup import progress, say

    name = rpc.get_worker_info().name
    warmup, epochs = args.warmup // EPOCH, (args.warmup + args.steps) // EPOCH
    between_reports = math.ceil(epochs / 5)
    model, optimizer = new_model(args, servers, args.seed)
    generator = torch.Generator().manual_seed(args.seed + dist.get_rank())
    losses = []
    measured = {}
    for lookup in lookups(args):
        measured[lookup] = {"seconds": [], "lookup_seconds": [], "examples": []}
    began = time.perf_counter()
    for epoch in range(1, epochs + 1):
        if name == "trainer0":
            each = (time.perf_counter() - began) / max(1, epoch - 1)
            left = f", {each * (epochs + 1 - epoch):.0f} s left" if epoch > 1 else ""
            progress(f"training: epoch {epoch} of {epochs}{left}")
        for lookup, samples in measured.items():
            batches = list(random_batches(EPOCH, args.embeddings, rows_per_bag(args), generator))
            model.lookup_seconds = 0.0
            start = time.perf_counter()
            step_losses = [training_step(model, optimizer, batch, lookup) for batch in batches]
            loss = torch.stack(step_losses).mean().item()  # waits for the GPU, if there is one
            seconds = time.perf_counter() - start
            losses.append(loss)
            if epoch > warmup:
                samples["seconds"].append(seconds)
                samples["lookup_seconds"].append(model.lookup_seconds)
                samples["examples"].append(sum(len(offsets) for _, offsets, _ in batches))
        if name == "trainer0" and epoch % between_reports == 0 and epoch < epochs:
            say(f"epoch {epoch} of {epochs}, loss of trainer0 {loss:.3f}")
    return {"name": name, "lookups": measured, "loss": losses}


def call_all(names, function, *arguments):
    """Call a function on many processes at once; the results in their order.

    There is no limit of time: the launcher notices a process that dies.
    """
    answers = [rpc.rpc_async(name, function, arguments, timeout=0) for name in names]
    return torch.futures.wait_all(answers)


def create_tables(args, servers, embeddings):
    """Have every server make its table, each with a seed of its own."""
    answers = []
    for i, server in enumerate(servers):
        arguments = (embeddings, args.embedding_dim, args.seed + i)
        answers.append(rpc.rpc_async(server, create_table, arguments))
    torch.futures.wait_all(answers)


def verify_one_trainer(args, servers, embeddings):
    """Runs on trainer0: 20 steps with the servers, and 20 of a plain model in this process.

    Returns the largest difference between their weights.
    """
    alone = dist.new_group([0], use_local_synchronization=True)
    model, optimizer = new_model(args, servers, args.seed, alone)
    twin = dense_net().to(model.device)
    twin.load_state_dict(model.dense.module.state_dict())
    twin_tables = []
    for weight in call_all(servers, weight_copy):
        twin_tables.append(nn.EmbeddingBag.from_pretrained(weight, freeze=False, mode="sum"))
    twin_weights = [*twin.parameters(), *(one.weight for one in twin_tables)]
    twin_optimizer = torch.optim.SGD(twin_weights, lr=LEARNING_RATE)

    generator = torch.Generator().manual_seed(args.seed)
    kinds = lookups(args)
    for step, batch in enumerate(random_batches(20, embeddings, rows_per_bag(args), generator)):
        training_step(model, optimizer, batch, kinds[step % len(kinds)])
        indices, offsets, targets = batch
        columns = [one(indices, offsets) for one in twin_tables]
        rows = torch.cat(columns, dim=1).reshape(-1, DENSE_INPUT)
        twin_optimizer.zero_grad()
        logits = twin(rows.to(model.device))
        F.cross_entropy(logits, targets.to(model.device)).backward()
        twin_optimizer.step()
    weights = [*model.dense.parameters(), *call_all(servers, weight_copy)]
    pairs = zip(weights, twin_weights, strict=True)
    return max((mine - twins).abs().max().item() for mine, twins in pairs)


def verify_replicas(args, servers, embeddings):
    """Runs on all trainers at once: 20 steps that look up even rows only.

    Returns this replica's weights and the rows that it has looked up.
    """
    rank = dist.get_rank()
    # Different at the start: DDP must make them equal.
    model, optimizer = new_model(args, servers, args.seed + rank)
    generator = torch.Generator().manual_seed(args.seed + rank)
    looked_up = set()
    batches = random_batches(20, max(1, embeddings // 2), rows_per_bag(args), generator)
    for indices, offsets, targets in batches:
        training_step(model, optimizer, (2 * indices, offsets, targets), lookups(args)[0])
        looked_up.update((2 * indices).tolist())
    weights = [parameter.detach().cpu().flatten() for parameter in model.dense.parameters()]
    return torch.cat(weights), looked_up


def verify(args, trainers, servers):
    """Runs on the master, before anything is measured. Ends the run if the training is wrong."""
    from common.setup import progress, say

    progress("verify: one trainer with all servers, against a plain model in one process")
    embeddings = min(args.embeddings, 300)  # the twin holds all tables in one process
    tolerance = 1e-5
    create_tables(args, servers, embeddings)
    arguments = (args, servers, embeddings)
    difference = rpc.rpc_sync("trainer0", verify_one_trainer, arguments, timeout=0)
    away = f"{difference:.1e} away from a plain model in one process"
    if not difference <= tolerance:
        sys.exit(f"verify FAILED: one trainer is {away}")
    say(
        f"verify: passed, one trainer and {len(servers)} servers at most {away} after 20 steps; "
        f"allowed: {tolerance}"
    )

    progress("verify: all trainers with all servers")
    create_tables(args, servers, embeddings)
    before = call_all(servers, weight_copy)
    replicas = []
    rows = set()
    for replica, looked_up in call_all(trainers, verify_replicas, *arguments):
        replicas.append(replica)
        rows |= looked_up
    if not all(torch.equal(replica, replicas[0]) for replica in replicas):
        sys.exit("verify FAILED: the trainers hold different dense weights")
    for name, old, new in zip(servers, before, call_all(servers, weight_copy), strict=True):
        moved = (old != new).any(dim=1).nonzero().flatten().tolist()
        if set(moved) != rows:
            message = f"the rows of {name} that moved are not those that were looked up"
            sys.exit(f"verify FAILED: {message}")
    say(
        f"verify: passed, dense weights of {len(trainers)} trainers bitwise equal; of {embeddings} "
        f"rows per server exactly the {len(rows)} that were looked up have moved\n"
    )
    return {
        "max_abs_diff": difference,
        "tolerance": tolerance,
        "passed": True,
        "rows": embeddings,
        "rows_moved": len(rows),
    }


def print_row(name, samples, epochs):
    """A row of the table: what one trainer has measured with one kind of lookup, or all have."""
    from common.report import percentiles
    from common.setup import say

    examples = sum(samples["examples"]) / epochs
    paces = percentiles(samples["seconds"])
    cells = [f"{seconds:9.3f} {examples / seconds:6.0f}" for seconds in paces]
    share = 100 * sum(samples["lookup_seconds"]) / sum(samples["seconds"])
    say(f"{name:20}{''.join(cells)} {share:7.0f} %")


def pool(results, lookup):
    """The samples of all trainers with one kind of lookup together."""
    pooled = {"seconds": [], "lookup_seconds": [], "examples": []}
    for result in results:
        for quantity, values in result["lookups"][lookup].items():
            pooled[quantity] += values
    return pooled


def run_master(args, result):
    """Have the tables made, the trainers train, and print what they measured as they finish.

    result: the head of the JSON.
    """
    import launcher

    from common import report
    from common.setup import say

    ranks = range(args.trainers + args.servers)
    names = [launcher.role(rank, args.trainers, args.servers) for rank in ranks]
    trainers = names[: args.trainers]
    servers = names[args.trainers :]
    result["verify"] = None if args.no_verify else verify(args, trainers, servers)
    create_tables(args, servers, args.embeddings)
    finished = queue.Queue()
    for name in trainers:
        answer = rpc.rpc_async(name, train, (args, servers), timeout=0)
        answer.add_done_callback(finished.put)

    epochs = args.steps // EPOCH
    measured = []
    for _ in trainers:
        one = finished.get().wait()
        if not measured:
            columns = [f"{name:>9}  ex./s" for name in ("p50", "p75", "p90", "p95")]
            say(f"\n{'':20}{''.join(columns)}   lookups")
        measured.append(one)
        for lookup, samples in one["lookups"].items():
            print_row(f"{one['name']} {lookup}", samples, epochs)
    measured.sort(key=lambda one: trainers.index(one["name"]))
    rates = {}
    waits = {}
    for lookup in lookups(args):
        pooled = pool(measured, lookup)
        print_row(f"all {lookup}", pooled, epochs)
        rates[lookup] = sum(pooled["examples"]) / (sum(pooled["seconds"]) / args.trainers)
        waits[lookup] = sum(pooled["lookup_seconds"])
    say("seconds per epoch at each percentile, and examples (bags) per second at that pace;")
    say("lookups: their share of the time; all: samples pooled, examples summed")
    if args.lookup == "both":
        faster = rates["parallel"] / rates["sequential"]
        longer = waits["sequential"] / waits["parallel"]
        say(
            f"parallel / sequential: {faster:.3f} × the examples per second, all epochs; "
            f"sequential / parallel: {longer:.2f} × the time in lookups"
        )
    first = sum(one["loss"][0] for one in measured) / args.trainers
    last = sum(one["loss"][-1] for one in measured) / args.trainers
    say(
        f"loss: {first:.3f} in the first epoch, {last:.3f} in the last; the targets are random, so "
        f"that ln {CLASSES} = {math.log(CLASSES):.3f} is all there is to learn"
    )
    result |= {"examples_per_second": rates, "loss": [first, last], "trainers": measured}
    report.write_json(args.json, result)


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        import launcher
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error}: copy the repository's folder common/ beside {folder} or into it, "
            "and 08_ddp_rpc/launcher.py beside this file"
        )

    args = launcher.read_arguments(__doc__, DENSE_INPUT, EPOCH)
    parameters = sum(parameter.numel() for parameter in dense_net().parameters())
    launcher.run(run_master, args, parameters)


if __name__ == "__main__":
    main()
