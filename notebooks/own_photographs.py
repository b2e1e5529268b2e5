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
# # Your own photographs
#
# Five labelled pictures of each class in, probabilities out. `pip install "bayesian-few-shot[photographs]"` brings the
# encoder. Put your own folders here: `SUPPORT` has a subfolder for each class, `QUERY` the pictures to be named. Until
# then pictures are drawn: fruit of four kinds, and at the end of the queries one thing that is none of them.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from fewshot import FewShotClassifier, predict_folders
from fewshot.evaluation.prediction_report import html_page, table

SUPPORT, QUERY = Path("drawn/shop"), Path("drawn/basket")


def draw(kind, random):
    """A fruit on a table, or a chessboard."""
    ground = tuple(int(value) for value in random.integers(170, 240, 3))
    picture = Image.new("RGB", (320, 320), ground)
    pen, (x, y), r = ImageDraw.Draw(picture), random.uniform(130, 190, 2), random.uniform(70, 110)
    if kind == "orange":
        pen.ellipse((x - r, y - r, x + r, y + r), (240, 140, 20), (190, 100, 10), 4)
    elif kind == "lime":
        pen.ellipse((x - r, y - 0.7 * r, x + r, y + 0.7 * r), (110, 180, 40), (70, 120, 20), 4)
    elif kind == "banana":
        pen.arc((x - r, y - r, x + r, y + r), 20, 160, (250, 215, 60), 45)
    elif kind == "tomato":
        pen.ellipse((x - r, y - 0.85 * r, x + r, y + 0.85 * r), (215, 40, 30), (150, 20, 20), 4)
        pen.polygon([(x - 30, y - r), (x + 30, y - r), (x, y - r / 2)], (40, 120, 40))
    else:
        for column in range(8):
            for row in range(column % 2, 8, 2):
                pen.rectangle((40 * column, 40 * row, 40 * column + 39, 40 * row + 39), (20, 20, 20))
    return picture.filter(ImageFilter.GaussianBlur(1.5))


if not SUPPORT.exists():
    random = np.random.default_rng(0)
    QUERY.mkdir(parents=True)
    for kind in ("orange", "lime", "banana", "tomato"):
        (SUPPORT / kind).mkdir(parents=True)
        for number in range(5):
            draw(kind, random).save(SUPPORT / kind / f"{number}.jpg")
        for number in range(3):
            draw(kind, random).save(QUERY / f"{kind}-{number}.jpg")
    draw("chessboard", random).save(QUERY / "something-else.jpg")

# %% [markdown]
# ## Three lines
#
# The first call encodes every picture, the next ones find the features where they were kept.

# %%
found = predict_folders("photographs", SUPPORT, [QUERY])
print(table(found.answers))
Path("answers.html").write_text(html_page(found.answers, found.query))

# %% [markdown]
# `answers.html` shows the pictures, the least certain first. The column `unknown` is the share of the labelled
# pictures, each left out, that look less strange than the query.

# %%
p, unknown = found.answers.probabilities, found.answers.unknown
order = np.argsort(p.max(axis=1))[:6]
figure, axes = plt.subplots(1, len(order), figsize=(2.1 * len(order), 2.6))
for axis, q in zip(axes, order, strict=True):
    axis.imshow(Image.open(found.answers.names[q]))
    axis.set_title(f"{found.answers.predictions[q]} {p[q].max():.0%}\nunknown {unknown[q]:.2f}", fontsize=9)
    axis.axis("off")
plt.show()

# %% [markdown]
# ## As a scikit-learn estimator
#
# The same head behind `fit` and `predict_proba`; `add` takes more labels without another pass of the network, `save`
# keeps what was fitted.

# %%
paths = sorted(SUPPORT.rglob("*.jpg"))
classifier = FewShotClassifier(encoder="efficientnet-lite0").fit(paths, [path.parent.name for path in paths])
queries = sorted(QUERY.glob("*.jpg"))
print(dict(zip((path.name for path in queries), classifier.predict(queries).tolist(), strict=True)))
print("p-values of belonging to a class:", classifier.unknown_p_value(queries).round(2))
answers = classifier.reject(queries, wanted_accuracy=0.95)
print(f"{answers.kept.sum()} of {len(queries)} kept, expected accuracy {answers.expected_accuracy:.1%}")
classifier.save("fruit.safetensors")
print(FewShotClassifier.load("fruit.safetensors").classes_)
