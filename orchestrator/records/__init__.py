"""Frozen records: everything that is stored or passed between rooms. No I/O."""
