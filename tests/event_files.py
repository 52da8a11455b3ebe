"""What is in a folder's TensorBoard event files."""

import glob
import os

import tensorflow.compat.v1 as tf


def read_summaries(folder, tag):
    """Returns pairs of step and value, as TensorBoard would show them.

    Where a writer says that it starts at a step, what was written of that step
    and of later ones before that counts no more.
    """
    found = []
    for path in sorted(glob.glob(os.path.join(str(folder), "events.*"))):
        for event in tf.train.summary_iterator(path):
            if event.session_log.status == tf.SessionLog.START:
                found = [(step, value) for step, value in found
                         if step < event.step]
            found.extend((event.step, value.simple_value)
                         for value in event.summary.value if value.tag == tag)
    return found
