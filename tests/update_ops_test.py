"""Update ops run with every micro-batch, and with nothing else."""

import contextlib

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from optimizers import sgd

WAYS = ["update_ops", "ambient"]


@contextlib.contextmanager
def handed_over(way, update_ops):
    """Yields the options with which a builder is to be called."""
    if way == "update_ops":
        yield {"update_ops": update_ops}
    else:
        with tf.control_dependencies(update_ops):
            yield {}


@pytest.fixture
def x(graph):
    return tf.placeholder(tf.float32, [None, 2])


def moving_mean(x, momentum=0.9, use_resource=None):
    """Batch normalisation's moving mean by hand."""
    mean = tf.get_variable("moving_mean", [2], trainable=False,
                           use_resource=use_resource,
                           initializer=tf.zeros_initializer())
    batch_mean = tf.reduce_mean(x, axis=0)
    return mean, tf.assign_sub(mean, (mean - batch_mean) * (1 - momentum))


@pytest.mark.parametrize("way", WAYS)
def test_moving_mean_moves_with_each_micro_batch(x, use_resource, way, door):
    w = tf.get_variable("w", [2], use_resource=use_resource)
    mean, update = moving_mean(x, use_resource=use_resource)
    with handed_over(way, [update]) as options:
        trainer = door(tf.reduce_mean(x * w), sgd(), 4, **options)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{x: np.ones([3, 2])}] * 4)
        # 1 - 0.9 ** 4
        np.testing.assert_allclose(session.run(mean), [0.3439] * 2, 1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_zero_and_train_leave_it_alone_and_need_no_feed(x, use_resource, way):
    w = tf.get_variable("w", [2], use_resource=use_resource)
    mean, update = moving_mean(x, use_resource=use_resource)
    with handed_over(way, [update]) as options:
        ops = accumgrad.build_accumulation_ops(tf.reduce_mean(x * w), sgd(),
                                               **options)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(3):
            session.run(ops.zero_ops)
        assert not session.run(mean).any()
        session.run(ops.accum_ops, {x: np.ones([3, 2])})
        before = session.run(mean)
        session.run(ops.train_op)
        session.run(ops.zero_ops)
        np.testing.assert_array_equal(session.run(mean), before)


def tf_layers_normalized(x):
    y = tf.layers.batch_normalization(x, momentum=0.9, training=True)
    return y, tf.get_collection(tf.GraphKeys.UPDATE_OPS)


def slim_normalized(x):
    slim = pytest.importorskip("tf_slim")
    y = slim.batch_norm(x, decay=0.9, is_training=True)
    return y, tf.get_collection(tf.GraphKeys.UPDATE_OPS)


def keras_normalized(x):
    layers = (tf.keras if tf.__version__ < "2.16"
              else pytest.importorskip("tf_keras")).layers
    layer = layers.BatchNormalization(momentum=0.9)
    # Which never enters UPDATE_OPS.
    return layer(x, training=True), layer.updates


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("normalized", [
    tf_layers_normalized, slim_normalized, keras_normalized])
def test_batch_normalisation_of_libraries(x, normalized, way, door):
    if normalized is tf_layers_normalized and tf.__version__ >= "2.16":
        pytest.skip("TensorFlow 2.16 dropped these layers")
    if normalized is slim_normalized and tf.__version__ >= "2":
        pytest.skip("tf_slim's own uses names that TensorFlow 2 dropped")
    y, update_ops = normalized(x)
    assert update_ops
    with handed_over(way, update_ops) as options:
        trainer = door(tf.reduce_sum(y), sgd(), 4, **options)
    [mean] = [variable for variable in tf.global_variables()
              if "moving_mean" in variable.op.name]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{x: [[0, 0], [2, 2]]}] * 4)
        np.testing.assert_allclose(session.run(mean), [0.3439] * 2, 1e-6)


@pytest.mark.parametrize("make", [
    lambda op, tensor, variable: op,
    lambda op, tensor, variable: [op, [tensor]],
    lambda op, tensor, variable: {op, tensor},
    lambda op, tensor, variable: (variable,),
    lambda op, tensor, variable: None,
    lambda op, tensor, variable: [],
], ids=["op", "nest", "set", "assignment", "None", "empty"])
def test_in_any_nest(graph, make):
    w = tf.get_variable("w", [])
    counts = [tf.get_variable(name, [], use_resource=True, trainable=False,
                              initializer=tf.zeros_initializer())
              for name in ("op", "tensor", "variable")]
    added = [count.assign_add(1) for count in counts]
    update_ops = make(added[0].op, tf.identity(added[1]), added[2])
    if isinstance(update_ops, set):
        update_ops = list(update_ops)
    ops = accumgrad.build_accumulation_ops(w * 1.0, sgd(),
                                           update_ops=update_ops)
    asked = str(update_ops)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        accumgrad.run_cycle(session, ops, None, 3)
        values = session.run(counts)
    assert all(value in (0, 3) for value in values)
    assert sum(values) == 3 * len(
        [op for op in tf.nest.flatten(update_ops) if op is not None]), asked


@pytest.mark.parametrize("bad", ["update", 3, [None], [1.0]])
def test_bad_argument(graph, bad):
    w = tf.get_variable("w", [])
    loss = tf.identity(w)
    num_ops = len(graph.get_operations())
    with pytest.raises(TypeError, match="`update_ops` must hold ops.* got"):
        accumgrad.build_accumulation_ops(loss, sgd(), update_ops=bad)
    assert len(graph.get_operations()) == num_ops


def test_ops_of_another_graph(graph):
    loss = tf.identity(tf.get_variable("w", []))
    with tf.Graph().as_default():
        foreign = tf.no_op(name="foreign")
    with pytest.raises(ValueError, match="'foreign' of another graph"):
        accumgrad.build_accumulation_ops(loss, sgd(), update_ops=[foreign])


def test_variable_that_an_update_op_assigns_to_is_not_constant(
        graph, form, door):
    # The decay term grows as the update op doubles its factor: 1, 2, 4.
    x = tf.placeholder(tf.float64, [None, 2])
    w = tf.get_variable("w", [2, 3], tf.float64, tf.ones_initializer())
    factor = tf.get_variable("factor", [], tf.float64, use_resource=True,
                             initializer=tf.ones_initializer())
    loss = (tf.reduce_sum(tf.matmul(x, w))
            + tf.stop_gradient(factor.read_value()) * tf.reduce_sum(w))
    with tf.control_dependencies([loss]):
        double = tf.assign(factor, factor * 2)
    trainer = door(loss, sgd(), 3, accumulators=form, update_ops=[double],
                   var_list=[w])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{x: np.ones([1, 2])}] * 3)
        np.testing.assert_allclose(session.run(w), np.full([2, 3], 1 - 3 - 7))
