"""``LLM`` on a scripted device: order, failures, interrupts, manners."""

import gc
import logging
import os
import signal
import sys
import threading
import time
import weakref

import pytest
from deepinfer import LLM, SamplingParams
from deepinfer.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    KVCacheTooSmallError,
    ModelFaultError,
)

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def ids(outputs):
    return [out.outputs[0].token_ids for out in outputs]


def test_results_come_in_the_order_of_prompts_whatever_their_form(toy):
    llm = toy.llm()
    prompts = ["ab", [1, 2, 3], {"prompt": "ba"}, {"prompt_token_ids": [4]}]
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    mixed = llm.generate(prompts, GREEDY)
    assert ids(mixed) == alone
    assert [out.prompt for out in mixed] == ["ab", None, "ba", None]
    assert [out.prompt_token_ids for out in mixed] == [[3], [1, 2, 3], [4], [4]]
    assert llm.generate([], GREEDY) == []


def test_the_published_example(toy):
    llm = toy.llm()
    outputs = llm.generate(prompts=["ab"], sampling_params=GREEDY)
    text = llm.get_tokenizer().decode([token.token_id for token in outputs[0]])
    assert len(list(outputs[0])) == 6 and isinstance(text, str)


def test_parameters_per_prompt_and_samples(toy):
    llm = toy.llm()
    many = SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True, logprobs=2)
    outputs = llm.generate([[1], [2]], [many, GREEDY])
    assert [len(out.outputs) for out in outputs] == [3, 1]
    assert [o.index for o in outputs[0].outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in outputs[0].outputs}) > 1
    one = llm.generate([[1]], many.model_copy(update={"n": 1}))[0]
    assert one.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    token = next(iter(one))
    assert token.logprob == one.outputs[0].logprobs[0][token.token_id].logprob


def test_one_bad_prompt_does_not_lose_the_others(toy):
    llm = toy.llm()
    outputs = llm.generate([[1], "", [99], [2]], GREEDY)
    assert [out.outputs[0].finish_reason for out in outputs] == [
        "length",
        "error",
        "error",
        "length",
    ]
    assert isinstance(outputs[1].error, InvalidRequestError)
    assert "id 99" in str(outputs[2].error)
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate("", GREEDY)
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate([""], GREEDY)


def test_a_request_that_breaks_while_it_runs_fails_alone(toy):
    llm = toy.llm(script=toy.script(poison=5))
    calm = GREEDY.model_copy(update={"allowed_token_ids": (1, 2, 3)})
    outputs = llm.generate([[1], [5], [2]], calm)
    assert [out.outputs[0].finish_reason for out in outputs] == ["length", "error", "length"]
    assert isinstance(outputs[1].error, ModelFaultError)
    assert llm.generate([5], calm)[0].error is not None  # alone it is an output, too


def test_what_the_engine_refuses(toy):
    llm = toy.llm(script=toy.script(num_pages=4, page_size=4))
    long = GREEDY.model_copy(update={"max_tokens": 40})
    with pytest.raises(KVCacheTooSmallError, match="kv_cache_memory"):
        llm.generate([1], long)
    outputs = llm.generate([[1], [2]], [long, GREEDY])
    assert isinstance(outputs[0].error, KVCacheTooSmallError)
    assert outputs[1].outputs[0].finish_reason == "length"


class Rendered:
    """Stands for a chat format."""

    def render(self, messages, options=None):
        from deepinfer.chat import RenderedChat, check_messages

        return RenderedChat(text="".join(m["content"] for m in check_messages(messages)))


def test_conversations_one_or_many_and_a_bad_one_alone(toy):
    llm = toy.llm()
    llm.assembly._chat_formats[None] = Rendered()
    talk = [{"role": "user", "content": "ab"}]
    one = llm.chat(talk, GREEDY)
    assert (one[0].prompt, ids(one)) == ("ab", ids(llm.generate("ab", GREEDY)))
    mixed = llm.chat([talk, [{"role": "nobody", "content": "x"}], talk], GREEDY)
    assert [out.error is None for out in mixed] == [True, False, True]
    assert "nobody" in str(mixed[1].error)
    for bad in ("text", [], [[]], [{"role": "user"}]):
        with pytest.raises(InvalidRequestError, match="messages"):
            llm.chat(bad, GREEDY)


