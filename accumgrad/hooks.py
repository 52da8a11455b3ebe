"""Hooks for loops of one op, as `MonitoredTrainingSession` runs them."""

from typing import Any, Optional

import tensorflow.compat.v1 as tf


class PerCycleHook(tf.train.SessionRunHook):
    """Runs a hook in the runs that apply, and in no other."""

    def __init__(self, hook: tf.train.SessionRunHook,
                 will_update: tf.Tensor) -> None:
        """Wraps a hook.

        Args:
            hook: A `tf.train.SessionRunHook`.
            will_update: Scalar bool `Tensor` that needs no feed: whether the
                next run will apply.
        """
        self._hook = hook
        self._will_update = will_update
        self._acts = False

    def begin(self) -> None:
        self._hook.begin()

    def after_create_session(self, session: tf.Session,
                             coord: tf.train.Coordinator) -> None:
        self._hook.after_create_session(session, coord)

    def before_run(self, run_context: tf.train.SessionRunContext
                   ) -> Optional[tf.train.SessionRunArgs]:
        self._acts = run_context.session.run(self._will_update)
        return self._hook.before_run(run_context) if self._acts else None

    def after_run(self, run_context: tf.train.SessionRunContext,
                  run_values: tf.train.SessionRunValues) -> None:
        if self._acts:
            self._hook.after_run(run_context, run_values)

    def end(self, session: Any) -> None:
        self._hook.end(session)
