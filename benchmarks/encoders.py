"""Pretrained encoders on few-shot tasks of photographs, and what a picture costs.

    python benchmarks/encoders.py flowers102 groceries [--encoder efficientnet-lite0] [--images 10] [--out FILE.md]
    python benchmarks/encoders.py --normalisation flowers102      both ways of EfficientNet-Lite0
    taskset -c 0 python benchmarks/encoders.py --speed            images a second, beside PyTorch where it is installed

Features of the first `--images` pictures of every class are kept in the user's cache folder. Episodes are of every
second class; each method's temperature is the one of least NLL on as many episodes of the other classes, so that no
method is ahead by the scale of its logits alone.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from timing import by_turns, markdown

from fewshot.evaluation import metrics
from fewshot.evaluation.calibration import fit_temperature
from fewshot.inference.inner import cvi
from fewshot.inference.inner.settle import settle
from fewshot.inference.predictive import predict
from fewshot.models.kernels import Cosine
from fewshot.models.likelihoods import Softmax
from fewshot.models.networks import load_encoder
from fewshot.models.networks.encoders import TENSORFLOW, pinned_weights
from fewshot.models.networks.foreign import IMAGENET_DEVIATION, IMAGENET_MEAN
from fewshot.models.process import LatentProcess
from fewshot.tasks.feature_cache import FeatureCache
from fewshot.tasks.files import read_npz, resolve_root
from fewshot.tasks.photographs import SPLITS, alternate, packed_jpegs

FILES = {
    "flowers102": "flowers102_84.npz",
    "groceries": "groceries256.npz",
    "tinyimagenet": "tinyimagenet64.npz",  # classes that EfficientNet-Lite0 was trained on
}
WAY, QUERIES = 5, 5
IMAGENET = TENSORFLOW._replace(
    mean=tuple(255 * one for one in IMAGENET_MEAN), deviation=tuple(255 * one for one in IMAGENET_DEVIATION)
)


def main() -> None:
    """Print the table asked for, and write it as Markdown."""
    arguments = parse()
    if arguments.speed:
        pages = [speed(arguments.repeats)]
    elif arguments.normalisation:
        pages = [normalisations(name, arguments) for name in arguments.datasets]
    else:
        encoder = load_encoder(arguments.encoder)
        pages = [compare(name, encoder, METHODS, arguments) for name in arguments.datasets]
    page = "\n\n".join(pages)
    print(page)
    if arguments.out:
        Path(arguments.out).write_text(page + "\n")


def class_split(name: str, classes: int, data_root: str | None) -> np.ndarray:
    """The split of every class, 0 to train, 1 to validate, 2 to test, -1 where a class belongs to none."""
    if name == "flowers102":
        return alternate(classes)
    entry = "class_split_tiered" if name == "tinyimagenet" else "class_split"
    words = read_npz(resolve_root(data_root) / FILES[name], (entry,))[entry]
    numbers = {split: number for number, split in enumerate(SPLITS)} | {"val": SPLITS.index("validation"), "": -1}
    return np.array([numbers[str(word)] for word in words])


def pictures(
    name: str, images: int | None, data_root: str | None, classes: np.ndarray | None = None
) -> tuple[list[Any], np.ndarray]:
    """The first pictures of every class (None: all), or of some classes, and their labels."""
    import io

    from PIL import Image

    arrays = read_npz(resolve_root(data_root) / FILES[name], ("jpeg", "offsets", "labels"))
    labels = arrays["labels"].astype(int)
    kept = np.ones(len(labels), bool) if images is None else among_first(labels, images)
    if classes is not None:
        kept &= np.isin(labels, classes)
    files = packed_jpegs(arrays["jpeg"], arrays["offsets"])
    return [Image.open(io.BytesIO(one)) for one, use in zip(files, kept, strict=True) if use], labels[kept]


def among_first(labels: np.ndarray, images: int) -> np.ndarray:
    """Which pictures [N] are among the first `images` of their class."""
    found = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        found[np.flatnonzero(labels == label)[:images]] = True
    return found


def episodes(labels: np.ndarray, classes: np.ndarray, shot: int, count: int, seed: int) -> np.ndarray:
    """Positions [E, C, S + QUERIES] of pictures."""
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        chosen = generator.choice(classes, WAY, replace=False)
        found.append([generator.choice(np.flatnonzero(labels == c), shot + QUERIES, replace=False) for c in chosen])
    return np.array(found)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def class_means(support: np.ndarray, query: np.ndarray) -> np.ndarray:
    """softmax(20 cos(x, mean of the class)): support [C, S, D], query [Q, D]."""
    logits = 20 * unit(query) @ unit(unit(support).mean(1)).T
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def logistic_regression(strength: float, on_unit: bool, support: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Scikit-learn's, with that C, on raw or unit features."""
    from sklearn.linear_model import LogisticRegression

    y = np.repeat(np.arange(WAY), support.shape[1])
    x, z = (unit(one) if on_unit else one for one in (support.reshape(-1, support.shape[-1]), query))
    return LogisticRegression(C=strength, max_iter=2000).fit(x, y).predict_proba(z)


