"""Starting the processes of a test, and ending them whatever happens."""

import os
import pathlib
import signal
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = "from horovod.runner.launch import run_commandline; run_commandline()"


def launch(script, *arguments, seconds, ranks=2):
    """Run a script under horovodrun; return its exit code and output."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    command = [
        *(sys.executable, "-c", LAUNCH, "-np", str(ranks), "--gloo"),
        *("-H", f"localhost:{ranks}", "--network-interface", "lo"),
        *(sys.executable, str(script), *map(str, arguments)),
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        # Its own end makes horovodrun end the ranks.
        process.terminate()
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return None, output
