"""Photographed ink, simulated from characters, with and without `tasks/ink.py`.

    python benchmarks/ink.py [--tasks 300] [--classes 60] [--out docs/results/ink.md] [--show ink.png]

Characters of Omniglot's evaluation alphabets (from the 105 x 105 originals) and of EMNIST's test classes are drawn on
paper with texture, uneven light, perspective, blur, noise, off the middle, and stored as JPEG. The weights that are
shipped answer 5-way tasks of the clean images and of the photographs.
"""

import argparse
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from PIL import Image
from scipy import ndimage

from fewshot.conditioning import TemperaturePrior, draws_for, embed, fit_task
from fewshot.evaluation.text import format_markdown
from fewshot.pretrained import load_pretrained
from fewshot.runners.cli import compilation_cache, processor
from fewshot.tasks import ink
from fewshot.tasks.files import read_npz, resolve_root
from fewshot.tasks.images import whole

SHAPE, SIDE, WAY, QUERIES, SEED = (28, 28, 1), 240, 5, 3, 0
NOTE = """
Paper with texture at three scales, light that falls off to one side and to the edges, blur, perspective, turns up to 8
degrees, noise, JPEG; the character off the middle, on 35 to 60% of the side. Taken for photographs:
{taken}.
All scans stay equal to the last bit. Seed {seed}. The pictures are simulated: nobody's telephone has been tried.
"""


class Characters(NamedTuple):
    """Ink [K, I, h, w] in [0, 1] of K classes, as scanned, and the clean images [K, I, 28, 28] of the data set."""

    name: str
    ink: np.ndarray
    clean: np.ndarray


def omniglot(classes: int, images: int, root: Path) -> Characters:
    """The first images of evenly chosen evaluation characters."""
    bits = read_npz(root / "omniglot105.npz", ("bits", "character", "subset"))
    clean = read_npz(root / "omniglot.npz", ("images",))["images"]
    known = np.unique(bits["character"][bits["subset"] == 1])
    chosen = known[np.linspace(0, len(known) - 1, classes).astype(int)]
    rows = np.stack([np.flatnonzero(bits["character"] == one)[:images] for one in chosen])
    masks = np.unpackbits(bits["bits"][rows], axis=-1)[..., : 105 * 105].reshape(*rows.shape, 105, 105)
    return Characters("omniglot", masks.astype(np.float64), clean[rows])


def emnist(classes: int, images: int, root: Path) -> Characters:
    """The first images of EMNIST's test classes, made larger."""
    arrays = read_npz(root / "emnist.npz", ("images", "labels", "class_split_dkt"))
    chosen = np.flatnonzero(arrays["class_split_dkt"] == "novel")[:classes]
    clean = np.stack([arrays["images"][arrays["labels"] == one][:images] for one in chosen])
    large = np.stack([[ndimage.zoom(one / 255, 4, order=1) for one in row] for row in clean])
    return Characters("omniglot-emnist", large, clean)


def photograph(character: np.ndarray, random: np.random.Generator) -> Image.Image:
    """A character on paper, as a telephone sees it."""
    canvas = np.zeros((SIDE, SIDE))
    size = round(SIDE * random.uniform(0.35, 0.6))
    drawn = np.asarray(Image.fromarray(character.astype(np.float32)).resize((size, size), Image.Resampling.BICUBIC))
    top, left = random.integers(8, SIDE - size - 8, 2)
    canvas[top : top + size, left : left + size] = np.clip(drawn, 0, 1)
    canvas = tilted(canvas, random)
    y, x = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
    direction = random.uniform(0, 2 * np.pi)
    light = 1 + random.uniform(0.05, 0.25) * (x * np.cos(direction) + y * np.sin(direction))
    light = light - random.uniform(0, 0.15) * (x * x + y * y)
    texture = sum(
        weight * ndimage.gaussian_filter(random.standard_normal((SIDE, SIDE)), sigma) * 2 * sigma
        for sigma, weight in ((0.7, 1.5), (3, 1.5), (12, 2.0))
    )
    level, dark = random.uniform(150, 225), random.uniform(0.15, 0.5)
    seen = (level + texture) * light * (1 - (1 - dark) * canvas)
    seen = ndimage.gaussian_filter(seen, random.uniform(0.5, 1.8)) + random.normal(0, random.uniform(2, 6), seen.shape)
    content = io.BytesIO()
    Image.fromarray(np.clip(seen, 0, 255).astype(np.uint8)).save(content, "JPEG", quality=int(random.integers(60, 92)))
    return Image.open(content).convert("RGB")


