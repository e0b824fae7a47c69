"""What tests share. Imported as `support`."""
