"""Names for matplotlib's types: it is imported inside functions, as it costs a second and training does not need it."""

from typing import Any, TypeAlias

Figure: TypeAlias = Any  # matplotlib.figure.Figure
Axes: TypeAlias = Any  # matplotlib.axes.Axes
Pyplot: TypeAlias = Any  # the module matplotlib.pyplot
