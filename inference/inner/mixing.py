"""Whether the chains of a sampler have mixed: split R-hat and effective sample sizes of a few scalars.

As in Gelman et al. (2013), Bayesian Data Analysis, 11.4 and 11.5, but in JAX: every task of a batch is looked at.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# In halves of 12 sweeps, an autoregression with correlation r has an R-hat of 1.20 at r = .7, 1.48 at .855, 1.71 at .9
# and 2.9 at .97. After 25 sweeps of warm-up r^25 of where a chain began is left: 2% at .855, 7% at .9 and 47% at .97.
MOST_R_HAT = 1.5
# The mean of a latent is then known to a quarter of its posterior standard deviation.
FEWEST_EFFECTIVE = 16


def mixed(
    traces: Float[Array, "S M K"], most_r_hat: float = MOST_R_HAT, fewest: int = FEWEST_EFFECTIVE
) -> Bool[Array, ""]:
    """Whether all K scalars of M chains over S sweeps mixed: R-hat and effective draws within the limits.

    False for a trace that is not finite. Fewer than 4 sweeps say nothing, which is no reason to say no.
    """
    if traces.shape[0] < 4:
        return jnp.all(jnp.isfinite(traces))
    within = split_r_hat(traces) <= most_r_hat  # both written so that nan is no
    return jnp.all(within & (effective_draws(traces) >= fewest))


def split_r_hat(traces: Float[Array, "S M K"]) -> Float[Array, " K"]:
    """R-hat of every scalar, each chain cut into two: sqrt((n - 1) / n + B / (n W)); 1 for one that never moves."""
    halves = _halves(traces)
    n = halves.shape[0]
    within = jnp.mean(jnp.var(halves, axis=0, ddof=1), axis=0)
    between = jnp.var(jnp.mean(halves, axis=0), axis=0, ddof=1)
    moved = within > 0
    ratio = jnp.where(moved, between / jnp.where(moved, within, 1.0), jnp.where(between > 0, jnp.inf, 1 / n))
    return jnp.where(jnp.isfinite(within), jnp.sqrt((n - 1) / n + ratio), jnp.nan)


def effective_draws(traces: Float[Array, "S M K"]) -> Float[Array, " K"]:
    """Effective number of the S M draws of every scalar, by Geyer's initial monotone sequence over split chains.

    S M / (2 sum_{j<k} P_j + rho_2k - 1) with P_j = rho_2j + rho_(2j+1), each at most the one before; k is the first
    that is not positive, or the last within three lags of the end of a half, and rho_2k counts where it is positive or
    P_k is. ArviZ has the same definition and the same numbers. At most S M log10(S M), where draws are antithetic; S M
    for a scalar that never moves.
    """
    halves = _halves(traces)
    n, chains = halves.shape[:2]
    centred = halves - jnp.mean(halves, axis=0)
    spectrum = jnp.abs(jnp.fft.rfft(centred, 2 * n, axis=0)) ** 2
    within = jnp.mean(jnp.fft.irfft(spectrum, 2 * n, axis=0)[:n], axis=1) / n  # [n, K], the covariance at every lag
    variance = within[0] + jnp.var(jnp.mean(halves, axis=0), axis=0, ddof=1)
    moved = variance > 0
    correlation = 1 - (within[0] * n / (n - 1) - within) / jnp.where(moved, variance, 1.0)
    last = max(0, (n - 3) // 2)
    even, odd = correlation.at[0].set(1.0)[: 2 * last + 2].reshape(last + 1, 2, -1).transpose(1, 0, 2)
    pairs, numbers = even + odd, jnp.arange(last + 1)[:, None]
    ends = (pairs <= 0).at[last].set(True)
    first = jnp.argmax(ends, axis=0)
    summed = jnp.sum(jnp.where(numbers < first, jnp.minimum.accumulate(pairs), 0.0), axis=0)
    rest = jnp.sum(jnp.where((numbers == first) & ((even > 0) | (pairs >= 0)), even, 0.0), axis=0)
    total = n * chains
    return jnp.where(moved, total / jnp.maximum(2 * summed + rest - 1, 1 / jnp.log10(total)), total)


def _halves(traces: Array) -> Array:
    """Chains [S, M, K] cut into two of half the length [S // 2, 2 M, K]; a middle sweep is left out."""
    half = traces.shape[0] // 2
    return jnp.concatenate([traces[:half], traces[-half:]], axis=1)
