"""What the shop has."""

from django.db import models


class Product(models.Model):
    """A product, and how many pieces of it are in stock."""

    name = models.CharField(max_length=100, unique=True)
    pieces = models.IntegerField(default=0)

    def __str__(self) -> str:
        """Return its name."""
        return self.name
