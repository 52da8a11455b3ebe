"""Transforms of a cycle's gradients, for `transform_gradients`.

A transform takes a list of pairs (gradient, variable) and returns one, as
stands between an optimizer's `compute_gradients` and `apply_gradients`.
"""

import numbers
from typing import Any, Callable, Sequence, Union

import tensorflow.compat.v1 as tf

from accumgrad.annotations import Gradient
from accumgrad.annotations import GradsAndVars


def clip_by_global_norm(
        clip_norm: Union[float, tf.Tensor]
) -> Callable[[GradsAndVars], GradsAndVars]:
    """Makes a transform that bounds the norm of all gradients together.

    Where the global norm, `sqrt(sum_i |g_i|^2)`, is above `clip_norm`, each
    gradient becomes `g_i * clip_norm / global norm`; otherwise they stay as
    they are (Pascanu, Mikolov and Bengio, 2013, algorithm 1).  Of
    `IndexedSlices`, occurrences of a row are added up first, so that their
    norm is that of the dense gradient; `tf.clip_by_global_norm` takes each by
    itself.  If the norm is infinite or NaN, all gradients become NaN, as with
    that function::

        ops = accumgrad.build_accumulation_ops(
            loss, optimizer,
            transform_gradients=accumgrad.clip_by_global_norm(1.0))

    Args:
        clip_norm: The largest norm, in the gradients' unit: a number above 0,
            or a scalar floating-point `Tensor`.

    Returns:
        A function from pairs of a gradient, a `Tensor` or `IndexedSlices`,
        and its variable to pairs of the same; of dtypes that stay the same.
        The norm is computed in float32, or in float64 if a gradient is.

    Raises:
        TypeError: `clip_norm` is neither.
        ValueError: It is a number that is not above 0 or not finite.
    """
    _check_clip_norm(clip_norm)

    def clip(grads_and_vars: GradsAndVars) -> GradsAndVars:
        grads_and_vars = [(_sum_repeated_rows(gradient), variable)
                          for gradient, variable in grads_and_vars
                          if gradient is not None]
        norm = global_norm([gradient for gradient, _ in grads_and_vars])
        limit = (tf.cast(clip_norm, norm.dtype)
                 if isinstance(clip_norm, tf.Tensor)
                 else tf.constant(clip_norm, norm.dtype))
        # Infinity times zero would only spoil those that are infinite.
        scale = limit / tf.maximum(norm, limit) + (norm - norm)
        return [(_scale(gradient, scale), variable)
                for gradient, variable in grads_and_vars]
    return clip


def global_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns the root of the sum of all squares, in float32 or float64.

    Args:
        gradients: `Tensor`s, or `IndexedSlices` that have each row once.
    """
    values = [_values(gradient) for gradient in gradients]
    dtype = (tf.float64 if any(value.dtype == tf.float64 for value in values)
             else tf.float32)
    # Not by tf.add_n, which adds up in an order that differs from run to run.
    return tf.sqrt(tf.reduce_sum(tf.stack([
        tf.reduce_sum(tf.square(tf.cast(value, dtype))) for value in values])))


def _check_clip_norm(clip_norm: Any) -> None:
    if isinstance(clip_norm, tf.Tensor):
        if not (clip_norm.dtype.is_floating
                and clip_norm.shape.is_compatible_with([])):
            raise TypeError(
                "`clip_norm` must be a scalar of a floating-point dtype; got "
                f"{clip_norm.name!r} of shape {clip_norm.shape} and dtype "
                f"{clip_norm.dtype.name}.")
        return
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, numbers.Real):
        raise TypeError("`clip_norm` must be a number or a scalar tf.Tensor; "
                        f"got {clip_norm!r} ({type(clip_norm).__name__}).")
    if clip_norm <= 0 or not clip_norm < float("inf"):
        raise ValueError("`clip_norm` must be above 0 and finite; got "
                         f"{clip_norm!r}.")


def _sum_repeated_rows(gradient: Gradient) -> Gradient:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, segments = tf.unique(gradient.indices)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(gradient.values, segments,
                                     tf.size(indices)),
        indices, gradient.dense_shape)


def _values(gradient: Gradient) -> tf.Tensor:
    return (gradient.values if isinstance(gradient, tf.IndexedSlices)
            else gradient)


def _scale(gradient: Gradient, scale: tf.Tensor) -> Gradient:
    values = _values(gradient)
    # Not in half precision, in which the scale may be zero.
    scaled = tf.cast(tf.cast(values, scale.dtype) * scale, values.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled, gradient.indices,
                                gradient.dense_shape)
    return scaled
