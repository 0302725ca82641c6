"""FSDP against one process that trains on all ranks' data, on real ranks; its order, its limits."""

import copy
import gc
import pickle
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from common.recordings.record import output_of
from common.testing import harness
from common.testing.harness import masked, torchrun

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import accounting
import fsdp
from fsdp import FSDP, clip_grad_norm, main

SCRIPT = Path(__file__).with_name("fsdp.py")
TWO_ADAMWS = [(torch.optim.AdamW, {"fused": True}), (torch.optim.AdamW, {"foreach": True})]
OPTIMIZERS = [(torch.optim.SGD, {"momentum": 0.9}), *TWO_ADAMWS]


class Net(nn.Module):
    """Odd sizes, biases, a norm, a layer used twice, one that is never used."""

    def __init__(self, recompute=None):
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.up, self.norm, self.down = nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 7)
        self.twice, self.head = nn.Linear(7, 7, bias=False), nn.Linear(7, 11, bias=False)
        self.never = nn.Linear(3, 3)
        self.recompute = recompute

    def block(self, x):
        return x + self.down(F.gelu(self.norm(self.up(x))))

    def forward(self, tokens):
        x = self.twice(self.embedding(tokens))
        if self.recompute:
            x = checkpoint(self.block, x, use_reentrant=self.recompute == "reentrant")
        else:
            x = self.block(x)
        return self.head(self.twice(x))


def plain():
    return Net()


def tied():
    net = Net()
    net.head.weight = net.embedding.weight
    return net


def frozen():
    net = Net()
    net.up.requires_grad_(False)
    net.twice.requires_grad_(False)
    net.embedding.requires_grad_(False)
    return net


def recomputed():
    return Net("as recommended")


def recomputed_reentrant():
    return Net("reentrant")


def transformer():
    """Attention that takes the weight of its projection without calling it; in place, too."""
    layer = nn.TransformerEncoderLayer(6, 2, 9, 0.0, nn.ReLU(inplace=True), batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(11, 6), layers, nn.Linear(6, 11))


class Unusual(nn.Module):
    """Weights that are computed, kept in lists, or read by hooks of others; a statistic."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.hooked = nn.utils.spectral_norm(nn.Linear(6, 6)).eval()  # old style: by a hook
        self.listed = nn.ParameterList([torch.randn(6, 6) / 3, torch.randn(6) / 3])
        self.head = nn.Linear(6, 11)
        self.statistic = nn.BatchNorm1d(11)

    def forward(self, tokens):
        self.hooked.eval()  # in training it changes its vectors
        self.statistic.eval()  # as DDP leaves it, too: every rank would have its own
        x = torch.tanh(self.lstm(self.embedding(tokens))[0])
        x = self.hooked(torch.tanh(self.normed(x))) @ self.listed[0] + self.listed[1]
        return self.statistic(self.head(x).flatten(0, 1)).view(*tokens.shape, 11)


class OwnLinear(nn.Module):
    """As in the course: a module of one's own, with nothing but `weight`."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class OwnEmbedding(nn.Module):
    def __init__(self, number, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(number, width))

    def forward(self, ids):
        return self.weight[ids]


def own():
    layers = [OwnEmbedding(11, 5), OwnLinear(5, 9), nn.SiLU(inplace=True), OwnLinear(9, 11)]
    return nn.Sequential(*layers)


FULL = pytest.mark.full


class TiedByHand(nn.Module):
    """Reads the weight of a child; it may, because it owns it, too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = self.embedding.weight

    def forward(self, tokens):
        return F.linear(torch.tanh(self.embedding(tokens)), self.head)


BUILDS = [plain, tied, TiedByHand, frozen, recomputed, recomputed_reentrant, transformer, own]
BUILDS += [Unusual]
# Units that are whole at a time, with prefetch and without, where that is not 2 and 1: Net uses its
# layers in another order than it registers them, and one twice.
MOST = {"plain": (4, 2), "tied": (5, 3), "frozen": (3, 1), "recomputed": (5, 3)}
MOST |= {"recomputed_reentrant": (5, 3), "TiedByHand": (1, 1), "Unusual": (3, 2)}


def batch_of(step):
    """Tokens of all ranks, two sequences each, and those of this rank."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (2 * dist.get_world_size(), 5), generator=generator)
    return tokens, tokens[2 * dist.get_rank() :][:2]


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1).double(), tokens.flatten())


def largest_difference(full, twin):
    expected = twin.state_dict()
    assert set(full) == set(expected), set(full) ^ set(expected)
    assert all(full[name].dtype == expected[name].dtype for name in expected)
    return max((full[name] - expected[name]).abs().max().item() for name in expected)


def trains_like_one_process(build, optimizer_cls, options, prefetch):
    torch.manual_seed(0)
    twin = build().double()
    torch.manual_seed(dist.get_rank())
    model = build().double()
    if dist.get_rank() == 0:  # the others have other weights: rank 0's must win
        model.load_state_dict(twin.state_dict())
    twin.recompute = None
    model = FSDP(model, prefetch=prefetch)
    most = MOST.get(build.__name__, (2, 1))[0 if prefetch else 1]
    with Spy(model) as spy:
        _trains_like_one_process(model, twin, optimizer_cls, options)
        assert spy.most == most and spy.whole() == 0, (build, spy.most)
    assert largest_difference(model.gather_full_params(), twin) < 1e-10


