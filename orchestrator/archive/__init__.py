"""Ended runs in files and object storage, where Redis need not hold them."""
