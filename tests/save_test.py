"""`save_accumulators`: a job killed in mid-cycle goes on in mid-cycle."""

import signal

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import accumgrad
from models import build_model
from optimizers import sgd
from programs import run_python

# A training job as one writes it: it finds out from its checkpoint how far it
# is, and writes one after each micro-batch.
JOB = """
import os, signal, sys
import numpy as np
import tensorflow.compat.v1 as tf
import accumgrad
from models import build_model

tf.disable_eager_execution()
directory, result, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
N, CYCLES = 4, 3
model = build_model()
feeds = model.feeds([2, 1, 3, 2, 4, 1, 1, 2, 3, 1, 2, 1])
feeds[5][model.x][0, 0] = np.nan  # is to be skipped
step = tf.train.get_or_create_global_step()
micro_step = tf.get_variable("micro_step", [], tf.int64, trainable=False,
                             initializer=tf.zeros_initializer())
average = tf.get_variable("average", [], tf.float64, trainable=False,
                          initializer=tf.zeros_initializer())
update = tf.assign_sub(average, 0.1 * (average - tf.reduce_mean(model.x)))
ops = accumgrad.build_accumulation_ops(
    model.loss, tf.train.AdamOptimizer(0.1), global_step=step,
    reduction="mean", weight=model.size, update_ops=[update],
    nonfinite="skip_micro_batch", save_accumulators=True)
# This one is not to be taken back with the micro-batch.
count = tf.assign_add(micro_step, 1)


class SaveEachMicroBatch(tf.train.SessionRunHook):
    def begin(self):
        self.saver = tf.train.Saver()

    def after_run(self, run_context, run_values):
        self.saver.save(run_context.session,
                        os.path.join(directory, "model"))


with tf.train.MonitoredTrainingSession(
        checkpoint_dir=directory, save_checkpoint_secs=None,
        save_checkpoint_steps=None, save_summaries_steps=None,
        save_summaries_secs=None, log_step_count_steps=None,
        hooks=[SaveEachMicroBatch()]) as session:
    def run(fetches):  # without the hook
        return session.run_step_fn(
            lambda step_context: step_context.session.run(fetches))
    done, updates = run([micro_step, step])
    print("begins at", done, updates, flush=True)
    while updates < CYCLES:
        if done == updates * N:
            run(ops.zero_ops)
        while done < (updates + 1) * N:
            session.run([ops.accum_ops, count], feeds[done])
            done += 1
            if done == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        run(ops.train_op)
        updates += 1
    np.savez(result, **dict(
        (v.op.name.replace("/", "."), run(v)) for v in tf.global_variables()))
"""


def run_job(folder, kill_at=-1):
    return run_python(JOB, folder, folder / "checkpoints",
                      folder / "result.npz", kill_at)


