"""Shows whole runs on a page: served while they go on, or written as one file."""
