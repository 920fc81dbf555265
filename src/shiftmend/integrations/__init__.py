"""Adapters to other libraries, one file each, imported only by whoever uses them."""
