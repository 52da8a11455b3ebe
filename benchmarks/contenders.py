"""Trains a model in each of the ways that are compared.

Each function builds its ops into the default graph, and returns a generator
function of a session, an iterator of feed dicts, and a function that maps a
cycle's index to its number of micro-batches.  The generator runs cycles
without end, and stops to yield after each.
"""

import itertools

import tensorflow.compat.v1 as tf

import accumgrad


def recipe(loss, optimizer):
    """The recipe as people paste it, and its loop."""
    tvs = tf.trainable_variables()
    accum_vars = [
        tf.Variable(tf.zeros_like(tv.initialized_value()), trainable=False)
        for tv in tvs]
    zero_ops = [tv.assign(tf.zeros_like(tv)) for tv in accum_vars]
    gvs = optimizer.compute_gradients(loss, tvs)
    accum_ops = [accum_vars[i].assign_add(gv[0]) for i, gv in enumerate(gvs)]
    train_step = optimizer.apply_gradients(
        [(accum_vars[i], gv[1]) for i, gv in enumerate(gvs)])

    def cycles(session, feeds, size):
        for index in itertools.count():
            session.run(zero_ops)
            for _ in range(size(index)):
                session.run(accum_ops, feed_dict=next(feeds))
            session.run(train_step)
            yield
    return cycles


def gradients(loss, optimizer):
    """Computes the gradients, and neither accumulates nor applies them."""
    grads_and_vars = optimizer.compute_gradients(loss)
    # Each by itself: in a group, TensorFlow's graph optimizer could prune it.
    gradient_ops = [
        gradient.values.op if isinstance(gradient, tf.IndexedSlices)
        else gradient.op for gradient, _ in grads_and_vars]
    # Never run.  It makes the slots, which all the others have too.
    optimizer.apply_gradients(grads_and_vars)

    def cycles(session, feeds, size):
        for index in itertools.count():
            for _ in range(size(index)):
                session.run(gradient_ops, feed_dict=next(feeds))
            yield
    return cycles


def dense(loss, optimizer):
    """accumgrad, with a sum of each variable's shape."""
    return _accumgrad(loss, optimizer, "dense")


def auto(loss, optimizer):
    """accumgrad, with each gradient in its smallest exact form."""
    return _accumgrad(loss, optimizer, "auto")


def _accumgrad(loss, optimizer, accumulators):
    ops = accumgrad.build_accumulation_ops(loss, optimizer,
                                           accumulators=accumulators)

    def cycles(session, feeds, size):
        for _ in accumgrad.run_cycles(session, ops, feeds, size):
            yield
    return cycles
