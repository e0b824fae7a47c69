"""Results as rows: the fields of a row, rows on disk, and their way to CSV, Parquet and Arrow."""
