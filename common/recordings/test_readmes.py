"""The READMEs: their figures, adapter lines, lengths, links and headings, page by page."""

import ast
import copy
import itertools
import os
import re
import subprocess
import sys
import textwrap
import urllib.parse
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.recordings import figures
from common.testing.harness import ROOT

PAGES = [str(path.relative_to(ROOT)) for path in figures.pages()]
STAGE_PAGES = [name for name in PAGES if re.match("0[1-8]_", name)]


def page(folder: Path, text: str, **files: str) -> Path:
    """A README in a folder of its own, with recordings beside it."""
    for name, content in files.items():
        (folder / f"reference_output_{name}.txt").write_text(textwrap.dedent(content))
    path = folder / "README.md"
    path.write_text(textwrap.dedent(text))
    return path


# Figures


@pytest.mark.parametrize("name", PAGES)
def test_figures(name):
    wrong = figures.wrong_figures(ROOT / name)
    assert not wrong, "\n" + "\n".join(wrong)


RUN = """\
    step, ms      p50  exposed    share  calls
    OverlapDDP  482.1     34.6    7.2 %     27
    torch DDP  1468.1    -51.4  +11.0 %      3
    """
TABLE = """\
    <!-- figures: reference_output_x.txt -->

    | step of 2 models, 25.5 MB | p50 | and the rest |
    |---|---|---|
    | 04, 25.5 MB | {} |
    """


@pytest.mark.parametrize(
    "cells",
    [
        "482.1 ms | 34.6 and **7.2 %**",
        "482 of 2000 ms | 35–7 %, 27 calls",  # no decimals: 482, 2000 and so on are figures
        "1,468 | −51.4 ms, [11.0 %](x.html)",
        "1,468.1 | -51 `1.5` 3",
        "35 × | 3.5 %",
        "34.6 | 482.1",
        "482.2 | ",
        "27 calls | 34 %",
    ],
)
def test_a_figure_of_a_table_stands_in_the_recording(cells, tmp_path):
    wrong = figures.wrong_figures(page(tmp_path, TABLE.format(cells), x=RUN))
    right = {"482.1 ms | 34.6 and **7.2 %**", "1,468 | −51.4 ms, [11.0 %](x.html)"}
    right |= {"1,468.1 | -51 `1.5` 3"}
    assert (wrong == []) == (cells in right), wrong
    assert all(one.startswith("README.md:5: ") and "reference_output_x.txt" in one for one in wrong)


def test_the_message_names_the_figure_and_the_nearest_line(tmp_path):
    wrong = figures.wrong_figures(page(tmp_path, TABLE.format("482.1 | 34.7, 7.2"), x=RUN))
    assert wrong == [
        "README.md:5: 34.7: in no line of reference_output_x.txt; "
        "nearest: OverlapDDP 482.1 34.6 7.2 % 27"
    ]


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("| a |\n|---|\n| 1.5 |\n", "README.md:3: 1.5: no marker"),
        ("- x\n\n  | a |\n  |---|\n  | b 1.5 |\n", "README.md:5: 1.5: no marker"),
        ("| a |\n|---|\n| 15 and `1.5` |\n", ""),
        ("```\n| a |\n|---|\n| 1.5 |\n```\n", ""),
        ("<!-- figures: none -->\n| a |\n|---|\n| 1.5 |\n", ""),
        ("<!-- figures: none -->\n\nText.\n\n| a |\n|---|\n| 15 |\n", "README.md:1: a marker"),
        ("<!-- figures: y.txt -->\n| a |\n|---|\n| 1.5 |\n", "README.md:2: the marker names 'y.t"),
        ("| a |\n|---|\n| [34.6 ms](reference_output_x.txt) |\n", ""),
        ("| a |\n|---|\n| [34.5 ms](reference_output_x.txt) |\n", "README.md:3: 34.5: not in ref"),
        ("Text [3](reference_output_x.txt), [4](reference_output_x.txt).\n", "README.md:1: 4: not"),
        ("## Result\n\nIt is 34.6.\n", "README.md:3: 34.6: not in reference_output.txt or a"),
        ("## Result\n\nIt [is](reference_output_x.txt) 34.6, 35.\n", ""),
        ("## Result\n\nIt [is](reference_output_x.txt) 34.5, 35.\n", "README.md:3: 34.5: not in"),
        (
            "## Result\n\n34.6\n\n<!-- figures: reference_output_x.txt -->\n| a | b |\n|---|---|\n",
            "",
        ),
        ("## Result\n\n`1.5`\n\n```\n1.5\n```\n\n<details>\n1.5\n</details>\n35 1,500\n", ""),
        ("## Result\n\n### More\n\n2.15.0, 999.5 ms\n", "README.md:5: 999.5: not in reference_out"),
        ("## Result\n\nWith `make\nx 9.9` 99.9 and `b`\n", "README.md:4: 99.9: not in reference"),
        ("## Run it\n\n1.5\n", ""),
        ("## The rungs\n\n34.6, 7.7: [it](reference_output_x.txt)\n", "README.md:3: 7.7: not in r"),
    ],
)
def test_what_needs_a_marker_or_a_recording(text, complaint, tmp_path):
    wrong = figures.wrong_figures(page(tmp_path, text, x=RUN))
    assert len(wrong) == bool(complaint), wrong
    assert "".join(wrong).startswith(complaint)


