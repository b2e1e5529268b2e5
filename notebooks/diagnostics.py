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
# # Is this posterior any good?
#
# One task, its variational posterior, a Gibbs sampler and NUTS on the un-augmented model, judged with ArviZ.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from numpyro.infer import MCMC

from fewshot import OneVsEach, Softmax, cavi, cvi, load, load_pretrained, predict, run, sample_task, to_arviz
from fewshot.inference.diagnostics import label_loo, objection_to_ranking, pareto_k, psis_loo, summary_table
from fewshot.inference.inner import fit_to_tolerance
from fewshot.inference.mcmc import GibbsKernel, nuts
from fewshot.models.gaussian import BlockSites

DATASET, WAY = "glyphs", 5
DRAWS = 1000
k0, k1, k2, k3, k4 = jax.random.split(jax.random.key(2), 5)
task = sample_task(k0, load(DATASET).test, way=WAY, shot=1, query=2)
learner, likelihood, y = load_pretrained(DATASET).learner, OneVsEach(), task.y_support
prior, query = learner.prior(task.x_support, WAY), learner.query(task.x_support, task.x_query, WAY)

# %% [markdown]
# ## Two samplers that know nothing of each other
#
# Gibbs draws Polya-Gamma latents; NUTS walks on the model without them. Look at the effective sample sizes and at
# R-hat; the means should agree within their Monte-Carlo errors.

# %%
gibbs = MCMC(
    GibbsKernel(prior, likelihood, y),
    num_warmup=DRAWS // 4,
    num_samples=DRAWS,
    num_chains=4,
    chain_method="vectorized",
    progress_bar=False,
)
gibbs.run(k1)
reference = nuts(prior, likelihood, y, num_warmup=DRAWS // 2, num_samples=DRAWS)
reference.run(k2)
sampled, judged = (to_arviz(k3, mcmc, likelihood, prior, y) for mcmc in (gibbs, reference))
tables = {"gibbs": summary_table(sampled), "nuts": summary_table(judged)}
print(tables["gibbs"].head(8).round(3), tables["nuts"].head(8).round(3), sep="\n\n")

# %% [markdown]
# ## What a sampler did, and what its draws say of the labels
#
# The trace of one latent in every chain of NUTS: chains that lie upon one another, without a drift. Below it the share
# of labels drawn from the posterior that are the right ones: labelled examples should be likely.

# %%
plt.figure(figsize=(9, 2.5))
for chain in judged.posterior["f"].to_numpy()[:, :, 0, 0]:
    plt.plot(chain, linewidth=0.5)
plt.xlabel("draw")
plt.ylabel("f of the first class\nat the first example")
plt.tight_layout()
plt.show()

# %%
drawn = judged.posterior_predictive["y"].stack(draws=("chain", "draw")).to_numpy()
again = (drawn == task.y_support[:, None]).mean(1)
plt.figure(figsize=(6, 2.5))
plt.bar(range(len(again)), again)
plt.axhline(1 / WAY, color="black", linestyle=":", label="chance")
plt.xlabel("labelled example")
plt.ylabel("share of draws\nwith its label")
plt.ylim(0, 1.2)
plt.legend(loc="upper right")
plt.tight_layout()
plt.show()

# %% [markdown]
# ## Which likelihood
#
# Not by `arviz.compare` here, whose table would look certain. Of a class that has lost its only label nothing is known,
# and the least certain model has the best score; and the density of one-vs-each is not normalised over the label, for
# which there is `label_loo`. Labels of queries decide. These few say little: `evaluate.py` asks thousands.

# %%
print(objection_to_ranking(label_loo(judged, likelihood), y))
for other in (likelihood, Softmax()):
    p = predict(k4, other, run(k1, cvi(other), prior, y, steps=40), query)
    nll = -jnp.log(p[jnp.arange(len(p)), task.y_query])
    print(f"{type(other).__name__:10} NLL of {len(p)} queries {nll.mean():.2f} +- {nll.std() / len(p) ** 0.5:.2f}")

# %% [markdown]
# ## Variational posteriors against them
#
# The k-hat of importance sampling from q: below 0.7 its errors could be repaired by weighting.

# %%
fitted = {}
kernels = {"cvi": cvi(likelihood), "cvi block": cvi(likelihood, sites=BlockSites), "cavi": cavi(likelihood)}
for name, kernel in kernels.items():
    state, info, steps = jax.jit(lambda kernel=kernel: fit_to_tolerance(k1, kernel, prior, y))()
    fitted[name] = kernel.posterior(state, prior)
    data = to_arviz(k3, fitted[name], likelihood, prior, y, draws=DRAWS)
    k_hat = pareto_k(k4, kernel, state, prior, likelihood, y)
    print(f"{name:10} bound {info.elbo:7.3f} in {steps:3} steps, k-hat {k_hat:.2f}, PSIS-LOO {psis_loo(data).elpd:.2f}")

# %%
means, deviations = tables["nuts"]["mean"].to_numpy(), tables["nuts"]["sd"].to_numpy()
figure, axis = plt.subplots(figsize=(9, 3.5))
rows = range(len(means))
axis.errorbar(rows, means, deviations, fmt="o", color="black", label="nuts", capsize=3)
for shift, (name, q) in enumerate(fitted.items(), 1):
    at = [row + 0.18 * shift for row in rows]
    axis.errorbar(at, q.mean.ravel(), q.marginals.variance.ravel() ** 0.5, fmt=".", label=name)
axis.set_xlabel("latent, class by class")
axis.set_ylabel("mean and standard deviation")
axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# What differs most is the level that all classes share, which one-vs-each does not see: it predicts from differences.

# %%
for name, q in fitted.items():
    print(f"{name:10}", predict(k4, likelihood, q, query)[0].round(3))
