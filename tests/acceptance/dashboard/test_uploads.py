"""Large and slow files that are uploaded to Flower: its memory, its other pages, its places."""

import base64
import sys
import threading
import time
from http.client import HTTPConnection

import pytest
from support.deadlines import wait_until
from support.servers.flower_site import AUTH, Site
from support.workers.command_line import CommandLine

MEGABYTE = 2**20
LONG = 600.0
LINE = b'{"id": "%08d", "input": "What is this?", "agent": "nobody"}\n'
CHECK = "/batches/check?name=lines.jsonl"


def begun(site: Site, size: int) -> HTTPConnection:
    """Return a request for a check whose body of `size` bytes is still to be sent."""
    connection = HTTPConnection("127.0.0.1", site.port, timeout=LONG)
    connection.putrequest("POST", site.address(CHECK))
    connection.putheader("Authorization", f"Basic {base64.b64encode(AUTH.encode()).decode()}")
    connection.putheader("Content-Length", str(size))
    connection.endheaders()
    return connection


def uploaded(site: Site, body: bytes) -> tuple[int, str]:
    """Return status and text of the answer to a file."""
    connection = begun(site, len(body))
    try:
        connection.send(body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b"".join(LINE % n for n in range(127 * MEGABYTE // len(LINE % 0))), '"good":0'),
        (b"x\n" * (64 * MEGABYTE), "more than 3,000,000 lines"),
    ],
    ids=["usual", "short"],
)
def test_a_file_of_128_mb_leaves_memory_and_the_loop_to_others(
    site: Site, commands: CommandLine, body: bytes, found: str
) -> None:
    (flower,) = commands.running("stepfleet.orchestrator.cli")
    before = flower.memory_info().rss
    answers: list[tuple[int, str]] = []
    upload = threading.Thread(target=lambda: answers.append(uploaded(site, body)))
    upload.start()
    waits, most = [0.0], 0
    while upload.is_alive():
        begin = time.monotonic()
        assert site.api("/runs?limit=1")[0] == 200
        waits.append(time.monotonic() - begin)
        most = max(most, flower.memory_info().rss - before)
    upload.join()
    median = sorted(waits)[len(waits) // 2]
    sys.stdout.write(
        f"{len(body) / MEGABYTE:.0f} MB: Flower's memory grew by {most / 1e6:.0f} MB; another page "
        f"took {median * 1e3:.0f} ms, at most {max(waits) * 1e3:.0f} ms, {len(waits)} times\n"
    )
    assert found in answers[0][1]
    assert most < 100 * MEGABYTE
    assert max(waits) < 5


@pytest.mark.long
@pytest.mark.timeout(300)
def test_files_that_come_too_slowly_leave_their_places(site: Site) -> None:
    """Four of them take all places; the next one is refused until they had their time."""
    slow = [begun(site, MEGABYTE) for _ in range(4)]
    wait_until(lambda: uploaded(site, LINE % 1)[0] == 503, within=20, what="no place")

    def is_free() -> bool:
        for connection in slow:
            connection.send(b"\n")
        return uploaded(site, LINE % 1)[0] != 503

    wait_until(is_free, within=90, what="a place")
    for connection in slow:
        answer = connection.getresponse()
        assert (answer.status, b"64 KiB per second" in answer.read()) == (408, True)
        connection.close()
