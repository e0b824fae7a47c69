"""The HTTP side of the model server."""
