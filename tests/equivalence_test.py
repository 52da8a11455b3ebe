"""A cycle against the literal recipe, and against one large batch."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from recipe import OPTIMIZERS, build_recipe, initialize_recipe

NUM_IDS = 7


class Model:
    """An embedding and two layers, fed with ids and targets."""

    def __init__(self, dtype=tf.float32, use_resource=None, reduce=None):
        self.ids = tf.placeholder(tf.int32, [None, 2])
        self.targets = tf.placeholder(dtype, [None, 3])

        def variable(name, shape, seed):
            values = np.random.RandomState(seed).randn(*shape)
            return tf.get_variable(
                name, shape, dtype, use_resource=use_resource,
                initializer=tf.constant_initializer(values))

        table = variable("table", [NUM_IDS, 4], 1)
        hidden = tf.reshape(tf.nn.embedding_lookup(table, self.ids), [-1, 8])
        hidden = tf.tanh(tf.nn.xw_plus_b(
            hidden, variable("w1", [8, 5], 2), variable("b1", [5], 3)))
        outputs = tf.nn.xw_plus_b(
            hidden, variable("w2", [5, 3], 4), variable("b2", [3], 5))
        losses = tf.reduce_sum(
            tf.squared_difference(outputs, self.targets), axis=1)
        self.loss = (reduce or tf.reduce_mean)(losses)

    def feed(self, ids, targets):
        return {self.ids: ids, self.targets: targets}


def make_data(num_examples, seed=0):
    random = np.random.RandomState(seed)
    return (random.randint(0, NUM_IDS, size=(num_examples, 2)),
            random.randn(num_examples, 3))


def variable_values(session):
    """Weights, slots and beta powers, by name."""
    variables = tf.global_variables()
    return dict(zip([variable.op.name for variable in variables],
                    session.run(variables)))


def run_recipe_cycles(optimizer_name, use_resource, sizes):
    """Returns the variables after each cycle of the literal recipe."""
    values = []
    with tf.Graph().as_default(), tf.Session() as session:
        model = Model(use_resource=use_resource)
        zero_ops, accum_ops, train_op = build_recipe(
            model.loss, OPTIMIZERS[optimizer_name]())
        session.run(tf.global_variables_initializer())
        initialize_recipe(session)
        for cycle, size in enumerate(sizes):
            ids, targets = make_data(size, seed=cycle)
            session.run(zero_ops)
            for i in range(size):
                session.run(accum_ops, feed_dict=model.feed(
                    ids[i:i + 1], targets[i:i + 1]))
            session.run(train_op)
            values.append(variable_values(session))
    return values


@pytest.mark.parametrize("optimizer_name", sorted(OPTIMIZERS))
def test_dense_is_the_recipe_bit_for_bit(graph, use_resource, optimizer_name):
    sizes = [4, 1, 3]
    model = Model(use_resource=use_resource)
    ops = accumgrad.build_accumulation_ops(
        model.loss, OPTIMIZERS[optimizer_name](), accumulators="dense")
    init = tf.global_variables_initializer()
    with tf.Session() as session:
        session.run(init)
        expected = run_recipe_cycles(optimizer_name, use_resource, sizes)
        for cycle, (size, recipe) in enumerate(zip(sizes, expected)):
            ids, targets = make_data(size, seed=cycle)
            accumgrad.run_cycle(session, ops, (
                model.feed(ids[i:i + 1], targets[i:i + 1])
                for i in range(size)))
            ours = variable_values(session)
            assert ours.keys() == recipe.keys()
            for name, value in recipe.items():
                np.testing.assert_array_equal(value, ours[name], name)


def run_large_batches(optimizer_name, dtype, reduce, batches):
    """Returns the variables after each `minimize` of a whole batch."""
    values = []
    with tf.Graph().as_default(), tf.Session() as session:
        model = Model(dtype, reduce=reduce)
        train_op = OPTIMIZERS[optimizer_name]().minimize(model.loss)
        session.run(tf.global_variables_initializer())
        for ids, targets in batches:
            session.run(train_op, feed_dict=model.feed(ids, targets))
            values.append(variable_values(session))
    return values


# Both sides differ in the order of sums of a few terms: in float64 a few eps
# of 2.2e-16, carried through at most four updates; in float32 of 1.2e-7.
@pytest.mark.parametrize("dtype, rtol", [(tf.float64, 1e-12),
                                         (tf.float32, 1e-5)],
                         ids=["float64", "float32"])
@pytest.mark.parametrize("accumulators", ["auto", "dense"])
@pytest.mark.parametrize("reduction, reduce", [("sum", tf.reduce_sum),
                                               ("mean", tf.reduce_mean)],
                         ids=["sum", "mean"])
@pytest.mark.parametrize("optimizer_name", ["Adam", "GradientDescent"])
def test_cycle_equals_one_large_batch(graph, dtype, rtol, accumulators,
                                      reduction, reduce, optimizer_name):
    model = Model(dtype, reduce=reduce)
    ops = accumgrad.build_accumulation_ops(
        model.loss, OPTIMIZERS[optimizer_name](), reduction=reduction,
        accumulators=accumulators)
    init = tf.global_variables_initializer()

    sizes = [4, 1, 6, 4]  # N changes with the cycle
    ids, targets = make_data(sum(sizes) - 1)  # and the last falls one short
    bounds = np.cumsum([0] + sizes)
    expected = run_large_batches(
        optimizer_name, dtype, reduce,
        [(ids[start:stop], targets[start:stop])
         for start, stop in zip(bounds, bounds[1:])])

    with tf.Session() as session:
        session.run(init)
        cycles = accumgrad.run_cycles(
            session, ops,
            (model.feed(ids[i:i + 1], targets[i:i + 1])
             for i in range(len(ids))),
            lambda index: sizes[index])
        taken = []
        for cycle, whole in zip(cycles, expected):
            taken.append(cycle.num_micro_batches)
            ours = variable_values(session)
            assert ours.keys() == whole.keys()
            for name, value in whole.items():
                # What is near zero is a difference of numbers near one.
                np.testing.assert_allclose(ours[name], value, rtol, rtol,
                                           err_msg=name)
        assert taken == [4, 1, 6, 3]


def test_cycle_of_one_is_minimize(graph, use_resource):
    ids, targets = make_data(3)
    model = Model(use_resource=use_resource)
    ops = accumgrad.build_accumulation_ops(
        model.loss, OPTIMIZERS["Momentum"]())
    init = tf.global_variables_initializer()
    expected = run_large_batches("Momentum", tf.float32, tf.reduce_mean,
                                 [(ids[i:i + 1], targets[i:i + 1])
                                  for i in range(3)])
    with tf.Session() as session:
        session.run(init)
        for i, whole in enumerate(expected):
            accumgrad.run_cycle(session, ops, [
                model.feed(ids[i:i + 1], targets[i:i + 1])], 1)
            ours = variable_values(session)
            for name, value in whole.items():
                np.testing.assert_allclose(ours[name], value, 1e-6, 1e-7,
                                           err_msg=name)


def test_sum_and_mean_of_known_gradients(graph):
    # d(w x)/dw = x, so three micro-batches give 1 + 2 + 6 = 9, or 3.
    x = tf.placeholder(tf.float32, [])
    results = {}
    for reduction in ("sum", "mean"):
        w = tf.get_variable(reduction, [], initializer=tf.ones_initializer())
        ops = accumgrad.build_accumulation_ops(
            w * x, tf.train.GradientDescentOptimizer(0.5), [w],
            reduction=reduction)
        with tf.Session() as session:
            session.run(w.initializer)
            accumgrad.run_cycle(session, ops, [{x: 1}, {x: 2}, {x: 6}])
            results[reduction] = session.run(w)
    assert results == {"sum": 1 - 0.5 * 9, "mean": 1 - 0.5 * 3}


def test_sum_outlives_float16(graph):
    # 2048 + 1 is 2048 in float16; the sum of 4096 ones is exactly 4096.
    x = tf.placeholder(tf.float16, [])
    w = tf.get_variable("w", [], tf.float16, tf.zeros_initializer())
    ops = accumgrad.build_accumulation_ops(
        w * x, tf.train.GradientDescentOptimizer(1.0))
    with tf.Session() as session:
        session.run(w.initializer)
        accumgrad.run_cycle(session, ops, [{x: 1}] * 4096, 4096)
        assert session.run(w) == -4096


def test_nan_does_not_outlive_its_cycle(graph):
    x = tf.placeholder(tf.float32, [])
    w = tf.get_variable("w", [], initializer=tf.ones_initializer())
    table = tf.get_variable("t", [3, 1], initializer=tf.ones_initializer())
    loss = (w + tf.reduce_sum(tf.gather(table, [1]))) * x
    ops = accumgrad.build_accumulation_ops(
        loss, tf.train.GradientDescentOptimizer(1.0))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(ops.zero_ops)
        session.run(ops.accum_ops, {x: np.nan})
        accumgrad.run_cycle(session, ops, [{x: 2}, {x: 3}])
        assert session.run(w) == 1 - 5
        np.testing.assert_array_equal(session.run(table), [[1], [-4], [1]])
