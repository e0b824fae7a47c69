"""The trips of one node's lane, with a client that answers when it is told to."""

import asyncio
from typing import Any

import pytest
from redis import exceptions
from redis.asyncio import Redis

from stepfleet.orchestrator.store.connection import Connection
from stepfleet.orchestrator.store.lanes import Call, Lane


class Client(Redis):
    """Answers every command when the gate opens."""

    def __init__(self, gate: asyncio.Event) -> None:
        super().__init__()
        self.gate = gate
        self.sent: list[tuple[Any, ...]] = []

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        self.sent.append(args)
        await self.gate.wait()
        return args[0]


def answer_all(lane: Lane, calls: list[Call], values: list[Any]) -> None:
    for call, value in zip(calls, values, strict=True):
        call.answer(value)


def a_call(*command: Any, patient: bool = True) -> Call:
    return Call(command, None, asyncio.get_running_loop().create_future(), 0.0, patient)


async def both_trips_out(client: Client, at: int) -> None:
    async with asyncio.timeout(60):
        while len(client.sent) < at:  # noqa: ASYNC110 - turn by turn is what is tested
            await asyncio.sleep(0)


async def test_a_call_made_as_all_trips_of_a_lane_come_back_is_not_forgotten() -> None:
    """Both end in the same turn of the loop, and one's caller goes on before they are gone."""
    gate = asyncio.Event()
    client = Client(gate)
    lane = Lane(("h", 1), client, answer_all)
    first, second, third = a_call("FIRST"), a_call("SECOND"), a_call("THIRD")
    lane.send(first)
    await both_trips_out(client, 1)
    lane.send(second)
    await both_trips_out(client, 2)

    async def goes_on() -> Any:
        await first.reply
        lane.send(third)
        return await third.reply

    going_on = asyncio.create_task(goes_on())
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.wait_for(going_on, 60) == "THIRD"
    await lane.aclose()


async def test_a_call_made_as_all_trips_of_a_connection_come_back_is_not_forgotten() -> None:
    gate = asyncio.Event()
    client = Client(gate)
    connection = Connection(client)
    going_on = asyncio.create_task(twice(connection))
    await both_trips_out(client, 1)
    once = asyncio.create_task(connection.execute("ONCE"))
    await both_trips_out(client, 2)
    gate.set()
    assert await asyncio.wait_for(going_on, 60) == "SECOND"
    assert await once == "ONCE"
    await connection.aclose()


async def twice(connection: Connection) -> Any:
    await connection.execute("FIRST")
    return await connection.execute("SECOND")


async def test_calls_made_during_a_trip_travel_together() -> None:
    gate = asyncio.Event()
    client = Client(gate)
    lane = Lane(("h", 1), client, answer_all)
    for at in (1, 2):
        lane.send(a_call("PING"))
        await both_trips_out(client, at)
    waiting = [a_call("PING") for _ in range(5)]
    for call in waiting:
        lane.send(call)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(client.sent) == 2
    assert not any(call.reply.done() for call in waiting)
    lane._pending.clear()
    gate.set()
    await lane.aclose()


async def test_a_patient_caller_gets_an_error_that_names_the_fix_another_the_error_itself() -> None:
    error = exceptions.ConnectionError("refused")
    patient, other = a_call("PING"), a_call("PING", patient=False)
    patient.answer(error)
    other.answer(error)
    with pytest.raises(Exception, match="Redis cannot be reached: refused"):
        await patient.reply
    with pytest.raises(exceptions.ConnectionError):
        await other.reply
