"""Which value of a setting to train with, chosen without a look at any test class: how the defaults were chosen.

    python benchmarks/choices.py NAME VALUE [VALUE ...] [--dataset omniglot] [--episodes 400] [--seeds 2] --out DIR

NAME is a flag of meta_train.py (`inference`, `inner_steps`) or one of its settings (`trainer.augment`,
`kernel.prior_scale`). Trains a short run with each value and scores fresh episodes of validation classes, the same for
all. The split that tests is replaced by the one that validates as soon as the data are loaded. The least mean NLL is
chosen. For `--dataset omniglot-emnist` the validation classes are characters of EMNIST, those of the domain that is
moved to; `omniglot` validates on Omniglot's own validation alphabets alone, so that nothing of that domain is seen.

Writes OUT/DATASET-NAME.json and .md, with what --set says of other parts in their names. A run is kept in OUT/runs/
under the hash of its configuration: a finished one is not trained again, by another question neither, and one that was
stopped goes on.
"""

import argparse
import dataclasses
import hashlib
import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from fewshot.evaluation import metrics, scoring, text
from fewshot.evaluation.class_interval import classes_of_episodes, interval_over_classes
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.runners import meta_train
from fewshot.runners.cli import compilation_cache
from fewshot.tasks import Dataset, Splits
from fewshot.tasks.augmentation import AUGMENTATIONS
from fewshot.training.class_problem import ClassProblem
from fewshot.training.configuration import RunConfig, begun, resolve
from fewshot.training.data import load_splits, test_shape, with_queries
from fewshot.training.run import build_run, with_weights

FRESH_SEED = 1  # of the episodes that score: runs choose their weights on those of seed 0
PACKAGES = ("jax", "numpyro", "flax", "optax", "numpy")
MEANS = ("nll", "accuracy", "ece", "seconds")
HEADER = ["", "NLL", "NLL of runs", "less than the first", "over classes", "accuracy", "ECE", "s a run", "failures"]
LEGEND = """
NLL, accuracy and ECE at the run's own temperature; means over the runs, which differ by their seeds. *Less than the
first*: by how many nats, on the same episodes; *over classes*: its 95% interval where the validation classes are a
sample of classes like them (docs/evaluation.md, M9). *s a run*: of training with its validations, on a machine that
others may use too. *Failures*: episodes of training whose inference failed, in all runs."""


def main() -> None:
    """Train, score, choose; print the page and write the record."""
    arguments = parse()
    compilation_cache.keep_programs()
    record = measured(arguments, load_splits(arguments.dataset, arguments.data_root))
    page = page_of(record)
    print(page)
    out = Path(arguments.out) / record_name(arguments)
    out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    out.with_suffix(".md").write_text(page + "\n")


def record_name(arguments: argparse.Namespace) -> str:
    """Of the data set, what is chosen, and what is set besides, but for settings of the trainer."""
    besides = [(name.rsplit(".", 1)[-1], value) for name, value in arguments.set if not name.startswith("trainer.")]
    words = [value if isinstance(value, str) else f"{name}{value}" for name, value in besides]
    return "-".join([arguments.dataset, arguments.name.rsplit(".", 1)[-1], *words]).replace("_", "-").replace(".", "p")


def measured(arguments: argparse.Namespace, splits: Splits) -> dict[str, object]:
    """Every run's scores on validation classes, and the value of the least mean NLL."""
    splits = without_test(splits)
    runs = {
        value: [scored(arguments, splits, value, seed) for seed in range(arguments.seeds)] for value in arguments.values
    }
    rows = [row_of(value, own, runs[arguments.values[0]]) for value, own in runs.items()]
    kept = {name: value for name, value in vars(arguments).items() if name not in ("out", "data_root")}
    return {
        "config": kept,
        "command": "python benchmarks/choices.py " + shlex.join(asked_words(arguments)),
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "validation_classes": list(splits.class_names["validation"]),
        "rows": rows,
        "chosen": min(rows, key=lambda row: row["nll"])["value"],
    }


def asked_words(arguments: argparse.Namespace) -> list[str]:
    """The command line without the folders of this machine: records are to be repeated elsewhere."""
    words = [arguments.name, *map(str, arguments.values), "--dataset", arguments.dataset]
    for name in ("way", "shot", "episodes", "test_episodes", "seeds"):
        words += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    words += ["--out", "DIR"]
    return words + (["--set", *(f"{name}={value}" for name, value in arguments.set)] if arguments.set else [])


def without_test(splits: Splits) -> Splits:
    """Splits whose test classes are the validation classes: nothing that is done with them can show another."""
    names = {**splits.class_names, "test": splits.class_names["validation"]}
    return splits._replace(test=splits.validation, class_names=names)


