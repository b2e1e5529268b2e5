"""The head of a frozen encoder: chosen and fitted on training and validation classes, compared on test classes.

    python benchmarks/heads.py choose --out choice.md                         a round of docs/results/heads/choice.md
    python benchmarks/heads.py folds --out folds.md                           what their number changes
    python benchmarks/heads.py images --out images.md                         and that of the pictures of a metric
    python benchmarks/heads.py kinds --out docs/results/heads/kinds.md        what a metric is worth for other pictures
    python benchmarks/heads.py scores --out docs/results/heads/scores.md      which score tells unknown classes
    python benchmarks/heads.py fit --out fewshot/weights                      the files that are shipped
    python benchmarks/heads.py test --out docs/results/heads/comparison.md    beside other methods, paired differences
    python benchmarks/heads.py counts --out docs/results/heads/counts.md      classes with unlike numbers of pictures
    python benchmarks/heads.py unknown --out docs/results/heads/unknown.md    classes that a task does not show

Data sets are Flowers 102 and the groceries, each with a metric and temperatures of its own; what is for any picture has
no metric, and temperatures of both. Episodes are of the first 30 pictures a class, metrics of all (flowers have 40 to
258). A metric that was learned from a class flatters it, so heads are chosen and temperatures fitted on episodes of a
quarter of the training and validation classes with the metric of the other three, four times. `--also FILE.npz` adds a
data set (features, labels) to the tests, of which nothing was learned, `--seen` Tiny ImageNet, whose classes the
encoder itself was trained on.
"""

import argparse
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import chain, product
from pathlib import Path

import numpy as np
from bayesian_qda import ClassPrior, class_prior
from encoders import class_split, pictures
from head_comparison import (
    HEADER,
    OURS,
    Case,
    Others,
    Part,
    answering,
    chosen,
    drawn,
    features_of,
    in_metric,
    rows_of,
    solved,
)
from head_counts import CHOICE_HEADER, TEST_HEADER, choice_rows, test_rows
from head_kept import KEEP, KEPT_HEADER, THRESHOLD_HEADER, kept_rows, threshold_row
from head_kinds import ACROSS_HEADER, LIKENESS_HEADER, across_kinds, kind_of, likenesses
from head_setting import (
    ENCODER,
    IMAGES,
    NAMES,
    QUERIES,
    SEED,
    TEST,
    TRAIN,
    Head,
    Setting,
    Source,
    encoded,
    learner_of,
    load,
    pooled,
    run_of,
    shares,
    temperature_of,
)
from head_unknown import FLAGGED_HEADER, SCORES_HEADER, UNKNOWN_HEADER, flagged_row, score_rows, unknown_rows

from fewshot.evaluation import metrics
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.evaluation.scoring import Scores
from fewshot.evaluation.text import format_markdown
from fewshot.learners import GaussianProcess
from fewshot.models.networks.metric import unit
from fewshot.pretrained import DEFAULT, Pretrained, TemperatureTable, load_pretrained, store
from fewshot.runners.cli import compilation_cache, processor

SEEN = "tinyimagenet"
WAYS, SHOTS = (2, 5, 10, 20), (1, 2, 5, 10)
TESTED = ((5, 1), (5, 2), (5, 5), (5, 10), (20, 5))
CHOICE = ((5, 1), (5, 5))
FLAGGED = 300  # tasks of which every query is compared with the left-out pictures

