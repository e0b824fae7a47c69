"""The only code that talks to Redis about runs. Lua scripts lie in rooms of `scripts/`."""
