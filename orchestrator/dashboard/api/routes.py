"""The addresses of the API, and its description in OpenAPI, made from the records."""

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from tornado import web

from stepfleet.orchestrator.batches.check import BatchCheck
from stepfleet.orchestrator.batches.failures import Failures
from stepfleet.orchestrator.dashboard.api.actions import (
    ActionHandler,
    Approvals,
    BatchAction,
    Decide,
    FleetAction,
    LimitAction,
    RunAction,
    RunsAction,
)
from stepfleet.orchestrator.dashboard.api.handling import ApiHandler, Site
from stepfleet.orchestrator.dashboard.api.reads import (
    KIND,
    KINDS,
    AuditOf,
    BatchesOf,
    CostsOf,
    FleetFailures,
    FleetState,
    OneBatch,
    ResultsOf,
    Run,
    Runs,
    RunsExport,
    TextOf,
    WorkersOf,
)
from stepfleet.orchestrator.dashboard.api.records import (
    ActionResult,
    AuditPage,
    BatchReport,
    Change,
    FleetReport,
    Problem,
    SubmissionResult,
    WaitingPage,
    WorkersReport,
)
from stepfleet.orchestrator.dashboard.api.submission import SubmittedFile
from stepfleet.orchestrator.records.batch import BatchPage
from stepfleet.orchestrator.records.ledger import Costs
from stepfleet.orchestrator.records.run.summary import RunPage, RunTimeline

PREFIX = "/api/stepfleet"
_ID = "{id}"
_UUID = r"([0-9a-fA-F-]{36}(?:\.[0-9a-f]{10}){0,8})"
"""Of a run below another one, too."""
_NAME = r"([^/]{1,200})"
_READS: dict[str, tuple[type[ApiHandler], type[BaseModel]]] = {
    "/runs": (Runs, RunPage),
    f"/runs/{_ID}": (Run, RunTimeline),
    "/batches": (BatchesOf, BatchPage),
    f"/batches/{_ID}": (OneBatch, BatchReport),
    "/fleet": (FleetState, FleetReport),
    "/workers": (WorkersOf, WorkersReport),
    "/failures": (FleetFailures, Failures),
    "/costs": (CostsOf, Costs),
    "/audit": (AuditOf, AuditPage),
    "/approvals": (Approvals, WaitingPage),
}
_FILES: dict[str, type[BaseModel]] = {
    "/batches/check": BatchCheck,
    "/batches/submit": SubmissionResult,
}
_RESULTS = f"/batches/{_ID}/results"
_TEXT = f"/runs/{_ID}/text"
_ACTIONS: dict[str, type[ActionHandler]] = {
    "/runs/{action}": RunsAction,
    f"/runs/{_ID}/{{action}}": RunAction,
    f"/batches/{_ID}/{{action}}": BatchAction,
    f"/limits/{_ID}/{{action}}": LimitAction,
    "/fleet/{action}": FleetAction,
    "/approvals/{action}": Decide,
}
_EXPORT = "/runs/export"
_LIVE = {
    "summary": "Changes, as server-sent events named `change`: {topic, data}.",
    "parameters": [
        {
            "name": "topic",
            "in": "query",
            "description": "up to four of run:ID, batch:ID, text:ID and fleet",
            "required": True,
            "schema": {"type": "array", "items": {"type": "string"}},
        }
    ],
    "responses": {"200": {"description": "a stream", "content": {"text/event-stream": {}}}},
}


class OpenApi(ApiHandler):
    """The description of the API."""

    def get(self) -> None:
        """Answer with the document."""
        self.finish(document())


class Unknown(ApiHandler):
    """An address without a resource, as that of an id that no run can have."""

    def get(self) -> None:
        """Say so."""
        raise web.HTTPError(404, "there is no such resource; ids of runs and batches are UUIDs")

    post = get


def api_routes(site: Site) -> list[Any]:
    """Return the API's addresses."""
    patterns: dict[str, type[ApiHandler]] = {_EXPORT: RunsExport}
    patterns |= {"/batches/(check|submit)": SubmittedFile, _RESULTS.replace(_ID, _UUID): ResultsOf}
    patterns[_TEXT.replace(_ID, _UUID)] = TextOf
    for path, action in _ACTIONS.items():
        verbs = f"({'|'.join(action.verbs)})"
        ids = _NAME if action is LimitAction else _UUID
        patterns[path.replace(_ID, ids).replace("{action}", verbs)] = action
    patterns |= {path.replace(_ID, _UUID): one for path, (one, _) in _READS.items()}
    patterns |= {"/openapi.json": OpenApi, "(?:/.*)?": Unknown}
    given = {"site": site}
    return [web.url(f"{PREFIX}{pattern}", one, given) for pattern, one in patterns.items()]


@cache
def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    answers = [answer for _, answer in _READS.values()]
    models: list[type[BaseModel]] = [*answers, *_FILES.values(), Change, ActionResult, Problem]
    _, schemas = models_json_schema(
        [(model, "serialization") for model in models],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {
        f"{PREFIX}{path}": {"get": _operation(handler, answer, path)}
        for path, (handler, answer) in _READS.items()
    }
    for path, handler in _ACTIONS.items():
        operation = _operation(handler, ActionResult, path)
        operation["requestBody"] = {"content": _json(Change)}
        paths[f"{PREFIX}{path}"] = {"post": operation}
    for path, answer in _FILES.items():
        operation = _operation(SubmittedFile, answer, path)
        operation["requestBody"] = {"content": _BYTES}
        paths[f"{PREFIX}{path}"] = {"post": operation}
    kinds = KINDS.values()
    sends = ((_EXPORT, RunsExport, kinds), (_RESULTS, ResultsOf, kinds), (_TEXT, TextOf, (KIND,)))
    for path, sent, sent_as in sends:
        operation = _operation(sent, RunPage, path)
        operation["responses"]["200"]["content"] = {kind: {} for kind in sent_as}
        paths[f"{PREFIX}{path}"] = {"get": operation}
    paths[f"{PREFIX}/live"] = {"get": _LIVE}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Stepfleet in Flower", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }


def _operation(handler: type[ApiHandler], answer: type[BaseModel], path: str) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "query",
            "description": one.about,
            "schema": {"type": one.kind},
        }
        for name, one in handler.parameters.items()
    ]
    text = {"type": "string"}
    if _ID in path:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": text})
    if issubclass(handler, ActionHandler):
        verbs = {**text, "enum": list(handler.verbs)}
        parameters.append({"name": "action", "in": "path", "required": True, "schema": verbs})
    problems = {
        str(status): {"description": why, "content": _json(Problem)} for status, why in _WHY
    }
    return {
        "summary": (handler.__doc__ or "").splitlines()[0],
        "parameters": parameters,
        "responses": {"200": {"description": "found", "content": _json(answer)}, **problems},
    }


_WHY = (
    (400, "a parameter is wrong"),
    (401, "not logged in"),
    (404, "there is none"),
    (503, "no Redis"),
)


_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
