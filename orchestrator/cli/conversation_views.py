"""What `show --chat` prints: a run's conversation, in one piece or while it goes on."""

from pathlib import Path

from rich.live import Live

from stepfleet.orchestrator.cli.conversations import conversation, whole_view
from stepfleet.orchestrator.cli.fleet_access import with_fleet
from stepfleet.orchestrator.cli.output import print_json, print_json_line, screen
from stepfleet.orchestrator.fleet import AsyncFleet


def show_conversation(run_id: str, data: Path, *, json: bool, full: bool, follow: bool) -> None:
    """Print what was said in a run; with `follow` as it is said, until the run has ended.

    Followed with `json`, each line is the list of all messages at that moment.
    """

    async def show(fleet: AsyncFleet) -> None:
        if follow and json:
            async for messages in fleet.display(run_id, continuation=True):
                print_json_line([message.to_dict() for message in messages])
            return
        if follow:
            with Live(console=screen(), auto_refresh=False, transient=True) as window:
                async for messages in fleet.display(run_id, continuation=True):
                    window.update(conversation(messages, full=full), refresh=True)
        view = await fleet.view(run_id)
        if json:
            print_json(view.to_dict())
        else:
            screen().print(whole_view(view, full=full))

    with_fleet(data, show, waits=follow)
