"""07: command lines of PyTorch's own benchmarks, for sweep.py and compile_ddp.py."""


def as_ours(words: list[str], names: dict[str, str]) -> list[str]:
    """A command line with our flags in place of upstream's.

    `names`: ours by upstream's, which may be spelt with dashes and with underlines.
    """
    ours = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        ours.append(names.get(flag, flag) + equals + value)
    return ours