MEAN = Head(shrinkage=0.4, rank=128, scale=10.0, constant=0.3, plug_in=True)
MODE = MEAN._replace(scale=3.0, constant=1.0, inference="laplace")
JOINT = MODE._replace(scale=1.0, constant=10.0, scale_power=1.0, constant_power=-2.5)
GENERAL = JOINT._replace(rank=0, power=0.7, scale=10.0)
SPECIAL = {  # by what they are made of
    "flowers102": JOINT._replace(power=0.6, shrinkage=0.2, constant_power=-2.0),
    "groceries": JOINT._replace(power=0.6, shrinkage=0.5),
}
OF_KIND = {"photographs-flowers": "flowers102", "photographs-groceries": "groceries"}
LEAST = 0.55  # likeness of a task to the kind of a special one: between its own tasks and others (kinds.md)
PROCESSES = (  # scale, its power, constant, its power
    (3.0, 0.0, 1.0, 0.0),
    (1.0, 0.8, 10.0, -2.0),
    (1.0, 0.6, 10.0, -1.5),
    (1.0, 0.8, 10.0, -1.5),
    (1.0, 1.0, 10.0, -1.5),
    (1.0, 1.0, 10.0, -2.0),
    (1.0, 0.8, 30.0, -2.0),
    (1.0, 0.8, 30.0, -2.5),
    (0.5, 1.0, 10.0, -1.5),
    (0.5, 1.2, 10.0, -2.0),
    (1.0, 1.0, 10.0, -2.5),
    (1.0, 1.2, 10.0, -2.5),
)
CANDIDATES = {
    "metric": {
        "unit features, cosine, scale 30": Head(shrinkage=0.0, scale=30.0),
        "metric .2, rank 128": Head(rank=128),
        "metric .2, rank 64": Head(rank=64),
        "metric .2, rank 32": Head(),
        "metric .2, rank 16": Head(rank=16),
        "metric .1, rank 32": Head(shrinkage=0.1),
        "metric .4, rank 32": Head(shrinkage=0.4),
        "metric .4, rank 16": Head(shrinkage=0.4, rank=16),
        "metric .2, rank 32, scale 1": Head(scale=1.0),
        "metric .2, rank 32, scale 10": Head(scale=10.0),
        "metric .2, rank 32, scale 30": Head(scale=30.0),
        "metric .2, rank 32, rbf of unit features": Head(kernel="rbf-norm"),
        "metric .2, rank 32, one-vs-each": Head(likelihood="one-vs-each"),
        "metric .2, rank 32, label regression": Head(likelihood="gaussian", inference="exact", scale=1.0),
        "metric .2, rank 32, laplace": Head(inference="laplace"),
    },
    "process": {
        f"scale {scale:g}, constant {constant:g}{', at the mean' * plug_in}": MEAN._replace(
            scale=scale, constant=constant, plug_in=plug_in
        )
        for plug_in in (False, True)
        for scale in (1.0, 3.0, 10.0)
        for constant in (0.0, 0.3, 1.0, 3.0, 10.0)
    },
    "mode": {
        f"scale {scale:g}, constant {constant:g}, at the mode": MEAN._replace(
            scale=scale, constant=constant, inference="laplace"
        )
        for scale in (0.3, 1.0, 3.0, 10.0)
        for constant in (0.3, 1.0, 3.0, 10.0, 100.0)
    },
    "powers of the examples": {
        f"scale {scale:g} n^{scale_power:g}, constant {constant:g} n^{constant_power:g}": MODE._replace(
            scale=scale, constant=constant, scale_power=scale_power, constant_power=constant_power
        )
        for scale, scale_power, constant, constant_power in PROCESSES
    },
    "metric at the mode": {
        f"shrinkage {shrinkage:g}, rank {rank}": MODE._replace(shrinkage=shrinkage, rank=rank)
        for shrinkage in (0.2, 0.4, 0.6)
        for rank in (32, 64, 128, 256)
    },
    "metric of a kind": {
        f"shrinkage {shrinkage:g}, rank {rank}": JOINT._replace(shrinkage=shrinkage, rank=rank)
        for shrinkage in (0.1, 0.2, 0.3, 0.4)
        for rank in (64, 128)
    },
    "power of the features": {
        f"power {power:g}, shrinkage {shrinkage:g}": JOINT._replace(power=power, shrinkage=shrinkage)
        for power in (1.0, 0.8, 0.7, 0.6, 0.5)
        for shrinkage in (0.2, 0.3, 0.4)
    },
    "shrinkage with powers": {
        f"shrinkage {shrinkage:g}": JOINT._replace(power=0.6, shrinkage=shrinkage)
        for shrinkage in (0.1, 0.2, 0.4, 0.5, 0.6)
    },
    "intercept with powers": {
        f"{name}, constant 10 n^{power:g}": head._replace(constant_power=power)
        for name, head in (
            ("metric", JOINT._replace(power=0.6, shrinkage=0.3)),
            ("no metric", JOINT._replace(power=0.7, rank=0, scale=10.0)),
        )
        for power in (-2.5, -2.0, -1.5)
    },
    "power without a metric": {
        f"power {power:g}": GENERAL._replace(power=power) for power in (1.0, 0.8, 0.7, 0.6, 0.5)
    },
    "no metric": {
        f"scale {scale:g} n^{scale_power:g}, constant {constant:g} n^{constant_power:g}": JOINT._replace(
            rank=0, scale=scale, constant=constant, scale_power=scale_power, constant_power=constant_power
        )
        for scale, scale_power, constant, constant_power in PROCESSES[:1]
        + PROCESSES[-2:]
        + ((0.3, 1.0, 10.0, -2.5), (3.0, 1.0, 10.0, -2.5), (10.0, 1.0, 10.0, -2.5))
        + ((30.0, 1.0, 10.0, -2.5), (10.0, 1.0, 1.0, -2.5), (10.0, 0.7, 10.0, -2.5), (10.0, 1.0, 10.0, -1.5))
    },
}


