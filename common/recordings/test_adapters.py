"""The adapter lines of the page for courses are executed: two ranks train through them."""

import re
import sys
from functools import partial

import pytest
from torch import nn

from common.check import checks_of_fsdp, checks_of_optimizers, checks_of_wrappers
from common.testing.harness import ROOT

WRAPPER = "from overlap_ddp import OverlapDDP as Wrapper"  # as the page has it
LADDER = {
    "02_naive_ddp": "from naive_ddp import NaiveDDP as Wrapper",
    "03_flat_ddp": "from flat_ddp import FlatDDP as Wrapper",
    "04_overlap_ddp": WRAPPER,
    "05_bucketed": "from bucketed import BucketedDDP as Wrapper",
}
OTHERS = {
    "05_bucketed": ["ddp_bucketed"],
    "06_sharded_optimizer": ["sharded_optimizer"],
    "06_sharded_optimizer/fsdp": ["fsdp"],
}
PAGE = (ROOT / "common" / "docs" / "courses.md").read_text()
OF_WRAPPERS, *BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("stage", LADDER)
def test_adapter_lines_of_wrappers(ranks, stage):
    assert WRAPPER in OF_WRAPPERS
    code = OF_WRAPPERS.replace(WRAPPER, LADDER[stage])
    names = ["ddp_individual_parameters", "ddp"]  # of the course in 2025 and in 2026
    ranks(2).run(train_through_adapters, code, names, str(ROOT / stage))


@pytest.mark.parametrize("stage, code", list(zip(OTHERS, BLOCKS, strict=True)), ids=list(OTHERS))
def test_adapter_lines(ranks, stage, code):
    ranks(2).run(train_through_adapters, code, OTHERS[stage], str(ROOT / stage))


def train_through_adapters(code: str, names: list[str], folder: str) -> None:
    """On a rank; a check raises what it has found."""
    sys.path.insert(0, folder)
    adapters = {}
    exec(compile(code, "adapter lines", "exec"), adapters)
    for name in names:
        get = adapters[f"get_{name}"]
        if name == "sharded_optimizer":
            checks_of_optimizers.steps_like_adamw(get)
            checks_of_optimizers.shares_the_state_out(get)
            continue
        mine = partial(Adapted, adapters, name)
        checks_of_wrappers.trains_with_sgd(mine)
        checks_of_wrappers.reduces_tied_weights_once(mine)
        if name == "fsdp":
            checks_of_fsdp.gathers_full_parameters(mine)
            checks_of_fsdp.computes_in_another_dtype(get)


class Adapted(nn.Module):
    """A module in what the adapters of this name make of it."""

    def __init__(self, adapters: dict, name: str, module: nn.Module):
        super().__init__()
        self.after_backward = adapters[f"{name}_on_after_backward"]
        self.batch_start = adapters.get(f"{name}_on_train_batch_start", lambda *_: None)
        options = {"bucket_size_mb": 0.0005} if name == "ddp_bucketed" else {}
        self.model = adapters[f"get_{name}"](module, **options)
        if name == "fsdp":
            gather = adapters["fsdp_gather_full_params"]
            self.gather_full_params = partial(gather, self.model)

    def forward(self, inputs):
        self.batch_start(self.model, None)
        return self.model(inputs)

    def finish_gradient_synchronization(self):
        self.after_backward(self.model, None)
