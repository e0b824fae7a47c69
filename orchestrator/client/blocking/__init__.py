"""The fleet for code without an event loop: the same methods, run in a thread's loop."""