def test_priorities_are_one_or_one_each(toy):
    llm = toy.llm(scheduling_policy="priority")
    assert len(llm.generate([[1], [2]], GREEDY, priority=[1, 0])) == 2
    with pytest.raises(InvalidRequestError, match="priority has 3 entries"):
        llm.generate([[1], [2]], GREEDY, priority=[1, 2, 3])


def test_several_threads_share_one_engine(toy):
    llm = toy.llm(script=toy.script(jitter=0.001))
    expected = ids(llm.generate([[i] for i in range(1, 9)], GREEDY))
    found = [None] * 8

    def work(i):
        found[i] = llm.generate([i + 1], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_metrics_and_prefix_cache(toy):
    llm = toy.llm()
    prompt = list(range(1, 14))
    first = llm.generate(prompt, GREEDY)[0].metrics
    again = llm.generate(prompt, GREEDY)[0].metrics
    llm.reset_prefix_cache()
    cold = llm.generate(prompt, GREEDY)[0].metrics
    assert (first.cached_tokens, cold.cached_tokens) == (0, 0)
    assert again.cached_tokens > 0
    assert first.prompt_tokens == 13 and first.output_tokens == 6
    assert llm.get_metrics()["counters"].requests == 3


def test_progress_bar_only_when_asked_and_without_a_thread(toy, capfd):
    llm = toy.llm(script=toy.script(jitter=0.001))
    threads = set(threading.enumerate())
    llm.generate([[1], [2]], GREEDY)
    assert capfd.readouterr() == ("", "")
    llm.generate([[1], [2]], GREEDY, use_tqdm=True)
    out, err = capfd.readouterr()
    assert out == "" and "generating" in err
    assert set(threading.enumerate()) == threads


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_frees_everything_and_the_engine_goes_on(toy):
    llm = toy.llm(script=toy.script(jitter=0.002, num_pages=64, max_model_len=128))
    expected = ids(llm.generate([[1]], GREEDY))
    llm.reset_prefix_cache()
    engine = llm.assembly.engine
    long = GREEDY.model_copy(update={"max_tokens": 100})
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i] for i in range(1, 9)], long)
    timer.join()
    assert llm._driver.unfinished == 0
    assert ids(llm.generate([[1]], GREEDY)) == expected
    engine.check_integrity()
    llm.reset_prefix_cache()
    assert llm.get_metrics()["stats"].running == 0


def test_a_dead_engine_says_so_with_its_cause(toy):
    llm = toy.llm(script=toy.script(fail_at=3))
    with pytest.raises(EngineDeadError, match="planted failure") as caught:
        llm.generate([[1], [2]], GREEDY)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(EngineDeadError, match="planted failure"):
        llm.generate([1], GREEDY)
    llm.close()


def test_close_is_idempotent_and_final(toy):
    llm = toy.llm(script=toy.script(jitter=0.0))
    with llm as same:
        assert same is llm
        same.generate([1], GREEDY)
    llm.close()
    for call in (lambda: llm.generate([1], GREEDY), llm.get_metrics, llm.reset_prefix_cache):
        with pytest.raises(EngineClosedError):
            call()


def test_close_ends_a_call_on_another_thread(toy):
    llm = toy.llm(script=toy.script(jitter=0.01, max_model_len=128))
    seen = []

    def work():
        try:
            llm.generate([1], GREEDY.model_copy(update={"max_tokens": 100}))
        except EngineClosedError as why:
            seen.append(why)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.1)
    llm.close()
    thread.join(5)
    assert len(seen) == 1


def test_dropping_it_leaves_nothing(toy):
    before = set(threading.enumerate())
    llm = LLM.from_assembly(toy.assembly(script=toy.script(jitter=0.0)))
    llm.generate([1], GREEDY)
    executor = weakref.ref(llm.assembly.executor)
    del llm
    gc.collect()
    assert set(threading.enumerate()) == before
    assert executor() is None


def test_it_is_a_quiet_guest(toy):
    environment, handlers = dict(os.environ), list(logging.getLogger().handlers)
    signals = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    with LLM.from_assembly(toy.assembly()) as llm:
        llm.generate([[1], [2]], GREEDY, use_tqdm=True)
    assert dict(os.environ) == environment
    assert logging.getLogger().handlers == handlers
    assert not logging.getLogger("deepinfer").handlers
    assert {s: signal.getsignal(s) for s in signals} == signals


def test_an_idle_engine_sleeps(toy):
    llm = toy.llm()
    llm.generate([1], GREEDY)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05
