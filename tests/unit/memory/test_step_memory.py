from support.runs.agent_records import a_failed_step, a_step

from stepfleet.orchestrator import LoggedStep, Message
from stepfleet.orchestrator.memory.window import StepMemory
from stepfleet.orchestrator.records.steps import StepType


def logged(number: int) -> LoggedStep:
    return LoggedStep(
        result=a_step(step=number), messages=(Message.assistant(f"thought {number}"),)
    )


def test_steps_become_messages_behind_the_system_prompt() -> None:
    """MEM-13"""
    memory = StepMemory("rules").with_step(logged(1)).with_step(logged(2))
    assert [one.text for one in memory.messages()] == ["rules", "thought 1", "thought 2"]
    assert StepMemory().messages() == ()


def test_steps_are_counted_and_the_last_is_known() -> None:
    """MEM-13"""
    memory = StepMemory.of("rules", [logged(1), logged(2)])
    assert (len(memory), memory.last_step) == (2, logged(2).result)
    assert (len(StepMemory()), StepMemory().last_step) == (0, None)


def test_steps_can_be_filtered() -> None:
    """MEM-13"""
    failed = LoggedStep(result=a_failed_step(2))
    memory = StepMemory.of("rules", [logged(1), failed, logged(3)])
    kept = memory.filter(lambda step: step.type is not StepType.ERROR)
    assert (len(kept), len(memory)) == (2, 3)


def test_clearing_the_steps_keeps_the_system_prompt() -> None:
    """MEM-13"""
    memory = StepMemory.of("rules", [logged(1)]).without_steps()
    assert [one.text for one in memory.messages()] == ["rules"]
    assert len(memory) == 0
