"""The builder by itself: its arguments, errors, global step and order."""

import warnings

import numpy as np
import pytest
import tensorflow as tensorflow_2_or_1
import tensorflow.compat.v1 as tf

import accumgrad
from optimizers import AdamW
from optimizers import BertOptimizer
from optimizers import sgd


def make_weights(name="w", value=1.0, shape=(), use_resource=None):
    return tf.get_variable(name, shape, use_resource=use_resource,
                           initializer=tf.constant_initializer(value))


@pytest.fixture
def x(graph):
    return tf.placeholder(tf.float32, [])


# Variables without a gradient.

@pytest.mark.parametrize("position", [0, 1, 2])
def test_variable_without_gradient_rests(graph, x, position, door):
    names = ["a", "b", "c"]
    weights = [make_weights(name) for name in names]
    idle = weights[position]
    loss = tf.add_n([w * x for w in weights if w is not idle])
    optimizer = tf.train.MomentumOptimizer(1.0, 0.9)
    # An earlier training moved it, so that momentum alone would move it on.
    train_all = optimizer.minimize(tf.add_n(weights))
    trainer = door(loss, optimizer, var_list=weights)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train_all)
        slot = optimizer.get_slot(idle, "momentum")
        assert session.run([idle, slot]) == [0, 1]
        trainer.run_cycle(session, [{x: 2}, {x: 3}])
        assert session.run([idle, slot]) == [0, 1]
        # 0 - (0.9 * 1 + 5)
        moved = [w for w in weights if w is not idle]
        np.testing.assert_allclose(session.run(moved), [-5.9, -5.9], 1e-6)


def test_no_gradient_at_all_names_the_variables(graph, x):
    weights = [make_weights("first"), make_weights("second")]
    with pytest.raises(ValueError, match="no gradient .*: first, second"):
        accumgrad.build_accumulation_ops(x * 2, sgd(), weights)


# Nothing accumulated.

@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_train_with_nothing_accumulated_changes_nothing(
        graph, x, use_resource, reduction):
    w = make_weights(use_resource=use_resource)
    table = make_weights("table", shape=[3, 2], use_resource=use_resource)
    step = tf.train.get_or_create_global_step()
    ops = accumgrad.build_accumulation_ops(
        (w + tf.reduce_sum(tf.gather(table, [1]))) * x,
        tf.train.AdamOptimizer(0.1), global_step=step, reduction=reduction)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        accumgrad.run_cycle(session, ops, [{x: 2}])
        before = session.run(tf.global_variables())
        session.run(ops.zero_ops)
        for _ in range(20):
            with pytest.raises(tf.errors.InvalidArgumentError,
                               match="nothing accumulated since zero_ops"):
                session.run(ops.train_op)
        for old, new in zip(before, session.run(tf.global_variables())):
            np.testing.assert_array_equal(old, new)


# The global step.

@pytest.mark.parametrize("scope", [None, "name_scope", "variable_scope"])
def test_bert_style_optimizer(graph, x, scope, door):
    def build():
        w = make_weights("layer/w")
        return w, door(w * x, BertOptimizer(0.1), global_step=step,
                       reduction="mean")

    step = tf.train.get_or_create_global_step()
    prefix = ""
    if scope == "name_scope":
        with tf.name_scope("outer"):
            w, trainer = build()
    elif scope == "variable_scope":
        prefix = "outer/"
        with tf.variable_scope("outer"):
            w, trainer = build()
    else:
        w, trainer = build()
    # get_variable puts the scope before a name that has it: as without us.
    twice = prefix + prefix + "layer/w"
    names = {variable.op.name for variable in tf.global_variables()}
    assert names == {"global_step", prefix + "layer/w",
                     twice + "/adam_m", twice + "/adam_v"}

    gradients = [[1, 2, 6], [4], [-3, 5]]
    w_np, m, v = 1.0, 0.0, 0.0
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for cycle in gradients:
            trainer.run_cycle(session, [{x: g} for g in cycle])
            g = np.mean(cycle)
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g * g
            w_np -= 0.1 * (m / (np.sqrt(v) + 1e-6) + 0.01 * w_np)
            np.testing.assert_allclose(session.run(w), w_np, 1e-5)
        assert session.run(step) == 3


