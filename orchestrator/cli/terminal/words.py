"""Messages of the library in the words of the command line: options for arguments. Pure."""

import re

_WORDS = (
    (re.compile(r"\b(retry|send) with (\w+)="), r"--raise \2="),
    (re.compile(r"\b(fork|restore) with (\w+)="), r"--set \2="),
    (re.compile(r"\bskip_invalid=True\b"), "--skip-invalid"),
    (re.compile(r"\(at=(\d+)\)"), r"(--at \1)"),
    (re.compile(r"\(agent=\.\.\.\)"), "(--agent)"),
    (re.compile(r"\bgive page=N\b"), "give --page N"),
    (
        re.compile(r"\bor for the whole batch with agent=\.\.\."),
        "or for all lines with --agent NAME",
    ),
    (re.compile(r"or pass the agent itself"), "or name its module here: --agents MODULE"),
    (
        re.compile(r"\brestore with the agent that shall go on\b"),
        "name one that shall go on: --agent",
    ),
)


def in_cli_words(message: str) -> str:
    """Return an error's message with the options that do what its arguments would."""
    for pattern, option in _WORDS:
        message = pattern.sub(option, message)
    return message
