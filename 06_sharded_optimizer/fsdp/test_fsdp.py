"""What FSDP promises beyond common/check, on real ranks; beside one process that has all the data.

The checks themselves on two ranks: common/check/test_check.py.
"""

import copy
import gc
import pickle
import sys
import warnings
import weakref
from collections import UserDict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.check import checks_of_fsdp, checks_of_wrappers
from common.recordings.record import output_of
from common.testing import harness
from common.testing.harness import judged, masked, torchrun
from common.testing.processes import Ranks

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import fsdp
import measure
from fsdp import FSDP, clip_grad_norm, main

SCRIPT = Path(__file__).with_name("fsdp.py")
FOLDER = "06_sharded_optimizer/fsdp"
FULL = pytest.mark.full
PROMISES = []  # functions that run on two ranks


def on_two_ranks(promise):
    """Register it: test_promise runs it."""
    PROMISES.append(promise)
    return promise


def test_keeps_the_promises_of_fsdp(ranks):
    """On three ranks, whose parts begin and end within weights; and some promises of wrappers."""
    checks = [
        *checks_of_fsdp.HAS_TO_HOLD,
        checks_of_wrappers.starts_with_the_parameters_of_rank_0,
        checks_of_wrappers.skips_what_nobody_uses,
        checks_of_wrappers.trains_several_dtypes,
        checks_of_wrappers.trains_channels_last,
        checks_of_wrappers.starts_with_the_buffers_of_rank_0,
    ]
    verdicts = judged(ranks, FSDP, checks, 3)
    assert {verdict["verdict"] for verdict in verdicts.values()} == {"passed"}, verdicts


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


class ReturnsView(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:]


def in_place():
    layers = [ReturnsView(5, 9), nn.SiLU(inplace=True), nn.Linear(9, 11)]
    return nn.Sequential(nn.Embedding(11, 5), *layers)


class TiedByHand(nn.Module):
    """Reads the weight of a child; it may, because it owns it, too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = self.embedding.weight

    def forward(self, tokens):
        return F.linear(torch.tanh(self.embedding(tokens)), self.head)


# FlatParameters that are whole at a time, with prefetch and without. Net uses its layers in another
# order than it registers them, and one twice.
MOST = {
    frozen: (4, 1),
    recomputed: (5, 3),
    recomputed_reentrant: (5, 3),
    transformer: (2, 1),
    in_place: (2, 1),
    Unusual: (4, 2),
    TiedByHand: (1, 1),
}


def unsharded(model):
    return sum(flat.unsharded.untyped_storage().size() > 0 for flat in model.flats)


@contextmanager
def watched(model):
    """What a model launches, in order; and how many units are whole at each of these moments."""
    launched, whole = [], []
    unshard, begin_reduction = fsdp.FlatParameter.unshard, fsdp.begin_reduction

    def noting_unshard(flat):
        unshard(flat)
        whole.append(unsharded(model))
        launched.append(f"gather {model.flats.index(flat)}")

    def noting_reduction(model, flat):
        launched.append(f"reduce {model.flats.index(flat)}")
        begin_reduction(model, flat)
        assert model.reduction[0] is flat

    with (
        patch.object(fsdp.FlatParameter, "unshard", noting_unshard),
        patch.object(fsdp, "begin_reduction", noting_reduction),
    ):
        yield launched, whole


def batch_of(step):
    """Tokens of all ranks, two sequences each, and those of this rank."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(11, (2 * dist.get_world_size(), 5), generator=generator)
    return tokens, tokens[2 * dist.get_rank() :][:2]


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1).double(), tokens.flatten())


def assert_same_weights(model, twin, tolerance=1e-10):
    """Names, dtypes and values, those of buffers, too."""
    full, expected = model.gather_full_params(), dict(twin.state_dict())
    torch.testing.assert_close(full, expected, rtol=0, atol=tolerance)


