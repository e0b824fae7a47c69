"""A run as a chat window shows it: the reference renderer, from stored records or live events.

Decides what is shown and in which form; knows no terminal, no HTTP and no store. Pure.
"""

from stepfleet.orchestrator.client.rendering.history import (
    ErrorBanner,
    Recorded,
    RunView,
    rendered,
    view_of,
)
from stepfleet.orchestrator.client.rendering.live import LiveMessages, reconciled
from stepfleet.orchestrator.client.rendering.messages import (
    StatusType,
    UIContinuation,
    UIMessage,
    UIMetadata,
    UIRetry,
    UIRole,
    UIToolCall,
    indicator,
    should_render_assistant_content,
)

__all__ = [
    # what is shown
    "StatusType",
    "UIContinuation",
    "UIMessage",
    "UIMetadata",
    "UIRetry",
    "UIRole",
    "UIToolCall",
    # from records
    "ErrorBanner",
    "Recorded",
    "RunView",
    "rendered",
    "view_of",
    # live
    "LiveMessages",
    "reconciled",
    "indicator",
    "should_render_assistant_content",
]
