"""The engine's thread: a hail of Ctrl-C at any bytecode leaves an engine that works."""

import os
import random
import signal
import sys
import threading
import time

import pytest
from deepinfer import SamplingParams
from deepinfer.api.plan import Delta
from deepinfer.entrypoints.driver import Driver, Gate

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_a_gate_opens_once_for_all():
    gate = Gate()
    assert not gate.wait(0.01)
    gate.open()
    gate.open()
    assert gate.wait() and gate.wait(0.0)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_hail_of_ctrl_c(toy):
    """Forty interrupts at random moments: in submission, in the wait, in the clearing up."""
    llm = toy.llm(script=toy.script(jitter=0.001, num_pages=64))
    prompts = [[i] for i in range(1, 9)]
    expected = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)]
    draw = random.Random(5)
    struck = 0
    for _ in range(40):
        timer = threading.Timer(draw.random() * 0.01, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            llm.generate(prompts, GREEDY)
            timer.join()
            time.sleep(0.01)  # the interrupt that came too late for the call lands here
        except KeyboardInterrupt:
            struck += 1
        timer.join()
    assert struck
    for _ in range(100):
        if not llm._driver.unfinished:
            break
        time.sleep(0.01)
    assert [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)] == expected
    assert llm.get_metrics()["stats"].running == 0
    llm.assembly.engine.check_integrity()


class Deaf:
    """A listener that fails."""

    def put(self, deltas):
        raise RuntimeError("cannot hear")

    def fail(self, error):
        self.error = error


class Ears:
    def __init__(self):
        self.heard, self.done = [], Gate()

    def put(self, deltas):
        self.heard += deltas
        if any(delta.finish for delta in deltas):
            self.done.open()

    def fail(self, error):
        self.done.open()


def test_a_listener_that_fails_loses_only_its_own(toy, caplog):
    assembly = toy.assembly()
    driver = Driver(assembly.engine)
    good, bad = (assembly.preparer.prepare(n, [1], GREEDY).requests for n in ("good", "bad"))
    ears = Ears()
    driver.submit(bad, Deaf())
    driver.submit(good, ears)
    assert ears.done.wait(5)
    assert sum(len(delta.token_ids) for delta in ears.heard) == 6
    driver.ask(lambda engine: None)
    assert driver.unfinished == 0
    driver.close()
    assert "A listener failed" in caplog.text


def test_an_aborted_request_hears_of_it(toy):
    assembly = toy.assembly(script=toy.script(jitter=0.005, max_model_len=128))
    driver, ears = Driver(assembly.engine), Ears()
    long = GREEDY.model_copy(update={"max_tokens": 100})
    driver.submit(assembly.preparer.prepare("x", [1], long).requests, ears)
    driver.abort(["x", "unknown"])
    assert ears.done.wait(5)
    assert isinstance(ears.heard[-1], Delta) and ears.heard[-1].finish == "abort"
    driver.close()
    driver.abort(["x"])
    driver.drop(["x"], wait=True)
