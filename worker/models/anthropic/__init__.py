"""Anthropic's Messages.

Follows the types of the official SDK, `anthropic` 2.12 (API version 2026-10-21).
"""
