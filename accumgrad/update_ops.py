"""Takes back what update ops did with a micro-batch that counts for nothing.

An update op that is in the graph cannot be made to depend on what is found
out later.  So what it writes to is kept as the last micro-batch left it.
"""

from typing import Sequence

import tensorflow.compat.v1 as tf

from accumgrad import accumulators
from accumgrad import graph_reading


class RevocableUpdates:
    """The variables that update ops write to, and what they were before.

    Attributes:
        zero_ops: Keep the values that the variables have now.
    """

    def __init__(self, update_ops: Sequence[tf.Operation],
                 trained: Sequence[tf.Variable], saved: bool) -> None:
        """Makes the copies.

        Args:
            update_ops: The ops that run with each micro-batch.
            trained: Variables that are left out, the trained ones.
            saved: Whether checkpoints are to have the copies.
        """
        written = graph_reading.find_written(
            graph_reading.upstream(update_ops))
        written.difference_update(variable.op.name for variable in trained)
        known = {variable.op.name: variable for variable in
                 tf.global_variables() + tf.local_variables()}
        self._variables = [known[name]
                           for name in sorted(written.intersection(known))]
        # Where the initializers of ours run before the variables have values,
        # there is nothing to go back to until a micro-batch is over.  One
        # tensor tells, so that all of them find the same; global variables
        # are initialised in no order.
        initialized = tf.constant(False) if saved else tf.reduce_all(tf.stack(
            [tf.constant(True)] + [tf.is_variable_initialized(variable)
                                   for variable in self._variables]))
        self._known = accumulators.state_variable(
            "updates_known", lambda: initialized, tf.bool, saved=saved)
        self._copies = [_make_copy(variable, initialized, saved)
                        for variable in self._variables]
        self.zero_ops = [self._keep([
            variable.read_value() for variable in self._variables])]

    def settle(self, counts: tf.Tensor) -> tf.Operation:
        """Returns the op that keeps what the updates did, or takes it back.

        To be run once they are done.

        Args:
            counts: Whether the micro-batch counts, a scalar bool `Tensor`.
        """
        check = tf.raw_ops.Assert(
            condition=counts | self._known.read_value(),
            data=[tf.constant(
                "accumgrad: the first micro-batch of a session is to be "
                "skipped, and what its update ops did cannot be taken back.  "
                "Begin with a finite one; or, unless the accumulators are "
                "saved, run tf.compat.v1.local_variables_initializer() once "
                "the variables are initialised or restored.")])
        with tf.control_dependencies([check]):
            settled = [
                _choose(counts, variable.read_value(), copy.read_value())
                for variable, copy in zip(self._variables, self._copies)]
        # All are read before one is written.
        with tf.control_dependencies(settled):
            return tf.group(self._keep(settled), *[
                tf.assign(variable, value)
                for variable, value in zip(self._variables, settled)])

    def forget(self) -> tf.Operation:
        """Returns an op that keeps nothing, made where it is called."""
        return tf.group(self._known.assign(False, read_value=False), *[
            copy.assign(_nothing(copy.dtype), read_value=False)
            for copy in self._copies])

    def _keep(self, values: Sequence[tf.Tensor]) -> tf.Operation:
        return tf.group(self._known.assign(True, read_value=False), *[
            copy.assign(_copy(value), read_value=False)
            for copy, value in zip(self._copies, values)])


def _copy(value: tf.Tensor) -> tf.Tensor:
    # A reference variable's value is its own memory.
    return tf.raw_ops.DeepCopy(x=value)


def _choose(condition: tf.Tensor, value: tf.Tensor,
            copy: tf.Tensor) -> tf.Tensor:
    # Not tf.where: their shapes differ where there is no copy yet.
    return tf.cond(condition, lambda: value, lambda: copy)


def _nothing(dtype: tf.DType) -> tf.Tensor:
    # Never fed: it hides the static shape of the scalar.
    return tf.placeholder_with_default(tf.zeros([], dtype), None)


def _make_copy(variable: tf.Variable, initialized: tf.Tensor,
               saved: bool) -> tf.Variable:
    dtype = variable.dtype.base_dtype
    return accumulators.state_variable(
        variable.op.name + "/before_micro_batch",
        lambda: tf.cond(initialized, lambda: _copy(variable.read_value()),
                        lambda: _nothing(dtype)),
        dtype, validate_shape=False, saved=saved)
