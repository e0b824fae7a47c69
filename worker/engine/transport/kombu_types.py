"""The parts of kombu's Redis transport that this package builds on, as the type checker sees them.

kombu claims to be typed and is not; everything that leaves it here is ``Any``.
"""

from typing import Any

from kombu import serialization as _serialization
from kombu.transport import redis as _redis
from kombu.transport import virtual as _virtual
from kombu.utils import encoding as _encoding
from kombu.utils import json as _json
from kombu.utils import scheduling as _scheduling

StockChannel: Any = _redis.Channel
StockSentinelChannel: Any = _redis.SentinelChannel
StockTransport: Any = _redis.Transport
StockPoller: Any = _redis.MultiChannelPoller
StockMessage: Any = _virtual.Message
StockQoS: Any = _redis.QoS
VirtualQoS: Any = _virtual.QoS
fixed_order: Any = _scheduling.priority_cycle
loads: Any = _json.loads
dumps: Any = _json.dumps
to_text: Any = _encoding.bytes_to_str
add_serializer: Any = _serialization.register
