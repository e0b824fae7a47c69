"""Random numbers that depend on what they are for, and never on the order of requests. Pure."""

import hashlib

_BYTES = 8


def draw(*parts: object) -> float:
    """Return a number from 0 up to 1, always the same for equal `parts`."""
    text = "\0".join(map(str, parts)).encode(errors="surrogatepass")
    digest = hashlib.blake2b(text, digest_size=_BYTES).digest()
    return int.from_bytes(digest) / (1 << 8 * _BYTES)


def name_of(*parts: object) -> str:
    """Return 24 hexadecimal digits, always the same for equal `parts`."""
    text = "\0".join(map(str, parts)).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=12).hexdigest()
