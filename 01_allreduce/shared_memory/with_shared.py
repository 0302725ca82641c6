r"""01: run a script in which the backend `shared` is known, and which need not know it itself.

    make 05_bucketed BACKEND=shared
    torchrun --standalone --nproc-per-node 2 01_allreduce/shared_memory/with_shared.py \
        05_bucketed/bucketed.py --backend shared
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import backend  # noqa: E402, F401 (registers it)

if __name__ == "__main__":
    if not Path("".join(sys.argv[1:2])).is_file():
        print("with_shared.py: error: name a script to run, and its flags", file=sys.stderr)
        sys.exit(2)
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