def _trains_like_one_process(model, twin, optimizer_cls, options):
    optimizer = optimizer_cls(model.parameters(), lr=0.05, **options)
    of_twin = optimizer_cls(twin.parameters(), lr=0.05, **options)
    for step in range(4):
        tokens, mine = batch_of(step)
        model.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            assert torch.allclose(model(mine), twin(mine), rtol=1e-8)
        model.train()
        loss_of(model, mine).backward()
        model.finish_gradient_synchronization()
        loss_of(twin, tokens).backward()
        for parameter in twin.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # as FSDP does
        norms = clip_grad_norm(model, 0.5), nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        torch.testing.assert_close(*norms, rtol=1e-10, atol=0)
        for one in (optimizer, of_twin):
            one.step()
            one.zero_grad(set_to_none=step % 2 == 0)


def all_train_like_one_process(builds, optimizers):
    warnings.simplefilter("error")
    # Of torch itself, about tensors without gradients that pass through a checkpoint.
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
    with warnings.catch_warnings():
        for build in builds:
            for number, (optimizer_cls, options) in enumerate(optimizers):
                trains_like_one_process(build, optimizer_cls, options, prefetch=number != 1)
    warnings.resetwarnings()


@pytest.mark.parametrize(
    "world_size, builds, optimizers",
    [
        (2, [plain, frozen, recomputed_reentrant, transformer, own, Unusual], OPTIMIZERS[:1]),
        (2, [transformer], OPTIMIZERS[1:2]),
        (3, [tied, TiedByHand], OPTIMIZERS[:2]),
        *(pytest.param(n, BUILDS, OPTIMIZERS, marks=FULL) for n in (1, 2, 3)),
    ],
)
def test_trains_like_one_process(ranks, world_size, builds, optimizers):
    ranks(world_size).run(all_train_like_one_process, builds, optimizers, timeout=120)


def has_shards():
    """1/N of all that has two dimensions, and as many dimensions; the rest is whole."""
    for build in (plain, frozen, tied, transformer, Unusual):
        torch.manual_seed(0)
        net = build()
        whole = copy.deepcopy(dict(net.named_parameters()))
        everything = sum(weight.numel() for weight in whole.values() if weight.ndim >= 2)
        model = FSDP(net)
        held = 0
        for name, shard in net.named_parameters():
            if whole[name].ndim < 2:
                assert torch.equal(shard, whole[name])
                continue
            held += shard.numel()
            assert shard.shape == (*[1] * (whole[name].ndim - 1), shard.numel())
            of_ranks = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, shard.detach().flatten())
            assert torch.equal(torch.cat(of_ranks), whole[name].flatten()), name
        assert held <= everything / dist.get_world_size() + len(model.units)
        loss_of(model, batch_of(0)[1]).backward()
        model.finish_gradient_synchronization()
        for name, shard in net.named_parameters():
            assert not shard.requires_grad or shard.grad.shape == shard.shape, name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_has_its_part(ranks, world_size):
    ranks(world_size).run(has_shards)


def prehooked(module, dtype):
    """The same computation in one process: weights and inputs rounded on their way in."""

    def round_inputs(part, inputs):
        part.__dict__["original"] = part._parameters.pop("weight")
        part.weight = part.original.to(dtype)
        return tuple(one.to(dtype) if one.is_floating_point() else one for one in inputs)

    def restore(part, inputs, outputs):
        del part.weight
        part._parameters["weight"] = part.original

    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding | OwnLinear | OwnEmbedding):
            part.register_forward_pre_hook(round_inputs)
            part.register_forward_hook(restore)
        elif isinstance(part, nn.LayerNorm):
            part.register_forward_pre_hook(lambda part, inputs: (inputs[0].float(),))


class Small(nn.Module):
    def __init__(self, linear, embedding):
        super().__init__()
        self.embedding, self.first = embedding(11, 8), linear(8, 12)
        self.norm, self.second = nn.LayerNorm(12), linear(12, 11)

    def forward(self, tokens):
        return self.second(F.silu(self.norm(self.first(self.embedding(tokens)))))


def linear_without_bias(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def agrees_with_prehooks(compute_dtype, tolerance, linear, embedding):
    torch.manual_seed(0)
    net = Small(linear, embedding)
    twin = copy.deepcopy(net)
    model = FSDP(net, compute_dtype=compute_dtype)
    if compute_dtype:
        prehooked(twin, compute_dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_twin = torch.optim.SGD(twin.parameters(), lr=0.1)
    seen = []
    net.first.register_forward_hook(lambda part, inputs, output: seen.append(output.dtype))
    for step in range(3):
        tokens, mine = batch_of(step)
        loss_of(model, mine).backward()
        model.finish_gradient_synchronization()
        loss_of(twin, tokens).backward()
        for parameter in model.parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32
        for one in (optimizer, of_twin):
            one.step()
            one.zero_grad()
    assert set(seen) == {compute_dtype or torch.float32}
    assert largest_difference(model.gather_full_params(), twin) <= tolerance


@pytest.mark.parametrize("kind", [(linear_without_bias, nn.Embedding), (OwnLinear, OwnEmbedding)])
@pytest.mark.parametrize(
    "dtype, tolerance", [(None, 1e-6), (torch.float16, 1e-4), (torch.bfloat16, 1e-3)]
)
def test_course(ranks, dtype, tolerance, kind):
    """Three steps of SGD, beside a twin with hooks in one process."""
    ranks(2).run(agrees_with_prehooks, dtype, tolerance, *kind)


def sums_in_float32():
    """1 and 2^-12 have no sum in bfloat16, and a shard's gradient has a larger dtype."""
    model = FSDP(nn.Sequential(nn.Linear(3, 3, bias=False)), torch.bfloat16)
    x = torch.full((1, 3), [1.0, 2**-12][dist.get_rank()])
    model(x).sum().backward()
    model.finish_gradient_synchronization()
    assert model.module[0].weight.grad.eq((1 + 2**-12) / 2).all()


def test_gradients_are_summed_in_float32(ranks):
    ranks(2).run(sums_in_float32)


def computes_mixed_with_biases(dtype):
    """Biases and inputs are cast, norms stay float32; frozen and recomputed layers, too."""
    for build in (plain, frozen, recomputed, transformer):
        torch.manual_seed(0)
        model = FSDP(build(), compute_dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(8):
            loss = loss_of(model, batch_of(0)[1])
            loss.backward()
            model.finish_gradient_synchronization()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0], (build, losses)
        for parameter in model.parameters():
            assert parameter.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_with_biases(ranks, dtype):
    ranks(2).run(computes_mixed_with_biases, dtype)


class Spy:
    """What a model launches, in order, and how many units are whole at most."""

    def __init__(self, model):
        self.units = model.units
        self.log = []
        self.most = 0
        self.most_in_flight = 0
        self.gather, self.reduce = fsdp.Unit.gather, fsdp.begin_reduction
        self.patches = [
            patch.object(fsdp.Unit, "gather", lambda unit: self.note_gather(unit)),
            patch.object(fsdp, "begin_reduction", self.note_reduce),
        ]

    def __enter__(self):
        for each in self.patches:
            each.start()
        return self

    def __exit__(self, *_):
        for each in self.patches:
            each.stop()

    def note_gather(self, unit):
        before = self.whole()
        self.gather(unit)
        if self.whole() > before:
            self.log.append(f"gather {self.units.index(unit)}")
        self.most = max(self.most, self.whole())

    def note_reduce(self, unit, in_flight):
        self.log.append(f"reduce {self.units.index(unit)}")
        self.reduce(unit, in_flight)
        self.most_in_flight = max(self.most_in_flight, len(in_flight))

    def whole(self):
        return sum(unit.whole.untyped_storage().size() > 0 for unit in self.units)


def chain():
    return nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(5)]).double()


