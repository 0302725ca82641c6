"""The ladder, once: stages 02 to 05, what each sends and when, and its color in pictures."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import nn

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ["01_allreduce", "02_naive_ddp", "03_flat_ddp", "04_overlap_ddp", "05_bucketed"]
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

from bucketed import BucketedDDP, fill_buckets, train_step  # noqa: F401
from flat_ddp import FlatDDP
from naive_ddp import NaiveDDP
from overlap_ddp import OverlapDDP
from pictures import COLORS, save_movie  # noqa: F401

WHEN_READY, AFTER_BACKWARD = "when ready", "after backward"  # when calls are launched
ONE_BY_ONE = "one by one"  # after backward, each when the call before has arrived


class OverlapAfterBackward(OverlapDDP):
    """The calls of 04, all launched when backward is over."""

    def _launch_ready(self):
        if not self.in_step:  # but in the finish
            super()._launch_ready()


class BucketedAfterBackward(BucketedDDP):
    """The calls of 05, all launched when backward is over; buckets are filled during backward."""

    def _launch_ready(self):
        if not self.in_step:
            super()._launch_ready()


class Row(NamedTuple):
    """A wrapper, and when it sends what."""

    wrap: Callable[[nn.Module], nn.Module]
    bucket_size_mb: float | None  # of a call; None: one call for all; 0: one for each gradient
    launches: str


class Stage(NamedTuple):
    """One of stages 02 to 05. Its control makes the same calls, and all of them after backward."""

    folder: str
    wrapper: type
    label: str  # in pictures
    color: str
    launches: str
    control: type | None = None

    @property
    def name(self) -> str:
        """Return the name of its row in tables and in JSON."""
        return self.wrapper.__name__


def control_of(stage: Stage) -> str:
    """Return the name of its control's row."""
    return f"{stage.name}, {AFTER_BACKWARD}"


STAGES = [
    Stage("02_naive_ddp", NaiveDDP, "02 naive", "#E69F00", ONE_BY_ONE),
    Stage("03_flat_ddp", FlatDDP, "03 flat", "#009E73", AFTER_BACKWARD),
    Stage("04_overlap_ddp", OverlapDDP, "04 overlap", "#CC79A7", WHEN_READY, OverlapAfterBackward),
    Stage("05_bucketed", BucketedDDP, "05 buckets", "#332288", WHEN_READY, BucketedAfterBackward),
]
LABELS = {stage.name: stage.label for stage in STAGES}  # other rows have their names in pictures
for stage in STAGES:
    LABELS[control_of(stage)] = f"{stage.label[:2]}, {AFTER_BACKWARD}"


def rows_of_stages(size: float | None, controls: bool = True) -> dict[str, Row]:
    """Return stages 02 to 05 by the names of their rows, each after its control.

    `size` is that of 05's buckets, in MB.
    """
    sizes = {NaiveDDP: 0, FlatDDP: None, OverlapDDP: 0, BucketedDDP: size}
    found = {}
    for stage in STAGES:
        bucket_size = sizes[stage.wrapper]
        options = {"bucket_size_mb": size} if stage.wrapper is BucketedDDP else {}
        if controls and stage.control:
            control = partial(stage.control, **options)
            found[control_of(stage)] = Row(control, bucket_size, AFTER_BACKWARD)
        found[stage.name] = Row(partial(stage.wrapper, **options), bucket_size, stage.launches)
    return found
