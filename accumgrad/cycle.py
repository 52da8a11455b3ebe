"""The state of a cycle: what is accumulated, how much, and what to make of it.

Knows no optimizer: what comes out is pairs of a gradient and a variable.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import tensorflow.compat.v1 as tf

from accumgrad import accumulators as accumulators_lib
from accumgrad import checks
from accumgrad import update_ops as update_ops_lib
from accumgrad.annotations import Gradient
from accumgrad.annotations import GradsAndVars
from accumgrad.annotations import Transform

REDUCTIONS = ("sum", "mean")
NONFINITE = ("apply", "skip", "skip_micro_batch", "raise")
ACCUMULATORS = ("auto", "dense")


class Options(NamedTuple):
    """What `build_accumulation_ops` documents under these names."""
    reduction: str
    weight: Any
    transform_gradients: Optional[Transform]
    update_ops: List[tf.Operation]
    nonfinite: str
    accumulators: str
    save_accumulators: bool


def check_options(options: Options, optimizer: Any) -> Options:
    """Returns the options with `update_ops` as a flat list, or raises."""
    checks.check_choice("reduction", options.reduction, REDUCTIONS)
    checks.check_choice("nonfinite", options.nonfinite, NONFINITE)
    checks.check_choice("accumulators", options.accumulators, ACCUMULATORS)
    checks.check_flag("save_accumulators", options.save_accumulators)
    checks.check_weight(options.weight)
    checks.check_transform(options.transform_gradients)
    checks.check_loss_scale(options.nonfinite, optimizer)
    return options._replace(
        update_ops=checks.check_update_ops(options.update_ops))


class Cycle:
    """The accumulators of a cycle, and the weight of what is in them.

    To be made, and `accumulate` to be called, under the caller's control
    dependencies: these are for the micro-batches.

    Attributes:
        accumulators: One for each pair.
        zero_ops: Empty the accumulators, and initialise them if they never
            were.
        is_weighted: Whether a micro-batch may count for other than one.
        weight: Of the micro-batch, once `accumulate` was called: a scalar
            `Tensor`, or None for one.
        device: Where the state is that is of no variable's gradient.
        total_weight: Scalar int64 or float64 variable: the number of
            micro-batches, or the sum of their weights.
    """

    def __init__(self, grads_and_vars: GradsAndVars, options: Options,
                 losses: List[tf.Tensor], scope: str) -> None:
        """Makes the state.

        Args:
            grads_and_vars: Pairs of one micro-batch's gradient and variable.
            options: Checked `Options`.
            losses: List of what `accumulate` waits for, so that a run that
                fails for want of data counts for nothing.
            scope: The library's name scope.
        """
        self._options = options
        self._grads_and_vars = grads_and_vars
        self._variables = [variable for _, variable in grads_and_vars]
        self._losses = losses
        self._scope = scope
        skips = options.nonfinite == "skip_micro_batch"
        self.is_weighted = options.weight is not None or skips
        with tf.name_scope(scope), tf.control_dependencies(
                options.update_ops):
            # Only an op can tell what control dependencies the caller has
            # set, which are update ops as well.
            self._updated = tf.no_op(name="updated")
        with tf.control_dependencies(None), tf.name_scope(scope):
            self.weight = _as_tensor(options.weight)
            running = [loss.op for loss in losses] + [self._updated]
            if self.weight is not None:
                running.append(self.weight.op)
            self.accumulators = accumulators_lib.make_accumulators(
                grads_and_vars, options.accumulators, running,
                weighted=self.is_weighted, saved=options.save_accumulators)
            self.zero_ops = [
                op for accumulator in self.accumulators
                for op in accumulator.zero_ops]
            self._updates = None
            # With the worker, as the accumulators are.
            self.device = (losses[0].device if losses
                           else values_of(grads_and_vars[0][0]).device)
            with tf.device(self.device):
                self.total_weight = accumulators_lib.count_variable(
                    "num_micro_batches" if self.weight is None
                    else "total_weight",
                    _total_dtype(self.weight), options.save_accumulators)
                self.zero_ops.append(self.total_weight.initializer)
                if skips:
                    self._updates = update_ops_lib.RevocableUpdates(
                        [self._updated], self._variables,
                        options.save_accumulators)
                    self.zero_ops.extend(self._updates.zero_ops)

    def accumulate(self) -> tf.Operation:
        """Returns the op that adds one micro-batch."""
        with tf.name_scope(self._scope), tf.control_dependencies(
                self._losses + [self._updated] + _check_weight(self.weight)):
            operations = []
            if self._updates is not None:
                finite = tf.reduce_all(tf.stack([
                    accumulator.is_finite()
                    for accumulator in self.accumulators]))
                operations.append(self._updates.settle(finite))
                self.weight = (
                    tf.cast(finite, tf.int64) if self.weight is None
                    else tf.where(finite, self.weight,
                                  tf.zeros_like(self.weight)))
            operations.extend(accumulator.accumulate(self.weight)
                              for accumulator in self.accumulators)
            operations.append(self.total_weight.assign_add(
                1 if self.weight is None
                else tf.cast(self.weight, self.total_weight.dtype),
                read_value=False))
            # As one: what a session run is asked for costs it time, op by op.
            return tf.group(*operations, name="accumulate")

    def is_accumulated(self) -> tf.Tensor:
        """Returns whether anything is in the accumulators."""
        return self.total_weight.read_value() > 0

    def reduce(self) -> GradsAndVars:
        """Returns the pairs of a reduced gradient and its variable."""
        with tf.name_scope(self._scope):
            total = self.total_weight.read_value()
            divisor = total if self._options.reduction == "mean" else None
            return [(_reduce(accumulator.read(total), divisor), variable)
                    for accumulator, variable
                    in zip(self.accumulators, self._variables)]

    def transform(self, reduced_and_vars: GradsAndVars) -> GradsAndVars:
        """Returns the pairs to apply, in the dtypes that gradients came in."""
        if self._options.transform_gradients is not None:
            reduced_and_vars = checks.check_transformed(
                self._options.transform_gradients(reduced_and_vars),
                self._variables)
        dtypes = {id(variable): gradient.dtype
                  for gradient, variable in self._grads_and_vars}
        with tf.name_scope(self._scope):
            return [(_cast(gradient, dtypes[id(variable)]), variable)
                    for gradient, variable in reduced_and_vars]

    def early_reads(self, grads_and_vars: GradsAndVars) -> List[tf.Tensor]:
        """Returns what is to be evaluated before any variable is updated."""
        applied = {id(variable) for _, variable in grads_and_vars}
        return [tensor for accumulator, variable
                in zip(self.accumulators, self._variables)
                if id(variable) in applied
                for tensor in accumulator.early_reads]

    def are_finite(
            self, grads_and_vars: GradsAndVars) -> List[Tuple[tf.Tensor, str]]:
        """Returns for each pair whether it is finite, and the message."""
        with tf.name_scope(self._scope):
            return [(
                accumulators_lib.all_finite([values_of(gradient)]),
                f"accumgrad: the gradient of {variable.op.name} has a NaN or "
                "an infinity; nothing was applied.")
                for gradient, variable in grads_and_vars]

    def forget_updates(self) -> tf.Operation:
        """Returns an op that makes what `"skip_micro_batch"` keeps as new.

        Made where it is called, as in `zero`.
        """
        return tf.no_op() if self._updates is None else self._updates.forget()

    def zero(self) -> tf.Operation:
        """Returns an op that empties the accumulators.

        Made where it is called, to be run in a branch of `tf.cond`.
        """
        return tf.group(
            accumulators_lib.reset(self.total_weight),
            *[accumulator.zero() for accumulator in self.accumulators])


def all_of(conditions: Sequence[Tuple[tf.Tensor, str]]) -> tf.Tensor:
    """Returns whether all hold; each comes with a message."""
    return tf.reduce_all(tf.stack([holds for holds, _ in conditions]))


def check(condition: tf.Tensor, message: str) -> tf.Operation:
    """Returns the op that fails with the message unless `condition` holds."""
    return tf.raw_ops.Assert(condition=condition,
                             data=[tf.constant(message)])


def values_of(gradient: Gradient) -> tf.Tensor:
    """Returns the values of `IndexedSlices`, or the `Tensor` itself."""
    return (gradient.values if isinstance(gradient, tf.IndexedSlices)
            else gradient)


def map_values(function: Callable[[tf.Tensor], tf.Tensor],
               gradient: Gradient) -> Gradient:
    """Returns `function(gradient)`, of `IndexedSlices` that of the values."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices,
                                gradient.dense_shape)
    return function(gradient)