@pytest.mark.parametrize(
    "row, is_right",
    [
        ("| **FSDP** | 0.65 | 584 |", True),  # of these three lines, not of "FSDP, no prefetch"
        ("| FSDP | 0.72 | 584.4 |", False),
        ("| `FSDP, no prefetch` | 0.764 |", True),
        ("| prefetch | 0.764 |", True),
        ("| DDP | 0.764 |", False),
    ],
)
def test_medians(row, is_right, tmp_path):
    runs = """\
        FSDP, no prefetch  708.9  0.764
        FSDP               670.3  0.722
        FSDP, no prefetch  662.8  0.735
        FSDP               584.4  0.648
        FSDP, no prefetch  664.6  0.766
        FSDP               558.0  0.643
        """
    text = f"<!-- figures: median of reference_output_x.txt -->\n| | a |\n|---|---|\n{row}\n"
    wrong = figures.wrong_figures(page(tmp_path, text, x=runs))
    assert (wrong == []) == is_right, wrong


def test_the_command_prints_what_is_wrong(tmp_path, monkeypatch, capsys):
    path = page(tmp_path, TABLE.format("482.1 | 34.7"), x=RUN)
    monkeypatch.setattr(figures, "pages", lambda: [path])
    assert figures.main() == 1
    assert "34.7: in no line of reference_output_x.txt" in capsys.readouterr().out
    page(tmp_path, TABLE.format("482.1 | 34.6"))
    assert figures.main() == 0
    assert capsys.readouterr().out.endswith(": no places\n")


