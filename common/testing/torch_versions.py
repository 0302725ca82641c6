"""Run `make test` with several versions of torch, each in a virtual environment of its own.

    make test-torch                                        all versions of the table in README.md
    make test-torch TORCH="2.9.0 2.15.0" ARGS="-k fsdp"    these, with arguments for pytest
    make test-torch TORCH=oldest                           the oldest that requirements.txt allows

The environments lie outside of the checkout and are kept: the first run of a version takes minutes
and 5.5 GB, `make clean-torch` removes them all. Needs Python alone.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ddp-rung-by-rung")


def oldest() -> str:
    """The oldest version of torch that requirements.txt allows."""
    requirements = (ROOT / "requirements.txt").read_text()
    return re.search(r"^torch>=(\S+)$", requirements, re.MULTILINE)[1]


def tested() -> list[str]:
    """The versions in the table of common/README.md, from the oldest on."""
    readme = (ROOT / "common" / "README.md").read_text()
    return re.findall(r"^\| (\d+\.\d+\.\d+) \|", readme, re.MULTILINE)


def install(version: str) -> Path:
    """The Python that has this version; ends the run if pip can't or won't install it."""
    number = "{}.{}".format(*sys.version_info)
    folder = CACHE / f"torch-{version}-python{number}"
    python = folder / "bin" / "python"
    print(f"\ntorch {version}: {folder}", flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    # A constraint of ours, in place of one that this machine may have; === allows no other build.
    constraint = folder / "constraint.txt"
    constraint.write_text(f"torch==={version}\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    requirements = ["-r", ROOT / "requirements-dev.txt"]
    environment = os.environ | {"PIP_CONSTRAINT": str(constraint)}
    if subprocess.run([*pip, *requirements], env=environment).returncode:
        sys.exit(f"error: pip cannot install torch {version} for Python {number}")
    ask = "import importlib.metadata; print(importlib.metadata.version('torch'))"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()
    if found != version:
        sys.exit(f"error: torch {version} was asked for, and {found} is what runs")
    return python


def test(version: str, arguments: str) -> str:
    """Run `make test` with this version; returns pytest's last line, such as "5 passed in 3 s"."""
    python = install(version)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "test", f"PYTHON={python}", f"ARGS={arguments}"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    summary = "it did not come to an end"
    with subprocess.Popen(command, cwd=ROOT, env=environment, **options) as run:
        for line in run.stdout:
            print(line, end="", flush=True)
            if re.search(r"\d+ (passed|failed|skipped|errors?|deselected)\b.* in [\d.]+s", line):
                summary = line.strip(" =\n")
    return summary if run.returncode == 0 else f"FAILED: {summary}"


def main() -> None:
    arguments = sys.argv[1]
    versions = sys.argv[2:] or tested()
    results = {}
    for version in versions:
        if version == "oldest":
            version = oldest()
        if not re.fullmatch(r"\d+\.\d+\.\d+(\+\w+)?", version):
            print(f"error: TORCH='{version}' is not a version such as 2.12.1", file=sys.stderr)
            sys.exit(2)
        results[version] = test(version, arguments)
    print()
    for version, summary in results.items():
        print(f"torch {version}: {summary}")
    sys.exit(any("FAILED" in summary for summary in results.values()))


if __name__ == "__main__":
    main()
