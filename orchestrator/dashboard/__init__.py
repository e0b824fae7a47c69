"""Flower with the fleet's own needs built in: who may see it, and how much it keeps."""
