"""Neural processes (Garnelo et al. 2018, Kim et al. 2019): a network reads the labelled points of a task as a set.

    (N1)  r_n = h(x_n, y_n),   r(x) = mean_n r_n, or what x attends to,   y | x ~ N(m, s^2),  (m, s) = g(x, r(x), z)
    (N2)  q(z | C) = N(mean, sd^2) of the mean of another h over the points C

Their parts are one design: `cnp` is the mean, `np` the latent z alone, `anp` attention, with z where it is asked for.

    (N3)  log 1/K sum_k p(y_q | x_q, z_k) q(z_k | C) / g(z_k),   z_k ~ g

is what those with z learn by: its expectation is at most log of the integral of q(z | C) p(y_q | x_q, z), and equal as
K grows. docs/neural_processes.md has the derivations. Letters: N labelled points, Q queries, L numbers of z, K draws.
"""

import enum
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.inference.inner.base import Mask, finite_code
from fewshot.inference.outer.loss import ForEach, Outcome
from fewshot.learners.base import Prediction, Traits, predicted
from fewshot.learners.network import LabelledTasks, NetworkLearner, real_points
from fewshot.models.backbones import Backbone
from fewshot.models.likelihoods.normal import equal_mixture
from fewshot.models.networks.points import Attention, Layers, PointEncoder, mean_of

FLOOR = 0.01  # of the standard deviation of a label, in the unit of the labels
LATENT_FLOOR = 0.01  # of that of z, which is at most 1


class Proposal(enum.Enum):
    """g of (N3): what is believed after all labels of a training task, queries too, or after the labelled points."""

    ALL = "all"
    CONTEXT = "context"


class Belief(NamedTuple):
    """Independent normals over z."""

    mean: Float[Array, " L"]
    sd: Float[Array, " L"]

    def draws(self, key: Key[Array, ""], count: int) -> Float[Array, "K L"]:
        """Draws of z."""
        return self.mean + self.sd * jax.random.normal(key, (count, *self.mean.shape), self.mean.dtype)

    def log_prob(self, z: Float[Array, "K L"]) -> Float[Array, " K"]:
        """log N(z; mean, sd^2)."""
        return jnp.sum(jax.scipy.stats.norm.logpdf(z, self.mean, self.sd), axis=-1)


class LatentPath(nnx.Module):
    """(N2): what labelled points tell of z, size numbers."""

    def __init__(self, inputs: int, width: int, size: int, *, rounds: int = 0, heads: int = 1, rngs: nnx.Rngs):
        self.encoder = PointEncoder(inputs, width, rounds=rounds, heads=heads, rngs=rngs)
        self.head = Layers((width, width, 2 * size), rngs=rngs)

    def __call__(self, x: Float[Array, "N D"], y: Float[Array, " N"], real: Bool[Array, " N"]) -> Belief:
        """q(z | points); without points it is what is believed before a task."""
        mean, raw = jnp.split(self.head(mean_of(self.encoder(x, y, real), real)), 2)
        return Belief(mean, LATENT_FLOOR + (1 - LATENT_FLOOR) * jax.nn.sigmoid(raw))


class Seen(NamedTuple):
    """The labelled points of a task: inputs, r_n (None without r), which are real, q(z | C) (None without z)."""

    x: Float[Array, "N D"]
    representations: Float[Array, "N R"] | None
    real: Bool[Array, " N"]
    belief: Belief | None


