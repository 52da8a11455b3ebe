"""Takes back what update ops did with a micro-batch that counts for nothing.

An update op that is in the graph cannot be made to depend on what is found
out later.  So what it writes to is kept as the last micro-batch left it.
"""

import tensorflow.compat.v1 as tf

from accumgrad import accumulators
from accumgrad import graph_reading


class RevocableUpdates:
    """The variables that update ops write to, and what they were before.

    Attributes:
        zero_ops: Keep the values with which a cycle begins.
    """

    def __init__(self, update_ops, trained, saved):
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
        self._copies = [_make_copy(variable, saved)
                        for variable in self._variables]
        self.zero_ops = [self._copy(copy, variable.read_value())
                         for variable, copy in self._pairs()]

    def settle(self, counts):
        """Returns the op that keeps what the updates did, or takes it back.

        To be run once they are done.

        Args:
            counts: Whether the micro-batch counts, a scalar bool `Tensor`.
        """
        settled = [tf.where(counts, variable.read_value(), copy.read_value())
                   for variable, copy in self._pairs()]
        # All are read before one is written.
        with tf.control_dependencies(settled):
            return tf.group(*[
                tf.group(tf.assign(variable, value), self._copy(copy, value))
                for value, (variable, copy) in zip(settled, self._pairs())])

    def _pairs(self):
        return list(zip(self._variables, self._copies))

    @staticmethod
    def _copy(copy, value):
        # A reference variable's value is its own memory.
        return copy.assign(tf.raw_ops.DeepCopy(x=value), read_value=False)


def _make_copy(variable, saved):
    dtype = variable.dtype.base_dtype
    # zero_ops give it its value, and with it the shape.  An initial value
    # that reads the variable could not be run before the variable's own.
    with tf.device(variable.device):
        return accumulators.state_variable(
            variable.op.name + "/before_micro_batch",
            lambda: tf.placeholder_with_default(tf.zeros([], dtype), None),
            dtype, validate_shape=False, saved=saved)
