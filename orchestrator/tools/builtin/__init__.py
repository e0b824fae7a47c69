"""Tools that ship with the fleet, ready for an agent's list of tools."""

from stepfleet.orchestrator.tools.builtin.arithmetic import calculator
from stepfleet.orchestrator.tools.builtin.people import ask_person
from stepfleet.orchestrator.tools.builtin.times import current_time
from stepfleet.orchestrator.tools.builtin.web import http_get, http_get_from

__all__ = ["ask_person", "calculator", "current_time", "http_get", "http_get_from"]
