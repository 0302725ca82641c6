"""Pictures of where each candidate's median step goes, in stacked bars."""

from pathlib import Path

from common import report, setup

LABELS = {
    "no sync": "no\nsync",
    "NaiveDDP": "02\nnaive",
    "FlatDDP": "03\nflat",
    "OverlapDDP": "04\noverlap",
    "BucketedDDP": "05\nbucketed",
    "torch DDP": "torch\nDDP",
    "torch DDP, tuned": "DDP\ntuned",
    "one process": "one\nprocess",
    # Beside another backend than gloo:
    "05, 8 MB": "05\n8 MB",
    "05, 2 MB": "05\n2 MB",
    "05 over gloo": "05\ngloo",
    "torch DDP over gloo": "DDP\ngloo",
}
COLORS = {"compute": "#56B4E9", "exposed communication": "#D55E00", "optimizer": "#999999"}


def medians(measured: dict) -> dict[str, dict]:
    """By candidate the medians of a step and its parts, in steps of the first one, `no sync`.

    `measured` is an entry of "models" of the JSON.
    """
    floor = report.percentiles(measured["candidates"][0]["step_seconds"])[0]
    rows = {}
    for candidate in measured["candidates"]:
        step = report.percentiles(candidate["step_seconds"])[0]
        exposed = report.percentiles(candidate.get("exposed_comm_seconds", 0.0))[0]
        optimizer = report.percentiles(candidate["optimizer_seconds"])[0]
        rows[candidate["name"]] = {
            "compute": (step - exposed - optimizer) / floor,
            "exposed communication": exposed / floor,
            "optimizer": optimizer / floor,
            "step": step / floor,
            "collectives": candidate["collectives_per_step"],
        }
    return rows


def draw_models(result: dict, path: Path) -> None:
    """One run: a panel per model."""
    from matplotlib.figure import Figure

    models = result["models"]
    figure = Figure(figsize=(10, 4.6), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for panel, (size, measured) in zip(panels, models.items(), strict=True):
        rows = medians(measured)
        draw_panel(panel, rows)
        tensors = rows["NaiveDDP"]["collectives"]  # one all-reduce for each
        millions = measured["model"]["parameters"] / 1e6
        title = f"{size}: {tensors} tensors, {millions:.1f} million parameters"
        panel.set_title(title, fontsize=11)
    panels[0].set_ylabel("median step, in steps without synchronization")
    caption = "One training step of each stage, {world_size} ranks, {backend} on {device}"
    if result["network"]:
        caption += ", {network}"
    finish(figure, panels[0], caption.format(**result), path)


def draw_networks(results: dict[str, dict], path: Path) -> None:
    """Several runs, by label: a row of panels for each model, a column for each run."""
    from matplotlib.figure import Figure

    models = next(iter(results.values()))["models"]
    width = min(4.2, 13 / len(results))  # of a panel: what is wider than a page becomes illegible
    size = width * len(results), 3.6 * len(models)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    grid = figure.subplots(len(models), len(results), sharey="row", squeeze=False)
    for panels, (size, measured) in zip(grid, models.items(), strict=True):
        for panel, (label, result) in zip(panels, results.items(), strict=True):
            draw_panel(panel, medians(result["models"][size]))
            texts = [label.get_text() for label in panel.get_xticklabels()]
            numbers = [text.split("\n")[0] if text.startswith("0") else text for text in texts]
            panel.set_xticks(range(len(texts)), numbers)  # narrow: a stage is its number
            panel.set_title(f"{size}, {label}", fontsize=11)
        panels[0].set_ylabel(f"median step ÷ {measured['candidates'][0]['name']}")
    finish(figure, grid[0][0], "One training step of each candidate", path)


def draw_panel(panel, rows: dict[str, dict]) -> None:
    """A stacked bar for each rung; `rows` is what `medians` returns."""
    labels = [LABELS.get(name, name) for name in rows]
    bottom = [0.0] * len(rows)
    for part, color in COLORS.items():
        heights = [row[part] for row in rows.values()]
        bars = panel.bar(labels, heights, bottom=bottom, color=color, width=0.65, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    totals = [f"{row['step']:.2f}" for row in rows.values()]
    small = min(10, 100 / len(rows))  # so that neighbours do not meet
    panel.bar_label(bars, totals, padding=2, fontsize=small)
    panel.tick_params(axis="x", labelsize=small - 1.5)
    panel.axhline(1, color="black", linestyle=":", linewidth=1)
    panel.margins(y=0.12)


def finish(figure, panel, caption: str, path: Path) -> None:
    """Legend and title; write the file."""
    handles = panel.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(caption, fontsize=11)
    figure.savefig(path, format="png")
    setup.say(f"written: {path}")
