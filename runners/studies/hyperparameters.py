"""The papers' tables of hyper-parameters as comparisons that reproduce.py can run: COMPARISONS, by name.

Published numbers are for CUB, 5-way 1-shot; here each is set beside the same change on Omniglot, where a run takes
minutes, so what can be compared is the order of the rows. The papers differentiate through every inner step, so their
tables are run with `unroll`, 3 steps (2 for CAVI) and their kernel (cosine) unless a row says otherwise; the
hyper-gradients are then compared at equal numbers of steps.
"""

from collections.abc import Iterable

from fewshot.runners.studies.comparisons import BOUND, Comparison, Method
from fewshot.runners.studies.published import Published

MD, CDKT = "MD-BSFC, CUB 1-shot", "CDKT, CUB 1-shot"
RHO = {0.01: "32.22", 0.1: "61.54", 0.5: "63.86", 1.0: "65.45"}
KERNELS = {"cosine": "65.45", "rbf": "62.75", "poly1": "64.69", "poly2": "64.74"}
STEPS = {1: "62.63", 3: "65.45", 5: "64.18", 7: "62.55"}
TEMPERATURES = {0.2: "65.8", 0.5: "65.2", 0.75: "64.0", 1.0: "60.9", 1.5: "59.4"}
HYPERGRADIENT_STEPS = (1, 3, 10, 50)


def _mirror(name: str, steps: int = 3, kernel: str = "cosine", rho: float = 1.0) -> Method:
    """Mirror descent as MD trains it: steps of a fixed length, unrolled."""
    changes = {**BOUND, "kernel": kernel, "hypergradient": "unroll", "inner_steps": steps}
    return Method(name, "softmax", "cvi", changes, {"inference.rho": rho})


def _coordinate_ascent(name: str, temperature: float) -> Method:
    """CAVI as CDKT trains it: two steps, unrolled; the temperature starts there and is learned with the kernel."""
    changes = {**BOUND, "kernel": "cosine", "hypergradient": "unroll", "inner_steps": 2}
    return Method(name, "logistic-softmax", "cavi", changes, {"likelihood.temperature": temperature})


def _crossing() -> Iterable[Method]:
    """How the gradient crosses the inner loop, with chosen step lengths and the default kernel."""
    for mode in ("sites", "unroll", "implicit"):
        for steps in HYPERGRADIENT_STEPS:
            yield Method(f"{mode}-{steps}", "softmax", "cvi", {**BOUND, "hypergradient": mode, "inner_steps": steps})


def _comparison(methods: Iterable[Method], published: Iterable[Published] = ()) -> Comparison:
    return Comparison("omniglot", tuple(methods), published=tuple(published))


COMPARISONS: dict[str, Comparison] = {
    "hyperparameters-rho": _comparison(
        [_mirror(f"rho-{rho:g}", rho=rho) for rho in RHO],
        [Published(f"rho-{rho:g}", {1: accuracy}, MD) for rho, accuracy in RHO.items()],
    ),
    "hyperparameters-kernel": _comparison(
        [_mirror(f"kernel-{kernel}", kernel=kernel) for kernel in KERNELS],
        [Published(f"kernel-{kernel}", {1: accuracy}, MD) for kernel, accuracy in KERNELS.items()],
    ),
    "hyperparameters-steps": _comparison(
        [_mirror(f"steps-{steps}", steps) for steps in STEPS],
        [Published(f"steps-{steps}", {1: accuracy}, MD) for steps, accuracy in STEPS.items()],
    ),
    "hyperparameters-temperature": _comparison(
        [_coordinate_ascent(f"temperature-{tau:g}", tau) for tau in TEMPERATURES],
        [Published(f"temperature-{tau:g}", {1: accuracy}, CDKT) for tau, accuracy in TEMPERATURES.items()],
    ),
    "hyperparameters-hypergradient": _comparison(_crossing()),
}
