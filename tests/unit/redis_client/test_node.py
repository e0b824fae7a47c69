"""The trips to one node, a server that answers when the test lets it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import hiredis
import pytest
from redis import exceptions
from redis.asyncio import Redis

from stepfleet.orchestrator.redis_client.connection import Connection
from stepfleet.orchestrator.redis_client.node import Call, NodeConnection


class Held:
    """Answers every command with its name, once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.sent: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the commands of one connection."""
        parser = hiredis.Reader()
        while data := await reader.read(1 << 16):
            parser.feed(data)
            while command := parser.gets():
                if command[0] == b"CLIENT":  # a client says what it is
                    writer.write(b"+OK\r\n")
                    continue
                self.sent.append(command[0])
                await self.gate.wait()
                writer.write(b"+%s\r\n" % command[0])
        writer.close()


@pytest.fixture
async def held() -> AsyncIterator[tuple[Held, Redis]]:
    held = Held()
    server = await asyncio.start_server(held.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, Redis(host=host, port=port, decode_responses=True, protocol=2) as client:
        yield held, client


def answer_all(calls: list[Call], values: list[Any]) -> bool:
    for call, value in zip(calls, values, strict=True):
        call.answer(value)
    return False


def a_call(*command: Any, patient: bool = True) -> Call:
    return Call(command, patient)


async def both_trips_out(held: Held, at: int) -> None:
    async with asyncio.timeout(60):
        while len(held.sent) < at:  # noqa: ASYNC110 - turn by turn is what is tested
            await asyncio.sleep(0)


async def test_a_call_made_as_all_trips_of_a_node_come_back_is_not_forgotten(
    held: tuple[Held, Redis],
) -> None:
    """Both end in the same turn of the loop, and one's caller goes on before they are gone."""
    server, client = held
    node = NodeConnection(client, answer_all)
    first, second, third = a_call("FIRST"), a_call("SECOND"), a_call("THIRD")
    node.send(first)
    await both_trips_out(server, 1)
    node.send(second)
    await both_trips_out(server, 2)

    async def goes_on() -> Any:
        await first.reply
        node.send(third)
        return await third.reply

    going_on = asyncio.create_task(goes_on())
    await asyncio.sleep(0)
    server.gate.set()
    assert await asyncio.wait_for(going_on, 60) == "THIRD"
    await node.aclose()


async def test_a_call_made_as_all_trips_of_a_connection_come_back_is_not_forgotten(
    held: tuple[Held, Redis],
) -> None:
    server, client = held
    connection = Connection(client)
    going_on = asyncio.create_task(twice(connection))
    await both_trips_out(server, 1)
    once = asyncio.create_task(connection.execute("ONCE"))
    await both_trips_out(server, 2)
    server.gate.set()
    assert await asyncio.wait_for(going_on, 60) == "SECOND"
    assert await once == "ONCE"
    await connection.aclose()


async def twice(connection: Connection) -> Any:
    await connection.execute("FIRST")
    return await connection.execute("SECOND")


async def test_calls_made_during_a_trip_travel_together(held: tuple[Held, Redis]) -> None:
    server, client = held
    node = NodeConnection(client, answer_all)
    for at in (1, 2):
        node.send(a_call("PING"))
        await both_trips_out(server, at)
    waiting = [a_call("PING") for _ in range(5)]
    for call in waiting:
        node.send(call)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(server.sent) == 2
    assert not any(call.reply.done() for call in waiting)
    node.pending.clear()
    server.gate.set()
    await node.aclose()


async def test_a_patient_caller_gets_an_error_that_names_the_fix_another_the_error_itself() -> None:
    error = exceptions.ConnectionError("refused")
    patient, other = a_call("PING"), a_call("PING", patient=False)
    patient.answer(error)
    other.answer(error)
    with pytest.raises(Exception, match="Redis cannot be reached: refused"):
        await patient.reply
    with pytest.raises(exceptions.ConnectionError):
        await other.reply
