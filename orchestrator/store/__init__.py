"""The only code that talks to Redis about runs: see `store.Store`. Lua lies in rooms of `scripts/`."""
