"""Several reasoners as one: requests pass through all, and what they make of a turn is joined."""

from support.runs.agent_records import START, a_state

from stepfleet.orchestrator import (
    AgentState,
    ContinuationDecision,
    LLMResponse,
    Message,
    ModelRequest,
    ToolCall,
    ToolCallRecord,
    when,
)
from stepfleet.orchestrator.agents.reasoner import (
    HandledCalls,
    ModelTurn,
    Reasoner,
    chain_of,
    joined,
)
from stepfleet.orchestrator.continuation import CanDecideToContinue
from stepfleet.orchestrator.records.outcome import RunAnswer
from stepfleet.orchestrator.records.steps import Progress, StepType

REQUEST = ModelRequest(model="m", messages=(Message.user("hello"),))
RESPONSE = LLMResponse(content="said", tool_calls=(ToolCall(id="c1", name="a"),))


def allows(_: AgentState) -> ContinuationDecision:
    return ContinuationDecision.ALLOW_CONTINUATION


class Noting(Reasoner):
    """Adds its name wherever a reasoner may add something."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def prepare(self, request: ModelRequest, state: AgentState) -> ModelRequest:
        return request.model_copy(update={"model": f"{request.model}+{self.name}"})

    def interpret(self, response: LLMResponse, state: AgentState) -> LLMResponse:
        return response.model_copy(update={"content": f"{response.content}+{self.name}"})

    def handle(self, response: LLMResponse, state: AgentState) -> HandledCalls:
        record = ToolCallRecord(tool_name="a", call_id="c1", result=self.name, timestamp=START)
        return HandledCalls({0: record}, Progress(custom_state={self.name: "handled"}))

    async def read(self, turn: ModelTurn, state: AgentState) -> Progress:
        return Progress(
            messages=(Message.user(self.name),),
            strategy_state={"last": self.name, self.name: 1},
        )

    def criteria(self) -> tuple[CanDecideToContinue, ...]:
        return (when(allows),)


async def test_a_reasoner_that_overrides_nothing_changes_nothing() -> None:
    plain = Reasoner()
    assert await plain.prepare(REQUEST, a_state()) is REQUEST
    assert plain.interpret(RESPONSE, a_state()) is RESPONSE
    assert plain.handle(RESPONSE, a_state()) is None
    assert await plain.read(ModelTurn(RESPONSE), a_state()) is None
    assert plain.criteria() == ()


async def test_requests_and_answers_pass_through_all_in_order() -> None:
    chain = chain_of(Noting("a"), None, Noting("b"))
    assert chain is not None
    assert (await chain.prepare(REQUEST, a_state())).model == "m+a+b"
    assert chain.interpret(RESPONSE, a_state()).content == "said+a+b"
    assert len(chain.criteria()) == 2


def test_a_call_belongs_to_the_first_that_handles_it() -> None:
    chain = chain_of(Noting("a"), Noting("b"))
    assert chain is not None
    handling = chain.handle(RESPONSE, a_state())
    assert handling is not None
    assert handling.records[0].result == "a"
    assert handling.progress is not None
    assert handling.progress.custom_state == {"a": "handled", "b": "handled"}


async def test_what_each_makes_of_the_turn_is_joined_in_order() -> None:
    chain = chain_of(Noting("a"), Noting("b"))
    assert chain is not None
    progress = await chain.read(ModelTurn(RESPONSE), a_state())
    assert progress is not None
    assert [message.text for message in progress.messages] == ["a", "b"]
    assert progress.strategy_state == {"last": "b", "a": 1, "b": 1}


def test_one_reasoner_needs_no_chain_and_none_needs_nothing() -> None:
    one = Noting("a")
    assert chain_of(None, one) is one
    assert chain_of(None, None) is None


def test_where_two_set_the_same_thing_the_later_wins() -> None:
    first = Progress(answer=RunAnswer(text="a"), step_type=StepType.TOOL_EXECUTION)
    second = Progress(answer=RunAnswer(text="b"))
    both = joined(first, second)
    assert both == Progress(answer=RunAnswer(text="b"), step_type=StepType.TOOL_EXECUTION)
    assert joined(first, None) is joined(None, first) is first
    assert joined(None, None) is None
