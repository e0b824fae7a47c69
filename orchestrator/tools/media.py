"""What a tool returns that also shows the model images or documents. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stepfleet.orchestrator.records.messages import Block


@dataclass(frozen=True, slots=True)
class WithMedia:
    """A tool's result together with content blocks that the model is shown.

    Providers take no images in a tool's answer: the blocks (`{"image": {"format": "png",
    "source": {"bytes": "<base64>"}}}`, see `records.blocks`) stand in a user message behind the
    results of the turn. `result` and the blocks are bounded as any result is.
    """

    result: Any
    media: Sequence[Block] = ()