class NeuralProcess(NetworkLearner):
    """(N1) of the parts that it is given; x are the features of a backbone.

    encoder: h, None without r. cross: attention of queries to points, None for the mean. latent: (N2), None without z.
    width: of the decoder. floor: the least standard deviation of a label, floor + softplus of what g says. draws and
    proposal are K and g of (N3); predictions are mixtures of `prediction_draws` normals, by draws of q(z | C).
    fewest: a training task shows a random number of its labelled points, from this one to all; None for all of them.
    """

    traits: ClassVar[Traits] = Traits(real_labels=True, class_labels=False)

    def __init__(
        self,
        backbone: Backbone,
        *,
        encoder: PointEncoder | None,
        cross: Attention | None = None,
        latent: LatentPath | None = None,
        width: int,
        floor: float = FLOOR,
        draws: int = 1,
        prediction_draws: int = 1,
        proposal: Proposal = Proposal.CONTEXT,
        fewest: int | None = None,
        rngs: nnx.Rngs,
    ):
        if fewest is not None and fewest < 0:
            raise ValueError(f"expected fewest of at least 0, got {fewest}")
        if not (floor > 0 and draws > 0 and prediction_draws > 0):
            raise ValueError(
                f"expected a positive floor, draws and prediction_draws, got {floor, draws, prediction_draws}"
            )
        super().__init__(backbone)
        self.encoder, self.cross, self.latent = encoder, cross, latent
        size = 0 if latent is None else latent.head.layers[-1].out_features // 2
        inputs = backbone.features + (0 if encoder is None else width) + size
        self.decoder = Layers((inputs, width, width, 2), rngs=rngs)
        self.floor, self.draws, self.prediction_draws, self.proposal = floor, draws, prediction_draws, proposal
        self.fewest = fewest

    def fit(
        self,
        key: Key[Array, ""],
        support: Float[Array, "N D"],
        y: Float[Array, " N"],
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[Seen, Int[Array, ""]]:
        """Representations of the labelled points, and what they tell of z."""
        del key, classes
        real = real_points(y, mask)
        found = None if self.encoder is None else self.encoder(support, y, real)
        state = Seen(support, found, real, None if self.latent is None else self.latent(support, y, real))
        read = () if found is None else (jnp.where(real[:, None], found, 0.0),)
        return state, finite_code(*read, *(state.belief or ()))

    def read(self, state: Seen, query: Float[Array, "Q D"]) -> Float[Array, "Q R"]:
        """r of every query, of no numbers where there is no r."""
        if state.representations is None:
            return jnp.zeros((len(query), 0), query.dtype)
        if self.cross is not None:
            return self.cross(query, state.x, state.representations, state.real)
        mean = mean_of(state.representations, state.real)
        return jnp.broadcast_to(mean, (len(query), len(mean)))

    def decode(
        self, state: Seen, query: Float[Array, "Q D"], z: Float[Array, "K L"]
    ) -> tuple[Float[Array, "K Q"], Float[Array, "K Q"]]:
        """m and s of every query under every z."""
        told = jnp.concatenate([query, self.read(state, query)], axis=1)
        shape = (len(z), len(query))
        each = jnp.broadcast_to(told, (*shape, told.shape[1])), jnp.broadcast_to(z[:, None], (*shape, z.shape[1]))
        found = self.decoder(jnp.concatenate(each, axis=2))
        return found[..., 0], self.floor + jax.nn.softplus(found[..., 1])

    def predict(self, key: Key[Array, ""], state: Seen, query: Float[Array, "Q D"]) -> Prediction:
        """A normal, or with z an equal mixture of normals; all queries share the draws, so none depends on another."""
        mean, sd = self.decode(state, query, self._drawn(key, state.belief, self.prediction_draws))
        none = jnp.zeros(1, mean.dtype)
        return predicted(equal_mixture(mean, sd**2, none, none))

    def _drawn(self, key: Array, belief: Belief | None, count: int) -> Float[Array, "K L"]:
        """Draws of z; one of no numbers without z."""
        return jnp.zeros((1, 0)) if belief is None else belief.draws(key, count)

    def loss(self, keys: Key[Array, " T"], tasks: LabelledTasks, for_each: ForEach) -> Outcome:
        """log p(y_q | x_q, labelled points), or (N3), the mean over the tasks, which share one pass of the backbone."""
        features = self.features(jnp.concatenate([tasks.x_support, tasks.x_query], axis=1), train=True)
        found = for_each(self.objective)(keys, features, tasks)
        return Outcome(jnp.mean(found), tasks.y_query.shape[1], {})

    def objective(self, key: Key[Array, ""], x: Float[Array, "P D"], task: LabelledTasks) -> Float[Array, ""]:
        """(N3) of features of labelled points and queries; without z it is exact."""
        shots = task.y_support.shape[0]
        shown = self.shown(key, shots)
        state, _ = self.fit(key, x[:shots], task.y_support, 1, Mask(shown, jnp.ones(1, bool)))
        guide = state.belief
        if self.latent is not None and self.proposal is Proposal.ALL:
            y = jnp.concatenate([task.y_support, task.y_query])
            guide = self.latent(x, y, jnp.concatenate([shown, jnp.ones(len(task.y_query), bool)]))
        z = self._drawn(key, guide, self.draws)
        mean, sd = self.decode(state, x[shots:], z)
        each = jnp.sum(jax.scipy.stats.norm.logpdf(task.y_query, mean, sd), axis=1)
        if state.belief is not None and guide is not None:
            each = each + state.belief.log_prob(z) - guide.log_prob(z)
        return jax.nn.logsumexp(each) - math.log(len(z))

    def shown(self, key: Key[Array, ""], shots: int) -> Bool[Array, " N"]:
        """Which labelled points a training task shows: the first few, as they are in no order."""
        if self.fewest is None:
            return jnp.ones(shots, bool)
        count = jax.random.randint(jax.random.fold_in(key, 1), (), min(self.fewest, shots), shots + 1)
        return jnp.arange(shots) < count


class ConditionalNeuralProcess(NeuralProcess):
    """`cnp`: r is the mean over the labelled points, and there is no z."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        rngs: nnx.Rngs,
        width: int = 64,
        floor: float = FLOOR,
        fewest: int | None = None,
    ):
        encoder = PointEncoder(backbone.features, width, rngs=rngs)
        super().__init__(backbone, encoder=encoder, width=width, floor=floor, fewest=fewest, rngs=rngs)


class LatentNeuralProcess(NeuralProcess):
    """`np`: all that is known of a task is in z, of `latent` numbers."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        rngs: nnx.Rngs,
        width: int = 64,
        latent: int = 64,
        floor: float = FLOOR,
        draws: int = 8,
        prediction_draws: int = 64,
        proposal: Proposal = Proposal.CONTEXT,
        fewest: int | None = None,
    ):
        path = LatentPath(backbone.features, width, check_latent(latent, 1), rngs=rngs)
        super().__init__(
            backbone,
            encoder=None,
            latent=path,
            width=width,
            floor=floor,
            draws=draws,
            prediction_draws=prediction_draws,
            proposal=proposal,
            fewest=fewest,
            rngs=rngs,
        )


