"""Flower with access control, bounded memory, and a page about refused messages."""
