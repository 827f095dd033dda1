"""``AsyncLLM`` on a scripted device: streams, their ends, and who frees what."""

import asyncio
import contextlib
import itertools
import threading

import pytest
from deepinfer import SamplingParams
from deepinfer.engine.detokenizer import LateDetokenizer
from deepinfer.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    ModelFaultError,
)

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def kind(name, **fields):
    return GREEDY.model_copy(update={"output_kind": name, **fields})


async def collect(stream):
    return [output async for output in stream]


async def freed(llm):
    for _ in range(200):
        metrics = await llm.get_metrics()
        if llm.get_num_unfinished_requests() == 0 and not metrics["stats"].running:
            llm.assembly.engine.check_integrity()
            return True
        await asyncio.sleep(0.01)
    return False


def test_kinds_of_output(toy):
    llm = toy.llm()
    expected = llm.generate([1, 2], GREEDY)[0].outputs[0]

    async def main():
        async with toy.async_llm(script=toy.script(jitter=0.001)) as llm:
            whole = await collect(llm.generate([1, 2], kind("cumulative")))
            parts = await collect(llm.generate([1, 2], kind("delta")))
            final = await collect(llm.generate([1, 2], kind("final_only")))
        return whole, parts, final

    whole, parts, final = asyncio.run(main())
    assert whole[-1].outputs[0].token_ids == expected.token_ids
    assert [o.finished for o in whole] == [False] * (len(whole) - 1) + [True]
    lengths = [len(o.outputs[0].token_ids) for o in whole]
    assert lengths == sorted(lengths) and len(whole) > 1
    assert [t for o in parts for out in o.outputs for t in out.token_ids] == expected.token_ids
    assert "".join(out.text for o in parts for out in o.outputs) == expected.text
    assert len(final) == 1 and final[0].text == expected.text


def test_text_that_nobody_reads_before_the_end_is_made_with_it(toy, monkeypatch):
    """And is the same, of an aborted request too."""
    made, holds, aborted = [], [], threading.Event()
    original = LateDetokenizer.push

    def push(self, ids):
        made.append(ids)
        if len(made) in holds:  # so that it cannot end before it is aborted
            assert aborted.wait(10)
        return original(self, ids)

    monkeypatch.setattr(LateDetokenizer, "push", push)

    async def main():
        script = toy.script(jitter=0.002, max_model_len=128, num_pages=64)
        async with toy.async_llm(script=script) as llm:
            (whole,) = (await collect(llm.generate([1], kind("cumulative", max_tokens=100))))[-1:]
            assert not made
            (final,) = await collect(llm.generate([1], kind("final_only", max_tokens=100)))
            assert len(made) > 50
            holds.append(len(made) + 5)
            mine = llm.generate([1], kind("final_only", max_tokens=100), "mine")
            task = asyncio.create_task(collect(mine))
            while len(made) < holds[0]:
                await asyncio.sleep(0.001)
            await llm.abort("mine")
            aborted.set()
            return whole, final, (await task)[-1]

    whole, final, part = asyncio.run(main())
    assert final.text == whole.text and final.outputs[0].token_ids == whole.outputs[0].token_ids
    count = len(part.outputs[0].token_ids)
    assert part.outputs[0].finish_reason == "abort" and 5 <= count < 100
    assert part.outputs[0].token_ids == whole.outputs[0].token_ids[:count]
    assert part.text and whole.text.startswith(part.text)


def test_many_streams_cost_one_wake_up_a_step(toy):
    async def main():
        script = toy.script(jitter=0.002, max_num_seqs=64, num_pages=512)
        async with toy.async_llm(script=script) as llm:
            loop, wakes = asyncio.get_running_loop(), 0
            original = loop.call_soon_threadsafe

            def counted(*args, **kwargs):
                nonlocal wakes
                if threading.current_thread().name == "deepinfer-engine":
                    wakes += 1
                return original(*args, **kwargs)

            loop.call_soon_threadsafe = counted
            streams = [llm.generate([i % 16 + 1], kind("delta")) for i in range(64)]
            outputs = await asyncio.gather(*map(collect, streams))
            steps = (await llm.get_metrics())["counters"].steps
            return outputs, wakes, steps

    outputs, wakes, steps = asyncio.run(main())
    assert all(o[-1].finished for o in outputs)
    assert wakes <= steps + 1


def test_samples_stream_side_by_side(toy):
    async def main():
        async with toy.async_llm() as llm:
            params = kind("delta", n=3, temperature=1.0, seed=1)
            return await collect(llm.generate([1], params))

    outputs = asyncio.run(main())
    assert {out.index for o in outputs for out in o.outputs} == {0, 1, 2}
    assert outputs[-1].finished


@pytest.mark.parametrize("way", ["break", "aclose", "cancel", "abort"])
def test_leaving_frees_everything(toy, way):
    async def main():
        script = toy.script(jitter=0.002, max_model_len=128, num_pages=64)
        async with toy.async_llm(script=script) as llm:
            stream = llm.generate([1], kind("cumulative", max_tokens=100), "mine")
            if way == "cancel":
                task = asyncio.create_task(collect(stream))
                await asyncio.sleep(0.05)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            elif way == "abort":
                task = asyncio.create_task(collect(stream))
                await asyncio.sleep(0.05)
                await llm.abort("mine")
                last = (await task)[-1]
                assert last.finished and last.outputs[0].finish_reason == "abort"
            else:
                async for _ in stream:
                    break
                if way == "aclose":
                    await stream.aclose()
                del stream
            return await freed(llm)

    assert asyncio.run(main())