def gradient_or_zeros(parameter):
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def gradients_agree(model, twin, tolerance=1e-12):
    """Of the whole on this rank's shard, of the rest as it is."""
    sharded = {shard for flat in model.flats for shard in flat.sharded_params}
    for name, parameter in model.module.named_parameters():
        expected = gradient_or_zeros(twin.get_parameter(name))
        mine = gradient_or_zeros(parameter).as_subclass(torch.Tensor)
        if parameter in sharded:
            of_ranks = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, mine.flatten())
            mine = torch.cat(of_ranks).view(expected.shape)
        torch.testing.assert_close(mine, expected, rtol=0, atol=tolerance)


def twins(build):
    """A model, and the same module in one process."""
    torch.manual_seed(0)
    twin = build().double()
    return FSDP(copy.deepcopy(twin)), twin


def compute_gradients(model, *inputs):
    """All ranks have the same inputs, so that those of a twin are the same."""
    model.zero_grad()
    model(*inputs).square().mean().backward()
    if isinstance(model, FSDP):
        model.finish_gradient_synchronization()


def agree(model, twin, *inputs):
    """Its gradients are the twin's, in two steps."""
    for _ in range(2):
        for one in (model, twin):
            compute_gradients(one, *inputs)
        gradients_agree(model, twin)


def ones():
    return torch.ones(2, 6, dtype=torch.float64, requires_grad=True)


def chain():
    return nn.Sequential(*[nn.Linear(6, 6, bias=False) for _ in range(5)]).double()


def trains_like_one_process(build, optimizer_cls, options, prefetch):
    torch.manual_seed(0)
    twin = build().double()
    model = copy.deepcopy(twin)
    twin.recompute = None
    model = FSDP(model, prefetch=prefetch)
    dimensions = [[p.ndim for p in one.parameters()] for one in (model, twin)]
    assert dimensions[0] == dimensions[1]  # a recipe decays what has two of them
    optimizer = optimizer_cls(model.parameters(), lr=0.05, **options)
    of_twin = optimizer_cls(twin.parameters(), lr=0.05, **options)
    with watched(model) as (_, whole):
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
    assert (max(whole), unsharded(model)) == (MOST[build][0 if prefetch else 1], 0), build
    assert_same_weights(model, twin)


def all_train_like_one_process(builds):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Of torch itself, about tensors without gradients that pass through a checkpoint.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        for build in builds:
            trains_like_one_process(build, torch.optim.SGD, {"momentum": 0.9}, prefetch=True)
            trains_like_one_process(build, torch.optim.AdamW, {"fused": True}, prefetch=False)


@pytest.mark.parametrize(
    "world_size, builds",
    [
        (2, [frozen, recomputed, recomputed_reentrant, transformer, in_place, Unusual]),
        (3, [TiedByHand]),
        *(pytest.param(world_size, list(MOST), marks=FULL) for world_size in (1, 2, 3)),
    ],
)
def test_trains_like_one_process(ranks, world_size, builds):
    ranks(world_size).run(all_train_like_one_process, builds, timeout=120)


def small():
    layers = nn.Linear(8, 12), nn.LayerNorm(12), nn.SiLU(), nn.Linear(12, 11)
    return nn.Sequential(nn.Embedding(11, 8), *layers)


def rounded_by_hand(net, dtype, tokens):
    """What small() gives in this dtype: weights, biases, inputs are rounded, the norm's are not."""
    embedding, first, norm, silu, second = net
    x = embedding.weight.to(dtype)[tokens]
    x = silu(norm(F.linear(x, first.weight.to(dtype), first.bias.to(dtype)).float()))
    return F.linear(x.to(dtype), second.weight.to(dtype), second.bias.to(dtype))


def keep_output(outputs, module, inputs, output):
    outputs.append(output)


@on_two_ranks
def computes_in_another_dtype():
    """The twin rounds by hand, and adds up the gradients of all ranks in float32."""
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        twin = small()
        model = FSDP(copy.deepcopy(twin), dtype)
        outputs = []  # of the norm
        model.module[2].register_forward_hook(partial(keep_output, outputs))
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
        for step in range(3):
            tokens, mine = batch_of(step)
            loss_of(model, mine).backward()
            model.finish_gradient_synchronization()
            for shard in tokens.split(2):
                (loss_of(partial(rounded_by_hand, twin, dtype), shard) / 2).backward()
            for parameter in model.parameters():
                assert parameter.dtype == parameter.grad.dtype == torch.float32
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert model(mine).dtype == dtype and {y.dtype for y in outputs} == {torch.float32}
        assert_same_weights(model, twin, 1e-6)


