"""Hooks for loops of one op, as `MonitoredTrainingSession` runs them."""

import tensorflow.compat.v1 as tf


class PerCycleHook(tf.train.SessionRunHook):
    """Runs a hook in the runs that apply, and in no other."""

    def __init__(self, hook, will_update):
        """Wraps a hook.

        Args:
            hook: A `tf.train.SessionRunHook`.
            will_update: Scalar bool `Tensor` that needs no feed: whether the
                next run will apply.
        """
        self._hook = hook
        self._will_update = will_update
        self._acts = False

    def begin(self):
        self._hook.begin()

    def after_create_session(self, session, coord):
        self._hook.after_create_session(session, coord)

    def before_run(self, run_context):
        self._acts = run_context.session.run(self._will_update)
        return self._hook.before_run(run_context) if self._acts else None

    def after_run(self, run_context, run_values):
        if self._acts:
            self._hook.after_run(run_context, run_values)

    def end(self, session):
        self._hook.end(session)
