"""How many tokens a message takes: counted by tiktoken where it is installed, else estimated.

The encodings are loaded in the background, once per process; until one is there, and where it
is not available (tiktoken downloads it at its first use), the estimate is used.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from stepfleet.orchestrator.memory.pruning import OVERHEAD, Count, estimate_tokens
from stepfleet.orchestrator.records import exact_json
from stepfleet.orchestrator.records.conversation.messages import Message

log = logging.getLogger(__name__)

LONGEST_COUNTED = 100_000
"""Characters; a longer text is estimated, for encoders may take seconds for it."""
REMEMBERED = 65_536
Encode = Callable[[str], list[int]]


class TokenCounters:
    """Counts tokens as the models of one process do. Safe to use from several threads."""

    def __init__(self) -> None:
        self._counts: dict[str, Count] = {}
        self._loading: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()

    def of(self, model: str) -> Count:
        """Return what counts the tokens of a message for `provider:name`. Never waits."""
        count = self._counts.get(model)
        return count or self._begin(model)

    def ready(self, model: str, timeout: float) -> Count:
        """Return the same, after waiting up to `timeout` seconds for its encoding."""
        self.of(model)
        if thread := self._loading.get(model):
            thread.join(timeout)
        return self.of(model)

    def _begin(self, model: str) -> Count:
        provider, _, name = model.partition(":")
        if provider != "openai":
            self._counts[model] = estimate_tokens
            return estimate_tokens
        with self._lock:
            if model not in self._loading:
                # A daemon: a download that hangs must not keep a worker from ending.
                thread = threading.Thread(target=self._load, args=(model, name), daemon=True)
                self._loading[model] = thread
                thread.start()
        return self._counts.get(model, estimate_tokens)

    def _load(self, model: str, name: str) -> None:
        encode = _encoder(name)
        self._counts[model] = _counting(encode) if encode else estimate_tokens


def _encoder(name: str) -> Encode | None:
    try:
        import tiktoken  # noqa: PLC0415 - an extra, and slow to import

        encoding: Any = tiktoken.encoding_for_model(name)
    except ImportError:
        return None
    except KeyError:
        return None  # another vendor's model over the same protocol
    except Exception as error:  # noqa: BLE001 - a download may fail in any way
        log.warning("tokens of %s are estimated: its encoding cannot be loaded: %s", name, error)
        return None
    encode: Encode = encoding.encode_ordinary
    return encode


def _counting(encode: Encode) -> Count:
    """Return a counter that remembers what it has counted: a conversation is counted once."""
    known: dict[tuple[int, int], int] = {}

    def tokens(text: str) -> int:
        if len(text) > LONGEST_COUNTED:
            return estimate_tokens(Message.user(text)) - OVERHEAD
        key = (hash(text), len(text))
        found = known.get(key)
        if found is None:
            if len(known) >= REMEMBERED:
                known.clear()
            found = known[key] = len(encode(text))
        return found

    def count(message: Message) -> int:
        if not isinstance(message.content, str):
            return estimate_tokens(message)
        total = OVERHEAD + tokens(message.content)
        for call in message.tool_calls:
            total += tokens(call.name) + tokens(exact_json.text(call.arguments))
        return total

    return count
