"""Several outputs of the same command as one: the median of every number, the lowest, the highest.

All have the same words and differ in their numbers. Each number of the result is that of one of the
runs, as it was printed there, so that an odd number of runs has a median.
"""

import math
import re

NUMBER = re.compile(r"(?:(?<!\S)[-+])?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def value(number: str) -> float:
    return float(number.replace(",", ""))


def words_of(line: str) -> list[str]:
    """What a line says between its numbers; how far apart these stand does not matter."""
    return [" ".join(words.split()) for words in NUMBER.split(line)]


def are_alike(outputs: list[str]) -> bool:
    """Whether they have the same lines but for their numbers."""
    shapes = [list(map(words_of, output.splitlines())) for output in outputs]
    return all(shape == shapes[0] for shape in shapes)


def merge(lines: tuple[str, ...], choose) -> str:
    """The first of these lines with every number as `choose` makes it of those of all.

    A number with blanks before it belongs to a table: its right edge stays where it is.
    """
    merged = ""
    copied = 0
    places = zip(*map(NUMBER.finditer, lines), strict=True)
    for found in places:
        gap = lines[0][copied : found[0].start()]
        number = choose([each[0] for each in found], key=value)
        if gap.endswith("  "):
            width = len(gap) + len(found[0][0]) - len(number)
            gap = gap.rstrip().ljust(max(width, len(gap.rstrip()) + 1))
        merged += gap + number
        copied = found[0].end()
    return merged + lines[0][copied:]


def median(numbers: list[str], key) -> str:
    return sorted(numbers, key=key)[(len(numbers) - 1) // 2]


def scattering_paragraphs(outputs: list[str]) -> list[list[tuple[str, ...]]]:
    """The lines of all outputs beside each other, in groups as empty lines part them.

    Without the groups that are the same in all outputs.
    """
    groups = [[]]
    for lines in zip(*map(str.splitlines, outputs), strict=True):
        if lines[0]:
            groups[-1].append(lines)
        else:
            groups.append([])
    return [group for group in groups if any(len(set(lines)) > 1 for lines in group)]


def summary(outputs: list[str]) -> str:
    """The medians as the command prints them; then what scatters at its lowest and its highest."""
    beside_each_other = zip(*map(str.splitlines, outputs), strict=True)
    text = "".join(merge(lines, median) + "\n" for lines in beside_each_other)
    for name, choose in (("lowest", min), ("highest", max)):
        for group in scattering_paragraphs(outputs):
            text += f"\n{name} of {len(outputs)} runs\n"
            text += "".join(merge(lines, choose) + "\n" for lines in group)
    return text


def most_typical(outputs: list[str]) -> int:
    """Which of the outputs is nearest to the medians, in the last table whose numbers scatter."""
    away = [0.0] * len(outputs)
    for table in scattering_paragraphs(outputs)[-1:]:
        for lines in table:
            medians = NUMBER.findall(merge(lines, median))
            for run, line in enumerate(lines):
                for number, of_median in zip(NUMBER.findall(line), medians, strict=True):
                    if value(number) > 0 and value(of_median) > 0:
                        away[run] += abs(math.log(value(number) / value(of_median)))
    return away.index(min(away))
