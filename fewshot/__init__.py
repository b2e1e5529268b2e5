"""Bayesian few-shot learning: the public names, each imported when it is first asked for.

The folders models, inference, learners, evaluation, training, tasks and runners of the repository are sub-packages of
this one: `fewshot.models` and so on. In a checkout that is not installed they are found beside this folder.
"""

import importlib
from pathlib import Path
from typing import Any

from fewshot.threads import enough_threads

enough_threads()

_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "inference").is_dir():
    __path__.append(str(_CHECKOUT))

_HOMES = {
    "models": (
        "Softmax",
        "LogisticSoftmax",
        "OneVsEach",
        "LabelRegression",
        "Normal",
        "StudentT",
        "LIKELIHOODS",
        "NOISE_MODELS",
        "KERNELS",
        "BACKBONES",
    ),
    "models.conformance": ("ConformanceError", "check_kernel", "check_backbone"),
    "models.deep_kernel": ("DeepKernel",),
    "models.process": ("LatentProcess",),
    "models.generative": (
        "classification_model",
        "augmented_model",
        "kernel_model",
        "evidence_model",
        "student_t_process_model",
    ),
    "inference": ("INFERENCE", "OBJECTIVES", "HYPERGRADIENTS"),
    "inference.inner": ("cvi", "cavi", "gibbs", "laplace", "exact", "gradient", "fit", "run", "settle"),
    "inference.predictive": ("predict", "temper"),
    "inference.diagnostics": ("to_arviz",),
    "inference.conformance": ("check_likelihood", "check_inference"),
    "evaluation.paired": ("paired_differences",),
    "evaluation.learner_conformance": ("check_learner",),
    "learners": ("LEARNERS", "GaussianProcess", "Learner", "NearestNeighbour", "Prediction", "solve"),
    "tasks": ("load", "sample_task"),
    "training.run": ("Run", "load_run"),
    "training.making": ("new_run", "save_run"),
    "pretrained": ("load_pretrained",),
    "predicting": ("predict_folders",),
    "classifier": ("FewShotClassifier", "InferenceFailedError"),
    "regressor": ("FewShotRegressor",),
    "sparse_regressor": ("SparseRegressor",),
    "heads": ("GaussianProcessHead", "PretrainedHead", "TrainedRun"),
    "saving": ("SavedError",),
    "runners.cli.compilation_cache": ("keep_programs",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
