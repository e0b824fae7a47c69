"""Which reply a request gets, and how late. Pure."""
