"""The engine's loop: pausing, hanging, dying, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.simulator.adapters import write_adapter
from proxy.simulator.engine import Engine, EngineDeadError
from proxy.simulator.faults import FaultBox
from proxy.simulator.lora import LoraRequest
from proxy.simulator.sequence import Generation, Sequence
from proxy.simulator.settings import SimulatorSettings
from tests.support.waiting import until

LIMIT_S = 5
SETTINGS = SimulatorSettings(decode_step_s=0.001, max_cpu_loras=1)


@asynccontextmanager
async def running(settings: SimulatorSettings = SETTINGS) -> AsyncIterator[tuple[Engine, FaultBox]]:
    faults = FaultBox()
    engine = Engine(settings, faults)
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(engine.run())
        yield engine, faults
        loop.cancel()


def submitted(engine: Engine, *, max_tokens: int = 20, lora: LoraRequest | None = None) -> Generation:
    generation = Generation(id="g")
    generation.add(
        Sequence(
            generation=generation,
            prompt=[1] * 40,
            lora=lora,
            seed=0,
            max_tokens=max_tokens,
            salt="",
            vocab_size=1000,
        )
    )
    engine.submit(generation)
    return generation


async def finished(generation: Generation) -> str | None:
    while not generation.done:
        await generation.changed()
    return generation.sequences[0].finish_reason


async def hangs(call: Awaitable[object]) -> bool:
    try:
        await asyncio.wait_for(call, 0.05)
    except TimeoutError:
        return True
    return False


def in_async(test: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await test()

    asyncio.run(run())


def test_a_generation_finishes() -> None:
    async def scenario() -> None:
        async with running() as (engine, _):
            assert await finished(submitted(engine)) == "length"
            assert engine.batch.counters.generation_tokens == 20

    in_async(scenario)


def test_time_that_costs_nothing_is_possible() -> None:
    async def scenario() -> None:
        async with running(SimulatorSettings(decode_step_s=0)) as (engine, _):
            assert await finished(submitted(engine, max_tokens=2000)) == "length"

    in_async(scenario)


@pytest.mark.parametrize(("clear_cache", "preemptions", "cached"), [(True, 1, 0), (False, 0, 1)])
def test_keep_freezes_until_resume(clear_cache: bool, preemptions: int, cached: int) -> None:
    async def scenario() -> None:
        async with running() as (engine, _):
            generation = submitted(engine, max_tokens=200)
            await until(lambda: generation.sequences[0].produced > 0)
            await engine.pause("keep", clear_cache=clear_cache)
            produced = generation.sequences[0].produced
            assert await hangs(finished(generation))
            assert generation.sequences[0].produced == produced
            assert engine.batch.counters.preemptions == preemptions
            assert bool(len(engine.batch.cache)) == bool(cached)
            await engine.resume()
            assert await finished(generation) == "length"

    in_async(scenario)


def test_wait_lets_everything_finish_and_holds_what_comes_later() -> None:
    async def scenario() -> None:
        async with running() as (engine, _):
            generation = submitted(engine, max_tokens=50)
            await until(lambda: engine.batch.scheduler.running_count == 1)
            await engine.pause("wait", clear_cache=True)
            assert generation.done
            later = submitted(engine)
            assert await hangs(finished(later))
            await engine.resume()
            assert await finished(later) == "length"

    in_async(scenario)


def test_a_waiting_pause_ends_with_the_resume() -> None:
    async def scenario() -> None:
        async with running() as (engine, _), asyncio.TaskGroup() as tasks:
            generation = submitted(engine, max_tokens=100_000)
            await until(lambda: engine.batch.scheduler.running_count == 1)
            pause = tasks.create_task(engine.pause("wait", clear_cache=False))
            await until(lambda: engine.paused == "wait")
            await engine.resume()
            await pause
            engine.drop(generation)

    in_async(scenario)


def test_abort_ends_running_and_held_requests() -> None:
    async def scenario() -> None:
        async with running() as (engine, _):
            generation = submitted(engine, max_tokens=100_000)
            await until(lambda: generation.sequences[0].produced > 0)
            await engine.pause("abort", clear_cache=True)
            held = submitted(engine)
            engine.abort({"g"})
            assert [await finished(one) for one in (generation, held)] == ["abort", "abort"]
            assert held.sequences[0].tokens == []
            await engine.resume()
            assert await finished(submitted(engine)) == "length"

    in_async(scenario)


def test_a_hung_engine_answers_nothing_and_catches_up_later() -> None:
    async def scenario() -> None:
        async with running() as (engine, faults):
            generation = submitted(engine)
            faults.set({"hang": True})
            for call in (finished(generation), engine.responsive(), engine.resume()):
                assert await hangs(call)
            faults.clear()
            engine.faults_changed()
            assert await finished(generation) == "length"

    in_async(scenario)


def test_death_fails_everything_and_is_told_once() -> None:
    async def scenario() -> None:
        deaths = []
        async with running() as (engine, faults):
            engine.on_death = lambda: deaths.append(1)
            faults.set({"hang": True})
            generation = submitted(engine)
            engine.die()
            engine.die()
            await finished(generation)
            assert generation.failed
            for call in (engine.responsive(), engine.pause("wait", clear_cache=True)):
                with pytest.raises(EngineDeadError):
                    await call
            with pytest.raises(EngineDeadError):
                submitted(engine)
        assert deaths == [1]

    in_async(scenario)


def test_a_dropped_adapter_that_cannot_be_read_kills_the_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running() as (engine, _):
            gone, other = (
                LoraRequest(
                    id=seed, name=f"a{seed}", path=str(write_adapter(tmp_path / f"a{seed}", seed=seed)), inplace=False
                )
                for seed in (1, 2)
            )
            await engine.load(gone)
            await engine.load(other)
            (tmp_path / "a1" / "adapter_config.json").unlink()
            generation = submitted(engine, lora=gone)
            await finished(generation)
            assert generation.failed
            assert engine.dead

    in_async(scenario)


def test_while_it_reads_an_adapter_the_engine_answers_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(SETTINGS.model_copy(update={"load_s": 0.3})) as (engine, _):
            path = write_adapter(tmp_path / "a", seed=1)
            async with asyncio.TaskGroup() as tasks:
                load = tasks.create_task(engine.load(LoraRequest(id=1, name="a", path=str(path), inplace=False)))
                await until(lambda: engine.batch.counters.loads == 1)
                generation = submitted(engine, max_tokens=1)
                assert await hangs(engine.responsive())
                assert not load.done() and not generation.done
            await engine.responsive()
            assert await finished(generation) == "length"

    in_async(scenario)


def test_a_reset_is_refused_while_something_runs() -> None:
    async def scenario() -> None:
        async with running() as (engine, _):
            generation = submitted(engine, max_tokens=100_000)
            await until(lambda: engine.batch.scheduler.running_count == 1)
            assert not await engine.reset_prefix_cache(preempt_running=False)
            assert await engine.reset_prefix_cache(preempt_running=True)
            engine.drop(generation)
            assert await engine.reset_prefix_cache(preempt_running=False)

    in_async(scenario)


def test_slow_makes_it_slow_and_speed_makes_it_fast() -> None:
    async def seconds(speed: float, slow: float) -> float:
        settings = SimulatorSettings(decode_step_s=0.01, speed=speed)
        async with running(settings) as (engine, faults):
            faults.set({"slow": slow})
            start = asyncio.get_running_loop().time()
            await finished(submitted(engine, max_tokens=10))
            return asyncio.get_running_loop().time() - start

    async def scenario() -> None:
        assert await seconds(1, 1) >= 0.1
        assert await seconds(10, 1) < 0.1
        assert await seconds(10, 20) >= 0.2

    in_async(scenario)
