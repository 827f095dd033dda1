"""Work in processes of its own is ended by the time that it took, not by a busy clock."""

import json
import os
import signal
import threading
import time

import pytest
from deepinfer.errors import PluginError
from deepinfer_structured import frames
from deepinfer_structured.processes import Processes, TooSlowError

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="no timers of own time")

QUICK = json.dumps({"schema": {"type": "integer"}, "text": "5"})
ENDLESS = json.dumps({"schema": {"pattern": "^(a+)+$"}, "text": json.dumps("a" * 40 + "!")})


@pytest.fixture
def processes():
    import xgrammar

    info = xgrammar.TokenizerInfo(["a", "</s>"], stop_token_ids=[1])
    made = Processes(lambda: str(info.serialize_json()), count=1)
    yield made
    made.close()


def test_a_process_that_was_kept_waiting_still_answers(processes):
    assert processes.run(frames.VALIDATE, QUICK, 60.0) == ""
    (process,) = processes._running
    pid = process._process.pid
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(1.5, os.kill, (pid, signal.SIGCONT))
    timer.start()
    assert processes.run(frames.VALIDATE, QUICK, 0.5) == ""
    timer.join()


def test_a_task_without_an_end_is_ended_by_its_own_time_and_the_next_one_runs(processes):
    processes.run(frames.VALIDATE, QUICK, 60.0)
    began = time.thread_time()
    with pytest.raises(TooSlowError):
        processes.run(frames.VALIDATE, ENDLESS, 0.5)
    assert time.thread_time() - began < 0.5  # waiting costs nothing here
    assert processes.run(frames.VALIDATE, QUICK, 60.0) == ""


def test_a_process_that_does_not_start_is_no_fault_of_the_task():
    made = Processes(lambda: "no vocabulary", count=1)
    try:
        for _ in range(2):
            with pytest.raises(PluginError, match="did not start"):
                made.run(frames.VALIDATE, QUICK, 60.0)
        assert not made._running
    finally:
        made.close()
