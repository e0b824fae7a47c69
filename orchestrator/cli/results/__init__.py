"""Files in and out: input files, results files, the way of a batch to its end."""
