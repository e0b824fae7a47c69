"""Flower's own pages of tasks: links to runs, the step's own error, columns that fit, safe headers.

Knows tasks by their label and arguments only: `agent: step 3` of `[run, 2]`.
"""

import ast
import re
from typing import Any, ClassVar

from flower.options import options
from flower.urls import handlers, settings
from flower.views.tasks import TasksDataTable
from tornado import web
from tornado.escape import xhtml_escape
from tornado.httputil import HTTPHeaders

from stepfleet.orchestrator.dashboard.access import AccessRole, visible
from stepfleet.orchestrator.dashboard.roles import role_of

COLUMNS = "name,args,state,result,received,runtime,uuid"
"""Columns of the list of tasks: the run and the step's outcome, before Celery's own id."""
SHOWN = 40
"""Characters of a failure in the list of tasks; a task's own page has all of it."""
LONGEST = 2_000
"""Characters of an event's text that is looked at: anybody who reaches the broker may send one."""

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?:\.[0-9a-f]{10}){0,8}"
_ARGS = re.compile(rf"[\[(]'({_UUID})', (\d{{1,9}})(?:, \d{{1,9}})?[\])]")
_LABEL = re.compile(r".*: step (\d{1,9})(?:, .*)?", re.DOTALL)
_TEXT = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_RESULT = re.compile(_TEXT, re.DOTALL)
_RAISED = re.compile(rf"(?:StepFailed|CallFailed)\({_TEXT}\)", re.DOTALL)
_ROWS = b"""<dl class="detail-list">"""
_ROW = b"""<dl class="detail-list">
      {% set run = run_of_task(task) %}
      {% if run %}
      <div class="detail-row task-data-row">
        <dt>Run</dt>
        <dd><a href="{{ page_of_run(run) }}">{{ run }}</a></dd>
      </div>
      {% end %}"""
_UNSAFE = ("exception", "exchange", "routing_key", "expires", "eta")
"""Columns of a list that Flower's script shows as HTML."""
_TEXTS = ("name", "args", "kwargs", "result", "exception", "traceback")


def run_of(task: Any) -> str | None:
    """Return the run of Flower's copy of a task; None for a task that is none of ours."""
    name, args = (str(getattr(task, field, None) or "")[:LONGEST] for field in ("name", "args"))
    label, hint = _LABEL.fullmatch(name), _ARGS.fullmatch(args)
    ours = label and hint and int(label[1]) == int(hint[2]) + 1
    return hint[1] if hint and ours else None


def readable(task: Any) -> Any:
    """Return `task`, Flower's copy of one, with its own error, also where a result would be.

    Texts have no characters that cannot be seen.
    """
    if run_of(task):
        task.exception = _plain(_RAISED, task.exception)
        task.result = _plain(_RESULT, task.result)
    if task.exception and not task.result:
        cut = len(task.exception) > SHOWN
        task.result = f"{task.exception[: SHOWN - 1]}…" if cut else task.exception
    for name in _TEXTS:
        if isinstance(text := getattr(task, name, None), str):
            setattr(task, name, visible(text))
    return task


def _plain(pattern: re.Pattern[str], text: Any) -> Any:
    """Return the text whose literal a field holds; others as they are."""
    found = pattern.fullmatch(str(text)[:LONGEST])
    return ast.literal_eval(found[1]) if found else text


def with_link(page: bytes) -> bytes:
    """Return Flower's template of a task's page with a link to the run."""
    return page.replace(_ROWS, _ROW, 1)


def page_of(path: str) -> str:
    """Return the address of a page, behind Flower's prefix."""
    prefix = (options.url_prefix or "").strip("/")
    return f"/{prefix}{path}" if prefix else path


class SafeTable(TasksDataTable):
    """The rows of Flower's list of tasks. Texts of tasks and errors are escaped."""

    needs: ClassVar = AccessRole.VIEWER  # its POST reads

    def format_task(self, task: Any) -> Any:
        """Return a task's id and Flower's copy of it."""
        uuid, shown = super().format_task(task)
        for name in _UNSAFE:
            if isinstance(text := getattr(shown, name, None), str):
                setattr(shown, name, xhtml_escape(text))
        return uuid, shown


class SafeHeaders(web.OutputTransform):
    """Gives every answer of Flower the headers that it lacks: no other site frames its buttons."""

    def transform_first_chunk(
        self, status_code: int, headers: HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, HTTPHeaders, bytes]:
        """Return the answer with its headers."""
        del finishing
        headers.setdefault("Content-Security-Policy", "frame-ancestors 'self'")
        headers.setdefault("X-Content-Type-Options", "nosniff")
        headers.setdefault("Referrer-Policy", "same-origin")
        return status_code, headers, chunk


def adapt() -> None:
    """Change Flower's own pages, before its application is made. What a user has chosen stays."""
    handlers.insert(0, web.url(r"/tasks/datatable", SafeTable))
    settings["ui_methods"] = {
        "run_of_task": lambda _, task: run_of(task),
        "page_of_run": lambda _, run: page_of(f"/runs/{run}"),
        "role_of_user": role_of,
    }
    settings["transforms"] = [SafeHeaders]
    if options.format_task is None:
        options.format_task = readable
    if options.tasks_columns == options._options["tasks-columns"].default:  # noqa: SLF001 - Tornado
        options.tasks_columns = COLUMNS
