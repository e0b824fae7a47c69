"""Carries events out of the fleet: to pub/sub channels, to webhooks, to functions.

Decides who is told, how often and in which order. Knows no step: what is told was committed before.
"""
