"""The conversation of a run with its model: messages, their blocks, the texts of tools."""
