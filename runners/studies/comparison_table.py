"""The table of a comparison: what was measured, which rows may be ranked, what diverged, and what is published."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Required, TypedDict

from fewshot.evaluation.text import format_markdown, format_percent, format_seconds
from fewshot.runners.studies.published import Published

HEADER = ["method", "shot", "seed", "training images", "steps", "best at", "training episodes", "batch norm", "rank"]
HEADER += ["accuracy", "over classes", "sd of batches", "class means", "nearest neighbour", "NLL", "Brier", "ECE"]
HEADER += ["debiased ECE", "ECE by chance", "raw NLL", "raw ECE", "adapted ECE", "calibrated NLL", "calibrated ECE"]
HEADER += ["debiased calibrated"]
HEADER += ["training time", "failures"]
LEGEND = {
    "steps": "of the optimiser; fewer than planned where validation had not improved for a third of the run",
    "best at": "the step of the weights that validation chose",
    "batch norm": "at test with statistics of training (inductive), of a call's images (transductive) or labelled ones",
    "rank": "by accuracy, among rows of the same shot, seed, training images, planned steps and episodes",
    "over classes": "95% interval over test classes, % (accuracy: over test episodes)",
    "sd of batches": "what papers print after +-, in %",
    "class means": "accuracy of that rule on the same features, as of the nearest neighbour",
    "ECE by chance": "nineteen in twenty perfectly calibrated models of the same confidences have less of it",
    "training time": "with validation, on a machine that others used too",
    "failures": "episodes of training + test whose inference failed",
}
EQUAL = ("shot", "seed", "augment", "budget", "episodes")  # of all rows that are ranked among each other


class Measured(TypedDict, total=False):
    """What is kept of `evaluation.metrics.summarise`; rows of earlier versions lack some of it."""

    accuracy: Required[float]
    accuracy_ci95: Required[float | None]
    accuracy_std_batches: Required[float]
    nll: Required[float]
    brier: Required[float]
    mce: float
    ece: Required[float]
    ece_debiased: float | None
    ece_floor: float
    ece_floor_q95: float
    ece_within_band: bool
    temperature: float


class Row(Measured, total=False):
    """A line of results.json. budget: planned steps; augment: how training images were changed; batch_norm: a rule."""

    method: Required[str]
    shot: Required[int]
    episodes: Required[int]
    seed: int
    budget: int
    augment: str
    batch_norm: str
    steps: int
    best_step: int
    over_classes: Sequence[float] | None
    same_features: Mapping[str, Mapping[str, float | None]]
    raw: Required[Measured]
    calibrated: Required[Measured]
    adapted: Measured
    failures: Required[int]
    training_failures: Required[int]
    training_seconds: Required[float]
    test_seconds: float


class Diverged(NamedTuple):
    """A method whose training came to no end, and how it ended."""

    method: str
    shot: int
    message: str
    seed: int = 0


class Table(NamedTuple):
    """A header and its lines of cells; columns that no line fills are left out."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table and its legend."""
        legend = "; ".join(f"*{name}*: {meaning}" for name, meaning in LEGEND.items() if name in self.header)
        return f"{format_markdown(self.header, self.lines)}\n{legend}.\n"


def table(rows: Sequence[Row], published: Sequence[Published], diverged: Sequence[Diverged] = ()) -> Table:
    """What was measured, its means over seeds, what diverged, and what is published for as many shots."""
    places = ranks(rows)
    lines = [*map(_cells, rows, places), *map(_mean_cells, _over_seeds(rows)), *map(_diverged_cells, diverged)]
    shots = sorted({row["shot"] for row in rows})
    lines += [_published_cells(one, shot) for one in published for shot in shots if shot in one.accuracy]
    kept = [column for column in range(len(HEADER)) if any(line[column] for line in lines)]
    return Table([HEADER[column] for column in kept], [[line[column] for column in kept] for line in lines])