def test_killed_job_ends_where_an_undisturbed_one_does(tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    status, output = run_job(undisturbed)
    assert status == 0, output

    # In the second cycle, after the micro-batch that was skipped; and before
    # the update of the second.
    for kill_at, begins in [(6, "0 0"), (8, "6 1"), (-1, "8 1")]:
        status, output = run_job(killed, kill_at)
        assert status == (0 if kill_at < 0 else -signal.SIGKILL), output
        assert f"begins at {begins}\n" in output
    expected = np.load(str(undisturbed / "result.npz"))
    found = np.load(str(killed / "result.npz"))
    assert sorted(found.files) == sorted(expected.files)
    for name in expected.files:
        np.testing.assert_array_equal(found[name], expected[name],
                                      err_msg=name)


@pytest.mark.parametrize("nonfinite", ["apply", "skip_micro_batch"])
@pytest.mark.parametrize("save", [False, True])
def test_where_the_state_is(graph, save, nonfinite):
    model = build_model()
    average = tf.get_variable("average", [], trainable=False)
    before = {v.op.name for v in tf.global_variables()}
    accumgrad.build_accumulation_ops(
        model.loss, sgd(), save_accumulators=save, nonfinite=nonfinite,
        update_ops=[tf.assign_add(average, 1.0)])
    state = {"accumgrad/num_micro_batches"} | {
        f"accumgrad/{name}/accumulator" for name in model.variables}
    if nonfinite != "apply":
        state |= {"accumgrad/average/before_micro_batch",
                  "accumgrad/updates_known"}
    saved = {v.op.name for v in tf.global_variables()} - before
    local = {v.op.name for v in tf.local_variables()}
    if save:
        assert (saved, local) == (state, set())
    else:
        assert saved == set() and "accumgrad/num_micro_batches" in local
    assert {v.op.name for v in tf.trainable_variables()} == set(
        model.variables)


def test_saved_accumulators_are_dense(graph):
    model = build_model()
    ops = accumgrad.build_accumulation_ops(model.loss, sgd(),
                                           save_accumulators=True)
    for item in accumgrad.describe_accumulators(ops):
        assert (item.form, item.reason) == ("dense", "checkpoints have it")


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("session_kind", ["saver", "monitored", "supervisor"])
def test_all_is_ready_without_the_users_doing(graph, tmp_path, save,
                                              session_kind):
    model = build_model()
    average = tf.get_variable("average", [], trainable=False,
                              initializer=tf.zeros_initializer())
    ops = accumgrad.build_accumulation_ops(
        model.loss, tf.train.AdamOptimizer(0.1), save_accumulators=save,
        global_step=tf.train.get_or_create_global_step(),
        nonfinite="skip_micro_batch",
        update_ops=[tf.assign_add(average, 1.0)])
    feeds = model.feeds([2, 3])
    path = str(tmp_path / "model")
    if session_kind == "saver":
        initialize = tf.global_variables_initializer()
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(initialize)
            saver.save(session, path)
        with tf.Session() as session:
            saver.restore(session, path)
            accumgrad.run_cycle(session, ops, feeds)
            assert session.run(average) == 2
    elif session_kind == "monitored":
        scaffold = tf.train.Scaffold(saver=tf.train.Saver())
        with tf.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), scaffold=scaffold) as session:
            accumgrad.run_cycle(session, ops, feeds)
            assert session.run(average) == 2
    else:
        supervisor = tf.train.Supervisor(logdir=None, summary_op=None)
        with supervisor.managed_session() as session:
            accumgrad.run_cycle(session, ops, feeds)
            assert session.run(average) == 2


def test_accumulators_restore_in_mid_cycle(graph, tmp_path):
    # 1 + 2 before the checkpoint, 3 + 4 after it.
    w = tf.get_variable("w", [], initializer=tf.zeros_initializer())
    x = tf.placeholder(tf.float32, [])
    ops = accumgrad.build_accumulation_ops(
        w * x, sgd(), reduction="mean", save_accumulators=True)
    initialize, saver = tf.global_variables_initializer(), tf.train.Saver()
    path = str(tmp_path / "model")
    with tf.Session() as session:
        session.run(initialize)
        session.run(ops.zero_ops)
        for value in (1, 2):
            session.run(ops.accum_ops, {x: value})
        saver.save(session, path)
        session.run(ops.accum_ops, {x: 1000})
    with tf.Session() as session:
        saver.restore(session, path)
        for value in (3, 4):
            session.run(ops.accum_ops, {x: value})
        session.run(ops.train_op)
        assert session.run(w) == -10 / 4


@pytest.mark.parametrize("bad", [None, 1, "yes"])
def test_bad_argument(graph, bad):
    loss = tf.identity(tf.get_variable("w", []))
    num_ops = len(graph.get_operations())
    with pytest.raises(TypeError, match="`save_accumulators` must be True or "
                       "False; got"):
        accumgrad.build_accumulation_ops(loss, sgd(), save_accumulators=bad)
    assert len(graph.get_operations()) == num_ops
