"""From a file of lines to submitted runs to results."""