def test_make_reference_ends_with_it():
    environment = {key: value for key, value in os.environ.items() if "MAKE" not in key}
    words = ["-n", "-C", ROOT, "reference", "REFERENCES=", "ARGS=", f"PYTHON={sys.executable}"]
    run = subprocess.run(["make", *words], env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "-m common.recordings.figures" in run.stdout, run.stderr


# Adapter lines

SIGNATURES = {
    "get_ddp_individual_parameters": ["module"],
    "ddp_individual_parameters_on_after_backward": ["ddp_model", "optimizer"],
    "get_ddp_bucketed": ["module", "bucket_size_mb"],
    "ddp_bucketed_on_after_backward": ["ddp_model", "optimizer"],
    "ddp_bucketed_on_train_batch_start": ["ddp_model", "optimizer"],
    "get_ddp": ["module"],
    "ddp_on_after_backward": ["ddp_model", "optimizer"],
    "get_sharded_optimizer": ["params", "optimizer_cls", "kwargs"],
    "get_fsdp": ["module", "compute_dtype"],
    "fsdp_on_after_backward": ["fsdp_model", "optimizer"],
    "fsdp_gather_full_params": ["fsdp_model"],
}
EDITION_2025 = ["get_ddp_individual_parameters", "ddp_individual_parameters_on_after_backward"]
EDITION_2026 = ["get_ddp", "ddp_on_after_backward"]
ADAPTERS = {
    "02_naive_ddp": EDITION_2025 + EDITION_2026,
    "03_flat_ddp": EDITION_2025 + EDITION_2026,
    "04_overlap_ddp": EDITION_2025 + EDITION_2026,
    "05_bucketed": [name for name in SIGNATURES if "bucketed" in name] + EDITION_2026,
    "06_sharded_optimizer": [
        name for name in SIGNATURES if "fsdp" in name or name == "get_sharded_optimizer"
    ],
}


def adapter_lines(text: str) -> str:
    """The python blocks of `## For CS336`, together."""
    blocks = []
    for line in figures.parse(text):
        if line.kind == "code" and line.section == "For CS336":
            if figures.FENCE.match(line.text):
                is_python = line.text.strip() == "```python"
            elif is_python:
                blocks.append(line.text)
    return "\n".join(blocks) + "\n"


def check_adapters(ranks, code: str, folder: Path, names: list[str]) -> None:
    """They define these names, with the course's arguments, and two ranks train through them."""
    tree = ast.parse(code)
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert sorted(defined) == sorted(names)
    for name, node in defined.items():
        arguments = [one.arg for one in [*node.args.args, node.args.kwarg] if one]
        assert arguments == SIGNATURES[name], name
    ranks(2).run(trains_through_adapters, code, str(folder), names)


@pytest.mark.parametrize("stage", ADAPTERS)
def test_adapter_lines(ranks, stage):
    code = adapter_lines((ROOT / stage / "README.md").read_text())
    check_adapters(ranks, code, ROOT / stage, ADAPTERS[stage])


def trains_through_adapters(code: str, folder: str, names: list[str]) -> None:
    imported = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    sys.path.insert(0, folder)
    adapters = {}
    exec(compile(code, "adapter lines", "exec"), adapters)
    own = imported - {"torch"} - set(sys.stdlib_module_names)
    assert own, "nothing of the stage is imported"
    for name in own:
        assert Path(sys.modules[name].__file__).parent == Path(folder), name
    getters = {name: adapters[name] for name in names if name.startswith("get_")}
    assert getters
    for name, getter in getters.items():
        if name == "get_sharded_optimizer":
            trains_with_a_sharded_optimizer(getter)
        elif name == "get_fsdp":
            gather = adapters["fsdp_gather_full_params"]
            trains_sharded(getter, adapters["fsdp_on_after_backward"], gather)
            computes_in_bfloat16(getter, adapters["fsdp_on_after_backward"], gather)
        elif name == "get_ddp_bucketed":
            after_backward = adapters["ddp_bucketed_on_after_backward"]
            batch_start = adapters["ddp_bucketed_on_train_batch_start"]
            for size in (0.0001, 25.0):
                trains_replicas(partial(getter, bucket_size_mb=size), after_backward, batch_start)
        else:
            after_backward = adapters[name.removeprefix("get_") + "_on_after_backward"]
            trains_replicas(getter, after_backward)


class Net(nn.Module):
    """With a frozen parameter, and on demand tied weights, as the course's models."""

    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 12, bias=False)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, tokens):
        x = torch.tanh(self.first(self.embedding(tokens)))
        return self.head(torch.tanh(self.second(x * self.frozen)))


def batches(step: int):
    """The tokens and targets of this rank, and those of all."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(12, (2, 4 * dist.get_world_size()), generator=generator)
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    return (tokens[mine], targets[mine]), (tokens, targets)


def backward(model, batch) -> None:
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def largest_difference(values: dict, twin: nn.Module) -> float:
    expected = dict(twin.named_parameters())
    assert expected.keys() <= values.keys(), list(values)
    return max((values[name] - value).abs().max().item() for name, value in expected.items())


def twins(build):
    """A model that differs from rank to rank until it is wrapped, and rank 0's in one process."""
    torch.manual_seed(0)
    twin = build().double()
    torch.manual_seed(dist.get_rank())
    return build().double(), twin


