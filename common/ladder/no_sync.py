"""One training step of stages 02 to 05 without any synchronization, for the timeline's first row.

    torchrun --standalone --nproc-per-node 2 common/ladder/no_sync.py --no-verify --no-baseline \
        --steps 1 --trace results/timeline_no_sync.json

The stages trace their own wrapper only. This is stage 02 with a wrapper that does nothing.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "02_naive_ddp")]

import naive_ddp  # noqa: E402


def no_sync(module):
    """The module as it is: every rank trains alone."""
    return module


if __name__ == "__main__":
    naive_ddp.WRAPPER = no_sync
    naive_ddp.main()
