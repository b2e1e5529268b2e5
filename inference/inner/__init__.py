"""The inner loop: inference for one task, one algorithm a file."""

from fewshot.inference.inner.base import Code, Inference, Info, Mask, fit, fit_to_tolerance, run
from fewshot.inference.inner.cavi import cavi
from fewshot.inference.inner.cvi import cvi
from fewshot.inference.inner.exact import exact
from fewshot.inference.inner.gibbs import gibbs
from fewshot.inference.inner.gradient import gradient
from fewshot.inference.inner.laplace import laplace
from fewshot.inference.inner.settle import settle

__all__ = [
    "Code",
    "Inference",
    "Info",
    "Mask",
    "cavi",
    "cvi",
    "exact",
    "fit",
    "fit_to_tolerance",
    "gibbs",
    "gradient",
    "laplace",
    "run",
    "settle",
]
