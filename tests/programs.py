"""Runs programs in processes of their own."""

import os
import subprocess
import sys

import accumgrad

# Where accumgrad is imported from here, and the tests' modules.
PATHS = [os.path.dirname(os.path.dirname(os.path.abspath(accumgrad.__file__))),
         os.path.dirname(os.path.abspath(__file__))]


def run_python(code, folder, *arguments):
    """Runs `code` in a new process, in `folder`.

    Returns:
        Its exit status, and all that it printed.
    """
    script = os.path.join(str(folder), "script.py")
    with open(script, "w", encoding="utf-8") as file:
        file.write(code)
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3",
                       PYTHONPATH=os.pathsep.join(PATHS))
    process = subprocess.Popen(
        [sys.executable, script] + [str(argument) for argument in arguments],
        cwd=str(folder), env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, universal_newlines=True)
    output, _ = process.communicate()
    return process.returncode, output