def trains_replicas(get, after_backward, batch_start=None):
    for tied in (False, True):
        model, twin = twins(lambda tied=tied: Net(tied))
        model = get(model)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
        for step in range(4):
            mine, everything = batches(step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            if batch_start:
                batch_start(ddp_model=model, optimizer=optimizers[0])
            backward(model, mine)
            after_backward(ddp_model=model, optimizer=optimizers[0])
            backward(twin, everything)
            for optimizer in optimizers:
                optimizer.step()
            values = dict(model.module.named_parameters())
            assert largest_difference(values, twin) <= 1e-10, f"step {step}, tied={tied}"


def trains_with_a_sharded_optimizer(get):
    torch.manual_seed(0)
    model = Net().double()
    twin = copy.deepcopy(model)
    options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    optimizers = [
        get(model.parameters(), torch.optim.AdamW, **options),
        torch.optim.AdamW(twin.parameters(), **options),
    ]
    for step in range(4):
        _, everything = batches(step)
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            backward(one, everything)
            optimizer.step()
        assert largest_difference(dict(model.named_parameters()), twin) <= 1e-10, f"step {step}"
    states = [value for one in optimizers[0].state.values() for value in one.values()]
    state = sum(one.numel() for one in states if isinstance(one, torch.Tensor) and one.dim())
    whole = 2 * sum(one.numel() for one in twin.parameters() if one.requires_grad)
    assert 0 < state < whole, "the optimizer's state is not sharded"


def trains_sharded(get, after_backward, gather):
    torch.manual_seed(0)
    twin = Net().double()
    model = get(copy.deepcopy(twin))
    held = sum(one.numel() for one in model.parameters())
    assert held < sum(one.numel() for one in twin.parameters()), "nothing is sharded"
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, twin)]
    for step in range(4):
        mine, everything = batches(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(model, mine)
        after_backward(fsdp_model=model, optimizer=optimizers[0])
        backward(twin, everything)
        for optimizer in optimizers:
            optimizer.step()
        values = gather(fsdp_model=model)
        assert largest_difference(values, twin) <= 1e-10, f"step {step}"


def computes_in_bfloat16(get, after_backward, gather):
    torch.manual_seed(0)
    twin = Net()
    model = get(copy.deepcopy(twin), compute_dtype=torch.bfloat16)
    assert model(batches(0)[0][0]).dtype == torch.bfloat16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model, batches(0)[0])
    after_backward(fsdp_model=model, optimizer=optimizer)
    optimizer.step()
    values = gather(fsdp_model=model)
    assert all(value.dtype == torch.float32 for value in values.values())
    assert 0 < largest_difference(values, twin) < 1


RIGHT = """\
from naive_ddp import NaiveDDP


def get_ddp(module):
    return NaiveDDP(module)


def ddp_on_after_backward(ddp_model, optimizer):
    ddp_model.finish_gradient_synchronization()
"""


@pytest.mark.parametrize(
    "old, new",
    [
        ("", ""),
        ("ddp_model.finish_gradient_synchronization()", "pass"),
        ("(ddp_model, optimizer)", "(model, optimizer)"),
        ("(ddp_model, optimizer)", "(ddp_model)"),
        ("def get_ddp(", "def get_dpp("),
        ("return NaiveDDP(module)", "return module"),
        ("naive_ddp import", "torch.nn.parallel import DistributedDataParallel as"),
    ],
)
def test_adapter_lines_that_are_changed(ranks, old, new):
    text = f"## For CS336\n\n```python\n{RIGHT.replace(old, new)}```\n\n```bash\nls\n```\n"
    if not old:
        check_adapters(ranks, adapter_lines(text), ROOT / "02_naive_ddp", EDITION_2026)
        return
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_adapters(ranks, adapter_lines(text), ROOT / "02_naive_ddp", EDITION_2026)


# Words


def words_of(text: str) -> int:
    """Words of prose: no code blocks, tables, comments, headings, pictures, nothing folded."""
    prose = [line.text for line in figures.parse(text) if line.kind == "prose" and not line.folded]
    prose = re.sub(r"!\[[^\]]*\]\([^)]*\)", " ", "\n".join(prose))
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    return sum(any(letter.isalnum() for letter in word) for word in prose.split())


@pytest.mark.parametrize("name", STAGE_PAGES)
def test_words(name):
    words = words_of((ROOT / name).read_text())
    assert words <= 900, f"{name}: {words} words of prose"


def test_words_are_those_of_prose():
    text = """\
        # Head line

        - Two **words** of [four](x.html#no).
        <!-- not these --> five <!-- nor
        these --> six
        ![not these](picture.png)

        | not | these |
        |---|---|

        ```text
        nor these
        ```
        <details><summary>Answer</summary>
        nor these
        </details>
        seven
        """
    assert words_of(textwrap.dedent(text)) == 7


