"""Sends an answer, broken ones included. Must not know how it was chosen."""

import asyncio
import os
import socket
import struct

from aiohttp import web

from stepfleet.worker.testing.scenario.answer import Answer, Ending

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


async def send(request: web.BaseRequest, answer: Answer) -> web.StreamResponse:
    """Send the answer and end the connection in its way.

    Raises `ConnectionError` where the client has gone.
    """
    if answer.ending is Ending.SILENCE:
        await asyncio.Event().wait()  # until the client goes, which cancels this
    if answer.ending is Ending.COMPLETE and answer.length is not None:
        return await _send_whole(request, answer)
    response = web.StreamResponse(status=answer.status, headers=_headers(answer))
    if answer.pieces:
        await _send_pieces(request, response, answer)
    if answer.ending is Ending.RESET:
        await _reset(request)
    elif answer.ending is Ending.CLOSE:
        response.force_close()
    if answer.ending is not Ending.RESET:
        await response.write_eof()
    return response


async def _send_whole(request: web.BaseRequest, answer: Answer) -> web.StreamResponse:
    response = web.Response(
        status=answer.status, body=b"".join(answer.pieces), headers=_headers(answer)
    )
    await response.prepare(request)
    await response.write_eof()
    return response


async def _send_pieces(
    request: web.BaseRequest, response: web.StreamResponse, answer: Answer
) -> None:
    response.content_length = answer.length
    await response.prepare(request)
    if not answer.pause:
        await response.write(b"".join(answer.pieces))
        return
    for i, piece in enumerate(answer.pieces):
        if i:
            await asyncio.sleep(answer.pause)
        await response.write(piece)


def _headers(answer: Answer) -> dict[str, str]:
    return {"Content-Type": answer.content_type, **answer.headers}


async def _reset(request: web.BaseRequest) -> None:
    """Close the connection so that the client sees a reset, after what was already written."""
    transport = request.transport
    if transport is None or transport.is_closing():
        return
    while transport.get_write_buffer_size():  # noqa: ASYNC110 - transports report no such event
        await asyncio.sleep(0)
    # uvloop's own socket object sets no options: a second descriptor of the same socket does.
    known = transport.get_extra_info("socket")
    with socket.socket(fileno=os.dup(known.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()