def _cast(gradient: Gradient, dtype: tf.DType) -> Gradient:
    return map_values(lambda values: tf.cast(values, dtype), gradient)


def _as_tensor(weight: Any) -> Optional[tf.Tensor]:
    if weight is None:
        return None
    # A number as exact as it can be: by itself it would be float32.
    return tf.convert_to_tensor(
        weight, tf.float64 if isinstance(weight, float) else None,
        name="weight")


def _total_dtype(weight: Optional[tf.Tensor]) -> tf.DType:
    """Returns the dtype in which weights add up, int64 where they can."""
    return (tf.int64 if weight is None or weight.dtype.is_integer
            else tf.float64)


def _check_weight(weight: Optional[tf.Tensor]) -> List[tf.Operation]:
    """Returns the ops that fail where `weight` is not to be used."""
    if weight is None:
        return []
    as_float64 = tf.cast(weight, tf.float64)
    return [tf.raw_ops.Assert(
        condition=(as_float64 >= 0) & tf.is_finite(as_float64),
        data=[tf.constant("accumgrad: `weight` must be at least 0 and "
                          "finite; nothing was accumulated.  Got:"), weight])]


def _reduce(total: Gradient, divisor: Optional[tf.Tensor]) -> Gradient:
    if divisor is None:
        return total
    return map_values(
        lambda values: values / tf.cast(divisor, values.dtype), total)