@on_two_ranks
def sums_in_float32():
    """1 and 2^-12 have no sum in bfloat16, and a shard's gradient has a larger dtype."""
    model = FSDP(nn.Sequential(nn.Linear(3, 3, bias=False)), torch.bfloat16)
    x = torch.full((1, 3), [1.0, 2**-12][dist.get_rank()])
    model(x).sum().backward()
    model.finish_gradient_synchronization()
    assert model.module[0].weight.grad.eq((1 + 2**-12) / 2).all()


@on_two_ranks
def prefetches_one_ahead():
    for prefetch, most in ((True, 2), (False, 1)):
        model = FSDP(chain(), prefetch=prefetch)
        with watched(model) as (launched, whole):
            compute_gradients(model, ones())
        assert max(whole) == most and unsharded(model) == 0
        forward = [f"gather {layer}" for layer in range(5)]
        expected = "gather 4, gather 3, reduce 4, gather 2, reduce 3, gather 1, reduce 2, gather 0"
        expected += ", reduce 1"
        if not prefetch:
            expected = "gather 4, reduce 4, gather 3, reduce 3, gather 2, reduce 2, gather 1"
            expected += ", reduce 1, gather 0"
        assert launched == forward + f"{expected}, reduce 0".split(", "), launched


class Branches(nn.Module):
    """Every step may be told another way."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, way):
        for part in way:
            x = torch.tanh(self.parts[part](x))
        return x


@on_two_ranks
def takes_any_way_together():
    """Other units in another order than registered, in every step; and none at all."""
    model, twin = twins(Branches)
    with watched(model) as (launched, _):
        for way in [(0, 1, 2, 3), (3, 1, 0), (2,), (1, 2, 1), ()]:
            launched.clear()
            agree(model, twin, ones(), way)
            reduced = [launch for launch in launched if "reduce" in launch]
            assert reduced == 2 * ["reduce 3", "reduce 2", "reduce 1", "reduce 0"], way


@on_two_ranks
def takes_units_of_the_user():
    """Some modules, modules within modules; what is in none is in a unit of the whole."""
    for choose, expected in (
        (lambda net: [net[1], net[3]], 3),
        (lambda net: [net[0], net[0][1], net[2]], 4),
    ):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(*chain()) for _ in range(5)])
        twin = copy.deepcopy(net)
        model = FSDP(net, units=choose(net))
        agree(model, twin, ones())
        assert len(model.flats_of) == expected


class Adapted(nn.Linear):
    """LoRA: a frozen weight in use while the module's own children run; a norm without weights."""

    def __init__(self):
        super().__init__(6, 6, bias=False)
        self.before, self.after = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.norm = nn.LayerNorm(6, elementwise_affine=False)

    def forward(self, x):
        return self.after(self.before(self.norm(x))) + super().forward(x)


def two_adapted():
    net = nn.Sequential(Adapted(), Adapted())
    for part in net:
        part.weight.requires_grad_(False)
    return net


@on_two_ranks
def nests():
    model, twin = twins(two_adapted)
    model(ones())
    assert unsharded(model) == 0
    agree(model, twin, ones())
    assert model.module[0].weight.grad is None
    compute_gradients(FSDP(twin, compute_dtype=torch.bfloat16), ones())


@on_two_ranks
def runs_a_retained_graph_twice():
    """With a finish in between the gradients add up; when it is forgotten, all ranks raise.

    What was refused is not in the gradients of the next step.
    """
    model, twin = twins(chain)
    for _ in range(2):
        model.zero_grad()
        twin.zero_grad()
        loss, expected = model(ones()).square().mean(), twin(ones()).square().mean()
        for _ in range(2):
            loss.backward(retain_graph=True)
            model.finish_gradient_synchronization()
            expected.backward(retain_graph=True)
        gradients_agree(model, twin)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="backward.. ran twice: finish in between"):
            loss.backward()
        model.finish_gradient_synchronization()


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


