"""The Makefile, mostly by what `make -n` would run: names, numbers of ranks, other variables."""

import sys

import pytest

from tools.harness import QUICK, ROOT, make, would_make


@pytest.mark.parametrize("name", ["05_bucketed", "05_bucketed/", "05"])
def test_a_stage_has_short_names(name):
    assert "--nproc-per-node 3 05_bucketed/bucketed.py" in would_make(name, "NPROC=3")


def test_every_lesson_is_run_and_nproc_reaches_it():
    """As torchrun's argument or, where a script starts its ranks itself, as its flag."""
    by_itself = {"01_allreduce", "01_allreduce/shared_memory", "08_ddp_rpc"}
    folders = [path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("0?_*/**/README.md")]
    plain, with_nproc = would_make(*folders), would_make(*folders, "NPROC=3")
    _, helped = make()
    for folder in folders:
        script = f"{folder}/{folder.split('/')[-1].removeprefix(folder[:3])}.py"
        if folder in by_itself:
            assert f"launch.alone {script} " in plain and f"{script} --" not in plain, script
            assert f"launch.alone {script} --nproc 3" in with_nproc, script
        else:
            assert f"--standalone --nproc-per-node 2 {script}" in plain, script
            assert f"--standalone --nproc-per-node 3 {script}" in with_nproc, script
        assert f"make {folder} " in helped, folder


def test_an_interpreter_without_torch_is_one_line(tmp_path):
    python = tmp_path / "my python"  # a space, too
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    status, output = make("05_bucketed", f"PYTHON={python}")
    assert status == 2 and output.count("error: ") == 1, output
    assert "cannot import torch: pip install -r requirements.txt" in output


@pytest.mark.parametrize(
    "target, word, said",
    [
        ("05_bucketed", "NPROC=0", "NPROC='0' is not a whole number of at least 1"),
        ("05_bucketed", "NPROC=two", "NPROC='two' is not a whole number of at least 1"),
        ("05_bucketed", "NNODES=2", "NNODES=2 needs NODE_RANK=0, 1, … and MASTER_ADDR="),
        ("hosts", "NPROC=2", "NPROC='2': make hosts starts one rank on each of two hosts"),
    ],
)
def test_wrong_numbers_are_one_line(target, word, said):
    status, output = make(target, word, f"PYTHON={sys.executable}")
    assert status == 2 and said in output and len(output.splitlines()) == 1, output


def test_variables_are_handed_on():
    """To all that run a script; what that does not take it refuses itself."""
    command = would_make("check", "MINE=my ddp.py:My", "KIND=fsdp", "NPROC=3", "NETWORK=x")
    assert "check/check.py 'my ddp.py:My' --kind fsdp --nproc 3 --network 'x'" in command
    given = "NETWORK=1gbit,1ms", "BACKEND=gloo", "MINE=my ddp.py:My", "ARGS=--steps 3"
    for target in ("05", "compare", "timeline", "07_resnet_ddp", "01_allreduce", "hosts"):
        command = would_make(target, *given)
        flags = "--mine 'my ddp.py:My' --backend gloo --network '1gbit,1ms' --steps 3"
        assert f".py {flags}\n" in command, target
    assert "'1gbit' '0.2ms' 05_bucketed/compare/compare.py" in would_make("hosts", "RATE=")
    assert "'1gbit' '5ms' my.py" in would_make("hosts", "SCRIPT=my.py", "DELAY=5ms")


def test_the_very_command_is_shown():
    _, output = make("05_bucketed", f"PYTHON={sys.executable}", "ARGS=--size huge")
    shown = f'"{sys.executable}" -m tools.torchrun --standalone --nproc-per-node 2'
    assert output.startswith(f"{shown} 05_bucketed/bucketed.py --size huge\n"), output
    _, output = make("check", f"PYTHON={sys.executable}", "NETWORK=1gbit,1ms", "MINE=a.py:A")
    assert output.startswith(f'"{sys.executable}" -m tools.alone tools/check/check.py ')
    assert "error: unrecognized arguments: --network 1gbit,1ms" in output, output


STAGE = " ".join([*QUICK, "--no-verify", "--no-baseline", "--device cpu"])


def test_a_stage_runs(script):
    """What a reader types; the others have such runs, or torchrun's, among their own tests."""
    words = [f"PYTHON={sys.executable}", "NPROC=1", f"ARGS={STAGE}"]
    command = ["make", "-C", ROOT, "05_bucketed", *words]
    status, output = script(command).wait()
    assert status == 0 and "Percentiles over all" in output, output


@pytest.mark.parametrize(
    "words, said",
    [
        (["check", "MINE=tools/check/mistakes.py:None_"], "has no class or function None_"),
        (["01_allreduce", "ARGS=--sizes-mb 1 --nproc 2 --steps 2 --no-plot"], "model: t(S)"),
    ],
)
def test_what_a_launcher_has_left_in_the_shell_changes_nothing(monkeypatch, words, said):
    left = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "MASTER_ADDR": "localhost"}
    for name, value in {**left, "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    status, output = make(f"PYTHON={sys.executable}", *words)
    assert said in output and (status == 0) == (words[0] != "check"), output
