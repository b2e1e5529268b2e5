"""Weights under a name, made from a run folder: temperatures of common shapes are fitted and stored with them.

    python benchmarks/ship.py docs/results/omniglot/1shot omniglot [--episodes 150]

Temperatures are those of `training.shape_temperature`, on training classes of the run. The model card is written by
hand beside the file.
"""

import argparse
from dataclasses import replace

import numpy as np

from fewshot.evaluation.calibration import fit_temperature, for_new_classes
from fewshot.evaluation.scoring import embed, score
from fewshot.pretrained import FOLDER, PRETRAINED, TemperatureTable, store
from fewshot.runners.cli import compilation_cache, processor
from fewshot.training.configuration import HELD_OUT
from fewshot.training.data import calibration_episodes, load_splits
from fewshot.training.run import Run, load_run

WAYS, SHOTS = (2, 5, 20), (1, 3, 10)


def main() -> None:
    arguments = parse()
    compilation_cache.keep_programs()
    processor.tune()
    run = load_run(arguments.run_dir)
    store(FOLDER / f"{arguments.name}.safetensors", run, table(run, arguments.episodes, arguments.data_root))


def table(run: Run, count: int, data_root: str | None) -> TemperatureTable:
    """Temperatures at the crossings of WAYS and SHOTS; the run's own where it was trained so."""
    train = load_splits(run.config.dataset, data_root).train
    raised = run.config.trainer.temperature_from != HELD_OUT
    features, logs = None, np.empty((len(WAYS), len(SHOTS)))
    for i, way in enumerate(WAYS):
        for j, shot in enumerate(SHOTS):
            fewer = max(20, round(count * min(1.0, 15 / (way * shot))))
            config = replace(run.config, settings=run.config.settings | {"trainer.temperature_episodes": fewer})
            known, episodes = calibration_episodes(config, train, way, shot)
            features = embed(run.learner, known) if features is None else features  # the classes are always the same
            scores = score(run.learner, features, episodes)
            fitted = fit_temperature(scores.probabilities, scores.labels)
            own = (way, shot) == (run.config.way, run.config.shot)
            logs[i, j] = np.log(run.temperature if own else for_new_classes(fitted) if raised else fitted)
            print(f"{way}-way {shot}-shot: temperature {np.exp(logs[i, j]):.3f} ({fewer} episodes)", flush=True)
    return TemperatureTable(WAYS, SHOTS, logs)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run_dir")
    parser.add_argument("name", choices=PRETRAINED)
    parser.add_argument("--episodes", type=int, default=150)
    parser.add_argument("--data-root")
    return parser.parse_args()


if __name__ == "__main__":
    main()