@on_two_ranks
def goes_on_after_an_exception():
    """A step is given up, on all ranks: finish and zero_grad; the next one is clean."""
    for where in ("forward", "backward"):
        model, twin = twins(Fails)
        model.module.fail = where
        with pytest.raises(ArithmeticError):
            compute_gradients(model, ones())
        model.finish_gradient_synchronization()
        model.module.fail = ""
        agree(model, twin, ones())


@on_two_ranks
def computes_with_new_weights():
    """Those of before are not hidden by what was gathered: for backward, or in vain."""
    model, twin = twins(chain)
    loss = model(ones()).square().mean()
    with torch.no_grad():
        torch.testing.assert_close(model(ones()), twin(ones()))
    loss.backward()
    model.finish_gradient_synchronization()
    compute_gradients(twin, ones())
    gradients_agree(model, twin)
    model(ones())  # nobody follows it with a backward
    with torch.no_grad():
        for one in (model, twin):
            for parameter in one.parameters():
                parameter.mul_(2)
        torch.testing.assert_close(model(ones()), twin(ones()))
    torch.testing.assert_close(model(ones()), twin(ones()))


@on_two_ranks
def notices_a_step_before_backward():
    model = FSDP(chain())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first, second = model(ones()).square().mean(), model(ones()).square().mean()
    second.backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        first.backward()


@on_two_ranks
def is_freed():
    alive = []
    for _ in range(3):
        model = FSDP(chain())
        compute_gradients(model, ones())
        alive += [weakref.ref(model), *map(weakref.ref, model.flats)]
        del model
    gc.collect()
    assert not any(reference() for reference in alive)


class Positions(nn.Linear):
    """Returns a view of its weight, whose memory is given up then."""

    def forward(self, x):
        return self.weight[: len(x)]


class Leaks(nn.Linear):
    """Backward comes to its weight by another way than its output."""

    def forward(self, x):
        self.leak = {"y": super().forward(x.requires_grad_())}
        return x + 1


@on_two_ranks
def refuses_wrong_use():
    x = ones().detach()
    model = FSDP(chain())
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"call finish_gradient_synchronization\(\) after every"):
        model(x)
    with pytest.raises(RuntimeError, match=r"call finish_gradient_synchronization\(\) before clip"):
        clip_grad_norm(model, 1.0)
    model.finish_gradient_synchronization()
    with pytest.raises(ValueError, match="wrapped only once"):
        FSDP(nn.Sequential(model))
    with pytest.raises(ValueError, match="^0: max_norm"):
        FSDP(nn.Sequential(nn.Embedding(3, 4, max_norm=1.0)))
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"ranks 0 and 1: \['0.bias \(4,\).*'0.bias \(5,\)"):
        FSDP(nn.Sequential(nn.Linear(3, 4 + rank)))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        model = FSDP(nn.Sequential(Positions(6, 6)))
        with mode(), pytest.raises(RuntimeError, match=r"a view of it: return a clone\(\)"):
            model(x)
    model = FSDP(nn.Sequential(Leaks(6, 6)))
    model(x.float())
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        model.module[0].leak["y"].sum().backward()
    for change in (
        lambda module: module[0].requires_grad_(False),
        lambda module: module.float(),
        lambda module: module.append(nn.Linear(6, 6)),
    ):
        model = FSDP(chain())
        change(model.module)
        with pytest.raises(RuntimeError, match="frozen, unfrozen, replaced, moved or cast"):
            model(x)


@on_two_ranks
def saves_nothing_by_halves():
    """What would save, load or copy one rank's shards says what to do instead."""
    model = FSDP(Unusual())
    for part in (model, model.module, model.module.head):
        with pytest.raises(RuntimeError, match=r"gather_full_params\(\)"):
            part.state_dict()
    model = FSDP(chain())
    for copied in (model, model.module):
        for copying in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match="cannot be copied or pickled"):
                copying(copied)
    full = model.gather_full_params()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.module.load_state_dict(full)
    with pytest.raises(KeyError, match="0.weight"):
        model.load_full_params({})
    full["1.weight"] = full["1.weight"].view(4, 9)
    with pytest.raises(ValueError, match=r"1.weight has shape \(4, 9\), not \(6, 6\)"):
        model.load_full_params(full)


