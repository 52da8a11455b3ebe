"""Sparse gradients: what the optimizer gets, and what it leaves alone."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from accumgrad import accumulators
from optimizers import GivenPairs
from recipe import OPTIMIZERS

NUM_ROWS, ROW_SIZE = 6, 2
# Ids repeat within a micro-batch and across; rows 3 and 5 are never touched.
IDS = [[0, 1, 0], [1, 4, 4], [2, 0, 1], [4, 4, 4], []]


@pytest.fixture(params=["stored", "folded once", "folded always"])
def folding(request, monkeypatch):
    """Rows kept to the end, and added up when there are many of them."""
    elements = {"stored": 2 ** 18, "folded once": 14, "folded always": 0}
    monkeypatch.setattr(accumulators, "MIN_ELEMENTS_TO_FOLD",
                        elements[request.param])


def make_table(use_resource, dtype=tf.float64, shape=(NUM_ROWS, ROW_SIZE)):
    values = np.random.RandomState(0).randn(*shape)
    return tf.get_variable("table", shape, dtype, use_resource=use_resource,
                           initializer=tf.constant_initializer(values))


def row_gradients(ids, seed=0):
    random = np.random.RandomState(seed)
    return [random.randn(len(rows), ROW_SIZE) for rows in ids]


def apply_concatenated(optimizer_name, use_resource, cycles):
    """Returns table and slots after `apply_gradients` of all rows at once."""
    values = []
    with tf.Graph().as_default(), tf.Session() as session:
        table = make_table(use_resource)
        rows = tf.placeholder(tf.float64, [None, ROW_SIZE])
        ids = tf.placeholder(tf.int32, [None])
        train_op = OPTIMIZERS[optimizer_name]().apply_gradients([
            (tf.IndexedSlices(rows, ids, tf.constant([NUM_ROWS, ROW_SIZE])),
             table)])
        session.run(tf.global_variables_initializer())
        for cycle_ids, cycle_rows in cycles:
            session.run(train_op, {ids: np.concatenate(cycle_ids),
                                   rows: np.concatenate(cycle_rows)})
            values.append({variable.op.name: session.run(variable)
                           for variable in tf.global_variables()})
    return values


@pytest.mark.parametrize("optimizer_name", ["Momentum", "Ftrl"])
def test_rows_equal_the_concatenated_slices(graph, use_resource, folding,
                                            optimizer_name, door):
    # The second cycle touches fewer rows: lazy rules let the others rest,
    # with slots that are not zero.
    all_ids = [IDS, [[0, 0], [2]]]
    cycles = [(ids, row_gradients(ids, seed=n))
              for n, ids in enumerate(all_ids)]
    expected = apply_concatenated(optimizer_name, use_resource, cycles)

    table = make_table(use_resource)
    rows = tf.placeholder(tf.float64, [None, ROW_SIZE])
    ids = tf.placeholder(tf.int32, [None])
    # d loss / d table[ids] = rows
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) * rows)
    trainer = door(
        loss, OPTIMIZERS[optimizer_name]())
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(table)
        for (cycle_ids, cycle_rows), whole in zip(cycles, expected):
            trainer.run_cycle(session, [
                {ids: micro_ids, rows: micro_rows}
                for micro_ids, micro_rows in zip(cycle_ids, cycle_rows)])
            ours = {variable.op.name: session.run(variable)
                    for variable in tf.global_variables()}
            assert ours.keys() == whole.keys()
            for name, value in whole.items():
                # float64, in another order of at most nine terms.
                np.testing.assert_allclose(ours[name], value, 1e-12, 1e-14,
                                           err_msg=name)
        if optimizer_name != "Adam":  # whose sparse rule moves every row
            np.testing.assert_array_equal(before[[3, 5]],
                                          session.run(table)[[3, 5]])


def test_untouched_rows_and_their_momentum_stay(graph, use_resource, folding,
                                                door):
    table = make_table(use_resource)
    ids = tf.placeholder(tf.int64, [None])
    optimizer = OPTIMIZERS["Momentum"]()
    trainer = door(
        tf.reduce_sum(tf.gather(table, ids)), optimizer)
    momentum = optimizer.get_slot(table, "momentum")
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{ids: [1, 2]}, {ids: [2, 2]}])
        # d/d row = the number of times that it was looked up.
        np.testing.assert_array_equal(
            session.run(momentum)[:, 0], [0, 1, 3, 0, 0, 0])
        before = session.run([table, momentum])
        trainer.run_cycle(session, [{ids: [1]}, {ids: [1]}])
        after = session.run([table, momentum])
        rest = [0, 2, 3, 4, 5]
        for old, new in zip(before, after):
            np.testing.assert_array_equal(old[rest], new[rest])
        # The optimizer holds its 0.9 in float32.
        np.testing.assert_allclose(after[1][1], 0.9 * 1 + 2, 1e-7)


def test_table_used_by_gather_and_densely(graph, use_resource, door):
    # d/d table of sum(table[ids]) + sum(table ** 2) / 2 is counts + table.
    table = make_table(use_resource)
    ids = tf.placeholder(tf.int32, [None])
    loss = (tf.reduce_sum(tf.gather(table, ids))
            + 0.5 * tf.reduce_sum(tf.square(table)))
    trainer = door(
        loss, tf.train.GradientDescentOptimizer(0.5))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(table)
        trainer.run_cycle(session, [{ids: [0, 1, 0]}, {ids: [4]}])
        counts = np.array([[2], [1], [0], [0], [1], [0]])
        np.testing.assert_allclose(
            session.run(table), before - 0.5 * (counts + 2 * before),
            1e-12, 1e-14)


class RecordingOptimizer(tf.train.GradientDescentOptimizer):
    """Keeps what apply_gradients was given."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        self.given = list(grads_and_vars)
        return super().apply_gradients(self.given, global_step, name)


