"""What building leaves in the graph: names, collections, checkpoints, size."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from optimizers import BertOptimizer
from optimizers import GivenPairs
from optimizers import sgd
from recipe import OPTIMIZERS

COLLECTIONS = [tf.GraphKeys.TRAINABLE_VARIABLES, tf.GraphKeys.UPDATE_OPS,
               tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.LOSSES,
               tf.GraphKeys.REGULARIZATION_LOSSES,
               tf.GraphKeys.MODEL_VARIABLES]


def make_model(use_resource=None, **scope_options):
    """Returns input and loss of an embedding and a layer."""
    x = tf.placeholder(tf.float32, [None, 3])
    with tf.variable_scope("model", use_resource=use_resource,
                           **scope_options):
        table = tf.get_variable("table", [4, 3],
                                initializer=tf.ones_initializer())
        kernel = tf.get_variable("kernel", [3, 2],
                                 initializer=tf.ones_initializer())
    loss = tf.reduce_mean(tf.square(
        tf.matmul(x + tf.gather(table, [1, 2]), kernel)))
    return x, loss


def variable_names(collection=tf.GraphKeys.GLOBAL_VARIABLES):
    return [variable.op.name for variable in tf.get_collection(collection)]


def collections():
    return {key: [item.name for item in tf.get_collection(key)]
            for key in COLLECTIONS}


# Collections.

def test_collections_hold_nothing_of_ours(graph, use_resource):
    tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.no_op())
    _, loss = make_model(
        use_resource, regularizer=lambda w: 0.1 * tf.reduce_sum(w))
    before = collections()
    ops = accumgrad.build_accumulation_ops(loss, sgd())
    assert collections() == before
    assert tf.get_collection(tf.GraphKeys.TRAIN_OP) == [ops.train_op]
    local = variable_names(tf.GraphKeys.LOCAL_VARIABLES)
    assert "accumgrad/model/kernel/accumulator" in local
    assert all(name.startswith("accumgrad/") for name in local)


def test_train_op_joins_those_of_others(graph):
    _, loss = make_model()
    other = sgd().minimize(loss)
    ops = accumgrad.build_accumulation_ops(loss, sgd())
    assert tf.get_collection(tf.GraphKeys.TRAIN_OP) == [other, ops.train_op]


# Names of the optimizer's own variables.

def in_scope(scope, build):
    if scope == "name_scope":
        with tf.name_scope("outer"):
            return build()
    if scope == "variable_scope":
        with tf.variable_scope("outer"):
            return build()
    if scope == "reentered":
        with tf.variable_scope("outer") as entered:
            pass
        with tf.variable_scope(entered), tf.name_scope("inner"):
            return build()
    return build()


SCOPES = [None, "name_scope", "variable_scope", "reentered"]
ALL_OPTIMIZERS = dict(OPTIMIZERS, Bert=lambda: BertOptimizer(0.1))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("optimizer_name", ["Adam", "Ftrl", "Bert"])
def test_optimizer_names_its_variables_as_minimize_does(
        behavior, optimizer_name, scope):
    names = []
    for build in (
            lambda loss: ALL_OPTIMIZERS[optimizer_name]().minimize(loss),
            lambda loss: accumgrad.build_accumulation_ops(
                loss, ALL_OPTIMIZERS[optimizer_name]())):
        with tf.Graph().as_default():
            _, loss = make_model()
            in_scope(scope, lambda: build(loss))
            names.append(variable_names())
    assert names[0] == names[1]
    assert len(names[0]) > 2


# Checkpoints.

def build_plainly(loss, optimizer):
    train_op = optimizer.minimize(loss)
    return lambda session, x, value: session.run(
        train_op, {x: np.full([2, 3], value)})


def build_accumulated(loss, optimizer):
    ops = accumgrad.build_accumulation_ops(loss, optimizer)
    return lambda session, x, value: accumgrad.run_cycle(
        session, ops, [{x: np.full([2, 3], value)}])


@pytest.mark.parametrize("saving, restoring", [
    (build_plainly, build_accumulated), (build_accumulated, build_plainly)])
@pytest.mark.parametrize("scope", [None, "variable_scope"])
def test_checkpoints_interchange(behavior, tmp_path, saving, restoring,
                                 scope):
    def run(build, steps, restore=None, save=None):
        with tf.Graph().as_default():
            x, loss = make_model()
            step = in_scope(
                scope, lambda: build(loss, tf.train.AdamOptimizer(0.1)))
            saver = tf.train.Saver()
            with tf.Session() as session:
                if restore:
                    saver.restore(session, restore)
                else:
                    session.run(tf.global_variables_initializer())
                for value in steps:
                    step(session, x, value)
                if save:
                    saver.save(session, save)
                return session.run(tf.global_variables())

    undisturbed = run(saving, [1, 2, 3, 4])
    path = str(tmp_path / "model")
    run(saving, [1, 2], save=path)
    continued = run(restoring, [3, 4], restore=path)
    for expected, actual in zip(undisturbed, continued):
        # Repeated rows are summed by us, elsewhere by the optimizer.
        np.testing.assert_allclose(actual, expected, 1e-6, 1e-7)


def test_checkpoint_has_no_accumulators(graph, tmp_path):
    x, loss = make_model()
    build_accumulated(loss, tf.train.AdamOptimizer(0.1))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        path = tf.train.Saver().save(session, str(tmp_path / "model"))
    saved = {name for name, _ in tf.train.list_variables(path)}
    assert saved == {
        "model/table", "model/kernel", "model/table/Adam",
        "model/table/Adam_1", "model/kernel/Adam", "model/kernel/Adam_1",
        "beta1_power", "beta2_power"}


def test_init_from_checkpoint_after_building(behavior, tmp_path):
    path = str(tmp_path / "model")
    with tf.Graph().as_default():
        _, loss = make_model()
        assign = tf.trainable_variables()[0].assign(np.full([4, 3], 7.0))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(assign)
            tf.train.Saver().save(session, path)
    with tf.Graph().as_default():
        x, loss = make_model()
        build_accumulated(loss, sgd())
        tf.train.init_from_checkpoint(path, {"/": "/"})
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            table = session.run(tf.trainable_variables()[0])
            np.testing.assert_array_equal(table, np.full([4, 3], 7.0))


# Where it is called.

def call_counter():
    calls = []

    def count(value):
        calls.append(1)
        return value
    return calls, count


@pytest.mark.parametrize("place", [
    "control dependencies", "name scope", "variable scope", "reused scope",
    "custom getter", "partitioner", "regularizer", "device", "all"])
def test_zero_and_train_ask_for_nothing(graph, use_resource, place):
    x = tf.placeholder(tf.float32, [], name="fed")
    calls, count = call_counter()
    features = tf.py_func(count, [x], tf.float32)
    features.set_shape([])
    update_calls, count_update = call_counter()
    update = tf.py_func(count_update, [x], tf.float32)
    with tf.variable_scope("model", use_resource=use_resource):
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
        table = tf.get_variable("table", [3, 1],
                                initializer=tf.zeros_initializer())
    loss = (w + tf.reduce_sum(tf.gather(table, [1]))) * features
    before = collections()

    def explode(getter, *args, **kwargs):
        raise AssertionError("a custom getter is for the model")

    def build():
        return accumgrad.build_accumulation_ops(loss, sgd())

    places = {
        "control dependencies": lambda: tf.control_dependencies([update]),
        "name scope": lambda: tf.name_scope("scope"),
        "variable scope": lambda: tf.variable_scope("scope"),
        "reused scope": lambda: tf.variable_scope("model", reuse=True),
        "custom getter": lambda: tf.variable_scope(
            "scope", custom_getter=explode),
        "partitioner": lambda: tf.variable_scope(
            "scope", partitioner=tf.fixed_size_partitioner(2)),
        "regularizer": lambda: tf.variable_scope(
            "scope", regularizer=lambda v: tf.reduce_sum(v)),
        "device": lambda: tf.device("/cpu:0"),
    }
    if place == "all":
        with tf.control_dependencies([update]), tf.variable_scope(
                "scope", reuse=True, custom_getter=explode,
                partitioner=tf.fixed_size_partitioner(2),
                regularizer=lambda v: tf.reduce_sum(v)), tf.device("/cpu:0"):
            ops = build()
    else:
        with places[place]():
            ops = build()
    assert collections() == before
    local_init = tf.local_variables_initializer()
    graph.finalize()

    with tf.Session() as session:
        session.run([v.initializer for v in (w, table)])
        session.run(local_init)
        session.run(ops.zero_ops)
        session.run(ops.accum_ops, {x: 2})
        session.run(ops.accum_ops, {x: 3})
        assert len(calls) == 2
        session.run(ops.train_op)
        session.run(ops.zero_ops)
        assert len(calls) == 2
        updates = 2 if place in ("control dependencies", "all") else 0
        assert len(update_calls) == updates
        assert session.run(w) == -5
        np.testing.assert_array_equal(session.run(table), [[0], [-5], [0]])


def reachable(op):
    """All that running `op` runs, by data and by control inputs."""
    seen, stack = {}, [op]
    while stack:
        op = stack.pop()
        if op.name not in seen:
            seen[op.name] = op
            stack.extend([tensor.op for tensor in op.inputs])
            stack.extend(op.control_inputs)
    return seen.values()


def test_zero_and_train_reach_no_placeholder(graph):
    x, loss = make_model()
    with tf.control_dependencies([tf.identity(x)]):
        ops = accumgrad.build_accumulation_ops(loss, tf.train.AdamOptimizer())
    for op in ops.zero_ops + [ops.train_op]:
        assert "Placeholder" not in {op.type for op in reachable(op)}
    assert any("Placeholder" in {op.type for op in reachable(op)}
               for op in ops.accum_ops)


def test_monitored_session_finds_all_ready(graph):
    x, loss = make_model()
    ops = accumgrad.build_accumulation_ops(loss, sgd())
    with tf.train.MonitoredTrainingSession() as session:
        # No zero_ops: the session has initialised the accumulators.
        session.run(ops.accum_ops, {x: np.zeros([2, 3])})


def test_supervisor_finds_all_ready(graph):
    x, loss = make_model()
    ops = accumgrad.build_accumulation_ops(loss, sgd())
    supervisor = tf.train.Supervisor(logdir=None, summary_op=None)
    with supervisor.managed_session() as session:
        session.run(ops.accum_ops, {x: np.zeros([2, 3])})


# Size.

# Rows bring the ops that fold them, twice; an array would be 40 MB.
@pytest.mark.parametrize("sparse, limit", [(False, 20000), (True, 40000)])
def test_graph_stores_no_array(graph, sparse, limit):
    w = tf.get_variable("w", [10000, 1000],
                        initializer=tf.zeros_initializer())
    before = graph.as_graph_def().ByteSize()
    loss = tf.reduce_sum(tf.gather(w, [1]) if sparse else w)
    accumgrad.build_accumulation_ops(loss, sgd())
    assert graph.as_graph_def().ByteSize() - before < limit


def test_given_pairs_choose_the_variables(graph):
    # None of them trainable, as towers' shared variables may be.
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer(),
                        trainable=False)
    x = tf.placeholder(tf.float32, [])
    ops = accumgrad.build_accumulation_ops(x * 2, GivenPairs([(x, w)]))
    with tf.Session() as session:
        session.run(w.initializer)
        accumgrad.run_cycle(session, ops, [{x: 2}, {x: 3}])
        assert session.run(w) == -5


def test_state_stays_with_the_worker(graph):
    worker = "/job:worker/task:1"
    with tf.device(tf.train.replica_device_setter(
            ps_tasks=1, worker_device=worker)):
        _, loss = make_model()
        average = tf.get_variable("average", [], trainable=False)
        accumgrad.build_accumulation_ops(
            loss, tf.train.AdamOptimizer(), nonfinite="skip_micro_batch",
            update_ops=[tf.assign_add(average, 1.0)])
    for variable in tf.local_variables():
        assert variable.device == worker, variable.op.name
    for variable in tf.global_variables():
        assert variable.device.startswith("/job:ps"), variable.op.name