class AttentiveNeuralProcess(NeuralProcess):
    """`anp`: points attend to each other, `rounds` times, and queries to points; z of `latent` numbers, 0 for none."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        rngs: nnx.Rngs,
        width: int = 64,
        heads: int = 8,
        rounds: int = 1,
        latent: int = 0,
        floor: float = FLOOR,
        draws: int = 8,
        prediction_draws: int = 64,
        proposal: Proposal = Proposal.CONTEXT,
        fewest: int | None = None,
    ):
        inputs, size = backbone.features, check_latent(latent, 0)
        if rounds < 0:
            raise ValueError(f"expected rounds of at least 0, got {rounds}")
        path = LatentPath(inputs, width, size, rounds=rounds, heads=heads, rngs=rngs) if size else None
        super().__init__(
            backbone,
            encoder=PointEncoder(inputs, width, rounds=rounds, heads=heads, rngs=rngs),
            cross=Attention(inputs, width, heads, rngs=rngs),
            latent=path,
            width=width,
            floor=floor,
            draws=draws,
            prediction_draws=prediction_draws,
            proposal=proposal,
            fewest=fewest,
            rngs=rngs,
        )


def check_latent(size: int, least: int) -> int:
    """The number of latents. Raises ValueError for fewer than the least."""
    if size < least:
        raise ValueError(f"expected latent of at least {least}, got {size}")
    return size