def settings_of(sources: Sequence[Source], joint: bool) -> list[Setting]:
    """One for all, or one for each data set."""
    return [Setting(sources)] if joint else [Setting([one]) for one in sources]


def choice(sources: Sequence[Source], arguments: argparse.Namespace) -> str:
    """Every candidate on all classes that its metric was not made of, at the one temperature of a shape."""
    rows, count, shapes = [], arguments.episodes, arguments.tasks or CHOICE
    settings = settings_of(sources, arguments.joint)
    for name, head in CANDIDATES[arguments.round].items():
        cells, logs = [], []
        for way, shot in shapes:
            for setting in settings:
                found = setting.by_source(head, way, shot, count // len(settings))
                temperature = temperature_of(list(chain.from_iterable(found.values())))
                for each in found.values():
                    cell, log = accuracy_and_nll(each, temperature)
                    cells.append(cell)
                    logs.append(log)
        rows.append([name, *cells, f"{np.exp(np.mean(logs)):.4f}"])
        print(rows[-1], flush=True)
    columns = [f"{source.name}, {way}-way {shot}-shot" for way, shot in shapes for source in sources]
    table = format_markdown(["head", *columns, "geometric mean of the NLLs"], rows)
    return (
        "# Heads on classes that their metric was not made of\n\n"
        f"{command(arguments)}: accuracy in percent / NLL at the best temperature of the shape"
        f"{', one for both data sets' * arguments.joint}. Classes: every fold of those of training and "
        f"validation by the metric of the other folds.\n\n{table}"
    )


def accuracy_and_nll(found: Sequence[Scores], temperature: float) -> tuple[str, float]:
    """Both of all answers at a temperature, for a table, and the logarithm of the NLL."""
    scores = pooled([one.tempered(temperature) for one in found])
    nll = metrics.nll(*scores)
    return f"{100 * metrics.accuracy(*scores):.1f} / {nll:.4f}", float(np.log(nll))


def numbers_of_folds(sources: Sequence[Source], arguments: argparse.Namespace) -> str:
    """What a metric of fewer classes does to accuracy and temperature: those of the joint head by number of folds."""
    rows = []
    for way, shot in arguments.tasks or CHOICE:
        for count in (2, 4, 8):
            found = Setting(sources, count).by_source(JOINT, way, shot, arguments.episodes)
            cells = [
                f"{100 * metrics.accuracy(*pooled(each)):.1f} / {temperature_of(each):.3f}" for each in found.values()
            ]
            rows.append([f"{way}-way {shot}-shot", f"{count}", *cells])
            print(rows[-1], flush=True)
    columns = [f"{one.name}, accuracy in % / temperature" for one in sources]
    return (
        "# Folds\n\n"
        f"{command(arguments)}: every fold of the classes of training "
        "and validation by the metric of the other folds; the temperature of least NLL.\n\n"
        f"{format_markdown(['task', 'folds', *columns], rows)}"
    )


def numbers_of_images(sources: Sequence[Source], arguments: argparse.Namespace) -> str:
    """What a metric of more pictures a class does, for data sets that have more than episodes use."""
    rows, shapes = [], arguments.tasks or CHOICE
    for source in sources:
        if np.bincount(source.labels).max() == IMAGES:
            continue
        settings = {f"{IMAGES}": Setting([source], images=IMAGES), "all": Setting([source])}
        for (images, setting), shrinkage in product(settings.items(), (0.1, 0.2, 0.3)):
            cells, logs = [], []
            for way, shot in shapes:
                found = setting.answers(JOINT._replace(shrinkage=shrinkage), way, shot, arguments.episodes)
                cell, log = accuracy_and_nll(found, temperature_of(found))
                cells.append(cell)
                logs.append(log)
            rows.append([source.name, images, f"{shrinkage:g}", *cells, f"{np.exp(np.mean(logs)):.4f}"])
            print(rows[-1], flush=True)
    columns = ["data set", "pictures a class", "shrinkage", *(f"{way}-way {shot}-shot" for way, shot in shapes)]
    return (
        "# Pictures of a metric\n\n"
        f"{command(arguments)}: accuracy in percent / NLL at the best temperature of the shape, of every fold of the "
        "classes of training and validation by the metric of the other folds. Episodes are of the same pictures in "
        f"every row.\n\n{format_markdown([*columns, 'geometric mean of the NLLs'], rows)}"
    )


def table_of_temperatures(setting: Setting, head: Head, count: int) -> np.ndarray:
    """log T [WAYS, SHOTS]; larger tasks are of fewer episodes, which have more queries each."""
    logs = np.empty((len(WAYS), len(SHOTS)))
    for i, way in enumerate(WAYS):
        for j, shot in enumerate(SHOTS):
            fewer = max(20, round(count * min(1.0, 25 / (way * shot))))
            logs[i, j] = np.log(setting.temperature(head, way, shot, fewer))
            print(f"{way}-way {shot}-shot: temperature {np.exp(logs[i, j]):.3f} ({fewer} episodes)", flush=True)
    return logs


def shipped(name: str, sources: Sequence[Source]) -> tuple[Head, Setting]:
    """The head of shipped weights, and what it is made of."""
    if name == DEFAULT:
        return GENERAL, Setting(sources)
    return SPECIAL[OF_KIND[name]], Setting([one for one in sources if one.name == OF_KIND[name]])


def fit(sources: Sequence[Source], arguments: argparse.Namespace) -> None:
    """Write every file that is shipped: on the metric of all classes to learn from."""
    for name in (DEFAULT, *OF_KIND):
        head, setting = shipped(name, sources)
        print(name, flush=True)
        table = TemperatureTable(WAYS, SHOTS, table_of_temperatures(setting, head, arguments.episodes))
        kind = None if name == DEFAULT else kind_of(setting.sources[0], setting.learned[OF_KIND[name]], LEAST)
        store(Path(arguments.out) / f"{name}.safetensors", run_of(head, setting.metric(head)), table, ENCODER, kind)


def kinds(sources: Sequence[Source], arguments: argparse.Namespace) -> str:
    """What a special head is worth for pictures of its kind and of another, and how well kinds are told."""
    others = [unlearned(SEEN, *seen_by_encoder(arguments, TRAIN))] if arguments.seen else []
    shapes = arguments.tasks or CHOICE
    across = across_kinds(sources, SPECIAL, GENERAL, shapes, arguments.episodes)
    return (
        "# Heads for kinds of pictures\n\n"
        f"{command(arguments)}: pictures of "
        "a data set's classes of training and validation by heads that were made of it (every fold of these classes by "
        "the metric of the other folds), of no metric, and of the other data set; temperatures of the last two are "
        f"the other data set's.\n\n{format_markdown(ACROSS_HEADER, across)}\n"
        "Likeness of tasks, 5 classes with a picture each, to the classes of a kind: the mean cosine of their pictures "
        "with the nearest class mean (of the kind's own data set every fold to the other folds). A special head "
        f"answers tasks whose likeness is {LEAST} or more. Of Tiny ImageNet these are classes of training.\n\n"
        f"{format_markdown(LIKENESS_HEADER, likenesses(sources, others, LEAST))}"
    )


def score_choice(sources: Sequence[Source], arguments: argparse.Namespace) -> str:
    """Every score of unknown classes by every head, on classes that its metric was not made of."""
    others = [unlearned(f"{SEEN} (seen by the encoder)", *seen_by_encoder(arguments, TRAIN))] if arguments.seen else []
    rows = []
    for name in (*OF_KIND, DEFAULT):
        head, setting = shipped(name, sources)
        for shape in arguments.tasks or CHOICE:
            rows += score_rows(name, head, setting, others if name == DEFAULT else [], shape, arguments.episodes)
            print(rows[-1], flush=True)
    means = [f"{np.mean([float(row[column]) for row in rows]):.4f}" for column in range(3, len(SCORES_HEADER))]
    return (
        "# Scores of unknown classes\n\n"
        f"{command(arguments)}: as many queries of as many other classes; AUROC, the mean over episodes. Classes are "
        "those of training and validation, every fold of them by the metric of the other folds; of Tiny ImageNet, "
        "those of training. The last row is the mean of the others.\n\n"
        f"{format_markdown(SCORES_HEADER, [*rows, ['all', '', '', *means]])}"
    )


def tested(sources: Sequence[Source], arguments: argparse.Namespace) -> list[Source]:
    """The data sets, and others of whose classes the head learned nothing."""
    found = list(sources)
    if arguments.seen:
        found.append(unlearned(f"{SEEN} (seen by the encoder)", *seen_by_encoder(arguments, TEST)))
    if arguments.also:
        with np.load(arguments.also) as arrays:
            found.append(unlearned(Path(arguments.also).stem, arrays["features"], arrays["labels"]))
    return found


def seen_by_encoder(arguments: argparse.Namespace, split: int) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of a split of classes that the encoder was trained on."""
    classes = np.flatnonzero(class_split(SEEN, 0, arguments.data_root) == split)
    some, labels = pictures(SEEN, IMAGES, arguments.data_root, classes)
    return encoded(some), labels


def unlearned(name: str, features: np.ndarray, labels: np.ndarray) -> Source:
    """A data set all of whose classes are test classes."""
    numbers = np.unique(labels, return_inverse=True)[1]
    return Source(name, features, numbers, np.full(numbers.max() + 1, TEST))


def others_at(setting: Setting, head: Head, way: int, shot: int) -> Others:
    """The other methods, chosen on what is unseen; in the metric that was made without it where they use one."""
    unseen, parts = setting.unseen(head, way), []
    for one, count in zip(unseen, shares(unseen, max(30, 200 * 5 // way)), strict=True):
        seen = in_metric(one.learner, one.dataset)
        prior = prior_of(one.learner, setting.sources, one.made_of)
        episodes = draw_episodes(SEED, "test", one.dataset, Shape(way, shot, QUERIES), count)
        parts.append(Part(unit(features_of(one.dataset)), seen, prior.standard(seen), episodes))
    return chosen(parts, prior_of(learner_of(head, setting.metric(head)), setting.sources, setting.learned), way)


def prior_of(learner: GaussianProcess, sources: Sequence[Source], classes: Mapping[str, np.ndarray]) -> ClassPrior:
    """The mean and the variances of features in a metric, of those classes of all sources."""
    seen, labels = [], []
    for one in sources:
        own = classes[one.name]
        seen.append(in_metric(learner, one.dataset(own, None)))
        labels += [f"{one.name} {label}" for label in one.labels[one.rows(own, None)]]
    return class_prior(np.concatenate(seen), np.unique(labels, return_inverse=True)[1])


def test(sources: Sequence[Source], arguments: argparse.Namespace) -> str:
    """All methods on test classes, and what each keeps."""
    pretrained, rows, kept, thresholds, who = load_pretrained(DEFAULT), [], [], [], []
    for way, shot in arguments.tasks or TESTED:
        others = cache(partial(others_of, sources, way, shot))
        for source in tested(sources, arguments):
            case = Case(source.name, source.dataset(source.classes(TEST)), Shape(way, shot, QUERIES))
            heads, which = answering(pretrained, case, drawn(case, arguments.episodes))
            tasks = ", ".join(f"{head.name} {100 * (which == k).mean():.1f}%" for k, head in enumerate(heads))
            who.append([source.name, f"{way}-way {shot}-shot", tasks])
            found = solved(pretrained, others(heads[0].name), case, arguments.episodes)
            unseen = unseen_answers(sources, heads[0], way, shot)
            rows += rows_of(case, found)
            where = [source.name, f"{way}-way {shot}-shot"]
            kept += kept_rows(where, found)
            thresholds.append(threshold_row(where, found[OURS], unseen))
            print(format_markdown(HEADER, rows[-len(found) :]), flush=True)
            print(format_markdown(KEPT_HEADER, kept[-len(found) :]), flush=True)
            print(format_markdown(THRESHOLD_HEADER, thresholds[-1:]), flush=True)
    return (
        "# The shipped head on test classes\n\n"
        f"{command(arguments)}, in brackets what was run. NLL "
        "more than ours: the paired difference to the shipped head on the same episodes, with its 95% interval over "
        f"episodes.\n\n{format_markdown(HEADER, rows)}\n## Which head answers\n\n"
        f"{format_markdown(['data set', 'task', 'tasks'], who)}\n## Answers kept\n\nThe largest set of a task's "
        f"answers whose mean probability is {KEEP}: all tasks, then those that keep all and those that keep some "
        "alone. In brackets what was expected, and a 95% interval over tasks.\n\n"
        f"{format_markdown(KEPT_HEADER, kept)}\n## One threshold for all tasks\n\n"
        "Of the shipped head: every answer whose probability is above that threshold "
        f"at which {KEEP} of all kept answers are right, on classes that the metric was not made of.\n\n"
        f"{format_markdown(THRESHOLD_HEADER, thresholds)}"
    )


def others_of(sources: Sequence[Source], way: int, shot: int, name: str) -> Others:
    """The other methods, chosen on what the shipped head of that name is made of."""
    head, setting = shipped(name, sources)
    return others_at(setting, head, way, shot)


def unseen_answers(sources: Sequence[Source], pretrained: Pretrained, way: int, shot: int) -> Scores:
    """Those of a shipped head's process at its temperature, on all that is unseen of what it is made of."""
    head, setting = shipped(pretrained.name, sources)
    found = pooled(setting.answers(head, way, shot, max(40, 400 * 25 // max(25, way * shot))))
    return Scores(*found, np.zeros(len(found[1]), int), 0.0).tempered(pretrained.temperature([shot] * way))


def unknown(sources: Sequence[Source], arguments: argparse.Namespace) -> str:
    """Queries of other classes told from a task's own."""
    pretrained, rows, flagged = load_pretrained(DEFAULT), [], []
    for way, shot in arguments.tasks or CHOICE:
        others = cache(partial(others_of, sources, way, shot))
        for source in tested(sources, arguments):
            case = Case(source.name, source.dataset(source.classes(TEST)), Shape(way, shot, QUERIES))
            heads, _ = answering(pretrained, case, drawn(case, arguments.episodes, other_classes=way))
            rows += unknown_rows(pretrained, others(heads[0].name), case, arguments.episodes)
            print(rows[-7:], flush=True)
            if shot > 1:
                flagged.append(flagged_row(pretrained, case, min(arguments.episodes, FLAGGED)))
                print(flagged[-1], flush=True)
    return (
        "# Unknown classes\n\n"
        f"{command(arguments)}: as many queries of as many other test classes; AUROC, the mean over episodes. "
        "`unknown` is made of the score of that name.\n\n"
        f"{format_markdown(UNKNOWN_HEADER, rows)}\n## What is marked\n\nHow many of 100 queries of a task's own "
        "classes, and of others, look stranger than that share of the labelled pictures, each left out.\n\n"
        f"{format_markdown(FLAGGED_HEADER, flagged)}"
    )


def counts(sources: Sequence[Source], arguments: argparse.Namespace) -> str:
    """Tasks whose classes have unlike numbers of labelled pictures: how these are shown, and what that is worth."""
    rows, count = [], arguments.episodes
    for name in (DEFAULT, *OF_KIND):
        rows += choice_rows(name, *shipped(name, sources), count)
    columns = np.array([[float(cell) for cell in row[3:]] for row in rows])
    means = [f"{one:.4f}" for one in np.exp(np.log(columns).mean(axis=0))]
    pretrained, results = load_pretrained(DEFAULT), []
    for source in sources:
        parts = [source.dataset(some) for some in (source.classes(TEST), Setting([source]).learned[source.name])]
        results += test_rows(pretrained, *parts, source.name, count)
    return (
        "# Classes with unlike numbers of labelled pictures\n\n"
        f"{command(arguments)}: {count} tasks of every kind, ten queries a class. The column `labelled` has the "
        "numbers of pictures of the classes. A head is shown each picture, or means of groups of the pictures of a "
        "class: no more than the classes have on average (the geometric mean), than the rarest class has, or one "
        "(`fewshot/groups.py`). The temperature is that of tasks with what is shown, and is learned from the pictures "
        "where a class has two.\n\n"
        "## What is shown\n\nNLL, on classes of training and validation, every fold of them by the metric of the "
        "other folds; the last row is the geometric mean of the others.\n\n"
        f"{format_markdown(CHOICE_HEADER, [*rows, ['all', '', '', *means]])}\n"
        "## Test classes\n\nThe shipped heads shown each picture, or as many means as the rarest class has pictures, "
        "and class means of the features, at the temperature of least NLL on classes of training and validation. "
        "Accuracy in percent, with its 95% interval over tasks.\n\n"
        f"{format_markdown(TEST_HEADER, results)}"
    )


PAGES = {
    "choose": choice,
    "counts": counts,
    "folds": numbers_of_folds,
    "images": numbers_of_images,
    "kinds": kinds,
    "scores": score_choice,
    "test": test,
    "unknown": unknown,
}


def main() -> None:
    arguments = parse()
    compilation_cache.keep_programs()
    processor.tune()
    sources = [load(name, arguments.data_root) for name in NAMES]
    if arguments.what == "fit":
        fit(sources, arguments)
        return
    page = PAGES[arguments.what](sources, arguments)
    print(page)
    Path(arguments.out).write_text(page)


def command(arguments: argparse.Namespace) -> str:
    """What was run, for the page that it wrote."""
    also = f" --also {arguments.also}" if arguments.also else ""
    tasks = "".join(f" {way}x{shot}" for way, shot in arguments.tasks or ())
    chosen_from = f"{' --joint' * arguments.joint} --round {arguments.round!r}" if arguments.what == "choose" else ""
    flags = f"{chosen_from}{' --seen' * arguments.seen}{also}{tasks and ' --tasks' + tasks}"
    return f"`python benchmarks/heads.py {arguments.what}{flags} --episodes {arguments.episodes}`"


def shape(text: str) -> tuple[int, int]:
    way, shot = map(int, text.split("x"))
    return way, shot


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("fit", *PAGES))
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--tasks", type=shape, nargs="+", metavar="5x1", help="classes x labelled pictures of tests")
    parser.add_argument("--round", choices=CANDIDATES, default="metric", help="which candidates are chosen from")
    parser.add_argument("--joint", action="store_true", help="one metric and temperature of both data sets")
    parser.add_argument("--also", metavar="FILE.npz")
    parser.add_argument("--seen", action="store_true", help="also test on Tiny ImageNet")
    parser.add_argument("--data-root")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
