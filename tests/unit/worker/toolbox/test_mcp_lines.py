"""Lines of servers that have no end: what is beyond the limit is left out, and the next is read."""

import codecs
import random

from stepfleet.worker.toolbox.mcp.limits import ENCODING, MAX_LINE, register_lines


def decoded(*pieces: bytes) -> str:
    register_lines()
    decoder = codecs.getincrementaldecoder(ENCODING)("strict")
    return "".join([decoder.decode(piece) for piece in pieces]) + decoder.decode(b"", final=True)


def test_lines_are_utf_8_wherever_they_are_cut() -> None:
    text = "Grüße\n日本\n\n" * 50
    data, seed = text.encode(), random.Random(7)
    cuts = sorted(seed.sample(range(len(data)), 40))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert decoded(*pieces) == text


def test_the_rest_of_a_line_that_is_too_long_is_left_out() -> None:
    piece = b"x" * (1024 * 1024)
    text = decoded(b"one\n", *([piece] * 40), b"x\ntwo\n")
    assert [len(line) for line in text.split("\n")] == [3, MAX_LINE, 3, 0]
    assert text.endswith("\ntwo\n")


def test_a_message_may_have_the_limit() -> None:
    line = b"x" * MAX_LINE + b"\n"
    assert len(decoded(line, line)) == 2 * len(line)


def test_what_is_sent_is_utf_8() -> None:
    register_lines()
    assert "Grüße".encode(ENCODING) == "Grüße".encode()