def ranks(rows: Sequence[Row]) -> list[int | None]:
    """The place of each row by accuracy among those of equal conditions; None without equals and without a budget."""
    places: list[int | None] = []
    for row in rows:
        equal = [one["accuracy"] for one in rows if row.get("budget") and _conditions(one) == _conditions(row)]
        better = sum(accuracy > row["accuracy"] for accuracy in equal)
        places.append(better + 1 if len(equal) > 1 else None)
    return places


def _conditions(row: Row) -> list[object]:
    return [row.get(name) for name in EQUAL]


def _over_seeds(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each method, shot and budget of which there are several, one a seed."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["shot"], row.get("budget")), []).append(row)
    return [group for group in groups.values() if len(group) > 1]


def _cells(row: Row, place: int | None) -> list[str]:
    within = row.get("over_classes")
    texts = {
        "method": row["method"],
        "shot": str(row["shot"]),
        "seed": str(row.get("seed", "")),
        "training images": {"none": "as they are"}.get(row.get("augment", ""), row.get("augment", "")),
        "steps": f"{row['steps']:,}" if "steps" in row else "",
        "best at": f"{row['best_step']:,}" if "best_step" in row else "",
        "training episodes": f"{row['episodes']:,}",
        "batch norm": row.get("batch_norm", ""),
        "rank": "" if place is None else str(place),
        "accuracy": format_percent(row["accuracy"], row["accuracy_ci95"]),
        "over classes": f"{100 * within[0]:.1f} to {100 * within[1]:.1f}" if within else "",
        "sd of batches": f"{100 * row['accuracy_std_batches']:.2f}",
        "training time": format_seconds(row["training_seconds"]),
        "failures": f"{row['training_failures']} + {row['failures']}",
    }
    same = {name: f"{100 * (one['accuracy'] or 0):.1f}" for name, one in row.get("same_features", {}).items()}
    adapted = row.get("adapted")
    sometimes = {  # rows of earlier versions lack the debiased ones
        "debiased ECE": row.get("ece_debiased"),
        "ECE by chance": row.get("ece_floor_q95"),
        "adapted ECE": adapted["ece"] if adapted else None,
        "debiased calibrated": row["calibrated"].get("ece_debiased"),
    }
    printed = {name: f"{number:.3f}" for name, number in (_scores(row) | sometimes).items() if number is not None}
    return _under_header(texts | same | printed)


def _scores(row: Row) -> dict[str, float]:
    """Those that every row has: at the temperature of its run, at 1, and at one of validation classes."""
    raw, calibrated = row["raw"], row["calibrated"]
    own = {"NLL": row["nll"], "Brier": row["brier"], "ECE": row["ece"]}
    others = {"raw NLL": raw["nll"], "raw ECE": raw["ece"]}
    return {**own, **others, "calibrated NLL": calibrated["nll"], "calibrated ECE": calibrated["ece"]}


def _mean_cells(group: Sequence[Row]) -> list[str]:
    """Means over the seeds, with the standard deviation of the accuracy among them."""
    accuracy = [100 * row["accuracy"] for row in group]
    spread = f"{statistics.mean(accuracy):.1f}, sd {statistics.stdev(accuracy):.1f}"
    cells = {"method": group[0]["method"], "shot": str(group[0]["shot"]), "seed": f"mean of {len(group)}"}
    scores = [_scores(row) for row in group]
    means = {name: f"{statistics.mean(one[name] for one in scores):.3f}" for name in scores[0]}
    return _under_header({**cells, "accuracy": spread, **means})


def _diverged_cells(one: Diverged) -> list[str]:
    return _under_header({"method": one.method, "shot": str(one.shot), "accuracy": "diverged"})


def _published_cells(one: Published, shot: int) -> list[str]:
    cells = {"method": f"{one.method} ({one.source})", "shot": str(shot), "accuracy": f"{one.accuracy[shot]}%"}
    return _under_header({**cells, "ECE": one.ece.get(shot, "")})


def _under_header(cells: Mapping[str, str]) -> list[str]:
    return [cells.get(name, "") for name in HEADER]
