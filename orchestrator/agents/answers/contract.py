"""The answer contract as a reasoner: the tools on offer, the calls that answer, answers as text.

Knows neither stores nor workers. The answer so far is in the run's state.
"""

from collections.abc import Iterable, Sequence

from stepfleet.orchestrator.agents.answers.definitions import (
    LARGEST,
    Continue,
    ErrorSink,
    Outcome,
    RecordsSink,
    ReturnAnswer,
    SpecialTool,
    correction,
    final_answer,
    invalid,
    mending,
    paragraph,
    problems_of_data,
    reminder,
    structured_response,
    text_in_place,
)
from stepfleet.orchestrator.agents.reasoner import (
    HandledCalls,
    ModelTurn,
    Reasoner,
    joined,
    with_paragraph,
)
from stepfleet.orchestrator.continuation import CanDecideToContinue
from stepfleet.orchestrator.continuation.guards import ALLOW, FORBID, REQUEST, evaluation
from stepfleet.orchestrator.errors import ToolNotFoundError
from stepfleet.orchestrator.records.calls.tools import NOT_EXECUTED, ToolCall, ToolCallRecord
from stepfleet.orchestrator.records.conversation.messages import Message
from stepfleet.orchestrator.records.errors import ErrorInfo, ErrorType, refused_answer
from stepfleet.orchestrator.records.outcome import (
    ContinuationDecision,
    ContinuationEvaluation,
    RunAnswer,
    StopReason,
)
from stepfleet.orchestrator.records.responses import LLMResponse, ModelRequest, OutputFormat
from stepfleet.orchestrator.records.state import AgentState
from stepfleet.orchestrator.records.steps import FinishReason, Progress, StepType
from stepfleet.orchestrator.tools.schemas.bounded_json import BoundsError, read_data
from stepfleet.orchestrator.tools.schemas.handles import SchemaHandle

DEFAULT_TEXT = "The answer was given as structured data."
ACCEPTED = "accepted"
NOTED = "noted"
MIXED = "must be the only call of its turn; nothing was run"


class AnswerContract(Reasoner):
    """Requires an answer of a model: text by `final_answer`, or data of a schema.

    `native` takes data from the message itself, which the provider writes as JSON of the schema.
    Else a message without calls is taken where it is such data as a whole, unless `by_tool_alone`.
    `specials` are the agent's own; alone they require nothing. `has_tools`: the agent has others;
    without them every call is meant as an answer, whatever its name.
    """

    def __init__(
        self,
        schema: SchemaHandle | None = None,
        *,
        required: bool = True,
        native: bool = False,
        by_tool_alone: bool = False,
        specials: Iterable[SpecialTool] = (),
        has_tools: bool = True,
    ) -> None:
        native = native and schema is not None
        own = tuple(specials)
        answers = (final_answer(schema), structured_response(schema)) if required else ()
        offered = [] if native or not required else [answers[1 if schema else 0]]
        self._schema = schema
        self._required = required
        self._has_tools = has_tools
        self._native = native
        self._reads_text = schema if native or not by_tool_alone else None
        self._specials = {one.name: one for one in (*answers, *own)}
        self._specs = tuple(one.spec for one in (*offered, *own))
        self._paragraph = paragraph(schema, native=native) if required else ""
        self._reminder = reminder(schema)
        self._output = (
            OutputFormat(name=schema.name, json_schema=schema.schema) if schema and native else None
        )
        self._check = AnswerContractCheck(required=required)

    async def prepare(self, request: ModelRequest, state: AgentState) -> ModelRequest:  # noqa: ARG002
        """Offer the special tools, add the instructions, and request JSON in native mode."""
        return request.model_copy(
            update={
                "tools": (*request.tools, *self._specs),
                "messages": with_paragraph(request.messages, self._paragraph),
                "output": self._output or request.output,
            }
        )

    def handle(self, response: LLMResponse, state: AgentState) -> HandledCalls | None:
        """Answer the turn's special calls."""
        calls = response.tool_calls or ()
        if not any(call.name in self._specials for call in calls):
            return None if self._has_tools or not self._required else self._unknown(calls, state)
        if len(calls) > 1:
            sinks = [RecordsSink(state.info.updated_at) for _ in calls]
            for call, sink in zip(calls, sinks, strict=True):
                refuse_mixed(call, self._specials, sink)
            return HandledCalls(_by_index(calls, sinks), Progress(refused=refused_answer(MIXED)))
        call, sink = calls[0], RecordsSink(state.info.updated_at)
        outcome = self._specials[call.name].take(call, state, sink)
        if call.id not in sink.records:
            sink.report_observation(call, NOTED if isinstance(outcome, Continue) else ACCEPTED)
        progress = progress_of(outcome, state)
        error = sink.records[call.id].error if isinstance(outcome, Continue) else None
        if error is not None:
            why = error.message.removeprefix(f"{call.name}: ") + _ended_by(response)
            progress = joined(progress, Progress(refused=refused_answer(why)))
        return HandledCalls(_by_index(calls, [sink]), progress)

    def _unknown(self, calls: Sequence[ToolCall], state: AgentState) -> HandledCalls | None:
        """Refuse calls of an agent that has no tools but those of its answer."""
        if not calls:
            return None
        names = ", ".join(one.name for one in self._specs)
        hint = f"on offer: {names}" if names else "answer without a call"
        sinks = [RecordsSink(state.info.updated_at) for _ in calls]
        errors = [ToolNotFoundError(f"tool {one.name!r} does not exist; {hint}") for one in calls]
        for call, error, sink in zip(calls, errors, sinks, strict=True):
            sink.report_error(call, error.to_info())
        refused = refused_answer(errors[0].message)
        return HandledCalls(_by_index(calls, sinks), Progress(refused=refused))

    async def read(self, turn: ModelTurn, state: AgentState) -> Progress | None:
        """Take text without calls as the answer where it is one, else say what is wrong."""
        if not self._required:
            return None
        text = turn.response.content
        if turn.response.tool_calls:
            return Progress(is_preamble=True) if text else None
        taken = self._taken(text, state)
        if isinstance(taken, RunAnswer):
            return Progress(answer=taken)
        told, why = taken
        return Progress(
            messages=(Message.added(told, "contract"),),
            refused=refused_answer(why + _ended_by(turn.response)),
            is_preamble=self._schema is not None,
        )

    def criteria(self) -> tuple[CanDecideToContinue, ...]:
        """Return the criterion that ends a run once it has answered."""
        return (self._check,)

    def _taken(self, text: str, state: AgentState) -> RunAnswer | tuple[str, str]:
        """Return the answer that a message is, or what the model is told and why it is none."""
        schema = self._reads_text
        if schema is None:
            return self._reminder, text_in_place(self._schema)
        try:
            data = read_data(text, limit=LARGEST)
        except BoundsError as error:
            if self._native:
                return correction(str(error)), str(error)
            return self._reminder, text_in_place(schema)
        if problems := problems_of_data(schema, data):
            return correction(problems) if self._native else mending(problems), problems
        before = state.answer.text if state.answer else None
        return RunAnswer(
            text=before or text,
            structured=schema.answer(data),
            schema_name=schema.type_name,
            final=True,
        )


