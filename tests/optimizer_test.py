"""`AccumulatingOptimizer`: one op, which applies at every N-th run."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from models import (FORMS, assert_close, assert_same, build_model,
                    read_variables, train_plainly)
from optimizers import AdamW
from optimizers import BertOptimizer
from optimizers import GivenPairs
from optimizers import sgd
from recipe import OPTIMIZERS

ALL_OPTIMIZERS = dict(OPTIMIZERS, AdamW=lambda: AdamW(0.01, 0.1),
                      Bert=lambda: BertOptimizer(0.1))
# Of float32 alone, as it is written.
DTYPES = {"Bert": tf.float32, "ProximalAdagrad": tf.float32}

# One cycle of each number of micro-batches, of these numbers of examples.
CYCLES = [([2] * n, n) for n in (1, 2, 3, 4, 5)]


@pytest.fixture
def assignable(behavior, use_resource):
    """Skips what is refused: see test_references_under_control_flow_v2."""
    if behavior == "v2" and not use_resource:
        pytest.skip("a reference variable in a branch of control flow v2")


@pytest.fixture
def x(graph):
    return tf.placeholder(tf.float32, [])


def make_weights(value=0.0, **options):
    return tf.get_variable("w", [], initializer=tf.constant_initializer(value),
                           **options)


# Equal to the others.

@pytest.mark.parametrize("name", sorted(ALL_OPTIMIZERS))
def test_equals_one_large_batch_after_each_run(graph, form, name):
    dtype = DTYPES.get(name, tf.float64)
    rtol, atol = ((1e-10, 1e-12) if dtype == tf.float64
                  # Divided by roots of second moments that are small.
                  else (1e-4, 1e-5))
    make_optimizer = ALL_OPTIMIZERS[name]
    expected = train_plainly(make_optimizer, CYCLES, form, dtype=dtype)
    model = build_model(dtype=dtype)
    size = tf.get_variable("size", [], tf.int32, tf.ones_initializer(),
                           trainable=False)
    step = tf.train.get_or_create_global_step()
    optimizer = accumgrad.AccumulatingOptimizer(
        make_optimizer(), size, reduction="mean", accumulators=form)
    train_op = optimizer.minimize(model.loss, global_step=step)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        before = read_variables(session)
        for (sizes, seed), whole in zip(CYCLES, expected):
            size.load(len(sizes), session)
            before["size"] = len(sizes)
            *first, last = model.feeds(sizes, seed)
            for feed in first:
                session.run(train_op, feed)
                assert_same(read_variables(session), before)
                assert not session.run(optimizer.has_updated)
            session.run(train_op, last)
            assert session.run(optimizer.has_updated)
            before = read_variables(session)
            assert_close(before, whole, rtol, atol,
                         but=("size", "global_step"))
        assert before["global_step"] == len(CYCLES)


@pytest.mark.parametrize("name", sorted(ALL_OPTIMIZERS))
def test_equals_the_builder(behavior, name):
    def train(build):
        with tf.Graph().as_default(), tf.Session() as session:
            model = build_model(dtype=DTYPES.get(name, tf.float64))
            run_cycle = build(session, model)
            session.run(tf.global_variables_initializer())
            results = []
            for seed in range(3):
                run_cycle(model.feeds([2, 1, 3], seed))
                results.append(read_variables(session))
            return results

    def build_one_op(session, model):
        train_op = accumgrad.AccumulatingOptimizer(
            ALL_OPTIMIZERS[name](), 3).minimize(model.loss)
        return lambda feeds: [session.run(train_op, feed) for feed in feeds]

    def build_three_ops(session, model):
        ops = accumgrad.build_accumulation_ops(
            model.loss, ALL_OPTIMIZERS[name]())
        return lambda feeds: accumgrad.run_cycle(session, ops, feeds)

    # The same ops, which in a branch TensorFlow may compute otherwise.
    tolerance = 1e-5 if name in DTYPES else 1e-13
    for found, expected in zip(train(build_one_op), train(build_three_ops)):
        assert_close(found, expected, tolerance, tolerance)


def test_forms_are_recognised(graph, form):
    model = build_model()
    accumgrad.AccumulatingOptimizer(sgd(), 2, accumulators=form).minimize(
        model.loss)
    found = {item.variable: item.form
             for item in accumgrad.describe_accumulators()}
    assert found == (FORMS if form == "auto"
                     else dict.fromkeys(FORMS, "dense"))


def test_forms_are_those_of_the_builder_under_update_ops(graph, form, door):
    # The weight decay is constant, whatever the batch norm's averages do.
    average = tf.get_variable("average", [], trainable=False)
    model = build_model()
    with tf.control_dependencies([tf.assign_add(average, 1.0)]):
        door(model.loss, sgd(), 2, accumulators=form)
    found = {item.variable: (item.form, item.reason)
             for item in accumgrad.describe_accumulators()}
    if form == "auto":
        assert found["matrix"] == ("contraction", "MatMul + constant")


def test_user_code_between_compute_and_apply(graph, form):
    # One gradient is rewritten in every micro-batch, the others are not.
    model = build_model()
    optimizer = accumgrad.AccumulatingOptimizer(sgd(), 2, accumulators=form)
    pairs = optimizer.compute_gradients(model.loss)
    plain = sgd().compute_gradients(model.loss)
    train_op = optimizer.apply_gradients([
        (tf.clip_by_value(gradient, -0.01, 0.01)
         if variable is model.variables["scale"] else gradient, variable)
        for gradient, variable in pairs])
    feeds = model.feeds([2, 3])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        expected = read_variables(session)
        for feed in feeds:
            for (gradient, variable) in plain:
                value = session.run(tf.convert_to_tensor(gradient), feed)
                if variable is model.variables["scale"]:
                    value = np.clip(value, -0.01, 0.01)
                expected[variable.op.name] = (
                    expected[variable.op.name] - value)
        for feed in feeds:
            session.run(train_op, feed)
        assert_close(read_variables(session), expected)
    forms = {item.variable: item.form
             for item in accumgrad.describe_accumulators()}
    assert forms == (FORMS if form == "auto"
                     else dict.fromkeys(FORMS, "dense"))


def test_given_pairs(graph, x):
    w = make_weights()
    optimizer = accumgrad.AccumulatingOptimizer(GivenPairs([(x * 2, w)]), 2)
    train_op = optimizer.apply_gradients([(x * 2, w)])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train_op, {x: 1})
        session.run(train_op, {x: 2})
        assert session.run(w) == -6
    with pytest.raises(ValueError, match="`mean_loss` is of the loss that"):
        optimizer.mean_loss


def test_towers(graph, x):
    # Each tower's gradient by compute_gradients, their mean applied.
    w = make_weights()
    optimizer = accumgrad.AccumulatingOptimizer(sgd(), 2)
    towers = [optimizer.compute_gradients(w * x * factor)
              for factor in (1.0, 3.0)]
    train_op = optimizer.apply_gradients([
        (tf.add_n([first, second]) / 2, variable)
        for (first, variable), (second, _) in zip(*towers)])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train_op, {x: 1})
        session.run(train_op, {x: 2})
        assert session.run(w) == -6
    with pytest.raises(ValueError, match="`mean_loss` is of the loss that"):
        optimizer.mean_loss


def test_variable_without_gradient_is_left_out(graph, x):
    w, idle = make_weights(), tf.get_variable("idle", [])
    optimizer = accumgrad.AccumulatingOptimizer(
        tf.train.MomentumOptimizer(1.0, 0.9), 2)
    pairs = optimizer.compute_gradients(w * x, [w, idle])
    assert [gradient is None for gradient, _ in pairs] == [False, True]
    optimizer.apply_gradients(pairs)
    assert optimizer.get_slot(idle, "momentum") is None
    assert optimizer.get_slot(w, "momentum") is not None


# Names, and what is passed through.

@pytest.mark.parametrize("scope", ["", "name", "variable"])
@pytest.mark.parametrize("name", ["Adam", "RMSProp", "AdamW", "Bert"])
def test_optimizer_variables_have_the_names_that_they_have_without(
        behavior, name, scope):
    def names(make_optimizer):
        with tf.Graph().as_default():
            step = tf.train.get_or_create_global_step()
            w = tf.get_variable("layer/w", [])

            def build():
                make_optimizer().minimize(tf.square(w), global_step=step)
            if scope == "name":
                with tf.name_scope("outer"):
                    build()
            elif scope == "variable":
                with tf.variable_scope("outer"):
                    build()
            else:
                build()
            return sorted(v.op.name for v in tf.global_variables())
    assert names(lambda: accumgrad.AccumulatingOptimizer(
        ALL_OPTIMIZERS[name]())) == names(ALL_OPTIMIZERS[name])


@pytest.mark.parametrize("saving", ["with", "without"])
def test_checkpoints_interchange(behavior, tmp_path, saving):
    def build(how):
        w = tf.get_variable("w", [])
        optimizer = tf.train.AdamOptimizer(0.1)
        if how == "with":
            optimizer = accumgrad.AccumulatingOptimizer(optimizer, 2)
        step = tf.train.get_or_create_global_step()
        return optimizer.minimize(w * 3.0, global_step=step)
    path = str(tmp_path / "model")
    with tf.Graph().as_default(), tf.Session() as session:
        train_op = build(saving)
        session.run(tf.global_variables_initializer())
        for _ in range(4):
            session.run(train_op)
        saved = read_variables(session)
        tf.train.Saver().save(session, path)
    with tf.Graph().as_default(), tf.Session() as session:
        train_op = build("without" if saving == "with" else "with")
        tf.train.Saver().restore(session, path)
        assert_same(read_variables(session), saved)
        session.run(train_op)


def test_slots_and_variables_are_the_optimizers(graph):
    w = make_weights()
    inner = tf.train.AdamOptimizer(0.1)
    optimizer = accumgrad.AccumulatingOptimizer(inner)
    optimizer.minimize(tf.square(w))
    assert optimizer.get_slot_names() == inner.get_slot_names() == ["m", "v"]
    assert optimizer.get_slot(w, "m") is inner.get_slot(w, "m")
    assert [v.op.name for v in optimizer.variables()] == [
        v.op.name for v in inner.variables()]
    assert len(optimizer.variables()) == 4


def test_collections(graph):
    w = make_weights()
    optimizer = accumgrad.AccumulatingOptimizer(sgd(), 2)
    train_op = optimizer.minimize(tf.square(w))
    optimizer.flush_op()
    assert tf.get_collection(tf.GraphKeys.TRAIN_OP) == [train_op]
    assert tf.global_variables() == tf.trainable_variables() == [w]
    assert not tf.get_collection(tf.GraphKeys.UPDATE_OPS)


# Cycles.

def test_global_initializer_is_enough_and_local_does_no_harm(graph, x):
    w = make_weights()
    optimizer = accumgrad.AccumulatingOptimizer(sgd(), 3)
    train_op = optimizer.minimize(w * x)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert not session.run(optimizer.has_updated)
        for value in (1, 2):
            session.run(train_op, {x: value})
            assert session.run(w) == 0
        session.run(train_op, {x: 3})
        assert session.run(w) == -6
        session.run(tf.local_variables_initializer())
        for value in (4, 5, 6):
            session.run(train_op, {x: value})
        assert session.run(w) == -21


def test_size_may_change_from_cycle_to_cycle(graph, x):
    step = tf.train.get_or_create_global_step()
    w = make_weights()
    optimizer = accumgrad.AccumulatingOptimizer(
        sgd(), 1 + tf.cast(step, tf.int32), reduction="mean")
    train_op = optimizer.minimize(w * x, global_step=step)
    updated = []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(10):
            session.run(train_op, {x: 1})
            updated.append(int(session.run(optimizer.has_updated)))
        assert session.run([w, step]) == [-4, 4]
    assert updated == [1, 0, 1, 0, 0, 1, 0, 0, 0, 1]


def test_mean_loss(graph, x):
    w = make_weights(1.0)
    optimizer = accumgrad.AccumulatingOptimizer(sgd(0.0), 3)
    train_op = optimizer.minimize(w * x)
    seen = []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for value in (1, 2, 6, 10, 20, 30):
            _, mean = session.run([train_op, optimizer.mean_loss], {x: value})
            seen.append(mean)
    assert seen == [1, 1.5, 3, 10, 15, 20]


def test_mean_loss_is_weighted(graph, x):
    weight = tf.placeholder(tf.int32, [])
    w = make_weights(1.0)
    optimizer = accumgrad.AccumulatingOptimizer(
        sgd(0.0), 3, weight=weight, nonfinite="skip_micro_batch")
    train_op = optimizer.minimize(w * x)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        seen = [session.run([train_op, optimizer.mean_loss],
                            {x: value, weight: count})[1]
                for value, count in [(1, 1), (np.nan, 5), (3, 3), (7, 1)]]
    assert seen == [1, 1, 2.5, 7]


def test_flush(graph, x):
    step = tf.train.get_or_create_global_step()
    w = make_weights()
    optimizer = accumgrad.AccumulatingOptimizer(
        tf.train.MomentumOptimizer(1.0, 0.5), 3, reduction="mean")
    train_op = optimizer.minimize(w * x, global_step=step)
    variables = tf.global_variables()
    flush_op = optimizer.flush_op()
    assert tf.global_variables() == variables
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for value in (1, 2, 3, 4, 6):
            session.run(train_op, {x: value})
        assert session.run([w, step]) == [-2, 1]
        session.run(flush_op)
        # The momentum is 0.5 * 2 + 5.
        assert session.run([w, step]) == [-8, 2]
        assert session.run(optimizer.has_updated)
        with pytest.raises(tf.errors.InvalidArgumentError,
                           match="flush_op found nothing accumulated"):
            session.run(flush_op)
        assert session.run([w, step]) == [-8, 2]
        for value in (1, 1, 1):
            session.run(train_op, {x: value})
        assert session.run([w, step]) == [-12, 3]


def test_flush_reuses_what_apply_gradients_makes(graph, x):
    with tf.variable_scope("outer"):
        w = make_weights(1.0)
        optimizer = accumgrad.AccumulatingOptimizer(BertOptimizer(0.1), 3)
        optimizer.minimize(w * x)
    variables = tf.global_variables()
    optimizer.flush_op()
    assert tf.global_variables() == variables


def test_no_flush_where_variables_would_be_made_again(graph, x):
    class Counting(tf.train.GradientDescentOptimizer):
        def apply_gradients(self, *args, **kwargs):
            count = tf.Variable(0.0, trainable=False, name="count")
            return tf.group(super().apply_gradients(*args, **kwargs),
                            tf.assign_add(count, 1.0))
    optimizer = accumgrad.AccumulatingOptimizer(Counting(1.0), 3)
    optimizer.minimize(make_weights(use_resource=True) * x)
    with pytest.raises(ValueError, match="cannot be had .* it made: count_1"):
        optimizer.flush_op()


def test_error_of_a_run_ends_its_cycle(graph, x):
    w = make_weights()
    optimizer = accumgrad.AccumulatingOptimizer(sgd(), 2, nonfinite="raise")
    train_op = optimizer.minimize(w * x)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for _ in range(3):
            session.run(train_op, {x: np.nan})
            with pytest.raises(tf.errors.InvalidArgumentError,
                               match="gradient of w has a NaN"):
                session.run(train_op, {x: 1})
            assert session.run(w) == 0
            assert not session.run(optimizer.has_updated)
        session.run(train_op, {x: 1})
        session.run(train_op, {x: 2})
        assert session.run(w) == -3


def test_error_in_the_users_transform_ends_the_cycle_too(graph, x):
    # And flush_op finds nothing of it.
    w = make_weights()
    optimizer = accumgrad.AccumulatingOptimizer(
        sgd(), 2, transform_gradients=lambda pairs: [
            (tf.check_numerics(gradient, "found"), variable)
            for gradient, variable in pairs])
    train_op = optimizer.minimize(w * x)
    flush_op = optimizer.flush_op()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError,
                           match="flush_op found nothing accumulated"):
            session.run(flush_op)
        for _ in range(3):
            session.run(train_op, {x: np.nan})
            with pytest.raises(tf.errors.InvalidArgumentError, match="found"):
                session.run(train_op, {x: 1})
            with pytest.raises(tf.errors.InvalidArgumentError,
                               match="flush_op found nothing accumulated"):
                session.run(flush_op)
        session.run(train_op, {x: 1})
        assert session.run(w) == 0
        session.run(train_op, {x: 2})
        assert session.run(w) == -3


def test_cycle_of_skipped_micro_batches_is_an_error_once(graph, x):
    w = make_weights()
    optimizer = accumgrad.AccumulatingOptimizer(
        sgd(), 2, nonfinite="skip_micro_batch")
    train_op = optimizer.minimize(w * x)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(train_op, {x: np.nan})
        with pytest.raises(tf.errors.InvalidArgumentError,
                           match="no micro-batch of the cycle counts"):
            session.run(train_op, {x: np.nan})
        session.run(train_op, {x: 1})
        session.run(train_op, {x: np.nan})
        assert session.run(w) == -1


def test_first_micro_batch_of_a_session_cannot_be_taken_back(graph, x):
    # Unless the local variables were initialised after the others.
    w = make_weights()
    average = tf.get_variable("average", [], trainable=False,
                              initializer=tf.ones_initializer())
    update = tf.assign(average, x)
    optimizer = accumgrad.AccumulatingOptimizer(
        sgd(), 2, nonfinite="skip_micro_batch", update_ops=[update])
    train_op = optimizer.minimize(w * x)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError,
                           match="local_variables_initializer"):
            session.run(train_op, {x: np.nan})
        session.run(tf.global_variables_initializer())
        session.run(tf.local_variables_initializer())
        session.run(train_op, {x: np.nan})
        assert session.run(average) == 1
        session.run(train_op, {x: 3})
        session.run(train_op, {x: np.nan})
        assert session.run([average, w]) == [3, -3]


def test_no_races(graph, use_resource, assignable):
    weights = [tf.get_variable(f"w{i}", [3 if i % 2 else 300000],
                               use_resource=use_resource,
                               initializer=tf.zeros_initializer())
               for i in range(8)]
    loss = tf.add_n([tf.reduce_sum(w) for w in weights])
    step = tf.train.get_or_create_global_step()
    train_op = accumgrad.AccumulatingOptimizer(sgd(-1.0), 3).minimize(
        loss, global_step=step)
    ends = tf.stack([tf.reduce_min([w[0], w[-1]]) for w in weights]
                    + [tf.reduce_max([w[0], w[-1]]) for w in weights])
    config = tf.ConfigProto(inter_op_parallelism_threads=8)
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        run = session.make_callable(train_op)
        for cycle in range(1, 501):
            for _ in range(3):
                run()
            if cycle % 50 == 0 or cycle < 20:
                # A gradient of one, three times a cycle.
                np.testing.assert_array_equal(session.run(ends), 3.0 * cycle)
        assert session.run(step) == 500


# What is refused.

def test_references_under_control_flow_v2(behavior, graph):
    if behavior != "v2":
        pytest.skip("control flow v1 can assign to them")
    w = make_weights(use_resource=False)
    optimizer = accumgrad.AccumulatingOptimizer(sgd(), 2)
    pairs = optimizer.compute_gradients(tf.identity(w))
    num_ops = len(graph.get_operations())
    with pytest.raises(ValueError, match="reference variables under control "
                       "flow v2, .*: w.  Call tf.compat.v1.enable_resource"):
        optimizer.apply_gradients(pairs)
    assert len(graph.get_operations()) == num_ops


def test_second_apply_gradients(graph, x):
    optimizer = accumgrad.AccumulatingOptimizer(sgd(), 2)
    optimizer.minimize(make_weights() * x)
    with pytest.raises(ValueError, match="serves one `apply_gradients`"):
        optimizer.minimize(tf.get_variable("other", []) * x)


@pytest.mark.parametrize("ask", [
    lambda optimizer: optimizer.has_updated,
    lambda optimizer: optimizer.mean_loss,
    lambda optimizer: optimizer.flush_op(),
    lambda optimizer: optimizer.per_cycle(tf.train.SessionRunHook())])
def test_nothing_is_there_before_minimize(graph, ask):
    optimizer = accumgrad.AccumulatingOptimizer(sgd(), 2)
    with pytest.raises(ValueError, match="Call `minimize` or `apply_grad"):
        ask(optimizer)


@pytest.mark.parametrize("arguments, error, message", [
    ({"optimizer": "sgd"}, TypeError, "`optimizer` must have the methods"),
    ({"num_micro_batches": 0}, ValueError, "`num_micro_batches` .* got 0"),
    ({"num_micro_batches": 2.5}, TypeError, "`num_micro_batches` .* got 2.5"),
    ({"num_micro_batches": True}, TypeError, "`num_micro_bat.* got True"),
    ({"num_micro_batches": lambda: tf.constant(2.0)}, TypeError,
     "`num_micro_batches` must be a scalar of an integer .*float32"),
    ({"reduction": "avg"}, ValueError, "`reduction` must be one of"),
    ({"nonfinite": "ignore"}, ValueError, "`nonfinite` must be one of"),
    ({"accumulators": "sparse"}, ValueError, "`accumulators` must be one of"),
    ({"weight": "tokens"}, TypeError, "`weight` must be"),
    ({"transform_gradients": 1}, TypeError, "`transform_gradients` must be"),
    ({"update_ops": "all"}, TypeError, "`update_ops` must hold"),
    ({"save_accumulators": 1}, TypeError, "`save_accumulators` must be"),
    ({"name": ""}, ValueError, "`name` must be"),
])
def test_bad_argument(graph, arguments, error, message):
    arguments = {name: value() if callable(value) else value
                 for name, value in arguments.items()}
    with pytest.raises(error, match=message):
        accumgrad.AccumulatingOptimizer(
            **dict({"optimizer": sgd()}, **arguments))


def test_sync_replicas_is_refused(graph):
    with pytest.raises(ValueError, match="`optimizer` must not be wrapped "
                       "with SyncReplicasOptimizer"):
        accumgrad.AccumulatingOptimizer(
            tf.train.SyncReplicasOptimizer(sgd(), 1, 1))


@pytest.mark.parametrize("junk, error, message", [
    ([], ValueError, "a gradient for at least one variable"),
    (None, TypeError, "`grads_and_vars` must have a list of pairs"),
    ([(1.0, "w")], TypeError, "`grads_and_vars` must have gradients that"),
])
def test_bad_pairs(graph, junk, error, message):
    with pytest.raises(error, match=message):
        accumgrad.AccumulatingOptimizer(sgd()).apply_gradients(junk)


def test_hook_must_be_one(graph, x):
    optimizer = accumgrad.AccumulatingOptimizer(sgd(), 2)
    optimizer.minimize(make_weights() * x)
    with pytest.raises(TypeError, match="`hook` must be .* got 'hook'"):
        optimizer.per_cycle("hook")