def train_step(model, x):
    model(x).square().mean().backward()
    model.finish_gradient_synchronization()


def note_launched(spy, launched, *_):
    launched.append(len(spy.log))


def prefetches_one_ahead():
    x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
    for prefetch, most in ((True, 2), (False, 1)):
        model = FSDP(chain(), prefetch=prefetch)
        with Spy(model) as spy:
            launched = []
            for part in model.module:
                part.register_forward_pre_hook(partial(note_launched, spy, launched))
            train_step(model, x)
            assert spy.most == most and spy.most_in_flight == 1 and spy.whole() == 0
        forward = [f"gather {layer}" for layer in range(5)]
        expected = "gather 4, gather 3, reduce 4, gather 2, reduce 3, gather 1, reduce 2, gather 0"
        expected += ", reduce 1"
        if not prefetch:
            expected = "gather 4, reduce 4, gather 3, reduce 3, gather 2, reduce 2, gather 1"
            expected += ", reduce 1, gather 0"
        assert spy.log == forward + f"{expected}, reduce 0".split(", "), spy.log
        assert launched == ([2, 3, 4, 5, 5] if prefetch else [1, 2, 3, 4, 5]), launched


def test_prefetch_is_one_layer_ahead(ranks):
    ranks(2).run(prefetches_one_ahead)


