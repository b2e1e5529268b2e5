"""R-hat and effective draws of a sampler's traces, against ArviZ and against chains whose correlation is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewshot.inference.diagnostics import arviz
from fewshot.inference.inner.mixing import effective_draws, mixed, split_r_hat


def chains(correlation, sweeps, count, statistics=3, seed=0):
    """Stationary autoregressions [S, M, K]."""
    rng = np.random.default_rng(seed)
    rows = [rng.normal(size=(count, statistics))]
    for _ in range(sweeps - 1):
        rows.append(correlation * rows[-1] + np.sqrt(1 - correlation**2) * rng.normal(size=(count, statistics)))
    return np.stack(rows)


@pytest.mark.long
@pytest.mark.parametrize("sweeps", [9, pytest.param(24, marks=pytest.mark.slow), 200])
@pytest.mark.parametrize("correlation", [-0.9, 0.5, 0.9])
def test_both_are_those_of_arviz(correlation, sweeps):
    """To rounding, at any length."""
    traces = chains(correlation, sweeps, 8, statistics=20)
    r_hat, effective = split_r_hat(jnp.asarray(traces)), effective_draws(jnp.asarray(traces))
    with jax.enable_x64(True):
        exactly = np.asarray(effective_draws(jnp.asarray(traces)))
    for k in range(traces.shape[-1]):
        each = traces[:, :, k].T  # chains first
        np.testing.assert_allclose(r_hat[k], arviz.rhat(each, method="split"), rtol=1e-4)
        wanted = arviz.ess(each, method="mean")
        np.testing.assert_allclose(exactly[k], wanted, rtol=1e-10)
        np.testing.assert_allclose(effective[k], wanted, rtol=1e-3)


@pytest.mark.long
def test_effective_draws_of_a_known_correlation():
    """S M (1 - r) / (1 + r)."""
    traces = chains(0.8, 4000, 20, statistics=2)
    found = effective_draws(jnp.asarray(traces))
    np.testing.assert_allclose(found, 80_000 * 0.2 / 1.8, rtol=0.15)


@pytest.mark.long
def test_scalars_that_never_move_are_mixed_and_lost_ones_are_not():
    traces = jnp.asarray(chains(0.0, 24, 8, statistics=1))
    assert mixed(traces)
    assert mixed(jnp.ones_like(traces)) and split_r_hat(jnp.ones_like(traces)) == pytest.approx(1)
    assert not mixed(traces.at[3, 2].set(jnp.nan))
    apart = jnp.broadcast_to(jnp.arange(8.0)[:, None], traces.shape)  # every chain stays where it is
    assert split_r_hat(apart) == jnp.inf and not mixed(apart)
    assert mixed(traces[:3]) and not mixed(traces[:3].at[0].set(jnp.inf))
    assert not mixed(traces[:, :1] + jnp.arange(24.0)[:, None, None])  # one chain that goes on rising
    batch = jax.vmap(mixed)(jnp.stack([traces, apart]))
    assert batch.tolist() == [True, False]
