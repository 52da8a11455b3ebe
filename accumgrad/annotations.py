"""Names for the types that stand in many signatures.

TensorFlow has no annotations of its own: to a type checker, what is of `tf` is
`Any`.
"""

from typing import (Any, Callable, Iterable, List, Mapping, Optional, Tuple,
                    Union)

import tensorflow.compat.v1 as tf

Gradient = Union[tf.Tensor, tf.IndexedSlices]
GradsAndVars = List[Tuple[Gradient, tf.Variable]]
# As `compute_gradients` returns them.
MaybeGradsAndVars = List[Tuple[Optional[Gradient], tf.Variable]]
# What takes such pairs also takes a zip.
IterableOfPairs = Iterable[Tuple[Optional[Gradient], tf.Variable]]
Transform = Callable[[GradsAndVars], IterableOfPairs]

# What a micro-batch is fed with; None where the graph reads its own input.
Feed = Optional[Mapping[Any, Any]]
