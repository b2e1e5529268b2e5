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
# # A likelihood of your own
#
# Labels are wrong now and then. A likelihood that knows: the label is that of a softmax, or, for a share of the images,
# any label at random,
#
# $$p(y = k \mid f) = (1 - e) \, \frac{\exp f_k}{\sum_c \exp f_c} + \frac{e}{C}.$$
#
# A class with a handful of methods is enough for `cvi` and NUTS. `check_likelihood` looks for errors in it.

# %%
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

from fewshot import Softmax, check_likelihood, cvi, load, load_pretrained, predict, run, sample_task
from fewshot.models.conformance import ConformanceError
from fewshot.models.expectations import expect, fixed_points
from fewshot.models.likelihoods.base import CategoricalLabels, NoParameters, own, present


@jax.tree_util.register_static
@dataclass(frozen=True)
class WrongLabels(CategoricalLabels, NoParameters):
    """Softmax, but for a share of labels that are any."""

    share: float = 0.1
    prediction_draws: int = 512
    prior_mean: ClassVar[float | None] = None

    def label_logits(self, f):
        return jnp.log((1 - self.share) * jax.nn.softmax(f, axis=0) + self.share / len(f))

    def expected_log_prob(self, y, marginals, points=None, classes=None):
        if points is None:  # there is no formula, so the nodes are those that are always the same
            points = fixed_points(len(marginals.mean), marginals.mean.dtype)
        return expect(lambda f: self.log_prob(y, f, classes), marginals, points)


try:
    print(check_likelihood(WrongLabels()))
except ConformanceError as error:
    print("found:", error)

# %% [markdown]
# Right for three classes that exist, wrong where one of them is masked: tasks of fewer classes are padded, and a class
# that does not exist must enter no normaliser. It is a mistake that no accuracy shows.

# %%


@jax.tree_util.register_static
@dataclass(frozen=True)
class Mended(WrongLabels):
    """The same among the classes that exist."""

    def probabilities(self, f, classes=None):
        real = jnp.ones(len(f), bool) if classes is None else classes
        p = jax.nn.softmax(present(f, classes), axis=0)
        return real[:, None] * ((1 - self.share) * p + self.share / real.sum())

    def log_prob(self, y, f, classes=None):
        return jnp.log(own(y, self.probabilities(f, classes)))

    def label_logits(self, f):
        return jnp.log(self.probabilities(f))


print("passed:", ", ".join(check_likelihood(Mended())))

# %% [markdown]
# ## Does it help?
#
# A task of three characters with five images each, of which one has the wrong label. The kernel is that of the shipped
# weights.

# %%
DATASET, WAY = "glyphs", 3
keys = jax.random.split(jax.random.key(3), 3)
learner = load_pretrained(DATASET).learner
task = sample_task(keys[0], load(DATASET).test, way=WAY, shot=5, query=10)
right = task.y_support
wrong = right.at[0].set((right[0] + 1) % WAY)
prior, query = learner.prior(task.x_support, WAY), learner.query(task.x_support, task.x_query, WAY)


def nll(likelihood, labels):
    posterior = run(keys[1], cvi(likelihood), prior, labels, steps=40)
    p = predict(keys[2], likelihood, posterior, query)
    return p, -jnp.log(p[jnp.arange(len(p)), task.y_query]).mean()


figure, axes = plt.subplots(1, 2, figsize=(9, 2.6), sharey=True)
for axis, (title, labels) in zip(axes, {"right labels": right, "one label wrong": wrong}.items(), strict=True):
    for name, likelihood in {"softmax": Softmax(), "wrong labels": Mended()}.items():
        p, value = nll(likelihood, labels)
        print(f"{title:16} {name:13} NLL {value:.3f}")
        axis.plot(jnp.sort(p[jnp.arange(len(p)), task.y_query]), label=name)
    axis.set_title(title)
    axis.set_xlabel("queries, sorted")
axes[0].set_ylabel("probability of the class")
axes[1].legend()
plt.show()

# %% [markdown]
# Here it does not help: with the wrong label softmax still has the smaller NLL. What is predicted is a label that may
# be wrong itself, so no class ever has more than $1 - e + e / C$, and the kernel was learned with softmax. A likelihood
# that passes has no error that a check looks for; whether it is better is for held-out queries to say.