def test_global_step_counts_cycles(graph, x, use_resource, door):
    step = tf.get_variable("step", [], tf.int64, tf.zeros_initializer(),
                           trainable=False, use_resource=use_resource)
    w = make_weights(use_resource=use_resource)
    trainer = door(w * x, sgd(), global_step=step)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for expected in (1, 2, 3):
            trainer.run_cycle(session, [{x: 1}] * 4)
            assert session.run(step) == expected


def test_global_step_that_the_optimizer_holds_back_stays(graph, x):
    class SkippingOptimizer(tf.train.GradientDescentOptimizer):
        """Applies, and steps, where the gradient is finite."""

        def apply_gradients(self, grads_and_vars, global_step=None,
                            name=None):
            [(gradient, variable)] = grads_and_vars
            applied = super().apply_gradients
            return tf.cond(
                tf.is_finite(gradient),
                lambda: tf.group(applied([(gradient, variable)],
                                         global_step)),
                tf.no_op)

    step = tf.get_variable("step", [], tf.int64, tf.zeros_initializer(),
                           trainable=False, use_resource=True)
    w = make_weights(use_resource=True)
    ops = accumgrad.build_accumulation_ops(w * x, SkippingOptimizer(1.0),
                                           global_step=step)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for value, expected in ((1, 1), (np.inf, 1), (2, 2)):
            accumgrad.run_cycle(session, ops, [{x: value}])
            assert session.run(step) == expected
        assert session.run(w) == -2


def test_schedule_sees_cycles(graph, x, door):
    step = tf.train.get_or_create_global_step()
    rate = tf.train.piecewise_constant(step, [2], [1.0, 0.0])
    w = make_weights(value=0.0)
    trainer = door(
        w * x, sgd(rate), global_step=step)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        values = []
        for _ in range(5):
            trainer.run_cycle(session, [{x: 1}] * 4)
            values.append(session.run(w))
    # Steps 0, 1 and 2 are within the boundary.
    assert values == [-4, -8, -12, -12, -12]


def test_optimizer_that_demands_the_global_step(graph, x):
    step = tf.train.get_or_create_global_step()
    optimizer = tf.train.SyncReplicasOptimizer(
        sgd(), replicas_to_aggregate=1, total_num_replicas=1)
    w = make_weights()
    ops = accumgrad.build_accumulation_ops(w * x, optimizer,
                                           global_step=step)
    hook = optimizer.make_session_run_hook(is_chief=True, num_tokens=0)
    with tf.train.MonitoredTrainingSession(
            hooks=[hook], stop_grace_period_secs=1) as session:
        for n in (1, 2, 3):
            accumgrad.run_cycle(session, ops, [{x: 1}, {x: 3}])
            weights, steps = session.run_step_fn(
                lambda step_context: step_context.session.run([w, step]))
            assert (weights, steps) == (1 - 4 * n, n)


def test_slots_made_from_tensors_can_be_initialised(graph, x):
    class SlotsFromTensors(tf.train.Optimizer):
        """Momentum 1, its slots made as legacy code may make them."""

        def __init__(self):
            super().__init__(False, "SlotsFromTensors")

        def apply_gradients(self, grads_and_vars, global_step=None,
                            name=None):
            updates = []
            for gradient, variable in grads_and_vars:
                slot = tf.Variable(tf.ones(variable.shape), trainable=False)
                moved = tf.assign_add(slot, gradient)
                updates.append(tf.assign_sub(variable, moved))
            return tf.group(*updates)

    w = make_weights(shape=[2])
    ops = accumgrad.build_accumulation_ops(tf.reduce_sum(w) * x,
                                           SlotsFromTensors())
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        accumgrad.run_cycle(session, ops, [{x: 2}, {x: 3}])
        # 1 - (1 + 5)
        np.testing.assert_array_equal(session.run(w), [-5, -5])


def test_apply_gradients_is_called_once(graph, x):
    class CountingOptimizer(tf.train.GradientDescentOptimizer):
        calls = []

        def compute_gradients(self, *args, **kwargs):
            self.calls.append("compute")
            return super().compute_gradients(*args, **kwargs)

        def apply_gradients(self, *args, **kwargs):
            self.calls.append("apply")
            return super().apply_gradients(*args, **kwargs)

    optimizer = CountingOptimizer(1.0)
    accumgrad.build_accumulation_ops(make_weights() * x, optimizer)
    assert optimizer.calls == ["compute", "apply"]


