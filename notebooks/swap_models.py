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
# # One task, every model
#
# Weights that are shipped give a deep kernel: a network, and a kernel on its features; `load_run(RUN_DIR)` has that of
# a run of your own. On one task of classes it never saw, swap the likelihood, the inference and the base kernel, and
# look at the predictions side by side.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

from fewshot import (
    LabelRegression,
    LatentProcess,
    LogisticSoftmax,
    OneVsEach,
    Softmax,
    cavi,
    cvi,
    exact,
    fit,
    gibbs,
    laplace,
    load,
    load_pretrained,
    predict,
    sample_task,
)
from fewshot.models.gaussian import BlockSites
from fewshot.models.kernels import RBF, Cosine, Matern52

DATASET, WAY = "glyphs", 5
k0, k1, k2 = jax.random.split(jax.random.key(1), 3)
task = sample_task(k0, load(DATASET).test, way=WAY, shot=1, query=3)
learner = load_pretrained(DATASET).learner
features, new = learner.embed(task.x_support), learner.embed(task.x_query)

# %%
figure, axes = plt.subplots(2, WAY, figsize=(1.4 * WAY, 3))
for column in range(WAY):
    for row, (x, y) in enumerate([(task.x_support, task.y_support), (task.x_query, task.y_query)]):
        axes[row, column].imshow(x[jnp.argmax(y == column)].squeeze(-1), cmap="gray")
        axes[row, column].axis("off")
axes[0, 0].set_title("labelled", loc="left")
axes[1, 0].set_title("a query of each class", loc="left")
plt.show()

# %% [markdown]
# ## Likelihoods and inference
#
# Every inference kernel is `init`, `step`, `posterior`; `fit` runs it. What differs is one argument. `exact` belongs to
# label regression, `cavi` and `gibbs` to the augmented likelihoods; other pairs are refused by name. Logistic-softmax
# knows the level of the logits, not only their differences, so its prior has a mean.

# %%
pairs = {
    "softmax, cvi": (Softmax(), cvi(Softmax())),
    "softmax, cvi block": (Softmax(), cvi(Softmax(), sites=BlockSites)),
    "softmax, laplace": (Softmax(), laplace(Softmax())),
    "logistic-softmax, cvi": (LogisticSoftmax(), cvi(LogisticSoftmax())),
    "logistic-softmax, cavi": (LogisticSoftmax(), cavi(LogisticSoftmax())),
    "logistic-softmax, gibbs": (LogisticSoftmax(), gibbs(LogisticSoftmax())),
    "one-vs-each, cavi": (OneVsEach(), cavi(OneVsEach())),
    "one-vs-each, gibbs": (OneVsEach(), gibbs(OneVsEach())),
    "label regression": (LabelRegression(), exact(LabelRegression())),
}


def probabilities(name, process, likelihood, inference, steps=40):
    @jax.jit  # as one program: without it every operation of a fit is compiled apart
    def computed(features, new):
        prior, query = process.prior(features, WAY), process.query(features, new, WAY)
        state, info = fit(k1, inference, prior, task.y_support, steps=steps)
        posterior = inference.posterior(state, prior)
        bound = inference.elbo(state, posterior, task.y_support, None)
        return bound, info.residual[-1], predict(k2, likelihood, posterior, query)

    bound, residual, p = computed(features, new)
    accuracy = jnp.mean(jnp.argmax(p, axis=1) == task.y_query)
    print(f"{name:24} bound {bound:8.3f}   residual {residual:.0e}   accuracy {accuracy:.0%}")
    return p


learned = learner.deep_kernel.process()
predictions = {}
for name, (likelihood, inference) in pairs.items():
    process = LatentProcess(learned.kernel, {**learned.hyper, "mean": likelihood.prior_mean or 0.0})
    predictions[name] = probabilities(name, process, likelihood, inference)

# %%
figure, axes = plt.subplots(len(pairs), 1, figsize=(8, 1.1 * len(pairs)), sharex=True)
for axis, (name, p) in zip(axes, predictions.items(), strict=True):
    axis.imshow(p.T, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axis.scatter(range(len(task.y_query)), task.y_query, color="tab:red", s=6)
    axis.set_ylabel(name, rotation=0, ha="right", va="center")
    axis.set_yticks([])
axes[-1].set_xlabel("query; the dot marks its class")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Base kernels on the same features
#
# The network is fixed; the kernel is a function of its features and of a few unconstrained numbers.

# %%
for kernel in (RBF(), Matern52(), Cosine()):
    process = LatentProcess(kernel, kernel.initial())
    probabilities(type(kernel).__name__, process, Softmax(), cvi(Softmax()), steps=20)
