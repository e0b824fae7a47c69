"""The article of a word in a message. Pure."""


def with_article(word: str) -> str:
    """Return `an Agent`, `a list`."""
    return f"{'an' if word[:1].lower() in 'aeio' else 'a'} {word}"
