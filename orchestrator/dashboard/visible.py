"""Foreign texts on pages that Flower's own templates make. Pure. Ours have the same in `dom.js`."""


def visible(text: str) -> str:
    """Return a text whose characters can all be seen, as the command line shows it.

    Others could hide words, or turn around those beside them.
    """
    return "".join(
        one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text
    )