class Branches(nn.Module):
    """Every rank may be told another way."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, way):
        for part in way:
            x = torch.tanh(self.parts[part](x))
        return x


def takes_any_way_together():
    """Other units in another order than registered, in every step; and none at all."""
    torch.manual_seed(0)
    net = Branches().double()
    twin = copy.deepcopy(net)
    model = FSDP(net)
    x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
    with Spy(model) as spy:
        for way in [(0, 1, 2, 3), (3, 1, 0), (2,), (1, 2, 1), ()]:
            model.zero_grad()
            twin.zero_grad()
            spy.log.clear()
            for one in (model, twin):
                one(x, way).square().sum().backward()
            model.finish_gradient_synchronization()
            assert gradients_agree(model, twin) < 1e-12, way
            reduced = [step for step in spy.log if "reduce" in step]
            assert reduced == ["reduce 3", "reduce 2", "reduce 1", "reduce 0"], way


def test_units_in_any_order(ranks):
    ranks(2).run(takes_any_way_together)


def takes_units_of_the_user():
    """Some modules, modules within modules; what is in none is in a unit of the whole."""
    x = torch.ones(2, 6, dtype=torch.float64)
    for choose, expected in (
        (lambda net: [net[1], net[3]], 3),
        (lambda net: [net[0], net[0][1], net[2]], 4),
    ):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(*chain()) for _ in range(5)])
        twin = copy.deepcopy(net)
        model = FSDP(net, units=choose(net))
        for _ in range(2):
            model.zero_grad()
            twin.zero_grad()
            train_step(model, x)
            twin(x).square().mean().backward()
            assert gradients_agree(model, twin) < 1e-12
        assert len(model.units_of) == expected


def test_units_of_the_user(ranks):
    ranks(2).run(takes_units_of_the_user)


def names_the_first_different_use():
    model, x = FSDP(Branches()), torch.ones(2, 6)
    model.guard.compare_ranks(model)
    model(x, (0, 1)).sum().backward()
    model.finish_gradient_synchronization()
    expected = "rank 0 has forward of parts.1, rank 1 has forward of parts.2"
    with pytest.raises(RuntimeError, match=expected):
        model(x, [(0, 1), (0, 2)][dist.get_rank()])


def names_a_use_that_is_missing():
    model = FSDP(Branches())
    model.guard.compare_ranks(model)
    expected = "rank 0 has forward of parts.1, rank 1 has backward of parts.0"
    with pytest.raises(RuntimeError, match=expected):
        model(torch.ones(2, 6), [(0, 1), (0,)][dist.get_rank()]).sum().backward()


@pytest.mark.parametrize("check", [names_the_first_different_use, names_a_use_that_is_missing])
def test_ranks_can_be_compared(ranks, check):
    ranks(2).run(check)


def names_the_first_different_parameter():
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"rank 0 has 0.weight \(4, 3\).*rank 1 has .*\(5, 3\)"):
        FSDP(nn.Sequential(nn.Linear(3, 4 + rank)))


def test_models_that_differ(ranks):
    ranks(2).run(names_the_first_different_parameter)


class ChangesInPlace(nn.Module):
    def forward(self, x):
        y = x.exp()
        y.mul_(2)  # backward of exp needs y as it was
        return y


class Positions(nn.Linear):
    """Returns a view of its weight, whose memory is given up then."""

    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x):
        return self.weight[: len(x)]


class HidesItsOutput(nn.Linear):
    """Returns an object, in which nobody finds a tensor."""

    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x):
        return Hidden(super().forward(x))


class Hidden:
    def __init__(self, tensor):
        self.tensor = tensor


class Leaks(nn.Linear):
    """Backward comes to its weight by another way than its output."""

    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x):
        self.leak = super().forward(x.requires_grad_())
        return x + 1


def refuses_wrong_use():
    x = torch.ones(2, 6, dtype=torch.float64)
    model = FSDP(chain())
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward.. ran twice: finish in between"):
        loss.backward()
    with pytest.raises(RuntimeError, match=r"call finish_gradient_synchronization\(\) after every"):
        model(x)
    model.finish_gradient_synchronization()
    with pytest.raises(RuntimeError, match=r"create_graph=True\) is not supported"):
        model(x).sum().backward(create_graph=True)
    model.finish_gradient_synchronization()
    for wrong in (nn.Linear(6, 6), nn.ModuleList()):
        with pytest.raises(ValueError, match="units: must be modules within the module"):
            FSDP(chain(), units=[wrong])
    with pytest.raises(RuntimeError, match=r"a view of it: return a clone\(\)"):
        FSDP(nn.Sequential(Positions()))(x)
    with pytest.raises(ValueError, match="wrapped only once"):
        FSDP(nn.Sequential(model))
    with pytest.raises(ValueError, match="no weight to shard"):
        FSDP(nn.LayerNorm(3))
    for option in ({"sparse": True}, {"max_norm": 1.0}):
        with pytest.raises(ValueError, match="^0: sparse gradients and max_norm"):
            FSDP(nn.Sequential(nn.Embedding(3, 4, **option)))
    with pytest.raises(ValueError, match="run one forward before"):
        FSDP(nn.LazyLinear(3))
    model = FSDP(nn.Sequential(nn.Linear(6, 6), ChangesInPlace()).double())
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        model(x).sum().backward()
    with pytest.raises(RuntimeError, match="a Hidden, in which FSDP finds no tensor"):
        FSDP(nn.Sequential(HidesItsOutput()))(x.float())
    model = FSDP(nn.Sequential(Leaks()))
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        model(x.float())
        model.module[0].leak.sum().backward()
    model = FSDP(chain())
    full = model.gather_full_params()
    with pytest.raises(KeyError, match="0.weight"):
        model.load_full_params({})
    full["1.weight"] = full["1.weight"][:3]
    with pytest.raises(ValueError, match=r"1.weight has shape \(3, 6\), not \(6, 6\)"):
        model.load_full_params(full)
    for change in (
        lambda module: module[0].requires_grad_(False),
        lambda module: module.float(),
        lambda module: module.append(nn.Linear(6, 6)),
    ):
        model = FSDP(chain())
        change(model.module)
        with pytest.raises(RuntimeError, match="frozen, unfrozen, replaced, moved or cast"):
            model(x)


def test_wrong_use(ranks):
    ranks(2).run(refuses_wrong_use)


class Fails(nn.Module):
    """Raises when told to, in forward or in backward, between its two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.fail = nn.Linear(6, 6), nn.Linear(6, 6), ""

    def forward(self, x):
        x = self.first(x)
        if self.fail == "forward":
            raise ArithmeticError("on purpose")
        if self.fail == "backward":
            x.register_hook(lambda _: (_ for _ in ()).throw(ArithmeticError("on purpose")))
        return self.second(x)


def goes_on_after_an_exception(where):
    """A step is given up, on all ranks: finish and zero_grad; the next one is clean."""
    torch.manual_seed(0)
    net = Fails().double()
    twin = copy.deepcopy(net)
    model = FSDP(net)
    x = torch.ones(2, 6, dtype=torch.float64)
    train_step(model, x)
    net.fail = where
    with pytest.raises(ArithmeticError):
        model(x).square().mean().backward()
    model.finish_gradient_synchronization()
    net.fail = ""
    for _ in range(2):
        model.zero_grad()
        train_step(model, x)
    twin(x).square().mean().backward()
    assert gradients_agree(model, twin) < 1e-12


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_goes_on_after_an_exception(ranks, where):
    ranks(2).run(goes_on_after_an_exception, where)


def gradients_agree(model, twin):
    """Of the whole on this rank's shard, of the rest as it is; returns the largest difference."""
    worst = 0.0
    sharded = fsdp.shards_of(model)
    for name, parameter in model.module.named_parameters():
        expected = twin.get_parameter(name).grad
        if expected is None:
            expected = torch.zeros_like(twin.get_parameter(name))
        mine = parameter.grad
        if any(parameter is shard for shard in sharded):
            of_ranks = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, mine.flatten())
            mine = torch.cat(of_ranks).view(expected.shape)
        worst = max(worst, (mine - expected).abs().max().item())
    return worst


