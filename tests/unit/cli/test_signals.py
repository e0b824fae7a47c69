import asyncio
import os
import signal

from stepfleet.orchestrator.cli.signals import Interrupts


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
                await asyncio.sleep(0)
    finally:
        signal.signal(signal.SIGHUP, before)

    assert interrupts.requested.is_set()


async def test_under_nohup_a_closed_terminal_changes_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupts = Interrupts()
    try:
        with interrupts.handled():
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not interrupts.requested.is_set()