def scored(arguments: argparse.Namespace, splits: Splits, value: object, seed: int) -> dict[str, object]:
    """One run on fresh validation episodes: accuracy and NLL by episode with their classes, ECE, training failures."""
    asked = resolve(configuration(arguments, value, seed))
    path = Path(arguments.out) / "runs" / f"{digest(asked)}-{seed}"
    asked = dataclasses.replace(asked, run_dir=str(path))
    config = with_queries(begun(asked, path) if path.exists() else asked, splits)
    problem = ClassProblem(splits)
    directory = meta_train._open(config, path, problem)
    training = meta_train._training(build_run(config, splits.image_shape), problem, directory)
    if training.run() is not None:
        raise SystemExit(f"{path} was stopped; go on with the same command")
    best = with_weights(training.start, directory.load_weights(), directory.weights)
    episodes = validation_episodes(splits.validation, test_shape(config, splits.validation), arguments.test_episodes)
    scores = scoring.score(best.learner, scoring.embed(best.learner, splits.validation), episodes)
    scores = scores.tempered(best.temperature)
    summary = scores.summary(1)
    return {
        "episodes": metrics.episode_nll(scores.probabilities, scores.labels),
        "classes": classes_of_episodes(*splits.validation[1:3], episodes.indices.x_support, episodes.indices.y_support),
        **{name: summary[name] for name in ("accuracy", "accuracy_ci95", "nll", "ece")},
        "failures": training.failures,
        "folder": path.name,
        "seconds": max(record.get("seconds", 0.0) for record in directory.read_metrics()),
    }


def configuration(arguments: argparse.Namespace, value: object, seed: int) -> RunConfig:
    """Of one run: NAME and the names of --set are fields or, with a dot, settings."""
    given = {**dict(arguments.set), arguments.name: value}
    flags = {"dataset": arguments.dataset, "way": arguments.way, "shot": arguments.shot, "episodes": arguments.episodes}
    flags |= {name: one for name, one in given.items() if "." not in name}
    settings = {name: one for name, one in given.items() if "." in name}
    return RunConfig(**flags, settings=settings, seed=seed, data_root=arguments.data_root)


def digest(config: RunConfig) -> str:
    """Ten letters: the same for the same computation, whichever of its values were chosen automatically, 3 as 3.0."""
    stored = {name: value for name, value in config.to_json().items() if name not in ("chosen", "seed")}
    stored["settings"] = {name: _plain(value) for name, value in stored["settings"].items()}
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()[:10]


def _plain(value: object) -> object:
    """A number as a float; truth values are not numbers here."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def validation_episodes(dataset: Dataset, shape: Shape, count: int) -> Any:
    """The same for every run."""
    return draw_episodes(FRESH_SEED, "validation", dataset, shape, count)


def row_of(value: object, runs: list[dict[str, object]], first: list[dict[str, object]]) -> dict[str, object]:
    """Means over the runs, each run's own numbers, and how many nats less than the first value has."""
    gain = np.mean([other["episodes"] - own["episodes"] for own, other in zip(runs, first, strict=True)], axis=0)
    interval = interval_over_classes(gain, runs[0]["classes"])
    plain = [{key: one for key, one in run.items() if key not in ("episodes", "classes")} for run in runs]
    return {
        "value": value,
        **({"ranges": dataclasses.asdict(AUGMENTATIONS[value])} if value in AUGMENTATIONS else {}),
        **{key: float(np.mean([run[key] for run in runs])) for key in MEANS},
        "gain": float(gain.mean()),
        "gain_over_classes": list(interval) if np.isfinite(interval).all() else None,
        "runs": plain,
    }


def page_of(record: dict[str, object]) -> str:
    """The record as Markdown."""
    config, classes = record["config"], record["validation_classes"]
    title = (
        f"`{record['command']}`\n\n`{config['dataset']}`, {config['way']}-way {config['shot']}-shot, "
        f"{config['episodes']:,} training episodes, {config['test_episodes']:,} episodes of {len(classes)} validation "
        f"classes, {config['seeds']} runs a value. No test class was loaded into a task. Chosen: `{record['chosen']}`."
    )
    header = [f"`{config['name']}`", *HEADER[1:]]
    table = text.format_markdown(header, [cells(row) for row in record["rows"]])
    return "\n\n".join([f"# Values of `{config['name']}`, by validation classes", title, table + LEGEND])


def cells(row: dict[str, object]) -> list[str]:
    """Under HEADER."""
    bounds = row["gain_over_classes"]
    return [
        str(row["value"]),
        f"{row['nll']:.3f}",
        ", ".join(f"{run['nll']:.3f}" for run in row["runs"]),
        f"{row['gain']:+.3f}",
        f"{bounds[0]:+.3f} to {bounds[1]:+.3f}" if bounds else "-",
        f"{100 * row['accuracy']:.1f}%",
        f"{row['ece']:.3f}",
        f"{row['seconds']:.0f}",
        str(sum(run["failures"] for run in row["runs"])),
    ]


def value_of(word: str) -> object:
    """A number where the word is one."""
    return json.loads(word) if word[:1] in "-.0123456789" else word


def pair(word: str) -> tuple[str, object]:
    """NAME=VALUE."""
    name, _, value = word.partition("=")
    return name, value_of(value)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", metavar="NAME", help="a flag of meta_train.py, or a setting with a dot in its name")
    parser.add_argument(
        "values", nargs="+", type=value_of, metavar="VALUE", help="all others are compared with the first"
    )
    parser.add_argument("--dataset", default="omniglot", metavar="NAME", help="(default omniglot)")
    parser.add_argument("--way", type=int, default=5)
    parser.add_argument("--shot", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=400, metavar="N", help="of training (default 400)")
    parser.add_argument("--test-episodes", type=int, default=600, metavar="N", help="of validation classes (600)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="runs of each (default 2)")
    parser.add_argument("--set", nargs="*", type=pair, default=[], metavar="NAME=VALUE", help="the same for all runs")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    parser.add_argument("--out", required=True, metavar="DIR", help="for the record, its page and run folders")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