def runs_a_retained_graph_twice():
    """With a finish in between the gradients add up; when it is forgotten, all ranks raise."""
    torch.manual_seed(0)
    net = Net().double()
    twin = copy.deepcopy(net)
    model = FSDP(net)
    tokens, mine = batch_of(0)
    for _ in range(2):
        model.zero_grad()
        twin.zero_grad()
        loss = loss_of(model, mine)
        expected = [loss_of(twin, one) for one in tokens.split(2)]
        for _ in range(2):
            loss.backward(retain_graph=True)
            model.finish_gradient_synchronization()
            for one in expected:
                (one / len(expected)).backward(retain_graph=True)
        assert gradients_agree(model, twin) < 1e-12
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward.. ran twice: finish in between"):
            loss.backward()
        model.finish_gradient_synchronization()


def forgets_a_backward_that_was_refused():
    """Its gradients must not be in those of the next step."""
    torch.manual_seed(0)
    net = chain()
    twin = copy.deepcopy(net)
    model = FSDP(net)
    x = torch.ones(2, 6, dtype=torch.float64)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward.. ran twice"):
        loss.backward()
    model.finish_gradient_synchronization()
    model.zero_grad()
    train_step(model, x)
    twin(x).square().mean().backward()
    assert gradients_agree(model, twin) < 1e-12


def sums_two_forwards():
    """Two forwards before a backward: what both make of each weight is summed."""
    torch.manual_seed(0)
    net = Net().double()
    twin = copy.deepcopy(net)
    model = FSDP(net)
    for step in range(2):
        model.zero_grad()
        twin.zero_grad()
        tokens, mine = batch_of(step)
        (loss_of(model, mine) * loss_of(model, mine.flip(0, 1))).backward()
        model.finish_gradient_synchronization()
        for one in tokens.split(2):
            (loss_of(twin, one) * loss_of(twin, one.flip(0, 1)) / dist.get_world_size()).backward()
        assert gradients_agree(model, twin) < 1e-12


def refuses_two_reentrant_checkpoints_of_a_layer():
    """Each has a backward of its own, and the gradient of the first would be sent too early."""
    net = chain()
    layers = nn.Sequential(*net)
    net.forward = lambda x: checkpoint(
        layers, checkpoint(layers, x, use_reentrant=True), use_reentrant=True
    )
    model = FSDP(net)
    x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="backward.. ran twice"):
        train_step(model, x)
    model.finish_gradient_synchronization()


def computes_under_autocast():
    """What autograd keeps of a weight is a rounded copy then: a whole one, and right."""
    torch.manual_seed(0)
    net = chain().float()
    twin = copy.deepcopy(net)
    model = FSDP(net)
    x = torch.rand(2, 6)
    dist.broadcast(x, 0)  # the same on all ranks: sums of different ones round differently
    for _ in range(2):
        model.zero_grad()
        twin.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(x).square().mean(), twin(x).square().mean()
        for loss in losses:
            loss.backward()
        model.finish_gradient_synchronization()
        assert losses[0] == losses[1]
        assert gradients_agree(model, twin) < 1e-7


class Adapted(nn.Linear):
    """A sharded weight in use while the module's own children run; and a norm without weights."""

    def __init__(self):
        super().__init__(6, 6, bias=False)
        self.before, self.after = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.norm = nn.LayerNorm(6, elementwise_affine=False)

    def forward(self, x):
        return self.after(self.before(self.norm(x))) + super().forward(x)


def nests():
    torch.manual_seed(0)
    net = nn.Sequential(Adapted(), Adapted())
    twin = copy.deepcopy(net)
    model = FSDP(net)
    x = torch.ones(2, 6, requires_grad=True)
    for _ in range(2):
        twin.zero_grad()
        model.zero_grad()
        loss = model(x).square().mean()
        assert not any(unit.whole.untyped_storage().size() for unit in model.units)
        loss.backward()
        model.finish_gradient_synchronization()
        twin(x).square().mean().backward()
        assert gradients_agree(model, twin) < 1e-6
    train_step(FSDP(twin, compute_dtype=torch.bfloat16), x)


@pytest.mark.parametrize(
    "check",
    [
        runs_a_retained_graph_twice,
        forgets_a_backward_that_was_refused,
        sums_two_forwards,
        refuses_two_reentrant_checkpoints_of_a_layer,
        computes_under_autocast,
        nests,
    ],
)
def test_unusual_graphs(ranks, check):
    ranks(2).run(check)


def accumulates():
    """Two backward passes, each with its finish, add up; a finish without backward adds nothing."""
    torch.manual_seed(0)
    net = Net().double()
    twin = copy.deepcopy(net)
    model = FSDP(net)
    for step in range(2):
        tokens, mine = batch_of(step)
        loss_of(model, mine).backward()
        model.finish_gradient_synchronization()
        loss_of(twin, tokens).backward()
    loss_of(model, mine)
    model.finish_gradient_synchronization()
    for one in (model, twin):
        torch.optim.SGD(one.parameters(), lr=1.0).step()
    assert largest_difference(model.gather_full_params(), twin) < 1e-12


def test_gradients_accumulate(ranks):
    ranks(3).run(accumulates)


def inference_between_forward_and_backward():
    """Also with other weights, which a weight that was kept for backward must not hide."""
    torch.manual_seed(0)
    net = chain()
    twin = copy.deepcopy(net)
    model = FSDP(net)
    x = torch.ones(2, 6, dtype=torch.float64)
    for _ in range(2):
        train_step(model, x)
        twin.zero_grad()
        model.zero_grad()
        loss = model(x).square().mean()
        with torch.no_grad():
            torch.testing.assert_close(model(x), twin(x))
        loss.backward()
        model.finish_gradient_synchronization()
        twin(x).square().mean().backward()
        for one in (model, twin):
            torch.optim.SGD(one.parameters(), lr=0.5).step()
        assert largest_difference(model.gather_full_params(), twin) < 1e-12
    model(x)  # nobody follows it with a backward
    with torch.no_grad():
        for one in (model, twin):
            for parameter in one.parameters():
                parameter.mul_(2)
        torch.testing.assert_close(model(x), twin(x))
    torch.testing.assert_close(model(x), twin(x))


