"""The only code that talks to Redis about runs: `store.Store`. Lua lies in rooms of `scripts/`."""
