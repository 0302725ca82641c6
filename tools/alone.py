"""python SCRIPT, for a script that starts its processes itself: Ctrl-C while it imports is short.

    python -m tools.alone 08_ddp_rpc/ddp_rpc.py --help

Python would answer with a traceback out of torch, whose import takes seconds.
"""

import runpy
import signal
import sys
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends without a word

from common import setup  # noqa: E402


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    setup.forget_launcher()  # 07 would take itself for a rank
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
