"""What commands print, from records."""