def test_optimizer_gets_each_row_once_with_dense_shape(graph, folding):
    table = make_table(False)
    ids = tf.placeholder(tf.int64, [None])
    optimizer = RecordingOptimizer(1.0)
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(tf.gather(table, ids)), optimizer)
    [(gradient, variable)] = optimizer.given
    assert variable is table
    assert isinstance(gradient, tf.IndexedSlices)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(ops.zero_ops)
        for micro_ids in IDS:
            session.run(ops.accum_ops, {ids: micro_ids})
        values, indices, shape = session.run(
            [gradient.values, gradient.indices, gradient.dense_shape])
    assert gradient.indices.dtype == tf.int64
    counts = dict(zip(indices, values[:, 0]))
    assert len(counts) == len(indices)
    assert counts == {0: 3, 1: 3, 2: 1, 4: 5}
    np.testing.assert_array_equal(shape, [NUM_ROWS, ROW_SIZE])


def test_rows_beyond_the_limit_are_folded(graph, use_resource, monkeypatch):
    # A quarter of the table's 12 elements is 3; a row has 2.
    monkeypatch.setattr(accumulators, "MIN_ELEMENTS_TO_FOLD", 0)
    table = make_table(use_resource)
    ids = tf.placeholder(tf.int32, [None])
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(tf.gather(table, ids)),
        tf.train.GradientDescentOptimizer(1.0))
    state = {variable.op.name.split("/")[-1]: variable.read_value()
             for variable in tf.local_variables()}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(ops.zero_ops)
        seen = []
        for _ in range(5):
            session.run(ops.accum_ops, {ids: [1]})
            seen.append((session.run(state["num_stored"]),
                         session.run(state["accumulator"]).shape))
        # The dense sum is a scalar until the second row passes the limit.
        assert seen == [(2, ()), (0, (6, 2)), (2, (6, 2)), (0, (6, 2)),
                        (2, (6, 2))]


def test_mean_divides_rows_by_micro_batches(graph, folding, door):
    # Row 1 comes in one micro-batch of four: its mean gradient is 1/4.
    table = make_table(False)
    ids = tf.placeholder(tf.int32, [None])
    trainer = door(
        tf.reduce_sum(tf.gather(table, ids)),
        tf.train.GradientDescentOptimizer(1.0), reduction="mean")
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(table)
        trainer.run_cycle(session, [
            {ids: [0]}, {ids: [0, 1]}, {ids: [0, 0]}, {ids: []}])
        moved = before - session.run(table)
        np.testing.assert_allclose(moved[:, 1], [1, .25, 0, 0, 0, 0],
                                   0, 1e-15)


