"""The command line of evaluate.py, and what can be refused before anything is computed."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields

from fewshot.evaluation.episodes import EVALUATION_SEED
from fewshot.runners.cli.flags import OneLineParser, check_output, count_or_auto, dataset_name, whole_number
from fewshot.tasks.corruptions import CORRUPTIONS, parse_corruption
from fewshot.training.overrides import ConfigError

TEST_EPISODES = 600
OUTPUTS = ("json", "report", "episodes_file", "predictions_file")


@dataclass(frozen=True)
class EvaluationConfig:
    """The flags of evaluate.py; None and 0 stand for the run's own value, query 0 for 15 or what the data allow.

    episodes 0: those of from_episodes, or TEST_EPISODES. batches 0: 5, or as many as there are episodes.
    """

    run_dir: str
    dataset: str | None = None
    episodes: int = 0
    batches: int = 0
    way: int = 0
    shot: int = 0
    query: int = 0
    seed: int = EVALUATION_SEED
    calibrate: bool = False
    papers_calibration: bool = False
    adapt: bool = False
    corruption: str | None = None
    out_of_episode: bool = False
    json: str | None = None
    report: str | None = None
    episodes_file: str | None = None
    predictions_file: str | None = None
    from_episodes: str | None = None
    data_root: str | None = None

    def command(self) -> str:
        """The command line that this is the configuration of."""
        words = ["python", "runners/evaluate.py", self.run_dir]
        for entry in fields(self)[1:]:
            value = getattr(self, entry.name)
            if value != entry.default:
                flag = f"--{entry.name.replace('_', '-')}"
                words += [flag] if value is True else [flag, str(value)]
        return shlex.join(words)


def check(config: EvaluationConfig) -> None:
    """Raises ConfigError or DataError for what cannot work whatever the run and the data are."""
    for name in OUTPUTS:
        check_output(f"--{name.replace('_', '-')}", getattr(config, name))
    if config.from_episodes is None:
        check_batches(config, config.episodes or TEST_EPISODES)
    elif config.episodes or config.way or config.shot or config.query:
        raise ConfigError("--from-episodes decides --episodes, --way, --shot and --query; leave them out")
    if config.corruption:
        parse_corruption(config.corruption)


def check_batches(config: EvaluationConfig, episodes: int) -> None:
    """Raises ConfigError for more batches than episodes."""
    if not 0 <= config.batches <= episodes:
        raise ConfigError(f"--batches must lie between 1 and the {episodes} episodes, got {config.batches}")


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