def test_inference_in_between(ranks):
    ranks(2).run(inference_between_forward_and_backward)


def saves(path):
    torch.manual_seed(0)
    model = FSDP(tied(), compute_dtype=torch.bfloat16)
    loss_of(model, batch_of(0)[1]).backward()
    model.finish_gradient_synchronization()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    full = model.gather_full_params()
    if dist.get_rank() == 0:
        torch.save(full, path)


def loads(path):
    full = torch.load(path)
    torch.manual_seed(7)
    model = FSDP(tied())
    with torch.no_grad():
        model.module.embedding(batch_of(1)[1])  # gathers more than it needs
    model.load_full_params(full)
    assert not any(unit.whole.untyped_storage().size() for unit in model.units)
    again = model.gather_full_params()
    assert set(full) == set(again) == set(tied().state_dict())
    assert all(torch.equal(full[name], again[name]) for name in full)
    twin = tied()
    twin.load_state_dict(full)  # and it is an ordinary state_dict
    tokens = batch_of(1)[1]
    torch.testing.assert_close(model(tokens), twin(tokens))


def test_full_weights_at_another_world_size(ranks, tmp_path):
    ranks(2).run(saves, tmp_path / "full.pt")
    for world_size in (1, 2, 3):
        ranks(world_size).run(loads, tmp_path / "full.pt")


def in_a_subgroup():
    group = dist.new_group([2, 1])
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="not a member"):
            FSDP(chain(), process_group=group)
    else:
        model = FSDP(chain(), process_group=group)
        train_step(model, torch.ones(2, 6, dtype=torch.float64))
        assert next(model.parameters()).shape == (1, 18)
    dist.barrier()


def test_a_process_group_of_some_ranks(ranks):
    ranks(3).run(in_a_subgroup)


def is_freed():
    alive = []
    for _ in range(3):
        model = FSDP(chain())
        train_step(model, torch.ones(2, 6, dtype=torch.float64))
        alive += [weakref.ref(model), *map(weakref.ref, model.units)]
        del model
    gc.collect()
    assert not any(reference() for reference in alive)


class NotesItsOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.storages = []

    def forward(self, x):
        y = x.exp()  # which autograd keeps, as part of the graph that y belongs to
        self.storages.append(StorageWeakRef(y.untyped_storage()))
        return y


def frees_a_graph_without_backward():
    noting = NotesItsOutput()
    model = FSDP(nn.Sequential(nn.Linear(6, 6), noting))
    model(torch.ones(2, 6))
    gc.collect()
    assert noting.storages and all(storage.expired() for storage in noting.storages)


@pytest.mark.parametrize("check", [is_freed, frees_a_graph_without_backward])
def test_what_is_dropped_is_freed(ranks, check):
    ranks(2).run(check)


def losses_overflow_on_one_rank():
    """float16: a gradient that overflows in one rank's shard; all ranks must skip the step."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 4, bias=False)]
    model = FSDP(nn.Sequential(*layers), compute_dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        before = model.gather_full_params()
        optimizer.zero_grad()
        y = model(torch.ones(2, 8)).float()
        # In step 1 the gradient of row 0 of the last weight is beyond float16's 65504.
        loss = y[:, 0].sum() * (60.0 if step == 1 else 1e-3) + y[:, 1:].sum() * 1e-3
        scaler.scale(loss).backward()
        model.finish_gradient_synchronization()
        scaler.step(optimizer)
        scaler.update()
        after = model.gather_full_params()
        stayed = all(torch.equal(before[name], after[name]) for name in before)
        assert stayed == (step == 1)
        assert scaler.get_scale() == (2.0**10 if step == 0 else 2.0**9)


def every_optimizer_is_right_or_refused():
    """Beside one process: those that work element by element; others end in an error."""
    x, y = torch.rand(2, 4, 8, dtype=torch.float64).unbind()
    refused = []
    for name, kind in vars(torch.optim).items():
        if not isinstance(kind, type) or kind is torch.optim.Optimizer or name == "SparseAdam":
            continue  # SparseAdam takes sparse gradients alone, and FSDP has none
        torch.manual_seed(0)
        layers = [nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Linear(4, 8, bias=False)]
        twin = nn.Sequential(*layers).double()
        model = FSDP(copy.deepcopy(twin))
        of_twin = kind(twin.parameters(), lr=0.01)
        optimizer = kind(model.parameters(), lr=0.01)
        try:
            for _ in range(3):
                for trained, its_optimizer in ((model, optimizer), (twin, of_twin)):
                    its_optimizer.zero_grad()
                    (trained(x) - y).square().mean().backward()
                    if trained is model:
                        model.finish_gradient_synchronization()
                    its_optimizer.step(*[lambda: 0.0] * (name == "LBFGS"))
        except RuntimeError as error:
            assert f"{name} needs whole weights" in str(error)
            refused.append(name)
        else:
            assert largest_difference(model.gather_full_params(), twin) < 1e-12, name
    assert set(refused) <= {"Adafactor", "LBFGS", "Muon"} and len(refused) >= 2
    optimizer = torch.optim.Adafactor(twin.parameters())  # of whole weights, of course
    optimizer.step()


class Notes(nn.Module):
    """Appends to a list and writes into a dict that it is given."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x, losses, cache):
        y = F.linear(x, self.weight)
        losses.append(y.square().mean())
        cache["y"] = y
        return y


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.notes = Notes()

    def forward(self, x):
        losses, cache = [], {}
        y = self.notes(x, losses, cache=cache)
        assert len(losses) == 1 and cache["y"] is y
        return y.sum() + losses[0]


