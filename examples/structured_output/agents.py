"""An agent whose answer is data of a type; the model is told what does not fit, and mends it."""

from pydantic import BaseModel, Field

from stepfleet import Agent


class Order(BaseModel):
    """What somebody orders."""

    product: str
    pieces: int = Field(ge=1)


clerk = Agent(
    "clerk",
    model="openai:gpt-4o-mini",
    instructions="Read the order. The number of pieces is at least one.",
    output_type=Order,
    max_steps=5,
)
