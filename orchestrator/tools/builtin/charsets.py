"""Decodes a page's bytes by the charset that it names, if that is one of the usual ones.

Python knows others too. Some take quadratic time (`punycode`: 90 s for 1 MB), and some are no
charsets at all; a page in one of those is read as UTF-8.
"""

import asyncio
import codecs
import re
from encodings import normalize_encoding
from encodings.aliases import aliases

CHUNK = 32 * 1024
"""Bytes that are decoded at once: a few milliseconds in the slowest charset."""

_DEFAULT = "utf_8"
_MARKS = {
    codecs.BOM_UTF8: "utf_8_sig",
    codecs.BOM_UTF32_LE: "utf_32",
    codecs.BOM_UTF32_BE: "utf_32",
    codecs.BOM_UTF16_LE: "utf_16",
    codecs.BOM_UTF16_BE: "utf_16",
}
_WITHOUT_MARK = {"utf_16": "utf_16_le", "utf_32": "utf_32_le"}
_NAMED = re.compile(r"""charset\s*=\s*["']?([A-Za-z0-9._:-]{1,40})""", re.IGNORECASE)
_LONGEST_TYPE = 1000
_ALLOWED = frozenset(
    {
        *("ascii", "utf_8", "utf_8_sig", "latin_1"),
        *("utf_16_be", "utf_16_le", "utf_32_be", "utf_32_le"),
        *(f"iso8859_{part}" for part in range(1, 17) if part != 12),  # noqa: PLR2004 - there is none
        *(f"cp125{part}" for part in range(9)),
        *("cp437", "cp850", "cp852", "cp866", "cp874", "tis_620"),
        *("koi8_r", "koi8_u", "mac_roman", "mac_cyrillic"),
        *("shift_jis", "cp932", "euc_jp", "iso2022_jp"),
        *("gb2312", "gbk", "gb18030", "big5", "big5hkscs", "cp950"),
        *("euc_kr", "cp949"),
    }
)


def charset_of(content_type: str) -> str:
    """Return the codec of a Content-Type header: an allowed one, else that of UTF-8."""
    named = _NAMED.search(content_type[:_LONGEST_TYPE])
    if named is None:
        return _DEFAULT
    name = normalize_encoding(named.group(1)).lower()
    codec = aliases.get(name, name)
    codec = _WITHOUT_MARK.get(codec, codec)
    return codec if codec in _ALLOWED else _DEFAULT


async def decoded(body: bytes, charset: str) -> str:
    """Return the text of a body, with U+FFFD for unreadable bytes; a byte order mark decides.

    Yields to the event loop between chunks. `charset` is the result of `charset_of`.
    """
    marked = next((codec for mark, codec in _MARKS.items() if body.startswith(mark)), charset)
    decoder = codecs.getincrementaldecoder(marked)("replace")
    parts = []
    for at in range(0, len(body), CHUNK):
        parts.append(decoder.decode(body[at : at + CHUNK]))
        await asyncio.sleep(0)
    parts.append(decoder.decode(b"", True))  # noqa: FBT003 - the codec's own signature
    return "".join(parts).encode("utf-8", "replace").decode()
