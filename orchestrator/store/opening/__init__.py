"""Opens a store or a broker from the settings."""
