"""08: DDP for the dense part of a model, parameter servers behind RPC for its embedding tables.

Tables too large for one process are not replicated: every parameter server keeps its own, and trainers ask for the rows
they need by remote procedure call. The dense net is small: every trainer has a replica, and DDP keeps them equal. One
distributed backward pass serves both. All servers are asked at once, and their answers are awaited together.

    make 08_ddp_rpc                                             (2 trainers and 2 servers)
    make 08_ddp_rpc ARGS="--trainers 8 --servers 8"             (the full layout)
    python 08_ddp_rpc/ddp_rpc.py --trainers 8 --servers 8 --lookup both
                                                                (both kinds of lookup, epoch by epoch in turn)

The script starts all processes itself, on this host. Source: PyTorch, torch/distributed/benchmarks/benchmark_ddp_rpc.py;
Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

import argparse
import ipaddress
import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
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

CLASSES, DENSE_INPUT, LEARNING_RATE = 8, 512, 0.05

# Four functions that run on a parameter server when somebody calls them from afar.
table = None  # this server's nn.EmbeddingBag


def create_table(embeddings: int, embedding_dim: int, seed: int) -> None:
    """Make this server's table, float32 [embeddings, embedding_dim]; it replaces the one that was there."""
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
    """The table itself, for `verify`."""
    return table.weight.detach()


class HybridModel(nn.Module):
    """Embedding tables on the parameter servers, and this trainer's replica of the dense net.

    servers: their RPC names; process_group: joins the trainers and nobody else (default: the default group).
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
        """int64 [n] and the start of each bag in it, int64 [bags] -> logits [bags * servers * embedding_dim / 512, 8]."""
        start = time.perf_counter()
        # The call names no RRef: handing one to its owner costs a second message, for counting references.
        if lookup == "parallel":
            answers = [
                rpc.rpc_async(server, look_up, (indices, offsets)) for server in self.servers
            ]
            columns = torch.futures.wait_all(answers)
        else:  # the naive loop: a round trip, then the next one
            columns = [rpc.rpc_sync(server, look_up, (indices, offsets)) for server in self.servers]
        self.lookup_seconds += time.perf_counter() - start
        return self.dense(torch.cat(columns, dim=1).reshape(-1, DENSE_INPUT).to(self.device))

    def optimizer(self) -> DistributedOptimizer:
        """SGD that updates every parameter where it lives: here and on all servers at the same time."""
        remote = torch.futures.wait_all(
            [rpc.rpc_async(server, weight_reference) for server in self.servers]
        )
        local = [rpc.RRef(parameter) for parameter in self.dense.parameters()]
        return DistributedOptimizer(torch.optim.SGD, remote + local, lr=LEARNING_RATE)


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


def training_step(
    model: HybridModel, optimizer: DistributedOptimizer, batch: tuple, lookup: str
) -> torch.Tensor:
    """One step of one trainer; returns its loss."""
    indices, offsets, targets = batch
    with (
        dist_autograd.context() as context_id
    ):  # holds the gradients of this step, on every process; none to zero
        loss = F.cross_entropy(model(indices, offsets, lookup), targets.to(model.device))
        dist_autograd.backward(
            context_id, [loss]
        )  # DDP averages the dense gradients, RPC takes the others to their servers
        optimizer.step(context_id)
    return loss.detach()


# ======================================================================================================================
# Below this line: what the trainers do, what the master tells them, how all are started and ended.


def random_batches(steps: int, embeddings: int, rows_per_bag: int, generator: torch.Generator):
    """Yield (indices, offsets, targets): 20 to 50 indices in bags of 1 to 10; a target per row of the dense net's input."""
    for _ in range(steps):
        length = int(torch.randint(20, 51, (), generator=generator))
        sizes = torch.randint(1, 11, (length,), generator=generator)
        starts = sizes.cumsum(0) - sizes
        offsets = starts[starts < length]
        yield (
            torch.randint(embeddings, (length,), generator=generator),
            offsets,
            torch.randint(CLASSES, (len(offsets) * rows_per_bag,), generator=generator),
        )


