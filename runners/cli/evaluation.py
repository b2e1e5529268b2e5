"""The command line of evaluate.py."""

from collections.abc import Sequence

from fewshot.evaluation.episodes import EVALUATION_SEED
from fewshot.runners.cli.flags import OneLineParser, count_or_auto, dataset_name, whole_number
from fewshot.tasks.corruptions import CORRUPTIONS
from fewshot.training.assessment import TEST_EPISODES, EvaluationConfig


def parse(arguments: Sequence[str] | None = None) -> EvaluationConfig:
    """The command line. Raises ConfigError."""
    parser = OneLineParser(
        prog="evaluate.py",
        description="Test a trained run on few-shot tasks of classes it never saw.",
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run")
    parser.add_argument(
        "--dataset", type=dataset_name, metavar="NAME", help="another data set with images of the same shape"
    )
    for name, letter, text in (
        ("episodes", "N", f"test tasks (default {TEST_EPISODES})"),
        ("way", "C", "classes of a task (default: as trained)"),
        ("shot", "S", "labelled images a class (default: as trained)"),
        ("query", "Q", "queries a class (default 15)"),
        ("batches", "N", "batches for the standard deviation of accuracies (default 5)"),
    ):
        default = EvaluationConfig.__dataclass_fields__[name].default
        parser.add_argument(f"--{name}", type=count_or_auto, default=default, metavar=letter, help=text)
    parser.add_argument("--seed", type=whole_number, default=EVALUATION_SEED, help="of the episodes (default 0)")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="also with one temperature fitted by NLL on the run's validation classes",
    )
    parser.add_argument(
        "--papers-calibration",
        action="store_true",
        help="also with the two temperatures of least ECE on validation classes, to compare with published numbers",
    )
    parser.add_argument(
        "--adapt",
        action="store_true",
        help="also with a temperature for each task, learned by leaving out labelled images (two of a class or more)",
    )
    parser.add_argument(
        "--corruption",
        metavar="NAME:SEVERITY",
        help=f"corrupt support and query images: {', '.join(CORRUPTIONS)}; severity 1 to 5",
    )
    parser.add_argument(
        "--out-of-episode", action="store_true", help="also tell queries of other classes from an episode's own (AUROC)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the metrics to this file")
    parser.add_argument("--report", metavar="FILE.html", help="write tables and pictures as one HTML file")
    parser.add_argument("--episodes-file", metavar="FILE.npz", help="write the episodes with the scores of each")
    parser.add_argument(
        "--predictions-file", metavar="FILE.npz", help="write the probabilities of all queries, for other metrics"
    )
    parser.add_argument("--from-episodes", metavar="FILE.npz", help="test on the episodes of such a file")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    return EvaluationConfig(**vars(parser.parse_args(arguments)))
