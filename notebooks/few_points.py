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
# # Regression with few points
#
# A function is seen at eight points. How far do the points determine it, what does one bad label do, and what if the
# kernel's hyper-parameters are not found but averaged over?

# %%
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from fewshot import FewShotRegressor, LatentProcess, Normal, StudentT, cavi, fit
from fewshot.inference.diagnostics import samples_to_arviz, summary_table
from fewshot.inference.mcmc import nuts_of
from fewshot.models import regression
from fewshot.models.generative import evidence_model
from fewshot.models.kernels import RBF
from fewshot.tasks.curves import load_curves

POINTS, KERNEL = 8, RBF(prior_scale=1.0)
k0, k1, k2 = jax.random.split(jax.random.key(5), 3)
task = load_curves("gp-curves:rbf").test.sample(k0, POINTS, 200)
x, y = task.x_support.reshape(POINTS, 1), task.y_support
order = jnp.argsort(task.x_query.ravel())
new, truth = task.x_query.reshape(-1, 1)[order], task.y_query[order]


def show(axis, title, mean, deviation, labels):
    axis.fill_between(new[:, 0], mean - 2 * deviation, mean + 2 * deviation, alpha=0.2)
    axis.plot(new[:, 0], mean)
    axis.plot(new[:, 0], truth, ".", color="gray", markersize=2)
    axis.plot(x[:, 0], labels, "o", color="black")
    axis.set(title=title, ylim=(-4, 4))


def score(name, mean, deviation):
    density = regression.Prediction(jnp.asarray(mean), jnp.asarray(deviation) ** 2).log_density(truth)
    inside = jnp.mean(jnp.abs(truth - mean) < 2 * deviation)
    error = jnp.sqrt(jnp.mean((mean - truth) ** 2))
    print(f"{name:32} RMSE {error:.3f}   NLL {-density.mean():6.3f}   within two deviations {inside:.0%}")


# %% [markdown]
# ## scikit-learn's contract
#
# With `average=False`, `FewShotRegressor` finds scale, length-scale and noise by the marginal likelihood of the eight
# labels, and predicts with the best of them. As it is, it averages over all of them.

# %%
best = FewShotRegressor(average=False).fit(np.asarray(x), np.asarray(y)).predict(np.asarray(new), return_std=True)
score("best hyper-parameters", *best)
average = FewShotRegressor().fit(np.asarray(x), np.asarray(y)).predict(np.asarray(new), return_std=True)
score("averaged by FewShotRegressor", *average)

# %% [markdown]
# ## Averaged by NUTS
#
# Eight labels say little about three numbers. `evidence_model` is a NumPyro model with the hyper-parameters as sample
# sites and the latent function integrated out, under priors that know the scale of these curves; NUTS draws them, and
# the prediction is a mixture over the draws. R-hat near 1 and some hundred effective draws say that the chains agree.

# %%
mcmc = nuts_of(partial(evidence_model, KERNEL, Normal(), x, y), num_warmup=250, num_samples=250, num_chains=2)
mcmc.run(k1)
print(summary_table(samples_to_arviz(mcmc), ("log_scale", "log_lengthscale", "log_noise")).round(2))


def predicted(draw):
    process = LatentProcess(KERNEL, {name: draw[name] for name in KERNEL.priors()})
    noise = jnp.exp(draw["log_noise"])
    posterior = regression.regress(process.prior(x, 1), y, noise).posterior
    return regression.predict(posterior, process.query(x, new, 1)).noisy(noise)


every = jax.jit(jax.vmap(predicted))(mcmc.get_samples())
mean = every.mean.mean(0)
averaged = mean, jnp.sqrt(every.variance.mean(0) + every.mean.var(0))
score("averaged by NUTS", *averaged)

# %%
figure, axes = plt.subplots(1, 3, figsize=(12, 3))
show(axes[0], "best hyper-parameters", *best, y)
show(axes[1], "averaged", *averaged, y)
samples = mcmc.get_samples()
axes[2].plot(samples["log_lengthscale"], samples["log_noise"], ".", markersize=2)
axes[2].set(xlabel="log length-scale", ylabel="log noise variance", title="draws")
figure.tight_layout()
plt.show()

# %% [markdown]
# On the right are the explanations that are left: a function that moves with little noise, or a slow one with more.
# The best hyper-parameters are one of them; averaged over all, the bands between the points are wider. On one task
# either can score better, as here: a score of one curve says little.
#
# ## One bad label
#
# The third label is moved by 3. With normal noise the curve goes through it; Student-t noise, by coordinate ascent on a
# precision for every label, leaves it out. The hyper-parameters are the true ones here, so that only the noise differs.

# %%
bad = y.at[2].add(3.0)
process = LatentProcess(KERNEL, {"log_scale": 0.0, "log_lengthscale": jnp.log(0.5)})
prior, query = process.prior(x, 1), process.query(x, new, 1)
normal = regression.predict(regression.regress(prior, bad, 0.01).posterior, query).noisy(0.01)
likelihood = StudentT(noise=0.01, dof=3.0)
inference = cavi(likelihood)
state, info = fit(k2, inference, prior, bad, steps=60)
robust = likelihood.distribution(inference.posterior(state, prior).predict(query))
figure, axes = plt.subplots(1, 2, figsize=(8, 3))
for axis, title, mean, variance in (
    (axes[0], "normal noise", normal.mean, normal.variance),
    (axes[1], "Student-t noise", robust.mean, robust.variance),
):
    show(axis, title, mean, jnp.sqrt(variance), bad)
    score(title, mean, jnp.sqrt(variance))
plt.show()

# %% [markdown]
# A Student-t *process* is something else: all labels share one unknown factor of the variance. It learns how large
# everything is, and leaves no label out: `student_t_process_model` has it, for the same NUTS.