# What the ops are.

def test_ops_bring_nothing_back(graph, x):
    ops = accumgrad.build_accumulation_ops(make_weights() * x, sgd())
    zero_ops, accum_ops, train_op = ops
    assert ops._fields == ("zero_ops", "accum_ops", "train_op")
    assert isinstance(zero_ops, list) and isinstance(accum_ops, list)
    for op in zero_ops + accum_ops + [train_op]:
        assert isinstance(op, tf.Operation)


def test_colocation_is_handed_on(graph, x):
    class Optimizer(tf.train.GradientDescentOptimizer):
        def compute_gradients(self, loss, var_list=None, **options):
            self.options = options
            return super().compute_gradients(loss, var_list, **options)

    optimizer = Optimizer(1.0)
    loss = make_weights() * x
    accumgrad.build_accumulation_ops(loss, optimizer)
    assert optimizer.options == {}
    accumgrad.build_accumulation_ops(loss, optimizer,
                                     colocate_gradients_with_ops=True)
    assert optimizer.options == {"colocate_gradients_with_ops": True}


def test_nested_and_partitioned_var_list(graph, x):
    parts = tf.get_variable("parts", [4], initializer=tf.ones_initializer(),
                            partitioner=tf.fixed_size_partitioner(2))
    a, b, c = (make_weights(name) for name in "abc")
    loss = (tf.reduce_sum(parts.as_tensor() if hasattr(parts, "as_tensor")
                          else parts) + a + b + c) * x
    ops = accumgrad.build_accumulation_ops(
        loss, sgd(), [[a, (b,)], parts])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        accumgrad.run_cycle(session, ops, [{x: 1}, {x: 2}])
        assert session.run([a, b, c]) == [-2, -2, 1]
        np.testing.assert_array_equal(session.run(parts.as_tensor()),
                                      [-2] * 4)


def test_unknown_static_shape(graph, x, use_resource):
    initial = tf.placeholder_with_default(np.ones([2, 3], np.float32), None)
    w = tf.get_variable("w", initializer=initial, validate_shape=False,
                        use_resource=use_resource)
    assert w.shape.rank is None
    ops = accumgrad.build_accumulation_ops(
        tf.reduce_sum(w) * x, tf.train.MomentumOptimizer(1.0, 0.5))
    with tf.Session() as session:
        # First: the accumulators do not wait for the model.  Its slots do,
        # and TensorFlow itself does not see to their order.
        session.run(tf.local_variables_initializer())
        session.run(w.initializer)
        session.run(tf.global_variables_initializer())
        for expected in (1 - 3, 1 - 3 - (1.5 + 3)):
            accumgrad.run_cycle(session, ops, [{x: 1}, {x: 2}])
            np.testing.assert_array_equal(session.run(w),
                                          np.full([2, 3], expected))


def test_two_builders_in_one_graph(graph, x):
    a, b = make_weights("a"), make_weights("b")
    loss = tf.square(a + b) * x
    first = accumgrad.build_accumulation_ops(loss, sgd(0.5), [a])
    second = accumgrad.build_accumulation_ops(loss, sgd(0.25), [b],
                                              reduction="mean")
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run([first.zero_ops, second.zero_ops])
        session.run(first.accum_ops, {x: 1})     # 2 (a + b) x = 4
        session.run(second.accum_ops, {x: 2})    # 8
        session.run(first.accum_ops, {x: 3})     # 12
        session.run(first.train_op)
        assert session.run([a, b]) == [1 - 0.5 * 16, 1]
        session.run(second.accum_ops, {x: 0})
        session.run(second.train_op)
        assert session.run([a, b]) == [-7, 1 - 0.25 * 4]


def test_gan_of_one_optimizer_class(graph, x):
    # Interleaved, each as if it were alone.
    def build(names):
        losses = {name: tf.square(make_weights(name) * x) for name in names}
        return {name: accumgrad.build_accumulation_ops(
            loss, tf.train.AdamOptimizer(0.1), [variable])
            for (name, loss), variable in zip(losses.items(),
                                              tf.trainable_variables())}

    def run(order):
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for name, feeds in order:
                accumgrad.run_cycle(session, ops[name],
                                    [{x: value} for value in feeds])
            return session.run(tf.trainable_variables())
    ops = build(["generator", "discriminator"])
    first = [("generator", [1, 2]), ("generator", [3])]
    second = [("discriminator", [4]), ("discriminator", [5, 6, 7])]
    together = run([first[0], second[0], second[1], first[1]])
    assert together[0] == run(first)[0]
    assert together[1] == run(second)[1]