def leaves_containers_alone():
    for compute_dtype in (None, torch.bfloat16):
        model = FSDP(Router(), compute_dtype)
        model(torch.ones(2, 8)).backward()
        model.finish_gradient_synchronization()


class Integers(nn.Module):
    """Weights that compute_dtype must not round."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.tensor([[257], [100_003]]), requires_grad=False)
        self.phases = nn.Parameter(torch.tensor([[1 + 2**-20j]]))
        self.scale = nn.Parameter(torch.ones(1, 1))

    def forward(self, x):
        assert self.scale.dtype == torch.bfloat16 and self.codes.tolist() == [[257], [100_003]]
        assert self.phases.dtype == torch.complex64
        return (self.phases * x).real.float() * self.scale.float()


def leaves_integers_alone():
    model = FSDP(Integers(), torch.bfloat16)
    train_step(model, torch.ones(1))
    train_step(model, torch.ones(1))


def saves_nothing_by_halves():
    """What would save or copy one rank's shards says what to do instead."""
    model = FSDP(Unusual())
    for part in (model, model.module, model.module.head):
        with pytest.raises(RuntimeError, match=r"gather_full_params\(\)"):
            part.state_dict()
    assert set(model.gather_full_params()) == set(Unusual().state_dict())
    with pytest.raises(RuntimeError, match=r"load_full_params\(\)"):
        model.load_state_dict({})
    model = FSDP(chain())
    for copied in (model, model.module):
        with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
            copy.deepcopy(copied)
        with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
            pickle.dumps(copied)


def clips_what_there_is():
    """In float16 the squares overflow; no shard that trains; a finish that was forgotten."""
    torch.manual_seed(0)
    module = nn.Linear(64, 64).half()
    twin = copy.deepcopy(module)
    model = FSDP(module)
    x = torch.ones(8, 64).half()
    for trained in (model, twin):
        (trained(x).sum() * 50).backward()
    with pytest.raises(RuntimeError, match="call finish_gradient_synchronization"):
        clip_grad_norm(model, 1.0)
    model.finish_gradient_synchronization()
    expected = torch.stack([p.grad.double().norm() for p in twin.parameters()]).norm()
    norm = clip_grad_norm(model, 1.0)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-3, atol=0)
    assert norm.dtype == torch.float32 and model.module.weight.grad.abs().max() > 0
    module = nn.Sequential(nn.Linear(8, 8))
    module[0].weight.requires_grad_(False)
    model = FSDP(module)
    train_step(model, torch.ones(2, 8))
    expected = module[0].bias.grad.norm()
    torch.testing.assert_close(clip_grad_norm(model, 0.1), expected)
    torch.testing.assert_close(module[0].bias.grad.norm(), torch.tensor(0.1))


