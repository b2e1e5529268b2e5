"""Which random changes of training images to train with, chosen without a look at any test class.

    python benchmarks/augmentation.py [--dataset omniglot-emnist] [--episodes 1000] [--seeds 3] --out DIR

Trains a short run with each augmentation of `tasks.augmentation` and scores fresh episodes of validation classes, the
same for all. The split that tests is replaced by the one that validates as soon as the data are loaded. For
`omniglot-emnist` the validation classes are characters of EMNIST: those of the domain that is moved to.
`--dataset omniglot` validates on Omniglot's own validation alphabets alone, so that nothing of that domain is seen.

Writes OUT/record.json and OUT/record.md. A finished run in OUT is not trained again, one that was stopped goes on.
"""

import argparse
import dataclasses
import json
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
HEADER = ["augmentation", "accuracy", "more than the first", "over classes", "NLL", "ECE", "runs"]
LEGEND = """
*More than the first*: by how many points, on the same episodes; *over classes*: its 95% interval where the validation
classes are a sample of classes like them (docs/evaluation.md, M9). NLL and ECE at the run's own temperature. Means over
the runs, which differ by their seeds."""


def main() -> None:
    """Train, score, choose; print the page and write the record."""
    arguments = parse()
    compilation_cache.enable()
    record = measured(arguments, load_splits(arguments.dataset, arguments.data_root), dict(settings(arguments.set)))
    page = page_of(record)
    print(page)
    out = Path(arguments.out)
    (out / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    (out / "record.md").write_text(page + "\n")


def measured(arguments: argparse.Namespace, splits: Splits, given: dict[str, object]) -> dict[str, object]:
    """Every run's scores on validation classes, and the augmentation of the largest mean accuracy."""
    splits = without_test(splits)
    runs = {
        name: [scored(arguments, splits, name, seed, given) for seed in range(arguments.seeds)]
        for name in arguments.augmentations
    }
    accuracies = {name: np.mean([run["accuracy"] for run in own]) for name, own in runs.items()}
    return {
        "config": {name: value for name, value in vars(arguments).items() if name not in ("out", "data_root")},
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "validation_classes": list(splits.class_names["validation"]),
        "rows": [row_of(name, own, runs[arguments.augmentations[0]]) for name, own in runs.items()],
        "chosen": max(accuracies, key=lambda name: accuracies[name]),
    }


def without_test(splits: Splits) -> Splits:
    """Splits whose test classes are the validation classes: nothing that is done with them can show another."""
    names = {**splits.class_names, "test": splits.class_names["validation"]}
    return splits._replace(test=splits.validation, class_names=names)


def scored(
    arguments: argparse.Namespace, splits: Splits, augmentation: str, seed: int, given: dict[str, object]
) -> dict[str, object]:
    """One run on fresh validation episodes: accuracy by episode with its classes, NLL, ECE, training failures."""
    path = Path(arguments.out) / f"{augmentation}-{seed}"
    asked = RunConfig(
        dataset=arguments.dataset,
        shot=arguments.shot,
        way=arguments.way,
        episodes=arguments.episodes,
        settings={**given, "trainer.augment": augmentation},
        seed=seed,
        run_dir=str(path),
        data_root=arguments.data_root,
    )
    config = with_queries(begun(asked, path) if path.exists() else resolve(asked), splits)
    problem = ClassProblem(splits)
    directory = meta_train._open(config, path, problem)
    training = meta_train._training(build_run(config, splits.image_shape), problem, directory)
    if training.run() is not None:
        raise SystemExit(f"{path} was stopped; go on with the same command")
    best = with_weights(training.start, directory.load_weights(), directory.weights)
    episodes = validation_episodes(splits.validation, test_shape(config, splits.validation), arguments.test_episodes)
    raw = scoring.score(best.learner, scoring.embed(best.learner, splits.validation), episodes)
    tempered = raw.tempered(best.temperature)
    summary = tempered.summary(1)
    return {
        "episodes": metrics.episode_accuracy(tempered.probabilities, tempered.labels),
        "classes": classes_of_episodes(*splits.validation[1:3], episodes.indices.x_support, episodes.indices.y_support),
        **{name: summary[name] for name in ("accuracy", "accuracy_ci95", "nll", "ece")},
        "failures": training.failures,
    }


def validation_episodes(dataset: Dataset, shape: Shape, count: int) -> Any:
    """The same for every run."""
    return draw_episodes(FRESH_SEED, "validation", dataset, shape, count)


def row_of(name: str, runs: list[dict[str, object]], first: list[dict[str, object]]) -> dict[str, object]:
    """Means over the runs, each run's own numbers, and how many points more than the first augmentation has."""
    gain = np.mean([own["episodes"] - other["episodes"] for own, other in zip(runs, first, strict=True)], axis=0)
    interval = interval_over_classes(gain, runs[0]["classes"])
    means = {key: float(np.mean([run[key] for run in runs])) for key in ("accuracy", "nll", "ece")}
    plain = [{key: run[key] for key in ("accuracy", "accuracy_ci95", "nll", "ece", "failures")} for run in runs]
    return {
        "augmentation": name,
        "ranges": dataclasses.asdict(AUGMENTATIONS[name]),
        **means,
        "gain": float(gain.mean()),
        "gain_over_classes": list(interval) if np.isfinite(interval).all() else None,
        "runs": plain,
    }


def page_of(record: dict[str, object]) -> str:
    """The record as Markdown."""
    config, classes = record["config"], record["validation_classes"]
    title = (
        f"`{config['dataset']}`, {config['way']}-way {config['shot']}-shot, {config['episodes']:,} training episodes, "
        f"{config['test_episodes']:,} episodes of {len(classes)} validation classes, {config['seeds']} seeds. No test "
        f"class was loaded into a task. Chosen: `{record['chosen']}`."
    )
    return "\n\n".join(
        [
            "# Changes of training images, chosen on validation classes",
            title,
            text.format_markdown(HEADER, [cells(row) for row in record["rows"]]) + LEGEND,
        ]
    )


def cells(row: dict[str, object]) -> list[str]:
    """Under HEADER."""
    bounds = row["gain_over_classes"]
    return [
        row["augmentation"],
        f"{100 * row['accuracy']:.1f}%",
        f"{100 * row['gain']:+.1f}",
        f"{100 * bounds[0]:+.1f} to {100 * bounds[1]:+.1f}" if bounds else "-",
        f"{row['nll']:.3f}",
        f"{row['ece']:.3f}",
        ", ".join(f"{100 * run['accuracy']:.1f}" for run in row["runs"]),
    ]


def settings(words: list[str]) -> list[tuple[str, Any]]:
    """NAME=VALUE as pairs, the values as JSON where they are."""
    pairs = [word.split("=", 1) for word in words]
    return [(name, json.loads(value) if value[:1] in "-.0123456789" else value) for name, value in pairs]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="omniglot-emnist", metavar="NAME", help="(default omniglot-emnist)")
    parser.add_argument("--augmentations", nargs="+", default=["none", "handwriting"], choices=AUGMENTATIONS)
    parser.add_argument("--way", type=int, default=5)
    parser.add_argument("--shot", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=1000, metavar="N", help="of training (default 1000)")
    parser.add_argument("--test-episodes", type=int, default=1000, metavar="N", help="of validation classes (1000)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each (default 3)")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="as in meta_train.py, for all runs")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    parser.add_argument("--out", required=True, metavar="DIR", help="for run folders, record.json and record.md")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