def two_layers():
    return nn.Sequential(nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Linear(4, 8, bias=False))


@on_two_ranks
def every_optimizer_is_right_or_refused():
    """Beside one process: those that work element by element; others end in an error."""
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)
    refused = set()
    for name in torch.optim.__all__:
        if name[0].islower() or name in ("Optimizer", "SparseAdam"):
            continue  # SparseAdam takes sparse gradients alone, and FSDP has none
        model, twin = twins(two_layers)
        make = getattr(torch.optim, name)
        optimizers = [make(one.parameters(), lr=0.01) for one in (model, twin)]
        try:
            for _ in range(3):
                for one, optimizer in zip((model, twin), optimizers, strict=True):
                    compute_gradients(one, x)
                    optimizer.step(*[lambda: 0.0] * (name == "LBFGS"))
        except RuntimeError as error:
            assert f"{name} needs whole weights" in str(error)
            refused.add(name)
        else:
            assert_same_weights(model, twin, 1e-12)
    assert refused == {"Adafactor", "LBFGS", "Muon"}
    torch.optim.Adafactor(twin.parameters()).step()  # of whole weights, of course


@on_two_ranks
def clips_what_there_is():
    """In float16 the squares overflow."""
    torch.manual_seed(0)
    module = nn.Linear(64, 64).half()
    twin = copy.deepcopy(module)
    model = FSDP(module)
    x = torch.ones(8, 64).half()
    for trained in (model, twin):
        (trained(x).sum() * 50).backward()
    model.finish_gradient_synchronization()
    expected = torch.stack([p.grad.double().norm() for p in twin.parameters()]).norm()
    norm = clip_grad_norm(model, 1.0)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-3, atol=0)
    assert norm.dtype == torch.float32 and model.module.weight.grad.abs().max() > 0


class Chooses(nn.Module):
    """One of two layers, of equal size or not, and one for all."""

    def __init__(self, sizes):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, size) for size in sizes)

    def forward(self, x, choice):
        x = self.first(x)
        return self.experts[choice](x) if choice is not None else x


def raises_and_ends(sizes, choices, expected):
    """In a process group of its own, which the ranks leave with a collective that never ends."""
    model = FSDP(Chooses(sizes).double())
    with pytest.raises(RuntimeError, match=expected):
        model(ones(), choices[dist.get_rank()]).square().mean().backward()
        model.finish_gradient_synchronization()


@pytest.mark.parametrize(
    "world_size, sizes, choices, expected",
    [
        (2, [6, 6], [0, 1], "'experts.[01]'. are gathered.*units="),
        (2, [6, 9], [0, 1], "'experts.[01]'. are gathered.*units="),
        (3, [6, 6], [0, 0, 1], "'experts.[01]'. are gathered.*units="),
        (2, [6, 6], [1, None], "('experts.1', 'first'|'first', 'experts.1'). are gathered"),
    ],
)
def test_ranks_that_use_other_units_get_an_error(world_size, sizes, choices, expected):
    """All of them, before gloo ends a process whose sizes differ; and nobody waits."""
    group = Ranks(world_size)  # is not in order afterwards: not one for other tests
    try:
        group.run(raises_and_ends, sizes, choices, expected, timeout=30)
    finally:
        group.end()


@on_two_ranks
def notices_a_rank_that_gathers_less():
    """It is at the finish, or gone on with other units, when another one still gathers."""
    model = FSDP(chain())
    agreement = model.agreement
    if dist.get_rank() == 0:
        agreement.announce(None)
        with pytest.raises(RuntimeError, match="'nothing more', '0'. are gathered"):
            agreement.unshard_first()
    else:
        flat = model.flats[0]
        with pytest.raises(RuntimeError, match="'nothing more', '0'. are gathered"):
            agreement.unshard([flat])
        flat.reshard()