@pytest.mark.parametrize("make_optimizer, shared", [
    (lambda: tf.train.AdamOptimizer(0.1), "beta1_power, beta2_power"),
    (sgd, None),
    (lambda: tf.train.MomentumOptimizer(0.1, 0.9), None),
])
def test_optimizer_object_in_two_builders(graph, x, make_optimizer, shared):
    weights = [make_weights("a"), make_weights("b")]
    optimizer = make_optimizer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for w in weights:
            accumgrad.build_accumulation_ops(w * x, optimizer, [w])
    messages = [str(warning.message) for warning in caught
                if "accumgrad" in str(warning.message)]
    if shared is None:
        assert not messages
    else:
        [message] = messages
        assert "same optimizer object" in message
        assert f"Both of them move: {shared}." in message


def test_optimizer_objects_of_their_own_do_not_warn(graph, x):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in "ab":
            w = make_weights(name)
            accumgrad.build_accumulation_ops(
                w * x, tf.train.AdamOptimizer(0.1), [w])
    assert not [warning for warning in caught
                if "accumgrad" in str(warning.message)]


# Weight decay that is no part of the gradient.

@pytest.mark.parametrize("make_optimizer", [
    lambda: AdamW(0.1, 0.0), lambda: BertOptimizer(0.0625, 1.6)],
    ids=["AdamW", "Bert"])
def test_decoupled_weight_decay_is_once_a_cycle(graph, x, make_optimizer,
                                                use_resource, door):
    # With no gradient, all that an update does is to take a tenth off.
    w = make_weights(use_resource=use_resource)
    trainer = door(w * x, make_optimizer(), 8)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for cycle in (1, 2, 3):
            trainer.run_cycle(session, [{x: 0}] * 8)
            np.testing.assert_allclose(session.run(w), 0.9 ** cycle, 1e-6)


# Order.

def test_no_races(graph, use_resource):
    weights = [tf.get_variable(f"w{i}", [3 if i % 2 else 300000],
                               use_resource=use_resource,
                               initializer=tf.zeros_initializer())
               for i in range(8)]
    loss = tf.add_n([tf.reduce_sum(w) for w in weights])
    ops = accumgrad.build_accumulation_ops(loss, sgd())
    extremes = [[tf.reduce_min(w), tf.reduce_max(w)] for w in weights]
    config = tf.ConfigProto(inter_op_parallelism_threads=8)
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        for cycle in accumgrad.run_cycles(session, ops, None, 3,
                                          num_cycles=300):
            np.testing.assert_array_equal(
                session.run(extremes), [[-3 * (cycle.index + 1)] * 2] * 8)


# Errors.

def build_with(**changes):
    arguments = dict(changes)
    if "loss" not in arguments:
        arguments["loss"] = make_weights() * 2
    arguments.setdefault("optimizer", sgd())
    return accumgrad.build_accumulation_ops(**arguments)


class KerasShaped:
    def compute_gradients(self, loss, var_list, tape=None):
        raise AssertionError("must not be called")

    def apply_gradients(self, grads_and_vars):
        raise AssertionError("must not be called")


