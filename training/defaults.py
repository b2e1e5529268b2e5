"""What `auto` stands for: one table for all choices that a command line may leave open.

Chosen on validation classes: `docs/results/choices/` has the records, of 400 steps unless they say otherwise, trained
by the bound unless their pages name an objective. Two values differ from what they choose, a prior scale of 3 (two
records, by 0.006 and 0.007 nats) and a learning rate of 0.004 (five, by 0.006 to 0.019); docs/comparisons.md says why.
Keys are the choice that an entry depends on; where a key is missing the entry under None is used.
"""

from collections.abc import Mapping
from typing import TypeVar

from fewshot.models.kernels import SCALE

Value = TypeVar("Value")
Table = Mapping[str | None, Value]

INFERENCE: Table[str] = {"gaussian": "exact", "normal": "exact", "student-t": "cavi", None: "cvi"}  # by likelihood
# By likelihood and inference. Leaving one out had less NLL than the bound for the first four; for logistic-softmax by
# cvi, softmax by laplace and label regression it had no less, and others were not asked.
OBJECTIVE: Table[str] = {
    "softmax cvi": "leave-one-out",
    "one-vs-each cvi": "leave-one-out",
    "one-vs-each cavi": "leave-one-out",
    "logistic-softmax cavi": "leave-one-out",
    "logistic-softmax gibbs": "predictive",
    "one-vs-each gibbs": "predictive",
    None: "elbo",
}
HYPERGRADIENT: Table[str] = {"gradient": "unroll", None: "sites"}  # by inference
KERNEL: Table[str] = {None: "rbf"}  # by data set: near the top in accuracy and NLL
# By likelihood: regressed labels are -1 and 1, and real ones are best given at about unit scale.
PRIOR_SCALE: Table[float] = {"gaussian": 1.0, "normal": 1.0, "student-t": 1.0, None: SCALE}
# By inference and data set, else by inference. On two data sets 3 steps of cvi had less NLL than 10, on others not.
INNER_STEPS: Table[int] = {"cvi glyphs": 3, "cvi omniglot": 3, "exact": 1, "gradient": 20, "gibbs": 5, None: 10}
AUGMENT: Table[str] = {"omniglot-emnist": "handwriting", None: "none"}  # by data set
# By learner: relation networks compare maps, of which Conv4 leaves one pixel on characters.
CONV4: Table[str] = {"relation": "conv4-maps", None: "conv4"}
EPISODES: Table[int] = {"glyphs": 800, None: 8_000}  # by data set

# Flags of a data set with real labels that are not given: one latent function, inputs that are few numbers.
REAL_LABELS: Mapping[str, str | int] = {"likelihood": "normal", "backbone": "mlp", "way": 1}
# Of MAML on them: five steps at the 0.01 of images overflow on `sinusoids`. After `--tasks-per-step 4 --episodes 8000
# --shot 10` the NLL of validation tasks was 1.13 with it, 1.28 by `--set learner.inner_steps=1` at 0.01 (seed 0).
REAL_INNER_RATE = 0.001
SHOT: Table[int] = {"glyph-completion": 100, "omniglot-completion": 100, None: 5}  # of these, by data set

TRAINING_QUERIES = 16  # a class: this many, or what the smallest class has left


def choose(table: Table[Value], *keys: str) -> Value:
    """The entry of the first key that has one, else the one under None."""
    return table[next((key for key in keys if key in table), None)]