@on_two_ranks
def calls_hooks_of_weights():
    """With this rank's part of the averaged gradient; and refuses hooks that nobody would call."""
    model, twin = twins(chain)
    seen = []
    for shard in model.parameters():
        shard.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    compute_gradients(model, ones())
    assert len(seen) == 5
    for gradient, shard in zip(seen, reversed(list(model.parameters())), strict=True):
        assert torch.equal(gradient, shard.grad)
    early = nn.Sequential(nn.Linear(6, 6)).double()
    early[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    early[0].weight.no_decay = True
    model = FSDP(early)
    compute_gradients(model, ones())
    assert seen[-1] is model.module[0].weight and model.module[0].weight.no_decay
    for which in ("weight", "bias"):
        hooked = nn.Sequential(nn.Linear(6, 6)).double()
        getattr(hooked[0], which).register_hook(print)
        with pytest.raises(RuntimeError, match=f"^0.{which}: only weights can have hooks"):
            FSDP(hooked)
        model = FSDP(nn.Sequential(nn.Linear(6, 6)).double())
        getattr(model.module[0], which).register_hook(print)
        with pytest.raises(RuntimeError, match=f"^0.{which}: only weights can have hooks"):
            model(ones())
    model = FSDP(nn.Sequential(nn.Linear(6, 6)).double())
    model.module[0].bias.register_post_accumulate_grad_hook(print)  # sees one rank's gradient
    with pytest.raises(RuntimeError, match="^0.bias: only weights can have hooks"):
        model(ones())


@on_two_ranks
def steps_within_a_hook():
    """An optimizer for each weight, stepped as soon as its gradient is averaged."""
    model, twin = twins(chain)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)

    def step(shard):
        torch.optim.SGD([shard], lr=0.1).step()
        shard.grad = None

    for shard in model.parameters():
        shard.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        compute_gradients(model, ones())
        compute_gradients(twin, ones())
        optimizer.step()
    assert_same_weights(model, twin, 1e-12)


@on_two_ranks
def torch_clips_as_in_one_process():
    """Its line that every script has, the norm alone, and one weight's, of all ranks' parts."""
    for most in (0.01, 100.0):
        model, twin = twins(Net)
        tokens = batch_of(0)[0]
        for one in (model, twin):
            one.zero_grad()
            loss_of(one, tokens).backward()
        model.finish_gradient_synchronization()
        for parameter in twin.parameters():
            parameter.grad = gradient_or_zeros(parameter)
        torch.testing.assert_close(
            model.module.up.weight.grad.norm(), twin.up.weight.grad.norm(), rtol=1e-6, atol=0
        )
        layers = model.module.up, twin.up
        norms = [torch._foreach_norm([up.weight.grad, up.bias.grad], 2.0) for up in layers]
        torch.testing.assert_close(*norms, rtol=1e-12, atol=0)  # on a GPU it takes this one
        norms = [nn.utils.clip_grad_norm_(one.parameters(), most) for one in (model, twin)]
        torch.testing.assert_close(*norms, rtol=1e-12, atol=0)
        gradients_agree(model, twin)
        for parameter in model.parameters():
            assert type(parameter.grad.clone()) is torch.Tensor  # states of optimizers are, too
    for order in (1, torch.inf):
        with pytest.raises(RuntimeError, match="of a sharded gradient there is only the 2-norm"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, order)


@on_two_ranks
def clips_under_another_default_dtype():
    """The squares are added up in float32 there, too."""
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16())
    compute_gradients(model, torch.ones(3, 64).bfloat16())
    squares = [parameter.grad.double().square().sum() for parameter in model.parameters()]
    expected = sum(squares).as_subclass(torch.Tensor)
    dist.all_reduce(expected)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        norm = clip_grad_norm(model, 1e9)
    finally:
        torch.set_default_dtype(before)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), expected.sqrt(), rtol=1e-5, atol=0)


@dataclass
class Box:
    h: torch.Tensor


class Record(dict):
    """As the outputs of some libraries."""


BOXES = {
    "dataclass": Box,
    "nested": lambda h: [{"a": Box(h)}, 1, None],
    "namespace": lambda h: SimpleNamespace(h=h),
    "subclass of dict": lambda h: Record(h=h),
    "mapping": lambda h: UserDict(h=h),
}


