"""The inner loop: inference for one task, one algorithm a file."""

from inference.inner.base import Code, InferenceKernel, Info, Mask, fit, fit_to_tolerance, run
from inference.inner.cvi import cvi
from inference.inner.exact import exact
from inference.inner.gradient import gradient

__all__ = ["Code", "InferenceKernel", "Info", "Mask", "cvi", "exact", "fit", "fit_to_tolerance", "gradient", "run"]