class AnswerContractCheck:
    """Forbids more work, as completed, once the answer is given; requests it until then.

    Where no answer is `required`, it allows more work before one is given.
    """

    def __init__(self, *, required: bool) -> None:
        self.required = required

    def decide(self, state: AgentState) -> ContinuationDecision:
        """Forbid, request or allow."""
        if state.answer is not None and state.answer.final:
            return FORBID
        return REQUEST if self.required else ALLOW

    def explain(self, state: AgentState) -> ContinuationEvaluation:
        """Return the decision with the state of the answer."""
        decision = self.decide(state)
        answer = state.answer
        given = answer is not None and answer.text is not None
        if decision is FORBID:
            reason = "the answer was given"
        elif state.current_step is not None and state.current_step.refused:
            reason = state.current_step.refused
        elif given:
            reason = "the answer's text was given, its data is awaited"
        else:
            reason = "no answer was given yet"
        context = {"given": given, "final": decision is FORBID, "required": self.required}
        stop_reason = StopReason.COMPLETED if decision is FORBID else None
        return evaluation(self, decision, reason, context, stop_reason)


def refuse_mixed(call: ToolCall, specials: Iterable[str], sink: ErrorSink) -> None:
    """Report the error of one call of a turn that mixes an answer with other calls."""
    if call.name in specials:
        sink.report_error(call, invalid(call.name, f"{MIXED}. Call it again, alone"))
        return
    why = "not run: the same turn gave an answer. Call it again without one, if you still need it"
    sink.report_error(call, ErrorInfo(type=ErrorType.TOOL, code=NOT_EXECUTED, message=why))


def progress_of(outcome: Outcome, state: AgentState) -> Progress | None:
    """Return the changes of an outcome to the state."""
    if isinstance(outcome, Continue):
        pending = outcome.pending
        return Progress(answer=RunAnswer(text=pending)) if pending is not None else None
    if isinstance(outcome, ReturnAnswer):
        answer = RunAnswer(text=outcome.text, final=True)
    else:
        before = state.answer.text if state.answer else None
        answer = RunAnswer(
            text=outcome.text or before or DEFAULT_TEXT,
            structured=outcome.structured,
            schema_name=outcome.schema_name,
            final=True,
        )
    return Progress(answer=answer, step_type=StepType.FINAL_RESPONSE)


def _ended_by(response: LLMResponse) -> str:
    """Return what cut an answer's end off, in words."""
    if response.finish_reason is FinishReason.LENGTH:
        return ". It was cut at its limit of tokens: raise settings.max_tokens"
    return ""


def _by_index(calls: Sequence[ToolCall], sinks: Sequence[RecordsSink]) -> dict[int, ToolCallRecord]:
    pairs = enumerate(zip(calls, sinks, strict=True))
    return {index: sink.records[call.id] for index, (call, sink) in pairs}