def test_who_is_aborted_while_he_waits_has_an_empty_list_of_logprobs(toy):
    async def main():
        async with toy.async_llm(script=toy.script(jitter=0.002, max_num_seqs=1)) as llm:
            first = asyncio.create_task(collect(llm.generate([1], kind("cumulative"))))
            waits = llm.generate([2], kind("cumulative", logprobs=1), "waits")
            second = asyncio.create_task(collect(waits))
            await asyncio.sleep(0.003)
            await llm.abort("waits")
            (ended,) = await second
            await first
            return ended.outputs[0]

    out = asyncio.run(main())
    assert (out.finish_reason, out.token_ids, out.logprobs) == ("abort", [], [])


def test_pictures_are_read_while_the_event_loop_goes_on(toy):
    """And who comes with the same name meanwhile is refused or refuses: one of both runs. Pictures
    are there at once and steps take time, so that one cannot end before the other comes.
    """
    asked = {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": b"picture"}}

    async def main():
        async with toy.async_llm(script=toy.script(jitter=0.05)) as llm:
            moved_on, both = threading.Event(), threading.Barrier(2, timeout=10)
            reads = itertools.count()

            def read(given):
                assert moved_on.wait(10), "the event loop waited for the picture"
                if next(reads) < 2:  # who finds the name in use may read once more
                    both.wait()
                return ()

            llm.assembly.preparer.images.read = read
            twins = [collect(llm.generate(asked, kind("final_only"), "same")) for _ in range(2)]
            tasks = [asyncio.create_task(twin) for twin in twins]
            plain = await collect(llm.generate([1, 2], kind("final_only")))
            moved_on.set()
            seen = await asyncio.gather(*tasks, return_exceptions=True)
            assert await freed(llm)
            return plain, seen

    plain, seen = asyncio.run(main())
    refused = [x for x in seen if isinstance(x, InvalidRequestError)]
    (answered,) = [x for x in seen if isinstance(x, list)]
    assert len(refused) == 1 and "still running" in str(refused[0])
    assert answered[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_aborting_an_unknown_id_is_no_error(toy):
    async def main():
        async with toy.async_llm() as llm:
            await llm.abort("nobody")

    asyncio.run(main())


def test_an_id_that_runs_is_refused_and_free_again_afterwards(toy):
    async def main():
        async with toy.async_llm(script=toy.script(jitter=0.002)) as llm:
            first = asyncio.create_task(collect(llm.generate([1], GREEDY, "x")))
            await asyncio.sleep(0.01)
            with pytest.raises(InvalidRequestError, match="'x' is still running"):
                await collect(llm.generate([2], GREEDY, "x"))
            await first
            return await collect(llm.generate([2], GREEDY, "x"))

    assert asyncio.run(main())[-1].finished


def test_an_id_can_be_used_again_at_once_after_it_was_left(toy):
    async def main():
        async with toy.async_llm(script=toy.script(jitter=0.002, max_model_len=128)) as llm:
            for _ in range(20):
                stream = llm.generate([1], kind("cumulative", max_tokens=100), "x")
                await anext(stream)
                await stream.aclose()
                again = await collect(llm.generate([2], kind("final_only"), "x"))
                assert again[-1].outputs[0].finish_reason == "length"
                assert again[-1].request_id == "x"

    asyncio.run(main())


def test_errors_reach_their_own_stream_only(toy):
    async def main():
        async with toy.async_llm(script=toy.script(poison=5)) as llm:
            calm = kind("final_only", allowed_token_ids=(1, 2, 3))
            good = asyncio.create_task(collect(llm.generate([1], calm)))
            with pytest.raises(ModelFaultError):
                await collect(llm.generate([5], calm))
            with pytest.raises(InvalidRequestError, match="empty"):
                await collect(llm.generate("", calm))
            assert (await good)[-1].outputs[0].finish_reason == "length"
            await llm.check_health()

    asyncio.run(main())


def test_a_dead_engine_ends_every_stream_with_its_cause(toy):
    async def main():
        async with toy.async_llm(script=toy.script(fail_at=4, jitter=0.001)) as llm:
            streams = [collect(llm.generate([i], GREEDY)) for i in (1, 2, 3)]
            results = await asyncio.gather(*streams, return_exceptions=True)
            with pytest.raises(EngineDeadError):
                await llm.check_health()
            return results

    results = asyncio.run(main())
    assert all(isinstance(r, EngineDeadError) for r in results)
    assert all("planted failure" in str(r.__cause__) for r in results)


def test_shutdown_ends_streams_and_is_idempotent(toy):
    async def main():
        llm = toy.async_llm(script=toy.script(jitter=0.005, max_model_len=128))
        task = asyncio.create_task(collect(llm.generate([1], kind("delta", max_tokens=100))))
        await asyncio.sleep(0.05)
        await llm.shutdown()
        await llm.shutdown(timeout=1)
        with pytest.raises(EngineClosedError):
            await task
        with pytest.raises(EngineClosedError):
            await llm.check_health()
        with pytest.raises(EngineClosedError):
            await collect(llm.generate([1], GREEDY))

    before = set(threading.enumerate())
    asyncio.run(main())
    assert set(threading.enumerate()) == before


def test_two_event_loops_share_one_engine(toy):
    llm = toy.async_llm(script=toy.script(jitter=0.001))
    found = []

    def work(token):
        found.append(asyncio.run(collect(llm.generate([token], GREEDY)))[-1].text)

    threads = [threading.Thread(target=work, args=(i,)) for i in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2


def test_the_loop_is_never_blocked(toy):
    async def main():
        async with toy.async_llm(script=toy.script(jitter=0.05)) as llm:
            task = asyncio.create_task(collect(llm.generate([1], GREEDY)))
            turns = 0
            while not task.done():
                await asyncio.sleep(0)
                turns += 1
            return turns

    assert asyncio.run(main()) > 200  # a loop that waits for steps would turn some twenty times
