"""Text of others' code made fit to be stored: what is no valid Unicode cannot be written as JSON.

Knows no record.
"""


def well_formed(text: str) -> str:
    """Return `text` with every lone surrogate replaced by its escape; mostly `text` itself."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text