def role(rank: int, trainers: int, servers: int) -> str:
    """The RPC name of a rank: the trainers come first, then the parameter servers, then the master."""
    return (
        f"trainer{rank}"
        if rank < trainers
        else f"ps{rank - trainers}"
        if rank < trainers + servers
        else "master"
    )


def lookups(args) -> list[str]:
    return ["parallel", "sequential"] if args.lookup == "both" else [args.lookup]


def new_model(args, servers, seed, process_group=None):
    """On a trainer: the model and its optimizer. GPUs are shared where there are fewer of them than trainers."""
    torch.manual_seed(seed)
    device = torch.device(
        args.device, dist.get_rank() % torch.cuda.device_count() if args.device == "cuda" else None
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread: RPC calls us on any of its own
    model = HybridModel(servers, device, process_group)
    return model, model.optimizer()


def train(args, servers):
    """Runs on every trainer: {lookup: {quantity: one value per measured epoch}}, and the loss of every epoch."""
    rank, epochs, losses = dist.get_rank(), args.warmup + args.epochs, []
    model, optimizer = new_model(args, servers, args.seed)
    generator = torch.Generator().manual_seed(args.seed + rank)
    result = {
        lookup: {"seconds": [], "lookup_seconds": [], "examples": []} for lookup in lookups(args)
    }
    for epoch in range(epochs):
        for lookup, measured in result.items():
            batches = list(random_batches(10, args.embeddings, args.rows_per_bag, generator))
            model.lookup_seconds = 0.0
            start = time.perf_counter()
            loss = (
                torch.stack([training_step(model, optimizer, batch, lookup) for batch in batches])
                .mean()
                .item()
            )
            seconds = (
                time.perf_counter() - start
            )  # item() has waited for the GPU, where there is one
            losses.append(loss)
            if epoch >= args.warmup:
                measured["seconds"].append(seconds)
                measured["lookup_seconds"].append(model.lookup_seconds)
                measured["examples"].append(sum(len(offsets) for _, offsets, _ in batches))
        if rank == 0 and (epoch + 1) % math.ceil(epochs / 5) == 0 and epoch + 1 < epochs:
            print(f"epoch {epoch + 1} of {epochs}, loss of trainer0 {loss:.3f}", flush=True)
    return result, losses


def verify_one_trainer(args, servers, embeddings):
    """Runs on trainer0: 20 steps with the servers and 20 of a plain model in this process; the largest difference."""
    model, optimizer = new_model(
        args, servers, args.seed, dist.new_group([0], use_local_synchronization=True)
    )
    twin = dense_net().to(model.device)
    twin.load_state_dict(model.dense.module.state_dict())
    tables = [nn.EmbeddingBag(embeddings, args.embedding_dim, mode="sum") for _ in servers]
    for mine, start in zip(tables, call_all(servers, weight_copy), strict=True):
        mine.load_state_dict({"weight": start})
    twin_optimizer = torch.optim.SGD(
        [*twin.parameters(), *(mine.weight for mine in tables)], lr=LEARNING_RATE
    )
    generator = torch.Generator().manual_seed(args.seed)
    for step, batch in enumerate(random_batches(20, embeddings, args.rows_per_bag, generator)):
        training_step(model, optimizer, batch, lookups(args)[step % len(lookups(args))])
        indices, offsets, targets = batch
        rows = torch.cat([mine(indices, offsets) for mine in tables], dim=1).reshape(
            -1, DENSE_INPUT
        )
        twin_optimizer.zero_grad()
        F.cross_entropy(twin(rows.to(model.device)), targets.to(model.device)).backward()
        twin_optimizer.step()
    pairs = [
        *zip(model.dense.parameters(), twin.parameters(), strict=True),
        *zip(call_all(servers, weight_copy), (mine.weight for mine in tables), strict=True),
    ]
    return max((mine - twins).abs().max().item() for mine, twins in pairs)


def verify_replicas(args, servers, embeddings):
    """Runs on all trainers at once: 20 steps that look up even rows only; this replica's weights and those rows."""
    rank = dist.get_rank()
    model, optimizer = new_model(
        args, servers, args.seed + rank
    )  # different at the start: DDP must make them equal
    generator, looked_up = torch.Generator().manual_seed(args.seed + rank), set()
    for indices, offsets, targets in random_batches(
        20, max(1, embeddings // 2), args.rows_per_bag, generator
    ):
        training_step(model, optimizer, (2 * indices, offsets, targets), lookups(args)[0])
        looked_up.update((2 * indices).tolist())
    return torch.cat(
        [parameter.detach().cpu().flatten() for parameter in model.dense.parameters()]
    ), looked_up


def call_all(names, function, *arguments):
    """Call a function on many processes at once; the results in their order. No limit of time: a process that dies
    is noticed by the launcher."""
    return torch.futures.wait_all(
        [rpc.rpc_async(name, function, arguments, timeout=0) for name in names]
    )


def create_tables(args, servers, embeddings):
    """Have every server make its table, each with a seed of its own."""
    torch.futures.wait_all(
        [
            rpc.rpc_async(server, create_table, (embeddings, args.embedding_dim, args.seed + index))
            for index, server in enumerate(servers)
        ]
    )


def verify(args, trainers, servers):
    """Runs on the master, before anything is measured. Ends the run if the training is not what it should be."""
    embeddings = min(args.embeddings, 300)  # the twin holds all tables in one process
    create_tables(args, servers, embeddings)
    difference = rpc.rpc_sync(
        "trainer0", verify_one_trainer, (args, servers, embeddings), timeout=0
    )
    if not difference <= 1e-5:
        sys.exit(
            f"verify FAILED: one trainer is {difference:.1e} away from a plain model in one process"
        )
    print(
        f"verify: passed, one trainer and {len(servers)} servers at most {difference:.1e} away from a plain model in one "
        "process after 20 steps; allowed: 1e-05",
        flush=True,
    )

    create_tables(args, servers, embeddings)
    before = call_all(servers, weight_copy)
    replicas, looked_up = zip(
        *call_all(trainers, verify_replicas, args, servers, embeddings), strict=True
    )
    if not all(torch.equal(replica, replicas[0]) for replica in replicas):
        sys.exit("verify FAILED: the trainers hold different dense weights")
    rows = set().union(*looked_up)
    for name, old, new in zip(servers, before, call_all(servers, weight_copy), strict=True):
        if set((old != new).any(dim=1).nonzero().flatten().tolist()) != rows:
            sys.exit(
                f"verify FAILED: the rows of {name} that moved are not those that were looked up"
            )
    print(
        f"verify: passed, dense weights of {len(trainers)} trainers bitwise equal; of {embeddings} rows per server exactly "
        f"the {len(rows)} that were looked up have moved\n",
        flush=True,
    )
    return {
        "max_abs_diff": difference,
        "tolerance": 1e-5,
        "passed": True,
        "rows": embeddings,
        "rows_moved": len(rows),
    }


def run_master(args):
    """Have the tables made, the trainers train, and print what they measured as they finish."""
    from common.report import percentiles, processor_name, write_json

    trainers = [role(rank, args.trainers, args.servers) for rank in range(args.trainers)]
    servers = [
        role(args.trainers + index, args.trainers, args.servers) for index in range(args.servers)
    ]
    verified = verify(args, trainers, servers) if args.verify else None
    create_tables(args, servers, args.embeddings)
    finished = queue.Queue()
    for name in trainers:
        rpc.rpc_async(name, train, (args, servers), timeout=0).add_done_callback(
            lambda future, name=name: finished.put((name, future))
        )

    def print_row(name, seconds, lookup_seconds, examples_per_epoch):
        cells = [f"{p:9.3f} {examples_per_epoch / p:6.0f}" for p in percentiles(seconds)]
        print(
            f"{name:20}{''.join(cells)} {100 * sum(lookup_seconds) / sum(seconds):7.0f} %",
            flush=True,
        )

    results = {}
    for _ in trainers:
        name, future = finished.get()
        results[name] = future.wait()
        if len(results) == 1:
            print(
                f"\n{'':20}{''.join(f'{p:>9}  ex./s' for p in ('p50', 'p75', 'p90', 'p95'))}   lookups"
            )
        for lookup, measured in results[name][0].items():
            print_row(
                f"{name} {lookup}",
                measured["seconds"],
                measured["lookup_seconds"],
                sum(measured["examples"]) / args.epochs,
            )
    rates, waits = {}, {}
    for lookup in lookups(args):
        pooled = {
            quantity: [value for name in trainers for value in results[name][0][lookup][quantity]]
            for quantity in ("seconds", "lookup_seconds", "examples")
        }
        print_row(
            f"all {lookup}",
            pooled["seconds"],
            pooled["lookup_seconds"],
            sum(pooled["examples"]) / args.epochs,
        )
        rates[lookup] = sum(pooled["examples"]) / (sum(pooled["seconds"]) / args.trainers)
        waits[lookup] = sum(pooled["lookup_seconds"])
    print(
        "seconds per epoch of 10 steps at each percentile, and examples (bags) per second at that pace; lookups: their\n"
        "share of the time; all: samples pooled, examples summed"
    )
    if args.lookup == "both":
        print(
            f"parallel / sequential: {rates['parallel'] / rates['sequential']:.3f} × the examples per second, all epochs; "
            f"sequential / parallel: {waits['sequential'] / waits['parallel']:.2f} × the time in lookups"
        )
    losses = [sum(results[name][1][i] for name in trainers) / args.trainers for i in (0, -1)]
    print(
        f"loss: {losses[0]:.3f} in the first epoch, {losses[1]:.3f} in the last; the targets are random, so that "
        f"ln {CLASSES} = {math.log(CLASSES):.3f} is all there is to learn",
        flush=True,
    )
    if args.json:
        options = {name: value for name, value in vars(args).items() if name != "json"}
        write_json(
            args.json,
            {
                "stage": "08_ddp_rpc",
                "torch": torch.__version__,
                "device_name": processor_name(),
                "options": options,
                "verify": verified,
                "examples_per_second": rates,
                "loss": losses,
                "trainers": [
                    {"name": name, "lookups": results[name][0], "loss": results[name][1]}
                    for name in trainers
                ],
            },
        )


def name_the_missing(args, error):
    """Runs on the master when somebody has waited too long: ask everybody for a sign of life; end, and say who gave none."""
    names = [
        role(rank, args.trainers, args.servers) for rank in range(args.trainers + args.servers)
    ]
    signs = {name: rpc.rpc_async(name, os.getpid, timeout=5) for name in names}
    missing = []
    for name, sign in signs.items():
        try:
            sign.wait()
        except RuntimeError:
            missing.append(name)
    place = "an answer by RPC" if "RPC ran for" in str(error) else "an all-reduce of the trainers"
    sys.exit(
        f"error: --timeout {args.timeout:g} s are over: somebody has waited for {place} in vain; no sign of life from "
        f"{', '.join(missing) or 'nobody: all answer again'}"
    )


def beat(store):
    """The master's sign of life, counted in the launcher's store: nobody else waits for the master while trainers train."""
    with suppress(RuntimeError):  # when the launcher is gone, and with it in a moment this process
        while True:
            store.add("heartbeat", 1)
            time.sleep(1)


def run_process(rank, args):
    """A spawned process: join the RPC world in this rank's role, serve until the master is done, leave."""
    threading.Thread(
        target=lambda: (mp.parent_process().join(), os._exit(1)), daemon=True
    ).start()  # never outlive it
    logging.captureWarnings(
        True
    )  # off the screen: torch deprecates what its own RPC and DistributedOptimizer are made of
    torch.set_num_threads(args.threads_per_process)
    world_size, name = args.trainers + args.servers + 1, role(rank, args.trainers, args.servers)
    timeout = timedelta(seconds=min(args.timeout, 1e6))

    def connect():
        return dist.TCPStore(args.master_addr, args.master_port, is_master=False, timeout=timeout)

    def launchers_store(url, **_):
        yield connect(), rank, world_size

    if rank < args.trainers:  # the second group, of the trainers alone, for DDP
        dist.init_process_group(
            args.backend,
            store=dist.PrefixStore("trainers", connect()),
            rank=rank,
            world_size=args.trainers,
            timeout=timeout,
        )
    dist.register_rendezvous_handler("launcher", launchers_store)
    # A server has one worker thread, so that updates of one table by several trainers follow one another: the optimizer
    # takes no lock. A trainer has one that trains and others for the answers. Plain TCP, because what torch adds to it on
    # one host (shared memory, 16 more connections per pair) took more CPU time for messages as small as these.
    rpc.init_rpc(
        name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method="launcher://",
            num_worker_threads=1 if name.startswith("ps") else 4,
            rpc_timeout=timeout.total_seconds(),
            _transports=["uv"],
            _channels=["basic"],
        ),
    )
    if name == "master":
        threading.Thread(target=beat, args=(connect(),), daemon=True).start()
        try:
            run_master(args)
        except RuntimeError as error:
            if "imed out" in str(error) or "timeout" in str(error):
                name_the_missing(args, error)
            raise
    rpc.shutdown()
    if rank < args.trainers:
        dist.destroy_process_group()
    os._exit(
        0
    )  # all is said and left: to clear the interpreter away takes a second of CPU time, times 17 on two cores


def main():
    folder = Path(__file__).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    try:
        from common.setup import (
            Parser,
            fail,
            output_file,
            positive_number,
            threads_per_rank,
            whole_number,
        )
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error}: copy the repository's folder common/ beside {folder} or into it")

    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--trainers", type=whole_number(1, 64), default=8)
    parser.add_argument("--servers", type=whole_number(1, 64), default=8)
    parser.add_argument(
        "--embeddings", type=whole_number(1), default=300, help="rows of each server's table"
    )
    parser.add_argument(
        "--embedding-dim",
        type=whole_number(1),
        help="its columns; servers × columns must be a multiple of "
        "512 (default: the smallest that is: 64 with 8 servers, 256 with 2)",
    )
    parser.add_argument(
        "--warmup",
        type=whole_number(0),
        default=5,
        help="epochs that are not measured (default: 5)",
    )
    parser.add_argument(
        "--epochs",
        type=whole_number(1),
        default=100,
        help="measured epochs of 10 batches (default: 100)",
    )
    parser.add_argument(
        "--lookup",
        choices=["parallel", "sequential", "both"],
        default="parallel",
        help="ask all servers at once, or one after another; both: epoch by epoch in turn",
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="of the dense net"
    )
    parser.add_argument(
        "--master-addr", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--master-port", type=whole_number(0, 65535), default=0, help="default: one that is free"
    )
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=300.0,
        help="seconds to wait for the others (default: 300)",
    )
    parser.add_argument("--seed", type=whole_number(0), default=0)
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="only measure")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="everything measured, raw")
    args = parser.parse_args()

    multiple = DENSE_INPUT // math.gcd(DENSE_INPUT, args.servers)
    args.embedding_dim = args.embedding_dim or multiple
    if args.embedding_dim % multiple:
        below = args.embedding_dim // multiple * multiple
        nearest = f"{below} or {below + multiple}" if below else f"{multiple}"
        fail(
            f"argument --embedding-dim: '{args.embedding_dim}' × {args.servers} servers is not a multiple of {DENSE_INPUT}; "
            f"with {args.servers} servers the nearest that works is {nearest}"
        )
    args.rows_per_bag = args.servers * args.embedding_dim // DENSE_INPUT
    gigabytes = 4e-9 * args.embeddings * args.embedding_dim * args.servers * (1 + args.trainers)
    if gigabytes > 1e-9 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        fail(
            f"argument --embeddings: '{args.embeddings}' × {args.embedding_dim} on {args.servers} servers, with a gradient "
            f"per trainer, takes {gigabytes:.0f} GB, more than this host has; use fewer"
        )
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and gpus == 0:
        fail("argument --device: 'cuda' needs a GPU that torch can use, and there is none; use cpu")
    args.device = "cuda" if args.device != "cpu" and gpus else "cpu"
    args.backend = "nccl" if args.device == "cuda" and gpus >= args.trainers else "gloo"
    args.threads_per_process = threads_per_rank(args.trainers + args.servers)

    try:  # the launcher holds the store by which all find each other; torch's own would listen on every interface
        family, *_, address = socket.getaddrinfo(
            args.master_addr, args.master_port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        flag = "--master-port" if args.master_port else "--master-addr"
        fail(
            f"argument {flag}: cannot listen on '{args.master_addr}' port {args.master_port}: "
            f"{getattr(error, 'strerror', None) or error}"
        )
    args.master_addr, args.master_port = listener.getsockname()[:2]
    store = dist.TCPStore(
        args.master_addr,
        args.master_port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    if ipaddress.ip_address(
        args.master_addr
    ).is_loopback:  # otherwise: the host name's interface, or what is set there
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.update(
            TP_SOCKET_IFNAME=loopback, GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback
        )

    last = args.trainers + args.servers
    parameters = sum(parameter.numel() for parameter in dense_net().parameters())
    layout = (
        f"08_ddp_rpc: torch {torch.__version__}, CUDA {torch.version.cuda} with {gpus} GPUs, {last + 1} processes with "
        f"{args.threads_per_process} threads each\n"
        f"rank 0 to {args.trainers - 1}: trainers, {parameters} dense parameters on {args.device}, DDP over {args.backend}\n"
        f"rank {args.trainers} to {last - 1}: parameter servers, a table of {args.embeddings} × {args.embedding_dim} each\n"
        f"rank {last}: master; RPC over TensorPipe (TCP); all meet at {args.master_addr} port {args.master_port}"
    )
    logging.getLogger("torch.multiprocessing.spawn").setLevel(
        logging.ERROR
    )  # it would name every process that it ends
    received = []  # Ctrl-C or SIGTERM: only noted, for an exception while a process is half started would leave it behind
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(number))
    context = None
    try:
        # Ctrl-C reaches every process of the terminal: the children inherit the mask and leave it to the launcher.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        print(layout, flush=True)
        context = mp.spawn(run_process, (args,), nprocs=last + 1, join=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        beats, since = 0, time.monotonic()
        while not context.join(
            timeout=1, grace_period=1
        ):  # after which one that does not respond is killed
            if received:
                sys.exit("interrupted" if received[0] == signal.SIGINT else 128 + signal.SIGTERM)
            count = store.add("heartbeat", 0)
            if count != beats:
                beats, since = count, time.monotonic()
            elif beats and time.monotonic() - since > args.timeout:
                sys.exit(
                    f"error: --timeout {args.timeout:g} s are over: no sign of life from master (rank {last})"
                )
    except mp.ProcessExitedException as error:
        cause = (
            f"was ended by {error.signal_name}"
            if error.signal_name
            else f"ended with status {error.exit_code}"
        )
        sys.exit(
            f"error: {role(error.error_index, args.trainers, args.servers)} (rank {error.error_index}) {cause}; "
            "all other processes were ended"
        )
    except mp.ProcessRaisedException as error:
        sys.exit(
            f"{error}\nerror: {role(error.error_index, args.trainers, args.servers)} (rank {error.error_index}) failed; "
            "all other processes were ended"
        )
    finally:
        for process in mp.active_children():
            process.kill()
            process.join()
        for file in (
            context.error_files if context else ()
        ):  # torch's temporary files, in which ranks leave their tracebacks
            Path(file).unlink(missing_ok=True)
        del store


if __name__ == "__main__":
    main()
