"""The commands as users type them: names, options, help. What they do is imported when they run."""