class Boxed(nn.Module):
    """Layers that hand each other a box."""

    def __init__(self, box):
        super().__init__()
        self.layer, self.box = nn.Linear(6, 6), box

    def forward(self, value):
        return BOXES[self.box](torch.tanh(self.layer(fsdp.with_gradient(value)[0])))


class Opaque:
    __slots__ = ("h",)

    def __init__(self, h):
        self.h = h


@on_two_ranks
def finds_tensors_in_what_modules_return():
    for box in BOXES:
        model, twin = twins(lambda box=box: nn.Sequential(*[Boxed(box) for _ in range(3)]))
        for one in (model, twin):
            one.zero_grad()
            fsdp.with_gradient(one(ones()))[0].square().mean().backward()
        model.finish_gradient_synchronization()
        gradients_agree(model, twin)
    BOXES["opaque"] = Opaque
    model = FSDP(nn.Sequential(Boxed("opaque")).double())
    with pytest.raises(RuntimeError, match="^0 returned {'Opaque'}, in which FSDP sees no tensor"):
        model(ones())
    BOXES.pop("opaque")


class Keeps(nn.Module):
    """A loss on what a block keeps, beside what it returns."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)

    def forward(self, x):
        y = self.layer(x).tanh()
        self.kept = self.head(y)
        return y + self.head(y)


@on_two_ranks
def a_loss_may_use_what_modules_keep():
    for only in (False, True):
        model, twin = twins(lambda: nn.Sequential(nn.ModuleList([Keeps()])[0], Keeps()))
        for one in (model, twin):
            one.zero_grad()
            loss = one(ones()).square().mean()
            kept = sum(part.kept.square().mean() for part in getattr(one, "module", one))
            (kept if only else kept + loss).backward()
        model.finish_gradient_synchronization()
        gradients_agree(model, twin)


class Generates(nn.Module):
    """Reads a weight of its own, and one of a child, beside forward."""

    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(11, 6), nn.Parameter(torch.randn(5, 6))
        self.head = nn.Linear(6, 6)

    def forward(self, tokens):
        return self.head(self.embedding(tokens) + self.positions)

    def generate(self, tokens):
        return Generates.forward(self, tokens) @ self.embedding.weight.T


@on_two_ranks
def has_whole_weights_for_what_is_no_forward():
    model, twin = twins(Generates)
    tokens = batch_of(0)[0]
    with pytest.raises(RuntimeError):
        model.module.generate(tokens)
    for _ in range(2):
        with model.whole():
            torch.testing.assert_close(model.module.generate(tokens), twin.generate(tokens))
            assert unsharded(model) == len(model.flats)
        assert unsharded(model) == 0
        agree(model, twin, tokens)


def reentrant_twice():
    layer = nn.Linear(6, 6)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    return Twice()


@on_two_ranks
def says_why_a_gradient_comes_twice():
    model = FSDP(reentrant_twice().double())
    with pytest.raises(RuntimeError, match="(?s)backward.. ran twice.*two re-entrant.*in chunks"):
        compute_gradients(model, ones())


@on_two_ranks
def trains_conjugated_weights_and_expanded_buffers():
    class Conjugated(nn.Linear):
        def forward(self, x):
            return (x.to(self.weight.dtype) @ self.weight.mH).abs()

    model, twin = twins(lambda: nn.Sequential(Conjugated(6, 6, bias=False)).to(torch.complex64))
    for one in (model, twin):
        compute_gradients(one, torch.ones(2, 6))
    weight = model.gather_full_params()["0.weight"]
    assert weight.is_complex() and model.module[0].weight.grad is not None
    net = nn.Linear(6, 6)
    net.register_buffer("mask", torch.eye(3).add(dist.get_rank()).expand(2, 3, 3))
    net.register_buffer("gaps", torch.zeros(4, 4).add(dist.get_rank())[:, ::2])
    model = FSDP(net)
    assert torch.equal(net.mask, torch.eye(3).expand(2, 3, 3)) and not net.gaps.any()


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


@on_two_ranks
def casts_only_what_it_should():
    for compute_dtype in (None, torch.bfloat16):
        losses, cache = [], {}
        y = FSDP(Notes(), compute_dtype)(torch.ones(2, 8), losses, cache=cache)
        assert len(losses) == 1 and cache["y"] is y
    model = FSDP(Integers(), torch.bfloat16)
    for _ in range(2):
        compute_gradients(model, torch.ones(1))


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_promise(ranks, promise):
    ranks(2).run(promise)


def tied():
    net = Net()
    net.head.weight = net.embedding.weight
    return net


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
    assert unsharded(model) == 0
    twin = tied()
    twin.load_state_dict(full)  # it is an ordinary state_dict
    assert_same_weights(model, twin, 0)
    tokens = batch_of(1)[1]
    torch.testing.assert_close(model(tokens), twin(tokens))


def test_full_weights_at_another_world_size(ranks, tmp_path):
    ranks(2).run(saves, tmp_path / "full.pt")
    for world_size in (1, 2, 3):
        ranks(world_size).run(loads, tmp_path / "full.pt")


def in_a_subgroup():
    group = dist.new_group([2, 1])
    if dist.get_rank() > 0:
        model = FSDP(chain(), process_group=group)
        compute_gradients(model, ones())
        clip_grad_norm(model, 1.0)
        model.load_full_params(model.gather_full_params())
        assert next(model.parameters()).shape == (1, 18)
    dist.barrier()


def test_a_process_group_of_some_ranks(ranks):
    ranks(3).run(in_a_subgroup)


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=FULL) for n in (3, 4))])
def test_formula_of_the_memory(forked, tmp_path, world_size):
    """Within 5 % of what real ranks keep, part by part, and of what they hold at most.

    What is in flight alone is not: gloo is sometimes done with its copy before the gradients come.
    """
    words = "--size mini --device cpu --no-verify --no-baseline --no-plot --steps 1 --warmup 0"
    status, output = forked(world_size, SCRIPT, *words.split(), "--json", tmp_path / "json")
    assert status == 0, output
    [all_ranks] = harness.read_json(tmp_path / "json", FOLDER)["memory_bytes"].values()
    expected = measure.by_formula("mini", world_size)["FSDP"]
    for parts in all_ranks:
        pairs = [*zip(parts[:3], expected[:3], strict=True), (sum(parts), sum(expected))]
        for held, by_formula in pairs:
            assert 0.95 < held / by_formula < 1.05, (parts, expected)


def test_accounting_needs_no_ranks(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--accounting", "8,64,1024", "--size", "10b"])
    main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "FSDP" in line]
    held = [float(row[-1].replace(",", "")) for row in rows]
    assert len(rows) == 3 and held == sorted(held, reverse=True)


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
    starts = "#_sharded", "verify: epoch", "verify: passed", "MB", "in flight", "Percentiles"
    missing = [line for line in recorded if line.startswith(starts) and line not in masked(output)]
    assert not missing, missing


@pytest.mark.full
def test_script(script, tmp_path):
    words = [*QUICK, *harness.files_in(tmp_path), "--plot", tmp_path / "x.png"]
    status, output = script(torchrun(2, SCRIPT, *words)).wait()
    assert status == 0, output
    result = harness.read_json(tmp_path / "json", "06_sharded_optimizer/fsdp")
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
    words = f"--mine {SCRIPT}:FSDP --no-baseline --no-plot".split()
    status, output = script(torchrun(2, SCRIPT, *QUICK, *words)).wait()
    assert status == 0 and output.count("verify: passed") == 2 and "FSDP (mine)" in output, output


def test_save_needs_verify(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--save", "x", "--no-verify"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and "argument --save: not with --no-v" in capsys.readouterr().err


def test_file_alone(tmp_path):
    harness.check_script_alone(SCRIPT, tmp_path)


@pytest.mark.cuda
@pytest.mark.parametrize("world_size", [1, 2])
def test_on_a_gpu(script, world_size):
    command = torchrun(world_size, SCRIPT, "--device", "cuda", "--steps", 1)
    status, output = script(command).wait(300)
    assert status == 0, output
    assert "verify: passed" in output
