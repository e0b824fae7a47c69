"""Text in records: valid Unicode, without secrets, errors in one sentence."""
