import asyncio
import os
import signal

from stepfleet.orchestrator.cli.signals import Interrupts


async def signals_are_heard() -> None:
    """Return when the loop has heard all signals that were sent before."""
    heard, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, heard.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    async with asyncio.timeout(60):
        await heard.wait()
    loop.remove_signal_handler(signal.SIGUSR1)


async def test_a_closed_terminal_is_an_orderly_stop_however_often_it_is_reported() -> None:
    interrupts = Interrupts()
    interrupts.before_exit(os.abort)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with interrupts.handled():
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
                async with asyncio.timeout(10):
                    await interrupts.requested.wait()
                await signals_are_heard()
    finally:
        signal.signal(signal.SIGHUP, before)

    assert interrupts.requested.is_set()


async def test_under_nohup_a_closed_terminal_changes_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupts = Interrupts()
    try:
        with interrupts.handled():
            os.kill(os.getpid(), signal.SIGHUP)
            await signals_are_heard()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not interrupts.requested.is_set()