def notices_a_step_before_backward():
    x = torch.ones(2, 6, dtype=torch.float64)
    model = FSDP(chain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first, second = model(x).square().mean(), model(x).square().mean()
    second.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        first.backward()


def decays_what_has_two_dimensions():
    """The recipe that tells weights from biases by their dimensions finds the same ones."""
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    model = FSDP(copy.deepcopy(twin))
    x = torch.ones(2, 8, dtype=torch.float64)
    for trained in (twin, model):
        groups = [
            {"params": [p for p in trained.parameters() if p.ndim >= 2], "weight_decay": 0.5},
            {"params": [p for p in trained.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        trained(x).square().mean().backward()
        if trained is model:
            model.finish_gradient_synchronization()
        optimizer.step()
    assert largest_difference(model.gather_full_params(), twin) < 1e-12


class ReadsItsChild(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        return F.linear(x, self.child.weight)


def differs_as_the_page_says():
    """The rows of the page that are no errors of our own."""
    x = torch.ones(2, 6)
    with pytest.raises(RuntimeError):  # about shapes
        FSDP(ReadsItsChild())(x)
    model = FSDP(chain().float())
    seen = []
    model.module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    with saved_tensors_hooks(lambda tensor: seen.append("saved") or tensor, lambda tensor: tensor):
        loss = model(x).sum()
    with pytest.raises(RuntimeError, match="to not have been used in the graph"):
        torch.autograd.grad(loss, list(model.parameters()))
    model.finish_gradient_synchronization()
    model.zero_grad()
    seen.clear()
    train_step(model, x)
    assert seen == []
    embedding, head = nn.Embedding(6, 8), nn.Linear(8, 6, bias=False)
    head.weight = embedding.weight
    first, second = FSDP(nn.Sequential(embedding)), FSDP(nn.Sequential(head))
    assert first.module[0].weight is not second.module[0].weight


@pytest.mark.parametrize(
    "check",
    [
        differs_as_the_page_says,
        losses_overflow_on_one_rank,
        every_optimizer_is_right_or_refused,
        leaves_containers_alone,
        leaves_integers_alone,
        saves_nothing_by_halves,
        clips_what_there_is,
        notices_a_step_before_backward,
        decays_what_has_two_dimensions,
    ],
)
def test_nothing_is_silently_wrong(ranks, check):
    ranks(2).run(check)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="no collectives on meta here")
@pytest.mark.parametrize(
    "size, world_size",
    [("nano", 4), pytest.param("xl", 64, marks=FULL), pytest.param("10b", 1024, marks=FULL)],
)
def test_accounting(size, world_size):
    """1/N of everything on every rank, and what is whole at a time as theory says."""
    held = accounting.account(size, world_size, FSDP, torch.optim.AdamW)
    *parts, whole = held
    expected = accounting.theory(size, world_size)["FSDP"]
    everything = accounting.theory(size, world_size)["DDP"] / 4
    for part, copies in zip(parts, (1, 1, 2), strict=True):
        assert part <= 1.05 * copies * everything / world_size
    assert 0.95 < sum(held) / expected < 1.05 and whole > 0


QUICK = "--size nano --device cpu --batch-size 1 --context-length 8 --steps 1 --warmup 0".split()


def test_script_alone(forked, tmp_path):
    """Without what it is compared with: what it prints has the form of the recorded output."""
    harness.write_mnist(tmp_path / "data", 700, 10)  # the last batch is not full
    files = "--json", tmp_path / "x.json", "--data", tmp_path / "data", "--no-plot"
    status, output = forked(2, SCRIPT, *QUICK, *files, "--no-baseline")
    assert status == 0, output
    result = harness.read_json(tmp_path / "x.json", "06_sharded_optimizer/fsdp")
    assert result["verify"]["passed"] and result["verify"]["max_abs_diff"] <= 1e-10
    recorded = masked(output_of(SCRIPT.with_name("reference_output.txt")))
    starts = "#_sharded", "verify", "MB", "in flight", "Percentiles"
    missing = [line for line in recorded if line.startswith(starts) and "no prefetch" not in line]
    missing = [line for line in missing if line not in masked(output)]
    assert not missing, missing


@pytest.mark.full
def test_script(script, tmp_path):
    files = {"--json": "x.json", "--save": "save", "--trace": "trace", "--plot": "x.png"}
    words = [word for flag, name in files.items() for word in (flag, tmp_path / name)]
    status, output = script(torchrun(2, SCRIPT, *QUICK, *words)).wait()
    assert status == 0, output
    result = harness.read_json(tmp_path / "x.json", "06_sharded_optimizer/fsdp")
    assert result["verify"]["passed"] and result["verify"]["bfloat16_max_abs_diff"] <= 1e-6
    names = [one["name"] for one in result["candidates"]]
    ours = ["FSDP, no prefetch", "FSDP"]
    assert names == ["no sync", "torch DDP", "torch fully_shard", *ours]
    whole = 4 * result["model"]["parameters"]
    for parts in result["memory_bytes"]["FSDP"]:
        for part, expected in zip(parts, (whole / 2, whole / 2, whole), strict=False):
            assert 0.99 < part / expected < 1.01
    for parts in result["memory_bytes"]["unsharded"]:
        assert all(part >= whole for part in parts[:2]) and parts[2] >= 2 * whole
    if sys.platform == "linux":
        sent = {one["name"]: one["sent_bytes"] / whole for one in result["candidates"]}
        assert sent["FSDP"] < 1.01 * 1.5 and 0.99 < sent["torch DDP"] < 1.01, sent
    assert len(torch.load(tmp_path / "save", weights_only=True)) == 6
    assert "traceEvents" in (tmp_path / "trace").read_text()
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.full
def test_a_class_of_the_users_own_has_a_row(script):
    """Verified like ours, also without compute_dtype."""
    words = f"--mine {SCRIPT}:FSDP --no-baseline --no-memory --no-plot".split()
    status, output = script(torchrun(2, SCRIPT, *QUICK, *words)).wait()
    assert status == 0 and output.count("verify: passed") == 2 and "FSDP (mine)" in output, output


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_script_in_other_ways(script, world_size, dtype):
    words = "--compute-dtype", dtype, "--no-prefetch", "--no-baseline", "--no-plot"
    status, output = script(torchrun(world_size, SCRIPT, *QUICK, *words)).wait()
    assert status == 0, output


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An empty folder, in which torch does not make the cache that an optimizer's import needs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.mark.full
@harness.needs_proc
@pytest.mark.parametrize("moment", harness.LADDER_MOMENTS)
@pytest.mark.parametrize("fault", harness.FAULTS)
def test_faults(script, moment, fault, temporary):
    command = torchrun(2, SCRIPT, "--no-memory", *harness.LONG)
    harness.check_fault(script, command, moment, fault, temporary)


@pytest.mark.full
@harness.needs_proc
def test_stopped_rank(script):
    words = "--no-verify", "--no-memory", *harness.LONG
    harness.check_stopped_rank(script, SCRIPT, *words, place="")


@pytest.mark.parametrize("option, value", [("--steps", "0"), ("--plot", "/")])
def test_wrong_input(option, value, monkeypatch, capsys):
    harness.check_wrong_input(main, SCRIPT, option, value, monkeypatch, capsys)


@pytest.mark.parametrize("words", [["--save", "x", "--no-verify"], ["--plot", "x", "--no-memory"]])
def test_flags_that_exclude_each_other(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    with pytest.raises(SystemExit) as end:
        main()
    error = capsys.readouterr().err
    assert end.value.code == 2 and f"argument {words[0]}: not with {words[2]}" in error


def test_not_started_by_torchrun(monkeypatch, capsys):
    harness.check_not_started_by_torchrun(main, SCRIPT, monkeypatch, capsys)


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)


@pytest.mark.cuda
@pytest.mark.parametrize("world_size", [1, 2])
def test_on_a_gpu(script, world_size):
    command = torchrun(world_size, SCRIPT, "--device", "cuda", "--steps", 1)
    status, output = script(command).wait(300)
    assert status == 0, output
    assert "verify: passed" in output and "verify: bfloat16 passed" in output


def test_readme_shows_the_recorded_outputs():
    readme = SCRIPT.with_name("README.md").read_text()
    recorded = output_of(SCRIPT.with_name("reference_output.txt"))
    assert recorded in readme