def tilted(canvas: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Seen from aside: the corners move by up to 6% of the side, and the page turns by up to 8 degrees."""
    corners = SIDE * np.array([[0, 0], [1, 0], [1, 1], [0, 1]], float)
    angle = np.deg2rad(random.uniform(-8, 8))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    moved = (corners - SIDE / 2) @ turn.T + SIDE / 2 + SIDE * random.uniform(-0.06, 0.06, (4, 2))
    rows = [[x, y, 1, 0, 0, 0, -u * x, -u * y] for (x, y), (u, _) in zip(moved, corners, strict=True)]
    rows += [[0, 0, 0, x, y, 1, -v * x, -v * y] for (x, y), (_, v) in zip(moved, corners, strict=True)]
    coefficients = np.linalg.solve(np.array(rows), np.concatenate([corners[:, 0], corners[:, 1]]))
    picture = Image.fromarray(canvas.astype(np.float32))
    return np.asarray(
        picture.transform(picture.size, Image.Transform.PERSPECTIVE, coefficients, Image.Resampling.BILINEAR)
    )


def prepared(pictures: list[list[Image.Image]], prepare: Callable) -> np.ndarray:
    return np.stack([[prepare(one, SHAPE) for one in row] for row in pictures])


def accuracy(name: str, images: np.ndarray, shot: int, tasks: int) -> tuple[float, float]:
    """Mean accuracy of 5-way tasks in percent, and the half-width of its 95% interval."""
    shipped, random = load_pretrained(name), np.random.default_rng(SEED)
    classes, count = images.shape[:2]
    inputs = embed(shipped.learner, images.reshape(-1, *SHAPE)).reshape(classes, count, -1)
    learner = shipped.learner.with_draws(draws_for(WAY * shot, WAY))
    y, prior = np.repeat(np.arange(WAY), shot).astype(np.int32), TemperaturePrior(shipped.temperature([shot] * WAY))
    right = []
    for number in range(tasks):
        chosen = random.choice(classes, WAY, replace=False)
        order = random.permuted(np.tile(np.arange(count), (WAY, 1)), axis=1)[:, : shot + QUERIES]
        x = inputs[chosen[:, None], order]
        task = fit_task(learner, jax.random.key(number), x[:, :shot].reshape(WAY * shot, -1), y, WAY, prior)
        p = task.probabilities(x[:, shot:].reshape(WAY * QUERIES, -1))
        right.append((p.argmax(1) == np.repeat(np.arange(WAY), QUERIES)).mean())
    return 100 * float(np.mean(right)), 196 * float(np.std(right) / np.sqrt(tasks))


def rows_of(characters: Characters, arguments: argparse.Namespace) -> tuple[list[list[str]], str]:
    """A row for each way to read the pictures, and what was taken for a photograph."""
    random = np.random.default_rng(SEED)
    photographs = [[photograph(one, random) for one in row] for row in characters.ink]
    scans = [[Image.fromarray(one) for one in row] for row in characters.clean]
    told = [np.mean([[ink.is_photograph(one) for one in row] for row in some]) for some in (photographs, scans)]
    read = ink.InkPreparation(characters.name)
    kinds = {
        "clean images": prepared(scans, whole),
        "photographs, as they are": prepared(photographs, whole),
        "photographs, ink found": prepared(photographs, read),
    }
    assert (prepared(scans, read) == kinds["clean images"]).all()
    taken = f"{told[0]:.2%} of the photographs and {told[1]:.2%} of the scans of `{characters.name}`"
    print(f"taken for photographs: {taken}")
    if arguments.show:
        save_sheet(photographs, kinds, f"{characters.name}-{arguments.show}")
    rows = []
    for kind, images in kinds.items():
        cells = [accuracy(characters.name, images, shot, arguments.tasks) for shot in (1, 5)]
        rows.append([characters.name, kind, *(f"{mean:.1f} +- {half:.1f}" for mean, half in cells)])
        print(rows[-1], flush=True)
    return rows, taken


def save_sheet(photographs: list[list[Image.Image]], kinds: dict[str, np.ndarray], path: str) -> None:
    """The first images of some classes, one kind below the other."""
    size, numbers = 84, range(0, len(photographs), max(1, len(photographs) // 12))
    rows = [np.hstack([np.asarray(photographs[k][0].convert("L").resize((size, size))) for k in numbers])]
    rows += [
        np.hstack([np.kron(kind[k, 0, ..., 0], np.ones((3, 3), np.uint8)) for k in numbers]) for kind in kinds.values()
    ]
    Image.fromarray(np.vstack(rows)).save(path)


def main() -> None:
    arguments = parse()
    compilation_cache.keep_programs()
    processor.tune()
    root = resolve_root(arguments.data_root)
    rows, taken = [], []
    for load in (omniglot, emnist):
        own, share = rows_of(load(arguments.classes, 12, root), arguments)
        rows += own
        taken.append(share)
    page = (
        "# Photographed ink\n\n"
        f"`python benchmarks/ink.py --tasks {arguments.tasks} --classes {arguments.classes}`: 5-way accuracy in "
        "percent of the shipped weights on simulated photographs of test characters.\n\n"
        + format_markdown(["weights", "pictures", "1-shot", "5-shot"], rows)
        + NOTE.format(seed=SEED, taken=",\n".join(taken))
    )
    print(page)
    if arguments.out:
        Path(arguments.out).write_text(page)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", type=int, default=300)
    parser.add_argument("--classes", type=int, default=60)
    parser.add_argument("--show", metavar="FILE.png", help="save some pictures")
    parser.add_argument("--data-root")
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
