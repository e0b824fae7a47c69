"""No agents: receivers of Celery's signals, which a worker loads besides its agents.

`HEARD` names signals; what they say is a line each in the file that `EFFECTS` names.
"""

import os
from pathlib import Path
from typing import Any

from celery import signals


def listen(name: str) -> None:
    def receive(sender: Any = None, **told: Any) -> None:
        request = getattr(sender, "request", None) or told.get("request")
        line = f"{name} {getattr(request, 'id', None)} {told.get('task_id')}\n"
        with Path(os.environ["EFFECTS"]).open("a", encoding="utf-8") as file:
            file.write(line)

    getattr(signals, name).connect(receive, weak=False)


for heard in os.environ.get("HEARD", "").split():
    listen(heard)
