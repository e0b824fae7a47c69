"""Task messages as they lie in a Redis broker, taken apart and forged. Knows no workers."""

import base64
import json
from collections.abc import Callable
from typing import Any

import redis

Message = dict[str, Any]


class BrokerQueue:
    """One queue of a Redis broker, with its messages in the order of their arrival."""

    def __init__(self, client: redis.Redis, name: str = "stepfleet") -> None:
        self._client = client
        self.name = name

    def take(self) -> list[bytes]:
        """Take all messages that wait."""
        with self._client.pipeline() as pipe:
            pipe.lrange(self.name, 0, -1)
            pipe.delete(self.name)
            return list(pipe.execute()[0])[::-1]

    def put(self, *raw: bytes) -> None:
        """Add messages behind the others."""
        for one in raw:
            self._client.lpush(self.name, one)

    def __len__(self) -> int:
        return int(self._client.llen(self.name))


def forged(raw: bytes, change: Callable[[Message, list[Any]], None]) -> bytes:
    """Return a message changed by `change(message, body)`; its body is written anew."""
    message: Message = json.loads(raw)
    body = json.loads(base64.b64decode(message["body"]))
    change(message, body)
    message["body"] = base64.b64encode(json.dumps(body).encode()).decode()
    return json.dumps(message).encode()


def quarantined(client: redis.Redis) -> list[dict[str, Any]]:
    """Return what the quarantine tells of its messages, the oldest first."""
    stored: list[bytes] = client.lrange("sf:quarantine", 0, -1)  # type: ignore[assignment]
    return [json.loads(one.partition(b"\n")[0]) for one in stored][::-1]
