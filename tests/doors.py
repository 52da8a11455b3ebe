"""The front doors of the library, behind one interface for the tests."""

import pytest
import tensorflow.compat.v1 as tf

import accumgrad


class BuilderDoor:
    """`build_accumulation_ops`, and cycles by `run_cycle`."""

    def __init__(self, loss, optimizer, num_micro_batches=None, **options):
        self.ops = accumgrad.build_accumulation_ops(loss, optimizer,
                                                    **options)
        [self.micro_batch_op] = self.ops.accum_ops

    def accumulate(self, session, feeds):
        """Begins a cycle with fewer micro-batches than it has."""
        session.run(self.ops.zero_ops)
        for feed in feeds:
            session.run(self.ops.accum_ops, feed)

    def run_cycle(self, session, feeds):
        """Runs a whole cycle."""
        self.accumulate(session, feeds)
        session.run(self.ops.train_op)


class OptimizerDoor:
    """`AccumulatingOptimizer`, whose one op is run once a micro-batch.

    Where no number of micro-batches is given, each cycle may have its own.
    """

    def __init__(self, loss, optimizer, num_micro_batches=None, *,
                 var_list=None, global_step=None, **options):
        self._size = None
        if num_micro_batches is None:
            num_micro_batches = self._size = tf.Variable(
                1, trainable=False, name="size", use_resource=True,
                collections=[tf.GraphKeys.LOCAL_VARIABLES])
        self.optimizer = accumgrad.AccumulatingOptimizer(
            optimizer, num_micro_batches, **options)
        try:
            self.train_op = self.optimizer.minimize(
                loss, global_step=global_step, var_list=var_list)
        except ValueError as error:
            if "reference variables under control flow v2" not in str(error):
                raise
            # optimizer_test.py has a test of that.
            pytest.skip(str(error))
        self.micro_batch_op = self.train_op

    def accumulate(self, session, feeds):
        """Begins a cycle with fewer micro-batches than it has."""
        for feed in feeds:
            session.run(self.train_op, feed)

    def run_cycle(self, session, feeds):
        """Runs a whole cycle."""
        if self._size is not None:
            self._size.load(len(feeds), session)
        self.accumulate(session, feeds)


DOORS = {"builder": BuilderDoor, "optimizer": OptimizerDoor}
