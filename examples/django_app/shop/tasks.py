"""Tasks of the project's own, on the same workers."""

from celery import shared_task

from shop.models import Product


@shared_task
def restock(name: str, pieces: int) -> None:
    """Add pieces of a product."""
    product, _ = Product.objects.get_or_create(name=name)
    product.pieces += pieces
    product.save()
