# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What to label next
#
# Labels cost time, images do not. From one label of each class, which image of a pool should be labelled next?
# `suggest` chooses those whose two most probable classes are nearest to each other, each judged after the labels that
# the earlier ones may get. Here it is compared with random choice, on characters of scripts that the shipped network
# never saw.

# %%
import matplotlib.pyplot as plt
import numpy as np

from fewshot import FewShotClassifier, load

DATASET, WAY, POOL, TESTS, LABELS, TASKS = "glyphs", 20, 5, 5, 12, 4
test = load(DATASET).test
images, index = np.asarray(test.images), np.asarray(test.index)  # [I, 28, 28, 1]; whose rows are the classes


def one_task(random):
    """A pool that begins with one image of each class, and a test set."""
    chosen = random.choice(test.classes, WAY, replace=False)
    drawn = np.stack([images[random.permutation(index[c])[: POOL + TESTS]] for c in chosen])
    pool, tests = drawn[:, :POOL].swapaxes(0, 1), drawn[:, POOL:].swapaxes(0, 1)
    labels = np.tile(np.arange(WAY), POOL), np.tile(np.arange(WAY), TESTS)
    return pool.reshape(-1, *images.shape[1:]), labels[0], tests.reshape(-1, *images.shape[1:]), labels[1]


def accuracies(suggests, random):
    """After each label."""
    pool, labels, tests, truth = one_task(random)
    known, rest = list(range(WAY)), list(range(WAY, len(pool)))
    classifier = FewShotClassifier.from_pretrained(DATASET, draws=256).fit(pool[known], labels[known])
    found = [classifier.score(tests, truth)]
    while len(known) < WAY + LABELS:
        place = classifier.suggest(pool[rest], 1).positions[0] if suggests else random.integers(len(rest))
        known.append(rest.pop(int(place)))
        classifier.add(pool[known[-1:]], labels[known[-1:]])
        found.append(classifier.score(tests, truth))
    return found, pool[known[WAY:]]


curves = {
    name: [accuracies(suggests, np.random.default_rng(seed)) for seed in range(TASKS)]
    for name, suggests in {"suggested": True, "random": False}.items()
}

# %%
figure, axis = plt.subplots(figsize=(6, 3))
for name, found in curves.items():
    mean = np.mean([one for one, _ in found], axis=0)
    axis.plot(WAY + np.arange(len(mean)), mean, marker="o", label=name)
    print(f"{name:10}", mean.round(3))
axis.set_xlabel("labels")
axis.set_ylabel(f"accuracy, mean of {TASKS} tasks")
axis.legend()
plt.show()

# %% [markdown]
# A few tasks tell little: `docs/results/labelling.md` has the comparison on photographs, with intervals. What was asked
# for first, in one of the tasks:

# %%
asked = curves["suggested"][0][1][:8]
figure, axes = plt.subplots(1, len(asked), figsize=(1.2 * len(asked), 1.4))
for axis, image in zip(axes, asked, strict=True):
    axis.imshow(image.squeeze(-1), cmap="gray")
    axis.axis("off")
plt.show()