@partial(jax.jit, static_argnums=0)
def _process(scale: float, support: jax.Array, query: jax.Array) -> jax.Array:
    way, shot, _ = support.shape
    flat, process = support.reshape(way * shot, -1), LatentProcess(Cosine(), {"log_scale": jnp.log(scale)})
    likelihood, y = Softmax(), jnp.repeat(jnp.arange(way), shot)
    algorithm, prior = cvi(likelihood), process.prior(flat, way)
    key = jax.random.key(0)
    state, _ = settle(key, algorithm, prior, y)
    return predict(key, likelihood, algorithm.posterior(state, prior), process.query(flat, query, way))


def process(scale: float, support: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Ours: a Gaussian process with the cosine kernel of that output scale, softmax likelihood, by cvi."""
    return np.asarray(_process(scale, support, query))


METHODS = {
    "cosine to class means, times 20": class_means,
    "logistic regression, C = 1": partial(logistic_regression, 1.0, False),
    "logistic regression, unit features, C = 100": partial(logistic_regression, 100.0, True),
    "softmax, cvi, cosine kernel, scale 30": partial(process, 30.0),
}


def solve(method: Any, features: np.ndarray, positions: np.ndarray, shot: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [E, Q, C] and labels [E, Q]."""
    labels = np.tile(np.repeat(np.arange(WAY), QUERIES), (len(positions), 1))
    each = [method(features[one[:, :shot]], features[one[:, shot:].ravel()]) for one in positions]
    return np.stack(each), labels


def tempered(probabilities: np.ndarray, temperature: float) -> np.ndarray:
    logits = np.log(np.maximum(probabilities, 1e-30)) / temperature
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def compare(name: str, encoder: Any, methods: dict[str, object], arguments: argparse.Namespace) -> str:
    """A row for each method and number of labelled pictures."""
    some, labels = pictures(name, arguments.images, arguments.data_root)
    features = FeatureCache().encode(encoder, some)
    rows = []
    for shot in arguments.shots:
        other, own = (episodes(labels, np.arange(i, labels.max() + 1, 2), shot, arguments.episodes, i) for i in (0, 1))
        for title, method in methods.items():
            temperature = fit_temperature(*solve(method, features, other, shot))
            p, y = solve(method, features, own, shot)
            p = tempered(p, temperature)
            found = metrics.accuracy(p, y), metrics.accuracy_ci95(p, y), metrics.nll(p, y)
            ece = metrics.calibration_errors(p, y)["ece"]
            accuracy = f"{100 * found[0]:.1f} +- {100 * found[1]:.1f}"
            rows.append([title, str(shot), accuracy, f"{found[2]:.3f}", f"{ece:.3f}", f"{temperature:.2f}"])
    header = ["method", "shot", "accuracy", "NLL", "ECE", "temperature"]
    return f"{name}, {encoder.name}, {len(some)} pictures:\n\n{markdown(header, rows)}"


def normalisations(name: str, arguments: argparse.Namespace) -> str:
    """Class means on features of both normalisations."""
    methods = {"cosine to class means, times 20": class_means}
    ways = {"(x - 127) / 128": TENSORFLOW, "ImageNet's mean and deviation": IMAGENET}
    tables = [
        f"{title}\n\n{compare(name, load_encoder('efficientnet-lite0', preparation=way), methods, arguments)}"
        for title, way in ways.items()
    ]
    return "\n\n".join(tables)


def speed(repeats: int) -> str:
    """Images a second of EfficientNet-Lite0 on prepared pictures, and of PyTorch's layers, folded and not."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 224, 224, 3), np.uint8)
    encoder = load_encoder("efficientnet-lite0")
    contestants: dict[str, Callable[[], Any]] = {"ours": lambda: encoder.encode(pixels)}
    if importlib.util.find_spec("torch"):
        contestants |= torch_contestants(pixels)
    timed = by_turns(contestants, repeats)
    rows = [
        [name, f"{4000 / one.minimum:.1f}", f"{4000 / one.median:.1f}", f"{one.ratio(timed['ours']):.2f}"]
        for name, one in timed.items()
    ]
    return markdown(["", "images a second, fastest", "median", "time relative to ours"], rows)


def torch_contestants(pixels: np.ndarray) -> dict[str, Callable[[], Any]]:
    """PyTorch with one and four images at a time, both layouts, and batch norms folded by its own optimiser."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from torch_efficientnet import reference_network

    torch.set_num_threads(1)
    network = reference_network(torch, pinned_weights())
    network.forward = network.features
    folded = torch.jit.optimize_for_inference(torch.jit.trace(network, torch.zeros(1, 3, 224, 224)))
    last = reference_network(torch, pinned_weights()).to(memory_format=torch.channels_last)
    last.forward = last.features
    x = torch.from_numpy(((pixels.astype(np.float32) - 127) / 128).transpose(0, 3, 1, 2).copy())

    def run(network: Any, batch: int, layout: Any) -> Any:
        with torch.inference_mode():
            return [network(x[i : i + batch].contiguous(memory_format=layout)) for i in range(0, len(x), batch)]

    plain, channels_last = torch.contiguous_format, torch.channels_last
    return {
        "PyTorch, 1 at a time": partial(run, network, 1, plain),
        "PyTorch, 1, channels last": partial(run, last, 1, channels_last),
        "PyTorch, 4, channels last": partial(run, last, 4, channels_last),
        "PyTorch, 1, optimised for inference": partial(run, folded, 1, plain),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("datasets", nargs="*", default=["flowers102"], metavar="DATASET")
    parser.add_argument("--encoder", default="efficientnet-lite0")
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--normalisation", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--data-root")
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
