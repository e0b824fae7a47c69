"""Decides what happens: records, policies, the store, submission, the command line."""