def test_refilled_buffers_do_not_change_what_is_stored(graph):
    # TensorFlow does not copy an array that is 64-byte aligned: the feed
    # shares its memory, and so would what is stored of it.
    def aligned(shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.zeros(size + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start:start + size].view(dtype).reshape(shape)

    table = make_table(True, tf.float32, (64, 16))
    ids = tf.placeholder(tf.int32, [16])
    rows = tf.placeholder(tf.float32, [16, 16])
    gradient = tf.IndexedSlices(rows, ids, tf.constant([64, 16]))
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(rows), GivenPairs([(gradient, table)]))
    fed_ids, fed_rows = aligned([16], np.int32), aligned([16, 16], np.float32)
    expected = np.zeros([64, 16])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(table)
        session.run(ops.zero_ops)
        for n in range(4):
            fed_ids[:] = np.arange(16) + 16 * n
            fed_rows[:] = n + 1
            expected[16 * n:16 * n + 16] = n + 1
            session.run(ops.accum_ops, {ids: fed_ids, rows: fed_rows})
        session.run(ops.train_op)
        np.testing.assert_allclose(before - session.run(table), expected,
                                   0, 1e-6)


def test_given_slices_without_dense_shape(graph, use_resource, door):
    table = make_table(use_resource)
    rows = tf.placeholder(tf.float64, [None, ROW_SIZE])
    gradient = tf.IndexedSlices(rows, tf.constant([2, 2]))
    trainer = door(
        tf.reduce_sum(rows), GivenPairs([(gradient, table)]))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(table)
        trainer.run_cycle(session, [{rows: [[1, 2], [3, 4]]}] * 2)
        expected = np.zeros([NUM_ROWS, ROW_SIZE])
        expected[2] = [8, 12]
        np.testing.assert_allclose(before - session.run(table), expected,
                                   0, 1e-14)


def test_rows_of_any_rank(graph, folding, door):
    table = make_table(True, shape=(4, 2, 3))
    vector = tf.get_variable("vector", [5], tf.float64,
                             initializer=tf.zeros_initializer())
    ids = tf.placeholder(tf.int32, [2])
    trainer = door(
        tf.reduce_sum(tf.gather(table, ids))
        + tf.reduce_sum(tf.gather(vector, ids)),
        tf.train.GradientDescentOptimizer(1.0))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = session.run(table)
        trainer.run_cycle(session, [{ids: [0, 3]}, {ids: [3, 3]}])
        np.testing.assert_allclose(
            (before - session.run(table))[:, 1, 2], [1, 0, 0, 3], 0, 1e-14)
        np.testing.assert_array_equal(session.run(vector), [-1, 0, 0, -3, 0])


def test_float16_rows_are_summed_in_float32(graph, folding, door):
    table = make_table(True, tf.float16, (3, 1))
    trainer = door(
        tf.reduce_sum(tf.gather(table, [1])),
        tf.train.GradientDescentOptimizer(2.0 ** -12))
    with tf.Session() as session:
        session.run(table.initializer)
        session.run(table.assign([[0], [0], [0]]))
        trainer.run_cycle(session, [{}] * 4096)
        # 4096 ones; in float16 the sum would stay at 2048.
        np.testing.assert_array_equal(session.run(table), [[0], [-1], [0]])


@pytest.mark.parametrize("problem", ["optimizer", "constraint"])
def test_no_sparse_rule_points_to_dense(graph, problem):
    class DenseOnly(tf.train.Optimizer):
        def __init__(self):
            super().__init__(use_locking=False, name="DenseOnly")

        def _apply_dense(self, grad, var):
            return tf.assign_sub(var, grad)

        def _resource_apply_dense(self, grad, handle):
            return tf.assign_sub(handle, grad)

    def build(accumulators):
        with tf.variable_scope(accumulators):
            table = tf.get_variable(
                "table", [3, 1], initializer=tf.zeros_initializer(),
                constraint=tf.abs if problem == "constraint" else None)
        optimizer = (DenseOnly() if problem == "optimizer"
                     else tf.train.GradientDescentOptimizer(1.0))
        return table, accumgrad.build_accumulation_ops(
            tf.reduce_sum(tf.gather(table, [0])), optimizer, [table],
            accumulators=accumulators)

    with pytest.raises((NotImplementedError, RuntimeError),
                       match='`accumulators="dense"`'):
        build("auto")
    table, ops = build("dense")
    with tf.Session() as session:
        session.run(table.initializer)
        accumgrad.run_cycle(session, ops, None, 2)
        # |0 - 2| where the constraint is the absolute value
        expected = 2 if problem == "constraint" else -2
        np.testing.assert_array_equal(session.run(table),
                                      [[expected], [0], [0]])
