"""`nonfinite`: what becomes of a NaN or an infinity."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from models import (FORMS, assert_close, assert_same, build_model,
                    read_variables)
from optimizers import BertOptimizer
from optimizers import sgd
from recipe import OPTIMIZERS

SIZES = [2, 1, 3, 2, 1, 1, 2, 3]
BAD = 3


def spoil(model, feed, value=np.nan):
    """Returns a feed of which every gradient has a NaN."""
    x = np.array(feed[model.x])
    x[-1, -1] = value
    return {**feed, model.x: x}


def spoilt(model, seed=0, value=np.nan):
    """Returns the feeds of a cycle with a bad micro-batch."""
    feeds = model.feeds(SIZES, seed)
    feeds[BAD] = spoil(model, feeds[BAD], value)
    return feeds


def train(door, form, optimizer_name, seeds, **options):
    """Returns all variables after cycles of finite micro-batches."""
    with tf.Graph().as_default(), tf.Session() as session:
        model = build_model()
        trainer = door(model.loss, OPTIMIZERS[optimizer_name](), len(SIZES),
                       global_step=tf.train.get_or_create_global_step(),
                       accumulators=form, **options)
        session.run(tf.global_variables_initializer())
        for seed in seeds:
            trainer.run_cycle(session, model.feeds(SIZES, seed))
        return read_variables(session)


# The whole cycle.

@pytest.mark.parametrize("reduction, optimizer_name", [
    ("sum", "Adam"), ("mean", "Momentum")])
def test_skip_leaves_all_as_it_was(graph, form, door, optimizer_name,
                                   reduction):
    model = build_model()
    trainer = door(model.loss, OPTIMIZERS[optimizer_name](), len(SIZES),
                   global_step=tf.train.get_or_create_global_step(),
                   nonfinite="skip", accumulators=form, reduction=reduction)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, model.feeds(SIZES, 1))
        before = read_variables(session)
        assert before["global_step"] == 1
        for value in (np.nan, np.inf):
            trainer.run_cycle(session, spoilt(model, value=value))
            assert_same(read_variables(session), before)
        trainer.run_cycle(session, model.feeds(SIZES, 2))
        # As if the cycles between had never been.
        assert_close(read_variables(session), train(
            door, form, optimizer_name, [1, 2], reduction=reduction))


@pytest.mark.parametrize("scope", ["", "name", "variable"])
@pytest.mark.parametrize("make_optimizer", [
    OPTIMIZERS["Adam"], lambda: BertOptimizer(0.1)], ids=["Adam", "Bert"])
def test_skip_names_the_optimizers_variables_as_minimize_does(
        behavior, make_optimizer, scope):
    def names(build):
        with tf.Graph().as_default():
            step = tf.train.get_or_create_global_step()
            w = tf.get_variable("w", [])
            if scope == "name":
                with tf.name_scope("outer"):
                    build(w, step)
            elif scope == "variable":
                with tf.variable_scope("outer"):
                    build(w, step)
            else:
                build(w, step)
            return sorted(variable.op.name
                          for variable in tf.global_variables())
    assert names(
        lambda w, step: accumgrad.build_accumulation_ops(
            w * 1.0, make_optimizer(), [w], global_step=step,
            nonfinite="skip")) == names(
        lambda w, step: make_optimizer().minimize(
            w * 1.0, global_step=step, var_list=[w]))


def test_skip_steps_for_an_optimizer_that_ignores_the_step(graph, door):
    step = tf.train.get_or_create_global_step()
    w = tf.get_variable("w", [])
    x = tf.placeholder(tf.float32, [])
    trainer = door(w * x, BertOptimizer(0.1), 2, global_step=step,
                   nonfinite="skip")
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for value, steps in [(1, 1), (np.nan, 1), (1, 2), (np.inf, 2)]:
            trainer.run_cycle(session, [{x: 1}, {x: value}])
            assert session.run(step) == steps


def test_skip_with_a_transform_that_heals_or_hurts(graph, door):
    # What counts is what would be applied.
    w = tf.get_variable("w", [2], initializer=tf.zeros_initializer())
    x = tf.placeholder(tf.float32, [2])
    loss = tf.reduce_sum(w * x)
    heal = door(loss, sgd(), 1, nonfinite="skip", name="heal",
                transform_gradients=lambda pairs: [
                    (tf.where(tf.is_finite(g), g, tf.zeros_like(g)), v)
                    for g, v in pairs])
    hurt = door(loss, sgd(), 1, nonfinite="skip", name="hurt",
                transform_gradients=lambda pairs: [
                    (1.0 / g, v) for g, v in pairs])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        heal.run_cycle(session, [{x: [np.nan, 3]}])
        np.testing.assert_array_equal(session.run(w), [0, -3])
        hurt.run_cycle(session, [{x: [0, 1]}])
        np.testing.assert_array_equal(session.run(w), [0, -3])


def test_references_under_control_flow_v2(behavior, graph):
    if behavior != "v2":
        pytest.skip("control flow v1 can assign to them")
    w = tf.get_variable("w", [], use_resource=False)
    loss = tf.identity(w)
    num_ops = len(graph.get_operations())
    with pytest.raises(ValueError, match="'skip' for reference variables .*: "
                       "w.  Call tf.compat.v1.enable_resource_variables"):
        accumgrad.build_accumulation_ops(loss, sgd(), nonfinite="skip")
    assert len(graph.get_operations()) == num_ops


# One micro-batch.

@pytest.mark.parametrize("optimizer_name, weighted, reduction", [
    ("Adam", False, "sum"), ("Momentum", False, "mean"),
    ("Adam", True, "mean")])
def test_skipped_micro_batch_was_never_there(graph, form, door,
                                             optimizer_name, weighted,
                                             reduction):
    model = build_model()
    options = {"accumulators": form, "reduction": reduction}
    if weighted:
        options["weight"] = model.size
    trainer = door(model.loss, OPTIMIZERS[optimizer_name](), len(SIZES),
                   nonfinite="skip_micro_batch", **options)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for seed, value in enumerate([np.nan, np.inf]):
            trainer.run_cycle(session, spoilt(model, seed, value))
        found = read_variables(session)
    with tf.Graph().as_default(), tf.Session() as session:
        model = build_model()
        if weighted:
            options["weight"] = model.size
        trainer = door(model.loss, OPTIMIZERS[optimizer_name](),
                       len(SIZES) - 1, **options)
        session.run(tf.global_variables_initializer())
        for seed in range(2):
            feeds = model.feeds(SIZES, seed)
            del feeds[BAD]
            trainer.run_cycle(session, feeds)
        assert_same(found, read_variables(session))


@pytest.mark.parametrize("name", sorted(FORMS))
def test_micro_batch_is_skipped_for_any_variable(graph, form, name):
    # Only this variable's gradient is bad, and none of them is to move.
    model = build_model()
    variable = model.variables[name]
    factor = tf.placeholder(tf.float64, [])
    uses = {"scale": lambda: tf.ones_like(model.x) * variable,
            "table": lambda: tf.gather(variable, model.ids),
            "matrix": lambda: tf.matmul(tf.ones_like(model.x), variable)}
    ops = accumgrad.build_accumulation_ops(
        model.loss + factor * tf.reduce_sum(uses[name]()), sgd(),
        nonfinite="skip_micro_batch", accumulators=form)
    if form == "auto":
        assert FORMS == {item.variable: item.form for item
                         in accumgrad.describe_accumulators(ops)}
    first, second = model.feeds([2, 3])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        start = read_variables(session)
        accumgrad.run_cycle(session, ops, [{**first, factor: 1}])
        alone = read_variables(session)
        session.run([v.initializer for v in tf.global_variables()])
        assert_same(read_variables(session), start)
        accumgrad.run_cycle(session, ops, [
            {**first, factor: 1}, {**second, factor: np.inf}])
        assert_same(read_variables(session), alone)


@pytest.mark.parametrize("way", ["update_ops", "ambient"])
def test_skipped_micro_batch_leaves_no_trace_in_averages(graph, use_resource,
                                                         door, way):
    x = tf.placeholder(tf.float32, [None])
    w = tf.get_variable("w", [], use_resource=use_resource)
    mean = tf.get_variable("moving_mean", [], trainable=False,
                           use_resource=use_resource,
                           initializer=tf.ones_initializer())
    update = tf.assign_sub(mean, 0.5 * (mean - tf.reduce_mean(x)))
    options = {"nonfinite": "skip_micro_batch"}
    if way == "update_ops":
        trainer = door(tf.reduce_mean(w * x), sgd(), 5, update_ops=[update],
                       **options)
    else:
        with tf.control_dependencies([update]):
            trainer = door(tf.reduce_mean(w * x), sgd(), 5, **options)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        # As MonitoredSession does, so that the first can be taken back.
        session.run(tf.local_variables_initializer())
        expected = 1.0
        for _ in range(2):
            trainer.run_cycle(session, [
                {x: [value]} for value in [np.nan, 3, np.nan, np.inf, 5]])
            for value in (3, 5):
                expected -= 0.5 * (expected - value)
            assert session.run(mean) == expected


def test_updates_are_taken_back_after_a_session_changed_them(graph):
    # Between cycles, the averages are the user's to restore or to set.
    x = tf.placeholder(tf.float32, [])
    w = tf.get_variable("w", [])
    count = tf.get_variable("count", [], trainable=False,
                            initializer=tf.zeros_initializer())
    ops = accumgrad.build_accumulation_ops(
        w * x, sgd(), nonfinite="skip_micro_batch",
        update_ops=[tf.assign_add(count, 1)])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        accumgrad.run_cycle(session, ops, [{x: 1}, {x: np.nan}])
        assert session.run(count) == 1
        count.load(100, session)
        accumgrad.run_cycle(session, ops, [{x: np.nan}, {x: 1}])
        assert session.run(count) == 101


def test_all_skipped_is_nothing_accumulated(graph, form):
    model = build_model()
    ops = accumgrad.build_accumulation_ops(
        model.loss, OPTIMIZERS["Adam"](), nonfinite="skip_micro_batch",
        accumulators=form)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = read_variables(session)
        with pytest.raises(tf.errors.InvalidArgumentError,
                           match="nothing accumulated since zero_ops"):
            accumgrad.run_cycle(session, ops, [
                spoil(model, feed) for feed in model.feeds([2, 1])])
        assert_same(read_variables(session), before)


# An error.

def test_raise_names_the_variable_and_changes_nothing(graph, form,
                                                      use_resource):
    model = build_model(use_resource)
    step = tf.train.get_or_create_global_step()
    ops = accumgrad.build_accumulation_ops(
        model.loss, OPTIMIZERS["Adam"](), nonfinite="raise",
        accumulators=form, global_step=step)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        accumgrad.run_cycle(session, ops, model.feeds(SIZES))
        before = read_variables(session)
        for _ in range(10):
            with pytest.raises(
                    tf.errors.InvalidArgumentError,
                    match="gradient of (scale|table|matrix) has a NaN or"):
                accumgrad.run_cycle(session, ops, spoilt(model))
            assert_same(read_variables(session), before)
        accumgrad.run_cycle(session, ops, model.feeds(SIZES, 1))
        assert session.run(step) == 2


def test_raise_names_the_one_that_is_bad(graph):
    weights = [tf.get_variable(name, []) for name in ("a", "b", "c")]
    x = tf.placeholder(tf.float32, [])
    ops = accumgrad.build_accumulation_ops(
        weights[0] + weights[1] * x + weights[2], sgd(), nonfinite="raise")
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError,
                           match="gradient of b has"):
            accumgrad.run_cycle(session, ops, [{x: np.inf}])


# As TensorFlow would.

def test_apply_adds_no_op(behavior):
    def count_ops(**options):
        with tf.Graph().as_default() as graph:
            model = build_model()
            accumgrad.build_accumulation_ops(model.loss, sgd(), **options)
            operations = graph.get_operations()
            assert not [op for op in operations if op.type == "IsFinite"]
            return len(operations)
    assert count_ops() == count_ops(nonfinite="apply")


def test_apply_applies_it(graph, form, door):
    model = build_model()
    trainer = door(model.loss, sgd(), len(SIZES), accumulators=form)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, spoilt(model))
        for value in session.run(tf.trainable_variables()):
            assert np.isnan(value).any()


# Choices that there are not.

@pytest.mark.parametrize("bad", ["ignore", None, True, np.nan])
def test_bad_choice(graph, bad):
    loss = tf.identity(tf.get_variable("w", []))
    num_ops = len(graph.get_operations())
    with pytest.raises(ValueError, match="`nonfinite` must be one of 'apply', "
                       "'skip', 'skip_micro_batch', 'raise'; got"):
        accumgrad.build_accumulation_ops(loss, sgd(), nonfinite=bad)
    assert len(graph.get_operations()) == num_ops


def test_skip_is_refused_with_sync_replicas(graph):
    loss = tf.identity(tf.get_variable("w", []))
    optimizer = tf.train.SyncReplicasOptimizer(sgd(), 1, 1)
    with pytest.raises(ValueError, match="must not be 'skip' with SyncRep"):
        accumgrad.build_accumulation_ops(
            loss, optimizer, nonfinite="skip",
            global_step=tf.train.get_or_create_global_step())


# Loss scaling.

def dynamic_loss_scale():
    return tf.train.experimental.DynamicLossScale(
        initial_loss_scale=4, increment_period=1000)


@pytest.mark.parametrize("nonfinite", ["skip", "skip_micro_batch", "raise"])
def test_dynamic_loss_scale_has_to_see_it(graph, nonfinite):
    loss = tf.identity(tf.get_variable("w", [], use_resource=True))
    optimizer = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
        sgd(), dynamic_loss_scale())

    class Wrapper(tf.train.Optimizer):
        def __init__(self, inner):
            super().__init__(False, "Wrapper")
            self.inner, self.itself = inner, self
    for owner in (optimizer, Wrapper(optimizer)):
        with pytest.raises(ValueError, match="`nonfinite` must be 'apply' .*"
                           f"dynamic loss scale.* got {nonfinite!r}"):
            accumgrad.build_accumulation_ops(loss, owner,
                                             nonfinite=nonfinite)


def test_fixed_loss_scale_may_skip(graph, door):
    w = tf.get_variable("w", [], use_resource=True,
                        initializer=tf.zeros_initializer())
    x = tf.placeholder(tf.float32, [])
    optimizer = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
        sgd(), 8)
    trainer = door(w * x, optimizer, 2, nonfinite="skip")
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{x: 1}, {x: np.nan}])
        assert session.run(w) == 0
        trainer.run_cycle(session, [{x: 1}, {x: 2}])
        assert session.run(w) == -3


def test_dynamic_loss_scale_comes_down(graph, door):
    w = tf.get_variable("w", [], use_resource=True,
                        initializer=tf.zeros_initializer())
    step = tf.train.get_or_create_global_step()
    if step.dtype != step.dtype.base_dtype:
        step = tf.get_variable("step", [], tf.int64, tf.zeros_initializer(),
                               trainable=False, use_resource=True)
    x = tf.placeholder(tf.float32, [])
    loss_scale = dynamic_loss_scale()
    optimizer = tf.train.experimental.MixedPrecisionLossScaleOptimizer(
        tf.train.MomentumOptimizer(1.0, 0.5), loss_scale)
    trainer = door(w * x, optimizer, 3, global_step=step)
    scale = loss_scale()
    slot = optimizer.get_slot(w, "momentum")
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        trainer.run_cycle(session, [{x: 1}, {x: 2}, {x: 3}])
        state = [w, step, scale] + ([] if slot is None else [slot])
        before = session.run(state)
        assert before[:3] == [-6, 1, 4]
        trainer.run_cycle(session, [{x: 1}, {x: np.inf}, {x: 3}])
        after = session.run(state)
        assert after[2] == 2
        assert after[:2] + after[3:] == before[:2] + before[3:]
        trainer.run_cycle(session, [{x: 1}, {x: 1}, {x: 1}])
        # Momentum: 0.5 * 6 + 3.
        assert session.run([w, step, scale]) == [-12, 2, 2]