@pytest.mark.parametrize("changes, error, message", [
    ({"loss": 3.0}, TypeError, r"`loss` must be a tf.Tensor.* got 3.0"),
    ({"loss": lambda: make_weights("v")}, TypeError,
     r"`loss` must be a tf.Tensor"),
    ({"loss": lambda: tf.constant(1)}, TypeError,
     "`loss` must have a floating-point dtype.* 'Const:0' of dtype int32"),
    ({"optimizer": "adam"}, TypeError,
     r"`optimizer` must have.* got 'adam' \(builtins.str\)"),
    ({"optimizer": KerasShaped}, TypeError, "has no `|with a tape"),
    ({"optimizer": KerasShaped()}, TypeError, "with a tape"),
    ({"var_list": []}, ValueError, r"`var_list` must have at least one"),
    ({"var_list": [None]}, TypeError, "`var_list` must hold.* got None"),
    ({"var_list": ["w"]}, TypeError, "`var_list` must hold.* got 'w'"),
    ({"reduction": "avg"}, ValueError,
     "`reduction` must be one of 'sum', 'mean'; got 'avg'"),
    ({"reduction": None}, ValueError, "`reduction` must .* got None"),
    ({"accumulators": "sparse"}, ValueError,
     "`accumulators` must be one of 'auto', 'dense'; got 'sparse'"),
    ({"global_step": 0}, TypeError, "`global_step` must be a variable.*got 0"),
    ({"name": None}, TypeError, "`name` must be a string.* got None"),
    ({"name": "a b"}, ValueError, "`name` must be a valid.* got 'a b'"),
    ({"name": "a/"}, ValueError, "`name` must be a valid.* got 'a/'"),
])
def test_bad_argument(graph, changes, error, message):
    w = make_weights()
    loss = changes.get("loss", w * 2)
    changes = dict(changes, loss=loss() if callable(loss) else loss)
    check_rejected(graph, changes, error, message)


def check_rejected(graph, changes, error, message):
    before = [op.name for op in graph.get_operations()]
    with pytest.raises(error, match=message):
        build_with(**changes)
    assert [op.name for op in graph.get_operations()] == before


def test_keras_optimizer(graph):
    w = make_weights()
    optimizer = tensorflow_2_or_1.keras.optimizers.SGD(0.1)
    check_rejected(graph, {"loss": w * 2, "optimizer": optimizer}, TypeError,
                   "`optimizer` must .* Keras optimizer")


def test_other_graph(graph):
    w = make_weights()
    loss = w * 2
    with tf.Graph().as_default():
        foreign = make_weights("foreign")
        foreign_step = tf.train.get_or_create_global_step()
    check_rejected(graph, {"loss": loss,
                           "var_list": [w, foreign]}, ValueError,
                   "of another graph are: foreign")
    check_rejected(graph, {"loss": loss, "global_step": foreign_step},
                   ValueError, "`global_step` must be in the default graph")
    with tf.Graph().as_default() as other:
        check_rejected(other, {"loss": loss}, ValueError,
                       "`loss` must be in the default graph; got 'mul:0'")


def test_variable_twice(graph):
    a, b = make_weights("a"), make_weights("b")
    check_rejected(graph, {"loss": a * b, "var_list": [a, [b, a]]},
                   ValueError, "more than once are: a$")


def test_nothing_trainable(graph):
    loss = tf.constant(1.0)
    check_rejected(graph, {"loss": loss}, ValueError,
                   "`var_list` is None.* the graph has none")


@pytest.mark.parametrize("shape, dtype", [([2], tf.int64), ([], tf.float32)])
def test_global_step_of_a_wrong_kind(graph, shape, dtype):
    loss = make_weights() * 2
    step = tf.get_variable("step", shape, dtype, tf.zeros_initializer(),
                           trainable=False)
    check_rejected(graph, {"loss": loss, "global_step": step}, TypeError,
                   "`global_step` must be a scalar of an integer dtype; "
                   "got 'step'")


def test_junk_from_compute_gradients(graph):
    w = make_weights()

    class Junk(tf.train.GradientDescentOptimizer):
        def compute_gradients(self, loss, var_list=None):
            return self.junk

    optimizer = Junk(1.0)
    for junk, message in [([w], "must return pairs"),
                          ([(3.0, w)], "gradients that are .* got 3.0"),
                          ([(w * 1.0, "w")], "with a variable; got 'w'")]:
        optimizer.junk = junk
        with pytest.raises(TypeError, match=message):
            build_with(loss=w * 2, optimizer=optimizer)


def test_eager_execution(monkeypatch):
    # In a process of the suite eager execution may be on or off by default.
    monkeypatch.setattr(tf, "executing_eagerly", lambda: True)
    with pytest.raises(RuntimeError, match="eager execution is on.*Graph"):
        build_with(loss=None)


def test_inside_a_function(graph):
    w = make_weights(use_resource=True)

    @tensorflow_2_or_1.function
    def traced():
        build_with(loss=w * 2)

    with pytest.raises(RuntimeError, match="a function is being traced"):
        traced()
