"""An agent whose tool reads the database."""

from django.db import close_old_connections

from shop.models import Product
from stepfleet import Agent, tool


@tool(read_only=True)
def stock(product: str) -> int:
    """Return how many pieces of a product are in stock."""
    close_old_connections()  # threads of tools live long; Django's own requests and tasks do this
    try:
        return Product.objects.filter(name=product).values_list("pieces", flat=True).first() or 0
    finally:
        close_old_connections()


clerk = Agent("clerk", model="openai:gpt-4o-mini", instructions="Answer briefly.", tools=[stock])