# Links


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings, and those that the text sets itself."""
    anchors = set()
    for line in figures.parse(text):
        if line.kind == "heading":
            heading = figures.LINK.sub(r"\1", line.text.lstrip("#").strip())
            slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            same = (f"{slug}-{number}" for number in itertools.count(1))
            anchors.add(slug if slug not in anchors else next(s for s in same if s not in anchors))
        elif line.kind != "code":
            anchors |= set(re.findall(r'(?:id|name)="([^"]*)"', line.text))
    return anchors


def dead_links(path: Path) -> list[str]:
    lines = figures.without_code(figures.parse(path.read_text()))
    text = "\n".join(line.text for line in lines if line.kind in ("table", "prose", "heading"))
    pictures = re.compile(r"!\[([^\]]*)\]\(([^)\s]*)[^)]*\)")
    targets = [target for _, target in pictures.findall(text)]
    text = pictures.sub("a picture", text)  # which may be a link
    targets += [target for _, target in figures.LINK.findall(text)]
    targets += re.findall(r'(?:href|src|srcset)="([^"]*)"', text)
    dead = []
    for target in dict.fromkeys(targets):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = urllib.parse.unquote(target).partition("#")
        other = path.parent / name if name else path
        if other.is_dir() and anchor:
            other = other / "README.md"
        if not other.exists():
            dead.append(target)
        elif anchor and other.suffix == ".md" and anchor not in anchors_of(other.read_text()):
            dead.append(target)
    return dead


@pytest.mark.parametrize("name", PAGES)
def test_links(name):
    dead = dead_links(ROOT / name)
    assert not dead, f"{name}: {', '.join(dead)}"


@pytest.mark.parametrize(
    "link, is_dead",
    [
        ("[a](#the-idea)", False),
        ("[a](#the-ideas)", True),
        ("[a](#the-idea-1)", False),
        ("[a](#which-size-make-05_bucketedbucket_sweep)", False),
        ("[a](#01--allreduce-one-line)", False),
        ("[a](reference_output_x.txt)", False),
        ("[a](reference_output_y.txt)", True),
        ("[two\nlines](reference_output_y.txt)", True),
        ("![a](picture.png)", True),
        ("[![a](reference_output_x.txt)](reference_output_y.txt)", True),
        ("[a](README.md#the-idea)", False),
        ("[a](https://example.org/x#y)", False),
        ("`[a](no.txt)`", False),
        ("`[a]\n(no.txt)` and `x`", False),
        ("`x\ny` [a](no.txt) and `z`", True),
        ("| `a` | `b` [c](no.txt) |", True),
        ("| `[c](no.txt)` |", False),
        ('<img src="no.png">', True),
    ],
)
def test_dead_links_are_found(link, is_dead, tmp_path):
    text = "# 01 · Allreduce: one line\n## The idea\n## The `idea`\n"
    text += "## Which size? `make 05_bucketed/bucket_sweep`\n"
    assert bool(dead_links(page(tmp_path, text + link + "\n", x=""))) == is_dead


# Headings

SKELETON = ["The idea", "Run it", "Result", "How it works", "Try it", "For CS336", "Limits"]


def misplaced_headings(number: str, text: str) -> list[str]:
    """What of the skeleton is missing, or not in its place."""
    headings = [line.text for line in figures.parse(text) if line.kind == "heading"]
    wrong = []
    if not headings or not re.match(rf"# {number} · [^:]+: .+", headings[0]):
        wrong.append(f"# {number} · Name: one line")
    found = [one[3:].strip() for one in headings if one.startswith("## ")]
    found = [one for one in found if one in SKELETON]
    expected = SKELETON
    if number in ("07", "08") and "For CS336" not in found:  # other courses
        expected = [one for one in SKELETON if one != "For CS336"]
    wrong += [f"## {one}" for one in expected if one not in found]
    if not wrong and found != expected:
        wrong.append(f"order: {', '.join(found)}")
    return wrong


@pytest.mark.parametrize("name", STAGE_PAGES)
def test_headings(name):
    misplaced = misplaced_headings(name[:2], (ROOT / name).read_text())
    assert not misplaced, f"{name}: {', '.join(misplaced)}"


def test_misplaced_headings_are_found():
    first = "# 03 · Flat DDP: one all-reduce\n"
    right = first + "".join(f"## {one}\n" for one in SKELETON)
    assert not misplaced_headings("03", right + "## More\n")
    assert misplaced_headings("02", right) == ["# 02 · Name: one line"]
    assert misplaced_headings("03", right.replace("## Limits", "## Limit")) == ["## Limits"]
    swapped = right.replace("Run it", "x").replace("Result", "Run it").replace("x", "Result")
    assert misplaced_headings("03", swapped)[0].startswith("order: The idea, Result, Run it")
    without = right.replace("## For CS336\n", "").replace("03", "08")
    assert not misplaced_headings("08", without) and misplaced_headings("03", without)
